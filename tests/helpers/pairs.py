"""Few combinations of the values of arguments, in which all pairs of values occur."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with arguments that are independent of each other.

    Each value of one argument occurs with each value of another, but three values occur together by chance only.
    """
    chosen = cover([len(found) for found in values.values()])
    rows = [tuple(found[i] for found, i in zip(values.values(), row, strict=True)) for row in chosen]
    return pytest.mark.parametrize(tuple(values), rows, ids=["-".join(map(str, row)) for row in rows])


def cover(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of numbers below ``sizes``, in which every two columns have all pairs: the first that have most new ones."""
    rows = list(product(*map(range, sizes)))
    of_row = [{(a, row[a], b, row[b]) for a, b in combinations(range(len(sizes)), 2)} for row in rows]
    missing, chosen = set().union(*of_row), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(of_row[i] & missing))
        missing -= of_row[best]
        chosen.append(rows[best])
    return chosen

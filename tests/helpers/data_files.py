"""Texts in the form of published files: the inverses of what ``data_prep`` does with them."""

from __future__ import annotations

from data_prep.dataset import Pair
from data_prep.mathematics import SPACE


def scan_line(pair: Pair) -> str:
    """The line of an official file of SCAN."""
    return f"IN: {pair.source} OUT: {pair.target}"


def detokenize(tokens: str) -> str:
    """The plain text of the Mathematics dataset that ``tokenize`` split into characters."""
    return tokens.replace(" ", "").replace(SPACE, " ")

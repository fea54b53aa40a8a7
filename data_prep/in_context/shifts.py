"""Tests whose prompts are distributed otherwise than in training (Garg et al. 2022).

A shift changes the inputs x (P, n) before the function is evaluated, the last of which is the query, or the values
y (P,) after it:

    x_third … x_triple    x is multiplied by ⅓, ½, 2 or 3
    y_third … y_triple    y is multiplied by ⅓, ½, 2 or 3
    skewed                x ← t x, where t has random eigenvectors and the eigenvalues c/1, c/2, …, c/n
    half_subspace         x lies in a random subspace of ⌊n/2⌋ dimensions; E‖x‖² stays as it is, here and above
    random_orthant        the examples lie in one random orthant, the query anywhere
    opposite_orthant      the query lies in the orthant opposite to that of the examples
    query_orthogonal      at most n − 1 examples; the query is orthogonal to all of them and as long as it was
    query_seen            the query is one of the examples, with its value if there is no noise
    label_noise           y ← (y + ε) √(v/(v+1)), ε ~ N(0, 1), v = E[y²]; also at the query

The paper draws t once for an evaluation; here each prompt has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.random import RandomState

from data_prep.in_context.functions import product

FACTORS = {"third": 1 / 3, "half": 1 / 2, "double": 2.0, "triple": 3.0}


def unchanged_points(x: np.ndarray, random: RandomState) -> np.ndarray:
    return x


def unchanged_values(y: np.ndarray, variance: float, random: RandomState) -> np.ndarray:
    return y


class Shift(NamedTuple):
    """One shifted test.

    Attributes:
        points: x (P, n) -> the shifted x; it may have fewer points.
        values: y (P,) and E[y²] -> the shifted y.
        least_dims: the least n that it is defined for.
    """

    points: Callable[[np.ndarray, RandomState], np.ndarray] = unchanged_points
    values: Callable[[np.ndarray, float, RandomState], np.ndarray] = unchanged_values
    least_dims: int = 1


def scale_points(factor: float, x: np.ndarray, random: RandomState) -> np.ndarray:
    return factor * x


def scale_values(factor: float, y: np.ndarray, variance: float, random: RandomState) -> np.ndarray:
    return factor * y


def skew(x: np.ndarray, random: RandomState) -> np.ndarray:
    return transform(x, 1 / np.arange(1, x.shape[1] + 1), random)


def halve(x: np.ndarray, random: RandomState) -> np.ndarray:
    dims = x.shape[1]
    return transform(x, np.arange(dims) < dims // 2, random)


def transform(x: np.ndarray, eigenvalues: np.ndarray, random: RandomState) -> np.ndarray:
    """x ← U diag(c λ) Uᵀ x with a random rotation U, and c such that E‖x‖² is that of N(0, I)."""
    dims = len(eigenvalues)
    basis = orthonormal(random.standard_normal((dims, dims)))  # (n, n), a row for each eigenvector
    scale = np.sqrt(dims / (eigenvalues**2).sum()) * eigenvalues
    return product((product(x[:, None], basis) * scale)[:, None], basis.T)


def random_orthant(x: np.ndarray, random: RandomState) -> np.ndarray:
    signs = draw_signs(x.shape[1], random)
    return np.concatenate([np.abs(x[:-1]) * signs, x[-1:]])


def opposite_orthant(x: np.ndarray, random: RandomState) -> np.ndarray:
    signs = draw_signs(x.shape[1], random)
    return np.concatenate([np.abs(x[:-1]) * signs, -np.abs(x[-1:]) * signs])


def draw_signs(dims: int, random: RandomState) -> np.ndarray:
    return np.where(random.random_sample(dims) < 0.5, -1.0, 1.0)


def orthogonal_query(x: np.ndarray, random: RandomState) -> np.ndarray:
    examples, query = x[: min(len(x), x.shape[1]) - 1], x[-1]
    rest = orthonormal(np.concatenate([examples, query[None]]))[-1]
    return np.concatenate([examples, np.sqrt(product(query, query)) * rest[None]])


def seen_query(x: np.ndarray, random: RandomState) -> np.ndarray:
    return np.concatenate([x[:-1], x[random.randint(len(x) - 1)][None]])


def add_noise(y: np.ndarray, variance: float, random: RandomState) -> np.ndarray:
    return (y + random.standard_normal(len(y))) * np.sqrt(variance / (variance + 1))


def orthonormal(rows: np.ndarray) -> np.ndarray:
    """An orthonormal basis whose first k rows span the first k of ``rows`` (K, n), K ≤ n (Gram and Schmidt).

    Each row is reduced twice, so that the result is orthogonal up to rounding.
    """
    basis = np.zeros_like(rows)
    for number, row in enumerate(rows):
        for known in (*basis[:number], *basis[:number]):
            row = row - product(row, known) * known
        basis[number] = row / np.sqrt(product(row, row))
    return basis


SHIFTS: Mapping[str, Shift] = {
    **{f"x_{name}": Shift(points=partial(scale_points, factor)) for name, factor in FACTORS.items()},
    **{f"y_{name}": Shift(values=partial(scale_values, factor)) for name, factor in FACTORS.items()},
    "skewed": Shift(points=skew),
    "half_subspace": Shift(points=halve, least_dims=2),
    "random_orthant": Shift(points=random_orthant),
    "opposite_orthant": Shift(points=opposite_orthant),
    "query_orthogonal": Shift(points=orthogonal_query, least_dims=2),
    "query_seen": Shift(points=seen_query),
    "label_noise": Shift(values=add_noise),
}

"""Predictors that prompts are compared with (Garg et al. 2022): x (S, P, n), y (S, P) -> ŷ (S, P), float64.

Prediction i is made from x_i and the i examples before it; without examples it is 0.

    least_squares       ŵ of minimum norm among those with the least Σ (ŵ·x_j − y_j)². For linear functions without
                        noise, no predictor has a lower expected error
    averaging           ŵ = Σ_j x_j y_j / (k σ_x²)
    nearest_neighbors   the mean y of the 3 nearest examples, or of all if there are fewer

The expected error of averaging for linear functions is (n + 1)/k · n σ_x².
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

NEIGHBORS = 3


class Oracle(Protocol):
    def __call__(self, x: np.ndarray, y: np.ndarray, x_std: float) -> np.ndarray: ...


def least_squares(x: np.ndarray, y: np.ndarray, x_std: float) -> np.ndarray:
    predictions = np.zeros(y.shape)
    for seen in range(1, y.shape[1]):
        weights = np.linalg.pinv(x[:, :seen].astype(float)) @ y[:, :seen, None]  # (S, n, 1)
        predictions[:, seen] = np.einsum("sn,snk->s", x[:, seen], weights)
    return predictions


def averaging(x: np.ndarray, y: np.ndarray, x_std: float) -> np.ndarray:
    products = np.cumsum(x.astype(float) * y[..., None], axis=1)[:, :-1]  # (S, P − 1, n), of the first k points
    seen = np.arange(1, y.shape[1])[:, None]
    predictions = np.zeros(y.shape)
    predictions[:, 1:] = (products / seen * x[:, 1:]).sum(-1) / x_std**2
    return predictions


def nearest_neighbors(x: np.ndarray, y: np.ndarray, x_std: float) -> np.ndarray:
    predictions = np.zeros(y.shape)
    for seen in range(1, y.shape[1]):
        distances = ((x[:, :seen].astype(float) - x[:, seen, None]) ** 2).sum(-1)  # (S, k)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBORS]
        predictions[:, seen] = np.take_along_axis(y[:, :seen].astype(float), nearest, axis=1).mean(-1)
    return predictions


ORACLES: Mapping[str, Oracle] = {
    "least_squares": least_squares,
    "averaging": averaging,
    "nearest_neighbors": nearest_neighbors,
}

"""Predictors that prompts are compared with (Garg et al. 2022): x (S, P, n), y (S, P) -> ŷ (S, P), float64.

Prediction i is made from x_i and the i examples before it; without examples it is 0.

    least_squares       ŵ of minimum norm among those with the least Σ (ŵ·x_j − y_j)². For linear functions without
                        noise, no predictor has a lower expected error
    averaging           ŵ = Σ_j x_j y_j / (k σ_x²)
    gradient_step       ŵ = Σ_j x_j y_j / ((k + n + 1) σ_x²): the step of gradient descent from 0 on Σ (w·x_j − y_j)²
                        whose rate is best for linear functions
    nearest_neighbors   the mean y of the 3 nearest examples, or of all if there are fewer

Expected errors for linear functions: with S = Σ_j x_j x_jᵀ, ŵ = c S w has the error E‖w − c S w‖² σ_x² =
n σ_x² (1 − 2 c k σ_x² + c² k (k + n + 1) σ_x⁴). So averaging has (n + 1)/k · n σ_x², and the best c leaves
(n + 1)/(k + n + 1) · n σ_x².
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
    return of_products(x, y, np.arange(1, y.shape[1]) * x_std**2)


def gradient_step(x: np.ndarray, y: np.ndarray, x_std: float) -> np.ndarray:
    return of_products(x, y, (np.arange(1, y.shape[1]) + x.shape[2] + 1) * x_std**2)


def of_products(x: np.ndarray, y: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Predictions of ŵ = Σ_j x_j y_j / divisor of k examples; ``divisors`` (P − 1,) are those of k = 1, 2, …"""
    products = np.cumsum(x.astype(float) * y[..., None], axis=1)[:, :-1]  # (S, P − 1, n), of the first k points
    predictions = np.zeros(y.shape)
    predictions[:, 1:] = (products / divisors[:, None] * x[:, 1:]).sum(-1)
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
    "gradient_step": gradient_step,
    "nearest_neighbors": nearest_neighbors,
}

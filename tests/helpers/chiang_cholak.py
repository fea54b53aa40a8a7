"""The constructions of Chiang & Cholak 2022 in numpy, one string at a time, with the paper's numbers of features."""

from __future__ import annotations

import math

import numpy as np


def layer_norm(x: np.ndarray, eps: float | None) -> np.ndarray:
    """x (N, d), with rows of mean 0; a row of zeros stays one."""
    if eps is None:
        return x
    size = np.sqrt((x**2).mean(1, keepdims=True) + eps)
    return np.divide(x, size, out=np.zeros_like(x), where=size > 0)


def attention(x, heads, scale):
    """The sum of softmax(Q Kᵀ · scale) V over heads of (W_Q (r, d), W_K (r, d), output of W_V (d, d))."""
    total = np.zeros_like(x)
    for query, key, value in heads:
        scores = (x @ query.T) @ (x @ key.T).T * scale
        weights = np.exp(scores - scores.max(1, keepdims=True))
        total += weights / weights.sum(1, keepdims=True) @ (x @ value.T)
    return total


def matrix(rows: int, columns: int, entries: dict[tuple[int, int], float]) -> np.ndarray:
    found = np.zeros((rows, columns))
    for place, value in entries.items():
        found[place] = value
    return found


def mirrored(x: np.ndarray, half: int) -> np.ndarray:
    """What is written to the first half of the features, with its negative in the second."""
    return np.concatenate([x[:, :half], -x[:, :half]], axis=1)


def cancel(x: np.ndarray, half: int, answer: int) -> np.ndarray:
    """The update that is the negative of all features but the answer's."""
    update = -x.copy()
    update[:, [answer, answer + half]] = 0
    return update


def parity(string: str, eps: float | None = None) -> float:
    half, n = 10, len(string) + 1
    d = half if eps is None else 2 * half
    x = np.zeros((n, d))
    for i, symbol in enumerate([*map(int, string), 2]):
        x[i, symbol], x[i, 3], x[i, 4] = 1, i / n, math.cos(math.pi * i)
    put = (lambda y: y) if eps is None else (lambda y: mirrored(y, half))
    x = put(x)
    scale = 1 / math.sqrt(d // 2)
    zero = np.zeros((1, d))
    value = matrix(d, d, {(5, 1): 1, (6, 2): 1})
    x = layer_norm(x + put(attention(x, [(zero, zero, value)], scale)), eps)
    a, b, c = -x[:, 3] + x[:, 5] - x[:, 6], -x[:, 3] + x[:, 5], -x[:, 3] + x[:, 5] + x[:, 6]
    update = np.zeros_like(x)
    update[:, 7] = np.maximum(a, 0) - 2 * np.maximum(b, 0) + np.maximum(c, 0)
    x = layer_norm(x + put(update), eps)
    heads = [
        (matrix(1, d, {(0, 2): 1}), matrix(1, d, {(0, 4): sign}), matrix(d, d, {(8, 7): -sign})) for sign in (1, -1)
    ]
    x = layer_norm(x + put(attention(x, heads, scale)), eps)
    if eps is not None:
        x = layer_norm(x + cancel(x, half, 8), eps)
    return x[-1, 8]


def first(string: str, eps: float | None = None, c: float = 1.0, log_length: bool = False) -> float:
    """``c`` is the released code's."""
    half, n = 6, len(string) + 1
    d = half if eps is None else 2 * half
    x = np.zeros((n, d))
    for i, symbol in enumerate([2, *map(int, string)]):
        x[i, symbol], x[i, 3] = 1, i == 1
    put = (lambda y: y) if eps is None else (lambda y: mirrored(y, half))
    x = layer_norm(put(x), eps)
    update = np.zeros_like(x)
    update[:, 4] = np.maximum(x[:, 1] + x[:, 3] - 1 if eps is None else x[:, 3] - x[:, 0] - x[:, 2], 0)
    x = layer_norm(x + put(update), eps)
    head = (matrix(1, d, {(0, 2): c}), matrix(1, d, {(0, 3): 1}), matrix(d, d, {(5, 4): 1, (5, 3): -0.5}))
    scale = (math.log(n) if log_length else 1) / math.sqrt(d)
    x = layer_norm(x + put(attention(x, [head], scale)), eps)
    if eps is not None:
        x = layer_norm(x + cancel(x, half, 5), eps)
    return x[0, 5]

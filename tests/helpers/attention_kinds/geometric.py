"""Geometric attention (Csordás et al. 2022; Csordás 2023, eq. 5.7 to 5.10), pair by pair."""

from __future__ import annotations

import torch

from helpers.attention_cases import HEADS, WINDOWS, Case, Row

CASES = [
    Case("geometric", role, options)
    for role in ("encoder", "decoder")
    for options in (
        {},
        {"geometric_normalize": True},
        {"attention_bias": True},
        {"no_directional_encoding": True},
        WINDOWS[role],
    )
]


def closer(i: int, j: int, keys: list[int]) -> list[int]:
    """S_ij: the keys that are closer to i than j is, those to the right before those to the left."""
    if j > i:
        return [k for k in keys if k not in (i, j) and abs(i - k) < abs(i - j)]
    return [k for k in keys if k not in (i, j) and abs(i - k) <= abs(i - j)]


def row(row: Row) -> torch.Tensor:
    module, i = row.module, row.n
    query = row.q[i] if module.query_bias is None else row.q[i] + module.query_bias[row.head, 0]
    p = {}
    for j in row.seen:
        logit = module.alpha[0] * (query @ row.k[j]) + module.gamma[0]
        if module.directional is not None:
            of_head = module.directional(row.x[i]).view(HEADS, -1)[row.head]
            logit = logit + module.beta[0] * of_head[1 if j > i else 0]
        p[j] = 1 / (1 + torch.exp(-logit))
    weights = torch.zeros(len(row.seen), dtype=torch.float64)
    for at, j in enumerate(row.seen):
        if j != i:
            weights[at] = p[j]
            for k in closer(i, j, row.seen):
                weights[at] = weights[at] * (1 - p[k])
    return weights / weights.sum().clamp(min=1e-12) if module.normalize else weights

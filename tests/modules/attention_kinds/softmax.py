"""Softmax attention (Vaswani et al. 2017, eq. 1), with scales and positions."""

from __future__ import annotations

import math

import torch
from attention_cases import ROLES, Case, Row

CASES = [
    *(Case("softmax", role, {"attention_bias": bias}) for role in ROLES for bias in (False, True)),
    Case("softmax", "encoder", {"attention_scale": "model_dim"}),
    *(Case("softmax", role, {"logit_scale": "log_length"}) for role in ROLES),
    *(
        Case("softmax", role, {"logit_scale": "log_length", "log_length_of": "padded"}, ignores_padding=False)
        for role in ROLES
    ),
]


def factor(row: Row, visible_positions: int) -> float:
    """What --logit-scale multiplies the logits with: ln of the number of keys that are seen, or of all positions."""
    if not row.module.log_length:
        return 1.0
    return math.log(visible_positions if row.module.count_padding else len(row.seen))


def row(row: Row) -> torch.Tensor:
    positions = row.n + 1 if row.module.role == "decoder" else row.k.size(0)
    logits = torch.stack([row.q[row.n] @ row.k[m] for m in row.seen]) * row.module.scale
    return (factor(row, positions) * logits).softmax(0)

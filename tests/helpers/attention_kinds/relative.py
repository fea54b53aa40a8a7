"""Relative attention of Transformer-XL (Dai et al. 2019), pair by pair."""

from __future__ import annotations

import math

import torch

from helpers.attention_cases import HEADS, WINDOWS, Case, Row

CASES = [
    *(Case("relative", role, tolerance=2e-6) for role in ("encoder", "decoder")),
    Case("relative", "encoder", {"attention_bias": True, "attention_scale": "model_dim"}, tolerance=2e-6),
    *(Case("relative", role, {"logit_scale": "log_length"}, tolerance=4e-6) for role in ("encoder", "decoder")),
    *(Case("relative", role, window, tolerance=2e-6) for role, window in WINDOWS.items()),
]


def positional(module, distance: int, head: int) -> torch.Tensor:
    """W_P p of a signed distance, of one head."""
    d = module.embed_dim
    p = torch.empty(d, dtype=torch.float64)
    for j in range(d):
        angle = distance / 10000 ** (2 * (j // 2) / d)
        p[j] = math.sin(angle) if j % 2 == 0 else math.cos(angle)
    return (module.pos_proj.weight @ p).view(HEADS, -1)[head]


def logits(row: Row, position=lambda m: m) -> torch.Tensor:
    u, v = row.module.content_bias[row.head, 0], row.module.position_bias[row.head, 0]
    q = row.q[row.n]
    terms = [
        (q + u) @ row.k[m] + (q + v) @ positional(row.module, position(m) - position(row.n), row.head) for m in row.seen
    ]
    return torch.stack(terms) * row.module.scale


def row(row: Row) -> torch.Tensor:
    return (logits(row) * (math.log(len(row.seen)) if row.module.log_length else 1.0)).softmax(0)

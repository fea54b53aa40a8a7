"""Gated absolute and relative positions (Csordás 2023, appendix D.2), pair by pair."""

from __future__ import annotations

import math

import torch

from helpers.attention_cases import WINDOWS, Case, Row
from helpers.attention_kinds.relative import positional

CASES = [
    *(Case("abs_rel", role, tolerance=2e-6) for role in ("encoder", "decoder")),
    *(Case("abs_rel", role, {"attention_scale": "learned"}, tolerance=2e-6) for role in ("encoder", "decoder")),
    Case("abs_rel", "encoder", {"logit_scale": "log_length", "attention_bias": True}, tolerance=4e-6),
    *(Case("abs_rel", role, window, tolerance=2e-6) for role, window in WINDOWS.items()),
]


def row(row: Row) -> torch.Tensor:
    module, head = row.module, row.head
    q, u, v = row.q[row.n], module.content_bias[head, 0], module.position_bias[head, 0]
    r = 1 / (1 + (-(module.gate.weight[head] @ row.x[row.n] + module.gate.bias[head])).exp())
    terms = []
    for m in row.seen:
        j = m if row.padding is None else int((~row.padding[:m]).sum())
        relative, absolute = positional(module, m - row.n, head), positional(module, j, head)
        terms.append((q + u) @ row.k[m] + r * ((q + v) @ relative) + (1 - r) * ((q + v) @ absolute))
    scale = module.scale if module.learned_scale is None else module.learned_scale
    factor = math.log(len(row.seen)) if module.log_length else 1.0
    return (torch.stack(terms) * scale * factor).softmax(0)

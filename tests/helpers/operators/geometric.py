"""Geometric attention: shapes, logits, the operator as a function of them, and a walk over the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fairseq_sg.ops import geometric_attention

# B, H, N, M, offset
SHAPES = [
    (2, 3, 5, 5, 0),
    (1, 1, 1, 1, 0),
    (2, 1, 2, 2, 0),
    (2, 2, 1, 9, 8),
    (2, 2, 1, 9, 0),
    (1, 2, 3, 8, 2),
    (2, 3, 4, 11, 7),
    (1, 2, 37, 37, 0),
]


def make(shape, device, dtype=torch.float64) -> dict[str, Tensor]:
    return {"logits": (2 * torch.randn(shape[:4], dtype=torch.float64)).to(device, dtype)}


def run(implementation: str = "auto", **options):
    return lambda logits: {"weights": geometric_attention(logits, implementation=implementation, **options)}


def walk(logits: Tensor, causal: bool = False, offset: int = 0, key_padding_mask: Tensor | None = None) -> Tensor:
    """The order i + 1, i − 1, i + 2, i − 2, … key by key, in Python's numbers."""
    batch, heads, queries, keys = logits.shape
    weights = torch.zeros(logits.shape, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for n in range(queries):
                i, missed = offset + n, 1.0
                for j in (j for distance in range(1, keys) for j in (i + distance, i - distance)):
                    padded = key_padding_mask is not None and 0 <= j < keys and bool(key_padding_mask[b, j])
                    if 0 <= j < keys and not padded and not (causal and j > i):
                        logit = logits[b, h, n, j].item()
                        weights[b, h, n, j] = missed / (1 + math.exp(-logit))
                        missed /= 1 + math.exp(logit)
    return weights

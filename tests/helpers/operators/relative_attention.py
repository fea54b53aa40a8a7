"""Relative attention: shapes, inputs, and the operator as a function of them."""

from __future__ import annotations

import torch

from fairseq_sg.ops import relative_attention
from helpers.comparison import Results

# B, H, N, M, D, E, D'
SHAPES = [
    (2, 3, 5, 5, 4, 6, 4),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 1, 9, 5, 3, 4),
    (2, 2, 2, 9, 8, 8, 8),
    (3, 2, 7, 12, 16, 5, 3),
    (1, 2, 65, 65, 8, 8, 8),
]


def make(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> Results:
    batch, heads, queries, keys, dim, width, positional = shape
    sizes = {
        "q_content": (batch, heads, queries, dim),
        "q_position": (batch, heads, queries, positional),
        "k": (batch, heads, keys, dim),
        "v": (batch, heads, keys, width),
        "p": (heads, queries + keys - 1, positional),
    }
    return {name: torch.randn(size, dtype=torch.float64).to(device, dtype) for name, size in sizes.items()}


def run(implementation: str, **options):
    return lambda **inputs: {"out": relative_attention(**inputs, **options, implementation=implementation)}

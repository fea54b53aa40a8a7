"""The features of a squared dot product, which the quadratic maps ``taylor`` and ``rebased`` share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class OuterProduct(nn.Module):
    """x (…, d) -> u(x) (…, F) with u(x)·u(y) = (x·y)²: the upper triangle of x ⊗ x, times √2 off the diagonal.

    Args:
        dim: d; F = d(d + 1)/2.
    """

    def __init__(self, dim: int):
        super().__init__()
        row, column = torch.triu_indices(dim, dim)
        self.features = row.numel()
        self.register_buffer("off_diagonal", row != column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Row by row: picking the triangle out of the matrix takes three times as long on a CPU.
        rows = [x[..., i : i + 1] * x[..., i:] for i in range(x.size(-1))]
        return torch.cat(rows, dim=-1) * self.off_diagonal.to(x.dtype).mul(math.sqrt(2) - 1).add(1)

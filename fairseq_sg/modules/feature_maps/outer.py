"""The features of a squared dot product, which the quadratic maps ``taylor`` and ``rebased`` share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OuterProduct(nn.Module):
    """x (…, d) -> u(x) (…, F) with u(x)·u(y) = s (x·y)²: √s times the upper triangle of x ⊗ x, which has another factor
    of √2 off the diagonal.

    Args:
        dim: d; F = d(d + 1)/2.
        scale: s.
    """

    def __init__(self, dim: int, scale: float = 1.0):
        super().__init__()
        row, column = torch.triu_indices(dim, dim)
        self.features, self.scale = row.numel(), scale
        self.register_buffer("off_diagonal", row != column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Row by row: picking the triangle out of the matrix takes three times as long on a CPU.
        rows = [x[..., i : i + 1] * x[..., i:] for i in range(x.size(-1))]
        return torch.cat(rows, dim=-1) * self.off_diagonal.to(x.dtype).add(1).mul(self.scale).sqrt()

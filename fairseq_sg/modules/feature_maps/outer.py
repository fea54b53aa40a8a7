"""The features of a squared dot product, which the quadratic maps ``taylor`` and ``rebased`` share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError


@dataclass
class OuterProductOptions:
    outer_product: str = field(
        default="upper",
        metadata={
            "help": "features of x xᵀ in the taylor and rebased feature maps of x (d): its 'upper' triangle, d(d+1)/2 "
            "of them, or the 'full' matrix, d², whose similarities are the same"
        },
    )


class OuterProduct(nn.Module):
    """x (…, d) -> u(x) (…, F) with u(x)·u(y) = (x·y)²: x ⊗ x, or its upper triangle with √2 off the diagonal.

    Args:
        dim: d.
        form: ``upper``, F = d(d + 1)/2, or ``full``, F = d².
    """

    def __init__(self, dim: int, form: str):
        super().__init__()
        if form not in ("upper", "full"):
            raise UsageError(f"--outer-product is {form!r}: choose from upper, full")
        self.full = form == "full"
        row, column = torch.triu_indices(dim, dim)
        self.features = dim**2 if self.full else row.numel()
        self.register_buffer("off_diagonal", row != column, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.full:
            return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        # Row by row: picking the triangle out of the matrix takes three times as long on a CPU.
        rows = [x[..., i : i + 1] * x[..., i:] for i in range(x.size(-1))]
        return torch.cat(rows, dim=-1) * self.off_diagonal.to(x.dtype).mul(math.sqrt(2) - 1).add(1)

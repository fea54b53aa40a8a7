"""The standardized features of a head, which ``squared`` with ``--squared-kernel affine`` and ``mlp`` start from.

    std(x) = (x − mean(x)) / (s + 10⁻⁶),   s² = Σ_i (x_i − mean(x))² / (D − 1)

as in the code of Laptev 2024. The layer norm of ``rebased`` has the variance with D instead of D − 1, and ε = 1e-5
under the root.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.normalization import over_l2

EPS = 1e-6


def standardized(x: Tensor) -> Tensor:
    """std(x) (…, D); 0 for x = 0. Of other equal elements it is the rounding of their mean, at most 1."""
    root = (x.shape[-1] - 1) ** 0.5  # ‖x − mean(x)‖ / s
    return (over_l2(x - x.mean(-1, keepdim=True), root * EPS) * root).type_as(x)


def check_width(head_dim: int, option: str) -> None:
    """Raises UsageError for D < 2: of one number nothing is left. ``option`` chooses the map, for the message."""
    if head_dim < 2:
        raise UsageError(f"{option} normalizes a head's Queries and Keys: choose --feature-dim 2 or more")


class StandardizedAffine(nn.Module):
    """γ ⊙ std(x) + β, (…, D) -> (…, D) in the dtype of x; γ and β (D,) start uniform in [0, 1)."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * standardized(x) + self.bias.to(x.dtype)

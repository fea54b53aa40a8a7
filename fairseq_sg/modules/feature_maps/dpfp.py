"""DPFP, the deterministic parameter-free projection of Schlag et al. 2021."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate


@dataclass
class DPFPOptions:
    dpfp_nu: int = field(
        default=1,
        metadata={
            "help": "ν of the dpfp feature map, which makes 2ν features of each number of a Query; below twice a "
            "head's width",
            "least": 1,
        },
    )


@register_feature_map("dpfp")
class DPFPFeatureMap(FeatureMap):
    """φ(x) = [r ⊙ roll(r, 1), …, r ⊙ roll(r, ν)], r = [ReLU(x), ReLU(−x)], F = 2νD (Schlag et al. 2021, section 5.3).

    roll(r, j)_i = r_{i−j}, around the 2D elements of r. Features are float32. A Query that has no positive feature in
    common with any Key has a denominator of only ε and the output 0.

    Args:
        dpfp_nu: ν, from 1 to 2D − 1.

    Raises:
        UsageError: another ν; D = 1, where all features are 0.
    """

    paper = "Schlag et al. 2021"
    may_vanish = True
    options = DPFPOptions

    def __init__(self, head_dim: int, *, dpfp_nu: int = 1):
        super().__init__(head_dim)
        if head_dim < 2:
            raise UsageError("--feature-map dpfp makes only zeros of one number: choose --feature-dim 2 or more")
        if not 1 <= dpfp_nu < 2 * head_dim:
            raise UsageError(
                f"--dpfp-nu is {dpfp_nu}: for Queries of width {head_dim} choose from 1 to {2 * head_dim - 1}"
            )
        self.nu = dpfp_nu
        self.features = 2 * dpfp_nu * head_dim

    def forward(self, x: Tensor) -> Tensor:
        x = accurate(x)
        r = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([r * r.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)

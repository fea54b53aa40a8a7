"""The second-order Taylor series of the exponential, the feature map of Based (Arora et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.modules.feature_maps.outer import OuterProduct
from fairseq_sg.ops.precision import accurate


@register_feature_map("taylor")
class TaylorFeatureMap(FeatureMap):
    """φ(x) = [1, x/D^¼, x⊗x/√(2D)], F = 1 + D + D(D + 1)/2 (Arora et al. 2024; Zhang et al. 2024).

    So φ(q)·φ(k) = 1 + s + s²/2 with s = q·k/√D: exp(s) to second order, and at least 1/2. Features are float32.
    """

    paper = "Based: Arora et al. 2024"
    quadratic = True

    def __init__(self, head_dim: int):
        super().__init__(head_dim)
        self.outer = OuterProduct(head_dim, scale=1 / 2)
        self.features = 1 + head_dim + self.outer.features
        self.scale = head_dim**-0.25

    def forward(self, x: Tensor) -> Tensor:
        x = accurate(x) * self.scale
        return torch.cat([torch.ones_like(x[..., :1]), x, self.outer(x)], dim=-1)

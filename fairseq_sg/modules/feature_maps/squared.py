"""Squared features, of Queries and Keys as they are or of a learned parabola (code of Laptev 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.modules.feature_maps.standardized import StandardizedAffine, check_width
from fairseq_sg.ops.precision import accurate


@dataclass
class SquaredOptions:
    squared_kernel: str = field(
        default="plain",
        metadata={
            "help": "what the squared feature map squares: 'plain' x, or 'affine' γ⊙std(x)+β, with a γ and a β for "
            "Queries and for Keys",
            "choices": ("plain", "affine"),
        },
    )


@register_feature_map("squared")
class SquaredFeatureMap(FeatureMap):
    """φ(x)_i = x_i² ≥ 0, F = D, or φ(x)_i = (γ ⊙ std(x) + β)_i² (see ``standardized``). Features are float32.

    float16 would overflow above 255. Without γ and β the sign of a feature is lost, so a Query is as similar to k as
    to −k. Queries and Keys have a γ and a β each, shared by the heads, which start uniform in [0, 1).

    Args:
        squared_kernel: ``plain`` or ``affine``.

    Raises:
        UsageError: another kernel, or ``affine`` with D < 2.
    """

    paper = "affine: Laptev 2024, code"
    options = SquaredOptions

    def __init__(self, head_dim: int, *, squared_kernel: str = "plain"):
        super().__init__(head_dim)
        ranges.check(SquaredOptions, {"squared_kernel": squared_kernel})
        self.query_kernel, self.key_kernel = nn.Identity(), nn.Identity()
        if squared_kernel == "affine":
            check_width(head_dim, "--squared-kernel affine")
            self.query_kernel, self.key_kernel = StandardizedAffine(head_dim), StandardizedAffine(head_dim)

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self(self.query_kernel(accurate(q)))

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self(self.key_kernel(accurate(k)))

    def forward(self, x: Tensor) -> Tensor:
        return accurate(x).square()

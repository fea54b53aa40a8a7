"""The elementwise square as a feature map."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.features import squared


@register_feature_map("squared")
class SquaredFeatureMap(FeatureMap):
    """φ(x)_i = x_i², F = D, in float32: float16 would overflow above 255.

    The sign of a feature is lost, so a Query is as similar to k as to −k.
    """

    in_operator = "squared"

    def forward(self, x: Tensor) -> Tensor:
        return squared(x)

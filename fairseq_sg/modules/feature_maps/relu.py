"""ReLU as a feature map."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.features import relu


@register_feature_map("relu")
class ReluFeatureMap(FeatureMap):
    """φ(x) = max(x, 0), F = D.

    A Query that has no positive feature in common with any Key has a denominator of only ε and the output 0.
    """

    in_operator = "relu"

    def forward(self, x: Tensor) -> Tensor:
        return relu(x)

"""The feature map of the "Linear Transformer" (Katharopoulos et al. 2020; Park & Kim 2024)."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.features import elu


@register_feature_map("elu")
class EluFeatureMap(FeatureMap):
    """φ(x) = elu(x) + 1, F = D (Katharopoulos et al. 2020, eq. 7)."""

    in_operator = "elu"

    def forward(self, x: Tensor) -> Tensor:
        return elu(x)

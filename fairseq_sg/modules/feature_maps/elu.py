"""The feature map of the "Linear Transformer" (Katharopoulos et al. 2020; Park & Kim 2024)."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map


@register_feature_map("elu")
class EluFeatureMap(FeatureMap):
    """φ(x) = elu(x) + 1, F = D (Katharopoulos et al. 2020, eq. 7).

    Computed as exp(min(x, 0)) + max(x, 0), which is the same. As elu(x) + 1 = (exp(x) − 1) + 1 it cancels in half
    precision, to 0 at x = −8 in bfloat16.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=0).exp() + x.relu()

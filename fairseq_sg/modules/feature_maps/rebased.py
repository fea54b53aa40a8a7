"""ReBased (Aksenov et al. 2024): a quadratic kernel whose parabola is learned."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feature_maps.base import FeatureMap, accurate, register_feature_map
from fairseq_sg.modules.feature_maps.outer import OuterProduct


@register_feature_map("rebased")
class RebasedFeatureMap(FeatureMap):
    """φ(x) = y⊗y/√D, y = γ ⊙ LN(x) + β, F = D(D + 1)/2 (Aksenov et al. 2024).

    So φ(q)·φ(k) = (y_q·y_k)²/D ≥ 0. Queries and Keys have a γ and a β each, shared by the heads, which start at 1 and
    0; LN has ε = 1e-5. Features are float32.

    Raises:
        UsageError: D < 2: a normalized number alone is always 0.
    """

    paper = "Aksenov et al. 2024"
    quadratic = True
    least_width = 4  # two normalized numbers have only a sign

    def __init__(self, head_dim: int):
        super().__init__(head_dim)
        if head_dim < 2:
            raise UsageError(
                "--feature-map rebased normalizes a head's Queries and Keys: choose --feature-dim 2 or more"
            )
        self.query_norm, self.key_norm = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.outer = OuterProduct(head_dim)
        self.features = self.outer.features
        self.scale = 1 / math.sqrt(head_dim)

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._squares(self.query_norm, q)

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._squares(self.key_norm, k)

    def _squares(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        x = accurate(x)
        weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
        return self.outer(nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)) * self.scale

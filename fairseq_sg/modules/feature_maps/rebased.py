"""ReBased (Aksenov et al. 2024): a quadratic kernel whose parabola is learned."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.modules.feature_maps.outer import OuterProduct
from fairseq_sg.modules.feature_maps.standardized import check_width
from fairseq_sg.ops.precision import accurate


@dataclass
class RebasedOptions:
    rebased_start: str = field(
        default="ones",
        metadata={
            "help": "start of the rebased feature map's γ and β: 'ones' (γ 1, β 0), or 'uniform' (both from 0 to 1, as "
            "the code of Laptev 2024)",
            "choices": ("ones", "uniform"),
        },
    )


@register_feature_map("rebased")
class RebasedFeatureMap(FeatureMap):
    """φ(x) = y⊗y/√D, y = γ ⊙ LN(x) + β, F = D(D + 1)/2 (Aksenov et al. 2024).

    So φ(q)·φ(k) = (y_q·y_k)²/D ≥ 0. Queries and Keys have a γ and a β each, shared by the heads; LN has ε = 1e-5.
    Features are float32.

    Args:
        rebased_start: ``ones`` for γ = 1 and β = 0, or ``uniform`` for both in [0, 1).

    Raises:
        UsageError: another start, or D < 2: a normalized number alone is always 0.
    """

    paper = "Aksenov et al. 2024"
    options = RebasedOptions
    quadratic = True
    least_width = 4  # two normalized numbers have only a sign

    def __init__(self, head_dim: int, *, rebased_start: str = "ones"):
        super().__init__(head_dim)
        check_width(head_dim, "--feature-map rebased")
        ranges.check(RebasedOptions, {"rebased_start": rebased_start})
        self.query_norm, self.key_norm = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        if rebased_start == "uniform":
            for parameter in (*self.query_norm.parameters(), *self.key_norm.parameters()):
                nn.init.uniform_(parameter)
        self.outer = OuterProduct(head_dim, scale=1 / head_dim)
        self.features = self.outer.features

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._squares(self.query_norm, q)

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._squares(self.key_norm, k)

    def _squares(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        x = accurate(x)
        weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
        return self.outer(nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps))

"""A learned feature map of two layers without a last activation (``learnable`` in the code of Laptev 2024)."""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.modules.feature_maps.standardized import check_width, standardized
from fairseq_sg.ops.precision import accurate


@register_feature_map("mlp")
class MLPFeatureMap(FeatureMap):
    """φ(x) = W₂ ReLU(W₁ std(x) + b₁) + b₂, W₁ and W₂ (D, D), F = D (see ``standardized``).

    Queries and Keys have layers of their own, shared by the heads, which start as PyTorch's linear layers do. Features
    have both signs: a denominator may vanish or change its sign, and ε does not prevent that.

    Raises:
        UsageError: D < 2.
    """

    paper = "Laptev 2024, code"

    def __init__(self, head_dim: int):
        super().__init__(head_dim)
        check_width(head_dim, "--feature-map mlp")
        self.query_map, self.key_map = _two_layers(head_dim), _two_layers(head_dim)

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return _mapped(self.query_map, q)

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return _mapped(self.key_map, k)


def _two_layers(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))


def _mapped(layers: nn.Sequential, x: Tensor) -> Tensor:
    return layers(standardized(accurate(x)).to(layers[0].weight.dtype))

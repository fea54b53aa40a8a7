"""Hedgehog (Zhang et al. 2024): a learned feature map with a softmax over its features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate


@register_feature_map("hedgehog")
class HedgehogFeatureMap(FeatureMap):
    """φ(x) = softmax([2y, −2y]), y = Wx + b, F = 2D (after Zhang et al. 2024).

    Queries and Keys have a W and a b each, shared by the heads, which start at the identity and 0. One softmax over
    both halves, and the factor 2, are those of the implementation in flash-linear-attention. Features are float32.
    """

    paper = "Zhang et al. 2024"

    def __init__(self, head_dim: int):
        super().__init__(head_dim)
        self.features = 2 * head_dim
        self.query_map, self.key_map = nn.Linear(head_dim, head_dim), nn.Linear(head_dim, head_dim)
        for linear in (self.query_map, self.key_map):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return _softmax_of_both_signs(self.query_map(q))

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return _softmax_of_both_signs(self.key_map(k))


def _softmax_of_both_signs(y: Tensor) -> Tensor:
    y = 2 * accurate(y)
    return torch.cat([y, -y], dim=-1).softmax(-1)

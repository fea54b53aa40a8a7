"""T2R (Kasai et al. 2021): a learned layer with ReLU as the feature map."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate


@dataclass
class T2ROptions:
    t2r_features: int | None = field(
        default=None,
        metadata={
            "help": "number of features of the t2r feature map (default: the width of a head's Queries)",
            "least": 1,
        },
    )


@register_feature_map("t2r")
class T2RFeatureMap(FeatureMap):
    """φ(x) = ReLU(Wx + b), W (F, D) (Kasai et al. 2021). Features are float32.

    Queries and Keys have a W and a b each, shared by the heads; W starts as PyTorch's linear layers do, b at 0. A
    Query that has no positive feature in common with any Key has a denominator of only ε and the output 0.

    Args:
        t2r_features: F; D by default.

    Raises:
        UsageError: F is below 1.
    """

    paper = "Kasai et al. 2021"
    may_vanish = True
    options = T2ROptions

    def __init__(self, head_dim: int, *, t2r_features: int | None = None):
        super().__init__(head_dim)
        self.features = head_dim if t2r_features is None else t2r_features
        ranges.check(T2ROptions, {"t2r_features": t2r_features})
        self.query_map, self.key_map = nn.Linear(head_dim, self.features), nn.Linear(head_dim, self.features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query_map, self.key_map):
            linear.reset_parameters()
            nn.init.zeros_(linear.bias)

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return accurate(self.query_map(q).relu())

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return accurate(self.key_map(k).relu())

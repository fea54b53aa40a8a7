"""Feature maps φ of linear attention: ``--feature-map``. One class each, applied to Queries and Keys per head.

A feature map turns ``(B, H, N, D)`` into ``(B, H, N, F)`` and says its F as ``features``. Queries and Keys may be mapped
differently (``queries`` and ``keys``); most maps treat them alike.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from torch import Tensor, nn

from fairseq_sg.registry import Registry

FEATURE_MAP_REGISTRY = Registry("feature map", "--feature-map")
register_feature_map = FEATURE_MAP_REGISTRY.register


def build_feature_map(name: str, head_dim: int, **options: Any) -> "FeatureMap":
    """The feature map ``name`` for heads of width ``head_dim``. Raises ValueError for an unknown name or a wrong option."""
    return FEATURE_MAP_REGISTRY.find(name)(head_dim, **options)


class FeatureMap(nn.Module):
    """Base class: a map that treats Queries and Keys alike, whatever their positions, overrides ``forward`` alone.

    Args:
        head_dim: D, the width of a head's Queries and Keys.

    Attributes:
        features: F, the width of φ(x).
        options: dataclass of the map's own options; its fields are command-line options and keyword arguments.
        needs_positions: whether ``queries`` and ``keys`` get positions; int64, broadcastable to (B, H, N), counted from 0 at the
            first real token. Without it they are None.
    """

    registered_name: ClassVar[str]
    options: ClassVar[Optional[type]] = None
    needs_positions: ClassVar[bool] = False

    def __init__(self, head_dim: int):
        super().__init__()
        self.features = head_dim

    def queries(self, q: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        """q (B, H, N, D) -> φ(q) (B, H, N, F), in the dtype of q or a wider one."""
        return self(q)

    def keys(self, k: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        """k (B, H, M, D) -> φ(k) (B, H, M, F)."""
        return self(k)


@register_feature_map("elu")
class EluFeatureMap(FeatureMap):
    """φ(x) = elu(x) + 1, F = D (Katharopoulos et al. 2020, eq. 7); "Linear Transformer" in Park & Kim 2024.

    Computed as exp(min(x, 0)) + max(x, 0), which is the same. As elu(x) + 1 = (exp(x) − 1) + 1 it cancels in half precision, to 0 at
    x = −8 in bfloat16.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=0).exp() + x.relu()

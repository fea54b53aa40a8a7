"""The interface of feature maps. A map is applied to Queries and Keys per head, before ``--qk-norm``.

A feature map turns ``(B, H, N, D)`` into ``(B, H, N, F)`` and says its F as ``features``; the similarity of a Query
and a Key is φ(q)·φ(k). Queries and Keys may be mapped differently (``queries`` and ``keys``); most maps treat them
alike. Where half precision would overflow or cancel, features are float32.

The denominator of linear attention is a sum of similarities. All maps here but ``mlp`` and ``identity`` have
φ(q)·φ(k) ≥ 0; ``l1`` and ``l2`` only scale a φ and keep that. ``rms`` multiplies features by a learned γ, and with it
similarities may be negative and a denominator vanish: for every map where γ_Q and γ_K have different signs, and for
``taylor`` and ``rebased``, whose features have both signs, wherever γ_Q γ_K is not the same for all features.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fairseq_sg.registry import Mechanism, Registry

FEATURE_MAP_REGISTRY = Registry("feature map", "--feature-map")
register_feature_map = FEATURE_MAP_REGISTRY.register


class FeatureMap(Mechanism, nn.Module):
    """Base class: a map that treats Queries and Keys alike, whatever their positions, overrides ``forward`` alone.

    Args:
        head_dim: D, the width of a head's Queries and Keys.

    Attributes:
        features: F, the width of φ(x).
        needs_positions: whether ``queries`` and ``keys`` get positions; int64, broadcastable to (B, H, N), counted
            from 0 at the first real token. Without it they are None.
        quadratic: whether F grows with D², the case for ``--feature-dim sqrt``.
        least_width: the least D that the documentation advises.
        scales_queries: whether ``queries`` gives φ(q) up to a positive factor per Query, which cancels in a quotient or
            in a normalization.
        may_vanish: whether φ(q)·φ(k) can be 0, so that a Query's denominator can be ε alone.
        longest: the length of the longest sequence that it is defined for, None for no limit.
    """

    needs_positions: ClassVar[bool] = False
    quadratic: ClassVar[bool] = False
    least_width: ClassVar[int] = 1
    scales_queries: ClassVar[bool] = False
    may_vanish: ClassVar[bool] = False
    longest: int | None = None

    def __init__(self, head_dim: int):
        super().__init__()
        self.features = head_dim

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """q (B, H, N, D) -> φ(q) (B, H, N, F), in the dtype of q or a wider one; see ``scales_queries``."""
        return self(q)

    def keys(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """k (B, H, M, D) -> φ(k) (B, H, M, F)."""
        return self(k)

    def keys_to_normalize(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """φ(k) up to a positive factor per Key, which cancels in the normalization that follows."""
        return self.keys(k, positions)

    def begin(self) -> None:
        """Called at the start of every full pass, before Queries and Keys are mapped, and never in decoding."""

    def check_positions(self, positions: Tensor, below: int) -> None:
        """Raises UsageError where the map is not defined at one of ``positions``, which are all below ``below``."""

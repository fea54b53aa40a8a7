"""The elementwise exponential as a feature map."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.feature_maps.base import FeatureMap, accurate, register_feature_map


@register_feature_map("exp")
class ExpFeatureMap(FeatureMap):
    """φ(x)_i = exp(x_i), F = D, in float32.

    A Query's features are divided by their largest, φ(q)_i = exp(q_i − max_j q_j), which cancels in the attention, and
    so are a Key's where they are normalized (``--qk-norm``). Else Keys are not scaled: a factor per Key would change
    the weights, and one for all would need Keys that a decoder has not seen. Their exponentials overflow where an
    element of a Key exceeds 88.
    """

    def queries(self, q: Tensor, positions=None) -> Tensor:
        q = accurate(q)
        return (q - q.amax(-1, keepdim=True)).exp()

    def keys_to_normalize(self, k: Tensor, positions=None) -> Tensor:
        return self.queries(k)

    def forward(self, x: Tensor) -> Tensor:
        return accurate(x).exp()

"""Feature maps of single elements: F = D, and nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.modules.feature_maps.base import FeatureMap, register_feature_map
from fairseq_sg.ops.precision import accurate
from fairseq_sg.ops.transforms import transformed


@register_feature_map("elu")
class EluFeatureMap(FeatureMap):
    """φ(x)_i = elu(x_i) + 1 > 0, F = D (Katharopoulos et al. 2020, eq. 7; Park & Kim 2024). Features are float32.

    Computed as exp(min(x, 0)) + max(x, 0), which is the same. As elu(x) + 1 = (exp(x) − 1) + 1 it cancels in half
    precision, to 0 at x = −8 in bfloat16.
    """

    paper = "Katharopoulos et al. 2020, eq. 7"

    def forward(self, x: Tensor) -> Tensor:
        x = accurate(x)
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp()) if transformed() else _EluPlusOne.apply(x)


class _EluPlusOne(torch.autograd.Function):
    """φ(x) = exp(min(x, 0)) + max(x, 0), with φ'(x) = min(φ(x), 1): its own value is all that is kept."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.clamp(max=0).exp_().add_(x.clamp(min=0))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.clamp(max=1)


@register_feature_map("identity")
class IdentityFeatureMap(FeatureMap):
    """φ(x) = x, F = D: the similarity q·k of either sign (von Oswald et al. 2023). Features are float32.

    A denominator may vanish or change its sign, and ε does not prevent that: the paper's attention has none.
    """

    paper = "von Oswald et al. 2023"

    def forward(self, x: Tensor) -> Tensor:
        return accurate(x)


@register_feature_map("relu")
class ReluFeatureMap(FeatureMap):
    """φ(x)_i = max(x_i, 0) ≥ 0, F = D. Features are float32.

    A Query that has no positive feature in common with any Key has a denominator of only ε and the output 0.
    """

    may_vanish = True

    def forward(self, x: Tensor) -> Tensor:
        return accurate(x).relu()


@register_feature_map("exp")
class ExpFeatureMap(FeatureMap):
    """φ(x)_i = exp(x_i) > 0, F = D. Features are float32.

    A Query's features are divided by their largest, φ(q)_i = exp(q_i − max_j q_j), which cancels in the attention. The
    same holds for a Key where Keys are normalized (``--qk-norm``). Other Keys are not scaled: a factor per Key would
    change the weights, and one for all would need Keys that a decoder has not seen. Their exponentials overflow where
    an element of a Key exceeds 88.
    """

    scales_queries = True

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        q = accurate(q)
        return (q - q.amax(-1, keepdim=True)).exp()

    def keys_to_normalize(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.queries(k)

    def forward(self, x: Tensor) -> Tensor:
        return accurate(x).exp()

"""Norms of hidden states: ``--norm``, in residual connections, copy gates, and after the layers with ``--pre-norm``.

The published models have layer norm with ε = 1e-5. Two other choices belong to the constructions of Chiang & Cholak
2022 (``fairseq_sg.models.constructions``): no norm at all, and layer norm with ε = 0, which makes a state of any size
as large as any other (section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.ops.precision import accurate
from fairseq_sg.registry import Mechanism, Registry

NORM_REGISTRY = Registry("norm", "--norm")
register_norm = NORM_REGISTRY.register

#: Makes the norm of states of a width.
MakeNorm = Callable[[int], nn.Module]


def norm_of(config: Any) -> MakeNorm:
    """What makes the norms of a model. Raises UsageError for an unknown ``--norm``, or a wrong option."""
    cls = NORM_REGISTRY.find(config.norm)
    return partial(cls, **cls.keyword_arguments(config))


def final_norm_of(config: Any, dim: int) -> nn.Module:
    """The norm after the last layer, which a pre-norm model has unless ``--no-final-norm`` is given."""
    return norm_of(config)(dim) if config.pre_norm and not config.no_final_norm else nn.Identity()


@dataclass
class LayerNormOptions:
    layer_norm_eps: float = field(
        default=1e-5, metadata={"help": "ε, added to the variance in a layer norm; 0 for none", "least": 0}
    )


@register_norm("layer")
class LayerNorm(Mechanism, nn.LayerNorm):
    """γ ⊙ (x − mean x) / √(var x + ε) + β, over the last dimension; γ starts at 1, β at 0.

    With ε = 0, a state whose entries are all equal has no direction: it becomes β, and its gradient is 0.

    Args:
        dim: C, the width of the state.
        layer_norm_eps: ε.
    """

    paper = "Ba et al. 2016"
    options = LayerNormOptions

    def __init__(self, dim: int, *, layer_norm_eps: float = 1e-5):
        ranges.check(LayerNormOptions, {"layer_norm_eps": layer_norm_eps})
        super().__init__(dim, eps=layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, C) -> the same shape."""
        return super().forward(x) if self.eps else self._without_eps(x)

    def _without_eps(self, x: Tensor) -> Tensor:
        states = accurate(x)
        centred = states - states.mean(-1, keepdim=True)
        # The result does not depend on the size of the state; the squares of a small one would be 0.
        size = centred.detach().abs().amax(-1, keepdim=True)  # (…, 1)
        # The mean of equal entries may be rounded, so their distance from it does not show that they are equal.
        flat = (states == states[..., :1]).all(-1, keepdim=True)
        centred = (centred / size.masked_fill(flat, 1)).masked_fill(flat, 0)
        variance = centred.square().mean(-1, keepdim=True)
        y = centred * variance.masked_fill(flat, 1).rsqrt() * self.weight + self.bias
        return y.type_as(x)


@register_norm("none")
class NoNorm(Mechanism, nn.Identity):
    """x: residual connections without a norm (Chiang & Cholak 2022, section 3)."""

    paper = "Chiang & Cholak 2022"
    excludes = frozenset({"pre_norm", "no_final_norm"})

    def __init__(self, dim: int):
        super().__init__()

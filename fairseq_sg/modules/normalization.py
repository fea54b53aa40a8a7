"""Normalization of feature-mapped Queries and Keys: ``--qk-norm`` (Park & Kim 2024, section 4.1).

    Q̂ = Norm(φ(Q)),  K̂ = Norm(φ(K)),  then linear attention with its denominator as before.

The norm runs over the features of one head. A positive scale per position of Q̂ cancels in the denominator; the effect
comes from K̂, whose scale weighs the positions against each other. The paper gives no value for ε; 1e-6 is ours. Queries
and Keys have a normalization module each, which the heads share. Norms are computed in float32 (float64), results have
the dtype of the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.precision import accumulation_dtype
from fairseq_sg.ops.transforms import transformed
from fairseq_sg.registry import Mechanism, Registry

QK_NORM_REGISTRY = Registry("query/key normalization", "--qk-norm")
register_qk_norm = QK_NORM_REGISTRY.register


def build_qk_norm(name: str, dim: int, **options: Any) -> nn.Module:
    """A normalization over the last dimension, ``(…, dim) -> (…, dim)``. Raises UsageError for an unknown name."""
    return QK_NORM_REGISTRY.find(name)(dim, **options)


class QKNormalization(Mechanism, nn.Module):
    """Base class of normalizations ``(…, dim) -> (…, dim)``.

    Args:
        dim: F, the number of features.
        eps: ε, added to the norm.
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim = dim
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


@register_qk_norm("none")
class NoNormalization(QKNormalization):
    """x: the linear attention of Katharopoulos et al. 2020."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@register_qk_norm("l1")
class L1Normalization(QKNormalization):
    """x / (‖x‖₁ + ε)."""

    paper = "Park & Kim 2024"

    def forward(self, x: Tensor) -> Tensor:
        norm = x.abs().sum(-1, keepdim=True, dtype=accumulation_dtype(x))  # (…, 1)
        return (x / (norm + self.eps)).type_as(x)


@register_qk_norm("l2")
class L2Normalization(QKNormalization):
    """x / (‖x‖₂ + ε)."""

    paper = "Park & Kim 2024"

    def forward(self, x: Tensor) -> Tensor:
        return over_l2(x, self.eps).type_as(x)


@register_qk_norm("rms")
class RMSNormalization(QKNormalization):
    """x / (RMS(x) + ε) ⊙ γ, RMS(x) = √(mean x²), ε outside the root as the paper writes it; γ starts at 1."""

    paper = "Park & Kim 2024"

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        root = x.shape[-1] ** 0.5  # ‖x‖₂ / RMS(x)
        return (over_l2(x, root * self.eps) * root * self.weight).type_as(x)


def over_l2(x: Tensor, eps: float) -> Tensor:
    """x / (‖x‖₂ + ε), (…, F), in float32 (float64)."""
    return x / (l2_norm(x) + eps) if transformed() else _OverL2.apply(x, eps)[0]


class _OverL2(torch.autograd.Function):
    """y = x / (‖x‖₂ + ε), and ‖x‖₂: ∂x = ∂y / (‖x‖₂ + ε) − y (∂y·y) / ‖x‖₂, in half the passes over memory that
    autograd takes. The norm is a result only because second derivatives go through what is kept.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        norm = l2_norm(x)  # (…, 1)
        y = x / (norm + eps)
        ctx.save_for_backward(y, norm)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.dtype = eps, x.dtype
        return y, norm

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor | None, grad_norm: Tensor | None):
        y, norm = ctx.saved_tensors
        grad = torch.zeros_like(y) if grad is None else grad
        size = norm.clamp(min=torch.finfo(norm.dtype).tiny)  # y is 0 where the norm is
        along = (grad * y).sum(-1, keepdim=True)  # ∂y·y, (…, 1)
        if grad_norm is not None:  # in second derivatives: ∂‖x‖₂/∂x = x / ‖x‖₂
            along = along - grad_norm * (norm + ctx.eps)
        return (grad / (norm + ctx.eps)).addcmul_(y, along / size, value=-1).to(ctx.dtype), None


def l2_norm(x: Tensor) -> Tensor:
    """‖x‖₂, (…, F) -> (…, 1), in float32 (float64)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x))

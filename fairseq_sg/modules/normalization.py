"""Normalization of feature-mapped Queries and Keys: ``--qk-norm`` (Park & Kim 2024, section 4.1).

    Q̂ = Norm(φ(Q)),  K̂ = Norm(φ(K)),  then linear attention with its denominator as before.

The norm runs over the features of one head. Of Q̂, a positive scale per position cancels in the denominator; the effect
comes from K̂, whose scale weighs the positions against each other. The paper gives no value for ε; 1e-6 is ours. Each
normalization is a module of its own for Queries and for Keys, shared by the heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_sg.ops.features import normalized
from fairseq_sg.registry import Mechanism, Registry

QK_NORM_REGISTRY = Registry("query/key normalization", "--qk-norm")
register_qk_norm = QK_NORM_REGISTRY.register


def build_qk_norm(name: str, dim: int, **options: Any) -> nn.Module:
    """A normalization over the last dimension, ``(…, dim) -> (…, dim)``. Raises UsageError for an unknown name."""
    return QK_NORM_REGISTRY.find(name)(dim, **options)


class QKNormalization(Mechanism, nn.Module):
    """Base class: ``forward`` maps features (…, dim) to normalized ones; ε is ``eps``."""

    #: Its name in ``fairseq_sg.ops.features``, if the operator can apply it itself; empty where there is nothing to
    #: apply.
    in_operator: ClassVar[str | None] = None

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim = dim
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


@register_qk_norm("none")
class NoNormalization(QKNormalization):
    """x: the linear attention of Katharopoulos et al. 2020."""

    in_operator = ""

    def forward(self, x: Tensor) -> Tensor:
        return x


@register_qk_norm("l1")
class L1Normalization(QKNormalization):
    """x / (‖x‖₁ + ε)."""

    in_operator = "l1"

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, "l1", self.eps)


@register_qk_norm("l2")
class L2Normalization(QKNormalization):
    """x / (‖x‖₂ + ε)."""

    in_operator = "l2"

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, "l2", self.eps)


@register_qk_norm("rms")
class RMSNormalization(QKNormalization):
    """x / (RMS(x) + ε) ⊙ γ, RMS(x) = √(mean x²), ε outside the root as the paper writes it; γ starts at 1."""

    in_operator = "rms"

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, "rms", self.eps, self.weight)

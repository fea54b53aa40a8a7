"""Feature maps φ and normalizations of Queries and Keys that operators can apply themselves: x̂ = Norm(φ(x)).

These are the maps that keep the width, and all three normalizations of Park & Kim (2024, section 4.1). The norm is over
the features of a head, and ε is added to it, not under a root, as the paper writes it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_sg.ops.checks import check_floating
from fairseq_sg.ops.precision import accumulation_dtype


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020, eq. 7).

    Computed as exp(min(x, 0)) + max(x, 0), which is the same. As elu(x) + 1 = (exp(x) − 1) + 1 it cancels in half
    precision, to 0 at x = −8 in bfloat16.
    """
    return x.clamp(max=0).exp() + x.relu()


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def squared(x: Tensor) -> Tensor:
    """x², in float32 (float64): float16 would overflow above 255."""
    return x.to(accumulation_dtype(x)).square()


def l1(x: Tensor) -> Tensor:
    """‖x‖₁, (…, F) -> (…, 1), in float32 (float64)."""
    return x.abs().sum(-1, keepdim=True, dtype=accumulation_dtype(x))


def l2(x: Tensor) -> Tensor:
    """‖x‖₂, (…, F) -> (…, 1), in float32 (float64)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x))


def rms(x: Tensor) -> Tensor:
    """√(mean x²), (…, F) -> (…, 1), in float32 (float64)."""
    return l2(x) * x.shape[-1] ** -0.5


FEATURE_MAPS = {"elu": elu, "relu": relu, "squared": squared}
QK_NORMS = {"l1": l1, "l2": l2, "rms": rms}


def normalized(x: Tensor, norm: str, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / (‖x‖ + ε) ⊙ γ, in the dtype of x.

    Args:
        x: (…, F).
        norm: key of `QK_NORMS`.
        eps: ε.
        weight: γ (F,); None for 1.
    """
    x_hat = x / (QK_NORMS[norm](x) + eps)
    return (x_hat if weight is None else x_hat * weight).type_as(x)


class Features(NamedTuple):
    """How Queries and Keys become features: the map φ and the normalization by name, None for neither, and its ε."""

    feature_map: str | None = None
    qk_norm: str | None = None
    eps: float = 1e-6

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Norm(φ(x)), (…, F) -> (…, F); `weight` is the γ of ``rms``."""
        if self.feature_map is not None:
            x = FEATURE_MAPS[self.feature_map](x)
        if self.qk_norm is not None:
            x = normalized(x, self.qk_norm, self.eps, weight)
        return x

    @property
    def origin(self) -> float:
        """The number that φ maps to 0: rows of it have the features 0, and pass no gradient on."""
        return -math.inf if self.feature_map == "elu" else 0.0

    def check(self, features: int, **weights: Tensor | None) -> None:
        """Raises `ValueError` for unknown names, an ε that is not positive, and weights of another size or norm."""
        _check_name("feature_map", self.feature_map, FEATURE_MAPS)
        _check_name("qk_norm", self.qk_norm, QK_NORMS)
        if not self.eps > 0:
            raise ValueError(f"norm_eps must be positive, not {self.eps}: it is what a row of zeros is divided by")
        for name, weight in weights.items():
            if weight is None:
                continue
            check_floating(**{name: weight})
            if self.qk_norm != "rms":
                raise ValueError(f"{name} is the γ of qk_norm 'rms', and qk_norm is {self.qk_norm!r}")
            if weight.shape != (features,):
                raise ValueError(f"{name} must be ({features},), not {tuple(weight.shape)}")


def _check_name(argument: str, name: str | None, known: dict) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{argument} is {name!r}; choose one of: None, {', '.join(sorted(known))}")

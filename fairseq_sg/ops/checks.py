"""Checks of arguments that several operators share."""

from __future__ import annotations

import torch
from torch import Tensor


def describe(**tensors: Tensor) -> str:
    """Names and shapes for an error message: ``q (2, 8, 5, 16), k (2, 8, 7, 16)``."""
    if torch.compiler.is_compiling():
        # A shape that is printed is a constant, and needs a graph of its own. What raises is run again, uncompiled.
        return ""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def check_floating(**tensors: Tensor) -> None:
    """Raises `TypeError` if a tensor is not of a floating dtype."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, not {tensor.dtype}")


def check_padding_mask(name: str, mask: Tensor | None, batch: int, length: int) -> None:
    """Raises `TypeError` or `ValueError` unless `mask` is None or a bool tensor (batch, length)."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, True at padding, not {mask.dtype}")
    if mask.shape != (batch, length):
        raise ValueError(f"{name} must be (batch, length) = {(batch, length)}, not {tuple(mask.shape)}")


def refuse_second_derivative(operator: str, where: str = "", mend: str = "implementation='naive' has one") -> None:
    """Raises `RuntimeError` in the backward pass of an implementation that has no derivative of its own, if it is asked
    for.

    With torch's `once_differentiable` a second derivative would be 0 without a word where the gradient is a constant.

    Args:
        operator: its name, or words for it. where: the part of it that has none, if not all. mend: what to do instead.
    """
    if torch.is_grad_enabled():
        what = " ".join(filter(None, [f"{operator} has no second derivative", where, "(create_graph=True)"]))
        raise RuntimeError("; ".join(filter(None, [what, mend])))

"""Checks of arguments that several operators share."""

from __future__ import annotations

import torch
from torch import Tensor


def describe(**tensors: Tensor) -> str:
    """Names and shapes for an error message: ``q (2, 8, 5, 16), k (2, 8, 7, 16)``."""
    if torch.compiler.is_compiling():
        # A printed shape is a constant, which would need its own graph. A call that raises runs again, uncompiled.
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


def refuse_second_derivative(operator: str, naive_has_one: bool = True) -> None:
    """Raises `RuntimeError` in a backward pass with ``create_graph=True``.

    torch's `once_differentiable` raises no error where the incoming gradient is a constant: the second derivative would
    silently be 0.
    """
    if torch.is_grad_enabled():
        other = "; implementation='naive' has one" * naive_has_one
        raise RuntimeError(f"{operator} has no second derivative (create_graph=True){other}")

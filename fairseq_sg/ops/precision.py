"""The dtype in which sums over a sequence are taken.

A running sum in bfloat16 stops growing once a new term is smaller than half a unit in the last place of the sum (128
stays 128 when 0.5 is added), and the squares of float16 numbers overflow above 255. Operators that sum over positions
therefore compute in float32, or in float64 where an input has it, whatever the inputs and autocast say.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of the tensors has it, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def accurate(x: Tensor) -> Tensor:
    """x in its `accumulation_dtype`; x itself if it has that already."""
    return x.to(accumulation_dtype(x))


def to_accumulation_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in their common `accumulation_dtype`; those that have it already are returned as they are."""
    dtype = accumulation_dtype(*tensors)
    return tuple(tensor.to(dtype) for tensor in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` on `device`; None where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating tensors of one device as ``torch.autocast`` gives them to a product: in its dtype, but for float64."""
    dtype = autocast_dtype(tensors[0].device)
    return tuple(x if dtype is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def autocast_disabled(device: torch.device) -> AbstractContextManager:
    """A context in which ``torch.autocast`` leaves operations on `device` alone."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)

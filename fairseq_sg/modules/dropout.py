"""Dropout whose masks are cheap on a CPU.

    y = m ⊙ x,   m_i = 0 with probability p̂, else 1 / (1 − p̂)        (Srivastava et al. 2014, section 10: inverted)

torch draws a number of its own for each m_i, which is a sixth of a training step of a small model on a CPU. Here every
random integer of 64 bits decides on four elements: each takes 16 bits, and is dropped where they are below p · 2¹⁶. So
p̂ is the multiple of 2⁻¹⁶ next to p, |p̂ − p| ≤ 2⁻¹⁷, and m has the exact 1 / (1 − p̂). The integers come from torch's
generator of the CPU, whose state fairseq keeps in checkpoints. On other devices, and in compiled code, which makes the
numbers where it uses them, dropout is torch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.ops.precision import accumulation_dtype

_LEVELS = 1 << 16


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """m of a tensor on the CPU: its shape and dtype, contiguous, without gradient. p is from 0 to 1."""
    dropped = round(p * _LEVELS)
    if dropped == _LEVELS:
        return torch.zeros(x.shape, dtype=x.dtype)
    count = x.numel()
    # Without the bounds the sign would be 0 in every integer.
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    # Compared as floating numbers, in place: kernels for integers and booleans take twice the time.
    mask = bits[:count].to(accumulation_dtype(x)).ge_(dropped - _LEVELS // 2)
    return mask.mul_(_LEVELS / (_LEVELS - dropped)).to(x.dtype).view(x.shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x of any shape and floating dtype -> y; x itself where p is 0 or ``training`` false."""
    if p == 0 or not training:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return x * dropout_mask(x, p)


class Dropout(nn.Dropout):
    """``dropout`` as a module; a drop-in for ``torch.nn.Dropout``. Raises ValueError for a p outside [0, 1]."""

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def add_to(self, x: Tensor, update: Tensor) -> Tensor:
        """x + Drop(update), of the same shape: the residual connection."""
        elsewhere = x.device.type != "cpu" or torch.compiler.is_compiling()
        if self.p == 0 or not self.training or elsewhere or x.dtype != update.dtype:
            return x + self(update)
        return torch.addcmul(x, update, dropout_mask(update, self.p))

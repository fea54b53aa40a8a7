"""Dropout whose masks are cheap on a CPU.

    y = m ⊙ x,   m_i = 0 with probability p̂, else 1 / (1 − p̂)        (Srivastava et al. 2014, section 10: inverted)

torch draws a number for each m_i, which is a sixth of a training step of a small model on a CPU. Here a random
integer of 64 bits decides on four elements: each takes 16 bits, and is dropped where they are below p · 2¹⁶. So p̂ is
the multiple of 2⁻¹⁶ next to p, |p̂ − p| ≤ 2⁻¹⁷, and m has the exact 1 / (1 − p̂). The integers come from numpy's
SFC64, which takes half the time of torch's Mersenne twister. torch's generator of the CPU seeds each mask, and
fairseq keeps its state in checkpoints. On other devices, in compiled code, and within transforms of ``torch.func``,
dropout is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fairseq_sg.errors import UsageError
from fairseq_sg.ops.precision import accumulation_dtype
from fairseq_sg.ops.transforms import plain

_LEVELS = 1 << 16
#: Numbers of a mask that are made at a time, so that they stay in the cache until they are done.
_BLOCK = 1 << 17


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """m of a tensor on the CPU: its shape and dtype, contiguous, without gradient. p is from 0 to 1."""
    first_kept = round(p * _LEVELS) - _LEVELS // 2
    mask = torch.empty(x.numel(), dtype=accumulation_dtype(x))
    generator = np.random.SFC64(_SEEDS)
    for block in mask.split(_BLOCK):
        bits = generator.random_raw((len(block) + 3) // 4).view(np.int16)
        # Compared as floating numbers, in place: kernels for integers and booleans take twice the time.
        block.copy_(torch.from_numpy(bits)[: len(block)]).ge_(first_kept).mul_(_kept_value(p))
    return mask.to(x.dtype).view(x.shape)


def _kept_value(p: float) -> float:
    """1 / (1 − p̂), or 0 where nothing is kept."""
    kept = _LEVELS - round(p * _LEVELS)
    return _LEVELS / kept if kept else 0.0


class _SeedsFromTorch(ISeedSequence):
    def generate_state(self, n_words: int, dtype: type = np.uint32) -> np.ndarray:
        # Without the bounds the sign would be 0 in every integer.
        words = torch.empty(n_words, dtype=torch.int64).random_(-(1 << 63), None)
        return words.numpy().view(np.uint64).astype(dtype, copy=False)


_SEEDS = _SeedsFromTorch()


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x of any shape and floating dtype -> y; x itself where p is 0 or ``training`` false."""
    return F.dropout(x, p, training) if _is_torchs(x, p, training) else x * dropout_mask(x, p)


def _is_torchs(x: Tensor, p: float, training: bool) -> bool:
    """Whether there is nothing to drop, or torch does it."""
    return p == 0 or not training or x.device.type != "cpu" or plain()


class Drops(nn.Module):
    """A module with dropout in training, and in fairseq's generation with ``--retain-dropout``."""

    retains_dropout = False

    @property
    def drops(self) -> bool:
        return self.training or self.retains_dropout

    def make_generation_fast_(
        self,
        name: str = "",
        retain_dropout: bool = False,
        retain_dropout_modules: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by fairseq before it generates."""
        if retain_dropout and retain_dropout_modules:
            raise UsageError("--retain-dropout-modules names modules of fairseq's own models: leave it out")
        self.retains_dropout = retain_dropout


class Dropout(Drops, nn.Dropout):
    """``dropout`` as a module; a drop-in for ``torch.nn.Dropout``. Raises ValueError for a p outside [0, 1]."""

    def __init__(self, p: float = 0.5):
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.drops)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether the module itself is called: torch drops, or a hook waits for its output."""
        return _is_torchs(x, self.p, self.drops) or bool(self._forward_hooks or self._forward_pre_hooks)

    def of_relu(self, x: Tensor) -> Tensor:
        """Drop(ReLU(x)), in one pass less than in two steps, and with half as much kept for the derivative."""
        if self._is_plain(x):
            return self(x.relu())
        return _DroppedRelu.apply(x, dropout_mask(x, self.p), _kept_value(self.p))

    def add_to(self, x: Tensor, update: Tensor) -> Tensor:
        """x + Drop(update), of the same shape: the residual connection."""
        if self._is_plain(x) or x.dtype != update.dtype:
            return x + self(update)
        return _AddDropped.apply(x, update, dropout_mask(update, self.p))


class _DroppedRelu(torch.autograd.Function):
    """y = ReLU(m ⊙ x), in the mask's own memory. Where y > 0, and only there, ∂x = ∂y / (1 − p̂): no mask is kept."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mask: Tensor, kept_value: float) -> Tensor:
        y = mask.mul_(x).relu_()
        ctx.save_for_backward(y)
        ctx.kept_value = kept_value
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, y, 0.0).mul_(ctx.kept_value), None, None


class _AddDropped(torch.autograd.Function):
    """x + m ⊙ u. Of ``addcmul`` itself, the derivative would multiply m by a factor first that is 1 here."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, update: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.addcmul(x, update, mask)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        (mask,) = ctx.saved_tensors
        return grad, grad * mask, None

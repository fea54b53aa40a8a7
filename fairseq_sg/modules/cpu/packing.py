"""Packing: hidden states of a training step on a CPU, without the padding of the batch.

Projections, feedforward layers, layer norms, dropout, residual connections and the output layer work on each position
by itself, and need not work on padding. On a CPU, a stack in training therefore carries the R real positions of the
(N, B, C) positions of a batch as (R, 1, C), in the same order, where enough padding is saved. Attentions unpack their
queries, keys and values, and pack their outputs. Results at real positions change by rounding alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.transforms import transformed

#: Smallest share of padding for which packing saves more than it costs.
WORTHWHILE = 0.1


def packing_for_training(padding_mask: Tensor) -> Packing | None:
    """The packing of a batch where it pays, else None; padding_mask (B, N).

    On a GPU there is none: the host would have to wait for the number of real positions. Within a transform of
    ``torch.func`` there is none either: sentences of a ``vmap`` would differ in it.
    """
    if padding_mask.device.type != "cpu" or transformed():
        return None
    packing = Packing(padding_mask)
    real = packing.index.numel()
    return packing if 0 < real <= (1 - WORTHWHILE) * padding_mask.numel() else None


class Packing:
    """Hidden states without padding, (R, 1, C).

    Args:
        padding_mask: (B, N) bool, True at padding, on any side and in any place.

    Attributes:
        length, batch: N and B. index: (R,) int64, the real positions counted through (N, B), R > 0.
    """

    def __init__(self, padding_mask: Tensor):
        self.batch, self.length = padding_mask.shape
        padding = padding_mask.t()
        self.index = _places(~padding)
        self._padding = padding
        # (N, B): the row of each real position, any at padding.
        self._row = ((~padding).flatten().cumsum(0) - 1).clamp_(min=0).view(padding.shape)

    def pack(self, x: Tensor) -> Tensor:
        """x (N, B, C) -> (R, 1, C)."""
        return _Pack.apply(x.flatten(0, 1), *self._rows).unsqueeze(1)

    def unpack(self, x: Tensor) -> Tensor:
        """x (R, 1, C) -> (N, B, C), zeros at padding."""
        return _Unpack.apply(x.squeeze(1), *self._rows).unflatten(0, (self.length, self.batch))

    def unpack_batch_first(self, x: Tensor) -> Tensor:
        """x (R, 1, C) -> (B, N, C), zeros at padding."""
        index = self.index % self.batch * self.length + self.index // self.batch
        rows = index, self._row.t().flatten(), _places(self._padding.t())
        return _Unpack.apply(x.squeeze(1), *rows).unflatten(0, (self.batch, self.length))

    @functools.cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of ``_Pack`` and ``_Unpack``, with positions counted through (N, B)."""
        return self.index, self._row.flatten(), _places(self._padding)


def packed(x: Tensor, packing: Packing | None) -> Tensor:
    """x (N, B, C) as the hidden state of a stack: packed, if there is a packing."""
    return x if packing is None else packing.pack(x)


def unpacked(x: Tensor, packing: Packing | None) -> Tensor:
    """(N, B, C) of a hidden state that may be packed."""
    return x if packing is None else packing.unpack(x)


def _places(mask: Tensor) -> Tensor:
    """The flat indices at which a mask is True."""
    return mask.flatten().nonzero().squeeze(1)


class _Pack(torch.autograd.Function):
    """Rows of x by index, each at most once, so the derivative is no sum. The other arguments are ``_Unpack``'s."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, row: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(index, row, padding)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        return _Unpack.apply(grad, *ctx.saved_tensors), None, None, None


class _Unpack(torch.autograd.Function):
    """Inverse of ``_Pack``, with zeros at ``padding``; each is the derivative of the other.

    Each position reads its row, in half the time of writing rows into zeros.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, row: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(index, row, padding)
        return x.index_select(0, row).index_fill_(0, padding, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        return _Pack.apply(grad, *ctx.saved_tensors), None, None, None

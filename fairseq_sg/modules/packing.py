"""Packing: the real positions of a padded batch, one after another, without the padding between them.

What works on each position by itself (projections, feedforward layers, layer norms, dropout, residual connections, the
output layer) need not work on padding. Between attentions a stack therefore carries a packed hidden state where that
pays: of the (N, B, C) positions of a batch the R real ones, as (R, 1, C), in the order that they have in (N, B, C).
Such a tensor is a time-first batch of one row without padding, so that what works position by position takes it as it
is; an attention unpacks its queries, keys and values and packs its output. At real positions nothing changes but
rounding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

#: Below this share of padding, packing costs as much as it saves.
WORTHWHILE = 0.1


class Packing:
    """Where the real positions of a batch are.

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

    @property
    def positions(self) -> int:
        """N · B."""
        return self.length * self.batch

    @classmethod
    def where_it_pays(cls, padding_mask: Tensor) -> Packing | None:
        """The packing of a batch on a CPU of which a share is padding, else None.

        On a GPU the number of real positions would have to come to the host before the next kernel can start.
        """
        if padding_mask.device.type != "cpu":
            return None
        packing = cls(padding_mask)
        real = packing.index.numel()
        return packing if 0 < real <= (1 - WORTHWHILE) * packing.positions else None

    def pack(self, x: Tensor) -> Tensor:
        """x (N, B, C) -> (R, 1, C)."""
        return _Pack.apply(x.flatten(0, 1), *self._rows).unsqueeze(1)

    def unpack(self, x: Tensor, batch_first: bool = False) -> Tensor:
        """x (R, 1, C) -> (N, B, C), or (B, N, C), zeros at padding."""
        if not batch_first:
            return _Unpack.apply(x.squeeze(1), *self._rows).unflatten(0, (self.length, self.batch))
        index = self.index % self.batch * self.length + self.index // self.batch
        rows = index, self._row.t().flatten(), _places(self._padding.t())
        return _Unpack.apply(x.squeeze(1), *rows).unflatten(0, (self.batch, self.length))

    @functools.cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """What ``_Pack`` and ``_Unpack`` take, of positions counted through (N, B)."""
        return self.index, self._row.flatten(), _places(self._padding)


def _places(mask: Tensor) -> Tensor:
    """Where a mask is True, counted through all its dimensions."""
    return mask.flatten().nonzero().squeeze(1)


class _Pack(torch.autograd.Function):
    """Rows of x by index, each at most once: so that the derivative need not add. The others' places are
    ``_Unpack``'s.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, row: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(index, row, padding)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        return _Unpack.apply(grad, *ctx.saved_tensors), None, None, None


class _Unpack(torch.autograd.Function):
    """The other way round, zeros at ``padding``: each is the other's derivative.

    Every place reads its row: that takes half the time of zeros into which rows are written.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, row: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(index, row, padding)
        return x.index_select(0, row).index_fill_(0, padding, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        return _Pack.apply(grad, *ctx.saved_tensors), None, None, None

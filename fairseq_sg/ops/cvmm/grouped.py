"""The conditional product on sorted rows: one grouped matrix product, or one product a matrix that has rows.

With the rows of matrix k from o_{k−1} to o_k,

    Y[o_{k−1} : o_k]  = X[o_{k−1} : o_k] M_k
    dX[o_{k−1} : o_k] = dY[o_{k−1} : o_k] M_kᵀ
    dM_k              = X[o_{k−1} : o_k]ᵀ dY[o_{k−1} : o_k],  0 where there are none

torch has a grouped product on some devices and for some dtypes, of matrices whose rows begin at multiples of 16 bytes;
others are padded with zeros. Whether it is there is found out by trying, once for each device and dtype. Where
it is not, each matrix with rows has a product of its own, and the host has to know the counts.

Of the tokens' rows, K times as many as tokens, none is kept for the backward pass: it gathers them again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.cvmm.sorting import SortedSelection
from fairseq_sg.ops.precision import autocast_disabled

ALIGNMENT = 16  # bytes

grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def cvmm_grouped(x: Tensor, matrices: Tensor, routing: SortedSelection, from_tokens: bool, to_tokens: bool) -> Tensor:
    """See `fairseq_sg.ops.cvmm_sorted`; a grouped product where torch has one for the device and dtype."""
    if not has_grouped_mm(x.device, x.dtype):
        return cvmm_segments(x, matrices, routing, from_tokens, to_tokens)
    unit = ALIGNMENT // x.element_size()
    width = matrices.shape[2]
    into, out = -matrices.shape[1] % unit, -width % unit
    if into:
        x = F.pad(x, (0, into))
    if into or out:
        matrices = F.pad(matrices, (0, out, 0, into))
    y = _SortedProduct.apply(x, matrices, routing, from_tokens, to_tokens, _grouped_rows, _grouped_matrices)
    return y[:, :width] if out else y


def cvmm_segments(x: Tensor, matrices: Tensor, routing: SortedSelection, from_tokens: bool, to_tokens: bool) -> Tensor:
    """See `fairseq_sg.ops.cvmm_sorted`; one product a matrix that has rows."""
    return _SortedProduct.apply(x, matrices, routing, from_tokens, to_tokens, _segment_rows, _segment_matrices)


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups of this dtype on this device, empty ones and rows beyond the last among them."""
    if grouped_mm is None:
        return False
    x, matrices = torch.ones(11, 8), torch.arange(1.0, 4.0)[:, None, None].expand(3, 8, 16).contiguous()
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32, device=device)
    x, matrices = x.to(device, dtype), matrices.to(device, dtype)
    try:
        with torch.no_grad(), autocast_disabled(device):
            y = grouped_mm(x, matrices, offs=offsets)[:9]
            back = grouped_mm(y.new_ones(11, 16), matrices.transpose(1, 2), offs=offsets)[:9]
            outer = grouped_mm(x.t(), x.new_ones(11, 16), offs=offsets)
    except (RuntimeError, TypeError, ValueError):
        return False
    factor = torch.tensor([1.0] * 4 + [3.0] * 5)
    found = (y[:, 0] / 8, back[:, 0] / 16, outer[:, 0, 0])
    wanted = (factor, factor, torch.tensor([4.0, 0.0, 5.0]))
    return all(torch.equal(a.float().cpu(), b) for a, b in zip(found, wanted, strict=True))


class _SortedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        matrices: Tensor,
        routing: SortedSelection,
        from_tokens: bool,
        to_tokens: bool,
        multiply_rows: Callable[[Tensor, Tensor, SortedSelection], Tensor],
        multiply_matrices: Callable[[Tensor, Tensor, SortedSelection], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.arguments = routing, from_tokens, to_tokens, multiply_rows, multiply_matrices
        rows = routing.rows(x) if from_tokens else x.contiguous()
        y = _clear(multiply_rows(rows, matrices.contiguous(), routing), routing)
        return routing.sums(y) if to_tokens else y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        refuse_second_derivative("cvmm")
        x, matrices = ctx.saved_tensors
        routing, from_tokens, to_tokens, multiply_rows, multiply_matrices = ctx.arguments
        grad_x = grad_matrices = None
        with autocast_disabled(x.device):
            # torch's grouped product refuses a gradient that is expanded, as that of a sum is.
            grad = routing.rows(grad) if to_tokens else grad.contiguous()
            if ctx.needs_input_grad[0]:
                grad_x = _clear(multiply_rows(grad, matrices.contiguous().transpose(1, 2), routing), routing)
                grad_x = routing.sums(grad_x) if from_tokens else grad_x
            if ctx.needs_input_grad[1]:
                rows = routing.rows(x) if from_tokens else x.contiguous()
                grad_matrices = multiply_matrices(rows, grad, routing)
        return grad_x, grad_matrices, None, None, None, None, None


def _clear(rows: Tensor, routing: SortedSelection) -> Tensor:
    """Zero where no matrix has worked: a grouped product leaves there what was in memory."""
    return rows if routing.complete else rows.masked_fill_(routing.without_matrix, 0.0)


def _grouped_rows(rows: Tensor, matrices: Tensor, routing: SortedSelection) -> Tensor:
    if len(rows) == 0:
        return rows.new_zeros(0, matrices.shape[2])
    return grouped_mm(rows, matrices, offs=routing.offsets)


def _grouped_matrices(rows: Tensor, grad: Tensor, routing: SortedSelection) -> Tensor:
    if len(rows) == 0:
        return rows.new_zeros(len(routing.offsets), rows.shape[1], grad.shape[1])
    return grouped_mm(rows.t(), grad, offs=routing.offsets)


def _segment_rows(rows: Tensor, matrices: Tensor, routing: SortedSelection) -> Tensor:
    out = rows.new_zeros(len(rows), matrices.shape[2])
    begin = 0
    for matrix, count in zip(matrices, routing.counts_on_host, strict=True):
        if count:
            torch.mm(rows[begin : begin + count], matrix, out=out[begin : begin + count])
        begin += count
    return out


def _segment_matrices(rows: Tensor, grad: Tensor, routing: SortedSelection) -> Tensor:
    out = rows.new_zeros(len(routing.offsets), rows.shape[1], grad.shape[1])
    begin = 0
    for matrix, count in enumerate(routing.counts_on_host):
        if count:
            torch.mm(rows[begin : begin + count].t(), grad[begin : begin + count], out=out[matrix])
        begin += count
    return out

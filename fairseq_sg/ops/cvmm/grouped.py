"""The conditional product on sorted rows by torch's grouped product, for devices and dtypes that have one.

With the rows of matrix k from o_{k−1} to o_k,

    Y[o_{k−1} : o_k]  = X[o_{k−1} : o_k] M_k
    dX[o_{k−1} : o_k] = dY[o_{k−1} : o_k] M_kᵀ
    dM_k              = X[o_{k−1} : o_k]ᵀ dY[o_{k−1} : o_k],  0 where there are none

All rows must begin at multiples of 16 bytes; others are padded with zeros. The host reads no counts here. On a GPU
torch's product reads them, except in bfloat16 on compute capability 9.0 and 10.0. The rows of all entries, K times as
many as tokens, are not kept for the backward pass, which gathers them again.
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
    """See `fairseq_sg.ops.cvmm_sorted`; needs `has_grouped_mm`."""
    unit = ALIGNMENT // x.element_size()
    width = matrices.shape[2]
    pad_in, pad_out = -matrices.shape[1] % unit, -width % unit
    if pad_in:
        x = F.pad(x, (0, pad_in))
    if pad_in or pad_out:
        matrices = F.pad(matrices, (0, pad_out, 0, pad_in))
    y = _GroupedProduct.apply(x, matrices, routing, from_tokens, to_tokens)
    return y[:, :width] if pad_out else y


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups of this dtype on this device, also empty groups and rows after the last one.

    A small product is tried, once for each device and dtype.
    """
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


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, matrices: Tensor, routing: SortedSelection, from_tokens: bool, to_tokens: bool
    ) -> Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.arguments = routing, from_tokens, to_tokens
        rows = routing.rows(x) if from_tokens else _aligned(x)  # (R, M)
        y = _products(rows, _aligned(matrices), routing)  # (R, L)
        return routing.sums(y) if to_tokens else y  # (N, L) or (R, L)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cvmm")
        x, matrices = ctx.saved_tensors
        routing, from_tokens, to_tokens = ctx.arguments
        grad_x = grad_matrices = None
        with autocast_disabled(x.device):
            # torch's grouped product refuses a gradient that is expanded, as that of a sum is.
            grad = routing.rows(grad) if to_tokens else _aligned(grad)  # (R, L)
            if ctx.needs_input_grad[0]:
                grad_x = _products(grad, _aligned(matrices).transpose(1, 2), routing)  # (R, M)
                grad_x = routing.sums(grad_x) if from_tokens else grad_x
            if ctx.needs_input_grad[1]:
                rows = routing.rows(x) if from_tokens else _aligned(x)  # (R, M)
                grad_matrices = _outer_products(rows, grad, routing)  # (E, M, L)
        return grad_x, grad_matrices, None, None, None


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous, at an address that is a multiple of 16 bytes: a part of a larger tensor may lie anywhere."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _products(rows: Tensor, matrices: Tensor, routing: SortedSelection) -> Tensor:
    """Every row times its matrix; 0 for rows without a matrix."""
    if len(rows) == 0:
        return rows.new_zeros(0, matrices.shape[2])
    y = grouped_mm(rows, matrices, offs=routing.offsets)
    # Rows without a matrix hold uninitialized memory.
    return y if routing.complete else y.masked_fill_(routing.without_matrix, 0.0)


def _outer_products(rows: Tensor, grad: Tensor, routing: SortedSelection) -> Tensor:
    """Σ rowᵀ grad over the rows of each matrix."""
    if len(rows) == 0:
        return rows.new_zeros(len(routing.offsets), rows.shape[1], grad.shape[1])
    return grouped_mm(rows.t(), grad, offs=routing.offsets)

"""The orthogonality loss in Triton: normalization, smaller Gram matrix and loss in one kernel, gradient in another.

As in ``chunked.py``, with N ≤ E positions the matrix is D = V̄V̄ᵀ − I (N×N) and otherwise D = V̄ᵀV̄ − I (E×E), with which

    ‖V̄V̄ᵀ − I‖²_F = ‖D‖²_F   or   ‖D‖²_F + N − E,   and   ∂V̄ = 4 D V̄   or   4 V̄ D.

A program has a tile of D for one sequence and head (up to 32 × 32: all of it for small heads), and normalizes the
values as it reads them; the backward pass has one program for some rows of V. Kept for it are the values and D, neither
norms nor, where N > E, anything of size N×N. Arithmetic is float32; of values in half precision, products of unit
vectors are split into three of TF32, which loses nothing that counts. Nothing is added atomically: results are the same
in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.orthogonality import WIDEST
from fairseq_sg.ops.triton_support import launch, power_of_two
from fairseq_sg.ops.triton_tiles import load_tile, real_rows

#: Not 64: see `triton_support`.
TILE = 32


def orthogonality_loss_triton(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F of every sequence and head, (B, H); see `fairseq_sg.ops.orthogonality_loss`."""
    return _OrthogonalityLoss.apply(values, padding_mask, eps)


class _OrthogonalityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
        values = values if values.stride(3) == 1 or values.shape[3] <= 1 else values.contiguous()
        mask = None if padding_mask is None else padding_mask.contiguous().view(torch.uint8)
        batch, heads, length, width = values.shape
        side = min(length, width)
        tile = power_of_two(side, 16, TILE)
        tiles = max(-(-side // tile), 1)
        deviation = torch.empty(batch, heads, side, side, dtype=torch.float32, device=values.device)
        parts = torch.empty(batch, heads, tiles * tiles, dtype=torch.float32, device=values.device)
        options = _options(values)
        launch(
            _rows_kernel if length <= width else _columns_kernel,
            (batch * heads, tiles, tiles),
            values,
            mask,
            deviation,
            parts,
            *values.stride()[:3],
            heads,
            length,
            eps,
            E=width,
            BLOCK=tile,
            SINGLE=tiles == 1,
            **options,
        )
        ctx.save_for_backward(values, mask, deviation)
        ctx.eps = eps
        # Where no more than E rows are real the loss can be 0, and rounding may leave this just below.
        return parts[..., 0] if tiles == 1 else parts.sum(dim=-1).clamp_min_(0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("orthogonality_loss")
        values, mask, deviation = ctx.saved_tensors
        batch, heads, length, width = values.shape
        grad_values = torch.empty_like(values, memory_format=torch.contiguous_format)
        options = _options(values)
        launch(
            _grad_kernel,
            (batch * heads, -(-length // options["ROWS"])),
            values,
            mask,
            deviation,
            grad.contiguous(),
            grad_values,
            *values.stride()[:3],
            heads,
            length,
            ctx.eps,
            E=width,
            OF_ROWS=length <= width,
            **options,
        )
        return grad_values, None, None


def _options(values: Tensor) -> dict:
    """WIDTH holds a whole row of values; wide rows are taken fewer at a time."""
    width = power_of_two(values.shape[3], 16, WIDEST)
    return {
        "WIDTH": width,
        "ROWS": 32 if width <= 128 else 16,
        "PRECISION": "ieee" if values.dtype == torch.float32 else "tf32x3",
        "num_warps": 4 if width <= 64 else 8,
        "num_stages": 1,
    }


@triton.jit
def _scale(squares, present, eps):
    """‖v‖ + eps, and 1 where there is no v."""
    return tl.where(present, tl.sqrt_rn(squares) + eps, 1.0)


@triton.jit(do_not_specialize=["length"])
def _columns_kernel(
    values,
    mask,
    deviation,
    parts,
    by_batch,
    by_head,
    by_row,
    heads,
    length,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    values += batch * by_batch + head * by_head
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)

    gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    count = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, length, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        present = real_rows(mask, batch, rows, length)
        whole = load_tile(values, rows, tl.arange(0, WIDTH), by_row, present, E)
        scale = _scale(tl.sum(whole * whole, axis=1), present, eps)[:, None]
        if SINGLE:
            unit = whole / scale
            gram += tl.dot(tl.trans(unit), unit, input_precision=PRECISION)
        else:
            left = load_tile(values, rows, i, by_row, present, E) / scale
            right = load_tile(values, rows, j, by_row, present, E) / scale
            gram += tl.dot(tl.trans(left), right, input_precision=PRECISION)
        count += present.to(tl.float32)

    diagonal = (i[:, None] == j[None, :]) & (i < E)[:, None]
    gram -= tl.where(diagonal, 1.0, 0.0)
    cell = i[:, None] * E + j[None, :]
    tl.store(deviation + pair * E * E + cell, gram, mask=(i < E)[:, None] & (j < E)[None, :])
    part = tl.sum(tl.sum(gram * gram, axis=1), axis=0)
    surplus = tl.sum(count, axis=0) - E
    if SINGLE:
        part = tl.maximum(part + surplus, 0.0)
    else:
        part += tl.where(tl.program_id(1) + tl.program_id(2) == 0, surplus, 0.0)
    tl.store(parts + (pair * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2), part)


@triton.jit(do_not_specialize=["length"])
def _rows_kernel(
    values,
    mask,
    deviation,
    parts,
    by_batch,
    by_head,
    by_row,
    heads,
    length,
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    values += batch * by_batch + head * by_head
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    j = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    real_i, real_j = real_rows(mask, batch, i, length), real_rows(mask, batch, j, length)

    COLUMNS: tl.constexpr = 32 if WIDTH > 32 else WIDTH
    squares_i = tl.zeros((BLOCK,), dtype=tl.float32)
    squares_j = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, E, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        left, right = load_tile(values, i, e, by_row, real_i, E), load_tile(values, j, e, by_row, real_j, E)
        squares_i += tl.sum(left * left, axis=1)
        squares_j += tl.sum(right * right, axis=1)
    scale_i, scale_j = _scale(squares_i, real_i, eps)[:, None], _scale(squares_j, real_j, eps)[:, None]

    gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, E, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        left, right = load_tile(values, i, e, by_row, real_i, E), load_tile(values, j, e, by_row, real_j, E)
        gram += tl.dot(left / scale_i, tl.trans(right / scale_j), input_precision=PRECISION)

    diagonal = (i[:, None] == j[None, :]) & real_i[:, None]
    gram -= tl.where(diagonal, 1.0, 0.0)
    cell = i[:, None] * length + j[None, :]
    inside = (i < length)[:, None] & (j < length)[None, :]
    tl.store(deviation + pair * length * length + cell, gram, mask=inside)
    part = tl.sum(tl.sum(gram * gram, axis=1), axis=0)
    tl.store(parts + (pair * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2), part)


@triton.jit(do_not_specialize=["length"])
def _grad_kernel(
    values,
    mask,
    deviation,
    grad,
    grad_values,
    by_batch,
    by_head,
    by_row,
    heads,
    length,
    eps,
    E: tl.constexpr,
    OF_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    values += batch * by_batch + head * by_head
    e = tl.arange(0, WIDTH)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    present = real_rows(mask, batch, rows, length)
    whole = load_tile(values, rows, e, by_row, present, E)
    squares = tl.sum(whole * whole, axis=1)
    scale = _scale(squares, present, eps)[:, None]
    unit = whole / scale

    grad_unit = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    if OF_ROWS:
        deviation += pair * length * length
        for start in range(0, length, ROWS):
            others = (start + tl.arange(0, ROWS)).to(tl.int64)
            of_others = real_rows(mask, batch, others, length)
            other = load_tile(values, others, e, by_row, of_others, E)
            other = other / _scale(tl.sum(other * other, axis=1), of_others, eps)[:, None]
            inside = (rows < length)[:, None] & (others < length)[None, :]
            tile = tl.load(deviation + rows[:, None] * length + others[None, :], mask=inside, other=0.0)
            grad_unit += tl.dot(tile, other, input_precision=PRECISION)
    else:
        deviation += pair * E * E
        for start in range(0, E, ROWS):
            columns = start + tl.arange(0, ROWS)
            part = load_tile(values, rows, columns, by_row, present, E) / scale
            inside = (columns < E)[:, None] & (e < E)[None, :]
            tile = tl.load(deviation + columns[:, None] * E + e[None, :], mask=inside, other=0.0)
            grad_unit += tl.dot(part, tile, input_precision=PRECISION)
    grad_unit *= 4.0 * tl.load(grad + pair)
    # v̄ = v / (‖v‖ + eps), so dv = dv̄ / (‖v‖ + eps) − v̄ (v̄·dv̄) / ‖v‖; the second term is 0 where v is.
    norm = tl.maximum(tl.sqrt_rn(squares), 1.1754943508222875e-38)
    along = tl.sum(unit * grad_unit, axis=1) / norm
    result = grad_unit / scale - unit * along[:, None]
    cell = (pair * length + rows)[:, None] * E + e[None, :]
    tl.store(grad_values + cell, result, mask=(rows < length)[:, None] & (e < E)[None, :])

"""The conditional product in Triton: rows are gathered as they are read, and scattered as they are written.

With row r sorted to matrix e, f = ReLU or nothing, weights s (1 where there are none) and dY the output's gradient,

    Y_r  = s_r f(X_r) M_e
    T_r  = dY_r M_eᵀ,   dX_r = s_r f'(X_r) ∘ T_r,   ds_r = f(X_r) · T_r
    dM_e = Σ_r f(X_r)ᵀ s_r dY_r,  0 where there are none

A program multiplies a block of rows of one matrix. Matrix e, whose rows are o_{e−1} … o_e − 1, has the blocks from
⌊o_{e−1} / BLOCK⌋ + e on, up to those of matrix e + 1, which are always enough. So a program finds its matrix by
counting offsets, ⌊R / BLOCK⌋ + E blocks cover every selection, and the host need not know it; a block without rows ends
at once.

With one row a token on one side of a product, the rows of that side are read at order[r] // K, or written to order[r]:
there they stand by token, and torch adds up each token's K. For dM_e, a matrix with many rows (`SPLIT`) is split
into parts, added up in their order. Nothing is added atomically: results are the same in every run.

Sums are float32. The factors of a product are multiplied in the dtype of x, float32 without tensor cores. Weights
multiply the sums, but for dM_e they are multiplied into f(X_r) first, which rounds it. Nothing but the arguments is
kept for the backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops import triton_support
from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.cvmm.sorting import SortedSelection
from fairseq_sg.ops.precision import autocast_disabled
from fairseq_sg.ops.triton_support import dense_rows, launch, power_of_two

#: A part has this many rows or more, so that there are no more than these parts besides one a matrix.
SPLIT, PARTS = 1024, 128
CELLS = 1024


def cvmm_triton(
    x: Tensor,
    matrices: Tensor,
    routing: SortedSelection,
    from_tokens: bool,
    to_tokens: bool,
    relu: bool,
    weights: Tensor | None,
) -> Tensor:
    """See `fairseq_sg.ops.cvmm_sorted`."""
    return _ConditionalProduct.apply(x, matrices, weights, routing, from_tokens, to_tokens, relu)


class _ConditionalProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        matrices: Tensor,
        weights: Tensor | None,
        routing: SortedSelection,
        from_tokens: bool,
        to_tokens: bool,
        relu: bool,
    ) -> Tensor:
        x, matrices = dense_rows(x), matrices.contiguous()
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(x, matrices, weights)
        ctx.arguments = routing, from_tokens, to_tokens, relu
        out = x.new_empty(len(routing.order), matrices.shape[2])
        options = _options(routing, x, *matrices.shape[1:], made_here=relu)
        launch(
            _rows_kernel,
            (_blocks(routing, options) * triton.cdiv(matrices.shape[2], options["COLUMNS"]),),
            x,
            matrices,
            weights,
            out,
            routing.order,
            routing.offsets,
            x.stride(0),
            len(routing.order),
            *matrices.shape[1:],
            GATHER=from_tokens,
            SCATTER=to_tokens,
            RELU=relu,
            **options,
        )
        return _sums(out, routing) if to_tokens else out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        refuse_second_derivative("cvmm")
        x, matrices, weights = ctx.saved_tensors
        grad_x = grad_matrices = grad_weights = None
        with autocast_disabled(x.device):
            grad = dense_rows(grad)
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
                grad_x, grad_weights = _grad_of_rows(grad, x, matrices, weights, *ctx.arguments)
            if ctx.needs_input_grad[1]:
                grad_matrices = _grad_of_matrices(grad, x, matrices, weights, *ctx.arguments)
        return grad_x, grad_matrices, grad_weights, None, None, None, None


def _grad_of_rows(
    grad: Tensor,
    x: Tensor,
    matrices: Tensor,
    weights: Tensor | None,
    routing: SortedSelection,
    from_tokens: bool,
    to_tokens: bool,
    relu: bool,
) -> tuple[Tensor, Tensor | None]:
    rows, width = len(routing.order), matrices.shape[1]
    options = _options(routing, x, matrices.shape[2], width)
    tiles = triton.cdiv(width, options["COLUMNS"])
    grad_x = x.new_empty(rows, width)
    # A program has some columns, and ds_r sums over all.
    parts = None if weights is None else x.new_empty((*weights.shape, tiles), dtype=torch.float32)
    launch(
        _grad_rows_kernel,
        (_blocks(routing, options) * tiles,),
        grad,
        matrices,
        x,
        weights,
        grad_x,
        parts,
        routing.order,
        routing.offsets,
        grad.stride(0),
        x.stride(0),
        rows,
        matrices.shape[2],
        width,
        GATHER=to_tokens,
        SCATTER=from_tokens,
        RELU=relu,
        **options,
    )
    grad_weights = None if weights is None else parts.sum(-1).to(weights.dtype)
    return (_sums(grad_x, routing) if from_tokens else grad_x), grad_weights


def _grad_of_matrices(
    grad: Tensor,
    x: Tensor,
    matrices: Tensor,
    weights: Tensor | None,
    routing: SortedSelection,
    from_tokens: bool,
    to_tokens: bool,
    relu: bool,
) -> Tensor:
    count, into, out = matrices.shape
    rows = len(routing.order)
    split = power_of_two(triton.cdiv(rows, PARTS), SPLIT, 1 << 30)
    blocks, splits = rows // split + count, rows > split
    grad_matrices = torch.empty_like(matrices)
    parts = x.new_empty(blocks if splits else 0, into, out, dtype=torch.float32)
    most = _most(x, into, out)
    made_here = relu or weights is not None
    options = _tile(x, power_of_two(into, 16, most), power_of_two(out, 16, most), made_here)
    height, width = options.pop("ROWS"), options["COLUMNS"]
    launch(
        _grad_matrices_kernel,
        (blocks * triton.cdiv(into, height) * triton.cdiv(out, width),),
        x,
        grad,
        weights,
        grad_matrices,
        parts,
        routing.order,
        routing.offsets,
        x.stride(0),
        grad.stride(0),
        rows,
        into,
        out,
        EXPERTS=count,
        CHOSEN=routing.chosen,
        GATHER_X=from_tokens,
        GATHER_GRAD=to_tokens,
        RELU=relu,
        SPLIT=split,
        HEIGHT=height,
        ROWS=most // 2,
        **options,
    )
    if splits:
        grid = (count * triton.cdiv(into * out, CELLS),)
        launch(_sum_of_parts_kernel, grid, parts, grad_matrices, routing.offsets, into * out, SPLIT=split, CELLS=CELLS)
    return grad_matrices


def _sums(rows: Tensor, routing: SortedSelection) -> Tensor:
    """Rows (N·K, M) by token -> (N, M)."""
    return rows if routing.chosen == 1 else rows.unflatten(0, (-1, routing.chosen)).sum(1)


def _options(routing: SortedSelection, x: Tensor, depth: int, width: int, made_here: bool = False) -> dict:
    """Sizes for a product of rows: with equally many rows, a matrix has one or two blocks, or more of the largest."""
    experts, most = len(routing.offsets), _most(x, depth, width)
    return {
        "EXPERTS": experts,
        "CHOSEN": routing.chosen,
        "DEPTH": power_of_two(depth, 16, most // 2),
        **_tile(
            x, power_of_two(len(routing.order) // experts // 2, 16, most), power_of_two(width, 16, most), made_here
        ),
    }


def _tile(x: Tensor, rows: int, columns: int, made_here: bool) -> dict:
    """`made_here`: a factor is changed after it is loaded, as by ReLU. Then products must not overlap on Hopper."""
    warps = 8 if x.dtype != torch.float32 and rows * columns >= 4096 else 4
    stages = 1 if made_here and triton_support.is_hopper(x.device) else 3
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def _most(x: Tensor, *sizes: int) -> int:
    """Rows and columns of a tile. Numbers that cannot be loaded 16 bytes at a time take more registers."""
    return 128 if x.dtype != torch.float32 and all(size % 16 == 0 for size in sizes) else 64


def _blocks(routing: SortedSelection, options: dict) -> int:
    """How many there are at most, with those of rows without a matrix, which are written as 0."""
    return len(routing.order) // options["ROWS"] + len(routing.offsets) + (not routing.complete)


@triton.jit
def _own(block, offsets, rows, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """The matrix of a block, the block's first row, and the first and last (exclusive) of the matrix.

    The matrix is EXPERTS for the rows that have none.
    """
    expert = 0
    for first in range(0, EXPERTS, 256):
        e = first + tl.arange(0, 256)
        end = tl.load(offsets + e, mask=e < EXPERTS, other=0)
        # Up to block ⌊o_e / BLOCK⌋ + e the blocks are those of matrix e, or of one before.
        expert += tl.sum(((e < EXPERTS) & (end // BLOCK + e < block)).to(tl.int32), axis=0)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert, mask=expert < EXPERTS, other=rows)
    return expert, begin + (block - begin // BLOCK - expert) * BLOCK, begin, end


@triton.jit
def _relu(x):
    # NaN stays, as in torch. The interpreter compares bfloat16 as if it were integers.
    return tl.where(x.to(tl.float32) <= 0, 0.0, x)


@triton.jit
def _multiply(
    x,
    by_row,
    rows,
    present,
    matrix,
    by_depth,
    by_column,
    columns,
    depth,
    width,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """f(X[rows]) M[:, columns] in float32."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        d = start + tl.arange(0, DEPTH)
        x_tile = tl.load(
            x + rows[:, None] * by_row + d[None, :], mask=present[:, None] & (d < depth)[None, :], other=0.0
        )
        if RELU:
            x_tile = _relu(x_tile)
        m_tile = tl.load(
            matrix + d[:, None] * by_depth + columns[None, :] * by_column,
            mask=(d < depth)[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        total = tl.dot(x_tile, m_tile, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x,
    matrices,
    weights,
    out,
    order,
    offsets,
    by_row,
    rows,
    depth,
    width,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles = tl.cdiv(width, COLUMNS)
    expert, first, begin, end = _own(tl.program_id(0) // tiles, offsets, rows, ROWS, EXPERTS)
    if first >= end:
        return
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    present = row < end
    place = tl.load(order + row, mask=present, other=0)
    chosen = present & (expert < EXPERTS)
    total = _multiply(
        x,
        by_row,
        place // CHOSEN if GATHER else row,
        chosen,
        matrices + expert.to(tl.int64) * depth * width,
        width,
        1,
        columns,
        tl.where(expert < EXPERTS, depth, 0),
        width,
        RELU,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    if weights is not None:
        total *= tl.load(weights + place, mask=chosen, other=0.0).to(tl.float32)[:, None]
    target = place if SCATTER else row
    inside = present[:, None] & (columns < width)[None, :]
    tl.store(out + target[:, None] * width + columns[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _grad_rows_kernel(
    grad,
    matrices,
    x,
    weights,
    grad_x,
    parts,
    order,
    offsets,
    grad_by_row,
    x_by_row,
    rows,
    depth,
    width,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles = tl.cdiv(width, COLUMNS)
    expert, first, begin, end = _own(tl.program_id(0) // tiles, offsets, rows, ROWS, EXPERTS)
    if first >= end:
        return
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    tile = tl.program_id(0) % tiles
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    present = row < end
    place = tl.load(order + row, mask=present, other=0)
    chosen = present & (expert < EXPERTS)
    total = _multiply(
        grad,
        grad_by_row,
        place // CHOSEN if GATHER else row,
        chosen,
        matrices + expert.to(tl.int64) * width * depth,
        1,
        depth,
        columns,
        tl.where(expert < EXPERTS, depth, 0),
        width,
        False,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    inside = (columns < width)[None, :]
    if RELU or weights is not None:
        source = place // CHOSEN if SCATTER else row
        x_tile = tl.load(
            x + source[:, None] * x_by_row + columns[None, :], mask=chosen[:, None] & inside, other=0.0
        ).to(tl.float32)
    if weights is not None:
        along = tl.sum((_relu(x_tile) if RELU else x_tile) * total, axis=1)
        tl.store(parts + place * tiles + tile, along, mask=present)
        total *= tl.load(weights + place, mask=chosen, other=0.0).to(tl.float32)[:, None]
    if RELU:
        total = tl.where(x_tile <= 0, 0.0, total)
    target = place if SCATTER else row
    tl.store(grad_x + target[:, None] * width + columns[None, :], total, mask=present[:, None] & inside)


@triton.jit(do_not_specialize=["rows"])
def _grad_matrices_kernel(
    x,
    grad,
    weights,
    grad_matrices,
    parts,
    order,
    offsets,
    x_by_row,
    grad_by_row,
    rows,
    height,
    width,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATHER_X: tl.constexpr,
    GATHER_GRAD: tl.constexpr,
    RELU: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across, down = tl.cdiv(width, COLUMNS), tl.cdiv(height, HEIGHT)
    block = tl.program_id(0) // (across * down)
    tile = tl.program_id(0) % (across * down)
    expert, first, begin, end = _own(block, offsets, rows, SPLIT, EXPERTS)
    if (expert == EXPERTS) | ((first >= end) & (begin < end)):
        return
    i = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)
    j = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((HEIGHT, COLUMNS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, end), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        present = row < end
        place = tl.load(order + row, mask=present, other=0)
        token = place // CHOSEN
        x_row, grad_row = token if GATHER_X else row, token if GATHER_GRAD else row
        x_tile = tl.load(
            x + x_row[:, None] * x_by_row + i[None, :], mask=present[:, None] & (i < height)[None, :], other=0.0
        )
        if RELU:
            x_tile = _relu(x_tile)
        if weights is not None:
            weight = tl.load(weights + place, mask=present, other=0.0).to(tl.float32)[:, None]
            x_tile = (x_tile.to(tl.float32) * weight).to(x_tile.dtype)
        grad_tile = tl.load(
            grad + grad_row[:, None] * grad_by_row + j[None, :],
            mask=present[:, None] & (j < width)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(x_tile), grad_tile, total, input_precision="ieee")
    cell = i[:, None] * width + j[None, :]
    inside = (i < height)[:, None] & (j < width)[None, :]
    size = tl.cast(height, tl.int64) * width
    if end - begin <= SPLIT:
        tl.store(grad_matrices + expert * size + cell, total, mask=inside)
    else:
        tl.store(parts + block * size + cell, total, mask=inside)


@triton.jit
def _sum_of_parts_kernel(parts, grad_matrices, offsets, size, SPLIT: tl.constexpr, CELLS: tl.constexpr):
    tiles = tl.cdiv(size, CELLS)
    expert = tl.program_id(0) // tiles
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    count = tl.cdiv(tl.load(offsets + expert) - begin, SPLIT)
    if count > 1:
        cell = (tl.program_id(0) % tiles) * CELLS + tl.arange(0, CELLS)
        first = (begin // SPLIT + expert).to(tl.int64)
        total = tl.zeros((CELLS,), dtype=tl.float32)
        for part in range(0, count):
            total += tl.load(parts + (first + part) * size + cell, mask=cell < size, other=0.0)
        tl.store(grad_matrices + expert.to(tl.int64) * size + cell, total, mask=cell < size)

"""The conditional product, one block of rows after another, so that intermediate results stay in the CPU's cache.

Sorted row r has a matrix M and, where its token has weights, a weight s. With h = ReLU(x), or x where no ReLU is asked
for, and a = s h, row by row

    y = a M,   ∂a = ∂y Mᵀ,   ∂M = Σ_r aᵀ ∂y,   ∂s = h · ∂a,   ∂x = s ∂a where h > 0 (everywhere without ReLU).

A block has rows of one matrix. An input with one row a token (x with ``from_tokens``, ∂y with ``to_tokens``) is
gathered for the block alone. A result with one row a token (y with ``to_tokens``, ∂x with ``from_tokens``) is added to
its tokens at once. So there is no array of all R = N·K rows besides inputs and results; the backward pass gathers
again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.cvmm.sorting import SortedSelection
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled

# Numbers of a block of rows on a CPU, at most: 1 MB of float32. On one CPU thread half of it and twice of it took as
# long. Elsewhere a block has all rows of a matrix.
BLOCK = 1 << 18


def cvmm_blocks(
    x: Tensor,
    matrices: Tensor,
    routing: SortedSelection,
    from_tokens: bool,
    to_tokens: bool,
    relu: bool,
    weights: Tensor | None,
) -> Tensor:
    """See `fairseq_sg.ops.cvmm_sorted`; one product a block of rows, for which the host reads the counts."""
    return _BlockedProduct.apply(x, matrices, weights, routing, from_tokens, to_tokens, relu)


class _BlockedProduct(torch.autograd.Function):
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
        ctx.save_for_backward(x, matrices, weights)
        ctx.arguments = routing, from_tokens, to_tokens, relu
        blocks = _Blocks(routing, matrices)
        s = blocks.weights(weights, x.dtype)
        y = _Result(blocks, matrices.shape[2], to_tokens, x)
        for b, (matrix, rows) in enumerate(zip(blocks.matrices, blocks.read(x, from_tokens), strict=False)):
            rows = rows.relu() if relu else rows
            rows = rows if s is None else rows * s[b]
            torch.mm(rows, matrices[matrix], out=y.buffer(b))  # (rows, L)
            y.add(b)
        return y.finish()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cvmm")
        x, matrices, weights = ctx.saved_tensors
        routing, from_tokens, to_tokens, relu = ctx.arguments
        of_x, of_matrices, of_weights = ctx.needs_input_grad[:3]
        blocks = _Blocks(routing, matrices)
        s = blocks.weights(weights, x.dtype)
        grad_x = _Result(blocks, x.shape[1], from_tokens, x) if of_x or of_weights else None
        grad_s = x.new_zeros(len(routing.order)) if of_weights else None
        grad_s_blocks = grad_s.split(blocks.sizes) if of_weights else None
        grad_matrices = _Gradient(matrices, blocks) if of_matrices else None
        both = zip(blocks.matrices, blocks.read(x, from_tokens), blocks.read(grad, to_tokens), strict=False)
        with autocast_disabled(x.device):
            for b, (matrix, rows, grad_y) in enumerate(both):
                h = rows.relu() if relu else rows
                if of_matrices:
                    grad_matrices.add(b, h if s is None else h * s[b], grad_y)
                if grad_x is None:
                    continue
                grad_a = torch.mm(grad_y, matrices[matrix].t(), out=grad_x.buffer(b))  # (rows, M)
                if of_weights:
                    torch.sum(grad_a * h, 1, out=grad_s_blocks[b])
                if s is not None:
                    grad_a *= s[b]
                if relu:
                    torch.ops.aten.threshold_backward.grad_input(grad_a, rows, 0.0, grad_input=grad_a)
                grad_x.add(b)
        if of_weights:
            grad_s = grad_s.index_select(0, routing.inverse).view_as(weights).to(weights.dtype)
        of_all = grad_matrices.finish() if of_matrices else None
        return grad_x.finish() if of_x else None, of_all, grad_s, None, None, None, None


class _Blocks:
    """The sorted rows in blocks of one matrix.

    Attributes:
        matrices: the matrix of each block, in ascending order.
        sizes: the rows of each block and, last, how many rows belong to no matrix.
    """

    def __init__(self, routing: SortedSelection, matrices: Tensor):
        self.routing = routing
        self.matrices: list[int] = []
        self.sizes: list[int] = []
        on_cpu = matrices.device.type == "cpu"
        most = max(1, BLOCK // max(1, *matrices.shape[1:]) if on_cpu else len(routing.order))
        for matrix, count in enumerate(routing.counts_on_host):
            blocks = -(-count // most)
            self.matrices += [matrix] * blocks
            # Of equal size: a block of a few remaining rows would cost as much as a larger one.
            self.sizes += [count // blocks + (block < count % blocks) for block in range(blocks)]
        self.largest = max(self.sizes, default=0)
        self.sizes.append(len(routing.order) - sum(self.sizes))

    def begins(self, block: int) -> bool:
        """Whether a block is the first of its matrix."""
        return block == 0 or self.matrices[block - 1] != self.matrices[block]

    def weights(self, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """The weights of each block's rows, (rows, 1)."""
        if weights is None:
            return None
        return self.routing.sort(weights).unsqueeze(1).to(dtype).split(self.sizes)

    def tokens(self) -> tuple[Tensor, ...]:
        return self.routing.tokens.split(self.sizes)

    def read(self, x: Tensor, of_tokens: bool) -> Iterator[Tensor]:
        """The rows of each block, of x by token or by row. Rows by token share a buffer with the next block's."""
        if not of_tokens:
            yield from x.split(self.sizes)
            return
        buffer = x.new_empty(self.largest, x.shape[1])
        for tokens in self.tokens():
            yield torch.index_select(x, 0, tokens, out=buffer[: len(tokens)])


class _Result:
    """The products of all blocks: one row each, (R, L), or added up by token, (N, L)."""

    def __init__(self, blocks: _Blocks, width: int, of_tokens: bool, like: Tensor):
        rows = len(blocks.routing.order)
        self.dtype = like.dtype
        self.tokens = blocks.tokens() if of_tokens else None
        if of_tokens:
            self.sums = like.new_zeros(rows // blocks.routing.chosen, width, dtype=accumulation_dtype(like))
            buffer = like.new_empty(blocks.largest, width)
            self.blocks = [buffer[: len(tokens)] for tokens in self.tokens]
        else:
            self.sums = like.new_empty(rows, width)
            self.blocks = self.sums.split(blocks.sizes)
            self.blocks[-1].zero_()

    def buffer(self, block: int) -> Tensor:
        """The tensor that takes the product of this block, before `add`."""
        return self.blocks[block]

    def add(self, block: int) -> None:
        if self.tokens is not None:
            self.sums.index_add_(0, self.tokens[block], self.blocks[block].to(self.sums.dtype))

    def finish(self) -> Tensor:
        return self.sums.to(self.dtype)


class _Gradient:
    """Σ_r aᵀ ∂y of the matrices, (E, M, L), 0 for matrices without rows."""

    def __init__(self, matrices: Tensor, blocks: _Blocks):
        self.blocks, self.dtype = blocks, matrices.dtype
        # The sum over the blocks of a matrix. One block is one product, which needs no sum.
        several = len(blocks.matrices) > len(set(blocks.matrices))
        dtype = accumulation_dtype(matrices) if several else matrices.dtype
        self.sums = torch.empty_like(matrices, dtype=dtype, memory_format=torch.contiguous_format)
        for matrix in set(range(len(matrices))).difference(blocks.matrices):
            self.sums[matrix].zero_()

    def add(self, block: int, a: Tensor, grad_y: Tensor) -> None:
        total = self.sums[self.blocks.matrices[block]]
        if total.dtype != a.dtype:
            product = torch.mm(a.t(), grad_y)
            total.copy_(product) if self.blocks.begins(block) else total.add_(product)
        elif self.blocks.begins(block):
            torch.mm(a.t(), grad_y, out=total)
        else:
            total.addmm_(a.t(), grad_y)

    def finish(self) -> Tensor:
        return self.sums.to(self.dtype)

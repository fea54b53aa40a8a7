"""Conditional vector-matrix multiplication (Csordás 2023, appendix F.2.1), the product of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fairseq_sg.ops.checks import check_floating, describe
from fairseq_sg.ops.cvmm.blocks import cvmm_blocks
from fairseq_sg.ops.cvmm.grouped import cvmm_grouped, has_grouped_mm
from fairseq_sg.ops.cvmm.naive import cvmm_naive
from fairseq_sg.ops.cvmm.sorting import SortedSelection, sort_selection
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.precision import autocast_disabled, autocast_dtype
from fairseq_sg.ops.triton_support import require_triton, why_not_triton

# Mean number of rows of a matrix from which blocks are faster than a grouped product on a CPU, for matrices of 512 by
# 128. Narrow ones need more rows (docs/feedforward.md); `python -m fairseq_sg.kernels tune` measures your machine.
FEW_ROWS = 256


def _with_relu_and_weights(
    function: Callable[[Tensor, Tensor, SortedSelection, bool, bool], Tensor],
) -> Callable[..., Tensor]:
    """An implementation of the product alone, after ReLU and weights."""

    def run(
        x: Tensor,
        matrices: Tensor,
        routing: SortedSelection,
        from_tokens: bool,
        to_tokens: bool,
        relu: bool,
        weights: Tensor | None,
    ) -> Tensor:
        x = x.relu() if relu else x
        if weights is not None:
            x = x * routing.sort(weights).unsqueeze(1).to(x.dtype)
        return function(x, matrices, routing, from_tokens, to_tokens)

    return run


def _grouped(x: Tensor, *arguments) -> Tensor:
    return (_GROUPED if has_grouped_mm(x.device, x.dtype) else cvmm_blocks)(x, *arguments)


def _why_not_triton(x: Tensor, matrices: Tensor, weights: Tensor | None) -> str | None:
    return why_not_triton(x, matrices) if weights is None else why_not_triton(x, matrices, weights)


def _triton(x: Tensor, matrices: Tensor, *arguments) -> Tensor:
    require_triton("cvmm", _why_not_triton(x, matrices, arguments[-1]))
    from fairseq_sg.ops.cvmm.triton import cvmm_triton

    return cvmm_triton(x, matrices, *arguments)


_GROUPED = _with_relu_and_weights(cvmm_grouped)
declare(
    "cvmm",
    {  # functions of (x, matrices, routing, from_tokens, to_tokens, relu, weights), see `cvmm_sorted`
        "naive": _with_relu_and_weights(cvmm_naive),
        "grouped": _grouped,
        "blocks": cvmm_blocks,
        "triton": _triton,
    },
    default="grouped",
    others={"cpu": ("blocks",), "cuda": ("triton",)},
    sizes=("rows_per_matrix", "rows", "width"),  # R/E, R, and the larger of M and L
    rules={"cpu": ("rows_per_matrix", FEW_ROWS, "blocks")},
)

__all__ = ["SortedSelection", "cvmm", "cvmm_sorted", "sort_selection"]


def cvmm(x: Tensor, selection: Tensor, matrices: Tensor, *, implementation: str = AUTO) -> Tensor:
    """out_n = x_n · matrices[selection_n], with gradients to x and to the matrices.

    The CVMM of Csordás (2023, appendix F.2.1). Rows are sorted by matrix; a matrix that no row selects costs nothing
    and has gradient 0. Dtypes and precision as in `cvmm_sorted`.

    Args:
        x: (N, M), floating. matrices: (K, M, L), of the same dtype.
        selection: (N,), of an integer dtype. An entry outside 0 … K − 1 selects no matrix: its row of the output is 0.
        implementation: as in `cvmm_sorted`.

    Returns:
        (N, L).

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit, or there is no such implementation.
    """
    if selection.dim() != 1:
        raise ValueError(f"cvmm takes selection (N,), not {describe(selection=selection)}")
    if matrices.dim() != 3:
        raise ValueError(f"cvmm takes matrices (K, M, L), not {describe(matrices=matrices)}")
    routing = sort_selection(selection, len(matrices))
    return cvmm_sorted(x, routing, matrices, from_tokens=True, to_tokens=True, implementation=implementation)


# torch's grouped products refuse a compiler's meta tensors in most dtypes. (`torch.compiler.disable` would import the
# compiler, which takes as long as importing torch.)
@_disable_dynamo
def cvmm_sorted(
    x: Tensor,
    routing: SortedSelection,
    matrices: Tensor,
    *,
    from_tokens: bool = False,
    to_tokens: bool = False,
    relu: bool = False,
    weights: Tensor | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """`cvmm` of rows that are sorted by matrix, so that several products share one sort.

    A mixture of N tokens with K experts each, y_n = Σ_k s_nk · ReLU(x_n · A[e_nk]) · B[e_nk], is two products:

        routing = sort_selection(e, experts)                       # e (N, K)
        u = cvmm_sorted(x, routing, A, from_tokens=True)           # (N·K, G)
        y = cvmm_sorted(u, routing, B, to_tokens=True, relu=True, weights=s)

    Under ``torch.autocast`` x and the matrices are cast to its dtype, as ``torch.nn.functional.linear`` does. All but
    the naive implementation refuse a backward pass with ``create_graph=True`` with `RuntimeError`, and add up rows in a
    fixed order, also on a GPU.

    Args:
        x: the sorted rows, (R, M) with R = N·K, or with `from_tokens` one row a token, (N, M), floating.
        routing: of `sort_selection`.
        matrices: (E, M, L), of x's dtype.
        from_tokens: x has one row a token, which each of the token's sorted rows is a copy of.
        to_tokens: add up each token's rows.
        relu: multiply ReLU(x) instead of x.
        weights: (N, K), floating, not with `from_tokens`: each entry's weight s, by which its row is multiplied. Where
            an entry selects no matrix, its weight and its row of x must be finite.
        implementation: ``"auto"``; ``"naive"``; ``"grouped"``, one grouped product where torch has it for the device
            and dtype, else like ``"blocks"``; ``"blocks"``, for a CPU and matrices with many rows: one block of rows
            after another, with no copy of all of them; or ``"triton"``, kernels for a GPU.

    Returns:
        (R, L), or (N, L) with `to_tokens`; 0 where an entry selects no matrix.

    Raises:
        TypeError: x, the matrices or the weights are not floating, or x and the matrices not of one dtype.
        ValueError: shapes do not fit, there is no such implementation, or Triton was asked for and cannot run here.
    """
    check_floating(x=x, matrices=matrices)
    rows = len(routing.order) // (routing.chosen if from_tokens else 1)
    if x.dim() != 2 or matrices.dim() != 3 or x.shape[1] != matrices.shape[1]:
        raise ValueError(f"cvmm takes x (N, M) and matrices (K, M, L), not {describe(x=x, matrices=matrices)}")
    if len(x) != rows or len(matrices) != len(routing.offsets):
        raise ValueError(
            f"the selection is of {rows} rows among {len(routing.offsets)} matrices, which are not those of "
            f"{describe(x=x, matrices=matrices)}"
        )
    if weights is not None:
        check_floating(weights=weights)
        if from_tokens:
            raise ValueError("cvmm has weights for sorted rows, and with from_tokens x has one row a token")
        if weights.shape != (len(x) // routing.chosen, routing.chosen):
            raise ValueError(
                f"the selection is of {len(x) // routing.chosen} tokens with {routing.chosen} matrices each, which are "
                f"not those of {describe(weights=weights)}"
            )
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, matrices = x.to(dtype), matrices.to(dtype)
    if x.dtype != matrices.dtype:
        raise TypeError(f"x and matrices must be of one dtype, not {x.dtype} and {matrices.dtype}")
    sizes = len(routing.order) // len(matrices), len(routing.order), max(matrices.shape[1:])
    function = choose("cvmm", implementation, x, sizes, lambda: _why_not_triton(x, matrices, weights))
    with autocast_disabled(x.device):
        return function(x, matrices, routing, from_tokens, to_tokens, relu, weights)

"""Conditional vector-matrix multiplication (Csordás 2023, appendix F.2.1), which mixtures of experts are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.checks import check_floating, describe
from fairseq_sg.ops.cvmm.grouped import cvmm_grouped, cvmm_segments
from fairseq_sg.ops.cvmm.naive import cvmm_naive
from fairseq_sg.ops.cvmm.sorting import SortedSelection, sort_selection
from fairseq_sg.ops.dispatch import AUTO, resolve
from fairseq_sg.ops.precision import autocast_disabled

#: name -> function of (x, matrices, routing, from_tokens, to_tokens), see `cvmm_sorted`.
IMPLEMENTATIONS = {"naive": cvmm_naive, "segments": cvmm_segments, "grouped": cvmm_grouped}

__all__ = ["IMPLEMENTATIONS", "SortedSelection", "cvmm", "cvmm_sorted", "sort_selection"]


def cvmm(x: Tensor, selection: Tensor, matrices: Tensor, *, implementation: str = AUTO) -> Tensor:
    """out_n = x_n · matrices[selection_n], with gradients to x and to the matrices.

    The CVMM of Csordás (2023, appendix F.2.1). Rows are sorted by matrix; a matrix that nobody selects costs nothing
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


def cvmm_sorted(
    x: Tensor,
    routing: SortedSelection,
    matrices: Tensor,
    *,
    from_tokens: bool = False,
    to_tokens: bool = False,
    implementation: str = AUTO,
) -> Tensor:
    """`cvmm` of rows that are sorted by matrix, so that several products share one sort.

    A mixture of N tokens with K experts each, y_n = Σ_k s_nk · ReLU(x_n · A[e_nk]) · B[e_nk], is two products:

        routing = sort_selection(e, experts)                       # e (N, K)
        u = cvmm_sorted(x, routing, A, from_tokens=True).relu()    # (N·K, G)
        y = cvmm_sorted(u * routing.sort(s)[:, None], routing, B, to_tokens=True)

    Under ``torch.autocast`` x and the matrices are cast to its dtype, as ``torch.nn.functional.linear`` does. A
    backward pass with ``create_graph=True`` is refused with `RuntimeError` by all but the naive implementation. Rows
    are added up in an order that is not left to chance, on a GPU either (but by the naive implementation).

    Args:
        x: the sorted rows, (R, M) with R = N·K, or with `from_tokens` one row a token, (N, M), floating.
        routing: of `sort_selection`.
        matrices: (E, M, L), of x's dtype.
        from_tokens: x has one row a token, which each of the token's sorted rows is a copy of.
        to_tokens: add up each token's rows.
        implementation: ``"auto"``; ``"naive"``; ``"segments"``, one product a matrix with rows; or ``"grouped"``,
            one grouped product where torch has it for the device and dtype, else like ``"segments"``.

    Returns:
        (R, L), or (N, L) with `to_tokens`; 0 where an entry selects no matrix.

    Raises:
        TypeError: x or the matrices are not floating, or not of one dtype.
        ValueError: shapes do not fit, or there is no such implementation.
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
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x, matrices = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (x, matrices))
    if x.dtype != matrices.dtype:
        raise TypeError(f"x and matrices must be of one dtype, not {x.dtype} and {matrices.dtype}")
    function = resolve("cvmm", implementation, IMPLEMENTATIONS, automatic="grouped")
    with autocast_disabled(x.device):
        return function(x, matrices, routing, from_tokens, to_tokens)

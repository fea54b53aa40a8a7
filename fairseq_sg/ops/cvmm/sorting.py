"""A selection sorted by matrix: the rows of one matrix are adjacent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SortedSelection:
    """Which rows each of E matrices works on, when N tokens select K matrices each. R = N·K rows.

    Made by `fairseq_sg.ops.sort_selection`, on the device of the selection, without waiting for it.

    Attributes:
        order: (R,) int64. Sorted row r is entry ``order[r]`` of the flattened selection.
        inverse: (R,) int64. Entry i of the flattened selection is sorted row ``inverse[i]``.
        offsets: (E,) int32, where the rows of each matrix end. Rows after the last belong to no matrix.
        chosen: K.
        complete: whether every entry is known to select a matrix, see `sort_selection`.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor
    chosen: int
    complete: bool

    @cached_property
    def tokens(self) -> Tensor:
        """(R,) int64, the token of each sorted row."""
        return self.order if self.chosen == 1 else self.order.div(self.chosen, rounding_mode="floor")

    @cached_property
    def counts(self) -> Tensor:
        """(E,) int32, how many rows each matrix has."""
        return torch.diff(self.offsets, prepend=self.offsets.new_zeros(1))

    @cached_property
    def counts_on_host(self) -> list[int]:
        """`counts` as numbers; on a GPU this waits for it, once."""
        return self.counts.tolist()

    @cached_property
    def without_matrix(self) -> Tensor:
        """(R, 1) bool, the sorted rows that belong to no matrix."""
        rows = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        return (rows >= self.offsets[-1]).unsqueeze(1)

    def sort(self, entries: Tensor) -> Tensor:
        """Values of the entries of the selection, (N, K), in the order of the sorted rows, (R,)."""
        return entries.reshape(-1).index_select(0, self.order)

    def rows(self, x: Tensor) -> Tensor:
        """x (N, M) -> (R, M), for each sorted row the x of its token; no gradient of its own."""
        return x.index_select(0, self.tokens)

    def sums(self, rows: Tensor) -> Tensor:
        """rows (R, M) -> (N, M), the sum of each token's rows in the order of its selection; no gradient of its own."""
        if self.chosen == 1:
            return rows.index_select(0, self.inverse)
        # The one operator of torch that gathers and adds in one pass over memory.
        return F.embedding_bag(self.inverse.unflatten(0, (-1, self.chosen)), rows, mode="sum")


def sort_selection(selection: Tensor, matrices: int, *, complete: bool = False) -> SortedSelection:
    """Sorts a selection, (N,) or (N, K) of an integer dtype, among so many matrices.

    An entry outside 0 … matrices − 1, such as −1 at padding, selects no matrix. Where the caller knows that there is
    none, `complete` saves a look at every row; a promise that is not kept is not noticed, and such rows are undefined.

    Raises:
        TypeError: the selection is not of integers.
        ValueError: it is not (N,) or (N, K), or there is no matrix.
    """
    if selection.is_floating_point() or selection.is_complex() or selection.dtype == torch.bool:
        raise TypeError(f"a selection must be of integers, not {selection.dtype}")
    if selection.dim() not in (1, 2) or selection.dim() == 2 and selection.shape[1] == 0:
        raise ValueError(f"a selection must be (N,) or (N, K), not {tuple(selection.shape)}")
    if matrices < 1:
        raise ValueError("a selection needs at least one matrix")
    chosen = 1 if selection.dim() == 1 else selection.shape[1]
    # The fewer bits, the faster the sort.
    dtype = torch.int16 if matrices < torch.iinfo(torch.int16).max else torch.int64
    flat = selection.reshape(-1).long()
    keys = torch.where((flat < 0) | (flat >= matrices), matrices, flat).to(dtype)
    keys, order = torch.sort(keys, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    names = torch.arange(matrices, dtype=dtype, device=keys.device)
    offsets = torch.searchsorted(keys, names, right=True, out_int32=True)
    return SortedSelection(order, inverse, offsets, chosen, complete)

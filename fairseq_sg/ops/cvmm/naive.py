"""The conditional product as its equation stands, one matrix after another."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.cvmm.sorting import SortedSelection


def cvmm_naive(x: Tensor, matrices: Tensor, routing: SortedSelection, from_tokens: bool, to_tokens: bool) -> Tensor:
    """See `fairseq_sg.ops.cvmm_sorted`."""
    rows = x[routing.tokens] if from_tokens else x
    index = torch.arange(len(rows), device=x.device)
    out = x.new_zeros(len(rows), matrices.shape[2])
    for matrix, begin, end in zip(matrices, routing.offsets - routing.counts, routing.offsets, strict=True):
        own = ((begin <= index) & (index < end))[:, None]  # (R, 1)
        # Masked twice: neither other rows nor their gradients may be multiplied, by 0 either, as they may be NaN.
        out = out + (rows.where(own, 0.0) @ matrix).where(own, 0.0)
    if not to_tokens:
        return out
    return out.new_zeros(len(rows) // routing.chosen, out.shape[1]).index_add(0, routing.tokens, out)

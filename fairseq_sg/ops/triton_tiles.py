"""Loads of inputs that kernels of several operators share. It imports Triton; only kernels' files import it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(base, rows, columns, stride, present, WIDTH: tl.constexpr):
    """base[rows, columns] in float32, 0 where a row is not present or a column beyond WIDTH."""
    inside = present[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def real_rows(mask, batch, rows, length):
    """Which rows are within the length and not padding."""
    present = rows < length
    if mask is not None:
        present = present & (tl.load(mask + batch * length + rows, mask=present, other=1) == 0)
    return present

"""The coordinates of the points of a grid."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinates(axis: Tensor, dims: int) -> Tensor:
    """The points of a grid with the same axis in every dimension.

    Args:
        axis: (n,), the coordinates along one side.
        dims: 1 or 2.

    Returns:
        (n, 1), or (n, n, 2): the row's coordinate, then the column's.
    """
    return torch.stack(torch.meshgrid(*[axis] * dims, indexing="ij"), dim=-1)

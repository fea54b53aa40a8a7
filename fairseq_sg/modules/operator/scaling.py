"""Scaling of fields to mean 0 and standard deviation 1, by statistics of the training data.

The statistics are scalars. The released code of Cao 2021 has one of each for every point of the grid in two dimensions,
which ties a model to its training grid.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FieldScaling(nn.Module):
    """(f − mean) / std, and its inverse.

    The two numbers are buffers, so that a checkpoint brings those of its own training data.

    Args:
        mean, std: of the field; 0 and 1 leave it as it is.
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, f: Tensor) -> Tensor:
        """The scaled field, of the same shape."""
        return (f - self.mean) / self.std

    def restore(self, f: Tensor) -> Tensor:
        """The field whose scaled form is f."""
        return f * self.std + self.mean

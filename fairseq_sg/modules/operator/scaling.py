"""Scaling of fields to mean 0 and standard deviation 1, by statistics of the training data.

The statistics are scalars. The released code of Cao 2021 has one of each for every point of the grid in two dimensions,
which ties a model to its training grid.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FieldScaling(nn.Module):
    """(f − mean) / std, and its inverse; without statistics, both leave f as it is.

    The two numbers are buffers, so that a checkpoint brings those of its own training data. Without them there are no
    buffers: weights of a model that scales do not fit one that does not.

    Args:
        mean, std: of the field.
    """

    def __init__(self, mean: float | None = None, std: float | None = None):
        super().__init__()
        self.scales = mean is not None
        if self.scales:
            self.register_buffer("mean", torch.tensor(mean))
            self.register_buffer("std", torch.tensor(std))

    def forward(self, f: Tensor) -> Tensor:
        """The scaled field, of the same shape."""
        return (f - self.mean) / self.std if self.scales else f

    def restore(self, f: Tensor) -> Tensor:
        """The field whose scaled form is f."""
        return f * self.std + self.mean if self.scales else f

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # Older models without scaling had 0 and 1.
        names = f"{prefix}mean", f"{prefix}std"
        if not self.scales and [state_dict.get(name) for name in names] == [0, 1]:
            for name in names:
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)

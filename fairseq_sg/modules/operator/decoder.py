"""The decoder of an operator model: spectral layers, then two linear maps at every point (Cao 2021, section 3).

y     the encoder's output, perhaps W [y; x] + b with the coordinates x
y     SiLU(F⁻¹(R · F y) + W y + b), once a layer
u     w · SiLU(V y + c) + d
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.modules.operator.spectral import SpectralLayer
from fairseq_sg.ops.precision import autocast_disabled


class SpectralDecoder(nn.Module):
    """(B, n, C) -> (B, n), or (B, n, m, C) -> (B, n, m).

    Args:
        inputs: C.
        width: of the spectral layers, and of the linear map before them.
        layers: their number; without one, the decoder works at each point by itself.
        modes: K, see :class:`SpectralLayer`.
        hidden: width between the last two linear maps.
        dims: 1 or 2.
        joins_coordinates: whether a linear map of y and the coordinates comes first.
    """

    def __init__(
        self, inputs: int, width: int, layers: int, modes: int, hidden: int, dims: int, joins_coordinates: bool
    ):
        super().__init__()
        self.join = nn.Linear(inputs + dims, width) if joins_coordinates else None
        widths = [width if joins_coordinates else inputs, *[width] * layers]
        self.layers = nn.ModuleList(SpectralLayer(*pair, modes, dims) for pair in zip(widths, widths[1:], strict=False))
        self.hidden = nn.Linear(widths[-1], hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, y: Tensor, points: Tensor) -> Tensor:
        """``points`` are the coordinates (n, 1) or (n, m, 2)."""
        # What has coordinates, and the last map, stay out of autocast: half precision gives neighbours on a fine grid
        # one coordinate, and its rounding is larger than a good model's error.
        if self.join is not None:
            y = y.to(self.join.weight)
            with autocast_disabled(y.device):
                y = self.join(torch.cat([y, points.to(y).expand(y.size(0), *points.shape)], dim=-1))
        y = y.movedim(-1, 1)  # (B, C, n[, m])
        for layer in self.layers:
            y = layer(y)
        y = F.silu(self.hidden(y.movedim(1, -1)))
        with autocast_disabled(y.device):
            return self.output(y.to(self.output.weight)).squeeze(-1)

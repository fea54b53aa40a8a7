"""Between the fine grid of a field and the coarse grid of attention, in two dimensions (Cao 2021, appendix C).

Both ways are bilinear interpolations in two steps, with 3 × 3 convolutions between. The middle grid has √(n m) points a
side. The released code activates the convolution of the way up twice; here it is once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.modules.cpu.dropout import Dropout


def interpolate(x: Tensor, points: int) -> Tensor:
    """(B, C, n, n) -> (B, C, points, points), bilinear; corners stay where they are."""
    return F.interpolate(x, size=(points, points), mode="bilinear", align_corners=True)


def middle(n: int, m: int) -> int:
    """The points of the grid between two grids."""
    return round(math.sqrt(n * m))


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


class Downsampling(nn.Module):
    """A field on the fine grid to features on the coarse one, (B, 1, n, n) -> (B, C, m, m).

        z = I(ReLU(Conv a)),   z_1 = ReLU(Conv z),   z_2 = ReLU(Conv z_1),   z_3 = ReLU(Conv z_2)
        h = ReLU(I([z_1; z_2; z_3]))

    Args:
        dim: C; the three parts have ⌊C/3⌋, ⌊C/3⌋ and the remaining features.
        points: m. dropout: after each convolution.
    """

    def __init__(self, dim: int, points: int, dropout: float):
        super().__init__()
        self.points = points
        part = dim // 3
        self.first = convolution(1, dim)
        widths = dim, part, part, dim - 2 * part
        self.chain = nn.ModuleList(convolution(*pair) for pair in zip(widths, widths[1:], strict=False))
        self.dropout = Dropout(dropout)

    def forward(self, a: Tensor) -> Tensor:
        z = F.relu(self.dropout(self.first(a)))
        z = interpolate(z, middle(a.size(-1), self.points))
        parts = []
        for layer in self.chain:
            z = F.relu(self.dropout(layer(z)))
            parts.append(z)
        return F.relu(interpolate(torch.cat(parts, dim=1), self.points))


class Upsampling(nn.Module):
    """Features on the coarse grid to a finer one, (B, C, m, m) -> (B, C, n, n): I(SiLU(Conv(I(y)))).

    With n = m, as for an inverse problem, only the convolution and its activation remain.

    Args:
        dim: C. dropout: after the convolution.
    """

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.layer = convolution(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, y: Tensor, points: int) -> Tensor:
        """``points`` is n."""
        y = interpolate(y, middle(y.size(-1), points))
        return interpolate(F.silu(self.dropout(self.layer(y))), points)

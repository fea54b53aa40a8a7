"""Positions as a share of the sentence (Chiang & Cholak 2022, section 3.2): i/N and cos(πi).

    fixed     P_i = (i/N, cos(πi), 0, …, 0)
    learned   P_i = (e^{s_j} i/N for the first half of the features j,  cos(e^{s_j} πi) for the second half)

N is the number of columns of the sentence, those of its begin and end symbols included. So i/N tells where in the
sentence a column is, and cos(πi) = ±1 whether its position is even. The text has the fixed form. The released code
learns PARITY with the learned form, s_j ~ N(0, 1) at the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.position.base import EmbeddedPosition, MirroredOptions, features, register_position
from fairseq_sg.ops.precision import accumulation_dtype


@dataclass
class FractionOptions(MirroredOptions):
    fraction_scales: str = field(
        default="fixed",
        metadata={
            "help": "with --position fraction: 'fixed', i/N and cos(πi) in two features; 'learned', i/N in half of the "
            "features and cos(πi) in the others, each times a learned scale",
            "choices": ("fixed", "learned"),
        },
    )


@register_position("fraction")
class FractionPosition(EmbeddedPosition):
    """See the module's docstring. A decoder cannot have it: N is not known before the sentence ends.

    Args:
        dim: C, the model's width.
        fraction_scales: ``fixed`` or ``learned``.
        mirrored_positions: the second half of the features has the negative of the first.

    Raises:
        UsageError: an unknown choice, or a width without room for two features.
    """

    paper = "Chiang & Cholak 2022, 3.2"
    options = FractionOptions
    continues = False
    needs_length = True

    def __init__(self, dim: int, *, fraction_scales: str = "fixed", mirrored_positions: bool = False):
        super().__init__(dim)
        ranges.check(FractionOptions, {"fraction_scales": fraction_scales})
        self.learned = fraction_scales == "learned"
        self.mirrored = mirrored_positions
        if self.learned:
            self.log_scales = nn.Parameter(torch.randn(dim // 2 if mirrored_positions else dim))
        else:
            self.register_buffer("log_scales", torch.zeros(2), persistent=False)
        features(self.log_scales, dim, self.mirrored)

    def forward(self, positions: Tensor, length: int) -> Tensor:
        dtype = accumulation_dtype(self.log_scales)
        i = positions.unsqueeze(-1).to(dtype)  # (B, N, 1)
        share = i / (i[:, -1:] + 1)  # padding repeats the position beside it, so the last is N − 1
        scales = self.log_scales.to(dtype).exp()
        half = (scales.numel() + 1) // 2
        if self.learned:
            cosine = torch.cos(math.pi * i * scales[half:])
        else:
            cosine = 1 - 2 * (i % 2)  # (−1)^i exactly
        p = torch.cat([share * scales[:half], cosine], dim=-1)
        return features(p, self.dim, self.mirrored).type_as(self.log_scales)

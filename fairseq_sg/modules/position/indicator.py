"""A mark on one position (Chiang & Cholak 2022, section 3.3): P_i = (I[i = j], 0, …, 0)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.modules.position.base import EmbeddedPosition, MirroredOptions, features, register_position


@dataclass
class IndicatorOptions(MirroredOptions):
    indicator_index: int = field(
        default=1,
        metadata={
            "help": "the marked position, with --position indicator; 0 is the first column, a begin symbol if there is "
            "one",
            "least": 0,
        },
    )


@register_position("indicator")
class IndicatorPosition(EmbeddedPosition):
    """1 in the first feature of position j, else 0.

    Args:
        dim: C, the model's width.
        indicator_index: j.
        mirrored_positions: the second half of the features has the negative of the first.
    """

    paper = "Chiang & Cholak 2022, 3.3"
    options = IndicatorOptions

    def __init__(self, dim: int, *, indicator_index: int = 1, mirrored_positions: bool = False):
        super().__init__(dim)
        ranges.check(IndicatorOptions, {"indicator_index": indicator_index})
        self.index = indicator_index
        self.mirrored = mirrored_positions
        self.register_buffer("mark", torch.ones(1), persistent=False)
        features(self.mark, dim, self.mirrored)

    def forward(self, positions: Tensor, length: int) -> Tensor:
        marked = positions.eq(self.index).unsqueeze(-1) * self.mark  # (B, N, 1)
        return features(marked, self.dim, self.mirrored)

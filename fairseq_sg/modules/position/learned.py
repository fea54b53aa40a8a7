"""Learned absolute positions (Gehring et al. 2017; Vaswani et al. 2017, table 3, row E): a vector for each position."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.position.base import EmbeddedPosition, register_position


@dataclass
class LearnedOptions:
    learned_positions: int = field(
        default=1024, metadata={"help": "number of positions that have a vector, with --position learned", "least": 1}
    )


@register_position("learned")
class LearnedPosition(EmbeddedPosition):
    """Starts as fairseq's, P ~ N(0, 1/d). A position that no training sentence reaches keeps its random start.

    Args:
        dim: d, the model's width.
        learned_positions: the number of positions.

    Raises:
        UsageError: fewer than one position; on a call, a sequence longer than that.
    """

    paper = "Gehring et al. 2017; fairseq"
    options = LearnedOptions

    def __init__(self, dim: int, *, learned_positions: int = 1024):
        super().__init__(dim)
        ranges.check(LearnedOptions, {"learned_positions": learned_positions})
        self.weight = nn.Parameter(torch.empty(learned_positions, dim).normal_(0.0, dim**-0.5))

    @property
    def longest(self) -> int:
        return self.weight.size(0)

    def forward(self, positions: Tensor, length: int) -> Tensor:
        if length > self.longest:
            raise UsageError(
                f"a sequence of length {length} is longer than --learned-positions {self.longest}: "
                "train with more, or leave long sequences out (--max-source-positions, --max-target-positions)"
            )
        return nn.functional.embedding(positions, self.weight)

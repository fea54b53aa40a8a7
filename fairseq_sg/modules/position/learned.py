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
    learned_positions_std: float | None = field(
        default=None,
        metadata={
            "help": "standard deviation of --position learned at the start, before --embedding-scaling (default: 1/√d "
            "of the model's width d)",
            "above": 0,
        },
    )


@register_position("learned")
class LearnedPosition(EmbeddedPosition):
    """Starts as fairseq's, P ~ N(0, 1/d), or N(0, σ²). A position that no training sentence reaches keeps its start.

    Args:
        dim: d, the model's width.
        learned_positions: the number of positions.
        learned_positions_std: σ; d^−½ unless given.

    Raises:
        UsageError: fewer than one position, or a σ that is not positive; on a call, a longer sequence.
    """

    paper = "Gehring et al. 2017; fairseq"
    options = LearnedOptions

    def __init__(self, dim: int, *, learned_positions: int = 1024, learned_positions_std: float | None = None):
        super().__init__(dim)
        given = {"learned_positions": learned_positions, "learned_positions_std": learned_positions_std}
        ranges.check(LearnedOptions, given)
        self.longest = learned_positions
        std = dim**-0.5 if learned_positions_std is None else learned_positions_std
        self.weight = nn.Parameter(torch.empty(learned_positions, dim).normal_(0.0, std))

    def forward(self, positions: Tensor, length: int) -> Tensor:
        # Padding counts in the length and has no position of its own. The host reads positions only where it must.
        if length > self.longest and int(positions.max()) >= self.longest:
            raise UsageError(
                f"a sequence of length {length} is longer than --learned-positions {self.longest}: train with more, or "
                "leave longer sequences out"
            )
        return nn.functional.embedding(positions, self.weight)

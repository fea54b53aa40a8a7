"""Randomized positions (Ruoss et al. 2023, section 3): an ordered random subset of more numbers than any sentence has.

    I = {i_0 < i_1 < … < i_{N−1}} ⊂ {0, …, L−1}, uniform without replacement; the token at j has position i_j

Each side draws one subset for a batch and forward pass; all layers of the side use it. So the positions that only
longer sentences reach at test time are trained.

The paper draws a subset at test time too. Outputs are random then, and step-by-step decoding is not defined: the
positions of a prefix would change with its length. In evaluation this code gives the token at j the position j·⌊L/K⌋,
where K is the longest expected sequence (``--randomized-eval-length``). These positions are evenly spread, like the
mean of a subset of size K. They are the same for every prefix, and distances do not depend on padding. K is not part
of the checkpoint and may be changed at test time (``--model-overrides "{'randomized_eval_length': 100}"``).

With base ``relative``, distances are differences of positions, i_k − i_j, as in section 3. The released code draws a
subset of the distances instead, so that all pairs at the same distance agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.position.base import Position, register_position
from fairseq_sg.modules.position.learned import LearnedPosition
from fairseq_sg.modules.position.sinusoidal import SinusoidalPosition

BASES = {
    "sinusoidal": lambda dim, count: SinusoidalPosition(dim),
    "learned": lambda dim, count: LearnedPosition(dim, learned_positions=count),
    "relative": None,
}


@dataclass
class RandomizedOptions:
    randomized_base: str = field(
        default="sinusoidal",
        metadata={
            "help": "positions that --position randomized draws numbers for: sinusoidal or learned ones on the "
            "embeddings, or those of relative attention (relative)",
            "choices": tuple(BASES),
        },
    )
    randomized_range: int = field(
        default=2048, metadata={"help": "number of positions that --position randomized draws from", "least": 1}
    )
    randomized_eval_length: int = field(
        default=512,
        metadata={
            "help": "longest sequence of --position randomized in evaluation; longer ones are left out of training "
            "too; may be changed at test time",
            "least": 1,
        },
    )


@register_position("randomized")
class RandomizedPosition(Position):
    """The base's positions at random numbers in training, at evenly spread ones in evaluation.

    Args:
        dim: the width of the embeddings it is added to; None with base ``relative``, which needs the numbers alone.
        randomized_base: ``sinusoidal``, ``learned`` (L vectors) or ``relative``.
        randomized_range: L. randomized_eval_length: K.

    Raises:
        UsageError: an unknown base, or K beyond L; on a call, a sequence longer than L in training, K in evaluation.
    """

    paper = "Ruoss et al. 2023, 3"
    options = RandomizedOptions
    indices_with = "--randomized-base relative"
    #: In training, every pass draws new positions.
    continues = False

    def __init__(
        self,
        dim: int | None = None,
        *,
        randomized_base: str = "sinusoidal",
        randomized_range: int = 2048,
        randomized_eval_length: int = 512,
    ):
        super().__init__()
        if not 1 <= randomized_eval_length <= randomized_range:
            raise UsageError(
                f"--randomized-eval-length is {randomized_eval_length}: "
                f"choose from 1 to --randomized-range {randomized_range}"
            )
        self.range, self.eval_length = randomized_range, randomized_eval_length
        self.longest = self.eval_length
        self.gives = _gives(randomized_base)
        make = BASES[randomized_base]
        self.base = None if make is None else make(dim, randomized_range)

    @classmethod
    def gives_with(cls, config: Any) -> str:
        return _gives(config.randomized_base)

    def forward(self, *where) -> Tensor:
        """With a base on the embeddings as ``EmbeddedPosition``; with ``relative``, (length, device) -> ``numbers``."""
        if self.base is None:
            return self.numbers(*where)
        positions, length = where
        return self.base(self.numbers(length, positions.device)[positions], self.range)

    def numbers(self, length: int, device: torch.device) -> Tensor:
        """The positions of ``length`` tokens, (length,) int64, increasing; new ones at each call in training."""
        option, longest = ("range", self.range) if self.training else ("eval-length", self.eval_length)
        if length > longest:
            raise UsageError(
                f"a sequence of length {length} in {'training' if self.training else 'evaluation'} is longer than "
                f"--randomized-{option} {longest}: choose a larger one, "
                f"in evaluation at most --randomized-range {self.range}"
            )
        if self.training:
            return torch.randperm(self.range, device=device)[:length].sort().values
        return torch.arange(length, device=device) * (self.range // self.eval_length)


def _gives(base: str) -> str:
    ranges.check(RandomizedOptions, {"randomized_base": base})
    return "indices" if base == "relative" else "embedding"

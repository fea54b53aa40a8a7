"""What the ``fairseq-train`` commands for all kinds of data have in common."""

from __future__ import annotations

import shlex
from pathlib import Path

EVALUATIONS = 20  # in a training
NEVER = 1_000_000  # epochs
MOST_EXAMPLES, MOST_WORDS = 1 << 10, 1 << 16  # of a batch that is evaluated


def saving(out: Path, updates: int, validates: bool, suffix: str = "") -> str:
    """Options for a training of so many updates on the folder ``out``: where it is saved, and when it is validated.

    Both happen after every twentieth of the updates rather than after epochs, which can be a second long. The last
    checkpoint and, if it ``validates``, the best one are kept.
    """
    every = updates // EVALUATIONS
    kinds = ("validate", "save") if validates else ("save",)
    intervals = " ".join(f"--{kind}-interval-updates {every} --{kind}-interval {NEVER}" for kind in kinds)
    folder = Path("checkpoints") / (out.resolve().name + suffix)
    return f"{intervals} --keep-interval-updates 1 --no-epoch-checkpoints --save-dir {shlex.quote(str(folder))}"


def batch_to_evaluate(longest: int) -> int:
    """How many examples of at most ``longest`` words are evaluated at once: a power of two that memory has room for."""
    most = max(1, min(MOST_EXAMPLES, MOST_WORDS // longest))
    return 1 << (most.bit_length() - 1)

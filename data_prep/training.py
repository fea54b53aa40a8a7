"""The common part of the recommended ``fairseq-train`` commands."""

from __future__ import annotations

import shlex
from pathlib import Path

EVALUATIONS = 20  # per training
NEVER = 1_000_000  # epochs
MOST_EXAMPLES, MOST_WORDS = 1 << 10, 1 << 16  # per evaluation batch


def saving(out: Path, updates: int, validates: bool, suffix: str = "") -> str:
    """Options of a training of ``updates`` on the folder ``out``: save folder, and intervals of saving and validation.

    Both happen after every twentieth of the updates instead of after epochs, which may take only a second. The last
    checkpoint and, with ``validates``, the best one are kept.
    """
    every = updates // EVALUATIONS
    kinds = ("validate", "save") if validates else ("save",)
    intervals = " ".join(f"--{kind}-interval-updates {every} --{kind}-interval {NEVER}" for kind in kinds)
    folder = Path("checkpoints") / (out.resolve().name + suffix)
    return f"{intervals} --keep-interval-updates 1 --no-epoch-checkpoints --save-dir {shlex.quote(str(folder))}"


def batch_to_evaluate(longest: int) -> int:
    """The number of examples of at most ``longest`` words per evaluation batch: a power of two that fits in memory."""
    most = max(1, min(MOST_EXAMPLES, MOST_WORDS // longest))
    return 1 << (most.bit_length() - 1)

"""What the datasets share: pairs of sentences, the errors, the contract of a dataset, and hold-outs."""

from __future__ import annotations

import argparse
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.random import RandomState

# A request, an origin or a manifest: whatever survives a round trip through JSON unchanged.
Json = dict[str, Any]


class UsageError(ValueError):
    """A command line that asks for something that cannot be."""


class DataError(ValueError):
    """Data that are not what they should be: ``path`` and ``line`` (1-based), where there are such, and ``message``."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, line: int | None = None) -> None:
        self.message, self.path, self.line = message, path, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)


class Pair(NamedTuple):
    """One example: two strings of tokens, each separated from the next by one space."""

    source: str
    target: str


class Material(ABC):
    """What a dataset makes of a request, ready to be written.

    rule        how the subsets were made, in words.
    membership  whether the subsets hold the very examples of the published ones, in words.
    origin      what it was made from: the generator, or the files with their sizes and hashes.
    """

    rule: str
    membership: str
    origin: Json

    @abstractmethod
    def check(self) -> None:
        """Raises DataError for what must not be written."""

    @abstractmethod
    def write(self, folder: Path, raw_only: bool) -> None:
        """Writes everything but ``dataset.json`` into ``folder``, an empty one; without binaries if ``raw_only``."""

    @abstractmethod
    def describe(self) -> Json:
        """The entries ``subsets`` and ``vocabulary`` of ``dataset.json``, and others of its own."""

    @abstractmethod
    def summary(self, description: Json) -> list[str]:
        """The lines that tell the user what was made, from what ``describe`` returned."""

    @abstractmethod
    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """``fairseq-train`` commands for the folder ``out``, with the sizes meant for the dataset: one for each
        form that the data have.
        """


class Dataset(ABC):
    """One dataset of ``python -m data_prep``. A module makes one instance and is named in ``__main__.DATASETS``."""

    name: str
    title: str
    source: str
    licence: str
    size: str  # what there is to download, or that it is generated
    # The architecture of fairseq_sg whose sizes are meant for this dataset, or, for classes, which the papers give to
    # classifiers alone, that of a small encoder-decoder.
    arch: str
    classifier: str = ""  # for classes: the architecture of the papers' classifier, or the sizes where none has a name
    splits: tuple[str, ...]
    words: tuple[str, ...] = ()  # those of `Corpus.words`

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of this dataset, beyond ``--out``, ``--overwrite`` and ``--raw-only``."""

    @abstractmethod
    def request(self, args: argparse.Namespace) -> Json:
        """Everything in ``args`` that decides the bytes of the result, defaults filled in; no path of this machine.

        Raises UsageError where options do not go together. Must be quick: it runs before a prepared folder is reused.
        """

    @abstractmethod
    def build(self, args: argparse.Namespace, request: Json) -> Material:
        """Makes the data in memory, touching no file but the cache of downloads. Raises DataError."""


def check_sizes(subsets: Mapping[str, Sequence[Pair]], published: Mapping[str, int]) -> None:
    """Raises DataError where a subset has not its published size."""
    for name, size in published.items():
        if len(subsets[name]) != size:
            raise DataError(
                f"subset {name} has {len(subsets[name]):,} examples, and {size:,} are published: are these "
                "the official files, and whole?"
            )


def hold_out(pairs: list[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Draws an in-distribution validation set from a training set.

    Only sources that occur once can be drawn: of a repeated one the other copies would stay in training.

    Returns the training set without the drawn pairs, and the drawn pairs, ⌊fraction · number of such sources⌋ of them;
    both in the order of ``pairs``. The draw is by numpy's frozen legacy generator, the same in every version. Raises
    DataError if that is not even one.
    """
    once = occurring_once(pairs)
    size = int(len(once) * fraction)
    if size == 0:
        raise DataError(f"a hold-out of {fraction:g} of {len(once):,} examples is not even one")
    drawn = {once[i] for i in RandomState(seed).choice(len(once), size, replace=False)}
    kept = [pair for index, pair in enumerate(pairs) if index not in drawn]
    return kept, [pairs[index] for index in sorted(drawn)]


def occurring_once(pairs: Sequence[Pair]) -> list[int]:
    """The positions of the pairs whose source is there once."""
    count = Counter(pair.source for pair in pairs)
    return [position for position, pair in enumerate(pairs) if count[pair.source] == 1]


def processors() -> int:
    """How many processors this process may use."""
    # os.process_cpu_count() is new in Python 3.13.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(text: str) -> float:
    """The argument type of a share, 0 included and 1 not."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to below 1 (0.1 is a tenth), not {text!r}")
    return value


def seed_number(text: str) -> int:
    """The argument type of a seed, as numpy's legacy generator takes it."""
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, not {text!r}")
    return int(text)

"""The basis of all datasets: pairs of sentences, errors, the contract of a dataset, and hold-outs."""

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

# A request, an origin or a manifest: values that a round trip through JSON does not change.
Json = dict[str, Any]


class UsageError(ValueError):
    """A command line that cannot be carried out."""


class DataError(ValueError):
    """Invalid data: ``message``, with ``path`` and ``line`` (1-based) where they apply."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, line: int | None = None) -> None:
        self.message, self.path, self.line = message, path, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)


class Pair(NamedTuple):
    """One example: two strings of tokens, each separated from the next by one space."""

    source: str
    target: str


class Material(ABC):
    """The data of one request, ready to be written.

    Attributes:
        rule: how the subsets were made, in words.
        membership: whether the examples are those of the published subsets, in words.
        origin: the generator, or the files with their sizes and hashes.
    """

    rule: str
    membership: str
    origin: Json

    @abstractmethod
    def check(self) -> None:
        """Raises DataError for data that must not be written."""

    @abstractmethod
    def write(self, folder: Path, raw_only: bool) -> None:
        """Writes everything except ``dataset.json`` into the empty ``folder``; no binaries with ``raw_only``."""

    @abstractmethod
    def describe(self) -> Json:
        """The entries ``subsets`` and ``vocabulary`` of ``dataset.json``, and further ones."""

    @abstractmethod
    def summary(self, description: Json) -> list[str]:
        """Lines for the user on the result of ``describe``."""

    @abstractmethod
    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """``fairseq-train`` commands for the folder ``out`` with the sizes for this dataset,
        one per form of the data.
        """


class Dataset(ABC):
    """One dataset of ``python -m data_prep``. A module makes one instance, listed in ``__main__.DATASETS``."""

    name: str
    title: str
    source: str
    licence: str
    size: str  # of the download, or "generated"
    # The architecture of fairseq_sg with the sizes for this dataset. Papers train only classifiers on classes; for
    # those it is a small encoder-decoder.
    arch: str
    classifier: str = ""  # for classes: the papers' classifier, by architecture or by sizes
    splits: tuple[str, ...]
    words: tuple[str, ...] = ()  # as `Corpus.words`

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of this dataset, beyond ``--out``, ``--overwrite`` and ``--raw-only``."""

    @abstractmethod
    def request(self, args: argparse.Namespace) -> Json:
        """Returns everything in ``args`` that decides the bytes of the result, with defaults,
        without paths of this machine.

        Must be quick: it runs before a prepared folder is reused. Raises UsageError for options
        that exclude each other.
        """

    @abstractmethod
    def build(self, args: argparse.Namespace, request: Json) -> Material:
        """Makes the data in memory; writes no file except to the download cache. Raises DataError."""


def check_sizes(subsets: Mapping[str, Sequence[Pair]], published: Mapping[str, int]) -> None:
    """Raises DataError for a subset whose size is not the published one."""
    for name, size in published.items():
        if len(subsets[name]) != size:
            raise DataError(
                f"subset {name} has {len(subsets[name]):,} examples instead of the published {size:,}: are these "
                "the official files, and complete?"
            )


def hold_out(pairs: list[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Draws an in-distribution validation set from a training set.

    Only sources that occur once are drawn, since copies of the others would stay in training. The draw uses numpy's
    frozen legacy generator, which is the same in every version.

    Returns:
        The training set without the drawn pairs, and the ⌊fraction · number of such sources⌋ drawn pairs; both in the
        order of ``pairs``.

    Raises:
        DataError: not even one pair would be drawn.
    """
    once = occurring_once(pairs)
    size = int(len(once) * fraction)
    if size == 0:
        raise DataError(f"a hold-out of {fraction:g} of {len(once):,} examples is not even one")
    drawn = {once[i] for i in RandomState(seed).choice(len(once), size, replace=False)}
    kept = [pair for index, pair in enumerate(pairs) if index not in drawn]
    return kept, [pairs[index] for index in sorted(drawn)]


def occurring_once(pairs: Sequence[Pair]) -> list[int]:
    """The positions of the pairs whose source occurs once."""
    count = Counter(pair.source for pair in pairs)
    return [position for position, pair in enumerate(pairs) if count[pair.source] == 1]


def processors() -> int:
    """The number of processors that this process may use."""
    # os.process_cpu_count() is new in Python 3.13.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(text: str) -> float:
    """Argument type: a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to below 1 (0.1 is a tenth), not {text!r}")
    return value


def seed_number(text: str) -> int:
    """Argument type: a seed of numpy's legacy generator."""
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, not {text!r}")
    return int(text)

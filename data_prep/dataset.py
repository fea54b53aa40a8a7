"""The basis of all datasets: pairs of sentences, errors, the contract of a dataset, and hold-outs."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    """One dataset of ``python -m data_prep``, listed in ``__main__.DATASETS``."""

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

    @property
    def about(self) -> str:
        """The text of ``--help``: the docstring of the class if it has several lines, else that of its module."""
        own = inspect.getdoc(type(self)) or ""
        return own if "\n" in own else sys.modules[type(self).__module__].__doc__ or ""

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

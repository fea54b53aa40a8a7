"""What the datasets share: sentence pairs, the errors, the description of a dataset, and the checks on its subsets."""

from __future__ import annotations

import argparse
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.random import RandomState

# A request, an origin or a manifest: whatever survives a round trip through JSON unchanged.
Json = dict[str, Any]


class UsageError(ValueError):
    """A command line that asks for something that cannot be."""


class DataError(ValueError):
    """Data that are not what they should be: `path` and `line` (1-based), where there are such, and `message`."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, line: int | None = None) -> None:
        self.message, self.path, self.line = message, path, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)


class Pair(NamedTuple):
    """One example: two strings of tokens, each separated from the next by one space."""

    source: str
    target: str


class Counts(NamedTuple):
    """How many words there are in the sources, in the targets, and in both together."""

    source: int
    target: int
    together: int


@dataclass(frozen=True)
class Corpus:
    """What a dataset module makes of a request.

    subsets     name -> pairs, `train` first; the name is the one fairseq will know, so never `valid1`.
    published   name -> size in the paper or the official files, before anything was held out; may lack subsets.
    rule        how the subsets were made, in words.
    membership  whether the subsets hold the very examples of the published ones, in words.
    origin      what the pairs were made from: the generator, or the files with their sizes and hashes.
    vocabulary  how many words the sources and the targets of all subsets together must have, where that is known.
    joined      whether sources and targets share one dictionary, as in the papers.
    together    how many words that dictionary must have, where that is known.
    types       name -> the type of every example, for the subsets whose examples have types.
    """

    subsets: dict[str, list[Pair]]
    published: dict[str, int]
    rule: str
    membership: str
    origin: Json
    vocabulary: tuple[int, int] | None
    joined: bool = False
    together: int | None = None
    types: dict[str, list[str]] = field(default_factory=dict)


class Dataset(ABC):
    """One dataset of `python -m data_prep`. A module makes one instance and is named in `__main__.DATASETS`."""

    name: str
    title: str
    source: str
    licence: str
    arch: str  # the architecture of fairseq_sg whose sizes are meant for this dataset
    splits: tuple[str, ...]

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of this dataset, beyond `--out`, `--overwrite` and `--raw-only`."""

    @abstractmethod
    def request(self, args: argparse.Namespace) -> Json:
        """Everything in `args` that decides the bytes of the result, defaults filled in; no path of this machine.

        Raises UsageError where options do not go together. Must be quick: it runs before a prepared folder is reused.
        """

    @abstractmethod
    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        """Makes the corpus in memory, touching no file but the cache of downloads. Raises DataError."""


def vocabulary(lines: Iterable[str]) -> set[str]:
    """The words of all lines."""
    return {word for line in lines for word in line.split(" ")}


def count_words(subsets: Mapping[str, list[Pair]]) -> Counts:
    """The sizes of the vocabularies of all subsets."""
    sources, targets = (
        vocabulary(getattr(pair, side) for pairs in subsets.values() for pair in pairs) for side in Pair._fields
    )
    return Counts(len(sources), len(targets), len(sources | targets))


def check_sizes(subsets: Mapping[str, list[Pair]], published: Mapping[str, int]) -> None:
    """Raises DataError where a subset has not its published size."""
    for name, size in published.items():
        if len(subsets[name]) != size:
            raise DataError(f"subset {name} has {len(subsets[name]):,} examples, and {size:,} are published")


def check_corpus(corpus: Corpus) -> None:
    """Raises DataError for a subset that fairseq would mistake or that is empty, for a training example in another
    subset, for a vocabulary of another size than it should have, and for types that do not match their examples."""
    if next(iter(corpus.subsets)) != "train":
        raise DataError(f"the first subset is {next(iter(corpus.subsets))}, not train")
    trained = {pair.source for pair in corpus.subsets["train"]}
    for name, pairs in corpus.subsets.items():
        # fairseq joins valid, valid1, valid2, ... into one validation set.
        if not re.fullmatch(r"[a-z][a-z_]*", name):
            raise DataError(f"a subset may not be named {name!r}: small letters and underscores only")
        if not pairs:
            raise DataError(f"subset {name} is empty")
        shared = next((pair.source for pair in pairs if name != "train" and pair.source in trained), None)
        if shared is not None:
            raise DataError(f"train and {name} overlap: both hold {shared!r}")
    for name, types in corpus.types.items():
        if len(types) != len(corpus.subsets[name]):
            raise DataError(f"subset {name} has {len(corpus.subsets[name]):,} examples and {len(types):,} types")
    check_vocabulary(corpus)


def check_vocabulary(corpus: Corpus) -> None:
    """Raises DataError for a vocabulary of another size than it should have."""
    found = count_words(corpus.subsets)
    for side, expected in zip(Pair._fields, corpus.vocabulary or (None, None), strict=True):
        if expected is not None and getattr(found, side) != expected:
            raise DataError(f"the {side} vocabulary has {getattr(found, side)} words instead of {expected}")
    if corpus.together is not None and found.together != corpus.together:
        raise DataError(f"the common vocabulary has {found.together} words instead of {corpus.together}")


def hold_out(pairs: list[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Draws an in-distribution validation set from a training set.

    Only sources that occur once can be drawn: of a repeated one the other copies would stay in training.

    Returns the training set without the drawn pairs, and the drawn pairs, ⌊fraction · number of such sources⌋ of them;
    both in the order of `pairs`. The draw is by numpy's frozen legacy generator, the same in every version.
    Raises DataError if that is not even one.
    """
    count = Counter(pair.source for pair in pairs)
    once = [index for index, pair in enumerate(pairs) if count[pair.source] == 1]
    size = int(len(once) * fraction)
    if size == 0:
        raise DataError(f"a hold-out of {fraction:g} of {len(once):,} examples is not even one")
    drawn = {once[i] for i in RandomState(seed).choice(len(once), size, replace=False)}
    kept = [pair for index, pair in enumerate(pairs) if index not in drawn]
    return kept, [pairs[index] for index in sorted(drawn)]


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

"""PARITY and FIRST: random strings of 0 and 1 of chosen lengths, a token CLS, and two classes.

Both test generalization of transformers from short to long strings (Chiang & Cholak 2022).
"""

from __future__ import annotations

import argparse
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Dataset, Options, Pair, Sources, UsageError, option, shorten, whole_number
from data_prep.draws import PackedPairs, first_distinct, seed_option

CLS = "CLS"
# The transformer of the paper, without its number of heads.
SIZES = "sg_encoder --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 64"
LONGEST = 10_000  # symbols
HELD_OUT = 10  # valid has at most 1 / HELD_OUT of all strings of a length
VOCABULARY = (3, 2)
Strings = dict[int, list[str]]


def lengths(text: str) -> list[int]:
    """Argument type: numbers and ranges, separated by commas. Returns them in ascending order without repetitions."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= LONGEST:
            raise argparse.ArgumentTypeError(
                f"must be numbers from 1 to {LONGEST} such as 30 or 10,30 or 1-40, not {shorten(text)}"
            )
        found.update(range(first, last + 1))
    return sorted(found)


def lengths_option(what: str) -> Any:
    """The option ``--train-lengths`` or ``--test-lengths``."""
    text = f"lengths of the strings in {what} without CLS, such as 30 or 10,30 or 1-40"
    return option(help=text, type=lengths, metavar="LENGTHS")


@dataclass(frozen=True)
class StringOptions(Options):
    """The options of PARITY and FIRST."""

    train_lengths: list[int] = lengths_option("train and valid")
    test_lengths: list[int] = lengths_option("gen")
    train: int = option(10_000, "strings per length in train (default: %(default)s)", type=whole_number(100, 1_000_000))
    test: int = option(
        1_000, "strings per length in valid and gen each (default: %(default)s)", type=whole_number(10, 100_000)
    )
    seed: int = seed_option()

    def complete(self, sources: Sources) -> StringOptions:
        common = sorted(set(self.train_lengths) & set(self.test_lengths))
        if common:
            raise UsageError(
                f"length {common[0]} is in --train-lengths and --test-lengths: valid has "
                "training lengths, gen has others"
            )
        if all(number_held_out(length, self.test) == 0 for length in self.train_lengths):
            raise UsageError(
                f"--train-lengths: {2 ** max(self.train_lengths)} strings are too few for a valid set; add a length "
                f"of {HELD_OUT.bit_length()} or more"
            )
        return self


class BinaryStrings(Dataset):
    """A language over 0 and 1, and its labelled examples."""

    source = "its rule (Chiang & Cholak 2022)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    splits = ("length",)
    options = StringOptions

    @abstractmethod
    def example(self, string: str) -> Pair:
        """Returns the symbols of a nonempty string and CLS as tokens, with the target ``1`` if it is in
        the language, else ``0``.
        """

    def build(self, options: StringOptions, sources: Sources) -> Corpus:
        size, seed = options.test, options.seed
        held_out = {n: distinct_strings(n, number_held_out(n, size), (seed, 1, n)) for n in options.train_lengths}
        gen = {n: distinct_strings(n, min(size, 2**n), (seed, 2, n)) for n in options.test_lengths}
        train = {n: strings_except(n, options.train, (seed, 0, n), set(held_out[n])) for n in options.train_lengths}
        return Corpus(
            {name: self.subset(of) for name, of in {"train": train, "valid": held_out, "gen": gen}.items()},
            f"train and valid have lengths {format_lengths(options.train_lengths)}, "
            f"gen {format_lengths(options.test_lengths)}",
            "generated; the authors draw new strings in every step",
            {"generator": "data_prep.binary_strings"},
            VOCABULARY,
            labels=True,
        )

    def subset(self, strings: Strings) -> Subset:
        """The examples of strings, by length."""
        return Subset(
            PackedPairs(map(self.example, in_order(strings))),
            [f"length_{len(string)}" for string in in_order(strings)],
        )


def format_lengths(numbers: list[int]) -> str:
    """Formats lengths as ``lengths`` reads them, with runs as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def number_held_out(length: int, wanted: int) -> int:
    """The number of strings of a length in valid: ``wanted``, but at most a tenth of all strings."""
    return min(wanted, (1 << length) // HELD_OUT)


def draws(length: int, seed: tuple[int, ...]) -> Iterator[str]:
    """Yields strings of a length without end, uniformly, from numpy's frozen legacy generator."""
    generator = RandomState(list(seed))
    while True:
        bits = (generator.random_sample(length) >= 0.5).astype(np.uint8)
        yield (bits + ord("0")).tobytes().decode("ascii")


def distinct_strings(length: int, number: int, seed: tuple[int, ...]) -> list[str]:
    """The first ``number`` distinct strings of the draws; at most 2 ** length."""
    return first_distinct(number, draws(length, seed).__next__)


def strings_except(length: int, number: int, seed: tuple[int, ...], excluded: set[str]) -> list[str]:
    """The first ``number`` strings of the draws that are not in ``excluded``, with repetitions."""
    stream = (string for string in draws(length, seed) if string not in excluded)
    return [next(stream) for _ in range(number)]


def in_order(strings: Strings) -> Iterator[str]:
    """All strings, by length."""
    return (string for of_a_length in strings.values() for string in of_a_length)


class Parity(BinaryStrings):
    """PARITY: is the number of ones odd? (Chiang & Cholak 2022, after Hahn 2020)

        0 1 1 0 1 CLS     ->  1
        1 0 0 1 0 CLS     ->  0

    Strings have symbols 0 and 1, each with probability 1/2, and CLS, the last token, from which the class is read. The
    class is 1 for an odd number of ones. ``--train-lengths`` are those of the strings in ``train`` and ``valid``,
    ``--test-lengths`` those in ``gen``; no length may be in both:

        python -m data_prep parity --train-lengths 1-40 --test-lengths 50,100,1000 --out FOLDER

        train   10,000 strings per training length (``--train``), drawn with repetitions
        valid   1,000 distinct ones per training length (``--test``), but at most a tenth of all strings of that length.
                None of them is in train.
        gen     1,000 distinct ones per test length, or all there are

    Line N of raw/SUBSET.type is the length of string N without CLS, for accuracy by length. The authors train on one
    length and draw new strings in every step; here the files are fixed, and --seed makes others. fairseq takes sources
    of up to 1,024 tokens with CLS, begin and end symbol: beyond length 1,021 it needs --max-source-positions.

    Source: generated; Chiang & Cholak 2022, section 3, and github.com/ndnlp/parity, parity.py.
    """

    name = "parity"
    title = "PARITY"
    classifier = f"{SIZES} --encoder-attention-heads 2 --readout last"

    def example(self, string: str) -> Pair:
        return Pair(" ".join([*string, CLS]), str(string.count("1") % 2))


class First(BinaryStrings):
    """FIRST: is the first symbol a one? (Chiang & Cholak 2022)

        CLS 1 0 0 1 0     ->  1
        CLS 0 1 1 0 1     ->  0

    Strings have symbols 0 and 1, each with probability 1/2, after CLS, the first token, from which the class is
    read. The class is the symbol right after it. ``--train-lengths`` are those of the strings in ``train`` and
    ``valid``, ``--test-lengths`` those in ``gen``; no length may be in both. The authors train on length 10, 30, 100
    or 300 and test on 1,000:

        python -m data_prep first --train-lengths 10 --test-lengths 1000 --out FOLDER

        train   10,000 strings per training length (``--train``), drawn with repetitions
        valid   1,000 distinct ones per training length (``--test``), but at most a tenth of all strings of that length
                (102 of length 10). None of them is in train.
        gen     1,000 distinct ones per test length, or all there are

    Line N of raw/SUBSET.type is the length of string N without CLS, for accuracy by length. The authors draw new
    strings in every step; here the files are fixed, and --seed makes others. fairseq takes sources of up to 1,024
    tokens with CLS, begin and end symbol: beyond length 1,021 it needs --max-source-positions.

    Source: generated; Chiang & Cholak 2022, section 3, and github.com/ndnlp/parity, first.py.
    """

    name = "first"
    title = "FIRST"
    classifier = f"{SIZES} --encoder-attention-heads 1 --readout first"

    def example(self, string: str) -> Pair:
        return Pair(" ".join([CLS, *string]), string[0])

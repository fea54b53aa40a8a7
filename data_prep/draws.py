"""Random numbers, sizes, and sets with equally many expressions of every depth, for simple arithmetic and ListOps.

In both, training has depths 1 to 5, ``dev`` has depth 6 and ``gen`` depths 7 and 8 (Csordás
2023, sections 5.2.2, 5.2.3).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence

from numpy.random import RandomState

from data_prep.dataset import Json, Pair, seed_number
from data_prep.packed import PackedPairs
from data_prep.text import shorten

TRAIN_DEPTHS, DEV_DEPTHS, GEN_DEPTHS = range(1, 6), range(6, 7), range(7, 9)
LEAST_TRAIN, MOST_TRAIN = 1_000, 1_000_000
LEAST_TEST, MOST_TEST = 10, 100_000
DEFAULT_TEST = 1_000
DEFAULT_SEED = 1
DRAWN_AT_ONCE = 4_096


def uniform(seed: Sequence[int]) -> Callable[[], float]:
    """Returns a function that draws uniform numbers in [0, 1) from numpy's frozen legacy generator.

    The numbers are the same on every machine. ``seed`` is one or more whole numbers from 0 to 2³² − 1.
    """

    def numbers() -> Iterator[float]:
        generator = RandomState(list(seed))
        while True:
            yield from generator.random_sample(DRAWN_AT_ONCE).tolist()

    return numbers().__next__


def depth_type(depth: int) -> str:
    """The type of examples of a depth, for accuracy by depth."""
    return f"depth_{depth}"


class Balance:
    """A set that is filled with equally many expressions of every depth: number i has depth i mod len(depths).

    Expressions in ``taken`` are excluded, and accepted ones are added to ``taken``.
    """

    def __init__(self, depths: Sequence[int], size: int, taken: set[str]) -> None:
        self.size = size
        self._taken = taken
        self._wanted = {depth: len(range(index, size, len(depths))) for index, depth in enumerate(depths)}
        self._found: dict[int, list[Pair]] = {depth: [] for depth in depths}

    def wants(self, depth: int) -> bool:
        """Whether the set still lacks an expression of this depth."""
        return depth in self._wanted and len(self._found[depth]) < self._wanted[depth]

    def least(self) -> int | None:
        """The minimum depth of a missing expression; None once the set is full."""
        return min(filter(self.wants, self._wanted), default=None)

    def offer(self, expression: str, value: int, depth: int) -> bool:
        """Accepts an expression unless it is taken or its depth is complete; returns whether it did."""
        if not self.wants(depth) or expression in self._taken:
            return False
        self._taken.add(expression)
        self._found[depth].append(Pair(expression, str(value)))
        return True

    def pairs(self) -> PackedPairs:
        """The expressions with their values: depths in turn, each depth in the order of the offers."""
        depths = list(self._found)
        return PackedPairs(self._found[depths[i % len(depths)]][i // len(depths)] for i in range(self.size))

    def types(self) -> list[str]:
        """The types of ``pairs``."""
        names = [depth_type(depth) for depth in self._found]
        return [names[i % len(names)] for i in range(self.size)]


def number_between(least: int, most: int) -> Callable[[str], int]:
    """Argument type: a whole number from ``least`` to ``most``."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {shorten(text)}")
        return int(text)

    return number


def add_size_arguments(parser: argparse.ArgumentParser, train: int, what: str) -> None:
    """Adds ``--train``, ``--test`` and ``--seed``; ``what`` describes the default of ``train``."""
    parser.add_argument(
        "--train",
        type=number_between(LEAST_TRAIN, MOST_TRAIN),
        default=train,
        metavar="N",
        help=f"{what} (default: {train}, the paper's)",
    )
    parser.add_argument(
        "--test",
        type=number_between(LEAST_TEST, MOST_TEST),
        default=DEFAULT_TEST,
        metavar="N",
        help=f"examples in each of valid, dev and gen (default: {DEFAULT_TEST}, the paper's)",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=DEFAULT_SEED,
        metavar="N",
        help=f"seed of the draw (default: {DEFAULT_SEED})",
    )


def size_request(args: argparse.Namespace) -> Json:
    """The request entries of the options of ``add_size_arguments``."""
    return {"train": args.train, "test": args.test, "seed": args.seed}

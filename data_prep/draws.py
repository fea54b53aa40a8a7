"""Random draws: hold-outs, uniform numbers, sets balanced by depth, and a compact sequence of pairs."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from numpy.random import RandomState

from data_prep.dataset import DataError, Pair, UsageError, option, seed_number, whole_number

T = TypeVar("T")
DEFAULT_SHARE = 0.05


def draw(
    pairs: list[Pair],
    shares: Mapping[str, float],
    seed: int | None,
    called: str = "a --{}-share",
    examples: str = "pairs",
) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Draws subsets, ⌊share · number of the pairs whose source occurs once⌋ of these pairs each.

    Copies of the other sources would stay in training. The draw uses numpy's frozen legacy generator, which is the
    same in every version.

    Args:
        shares: subset -> its share.
        called, examples: what a share (with {} for its subset) and the pairs are called in an error.

    Returns:
        The other pairs, and the subsets; all in the order of ``pairs``.

    Raises:
        DataError: a subset would not have even one pair.
    """
    once = occurring_once(pairs)
    order, home = RandomState(seed).permutation(len(once)), dict.fromkeys(range(len(pairs)), "")
    for subset, part in shares.items():
        number = int(exact(part) * len(once))
        if number == 0:
            what = f"{called.format(subset)} of {part:g} of {len(once):,} {examples}"
            raise DataError(f"{what} is not even one: choose more, or 0 for none")
        home |= {once[position]: subset for position in order[:number]}
        order = order[number:]
    found = {
        name: [pair for pair, place in zip(pairs, home.values(), strict=True) if place == name]
        for name in ("", *shares)
    }
    return found.pop(""), found


def hold_out(pairs: list[Pair], fraction: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Draws an in-distribution validation set from a training set; returns the rest and what is drawn, as ``draw``."""
    kept, drawn = draw(pairs, {"valid": fraction}, seed, "a --holdout", "examples")
    return kept, drawn["valid"]


def first_distinct(size: int, draw: Callable[[], T]) -> list[T]:
    """The first ``size`` distinct draws, in drawing order."""
    found: dict[T, None] = {}
    while len(found) < size:
        found[draw()] = None
    return list(found)


def seed_of(seed: int | None, draws: bool, default: int, nothing: str = "nothing is held out") -> int | None:
    """The seed of a draw, by default ``default``; None without a draw.

    Raises UsageError for a seed that is given though ``nothing`` is drawn.
    """
    if seed is not None and not draws:
        raise UsageError(f"--seed has no effect: {nothing}")
    return (default if seed is None else seed) if draws else None


def exact(part: float) -> Fraction:
    """A share as the exact decimal fraction that was typed: 0.1 is a tenth."""
    return Fraction(repr(part))


def shares_of(given: Mapping[str, float], subsets: Iterable[str]) -> dict[str, float]:
    """The share of each subset, by default ``DEFAULT_SHARE``. Raises UsageError where they leave no training set."""
    shares = {name: given.get(name, DEFAULT_SHARE) for name in subsets}
    if sum(map(exact, shares.values())) >= 1:
        raise UsageError("--valid-share and --test-share leave nothing to train on")
    return shares


def occurring_once(pairs: Sequence[Pair]) -> list[int]:
    """The positions of the pairs whose source occurs once."""
    count = Counter(pair.source for pair in pairs)
    return [position for position, pair in enumerate(pairs) if count[pair.source] == 1]


def processors() -> int:
    """The number of processors that this process may use."""
    # os.process_cpu_count() is new in Python 3.13.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PackedPairs(Sequence[Pair]):
    """A sequence of pairs with 16 bytes of overhead per pair; a list has some 200.

    It is made from an iterable that is read once, and indexed by whole numbers; it has no slices.
    """

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        text, ends = bytearray(), array("q", [0])
        for pair in pairs:
            for side in pair:
                text += side.encode("utf-8")
                ends.append(len(text))
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self):,}")
        first = 2 * (index % len(self))
        start, middle, end = self._ends[first : first + 3]
        return Pair(self._text[start:middle].decode("utf-8"), self._text[middle:end].decode("utf-8"))


# Of simple arithmetic and ListOps (Csordás 2023, sections 5.2.2, 5.2.3).
TRAIN_DEPTHS, DEV_DEPTHS, GEN_DEPTHS = range(1, 6), range(6, 7), range(7, 9)
DEFAULT_TEST = 1_000
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


def train_size(default: int, what: str) -> Any:
    """The option ``--train``; ``what`` describes its default, the paper's."""
    text = f"{what} (default: {default}, the paper's)"
    return option(default, text, type=whole_number(1_000, 1_000_000))


def test_size() -> Any:
    """The option ``--test``."""
    text = f"examples in each of valid, dev and gen (default: {DEFAULT_TEST}, the paper's)"
    return option(DEFAULT_TEST, text, type=whole_number(10, 100_000))


def seed_option(default: int = 1, what: str = "the draw") -> Any:
    """The option ``--seed``."""
    return option(default, f"seed of {what} (default: {default})", type=seed_number)

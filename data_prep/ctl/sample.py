"""Draws the examples of compositional table lookup number by number as the reference does (see ``ctl``).

The reference (Csordás et al. 2022, ``ndr``) has a seeded generator, which is reproduced to the last draw. Its seed does
not decide three choices:

    which 8,000 of the 61,136 training examples are held out, and which 1,000 of 3,000 are its second test of new
    primitives: drawn there by numpy's global generator, here by the seeded one after all other draws
    the symbols of the new compositions: drawn there in the order of a Python set, here in the order of drawing

So the default seed gives the reference's tables, reserved compositions, pool of training examples, ``dev``, ``gen``
and ``new_primitive_one``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from numpy.random import RandomState

from data_prep.draws import first_distinct

SYMBOLS = tuple(f"{number:03b}" for number in range(8))
FUNCTIONS = tuple("abcdefghijk")
COMPOSED = 9  # a to i; j and k are the new primitives
J, K = 9, 10
TRAINED, TUNED, TESTED = range(2, 6), range(6, 9), range(9, 11)  # numbers of functions
POSSIBLE = len(SYMBOLS) * sum(COMPOSED**length for length in TRAINED)
REPEATS = 30  # further copies in training of each row of j and k
HELD_OUT = 4_000  # each for valid and for test
TEST_SIZE = 1_000
NEW_PRIMITIVE_TWO = 3_000  # drawn; only TEST_SIZE of them are tested
MOST_RESERVED = 200  # compositions of each length
EACH_LENGTH = 1_500  # training examples per number of functions
SMALL_HELD_OUT = 250  # for valid, per length with at least four times as many examples
LONGER = 500  # examples in dev and in gen

Tables = Sequence[Sequence[int]]


class Example(NamedTuple):
    """A symbol, 0 to 7, and the functions applied to it, 0 to 10, outermost first."""

    symbol: int
    functions: tuple[int, ...]

    def result(self, tables: Tables) -> int:
        """The resulting symbol."""
        symbol = self.symbol
        for function in reversed(self.functions):
            symbol = tables[function][symbol]
        return symbol


@dataclass(frozen=True)
class Sample:
    """Attributes:
    tables: function -> symbol -> symbol.
    subsets: name -> examples, ``train`` first.
    """

    tables: Tables
    subsets: dict[str, list[Example]]


class Sampler:
    """Draws from numpy's frozen legacy generator in the reference's order."""

    def __init__(self, seed: int) -> None:
        self.random = RandomState(seed)

    def symbol(self) -> int:
        return int(self.random.randint(len(SYMBOLS)))

    def functions(self, most: int, length: int) -> tuple[int, ...]:
        """Draws ``length`` functions, each uniform over the first ``most``."""
        return tuple(self.random.randint(most, size=length).tolist())

    def composition(self, most: int, lengths: range) -> list[int]:
        """Draws functions, each uniform over the first ``most``, their number uniform over ``lengths``."""
        drawn = self.functions(most, lengths[-1])
        return list(drawn[: self.random.randint(lengths[0], lengths[-1] + 1)])

    def reserve(self) -> list[tuple[int, ...]]:
        """Draws distinct compositions of every training length: a quarter of them, or 200."""
        reserved: list[tuple[int, ...]] = []
        for length in range(TRAINED[-1] + 1):
            quarter = -(-(COMPOSED**length) // 4)
            reserved += first_distinct(min(MOST_RESERVED, quarter), partial(self.functions, COMPOSED, length))
        return reserved

    def seen(self, reserved: set[tuple[int, ...]]) -> Example:
        """Draws a symbol and a composition that is not reserved."""
        while (functions := tuple(self.composition(COMPOSED, TRAINED))) in reserved:
            pass
        return Example(self.symbol(), functions)

    def longer(self, lengths: range) -> Example:
        symbol = self.symbol()
        return Example(symbol, tuple(self.composition(COMPOSED, lengths)))

    def with_j(self) -> Example:
        """Draws a composition with ``j`` at a random place and any function except ``k`` elsewhere."""
        symbol, functions = self.symbol(), self.composition(COMPOSED + 1, TRAINED)
        functions[self.random.randint(len(functions))] = J
        return Example(symbol, tuple(functions))

    def with_k(self) -> Example:
        """Draws a composition with ``k`` at a random place and any function except ``j`` elsewhere."""
        symbol = self.symbol()
        functions = [K if function == J else function for function in self.composition(COMPOSED + 1, TRAINED)]
        functions[self.random.randint(len(functions))] = K
        return Example(symbol, tuple(functions))

    def choose(self, size: int, pool: Sequence[Example]) -> list[Example]:
        """Draws ``size`` of ``pool``, in random order."""
        return [pool[index] for index in self.random.choice(len(pool), size, replace=False)]


def sample(seed: int) -> Sample:
    """Draws all subsets. Examples of a subset are distinct, except the repeated ones of training.

    Three reserved compositions have one function. All of those are in training, so ``new_composition`` omits them and
    has 605 examples instead of the reference's 608.
    """
    sampler = Sampler(seed)
    tables = [sampler.random.permutation(len(SYMBOLS)).tolist() for _ in FUNCTIONS]
    reserved = sampler.reserve()
    singles = [Example(symbol, (f,)) for f in range(len(FUNCTIONS)) for symbol in range(len(SYMBOLS))]
    unseen = set(reserved)
    pool = first_distinct(POSSIBLE // 10 + 2 * HELD_OUT, lambda: sampler.seen(unseen))
    new_primitive_one = first_distinct(TEST_SIZE, sampler.with_j)
    new_primitive_two = first_distinct(NEW_PRIMITIVE_TWO, sampler.with_k)
    dev = first_distinct(TEST_SIZE, lambda: sampler.longer(TUNED))
    gen = first_distinct(TEST_SIZE, lambda: sampler.longer(TESTED))
    new_composition = [Example(sampler.symbol(), functions) for functions in reserved]
    held_out = sampler.choose(2 * HELD_OUT, pool)
    kept = set(pool).difference(held_out)
    repeated = [example for example in singles if example.functions[0] >= COMPOSED] * REPEATS
    return Sample(
        tables,
        {
            "train": [*singles, *(example for example in pool if example in kept), *repeated],
            "valid": held_out[HELD_OUT:],
            "dev": dev,
            "gen": gen,
            "test": held_out[:HELD_OUT],
            "new_composition": [example for example in new_composition if len(example.functions) != 1],
            "new_primitive_one": new_primitive_one,
            "new_primitive_two": sampler.choose(TEST_SIZE, new_primitive_two),
        },
    )


def sample_small(functions: int, longest: int, seed: int) -> Sample:
    """Draws a smaller task of our own: few functions, short compositions, all lengths equally frequent.

    The published task takes a model of the published size some 30,000 steps. Here ``train`` has compositions of 1 to
    ``longest`` functions, as many of each length, with the few short ones repeated. ``dev`` has one function more,
    ``gen`` two and three more. The model has to learn the same: a table lookup step by step, for any number of steps.
    Evaluation subsets have no repeated example and none of training.

    Args:
        functions: number of functions.
        longest: maximum number of functions in a training example.
        seed: seed of numpy's frozen legacy generator.
    """
    random = RandomState(seed)
    tables = [random.permutation(len(SYMBOLS)).tolist() for _ in range(functions)]
    train: list[Example] = []
    valid: list[Example] = []
    for length in range(1, longest + 1):
        chosen = list(itertools.product(range(functions), repeat=length))
        pool = [Example(symbol, composition) for composition in chosen for symbol in range(len(SYMBOLS))]
        pool = [pool[index] for index in random.permutation(len(pool))[: EACH_LENGTH + SMALL_HELD_OUT]]
        if len(pool) >= 4 * SMALL_HELD_OUT:
            valid += pool[:SMALL_HELD_OUT]
            pool = pool[SMALL_HELD_OUT:]
        train += itertools.islice(itertools.cycle(pool), EACH_LENGTH)

    def longer(lengths: range) -> list[Example]:
        def draw() -> Example:
            length = random.randint(lengths[0], lengths[-1] + 1)
            return Example(int(random.randint(len(SYMBOLS))), tuple(random.randint(functions, size=length).tolist()))

        return first_distinct(LONGER, draw)

    dev, gen = longer(range(longest + 1, longest + 2)), longer(range(longest + 2, longest + 4))
    return Sample(tables, {"train": train, "valid": valid, "dev": dev, "gen": gen})

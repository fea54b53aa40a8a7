"""The examples of compositional table lookup, drawn number by number as the reference draws them (see ``ctl``).

The reference (Csordás et al. 2022, ``ndr``) has a seeded generator, which is followed here to the last draw, and makes
three choices that its seed does not decide:

    which 8,000 of the 61,136 training examples are held out, and which 1,000 of 3,000 make up its second test of new
    primitives, are drawn by numpy's global generator; here by the seeded one, when everything else has been drawn
    the symbols of the new compositions are drawn in the order of a Python set; here in the order of drawing

So the default seed gives the reference's own tables, reserved compositions, pool of training examples, ``dev``,
``gen`` and ``new_primitive_one``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from numpy.random import RandomState

SYMBOLS = tuple(f"{number:03b}" for number in range(8))
FUNCTIONS = tuple("abcdefghijk")
COMPOSED = 9  # a to i; j and k are the new primitives
J, K = 9, 10
TRAINED, TUNED, TESTED = range(2, 6), range(6, 9), range(9, 11)  # numbers of functions
POSSIBLE = len(SYMBOLS) * sum(COMPOSED**length for length in TRAINED)
REPEATS = 30  # how often each row of j and k is repeated in training, beyond the once that all functions have
HELD_OUT = 4_000  # as many for valid and as many for test
TEST_SIZE = 1_000
NEW_PRIMITIVE_TWO = 3_000  # drawn, though only TEST_SIZE of them are tested
MOST_RESERVED = 200  # compositions of each length

Tables = Sequence[Sequence[int]]
T = TypeVar("T")


class Example(NamedTuple):
    """A symbol, 0 to 7, and the functions applied to it, 0 to 10, the outermost first."""

    symbol: int
    functions: tuple[int, ...]

    def result(self, tables: Tables) -> int:
        """The symbol that results."""
        symbol = self.symbol
        for function in reversed(self.functions):
            symbol = tables[function][symbol]
        return symbol


@dataclass(frozen=True)
class Sample:
    """tables    function -> symbol -> symbol.
    subsets   name -> examples, ``train`` first.
    """

    tables: Tables
    subsets: dict[str, list[Example]]


class Sampler:
    """Draws by numpy's frozen legacy generator, in the reference's order."""

    def __init__(self, seed: int) -> None:
        self.random = RandomState(seed)

    def symbol(self) -> int:
        return int(self.random.randint(len(SYMBOLS)))

    def functions(self, most: int, length: int) -> tuple[int, ...]:
        """So many functions, each uniform over the first ``most``."""
        return tuple(self.random.randint(most, size=length).tolist())

    def composition(self, most: int, lengths: range) -> list[int]:
        """Functions, each uniform over the first ``most``, and their number uniform over ``lengths``."""
        drawn = self.functions(most, lengths[-1])
        return list(drawn[: self.random.randint(lengths[0], lengths[-1] + 1)])

    def reserve(self) -> list[tuple[int, ...]]:
        """Distinct compositions of every length up to the longest in training: a quarter of them, or 200."""
        reserved: list[tuple[int, ...]] = []
        for length in range(TRAINED[-1] + 1):
            quarter = -(-(COMPOSED**length) // 4)
            reserved += distinct(min(MOST_RESERVED, quarter), partial(self.functions, COMPOSED, length))
        return reserved

    def seen(self, reserved: set[tuple[int, ...]]) -> Example:
        """A composition that is not reserved, of a symbol."""
        while (functions := tuple(self.composition(COMPOSED, TRAINED))) in reserved:
            pass
        return Example(self.symbol(), functions)

    def longer(self, lengths: range) -> Example:
        symbol = self.symbol()
        return Example(symbol, tuple(self.composition(COMPOSED, lengths)))

    def with_j(self) -> Example:
        """A composition with ``j`` at a random place, and elsewhere any function but ``k``."""
        symbol, functions = self.symbol(), self.composition(COMPOSED + 1, TRAINED)
        functions[self.random.randint(len(functions))] = J
        return Example(symbol, tuple(functions))

    def with_k(self) -> Example:
        """The same with ``k``, and elsewhere any function but ``j``."""
        symbol = self.symbol()
        functions = [K if function == J else function for function in self.composition(COMPOSED + 1, TRAINED)]
        functions[self.random.randint(len(functions))] = K
        return Example(symbol, tuple(functions))

    def choose(self, size: int, pool: Sequence[Example]) -> list[Example]:
        """So many of them, in random order."""
        return [pool[index] for index in self.random.choice(len(pool), size, replace=False)]


def distinct(size: int, draw: Callable[[], T]) -> list[T]:
    """The first so many different values that are drawn."""
    found: dict[T, None] = {}
    while len(found) < size:
        found[draw()] = None
    return list(found)


def sample(seed: int) -> Sample:
    """All subsets. The examples of a subset are distinct, except the repeated ones of training.

    Of the reserved compositions three are of one function, and all those are in training: they are left out of
    ``new_composition``, which thereby has 605 examples and not the reference's 608.
    """
    sampler = Sampler(seed)
    tables = [sampler.random.permutation(len(SYMBOLS)).tolist() for _ in FUNCTIONS]
    reserved = sampler.reserve()
    singles = [Example(symbol, (f,)) for f in range(len(FUNCTIONS)) for symbol in range(len(SYMBOLS))]
    unseen = set(reserved)
    pool = distinct(POSSIBLE // 10 + 2 * HELD_OUT, lambda: sampler.seen(unseen))
    new_primitive_one = distinct(TEST_SIZE, sampler.with_j)
    new_primitive_two = distinct(NEW_PRIMITIVE_TWO, sampler.with_k)
    dev = distinct(TEST_SIZE, lambda: sampler.longer(TUNED))
    gen = distinct(TEST_SIZE, lambda: sampler.longer(TESTED))
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

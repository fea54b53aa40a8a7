"""ListOps: nested minimum, maximum, median and sum of digits (Csordás et al. 2022, after Nangia & Bowman 2018).

    [MED 4 8 5 [MAX 8 4 9 ] ]             ->  6
    [SM 7 [MIN 3 [SM 9 8 ] ] 5 ]          ->  5

An operator has 2 to 5 arguments; ``listops_functions`` has the language with its meaning. The
target is one of ten classes.

The dependency depth is the number of nested operations that the value depends on. It is 1 in the first example, where
the median is that of 5 and 8, and 2 in the second, where 3 is the minimum. Every set has equally many expressions of
each dependency depth, without repetitions; sets are disjoint:

    train   1,000,000 of depths 1 to 5 (``--train``)
    valid   1,000 more of them
    dev     1,000 of depth 6
    gen     1,000 of depths 7 and 8

Line N of raw/SUBSET.type is the dependency depth of example N, for accuracy by depth. Expressions have the distribution
of the authors' generator (``listops_sample``), which counts digits as depth 1, so its depths are larger by one.

Departures from the authors: their evaluation sets may have examples of the training set. In a median with equal
arguments, an unstable sort decides there which one is in the middle; here their order decides.

Expressions of depth 8 are rare: the whole set takes about four minutes of one processor. All processors are used.

Source: generated; Csordás 2023, section 5.2.3, and github.com/RobertCsordas/ndr, dataset/listops.py.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Dataset, Options, Sources, shorten
from data_prep.draws import (
    DEV_DEPTHS,
    GEN_DEPTHS,
    TRAIN_DEPTHS,
    Balance,
    processors,
    seed_option,
    test_size,
    train_size,
    uniform,
)
from data_prep.progress import bar

DIGITS = "0123456789"
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSING = "]"
FEWEST, MOST = 2, 5  # arguments


class Meaning(NamedTuple):
    """The value of an expression, 0 to 9, and its dependency depth."""

    value: int
    depth: int


# The meanings of digits.
MEANINGS = {digit: Meaning(int(digit), 0) for digit in DIGITS}


def value_of(meaning: Meaning) -> int:
    """Sort key of arguments: ``min``, ``max`` and ``sorted`` then take the first of equals first."""
    return meaning.value


def apply(operator: str, arguments: list[Meaning]) -> Meaning:
    """Applies an operator to the meanings of its arguments."""
    if operator == "[MIN":
        selected = [min(arguments, key=value_of)]
    elif operator == "[MAX":
        selected = [max(arguments, key=value_of)]
    elif operator == "[MED":
        number = len(arguments)
        selected = sorted(arguments, key=value_of)[(number - 1) // 2 : number // 2 + 1]
    else:
        return Meaning(sum(map(value_of, arguments)) % 10, 1 + max(argument.depth for argument in arguments))
    value = sum(map(value_of, selected)) // len(selected)
    return Meaning(value, 1 + max(argument.depth for argument in selected))


def interpret(expression: str) -> Meaning:
    """Evaluates an expression, tokens separated by single spaces. Raises DataError if it is not one."""
    # Open operators with the arguments read so far; the first entry holds the whole expression.
    open_operators: list[tuple[str, list[Meaning]]] = [("", [])]
    for position, word in enumerate(expression.split(" "), start=1):
        operator, arguments = open_operators[-1]
        if not operator and arguments:
            raise DataError(f"not an expression: {shorten(word)} after its end, word {position}")
        if word in MEANINGS:
            arguments.append(MEANINGS[word])
        elif word in OPERATORS:
            open_operators.append((word, []))
        elif word == CLOSING and operator:
            if not FEWEST <= len(arguments) <= MOST:
                raise DataError(f"not an expression: {operator} has {len(arguments)} arguments, word {position}")
            open_operators.pop()
            open_operators[-1][1].append(apply(operator, arguments))
        else:
            raise DataError(f"not an expression: {shorten(word)} cannot be word {position}")
    operator, arguments = open_operators[-1]
    if operator or not arguments:
        raise DataError("not an expression: it ends too early")
    return arguments[0]


PROBABILITY = 0.3
LONGEST = 50
OPERATOR_LENGTH = 3
DRAWS = 5_000  # trees in a block
MOST_BLOCKS = 16  # in a round

# The list of an operator's arguments; empty for a digit.
Tree = list["Tree"]


class TooLong(Exception):
    """Raised when a tree is given up."""


class Block(NamedTuple):
    """A unit of work: DRAWS trees for the depths from ``least`` to ``most``; those below ``wanted`` are useless."""

    seed: tuple[int, ...]
    least: int
    most: int
    wanted: int


class Candidate(NamedTuple):
    """An expression with its value and its dependency depth."""

    expression: str
    value: int
    depth: int


class Shapes:
    """Draws trees without their operators and digits."""

    def __init__(self, seed: Sequence[int], least: int, most: int) -> None:
        self.uniform = uniform(seed)
        self.least, self.most = least, most
        self.room = 0  # by which the tree may still grow

    def subtree(self, limit: int) -> Tree:
        """Draws a subtree with at most ``limit`` nested operators, into a place already counted as a digit."""
        if limit == 0 or self.uniform() >= PROBABILITY:
            return []
        arguments = FEWEST + int((MOST - FEWEST + 1) * self.uniform())
        self.occupy(OPERATOR_LENGTH - 1 + arguments)
        return [self.subtree(limit - 1) for _ in range(arguments)]

    def tree(self) -> Tree:
        """Draws a tree with at least ``least`` nested operators. Raises TooLong."""
        self.room = LONGEST - 1
        tree = self.subtree(self.most)
        while height(tree) < self.least:
            further = FEWEST + int((MOST - FEWEST) * self.uniform())
            self.occupy(OPERATOR_LENGTH + further)
            subtrees = [self.subtree(self.most - 1) for _ in range(further)]
            subtrees.insert(int(further * self.uniform()), tree)
            tree = subtrees
        return tree

    def occupy(self, length: int) -> None:
        """Reduces the room. Raises TooLong if there is not enough."""
        self.room -= length
        if self.room < 0:
            raise TooLong


def height(tree: Tree) -> int:
    """The number of nested operators."""
    return 1 + max(map(height, tree)) if tree else 0


def fill(tree: Tree, number: Callable[[], float]) -> str:
    """The expression of a tree with random operators and digits; ``number`` draws uniform numbers in [0, 1)."""
    if not tree:
        return DIGITS[int(len(DIGITS) * number())]
    operator = OPERATORS[int(len(OPERATORS) * number())]
    return f"{operator} {' '.join([fill(argument, number) for argument in tree])} {CLOSING}"


def draw(block: Block) -> list[Candidate]:
    """The expressions of a block whose depths are in its range and not below ``wanted``, in drawing order."""
    shapes = Shapes(block.seed, block.least, block.most)
    found = []
    for _ in range(DRAWS):
        try:
            tree = shapes.tree()
        except TooLong:
            continue
        if height(tree) >= block.wanted:
            expression = fill(tree, shapes.uniform)
            meaning = interpret(expression)
            if block.wanted <= meaning.depth <= block.most:
                found.append(Candidate(expression, *meaning))
    return found


# Maps `draw` over blocks, in their order.
Mapping = Callable[[Callable[[Block], list[Candidate]], list[Block]], Iterator[list[Candidate]]]


def sample(depths: range, size: int, seed: Sequence[int], taken: set[str], call: Mapping = map) -> Balance:
    """Draws distinct expressions, equally many per dependency depth, none of them ``taken``,
    and adds them to ``taken``.

    ``call`` is ``map``, or its equivalent over several processes.
    """
    balance = Balance(depths, size, taken)
    number, blocks = 0, 1
    with bar(f"depths {depths[0]} to {depths[-1]}", size, " expressions") as shown:
        while (wanted := balance.least()) is not None:
            work = [Block((*seed, number + i), depths[0], depths[-1], wanted) for i in range(blocks)]
            for candidates in call(draw, work):
                shown.update(sum(balance.offer(*candidate) for candidate in candidates))
            number, blocks = number + blocks, min(2 * blocks, MOST_BLOCKS)
    return balance


@contextmanager
def processes(number: int) -> Iterator[Mapping]:
    """Yields a ``map`` over ``number`` processes, which end with the block. Raises DataError
    if one of them is killed.
    """
    # Spawned, not forked: torch, if imported, has threads.
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=ignore_interrupts)
    try:
        yield pool.map
    except BrokenProcessPool:
        raise DataError(
            "a process that drew expressions was killed (is memory short?): run the command again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def ignore_interrupts() -> None:
    """Leaves keyboard interrupts to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def number_of_processes() -> int:
    """The number of processors for this process, but at most the number that could be busy."""
    return min(processors(), MOST_BLOCKS)


# In drawing order: evaluation examples are drawn first and excluded from training.
DEPTHS = {"valid": TRAIN_DEPTHS, "dev": DEV_DEPTHS, "gen": GEN_DEPTHS, "train": TRAIN_DEPTHS}
ORDER = ("train", "valid", "dev", "gen")
PUBLISHED = {"train": 1_000_000, "valid": 1_000, "dev": 1_000, "gen": 1_000}
VOCABULARY = (15, 10)
RULE = "train and valid have dependency depths 1 to 5, dev has 6, gen 7 and 8; all are equally frequent"


@dataclass(frozen=True)
class ListOpsOptions(Options):
    """The options of ListOps."""

    train: int = train_size(1_000_000, "training examples")
    test: int = test_size()
    seed: int = seed_option()


class ListOps(Dataset):
    """``python -m data_prep listops``."""

    name = "listops"
    title = "ListOps"
    source = "its rules (Csordás et al. 2022)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    classifier = "sg_encoder_listops_baseline"
    splits = ("depth",)
    options = ListOpsOptions

    def build(self, options: ListOpsOptions, sources: Sources) -> Corpus:
        sets = sample_sets(options.train, options.test, options.seed, number_of_processes())
        return Corpus(
            {name: Subset(sets[name].pairs(), sets[name].types(), published=PUBLISHED[name]) for name in ORDER},
            RULE,
            "generated by the authors' procedure, with a seed of our own",
            {"generator": "data_prep.listops_sample"},
            VOCABULARY,
            labels=True,
        )


def sample_sets(train: int, test: int, seed: int, number: int) -> dict[str, Balance]:
    """Draws the sets with ``number`` processes, whose number affects only the time."""
    taken: set[str] = set()
    sizes = {subset: train if subset == "train" else test for subset in DEPTHS}
    with processes(number) if number > 1 else nullcontext(map) as call:
        return {
            subset: sample(depths, sizes[subset], (seed, index), taken, call)
            for index, (subset, depths) in enumerate(DEPTHS.items())
        }

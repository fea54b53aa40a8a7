"""ListOps: nested minimum, maximum, median and sum of digits (Csordás et al. 2022, after Nangia & Bowman 2018).

    [MED 4 8 5 [MAX 8 4 9 ] ]             ->  6
    [SM 7 [MIN 3 [SM 9 8 ] ] 5 ]          ->  5

    expression  =  digit  |  operator expression expression … "]"     with 2 to 5 expressions, the arguments

    [MIN        the smallest argument
    [MAX        the greatest argument
    [MED        the median of the arguments, of an even number of them the mean of the middle two, rounded down
    [SM         the sum of the arguments modulo 10

The target is one of ten classes.

The dependency depth is the number of nested operations that the value depends on. It is 1 in the first example, where
the median is that of 5 and 8, and 2 in the second, where 3 is the minimum. Every set has equally many expressions of
each dependency depth, without repetitions; sets are disjoint:

    train   1,000,000 of depths 1 to 5 (``--train``)
    valid   1,000 more of them
    dev     1,000 of depth 6
    gen     1,000 of depths 7 and 8

Line N of raw/SUBSET.type is the dependency depth of example N, for accuracy by depth. Expressions have the distribution
of the authors' generator (``Shapes``), which counts digits as depth 1, so its depths are larger by one.

Departures from the authors: their evaluation sets may have examples of the training set. In a median with equal
arguments, an unstable sort decides there which one is in the middle; here their order decides.

Expressions of depth 8 are rare: the whole set takes about six minutes of one processor. All processors are used.

Source: generated; Csordás 2023, section 5.2.3, and github.com/RobertCsordas/ndr, dataset/listops.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Dataset, Options, Sources
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
PROBABILITY = 0.3
LONGEST = 50
OPERATOR_LENGTH = 3
DRAWS = 5_000  # trees in a block
MOST_BLOCKS = 16  # in a round
# In drawing order: evaluation examples are drawn first and excluded from training.
DEPTHS = {"valid": TRAIN_DEPTHS, "dev": DEV_DEPTHS, "gen": GEN_DEPTHS, "train": TRAIN_DEPTHS}
ORDER = ("train", "valid", "dev", "gen")
PUBLISHED = {"train": 1_000_000, "valid": 1_000, "dev": 1_000, "gen": 1_000}
VOCABULARY = (15, 10)
RULE = "train and valid have dependency depths 1 to 5, dev has 6, gen 7 and 8; all are equally frequent"


class Drawn(NamedTuple):
    """An expression with its value, 0 to 9, and its dependency depth."""

    expression: str
    value: int
    depth: int


def value_of(drawn: Drawn) -> int:
    """Sort key of arguments: ``min``, ``max`` and ``sorted`` then take the first of equals first."""
    return drawn.value


def apply(operator: str, arguments: list[Drawn]) -> Drawn:
    """Makes the expression of an operator and its arguments.

    Arguments that are not selected do not count for the dependency depth (Csordás 2023, appendix D.3.2), which is 1 +
    the greatest one of

        [MIN, [MAX  the selected argument, the first one of equals
        [MED        the one or two arguments in the middle, when equals are in their given order
        [SM         all arguments
    """
    number = len(arguments)
    if operator == "[MIN":
        selected = [min(arguments, key=value_of)]
    elif operator == "[MAX":
        selected = [max(arguments, key=value_of)]
    elif operator == "[MED":
        selected = sorted(arguments, key=value_of)[(number - 1) // 2 : number // 2 + 1]
    else:
        selected = arguments
    total = sum(map(value_of, selected))
    value = total % 10 if operator == "[SM" else total // len(selected)
    expression = " ".join([operator, *(argument.expression for argument in arguments), CLOSING])
    return Drawn(expression, value, 1 + max(argument.depth for argument in selected))


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


class Shapes:
    """Draws trees without their operators and digits, from the distribution of Csordás et al. 2022's generator.

    A tree for dependency depths from ``least`` to ``most``:

        subtree     with probability 0.3 an operator with 2 to 5 arguments, each again a subtree; else, and always
                    inside ``most`` operators, a digit
        tree        a subtree; while it has fewer than ``least`` nested operators, it becomes an argument of a further
                    operator, at any place but the last one, beside 2 to 4 further subtrees

    Numbers of arguments, operators, digits and places are uniform. Length counts an operator as 3 (bracket, name,
    closing bracket) and a digit as 1. Expressions longer than 50, or of another dependency depth, are redrawn.

    Two shortcuts keep the distribution and save time. A tree is given up as soon as its operators and open places
    exceed the length. Operators and digits, which do not affect the tree, are drawn only for trees of sufficient
    depth: the dependency depth is at most the depth of the tree.
    """

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


def fill(tree: Tree, number: Callable[[], float]) -> Drawn:
    """The expression of a tree with random operators and digits; ``number`` draws uniform numbers in [0, 1)."""
    if not tree:
        digit = int(len(DIGITS) * number())
        return Drawn(DIGITS[digit], digit, 0)
    operator = OPERATORS[int(len(OPERATORS) * number())]
    return apply(operator, [fill(argument, number) for argument in tree])


def draw(block: Block) -> list[Drawn]:
    """The expressions of a block whose depths are in its range and not below ``wanted``, in drawing order."""
    shapes = Shapes(block.seed, block.least, block.most)
    found = []
    for _ in range(DRAWS):
        try:
            tree = shapes.tree()
        except TooLong:
            continue
        if height(tree) >= block.wanted:
            drawn = fill(tree, shapes.uniform)
            if block.wanted <= drawn.depth <= block.most:
                found.append(drawn)
    return found


# Maps `draw` over blocks, in their order.
Mapping = Callable[[Callable[[Block], list[Drawn]], list[Block]], Iterator[list[Drawn]]]


def sample(depths: range, size: int, seed: Sequence[int], taken: set[str], call: Mapping = map) -> Balance:
    """Draws distinct expressions, equally many per dependency depth, none of them ``taken``,
    and adds them to ``taken``.

    Draws are made in blocks with a random stream each, and blocks in rounds of fixed sizes. The missing depths are
    updated between rounds. So the result is the same for any number of processes; ``call`` is ``map``, or its
    equivalent over several processes.
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
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=follow_parent)
    try:
        yield pool.map
    except BrokenProcessPool:
        raise DataError(
            "a process that drew expressions was killed (is memory short?): run the command again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def follow_parent() -> None:
    """Leaves keyboard interrupts to the parent process, and ends this one if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def number_of_processes() -> int:
    """The number of processors for this process, but at most the number that could be busy."""
    return min(processors(), MOST_BLOCKS)


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

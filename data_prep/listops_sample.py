"""Draws ListOps expressions from the distribution of Csordás et al. 2022's generator, in a fraction of its time.

A tree for dependency depths from ``least`` to ``most``:

    subtree     with probability 0.3 an operator with 2 to 5 arguments, each again a subtree; else, and always inside
                ``most`` operators, a digit
    tree        a subtree; while it has fewer than ``least`` nested operators, it becomes an argument of a further
                operator, at any place but the last one, beside 2 to 4 further subtrees

Numbers of arguments, operators, digits and places are uniform. Length counts an operator as 3 (bracket, name, closing
bracket) and a digit as 1. Expressions longer than 50, or of another dependency depth, are redrawn.

Two shortcuts keep the distribution and save time. A tree is given up as soon as its operators and open places exceed
the length. Operators and digits, which do not affect the tree, are drawn only for trees of sufficient depth: the
dependency depth is at most the depth of the tree.

Draws are made in blocks with a random stream each, and blocks in rounds of fixed sizes. The missing depths are updated
between rounds. So the result is the same for any number of processes.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

from data_prep.dataset import DataError, processors
from data_prep.draws import Balance, uniform
from data_prep.listops_functions import CLOSING, DIGITS, FEWEST, MOST, OPERATORS, interpret
from data_prep.progress import bar

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

"""Draws ListOps expressions as the generator of Csordás et al. 2022 does, in a fraction of its time.

A tree for dependency depths from ``least`` to ``most``:

    subtree     with probability 0.3 an operator with 2 to 5 arguments, each again a subtree; else, and always inside
                ``most`` operators, a digit
    tree        a subtree; while it has fewer than ``least`` operators inside one another, it becomes an argument of a
                further operator, at any place but the last one, beside 2 to 4 further subtrees

Numbers of arguments, operators, digits and places are uniform. What is longer than 50, an operator counted as 3 (the
bracket, its name, the closing bracket) and a digit as 1, is drawn again; so is what has another dependency depth.

Two things make this fast, and neither changes the distribution. A tree is given up as soon as its operators and open
places exceed the length. And operators and digits, on which the tree does not depend, are drawn for trees alone that
are deep enough for what is still wanted: the dependency depth is never greater than the depth of the tree.

Draws are made in blocks with a random stream each, the blocks in rounds. What is still wanted is looked up between
rounds, whose sizes are fixed: so the result is the same for any number of processes that work the blocks off.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

from data_prep.common import DataError, processors
from data_prep.depths import Balance, uniform
from data_prep.listops_functions import CLOSING, DIGITS, FEWEST, MOST, OPERATORS, interpret
from data_prep.progress import bar

PROBABILITY = 0.3
LONGEST = 50
OPERATOR_LENGTH = 3
DRAWS = 5_000  # trees in a block
MOST_BLOCKS = 16  # in a round

# A list of the arguments of an operator; of a digit, nothing.
Tree = list["Tree"]


class TooLong(Exception):
    """A tree that was given up."""


class Block(NamedTuple):
    """A piece of work: DRAWS trees for the depths from ``least`` to ``most``, of which those
    below ``wanted`` are useless.
    """

    seed: tuple[int, ...]
    least: int
    most: int
    wanted: int


class Candidate(NamedTuple):
    """An expression, what it evaluates to, and its dependency depth."""

    expression: str
    value: int
    depth: int


class Shapes:
    """Draws trees, without their operators and digits."""

    def __init__(self, seed: Sequence[int], least: int, most: int) -> None:
        self.uniform = uniform(seed)
        self.least, self.most = least, most
        self.room = 0  # how much longer the tree may become

    def subtree(self, limit: int) -> Tree:
        """A subtree with at most ``limit`` operators inside one another, into a place already counted as a digit."""
        if limit == 0 or self.uniform() >= PROBABILITY:
            return []
        arguments = FEWEST + int((MOST - FEWEST + 1) * self.uniform())
        self.occupy(OPERATOR_LENGTH - 1 + arguments)
        return [self.subtree(limit - 1) for _ in range(arguments)]

    def tree(self) -> Tree:
        """A tree of at least ``least`` operators inside one another. Raises TooLong."""
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
        """Takes from the room. Raises TooLong if there is not enough."""
        self.room -= length
        if self.room < 0:
            raise TooLong


def height(tree: Tree) -> int:
    """How many operators there are inside one another."""
    return 1 + max(map(height, tree)) if tree else 0


def fill(tree: Tree, number: Callable[[], float]) -> str:
    """The expression of a tree with random operators and digits; ``number`` returns uniform numbers in [0, 1)."""
    if not tree:
        return DIGITS[int(len(DIGITS) * number())]
    operator = OPERATORS[int(len(OPERATORS) * number())]
    return f"{operator} {' '.join([fill(argument, number) for argument in tree])} {CLOSING}"


def draw(block: Block) -> list[Candidate]:
    """The expressions of a block whose depths are in its range and not below ``wanted``, in the order of the draws."""
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


# Calls `draw` with every block and returns what it returned, in their order.
Mapping = Callable[[Callable[[Block], list[Candidate]], list[Block]], Iterator[list[Candidate]]]


def sample(depths: range, size: int, seed: Sequence[int], taken: set[str], call: Mapping = map) -> Balance:
    """So many different expressions, equally many of each dependency depth, none of which is ``taken``; they are then.

    ``call`` is ``map``, or does the same in several processes.
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
    """A ``map`` in so many processes, which end with it. Raises DataError if one of them is ended by something else."""
    # Fresh processes rather than forked ones: torch, if it is there, has threads.
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=ignore_interrupts)
    try:
        yield pool.map
    except BrokenProcessPool:
        raise DataError(
            "a process that drew expressions was ended from outside (is memory short?): run it again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def ignore_interrupts() -> None:
    """Leaves an interrupt from the keyboard to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def number_of_processes() -> int:
    """As many as there are processors for this process, but not more than could be busy."""
    return min(processors(), MOST_BLOCKS)

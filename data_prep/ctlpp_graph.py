"""The graphs of CTL++: which function may follow which, how many examples that allows, and random ones of them.

An example is a row of integers: a symbol, 0 to 7, and the functions applied to it, 0 to 31, in the order of
application. It belongs to a graph if the graph lets its first function be first, each function stand after the one
before it, given the symbol that this one returned, and its last be last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

SYMBOLS, FUNCTIONS = 8, 32
START = FUNCTIONS  # the row of `Graph.follows` for what may be first

Rows = NDArray[np.int64]
Groups = Mapping[str, range]


@dataclass(frozen=True)
class Graph:
    """follows   (33, 8, 32), bool: whether a function may stand after another that returned a symbol; and, in the last
              row, whether it may be first.
    last      (32,), bool: whether it may be last.
    tables    (32, 8): function -> symbol -> symbol.
    """

    follows: NDArray[np.bool_]
    last: NDArray[np.bool_]
    tables: Rows

    def count(self, length: int) -> int:
        """How many examples have so many functions: exactly, by going backwards from the last one."""
        # ways[f, s]: in how many ways an example can go on after f has returned s. 8 · 32^6 at most, which int64 holds.
        ways = np.zeros((FUNCTIONS + 1, SYMBOLS), np.int64)
        ways[:FUNCTIONS] = self.last[:, None]
        for _ in range(length):
            after = ways[np.arange(FUNCTIONS), self.tables.T]  # (8, 32): after a function is applied to a symbol
            ways = (self.follows * after).sum(axis=-1)
        return int(ways[START].sum())

    def walk(self, length: int, size: int, random: RandomState) -> Rows:
        """Random examples of so many functions (size, 1 + length), not necessarily distinct.

        The symbol is uniform, and then each function is uniform over those that may follow. Of no graph here does that
        lead where an example cannot end, if there are examples of this length at all.
        """
        # stable: the functions that may follow come first, in their order
        options = np.argsort(~self.follows, axis=-1, kind="stable")
        counts = self.follows.sum(axis=-1)
        uniform = random.random_sample((1 + length, size))
        symbols = (uniform[0] * SYMBOLS).astype(np.int64)
        functions = np.full(size, START)
        rows = [symbols]
        for chances in uniform[1:]:
            chosen = (chances * counts[functions, symbols]).astype(np.int64)
            functions = options[functions, symbols, chosen]
            symbols = self.tables[functions, symbols]
            rows.append(functions)
        return np.stack(rows, axis=1)

    def sample(self, length: int, size: int, random: RandomState) -> Rows:
        """So many distinct examples (size, 1 + length), in the order in which ``walk`` came upon
        them. There must be so many.
        """
        rows = np.empty((0, 1 + length), np.int64)
        while len(rows) < size:
            rows = unique(np.concatenate([rows, self.walk(length, size, random)]))
        return rows[:size]

    def every(self, length: int) -> Rows:
        """All examples of so many functions (count(length), 1 + length)."""
        symbols = np.arange(SYMBOLS)
        rows, functions = symbols[:, None], np.full(SYMBOLS, START)
        for _ in range(length):
            places, functions = np.nonzero(self.follows[functions, symbols])
            symbols = self.tables[functions, symbols[places]]
            rows = np.column_stack([rows[places], functions])
        return rows[self.last[functions]]


def unique(rows: Rows) -> Rows:
    """The rows without those that were there before."""
    digits = FUNCTIONS ** np.arange(rows.shape[1])  # 32^7 = 2^35 for the longest
    _, first = np.unique(rows @ digits, return_index=True)
    return rows[np.sort(first)]


def results(rows: Rows, tables: Rows) -> Rows:
    """The symbols that result (len(rows),)."""
    symbols = rows[:, 0]
    for functions in rows[:, 1:].T:
        symbols = tables[functions, symbols]
    return symbols


def draw_tables(random: RandomState) -> Rows:
    """Different random bijections, in the order of drawing (32, 8)."""
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < FUNCTIONS:
        drawn[tuple(random.permutation(SYMBOLS).tolist())] = None
    return np.array(list(drawn), np.int64)


def make_graph(tables: Rows, groups: Groups, edges: Mapping[str, Sequence[str]], last: Sequence[str]) -> Graph:
    """The graph in which a group may follow the groups that ``edges`` has it follow, whatever the symbol.

    ``edges`` maps a group, or IN, to the groups that may follow; members of the groups in ``last`` may end an example.
    """
    follows = np.zeros((FUNCTIONS + 1, SYMBOLS, FUNCTIONS), np.bool_)
    for group, followers in edges.items():
        for function in (START,) if group == "IN" else groups[group]:
            for follower in followers:
                follows[function, :, list(groups[follower])] = True
    ends = np.zeros(FUNCTIONS, np.bool_)
    for group in last:
        ends[list(groups[group])] = True
    return Graph(follows, ends, tables)


def allocate(possible: Mapping[int, int], size: int) -> dict[int, int]:
    """Shares ``size`` examples out among the lengths, evenly, but no length has more than there are.

    What a length lacks the longer ones share, of which there must be at least as many each. The result has less than
    ``size`` in all if there are not enough.
    """
    shares: dict[int, int] = {}
    for left, (length, most) in zip(range(len(possible), 0, -1), sorted(possible.items()), strict=True):
        even = -(-(size - sum(shares.values())) // left)
        shares[length] = min(most, even)
    return shares

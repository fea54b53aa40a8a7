"""The graphs of CTL++: which function may follow which, the number of allowed examples, and random ones.

An example is a row of integers: a symbol, 0 to 7, and the functions applied to it, 0 to 31, in the order of
application. It belongs to a graph that allows its first function at the start, each further function after its
predecessor (given the symbol that the predecessor returned), and its last function at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from data_prep.draws import first_distinct

SYMBOLS, FUNCTIONS = 8, 32
START = FUNCTIONS  # the row of `Graph.follows` for first functions

Rows = NDArray[np.int64]
Groups = Mapping[str, range]


@dataclass(frozen=True)
class Graph:
    """Attributes:
    follows: (33, 8, 32), bool: whether a function may follow another that returned a symbol. The last row has the
        functions that may be first.
    last: (32,), bool: whether a function may be last.
    tables: (32, 8): function -> symbol -> symbol.
    """

    follows: NDArray[np.bool_]
    last: NDArray[np.bool_]
    tables: Rows

    def count(self, length: int) -> int:
        """The exact number of examples with ``length`` functions, counted backwards from the last one."""
        # ways[f, s]: number of continuations after f has returned s; at most 8 · 32^6, which fits int64.
        ways = np.zeros((FUNCTIONS + 1, SYMBOLS), np.int64)
        ways[:FUNCTIONS] = self.last[:, None]
        for _ in range(length):
            after = ways[np.arange(FUNCTIONS), self.tables.T]  # (8, 32): after a function is applied to a symbol
            ways = (self.follows * after).sum(axis=-1)
        return int(ways[START].sum())

    def walk(self, length: int, size: int, random: RandomState) -> Rows:
        """Draws random examples with ``length`` functions (size, 1 + length), possibly repeated.

        The symbol is uniform, and each function is uniform over those that may follow. In the graphs here, if examples
        of this length exist, such a walk never reaches a function that cannot be last.
        """
        # stable: allowed functions come first, in their order
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
        """Draws ``size`` distinct examples (size, 1 + length), in the order of ``walk``. At
        least as many must exist.
        """
        rows = np.empty((0, 1 + length), np.int64)
        while len(rows) < size:
            rows = unique(np.concatenate([rows, self.walk(length, size, random)]))
        return rows[:size]

    def every(self, length: int) -> Rows:
        """All examples with ``length`` functions (count(length), 1 + length)."""
        symbols = np.arange(SYMBOLS)
        rows, functions = symbols[:, None], np.full(SYMBOLS, START)
        for _ in range(length):
            places, functions = np.nonzero(self.follows[functions, symbols])
            symbols = self.tables[functions, symbols[places]]
            rows = np.column_stack([rows[places], functions])
        return rows[self.last[functions]]


def unique(rows: Rows) -> Rows:
    """The rows without repetitions of earlier ones."""
    digits = FUNCTIONS ** np.arange(rows.shape[1])  # 32^7 = 2^35 for the longest
    _, first = np.unique(rows @ digits, return_index=True)
    return rows[np.sort(first)]


def results(rows: Rows, tables: Rows) -> Rows:
    """The resulting symbols (len(rows),)."""
    symbols = rows[:, 0]
    for functions in rows[:, 1:].T:
        symbols = tables[functions, symbols]
    return symbols


def draw_tables(random: RandomState) -> Rows:
    """Draws distinct random bijections, in drawing order (32, 8)."""
    return np.array(first_distinct(FUNCTIONS, lambda: tuple(random.permutation(SYMBOLS).tolist())), np.int64)


def make_graph(tables: Rows, groups: Groups, edges: Mapping[str, Sequence[str]], last: Sequence[str]) -> Graph:
    """The graph in which ``edges`` says which groups may follow a group (or IN, the start), with any symbol.

    Functions of the groups in ``last`` may end an example.
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
    """Distributes ``size`` examples evenly over the lengths; no length gets more than is ``possible``.

    Longer lengths share the deficit of shorter ones, so each of them must have at least as many examples. The result
    has less than ``size`` in all if there are not enough.
    """
    shares: dict[int, int] = {}
    for left, (length, most) in zip(range(len(possible), 0, -1), sorted(possible.items()), strict=True):
        even = -(-(size - sum(shares.values())) // left)
        shares[length] = min(most, even)
    return shares

"""CTL++: compositions of known functions in unseen orders (Csordás et al. 2022, EMNLP).

    b a 3     ->  5
    c b a 3   ->  0        c(b(a(3))): the symbol last, the function applied first directly before it

The language has eight symbols, ``0`` to ``7``, and 32 random bijections of them, ``a`` to ``z`` and ``A`` to
``F``. The target is the resulting symbol, one word: a class. Functions are in groups, and a variant says
which group may follow which:

    --variant A   Alternating: in training, functions of two groups of 16 take turns. In ``gen`` all are of one group.
    --variant R   Repeating, the other way round: in training all are of one group. In ``gen`` they take turns.
    --variant S   Staged: an example has one to three pairs of functions. In training, a pair is from groups a1 and a2,
                  or b1 and b2. In ``gen`` it is from a1 and b2, or b1 and a2.

In variant S, a training pair may also end in a function of a fifth group, o, of --overlap functions. Each of them may
follow only some of the eight symbols. --shared-symbols K of them are allowed after both a1 and b1. One half of the
others is allowed after a1, the other half after b1. From function to function the K symbols cycle through all eight,
in an order that is redrawn after each cycle. The four groups share the other functions.

Subsets:

    train   300,000 distinct examples with 2 to 6 functions (S: 2, 4, 6), with the lengths as balanced as possible. No
            length has more than half of all examples that the variant allows. In addition, every allowed example of
            two functions (A and R: 4,096; those drawn before occur twice). In addition, for A and R, the 256 of a
            single function.
    valid   1,000 more of the 301,000 that are drawn like this, none of two functions
    gen     1,000 of the same lengths, balanced as far as possible

The type of an example is its number of functions, ``length_2``, for accuracy by length.

Paper and code disagree on the 256. In the paper, "single functions are always part of the training set" for A and R,
but the released code has none. They are included by default; --without-singles omits them, as the code does. The code's
``iid`` set, here ``valid``, also has examples of two functions (seven or so for A and R), all of them in training.

The authors' examples depend on the number of processor cores of their machine. These are others, drawn in the same
way: the symbol uniformly, then each function uniformly from those that may follow. With the default seed, the 32
bijections are theirs, and so are the symbols of the first, second, third function of o, and so on. The order of a
Python set decides there which bijection has which letter, and so which are in one group. For S with o of 16 and 4
shared symbols, their code assumes 163,840 allowed examples of four functions. There are 131,312, so it uses more than
half of them; here it is half.

Source: generated, by the rules in the paper and in github.com/RobertCsordas/ctlpp; nothing is downloaded.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from data_prep.corpus import Corpus, Subset
from data_prep.ctlpp.graph import (
    FUNCTIONS,
    SYMBOLS,
    Graph,
    Groups,
    Rows,
    allocate,
    draw_tables,
    make_graph,
    results,
)
from data_prep.dataset import DataError, Dataset, Json, Options, Pair, Sources, UsageError, option
from data_prep.draws import seed_option

NAMES = string.ascii_letters[:FUNCTIONS]
PUBLISHED = {"train": 300_000, "valid": 1_000, "gen": 1_000}
LENGTHS = range(2, 7)
DEFAULT_SEED = 0  # the reference's
OVERLAPS, SHARED = (4, 8, 12, 16), (2, 3, 4, 5, 6)
RULES = {
    "A": "train and valid alternate functions of two groups, gen takes all from one group",
    "R": "train and valid take all functions from one group, gen alternates functions of two groups",
    "S": "train and valid have the pairs a1 a2 | b1 b2 | a1 o | b1 o, gen has a1 b2 | b1 a2",
}
# Variant -> group -> its successors, in training and in gen. Edges to o depend on the symbol.
ALTERNATE = {"IN": "ab", "a": "b", "b": "a"}
REPEAT = {"IN": "ab", "a": "a", "b": "b"}
FIRST = ("a1", "b1")
SAME = {"IN": FIRST, "a1": ["a2"], "b1": ["b2"], "a2": FIRST, "b2": FIRST, "o": FIRST}
CROSSED = {"IN": FIRST, "a1": ["b2"], "b1": ["a2"], "a2": FIRST, "b2": FIRST}


@dataclass(frozen=True)
class Variant:
    """Attributes:
    groups: name -> functions; disjoint, and together all 32.
    train: the graph of training examples.
    gen: the graph of ``gen``.
    symbols: group -> function of o -> the symbols of that group that it may follow in training.
    """

    groups: Groups
    train: Graph
    gen: Graph
    symbols: dict[str, dict[str, str]]


@dataclass(frozen=True)
class CtlPlusPlusOptions(Options):
    """The options of CTL++."""

    variant: str = option(choices=tuple(RULES))
    overlap: int | None = option(
        None,
        f"S only: number of functions shared by both paths in training: {', '.join(map(str, OVERLAPS))}",
        type=int,
        choices=OVERLAPS,
        metavar="N",
    )
    shared_symbols: int | None = option(
        None,
        f"S only: number of symbols with which both paths share them: {', '.join(map(str, SHARED))}",
        type=int,
        choices=SHARED,
        metavar="K",
    )
    singles: bool = option(
        True,
        "A and R only: omit the examples of a single function from train, as the authors' code does",
        given={"--without-singles": False},
    )
    seed: int = seed_option(DEFAULT_SEED, "the functions and the examples")

    def complete(self, sources: Sources) -> CtlPlusPlusOptions:
        is_staged = self.variant == "S"
        for name in ("overlap", "shared_symbols"):
            flag = f"--{name.replace('_', '-')}"
            if is_staged and getattr(self, name) is None:
                raise UsageError(f"--variant S needs {flag}")
            if not is_staged and getattr(self, name) is not None:
                raise UsageError(f"{flag} belongs to --variant S, not to --variant {self.variant}")
        if is_staged and not self.singles:
            raise UsageError("--without-singles belongs to --variant A and R: S has no examples of a single function")
        return replace(self, singles=not is_staged and self.singles)


class CtlPlusPlus(Dataset):
    """``python -m data_prep ctlpp``."""

    name = "ctlpp"
    title = "CTL++"
    source = "its rules (Csordás et al. 2022)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    classifier = "sg_encoder_ctlpp_baseline"
    splits = tuple(RULES)
    options = CtlPlusPlusOptions

    def build(self, options: CtlPlusPlusOptions, sources: Sources) -> Corpus:
        random = RandomState(options.seed)
        tables = draw_tables(random)
        rule = RULES[options.variant]
        if options.variant == "S":
            variant = staged(tables, options.overlap, options.shared_symbols, random)
            rule += f"; o has {options.overlap} functions, with {options.shared_symbols} shared symbols each"
        else:
            variant = unstaged(tables, options.variant)
        drawn = draw_subsets(variant, options.singles, random)
        return Corpus(
            {name: make_subset(name, parts, tables) for name, parts in drawn.items()},
            rule,
            "drawn by the authors' rules; their own examples cannot be reproduced",
            describe(variant, tables),
            (FUNCTIONS + SYMBOLS, SYMBOLS),
            labels=True,
        )


def make_subset(name: str, parts: list[Rows], tables: Rows) -> Subset:
    """The examples as words, with their numbers of functions as types, except in train."""
    types = [] if name == "train" else [f"length_{part.shape[1] - 1}" for part in parts for _ in part]
    return Subset([pair for part in parts for pair in render(part, tables)], types, published=PUBLISHED[name])


def unstaged(tables: Rows, name: str) -> Variant:
    """Variant A or R."""
    groups = {"a": range(FUNCTIONS // 2), "b": range(FUNCTIONS // 2, FUNCTIONS)}
    alternate, repeat = (make_graph(tables, groups, edges, "ab") for edges in (ALTERNATE, REPEAT))
    train, gen = (alternate, repeat) if name == "A" else (repeat, alternate)
    return Variant(groups, train, gen, symbols={})


def staged(tables: Rows, overlap: int, shared: int, random: RandomState) -> Variant:
    """Variant S. ``random`` draws the symbols of o."""
    size = (FUNCTIONS - overlap) // 4
    groups = {"o": range(overlap)}
    for place, name in enumerate(("a1", "a2", "b1", "b2")):
        groups[name] = range(overlap + place * size, overlap + (place + 1) * size)
    train = make_graph(tables, groups, SAME, ["a2", "b2", "o"])
    symbols = draw_symbols(overlap, shared, random)
    for group, allowed in symbols.items():
        train.follows[groups[group].start : groups[group].stop, :, :overlap] = allowed.T
    named = {group: dict(zip(NAMES[:overlap], map(digits, allowed), strict=True)) for group, allowed in symbols.items()}
    return Variant(groups, train, make_graph(tables, groups, CROSSED, ["a2", "b2"]), named)


def draw_symbols(overlap: int, shared: int, random: RandomState) -> dict[str, NDArray[np.bool_]]:
    """The symbols of a1, and of b1, that each function of o may follow (overlap, 8).

    Function j shares the symbols at places j·shared to (j + 1)·shared − 1 of a cyclic order. That order is the natural
    one first, and is redrawn after every ⌈8 / shared⌉ functions. The lower half of the other symbols belongs to a1, the
    upper to b1; a1 gets one more if their number is odd.
    """
    allowed = {group: np.zeros((overlap, SYMBOLS), np.bool_) for group in FIRST}
    order = list(range(SYMBOLS))
    for function in range(overlap):
        common = [order[place % SYMBOLS] for place in range(function * shared, (function + 1) * shared)]
        others = [symbol for symbol in range(SYMBOLS) if symbol not in common]
        middle = (len(others) + 1) // 2
        for group, half in zip(FIRST, (others[:middle], others[middle:]), strict=True):
            allowed[group][function, common + half] = True
        if (function + 1) % -(-SYMBOLS // shared) == 0:
            order = random.permutation(SYMBOLS).tolist()
    return allowed


def draw_subsets(variant: Variant, singles: bool, random: RandomState) -> dict[str, list[Rows]]:
    """Draws the examples of every subset, by length. Raises DataError if the variant allows too few."""
    drawn = draw(variant.train, 2, PUBLISHED["train"] + PUBLISHED["valid"], random)
    gen = draw(variant.gen, 1, PUBLISHED["gen"], random)
    train, valid = hold_out(drawn, random)
    train.append(variant.train.every(2))
    if singles:
        train.append(variant.train.every(1))
    return {"train": train, "valid": valid, "gen": gen}


def draw(graph: Graph, divisor: int, size: int, random: RandomState) -> list[Rows]:
    """Draws ``size`` distinct examples, by length.

    No length has more than all its examples, divided by ``divisor``. Raises DataError if there are too few.
    """
    possible = {length: count for length in LENGTHS if (count := graph.count(length) // divisor)}
    shares = allocate(possible, size)
    if sum(shares.values()) < size:
        raise DataError(f"the variant allows {sum(shares.values()):,} examples instead of {size:,}")
    return [graph.sample(length, number, random) for length, number in shares.items()]


def hold_out(parts: list[Rows], random: RandomState) -> tuple[list[Rows], list[Rows]]:
    """Returns ``parts`` without the examples drawn for ``valid``, and those. Examples of two
    functions, the first part, stay.
    """
    ends = np.cumsum([len(part) for part in parts])
    drawn = random.permutation(np.arange(ends[0], ends[-1]))[: PUBLISHED["valid"]]
    held_out = np.zeros(ends[-1], np.bool_)
    held_out[drawn] = True
    masks = np.split(held_out, ends[:-1])
    train = [part[~mask] for part, mask in zip(parts, masks, strict=True)]
    return train, [part[mask] for part, mask in zip(parts[1:], masks[1:], strict=True)]


def render(rows: Rows, tables: Rows) -> list[Pair]:
    """The examples as words, in the order in which compositions are written."""
    symbols = [str(symbol) for symbol in rows[:, 0]]
    functions = [[NAMES[function] for function in row] for row in rows[:, :0:-1].tolist()]
    targets = [str(symbol) for symbol in results(rows, tables)]
    return [
        Pair(" ".join([*names, symbol]), target)
        for names, symbol, target in zip(functions, symbols, targets, strict=True)
    ]


def describe(variant: Variant, tables: Rows) -> Json:
    """The entry of the functions in ``dataset.json``: their values for 0, 1 … 7, and the groups."""
    return {
        "generator": "data_prep.ctlpp_graph",
        "tables": {name: " ".join(map(str, table)) for name, table in zip(NAMES, tables, strict=True)},
        "groups": {name: " ".join(NAMES[f] for f in functions) for name, functions in variant.groups.items()},
        "symbols": variant.symbols,
    }


def digits(allowed: NDArray[np.bool_]) -> str:
    """The allowed symbols."""
    return " ".join(map(str, np.flatnonzero(allowed)))

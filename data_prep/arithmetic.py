"""Simple arithmetic: nested sums and products modulo 10 (Csordás et al. 2022, "The Neural Data Router").

    ( ( 4 * 7 ) + 2 )                     ->  0
    ( 3 * ( 5 + ( 8 * 8 ) ) )             ->  7

    expression  =  digit  |  "(" expression "+" expression ")"  |  "(" expression "*" expression ")"

The target is one of ten classes. The depth of an expression is its maximum number of nested operations: the first
example has depth 2. Expressions have at most 50 tokens. Every set has equally many of each depth:

    train   100,200: all 200 expressions of depth 1, and 100,000 of depths 2 to 5 (``--train``)
    valid   1,000 more of depths 2 to 5
    dev     1,000 of depth 6
    gen     1,000 of depths 7 and 8

Line N of raw/SUBSET.type is the depth of example N, for accuracy by depth.

Expressions are drawn as in the authors' code. An operand is an operation with probability 0.2 in train and valid, and
0.3 in dev and gen. A tree that is too shallow becomes the right operand of a further operation, until it is deep
enough. The authors' generator counts digits as depth 1, so its depths are larger by one.

Departure from the authors: valid and train are disjoint. Their in-distribution set has 1,200 examples, of which 200,
all of depth 1, are in their training set, and others by chance. Answers are not equally frequent: 0 has a quarter.

Source: generated; Csordás 2023, section 5.2.2, and github.com/RobertCsordas/ndr, dataset/simple_arithmetic.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Dataset, Options, Pair, Sources, UsageError, option, whole_number
from data_prep.draws import (
    TRAIN_DEPTHS,
    Balance,
    PackedPairs,
    depth_type,
    seed_option,
    test_size,
    train_size,
    uniform,
)

OPERATORS = "+*"
LONGEST = 50  # tokens
Recipes = dict[str, tuple[range, float]]


def recipes(deepest: int) -> Recipes:
    """Maps a subset to its depths and the probability that an operand is an operation; train also has depth 1.

    The order is that of the draws: evaluation examples are drawn first and excluded from training. ``deepest`` is the
    maximum depth in training.
    """
    trained = range(2, deepest + 1)
    return {
        "valid": (trained, 0.2),
        "dev": (range(deepest + 1, deepest + 2), 0.3),
        "gen": (range(deepest + 2, deepest + 4), 0.3),
        "train": (trained, 0.2),
    }


DEEPEST = TRAIN_DEPTHS[-1]
RECIPES = recipes(DEEPEST)
ORDER = ("train", "valid", "dev", "gen")
# Three quarters of all 2 · (210² − 10²), as in the authors' code: drawing the last ones would take too long.
MOST_OF_DEPTH_2 = 66_000
PUBLISHED = {"train": 100_200, "valid": 1_200, "dev": 1_000, "gen": 1_000}
VOCABULARY = (14, 10)


class Drawn(NamedTuple):
    """An expression with its value, 0 to 9, and its depth."""

    text: str
    value: int
    depth: int


def apply(operator: str, left: Drawn, right: Drawn) -> Drawn:
    """The sum or the product of two operands."""
    value = (left.value + right.value if operator == "+" else left.value * right.value) % 10
    return Drawn(f"( {left.text} {operator} {right.text} )", value, 1 + max(left.depth, right.depth))


def digit(number: int) -> Drawn:
    """The expression of a digit."""
    return Drawn(str(number), number, 0)


class Sampler:
    """Draws expressions of depths ``least`` to ``most``."""

    def __init__(self, seed: Sequence[int], depths: range, probability: float) -> None:
        self.uniform = uniform(seed)
        self.least, self.most = depths[0], depths[-1]
        self.probability = probability

    def operand(self, limit: int) -> Drawn:
        """Draws a digit, or an operation of at most this depth."""
        if limit == 0 or self.uniform() >= self.probability:
            return digit(int(10 * self.uniform()))
        left, right = self.operand(limit - 1), self.operand(limit - 1)
        return self.operation(left, right)

    def operation(self, left: Drawn, right: Drawn) -> Drawn:
        """Draws the sum or the product of two operands."""
        return apply(OPERATORS[int(2 * self.uniform())], left, right)

    def expression(self) -> Drawn:
        """Draws an expression of sufficient depth. It may be too long."""
        drawn = self.operand(self.most)
        while drawn.depth < self.least:
            drawn = self.operation(self.operand(self.most - 1), drawn)
        return drawn


def sample(subset: str, size: int, seed: int, taken: set[str], recipes: Recipes = RECIPES) -> Balance:
    """Draws the distinct expressions of a subset, none of them ``taken``, and adds them to ``taken``."""
    depths, probability = recipes[subset]
    sampler = Sampler((seed, list(recipes).index(subset)), depths, probability)
    balance = Balance(depths, size, taken)
    while balance.least() is not None:
        drawn = sampler.expression()
        # Tokens are single characters, separated by single spaces.
        if balance.wants(drawn.depth) and len(drawn.text) < 2 * LONGEST:
            balance.offer(*drawn)
    return balance


def single_operations() -> list[Drawn]:
    """All expressions of depth 1."""
    digits = [digit(number) for number in range(10)]
    return [apply(*operation) for operation in itertools.product(OPERATORS, digits, digits)]


@dataclass(frozen=True)
class ArithmeticOptions(Options):
    """The options of simple arithmetic."""

    train: int = train_size(100_000, "training examples, without the 200 of depth 1")
    test: int = test_size()
    seed: int = seed_option()
    deepest: int = option(
        DEEPEST,
        f"maximum depth in train, 2 to {DEEPEST} (the paper's); less gives a smaller task of our own",
        type=whole_number(2, DEEPEST),
        metavar="DEPTH",
        when_given=True,
    )

    def complete(self, sources: Sources) -> ArithmeticOptions:
        # Depth 1 is all in train; the others have equally many, and depth 2 has the fewest expressions.
        wanted = sum(-(-number // (self.deepest - 1)) for number in (self.train, self.test))
        if wanted > MOST_OF_DEPTH_2:
            raise UsageError(
                f"--train {self.train} and --test {self.test} need {wanted:,} expressions of depth 2; at most "
                f"{MOST_OF_DEPTH_2:,} of the 88,000 are drawn: lower them, or raise --deepest"
            )
        return self


class Arithmetic(Dataset):
    """``python -m data_prep arithmetic``."""

    name = "arithmetic"
    title = "Simple arithmetic"
    source = "its rules (Csordás et al. 2022)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    classifier = "sg_encoder_arithmetic_baseline"
    splits = ("depth",)
    options = ArithmeticOptions

    def build(self, options: ArithmeticOptions, sources: Sources) -> Corpus:
        simple = [Pair(drawn.text, str(drawn.value)) for drawn in single_operations()]
        taken: set[str] = set()
        deepest = options.deepest
        chosen = recipes(deepest)
        drawn = {
            subset: sample(subset, options.train if subset == "train" else options.test, options.seed, taken, chosen)
            for subset in chosen
        }
        published = PUBLISHED if deepest == DEEPEST else {}
        subsets = {
            name: Subset(drawn[name].pairs(), drawn[name].types(), published=published.get(name)) for name in ORDER
        }
        pairs, types = PackedPairs(itertools.chain(simple, subsets["train"].pairs)), subsets["train"].types
        subsets["train"] = subsets["train"]._replace(pairs=pairs, types=[depth_type(1)] * len(simple) + types)
        return Corpus(
            subsets,
            f"train has depths 1 to {deepest}, valid 2 to {deepest}, dev {deepest + 1}, gen {deepest + 2} and "
            f"{deepest + 3}; all depths above 1 are equally frequent",
            "generated by the authors' procedure, with a seed of our own",
            {"generator": "data_prep.arithmetic"},
            VOCABULARY,
            labels=True,
        )

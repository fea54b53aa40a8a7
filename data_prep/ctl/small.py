"""A smaller compositional table lookup of our own: few functions, short compositions, all lengths equally frequent.

The published task (``ctl.sample``) takes a model of the published size some 30,000 steps. Here ``train`` has
compositions of 1 to ``longest`` functions, as many of each length, with the few short ones repeated. ``dev``
has one function more, ``gen`` two and three more. The model has to learn the same: a table lookup step by step,
for any number of steps.
"""

from __future__ import annotations

import itertools

from numpy.random import RandomState

from data_prep.ctl.sample import SYMBOLS, Example, Sample, distinct

EACH_LENGTH = 1_500  # training examples per number of functions
HELD_OUT = 250  # for valid, per length with at least four times as many examples
LONGER = 500  # examples in dev and in gen


def sample_small(functions: int, longest: int, seed: int) -> Sample:
    """Draws all subsets. Evaluation subsets have no repeated example and none of training.

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
        pool = [pool[index] for index in random.permutation(len(pool))[: EACH_LENGTH + HELD_OUT]]
        if len(pool) >= 4 * HELD_OUT:
            valid += pool[:HELD_OUT]
            pool = pool[HELD_OUT:]
        train += itertools.islice(itertools.cycle(pool), EACH_LENGTH)

    def longer(lengths: range) -> list[Example]:
        def draw() -> Example:
            length = random.randint(lengths[0], lengths[-1] + 1)
            return Example(int(random.randint(len(SYMBOLS))), tuple(random.randint(functions, size=length).tolist()))

        return distinct(LONGER, draw)

    dev, gen = longer(range(longest + 1, longest + 2)), longer(range(longest + 2, longest + 4))
    return Sample(tables, {"train": train, "valid": valid, "dev": dev, "gen": gen})

"""Runs the authors' generator of the Mathematics dataset in a separate process.

    python -P generator.py MODULE EXTRAPOLATION SEED SIZES WORKER WORKERS

The process is separate for two reasons. The generator draws from the global generators of ``random``, numpy and sympy.
Its package is patched in memory: version 1.0.1 of 2019 fails from sympy 1.6, numpy 2 or Python 3.12 on, and some of its
draws depend on the order of Python sets, which differs between runs. The script imports nothing from ``data_prep``.

SIZES has the number of examples for each of the REGIMES, in order: 100,100,100,10,10. EXTRAPOLATION is the module's
name there; if it is empty, the last size is omitted. Examples are drawn in chunks with their own seeds, so any worker
can draw any chunk. Worker w of W draws every W-th one from the w-th on, and prints questions and answers, one per line.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any, TextIO

REGIMES = ("train-easy", "train-medium", "train-hard", "interpolate", "extrapolate")
CHUNK = 1_000  # examples
LONGEST_QUESTION, LONGEST_ANSWER = 160, 30  # characters; longer ones are dropped, as in the authors' code
# Module of the package -> replacements in its source.
FIXES = {
    "mathematics_dataset.sample.polynomials": {
        "from sympy.solvers.diophantine import base": "from sympy.solvers.diophantine.diophantine import base",
        "coeffs.itemset(index, value)": "coeffs[index] = value",
        "expanded_coefficients.itemset(power, coeffs)": "expanded_coefficients[power] = coeffs",
        "dtype=np.object)": "dtype=object)",
    },
    "mathematics_dataset.util.composition": {
        "random.choice(list(allowed))": "random.choice(sorted(allowed))",
        "entities = set(context.child_entities)": "entities = dict.fromkeys(context.child_entities)",
        "entities.add(maybe_entity)": "entities[maybe_entity] = None",
    },
    "mathematics_dataset.modules.numbers": {
        "remainder_divisor / 2": "remainder_divisor // 2",
    },
}
Problem = Callable[[], Any]  # draws one; `question` and `answer` of the result become text by str


class PatchedLoader(SourceFileLoader):
    """Loads a module of the package with its patches."""

    def get_code(self, fullname: str) -> CodeType:
        """Raises ValueError if the text of the module is not the expected one."""
        text = self.get_source(fullname)
        for old, new in FIXES[fullname].items():
            if old not in text:
                raise ValueError(f"{fullname} has no {old!r}: mathematics_dataset 1.0.1 is needed")
            text = text.replace(old, new)
        return compile(text, self.path, "exec")


def import_fixed(name: str) -> None:
    """Imports a module of the package with its patches."""
    spec = importlib.util.find_spec(name)
    spec.loader = PatchedLoader(name, spec.origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def problems(name: str, extrapolation: str | None) -> list[Problem]:
    """The samplers of a module, one per regime; without the last one if there is no extrapolation.

    Training draws from thirds of the range of entropies: easy from the lowest, hard from the highest.
    """
    for fixed in FIXES:
        import_fixed(fixed)
    from mathematics_dataset.modules import modules

    category, _, module = name.partition("__")
    parts = [modules.train(third(level))[category][module] for level in range(3)]
    parts.append(modules.test()[category][module])
    if extrapolation is not None:
        parts.append(modules.test_extra()[category][extrapolation.partition("__")[2]])
    return parts


def third(level: int) -> Callable[[tuple[float, float]], tuple[float, float]]:
    """Returns a function that maps a range to its lower (0), middle (1) or upper (2) third."""

    def part(whole: tuple[float, float]) -> tuple[float, float]:
        low, high = whole
        return low + level / 3 * (high - low), low + (level + 1) / 3 * (high - low)

    return part


def chunks(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields regime, number of the chunk in it, and number of examples, for all chunks in order."""
    for regime, size in enumerate(sizes):
        for chunk, start in enumerate(range(0, size, CHUNK)):
            yield regime, chunk, min(CHUNK, size - start)


def seed_everything(seed: int, regime: int, chunk: int) -> None:
    """Seeds all generators that the package draws from."""
    import numpy
    import sympy.core.random

    number = (seed * len(REGIMES) + regime) << 32 | chunk
    random.seed(number)
    sympy.core.random.seed(number)
    numpy.random.seed([seed, regime, chunk])


def draw(problem: Problem) -> tuple[str, str]:
    """Returns question and answer of one problem."""
    while True:
        drawn = problem()
        question, answer = str(drawn.question), str(drawn.answer)
        if len(question) <= LONGEST_QUESTION and len(answer) <= LONGEST_ANSWER:
            return question, answer


def work(parts: list[Problem], seed: int, sizes: list[int], worker: int, workers: int, out: TextIO) -> None:
    """Draws and prints the chunks of one worker."""
    for position, (regime, chunk, size) in enumerate(chunks(sizes)):
        if position % workers == worker:
            seed_everything(seed, regime, chunk)
            for _ in range(size):
                print(*draw(parts[regime]), sep="\n", file=out)
            out.flush()


if __name__ == "__main__":
    module, extrapolation, seed, sizes, worker, workers = sys.argv[1:]
    work(
        problems(module, extrapolation or None),
        int(seed),
        [int(size) for size in sizes.split(",")],
        int(worker),
        int(workers),
        sys.stdout,
    )

"""Draws questions of the Mathematics dataset with the authors' generator; these are not the official data.

The generator is the package mathematics_dataset 1.0.1 of PyPI. It runs in separate processes
(``mathematics.generator``), so the random generators of this process do not change. With the same versions of sympy and
numpy, the same seed gives the same examples for any number of processes and any Python hash seed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import BinaryIO

from data_prep.dataset import DataError, Json, Pair
from data_prep.draws import PackedPairs
from data_prep.mathematics import generator as mathematics_generator
from data_prep.mathematics.generator import REGIMES, chunks
from data_prep.progress import bar

PACKAGE, VERSION = "mathematics_dataset", "1.0.1"
NEEDED = f"--generate needs the package {PACKAGE} {VERSION}: pip install {PACKAGE}=={VERSION}"


def check_package() -> None:
    """Raises DataError unless version 1.0.1 of the generator is installed."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(NEEDED) from None
    if found != VERSION:
        raise DataError(f"{NEEDED} (found: {found})")


def describe() -> Json:
    """The entry ``origin`` of ``dataset.json``."""
    versions = {name: importlib.metadata.version(name) for name in (PACKAGE, "sympy", "numpy")}
    return {"generator": PACKAGE, "versions": versions, "generated": "generated, not the official data"}


def generate(
    module: str, extrapolation: str | None, sizes: list[int], seed: int, workers: int
) -> dict[str, PackedPairs]:
    """Draws examples of a module in each of its regimes, as plain text.

    Args:
        sizes: numbers of examples, in the order of ``REGIMES``; without extrapolation if the module has none.

    Raises:
        DataError: the package is missing or fails.
    """
    check_package()
    with ExitStack() as stack:
        processes = []
        numbers = (str(seed), ",".join(map(str, sizes)))
        for worker in range(workers):
            # A file, not a pipe: warnings of old code could fill a pipe before it is read.
            error_output = stack.enter_context(tempfile.TemporaryFile())
            processes.append(Process([module, extrapolation or "", *numbers, str(worker), str(workers)], error_output))
            stack.callback(processes[-1].stop)
        examples = drawn(processes, sizes)
        return {regime: PackedPairs(islice(examples, size)) for regime, size in zip(REGIMES, sizes)}


def drawn(processes: list[Process], sizes: list[int]) -> Iterator[Pair]:
    """Yields the examples of all chunks in order."""
    with bar("generating", sum(sizes), " examples") as shown:
        for position, (_, _, size) in enumerate(chunks(sizes)):
            yield from processes[position % len(processes)].examples(size)
            shown.update(size)


class Process:
    """One process that draws every W-th chunk."""

    def __init__(self, arguments: list[str], error_output: BinaryIO) -> None:
        self.error_output = error_output
        self.process = subprocess.Popen(
            [sys.executable, "-P", mathematics_generator.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=error_output,
            encoding="utf-8",
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        )

    def examples(self, size: int) -> Iterator[Pair]:
        """Yields the next examples. Raises DataError if the process ends early."""
        for _ in range(size):
            question, answer = (self.process.stdout.readline() for _ in Pair._fields)
            if not answer:
                self.process.wait()
                self.error_output.seek(0)
                lines = self.error_output.read().decode("utf-8", "replace").splitlines() or ["no reason given"]
                raise DataError(f"the generator of {PACKAGE} failed: {lines[-1]}")
            yield Pair(question.removesuffix("\n"), answer.removesuffix("\n"))

    def stop(self) -> None:
        """Ends the process if it still runs."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

"""Localism: is an expression computed from its parts, the inner ones first (Hupkes et al. 2020, section 7.5)?

An official file has the steps of every test expression with more than one function, one function per step, and then the
expression itself, in three columns:

    unrolled<tab>copy M5 B15<tab>*1
    unrolled<tab>repeat *1<tab>M5 B15 M5 B15
    original<tab>repeat copy M5 B15<tab>M5 B15 M5 B15

*K stands for the model's answer in step K, and is replaced by it in every later step. The score is consistency: how
often the answer of the last step equals that to the original expression, right or wrong.

The second official set has one function on strings of 2 to 20 letters; in training, strings have 2 to 5. It was drawn
separately, so one of its shortest lines may be a training example.
"""

from __future__ import annotations

from pathlib import Path

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Pair, check_sizes, shorten
from data_prep.pcfg.files import (
    DEV,
    DEV_SIZE,
    FILES,
    TOGETHER,
    VOCABULARY,
    PcfgFiles,
    describe,
    difference,
    function_counts,
    load,
    pair_files,
    subsets_of,
)
from data_prep.pcfg.language import FUNCTIONS, count_functions, interpret
from data_prep.text import split_lines

NAMES = {
    "train": "pcfgset/train",
    "valid": DEV,
    "test": "pcfgset/test",
    "gen": "localism/increasing_string_length/increasing_length",
}
UNROLLED = "localism/unrolled_test.tsv"
SIZES = {"train": 82_622, "valid": DEV_SIZE, "test": 9_721, "gen": 10_070}
RULE = (
    "train, valid and test are those of iid; gen has one function on strings of 2 to 20 letters. raw/unrolled.tsv has "
    "the steps of every expression of test with several functions"
)


def localism_corpus(sources: PcfgFiles) -> Corpus:
    """The official sets of the task, the longer strings, and the unrolled test. Raises DataError."""
    subsets = {subset: load(name, sources) for subset, name in NAMES.items()}
    path, data = sources.read(FILES[UNROLLED])
    composed = parse_unrolled(path, data)
    FILES[UNROLLED].check(path, data)
    if composed != [pair for pair in subsets["test"] if count_functions(pair.source) > 1]:
        raise DataError("not the expressions of the test with more than one function, in their order", path)
    check_sizes(subsets, SIZES)
    types = {subset: function_counts(subsets[subset]) for subset in ("train", "valid", "test")}
    types["gen"] = [f"letters_{longest_string(pair.source):02}" for pair in subsets["gen"]]
    origin = describe([*pair_files(NAMES.values()), UNROLLED])
    made = subsets_of(subsets, types, SIZES)
    return Corpus(
        made | {"gen": made["gen"]._replace(may_repeat=True)},
        RULE,
        "the published ones",
        origin,
        VOCABULARY,
        joined=True,
        together=TOGETHER,
        files={"raw/unrolled.tsv": data},
    )


def longest_string(expression: str) -> int:
    """The number of letters in the longest string of an expression."""
    return max(sum(word not in FUNCTIONS for word in part.split(" ")) for part in expression.split(" , "))


def parse_unrolled(path: Path, data: bytes) -> list[Pair]:
    """The expressions of the lines ``original`` with their meanings.

    Raises DataError with file and line for any other form: see the module, ``Unrolling`` and ``text.split_lines``.
    """
    pairs, current, number = [], Unrolling(), 0
    for number, line in enumerate(split_lines(path, data), start=1):
        try:
            if current.read(line):
                pairs.append(current.last)
                current = Unrolling()
        except ValueError as error:
            raise DataError(str(error), path, number) from None
    if current.steps:
        raise DataError("ends before the line `original`", path, number)
    return pairs


class Unrolling:
    """The steps of one expression.

    Attributes:
        steps: number of steps read.
        parts: *K -> the expression it stands for, until another step takes it as an argument.
        last: the whole expression and the target of the last step, once read.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.parts: dict[str, str] = {}
        self.last: Pair | None = None

    def read(self, line: str) -> bool:
        """Reads the next line; returns whether it is ``original``. Raises ValueError for a wrong line."""
        columns = line.split("\t")
        if len(columns) != 3:
            raise ValueError(f"{len(columns)} columns between tabs instead of label, source and target")
        label, source, target = columns
        if label == "unrolled":
            # Official sources without a *K end in a space.
            self.add_step(source.removesuffix(" "), target)
        elif label == "original":
            self.check_original(Pair(source, target))
        else:
            raise ValueError(f"the label is {shorten(label)}, neither unrolled nor original")
        return label == "original"

    def add_step(self, source: str, target: str) -> None:
        """Reads a line ``unrolled``. Raises ValueError."""
        if self.last is not None:
            raise ValueError("a step after the last one")
        if count_functions(source) != 1:
            raise ValueError(f"not one function: {shorten(source)}")
        expression = " ".join(self.take(word) if word.startswith("*") else word for word in source.split(" "))
        self.steps += 1
        if target == f"*{self.steps}":
            self.parts[target] = expression
        elif self.parts:
            raise ValueError(f"the last step does not use {next(iter(self.parts))}: {shorten(target)}")
        else:
            self.last = Pair(expression, target)

    def take(self, placeholder: str) -> str:
        """Returns and removes the expression of a placeholder. Raises ValueError."""
        if placeholder not in self.parts:
            raise ValueError(f"{shorten(placeholder)} is not the result of a step, or is used twice")
        return self.parts.pop(placeholder)

    def check_original(self, pair: Pair) -> None:
        """Checks a line ``original``. Raises ValueError unless expression and meaning are those of the steps."""
        if self.last is None:
            raise ValueError("`original` before the last step")
        if pair.source != self.last.source:
            raise ValueError(f"the steps are those of {shorten(self.last.source)}, not of {shorten(pair.source)}")
        meant = interpret(pair.source)
        for target in (self.last.target, pair.target):
            if target != meant:
                raise ValueError(difference(target, meant))

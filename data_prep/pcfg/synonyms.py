"""Substitutivity: does a model treat ``append_twin`` as it treats ``append`` (Hupkes et al. 2020, section 7.4)?

Four functions have a synonym each. Training has them in one of two ways:

    primitive            the official training set, and 332 lines in which a synonym is the only function
    equally_distributed  the official training set with about half of the occurrences of the four functions renamed

The test is the same for both: 2,500 lines for each of the four functions. Line N of ``gen`` is line N of ``test`` with
that function renamed throughout, so the targets are the same.
"""

from __future__ import annotations

from numpy.random import RandomState

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Pair, Subsets, check_sizes, shorten
from data_prep.pcfg.files import (
    DEV,
    DEV_SIZE,
    TRAIN_SIZE,
    PcfgFiles,
    describe,
    function_counts,
    load,
    pair_files,
    subsets_of,
)
from data_prep.pcfg.language import TWIN, TWINS, count_functions, without_twins

SIZES = {
    "primitive": {"train": 82_954, "test": 10_000, "gen": 10_000},
    "equally_distributed": {"train": TRAIN_SIZE, "test": 10_000, "gen": 10_000},
}
RENAMED = "gen is test with one function of every line renamed"
RULES = {
    "primitive": f"{RENAMED}; in train a synonym is the only function of its line",
    "equally_distributed": f"{RENAMED}; in train and valid about half of the four functions are renamed",
}
VOCABULARY, TOGETHER = (535, 520), 535
VALID_SEED = 1


def synonyms_corpus(variant: str, sources: PcfgFiles) -> Corpus:
    """The official training and test sets of a variant, and the dev set in the form of training. Raises DataError."""
    folder = f"substitutivity/{variant}"
    names = {"train": f"{folder}/train", "valid": DEV, "test": f"{folder}/test", "gen": f"{folder}/test_twin"}
    subsets = {subset: load(name, sources, without_twins) for subset, name in names.items()}
    check_plain(subsets, ("valid", "test"))
    renamed = renamed_functions(subsets["test"], subsets["gen"], names["gen"])
    published, membership = {**SIZES[variant], "valid": DEV_SIZE}, "the published ones"
    check_sizes(subsets, published)
    if variant == "primitive":
        check_primitive(subsets["train"], names["train"])
    else:
        subsets["valid"] = rename_half(subsets["valid"], VALID_SEED)
        published = SIZES[variant]
        membership += "; valid is the official dev set, in which our own draw renames half of the four functions"
    origin = describe(pair_files(names.values()))
    types = {subset: function_counts(subsets[subset]) for subset in ("train", "valid")}
    types |= {"test": renamed, "gen": renamed}
    made = subsets_of(subsets, types, published)
    return Corpus(made, RULES[variant], membership, origin, VOCABULARY, joined=True, together=TOGETHER)


def check_plain(subsets: Subsets, names: tuple[str, ...]) -> None:
    """Raises DataError for a synonym in these subsets."""
    for name in names:
        for pair in subsets[name]:
            if pair.source != without_twins(pair.source):
                raise DataError(f"{name} may not have a synonym, as it has in {shorten(pair.source)}")


def renamed_functions(plain: list[Pair], renamed: list[Pair], name: str) -> list[str]:
    """The renamed function of each line of ``renamed``, read from the official file ``name``.

    Raises DataError unless each line is that of ``plain`` with one of the four functions renamed throughout, or if the
    numbers of lines differ.
    """
    if len(plain) != len(renamed):
        raise DataError(f"{len(renamed):,} lines, but the test without synonyms has {len(plain):,}", f"{name}.src")
    functions = []
    for number, (one, other) in enumerate(zip(plain, renamed), start=1):
        function = next((word.removesuffix(TWIN) for word in other.source.split(" ") if word in TWINS), None)
        if function is None or rename(one.source, function) != other.source:
            message = f"not {shorten(one.source)} with one function renamed throughout: {shorten(other.source)}"
            raise DataError(message, f"{name}.src", number)
        functions.append(function)
    return functions


def rename(expression: str, function: str) -> str:
    """The expression with a function replaced by its synonym."""
    return " ".join(word + TWIN if word == function else word for word in expression.split(" "))


def check_primitive(train: list[Pair], name: str) -> None:
    """Raises DataError for a synonym with another function on its line."""
    for number, pair in enumerate(train, start=1):
        if pair.source != without_twins(pair.source) and count_functions(pair.source) > 1:
            message = f"a synonym is not the only function of {shorten(pair.source)}"
            raise DataError(message, f"{name}.src", number)


def rename_half(pairs: list[Pair], seed: int) -> list[Pair]:
    """Renames each occurrence of the four functions with probability 1/2, as in training of ``equally_distributed``.

    The draw uses numpy's frozen legacy generator, the same on every machine.
    """
    uniform = RandomState(seed).random_sample
    return [
        Pair(
            " ".join(
                word + TWIN if word + TWIN in TWINS and uniform() < 0.5 else word for word in pair.source.split(" ")
            ),
            pair.target,
        )
        for pair in pairs
    ]

"""Overgeneralisation: when does a model learn exceptions to a rule (Hupkes et al. 2020, section 7.6)?

In training, four pairs of adjacent functions have an exceptional meaning (see ``pcfg.language``). The ratio relates
the number of exceptions for a pair to the occurrences of its rarer function. About half of the exceptions have no other
function. All other lines with such a pair are omitted. The exceptions are tested as trained:

    exception   their sources with the trained targets: accuracy here is memorisation
    original    the same sources with the targets by the rule: accuracy here is overgeneralisation
"""

from __future__ import annotations

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Pair, check_sizes, shorten
from data_prep.pcfg.files import (
    DEV,
    TOGETHER,
    VOCABULARY,
    PcfgFiles,
    describe,
    function_counts,
    load,
    pair_files,
    subsets_of,
)
from data_prep.pcfg.language import exception_in, with_exception

# Ratio -> number of exceptions, at the end of the training set, after the lines common to all ratios.
EXCEPTION_SIZES = {"0.0001": 9, "0.0005": 59, "0.001": 125, "0.005": 554}
REGULAR_SIZE = 82_278
VALID_SIZE = 4_333
TESTS = ("exception", "original")


def exceptions_corpus(ratio: str, sources: PcfgFiles) -> Corpus:
    """The official training set and tests of a ratio, and the part of the dev set like training. Raises DataError."""
    folder = "overgeneralisation"
    names = {"train": f"{folder}/train_pcfg_ratio={ratio}", "valid": DEV}
    names |= {test: f"{folder}/test_pcfg_ratio={ratio}_{test}" for test in TESTS}
    rewritten = {"train": with_exception, "exception": with_exception}
    subsets = {subset: load(name, sources, rewritten.get(subset, str)) for subset, name in names.items()}
    subsets["valid"] = [pair for pair in subsets["valid"] if exception_in(pair.source) is None]
    check_exceptions(subsets["train"], subsets["exception"], names["train"])
    if [pair.source for pair in subsets["original"]] != [pair.source for pair in subsets["exception"]]:
        raise DataError("not the sources of the exceptions", f"{names['original']}.src")
    exceptions = EXCEPTION_SIZES[ratio]
    published = {"train": REGULAR_SIZE + exceptions} | dict.fromkeys(TESTS, exceptions)
    check_sizes(subsets, published | {"valid": VALID_SIZE})
    rule = (
        "in the exceptions of train, pairs of functions have another meaning. The subset exception has these lines "
        "as trained, original has them by the rule; valid has no such pair"
    )
    membership = "the published ones; valid is the part of the official dev set that is like train"
    origin = describe(pair_files(names.values()))
    types = {subset: function_counts(subsets[subset]) for subset in ("train", "valid")}
    types |= {test: [str(exception_in(pair.source)).replace(" ", "_") for pair in subsets[test]] for test in TESTS}
    made = subsets_of(subsets, types, published)
    made |= {test: made[test]._replace(may_repeat=True) for test in TESTS}
    return Corpus(made, rule, membership, origin, VOCABULARY, joined=True, together=TOGETHER)


def check_exceptions(train: list[Pair], exceptions: list[Pair], name: str) -> None:
    """Raises DataError unless the lines of ``train`` with one of the pairs are exactly the exceptions, in order.

    ``name`` is the official file of ``train``.
    """
    found = [(number, pair) for number, pair in enumerate(train, start=1) if exception_in(pair.source) is not None]
    for (number, pair), expected in zip(found, exceptions):
        if pair != expected:
            raise DataError(f"{shorten(pair.source)} is not the exception tested on this line", f"{name}.src", number)
    if len(found) != len(exceptions):
        raise DataError(f"{len(found):,} exceptions, but {len(exceptions):,} are tested", f"{name}.src")

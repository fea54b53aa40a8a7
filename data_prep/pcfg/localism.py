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

from data_prep.corpus import Corpus
from data_prep.dataset import check_sizes
from data_prep.pcfg.files import (
    DEV,
    DEV_SIZE,
    FILES,
    TEST_SIZE,
    TOGETHER,
    TRAIN_SIZE,
    VOCABULARY,
    PcfgFiles,
    describe,
    function_counts,
    load,
    pair_files,
    subsets_of,
)
from data_prep.pcfg.language import FUNCTIONS

NAMES = {
    "train": "pcfgset/train",
    "valid": DEV,
    "test": "pcfgset/test",
    "gen": "localism/increasing_string_length/increasing_length",
}
UNROLLED = "localism/unrolled_test.tsv"
SIZES = {"train": TRAIN_SIZE, "valid": DEV_SIZE, "test": TEST_SIZE, "gen": 10_070}
RULE = (
    "train, valid and test are those of iid; gen has one function on strings of 2 to 20 letters. raw/unrolled.tsv has "
    "the steps of every expression of test with several functions"
)


def localism_corpus(sources: PcfgFiles) -> Corpus:
    """The official sets of the task, the longer strings, and the unrolled test. Raises DataError."""
    subsets = {subset: load(name, sources) for subset, name in NAMES.items()}
    path, data = sources.read(FILES[UNROLLED])
    FILES[UNROLLED].check(path, data)
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

"""The checks of a corpus, published sizes, and hold-outs."""

from __future__ import annotations

import pytest

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Pair, check_sizes
from data_prep.draws import hold_out

A, B, C = Pair("a", "x"), Pair("b", "y"), Pair("c", "x")


def corpus(subsets: dict[str, list[Pair] | Subset], **fields) -> Corpus:
    made = {name: found if isinstance(found, Subset) else Subset(found) for name, found in subsets.items()}
    return Corpus(made, "", "", {}, **fields)


@pytest.mark.parametrize(
    ("subsets", "message"),
    [
        ({"train": [B, A], "gen": [C, B, A]}, "train and gen overlap: example 1 of train is example 2 of gen, 'b'"),
        ({"train": [A], "valid": [B], "gen": []}, "subset gen is empty"),
        ({"train": [], "gen": [B]}, "subset train is empty"),
        ({"train": [A], "valid1": [B]}, "a subset may not be named 'valid1'"),
        ({"train": [A], "../x": [B]}, "a subset may not be named '../x'"),
        ({"gen": [A], "train": [B]}, "the first subset is gen, not train"),
        ({"train": [A], "gen": [B, C]}, "the source vocabulary has 3 words instead of 2"),
        ({"train": [A], "gen": [Pair("b", "x")]}, "the target vocabulary has 1 words instead of 2"),
    ],
)
def test_corpus_checks(subsets: dict[str, list[Pair]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        corpus(subsets, vocabulary=(2, 2)).check()


@pytest.mark.parametrize(
    ("gen", "fields", "message"),
    [
        (Subset([B]), {"together": 5}, "the common vocabulary has 4 words instead of 5"),
        (Subset([B], types=["x", "y"]), {}, "subset gen has 1 examples and 2 types"),
        (Subset([B]), {"vocabulary": (2, 1)}, "the target vocabulary has 2 words instead of 1"),
        (Subset([B], types=["x"]), {"groups": {"g": ("x", "y")}}, "group g names the type y, but no example has it"),
        (Subset([B], plain=[B, B]), {}, "subset gen has 1 examples and 2 plain pairs"),
    ],
    ids=["common-vocabulary", "types", "vocabulary", "groups", "plain"],
)
def test_checks_of_what_only_some_datasets_have(gen: Subset, fields: dict, message: str) -> None:
    corpus({"train": [A], "gen": Subset([B], types=["x"])}, joined=True, together=4, labels=True).check()
    with pytest.raises(DataError, match=message):
        corpus({"train": [A], "gen": gen}, **fields).check()


def test_subset_that_is_meant_to_repeat_training() -> None:
    corpus({"train": [A], "original": Subset([A], may_repeat=True), "gen": [B]}).check()
    with pytest.raises(DataError, match="train and gen overlap"):
        corpus({"train": [A], "original": Subset([B], may_repeat=True), "gen": [A]}).check()


def test_published_files_may_repeat_training_and_say_so() -> None:
    found = corpus({"train": [B, A], "gen": [A, C, A], "test": [C]}, official=True)
    found.check()
    described = found.describe()
    assert [entry.get("in_train") for entry in described["subsets"].values()] == [None, 2, None]
    assert "2 examples of gen are also in train, in the published files" in found.summary(described)


def test_labels_are_one_word() -> None:
    with pytest.raises(DataError, match="gen has a target that is not one word: 'x y'"):
        corpus({"train": [A], "gen": [Pair("b", "x y")]}, labels=True).check()


def test_published_size() -> None:
    check_sizes({"train": [A, B]}, {"train": 2})
    with pytest.raises(DataError, match="subset train has 2 examples instead of the published 1,000"):
        check_sizes({"train": [A, B]}, {"train": 1000})


def test_hold_out_never_takes_a_repeated_source() -> None:
    pairs = [A, B, A, C]
    kept, drawn = hold_out(pairs, 0.5, seed=0)
    assert len(drawn) == 1 and A not in drawn and sorted(kept + drawn) == sorted(pairs)
    assert kept == [pair for pair in pairs if pair not in drawn]


def test_hold_out_of_nothing() -> None:
    with pytest.raises(DataError, match="a --holdout of 0.1 of 3 examples is not even one: choose more, or 0 for none"):
        hold_out([A, B, C], 0.1, seed=0)

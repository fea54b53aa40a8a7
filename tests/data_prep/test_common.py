"""The checks common to all datasets."""

from __future__ import annotations

import pytest

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Pair, check_sizes
from data_prep.draws import hold_out

A, B, C = Pair("a", "x"), Pair("b", "y"), Pair("c", "x")


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
        Corpus(subsets, {}, "", "", {}, (2, 2)).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"together": 5}, "the common vocabulary has 4 words instead of 5"),
        ({"types": {"gen": ["x", "y"]}}, "subset gen has 1 examples and 2 types"),
        ({"vocabulary": (2, 1)}, "the target vocabulary has 2 words instead of 1"),
        ({"types": {"gen": ["x"]}, "groups": {"g": ("x", "y")}}, "group g names the type y, but no example has it"),
        ({"plain": {"train": []}}, "subset train has 1 examples and 0 plain pairs"),
    ],
    ids=["common-vocabulary", "types", "vocabulary", "groups", "plain"],
)
def test_checks_of_what_only_some_datasets_have(fields: dict, message: str) -> None:
    subsets = {"train": [A], "gen": [B]}
    Corpus(subsets, {}, "", "", {}, None, joined=True, together=4, types={"gen": ["x"]}, labels=True).check()
    with pytest.raises(DataError, match=message):
        Corpus(subsets, {}, "", "", {}, **{"vocabulary": None} | fields).check()


def test_subset_that_is_meant_to_repeat_training() -> None:
    Corpus({"train": [A], "original": [A], "gen": [B]}, {}, "", "", {}, None, repeated=("original",)).check()
    with pytest.raises(DataError, match="train and gen overlap"):
        Corpus({"train": [A], "original": [B], "gen": [A]}, {}, "", "", {}, None, repeated=("original",)).check()


def test_published_files_may_repeat_training_and_say_so() -> None:
    corpus = Corpus({"train": [B, A], "gen": [A, C, A], "test": [C]}, {}, "", "", {}, None, official=True)
    corpus.check()
    described = corpus.describe()
    assert [entry.get("in_train") for entry in described["subsets"].values()] == [None, 2, None]
    assert "2 examples of gen are also in train, in the published files" in corpus.summary(described)


def test_labels_are_one_word() -> None:
    with pytest.raises(DataError, match="gen has a target that is not one word: 'x y'"):
        Corpus({"train": [A], "gen": [Pair("b", "x y")]}, {}, "", "", {}, None, labels=True).check()


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
    with pytest.raises(DataError, match="a hold-out of 0.1 of 3 examples is not even one"):
        hold_out([A, B, C], 0.1, seed=0)

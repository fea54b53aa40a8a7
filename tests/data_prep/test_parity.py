"""PARITY, and its common part with FIRST: the strings, the output and the errors."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import Pair
from data_prep.strings import LONGEST, Parity, distinct_strings, draws, format_lengths, lengths, strings_except
from helpers.data_files import digest

SUBSETS = ("train", "valid", "gen")


def expected(string: str) -> Pair:
    """The example by counting."""
    odd = False
    for symbol in string:
        odd ^= symbol == "1"
    return Pair("".join(f"{symbol} " for symbol in string) + "CLS", "1" if odd else "0")


def strings_of(length: int) -> list[str]:
    return ["".join(symbols) for symbols in product("01", repeat=length)]


@given(st.text("01", min_size=1, max_size=50))
def test_example(string: str) -> None:
    assert Parity().example(string) == expected(string)


def test_examples_of_one_and_two_symbols() -> None:
    examples = [Parity().example(string) for string in ("0", "1", "00", "01", "10", "11")]
    assert examples == [
        *(("0 CLS", "0"), ("1 CLS", "1")),
        *(("0 0 CLS", "0"), ("0 1 CLS", "1"), ("1 0 CLS", "1"), ("1 1 CLS", "0")),
    ]


# ---- lengths


@given(st.sets(st.integers(1, LONGEST), min_size=1, max_size=50))
def test_lengths_round_trip(numbers: set[int]) -> None:
    assert lengths(format_lengths(sorted(numbers))) == sorted(numbers)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("30", [30]),
        ("10,30", [10, 30]),
        ("30,10,10", [10, 30]),
        ("1-3", [1, 2, 3]),
        ("5-5,1-2", [1, 2, 5]),
        ("10000", [10_000]),
    ],
)
def test_lengths(text: str, numbers: list[int]) -> None:
    assert lengths(text) == numbers


def test_named() -> None:
    assert format_lengths([1, 2, 3, 5, 7, 8]) == "1-3,5,7-8"


WRONG = ["", "0", "0-3", "3-2", "10001", "1-10001", "1,", ",1", "1 2", "1, 2", "1-2-3", "-3", "a", "1e3", "٣", "1\n"]


@pytest.mark.parametrize("text", [*WRONG, "9" * 5_000])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        lengths(text)
    assert "must be numbers from 1 to 10000 such as 30 or 10,30 or 1-40, not" in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.text("0123456789,- a"))
def test_anything_is_lengths_or_refused(text: str) -> None:
    try:
        found = lengths(text)
    except ArgumentTypeError:
        return
    assert found == sorted(set(found)) and 1 <= found[0] and found[-1] <= LONGEST


# ---- the draw


def test_draws_are_uniform() -> None:
    stream = draws(3, (1,))
    count = Counter(next(stream) for _ in range(8_000))
    assert {string: number / 8_000 for string, number in count.items()} == pytest.approx(
        dict.fromkeys(strings_of(3), 1 / 8), abs=0.015
    )


def test_different() -> None:
    assert sorted(distinct_strings(4, 16, (1,))) == strings_of(4)
    assert distinct_strings(4, 10, (1,)) == distinct_strings(4, 16, (1,))[:10]
    assert distinct_strings(4, 0, (1,)) == []


def test_others() -> None:
    excluded = {"00", "10"}
    found = strings_except(2, 1_000, (1,), excluded)
    assert len(found) == 1_000
    assert Counter(found) == pytest.approx({"01": 500, "11": 500}, abs=60)


# ---- the command

OPTIONS = ("--train-lengths", "3-5,20", "--test-lengths", "2,40", "--train", 100, "--test", 10)


def prepare(run, out: Path, *options: object) -> dict:
    result = run("parity", *OPTIONS, *options, "--out", out)
    assert (result.code, result.err) == (0, "")
    return json.loads((out / "dataset.json").read_text("utf-8"))


def test_command(run, read_subset, tmp_path: Path) -> None:
    found = prepare(run, tmp_path / "out")
    assert found["request"] == {
        "dataset": "parity",
        "train_lengths": [3, 4, 5, 20],
        "test_lengths": [2, 40],
        "train": 100,
        "test": 10,
        "seed": 1,
        "raw_only": False,
    }
    assert {name: entry["types"] for name, entry in found["subsets"].items()} == {
        "train": {"length_20": 100, "length_3": 100, "length_4": 100, "length_5": 100},
        "valid": {"length_20": 10, "length_4": 1, "length_5": 3},
        "gen": {"length_2": 4, "length_40": 10},
    }
    assert found["labels"] == ["0", "1"] and (tmp_path / "out" / "label" / "gen.bin").is_file()
    subsets = {name: read_subset(tmp_path / "out", name) for name in SUBSETS}
    for name, pairs in subsets.items():
        strings = [pair.source.removesuffix(" CLS").replace(" ", "") for pair in pairs]
        assert pairs == list(map(expected, strings))
        kinds = (tmp_path / "out" / "raw" / f"{name}.type").read_text().split()
        assert kinds == [f"length_{len(string)}" for string in strings]
    assert len(set(subsets["valid"])) == len(subsets["valid"]) and len(set(subsets["gen"])) == len(subsets["gen"])
    assert not set(subsets["valid"]) & set(subsets["train"])
    assert {expected(string) for string in strings_of(3)} <= set(subsets["train"])


def test_classes_are_balanced(run, read_subset, tmp_path: Path) -> None:
    prepare(run, tmp_path / "out", "--train", 2_000, "--raw-only")
    ones = sum(pair.target == "1" for pair in read_subset(tmp_path / "out", "train"))
    assert ones / 8_000 == pytest.approx(0.5, abs=0.02)


def test_same_seed_same_bytes(run, read_subset, tmp_path: Path) -> None:
    prepare(run, tmp_path / "out", "--raw-only")
    assert digest(tmp_path / "out") == "6d9f03efd5f7ddbdd93779554db7ed3c2d964d0198b92fbef9b340325eee4e1f"
    prepare(run, tmp_path / "other", "--raw-only", "--seed", 2)
    one, two = (read_subset(tmp_path / name, "train") for name in ("out", "other"))
    assert not set(one[300:]) & set(two[300:])


def test_strings_of_a_length_do_not_depend_on_other_lengths(run, read_subset, tmp_path: Path) -> None:
    prepare(run, tmp_path / "all", "--raw-only")
    prepare(run, tmp_path / "one", "--raw-only", "--train-lengths", 20, "--test-lengths", 40)
    for name, size in (("train", 100), ("valid", 10), ("gen", 10)):
        pairs = read_subset(tmp_path / "one", name)
        assert len(pairs) == size and pairs == read_subset(tmp_path / "all", name)[-size:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train-lengths 4", "the following arguments are required: --test-lengths"),
        ("--test-lengths 4", "the following arguments are required: --train-lengths"),
        ("--train-lengths 0 --test-lengths 4", "argument --train-lengths: must be numbers from 1 to 10000 such as"),
        ("--train-lengths 4 --test-lengths 9-5", "argument --test-lengths: must be numbers from 1 to 10000 such as"),
        ("--train-lengths 1-40 --test-lengths 40,60", "length 40 is in --train-lengths and --test-lengths: valid has"),
        ("--train-lengths 1-3 --test-lengths 4", "--train-lengths: 8 strings are too few for a valid set; add"),
        ("--train-lengths 4 --test-lengths 5 --train 99", "argument --train: must be a whole number from 100"),
        ("--train-lengths 4 --test-lengths 5 --test 9", "argument --test: must be a whole number from 10"),
        ("--train-lengths 4 --test-lengths 5 --seed 4294967296", "argument --seed: must be a whole number"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("parity", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_shortest_length_that_can_be_held_out(run, tmp_path: Path) -> None:
    options = ("--train-lengths", 4, "--test-lengths", 5, "--train", 100, "--raw-only")
    assert run("parity", *options, "--out", tmp_path / "out").code == 0
    assert (
        "add a length of 4 or more"
        in run("parity", "--train-lengths", 3, "--test-lengths", 5, "--raw-only", "--out", tmp_path / "no").err
    )

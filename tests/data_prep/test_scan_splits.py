"""The splits of SCAN: sizes, and the examples of the official files."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy
import pytest

from data_prep.dataset import DataError, Pair
from data_prep.scan.splits import (
    CUTOFFS,
    HELD_OUT,
    LENGTH_SIZES,
    check_draw,
    draw_valid,
    length,
    mentions,
    random_split,
    resplit,
    resplit_sizes,
    split_by_length,
)
from helpers.data_files import scan_line

# Split -> sha256 of the lines of its official train and test file, sorted and joined by newlines.
OFFICIAL = {
    "length": (
        "114e6bdb1575f27d8d6d4449081970cef4846b2ec89b260dc2a0e5297c3e75d5",
        "45bb5e5f0e0678da016725d880ba4349267b93262762a2c66f9b51b04535a2ce",
    ),
    "addprim_jump": (
        "1e5ab3357dc958267480a6012d3970953f35bb098a115b1754a1ad36d371b7cb",
        "48956239771e67ded4d090164919ab79d21756218a3e94f9abc2cbe346c0cd1c",
    ),
    "addprim_turn_left": (
        "4f1ccb48ec39aed79ac69c8da9d2c8061b1bb8ea8199ab8931b6939068a3b626",
        "81acae1af5137165debf8630986733b2581aea19cb98e32f4026bccce8042b09",
    ),
    "template_around_right": (
        "aaf218dfd82a8b6a88e32deeb096cf498ee58e56a3808b17f715182f0ca90130",
        "f5f94bb13ea393fbac7d963a13f5eb9831e51090b2e7210831674c4f77a1fa7b",
    ),
    "template_jump_around_right": (
        "d3f82d1c47c35af14b1ff0718d5e632e257580ca71ad7df5270a63b85f83ed99",
        "3590e013eaa75106014637969f08fd9e139bd7f3ec59f11260619f1320f5e52b",
    ),
    "template_opposite_right": (
        "8f0e969c24011176ba5ed3aa2dbc64e193eb463dfb397d0604126a08e237438f",
        "e148c4261607e2d97808c0de04a3358b48f4d96208945d0658561deb8fc90b26",
    ),
    "template_right": (
        "d98bd73f93f488dcf64bbeeb1547d712c17f26b67ccfb4bccdb04a6fdae35f12",
        "770738098ffaef0370295c75005d8962f2ca1123ac31574a582b90ae33393e9c",
    ),
    "filler_num0": (
        "aaf218dfd82a8b6a88e32deeb096cf498ee58e56a3808b17f715182f0ca90130",
        "3590e013eaa75106014637969f08fd9e139bd7f3ec59f11260619f1320f5e52b",
    ),
    "filler_num1": (
        "1f0bf0a27badb9e7b56f59682fc197e9e504b8f30c6b788dcfa1cbec6c991ea5",
        "3590e013eaa75106014637969f08fd9e139bd7f3ec59f11260619f1320f5e52b",
    ),
    "filler_num2": (
        "50bb46e65b8c83bb636ccaa131fca7fb43fb717d326dac2c0bc6719e4679dc5f",
        "3590e013eaa75106014637969f08fd9e139bd7f3ec59f11260619f1320f5e52b",
    ),
    "filler_num3": (
        "d3f82d1c47c35af14b1ff0718d5e632e257580ca71ad7df5270a63b85f83ed99",
        "3590e013eaa75106014637969f08fd9e139bd7f3ec59f11260619f1320f5e52b",
    ),
}


def make(split: str, pairs: list[Pair], seed: int = 1) -> dict[str, list[Pair]]:
    return split_by_length(pairs, 22) if split == "length" else HELD_OUT[split].split(pairs, seed)


def digest(pairs: list[Pair]) -> str:
    return hashlib.sha256("\n".join(sorted(map(scan_line, pairs))).encode("ascii")).hexdigest()


@pytest.mark.parametrize("split", OFFICIAL)
def test_rules_give_the_lines_of_the_official_files(split: str, generated: list[Pair]) -> None:
    subsets = make(split, generated)
    assert (digest(subsets["train"]), digest(subsets["gen"])) == OFFICIAL[split]
    sizes = LENGTH_SIZES if split == "length" else HELD_OUT[split].sizes
    assert {name: len(pairs) for name, pairs in subsets.items()} == sizes


def test_every_rule_is_compared() -> None:
    assert OFFICIAL.keys() == {"length", *HELD_OUT}


@pytest.mark.parametrize("split", ["length", "addprim_jump", "addprim_turn_left"])
def test_rules_give_the_official_files_as_multisets(
    split: str, official: list[Pair], official_splits: dict[str, list[Pair]]
) -> None:
    subsets = make(split, official)
    assert sorted(subsets["train"]) == sorted(official_splits[f"{split}_train"])
    assert sorted(subsets["gen"]) == sorted(official_splits[f"{split}_test"])


@pytest.mark.parametrize(
    ("split", "primitive", "copies"), [("addprim_jump", "jump", 1467), ("addprim_turn_left", "turn left", 2189)]
)
def test_primitive_is_a_tenth_of_the_training_lines(
    split: str, primitive: str, copies: int, generated: list[Pair]
) -> None:
    train = [pair.source for pair in make(split, generated)["train"]]
    assert train.count(primitive) == copies == len(train) / 10
    assert len(set(train)) == len(train) - copies + 1


def test_shuffle_is_by_the_seed(generated: list[Pair]) -> None:
    first, same, other = (make("addprim_jump", generated, seed)["train"] for seed in (1, 1, 2))
    assert first == same != other and sorted(first) == sorted(other)


@pytest.mark.parametrize(
    ("command", "phrase", "expected"),
    [
        ("turn left twice", "turn left", True),
        ("jump and turn left", "turn left", True),
        ("turn around left", "turn left", False),
        ("jump right", "around right", False),
        ("jump", "jum", False),
    ],
)
def test_mentions_whole_adjacent_words(command: str, phrase: str, expected: bool) -> None:
    assert mentions(Pair(command, ""), ("never", phrase)) is expected


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_cutoff_sizes_do_not_depend_on_the_order(cutoff: int, generated: list[Pair]) -> None:
    subsets = resplit(generated, cutoff)
    assert {name: len(pairs) for name, pairs in subsets.items()} == resplit_sizes(cutoff)
    assert max(map(length, subsets["train"] + subsets["valid"])) == cutoff < min(map(length, subsets["gen"]))
    assert sorted(subsets["train"] + subsets["valid"] + subsets["gen"]) == sorted(generated)


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_cutoff_draws_as_the_reference_does(cutoff: int, official: list[Pair]) -> None:
    check_draw(official, cutoff)
    subsets = resplit(official, cutoff)
    assert {name: len(pairs) for name, pairs in subsets.items()} == resplit_sizes(cutoff)
    assert subsets["valid"] == [official[number] for number in draw_valid(official, cutoff)]


def test_cutoff_26_draws_the_lines_known_of_the_reference(official: list[Pair]) -> None:
    assert draw_valid(official, 26)[:4] == [14, 35, 54, 70]


def test_another_order_draws_other_examples(generated: list[Pair]) -> None:
    with pytest.raises(DataError, match="the valid of cutoff 26 is not the published one"):
        check_draw(generated, 26)


def test_another_numpy_stream_is_noticed(official: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.scan.splits.RandomState", lambda seed: numpy.random.RandomState(seed + 1))
    with pytest.raises(DataError, match="seems to draw other numbers"):
        check_draw(official, 26)


def test_cutoff_between_published_ones(generated: list[Pair]) -> None:
    # There are no commands with 23 actions.
    assert resplit(generated, 23) == resplit(generated, 22)
    assert resplit_sizes(23) == {}


def test_smallest_cutoff_leaves_nothing_to_draw(generated: list[Pair]) -> None:
    subsets = resplit(generated, 1)
    assert {name: len(pairs) for name, pairs in subsets.items()} == {"train": 6, "gen": 20_904}


def test_own_random_split(generated: list[Pair]) -> None:
    first, same, other = (random_split(generated, seed) for seed in (1, 1, 2))
    assert first == same != other
    assert (len(first["train"]), len(first["test"])) == (16_728, 4_182)
    assert sorted(first["train"] + first["test"]) == sorted(generated)


@pytest.mark.parametrize(("number", "longest"), [(1, (48, 40)), (2, (48, 32)), (3, (32, 48))])
def test_mcd(
    number: int, longest: tuple[int, int], run, read_subset, scan_files: Path, official: list[Pair], tmp_path: Path
) -> None:
    options = ["scan", "--split", f"mcd{number}", "--raw-dir", scan_files, "--raw-only", "--out"]
    result = run(*options, tmp_path / "out")
    assert result.code == 0, result.err
    assert run(*options, tmp_path / "out", "--holdout", 0).out.startswith("already prepared")
    assert sorted(path.stem for path in (tmp_path / "out" / "raw").glob("*.src")) == ["dev", "gen", "train"]
    indices = json.loads(gzip.decompress((scan_files / f"mcd{number}.json.gz").read_bytes()))
    for subset, key in {"train": "trainIdxs", "dev": "devIdxs", "gen": "testIdxs"}.items():
        assert read_subset(tmp_path / "out", subset) == [official[index] for index in indices[key]]
    greatest = [max(map(length, read_subset(tmp_path / "out", subset))) for subset in ("train", "gen")]
    assert tuple(greatest) == longest


def test_mcd_with_a_holdout(run, read_subset, scan_files: Path, tmp_path: Path) -> None:
    options = ["scan", "--split", "mcd1", "--raw-dir", scan_files, "--raw-only", "--out", tmp_path / "out"]
    assert run(*options, "--holdout", 0.1).code == 0
    assert [len(read_subset(tmp_path / "out", name)) for name in ("train", "valid", "dev")] == [7_529, 836, 1_046]
    result = run(*options, "--seed", 3)
    assert result == (2, "", "error: --seed has no effect: --split mcd1 --holdout 0 draws nothing\n")

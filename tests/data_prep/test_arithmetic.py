"""Simple arithmetic: the language, the draw, and the output and errors of ``python -m data_prep arithmetic``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.__main__ import main
from data_prep.arithmetic import RECIPES, Drawn, Sampler, apply, digit, sample, single_operations
from data_prep.dataset import Pair
from helpers.data_files import digest

EXPRESSIONS = st.recursive(
    st.integers(0, 9).map(digit), lambda inner: st.builds(apply, st.sampled_from("+*"), inner, inner), max_leaves=20
)


def depth_by_brackets(expression: str) -> int:
    """The maximum number of open brackets."""
    return max(expression[:i].count("(") - expression[:i].count(")") for i in range(len(expression) + 1))


def expected(expression: str) -> Drawn:
    """The value by Python's arithmetic: sums and products are reduced modulo 10 at the end."""
    return Drawn(expression, eval(expression) % 10, depth_by_brackets(expression))


@given(EXPRESSIONS)
def test_value_and_depth(drawn: Drawn) -> None:
    assert drawn == expected(drawn.text)


def test_example_of_the_paper() -> None:
    assert apply("+", apply("*", digit(4), digit(7)), digit(2)) == ("( ( 4 * 7 ) + 2 )", 0, 2)


def test_single_operations() -> None:
    operations = single_operations()
    assert len(operations) == len({drawn.text for drawn in operations}) == 200
    assert operations == [expected(drawn.text) for drawn in operations]


# ---- the draw


def test_shallow_expression_becomes_the_right_operand() -> None:
    sampler = Sampler((1,), range(3, 6), 0.2)
    numbers = iter([0.2, 0.1, 0.2, 0.3, 0.0, 0.5, 0.4, 0.9, 0.7, 0.5, 0.0])
    sampler.uniform = numbers.__next__
    assert sampler.expression() == ("( 5 + ( 4 * ( 3 + 1 ) ) )", 1, 3)


def test_limit_of_depth() -> None:
    sampler = Sampler((1,), range(2, 4), 0.2)
    sampler.uniform = lambda: 0.0
    assert sampler.expression() == (f"( {'( ( 0 + 0 ) + ( 0 + 0 ) )'} + {'( ( 0 + 0 ) + ( 0 + 0 ) )'} )", 0, 3)


def test_shares_of_the_depths() -> None:
    """The shares of the authors' generator: from 60,000 expressions of each kind, drawn with its code."""
    for subset, shares in {
        "train": {2: 0.861, 3: 0.086, 4: 0.032, 5: 0.021},
        "gen": {7: 0.941, 8: 0.059},
    }.items():
        depths, probability = RECIPES[subset]
        sampler = Sampler((3,), depths, probability)
        found = Counter(sampler.expression().depth for _ in range(10_000))
        assert {depth: found[depth] / 10_000 for depth in shares} == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize("subset", RECIPES)
def test_sample(subset: str) -> None:
    depths, _ = RECIPES[subset]
    first = sample(subset, 101, 5, set()).pairs()
    taken = {pair.source for pair in first}
    balance = sample(subset, 101, 5, set(taken))
    for index, pair in enumerate(balance.pairs()):
        meaning = expected(pair.source)
        assert pair.target == str(meaning.value)
        assert meaning.depth == depths[index % len(depths)]
        assert balance.types()[index] == f"depth_{meaning.depth}"
        assert len(pair.source.split(" ")) <= 50
    sources = {pair.source for pair in balance.pairs()}
    assert len(sources) == len(balance.pairs()) == 101 and not sources & taken


# ---- the command


def prepare(run, out: Path, *options: object) -> dict:
    result = run("arithmetic", "--train", 1_000, "--test", 20, *options, "--out", out)
    assert (result.code, result.err) == (0, "")
    return json.loads((out / "dataset.json").read_text("utf-8"))


def test_command(run, read_subset, tmp_path: Path) -> None:
    found = prepare(run, tmp_path / "out")
    assert found["request"] == {"dataset": "arithmetic", "train": 1_000, "test": 20, "seed": 1, "raw_only": False}
    types = {name: entry["types"] for name, entry in found["subsets"].items()}
    assert types == {
        "train": {"depth_1": 200, "depth_2": 250, "depth_3": 250, "depth_4": 250, "depth_5": 250},
        "valid": {"depth_2": 5, "depth_3": 5, "depth_4": 5, "depth_5": 5},
        "dev": {"depth_6": 20},
        "gen": {"depth_7": 10, "depth_8": 10},
    }
    published = {name: entry["published_size"] for name, entry in found["subsets"].items()}
    assert published == {"train": 100_200, "valid": 1_200, "dev": 1_000, "gen": 1_000}
    assert found["labels"] == list("0123456789") and (tmp_path / "out" / "label" / "gen.bin").is_file()
    sources = []
    for name in types:
        pairs = read_subset(tmp_path / "out", name)
        assert pairs == [Pair(pair.source, str(expected(pair.source).value)) for pair in pairs]
        kinds = (tmp_path / "out" / "raw" / f"{name}.type").read_text().split()
        assert kinds == [f"depth_{depth_by_brackets(pair.source)}" for pair in pairs]
        sources += [pair.source for pair in pairs]
    assert len(sources) == len(set(sources)) == 1_260


def test_same_seed_same_bytes(run, tmp_path: Path) -> None:
    prepare(run, tmp_path / "out", "--raw-only")
    assert digest(tmp_path / "out") == "d5f5b3598a5a87c133093c26a0a9ecf24c728180d393c1a34faf43f49ff06821"
    prepare(run, tmp_path / "other", "--raw-only", "--seed", 2)
    assert digest(tmp_path / "other") != digest(tmp_path / "out")


def test_other_request_than_the_prepared_one(run, tmp_path: Path) -> None:
    prepare(run, tmp_path / "out", "--raw-only")
    result = run("arithmetic", "--train", 1_001, "--test", 21, "--seed", 2, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1
    assert "train is 1000 there and 1001 here, test is 20 there and 21 here, seed is 1 there and 2 here" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train 999", "argument --train: must be a whole number from 1000 to 1000000, not '999'"),
        ("--train 1e5", "argument --train: must be a whole number"),
        ("--test 9", "argument --test: must be a whole number from 10 to 100000, not '9'"),
        ("--seed -1", "argument --seed: must be a whole number from 0"),
        ("--depth 3", "unknown option --depth: did you mean --deepest?"),
        (
            "--train 400000",
            "--train 400000 and --test 1000 need 100,250 expressions of depth 2; at most 66,000 of the 88,000",
        ),
        ("--deepest 2", "--train 100000 and --test 1000 need 101,000 expressions of depth 2"),
        ("--deepest 3 --train 132000 --test 10", "--train 132000 and --test 10 need 66,005 expressions of depth 2"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("arithmetic", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_smaller_task(tmp_path):
    out = tmp_path / "small"
    assert (
        main(["arithmetic", "--deepest", "3", "--train", "1000", "--test", "30", "--raw-only", "--out", str(out)]) == 0
    )
    depths = {
        name: Counter(map(depth_by_brackets, (out / f"raw/{name}.src").read_text().splitlines()))
        for name in ("train", "valid", "dev", "gen")
    }
    assert depths == {"train": {1: 200, 2: 500, 3: 500}, "valid": {2: 15, 3: 15}, "dev": {4: 30}, "gen": {5: 15, 6: 15}}
    assert digest(out) == "b3e2b970bd13a0b6d986666e14c8d3625ec3bdede13ae8be951948b124a51953"

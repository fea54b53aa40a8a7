"""Double addition, and addition and multiplication: every example recomputed, alphabets and types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LETTERS = "abcdefghij"


def number(low: str, high: str) -> int:
    """Two digits, the least significant first, of either alphabet."""
    values = [LETTERS.index(digit) if digit in LETTERS else int(digit) for digit in (low, high)]
    return values[0] + 10 * values[1]


def read(folder: Path, subset: str) -> list[tuple[list[str], list[str], str]]:
    """Source, target and type of every example."""
    columns = ((folder / "raw" / f"{subset}.{side}").read_text().splitlines() for side in ("src", "tgt", "type"))
    return [(source.split(), target.split(), kind) for source, target, kind in zip(*columns, strict=True)]


@pytest.fixture
def prepared(run, tmp_path):
    def prepare(name: str, *options: str, out: str = "out") -> Path:
        result = run(name, *options, "--out", tmp_path / out)
        assert result.code == 0, result.err
        return tmp_path / out

    return prepare


def test_double_addition(prepared) -> None:
    folder = prepared("double_addition", "--raw-only")
    found = {subset: read(folder, subset) for subset in ("train", "valid")}
    for subset, size in (("train", 8_000), ("valid", 2_000)):
        assert [kind for *_, kind in found[subset]] == ["pair1"] * size + ["pair2"] * size
        for source, target, kind in found[subset]:
            assert number(*target) == (number(*source[:2]) + number(*source[2:])) % 100
            assert set(source + target) <= set("0123456789" if kind == "pair1" else LETTERS)
    every = {" ".join(source) for subset in found.values() for source, *_ in subset}
    assert len(every) == 20_000
    held_out = [
        {(number(*s[:2]), number(*s[2:])) for s, _, k in found["valid"] if k == kind} for kind in ("pair1", "pair2")
    ]
    # The two draws are independent: 2,000 of 10,000 have some 400 in common.
    assert 300 < len(held_out[0] & held_out[1]) < 500


def test_add_multiply(prepared) -> None:
    folder = prepared("add_multiply", "--train", "9900", "--seed", "3", "--raw-only")
    found = read(folder, "train") + read(folder, "valid")
    for (operator, *digits), target, kind in found:
        one, other = number(*digits[:2]), number(*digits[2:])
        assert operator == {"add": "+", "multiply": "*"}[kind]
        assert number(*target) == (one + other if kind == "add" else one * other) % 100
    assert len({" ".join(source) for source, *_ in found}) == len(found) == 20_000
    manifest = json.loads((folder / "dataset.json").read_text())
    assert manifest["subsets"]["valid"]["types"] == {"add": 100, "multiply": 100}
    assert manifest["request"] | {"train": 9900, "seed": 3} == manifest["request"]


def test_seeds_and_repetition(prepared) -> None:
    one, same, other = (
        prepared("add_multiply", "--train", "100", "--seed", seed, "--raw-only", out=out)
        for seed, out in (("1", "a"), ("1", "b"), ("2", "c"))
    )
    texts = [(folder / "raw/train.src").read_text() for folder in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("train", ["99", "9901", "x"])
def test_wrong_sizes(train, run, tmp_path) -> None:
    result = run("double_addition", "--train", train, "--out", tmp_path / "out")
    assert result.code == 2 and "argument --train: must be a whole number from 100 to 9900" in result.err
    assert not (tmp_path / "out").exists()

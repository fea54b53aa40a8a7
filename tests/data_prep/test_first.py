"""FIRST: the examples, and what ``python -m data_prep first`` writes. The rest is in ``test_parity``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from data_prep.strings import First


@given(st.sampled_from("01"), st.text("01", max_size=50))
def test_example(first: str, rest: str) -> None:
    assert First().example(first + rest) == (f"CLS {first}" + "".join(f" {symbol}" for symbol in rest), first)


def test_lengths_of_the_paper(run, read_subset, tmp_path: Path) -> None:
    result = run("first", "--train-lengths", 10, "--test-lengths", 1000, "--train", 2_000, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert {name: entry["types"] for name, entry in found["subsets"].items()} == {
        "train": {"length_10": 2_000},
        "valid": {"length_10": 102},
        "gen": {"length_1000": 1_000},
    }
    assert found["labels"] == ["0", "1"]
    for name, tokens in (("train", 11), ("valid", 11), ("gen", 1_001)):
        for source, target in read_subset(tmp_path / "out", name):
            words = source.split(" ")
            assert len(words) == tokens and words[0] == "CLS" and words[1] == target
            assert set(words[1:]) == {"0", "1"} or tokens == 11 and set(words[1:]) <= {"0", "1"}
    ones = sum(pair.target == "1" for pair in read_subset(tmp_path / "out", "gen"))
    assert 450 < ones < 550
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((tmp_path / "out" / "raw").iterdir())))
    assert digest.hexdigest() == "f2f927298ee550975a58950da435dc69504b67aa297ceaf5b7b28a8cb65da89e"

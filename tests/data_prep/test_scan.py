"""The output of ``python -m data_prep scan``."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.dataset import Pair
from data_prep.folder import version
from data_prep.scan import Scan
from data_prep.scan.splits import HELD_OUT, random_split, resplit
from helpers.data_files import contents, manifest, scan_line


def test_cutoff_from_the_grammar(run, read_subset, generated: list[Pair], tmp_path: Path) -> None:
    result = run("scan", "--split", "length", "--cutoff", 26, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0 and result.err == ""
    assert [line.split() for line in result.out.splitlines()[3:6]] == [
        ["train", "16,458", "16,458", "9", "26"],
        ["valid", "1,828", "1,828", "9", "26"],
        ["gen", "2,624", "2,624", "9", "48"],
    ]
    assert "vocabulary: 13 source and 6 target words" in result.out and f"written to {tmp_path / 'out'}" in result.out
    assert "examples: valid is our own random 10 %. For the valid of the papers, give --download" in result.out
    for name, pairs in resplit(generated, 26).items():
        assert read_subset(tmp_path / "out", name) == pairs


def test_a_cutoff_without_a_valid_says_so(run, tmp_path: Path) -> None:
    result = run("scan", "--split", "length", "--cutoff", 1, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0 and "a valid of 10 % would be empty" in result.out and "valid 10 %" not in result.out
    assert "examples: this cutoff is not published" in result.out


def test_manifest(run, tmp_path: Path) -> None:
    assert run("scan", "--split", "length", "--cutoff", 26, "--raw-only", "--out", tmp_path / "out").code == 0
    found = manifest(tmp_path / "out")
    assert found["format"] == 2 and found["fairseq_sg"] == version()
    assert found["request"] == {
        "dataset": "scan",
        "split": "length",
        "cutoff": 26,
        "holdout": None,
        "seed": 1234,
        "official_files": [],
        "raw_only": True,
    }
    assert found["origin"] == {"order": "grammar", "generator": "data_prep.scan_grammar"}
    assert found["subsets"]["gen"] == {"published_size": 2624, "size": 2624, "longest_source": 9, "longest_target": 48}
    assert found["vocabulary"] == {"source": 13, "target": 6, "together": 19}
    files = contents(tmp_path / "out")
    del files["dataset.json"]
    assert found["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert list(files) and str(tmp_path) not in json.dumps(found)


def test_cutoff_from_the_official_file(
    run, read_subset, scan_files: Path, official: list[Pair], tmp_path: Path
) -> None:
    result = run(
        "scan", "--split", "length", "--cutoff", 26, "--raw-only", "--raw-dir", scan_files, "--out", tmp_path / "out"
    )
    assert result.code == 0 and "examples: the published ones" in result.out
    for name, pairs in resplit(official, 26).items():
        assert read_subset(tmp_path / "out", name) == pairs
    assert manifest(tmp_path / "out")["origin"] == {
        "order": "official",
        "files": [
            {
                "name": "tasks.txt",
                "bytes": 4_080_388,
                "sha256": "d824c7d9e9149ba497e25f701981dac79954e04bf670d22e5c209f076ac6c89f",
            }
        ],
    }


def test_simple_from_the_official_files(
    run, read_subset, raw_dir, official_splits: dict[str, list[Pair]], tmp_path: Path
) -> None:
    for subset in ("train", "test"):
        text = "".join(scan_line(pair) + "\n" for pair in official_splits[f"simple_{subset}"]).encode("ascii")
        folder = raw_dir(text, f"tasks_{subset}_simple.txt")
    result = run(
        "scan", "--split", "simple", "--holdout", 0, "--raw-only", "--raw-dir", folder, "--out", tmp_path / "out"
    )
    assert result.code == 0 and "examples: the published ones" in result.out
    assert manifest(tmp_path / "out")["request"]["seed"] is None
    for subset in ("train", "test"):
        assert read_subset(tmp_path / "out", subset) == official_splits[f"simple_{subset}"]


def test_simple_without_them_says_so(run, read_subset, generated: list[Pair], tmp_path: Path) -> None:
    result = run("scan", "--split", "simple", "--holdout", 0, "--seed", 5, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0
    assert manifest(tmp_path / "out")["membership"].startswith("our own random split of the official sizes")
    for name, pairs in random_split(generated, 5).items():
        assert read_subset(tmp_path / "out", name) == pairs


@pytest.mark.parametrize("split", sorted({*Scan.splits} - {"mcd1", "mcd2", "mcd3"}))
def test_every_split_with_its_holdout(split: str, run, read_subset, tmp_path: Path) -> None:
    result = run("scan", "--split", split, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    subsets = manifest(tmp_path / "out")["subsets"]
    test = "test" if split == "simple" else "gen"
    assert list(subsets) == ["train", "valid", test]
    published = subsets["train"]["published_size"]
    assert subsets["train"]["size"] + subsets["valid"]["size"] == published
    assert subsets[test]["size"] == subsets[test]["published_size"]
    train = [pair.source for pair in read_subset(tmp_path / "out", "train")]
    valid = [pair.source for pair in read_subset(tmp_path / "out", "valid")]
    assert len(set(valid)) == len(valid) and not set(valid) & set(train)
    if split in HELD_OUT and HELD_OUT[split].primitive:
        assert train.count(HELD_OUT[split].primitive) == published // 10
    else:
        assert len(valid) == published // 10


def test_without_holdout_the_training_set_is_the_published_one(
    run, read_subset, generated: list[Pair], tmp_path: Path
) -> None:
    split = "template_right"
    assert run("scan", "--split", split, "--holdout", 0, "--raw-only", "--out", tmp_path / "out").code == 0
    assert sorted(contents(tmp_path / "out")) == [
        "dataset.json",
        "raw/gen.src",
        "raw/gen.tgt",
        "raw/train.src",
        "raw/train.tgt",
    ]
    assert read_subset(tmp_path / "out", "train") == HELD_OUT[split].split(generated, None)["train"]


def test_draws_are_the_same_everywhere(run, tmp_path: Path) -> None:
    # The draw, the shuffle and the order of the commands, pinned: a change here changes published data.
    assert run("scan", "--split", "addprim_jump", "--seed", 7, "--raw-only", "--out", tmp_path / "out").code == 0
    files = manifest(tmp_path / "out")["files"]
    assert files["raw/train.src"] == "1211321486f51d2f96ee2b60fa043f486cc730220586a82601c9deb1de66d3a8"
    assert files["raw/valid.tgt"] == "bfe285bb49703e6d231f61fca65bf61de25bea0295d54aba53daf3c9da19a141"


def test_runs_without_torch_and_fairseq(tmp_path: Path) -> None:
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "fairseq", "fairseq_sg"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from data_prep.__main__ import main
raw = main(["scan", "--split", "length", "--out", "raw", "--raw-only"])
whole = main(["scan", "--split", "length", "--out", "whole"])
print(raw, whole, sorted({"torch", "fairseq", "fairseq_sg"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 1 []"
    assert done.stderr.startswith("error: binarizing needs fairseq (No module named 'fairseq'): ")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_same_bytes_whatever_the_hash_seed(run, tmp_path: Path) -> None:
    arguments = ["scan", "--split", "filler_num1", "--out"]
    command = [sys.executable, "-m", "data_prep", *arguments, "elsewhere/deeper"]
    environment = os.environ | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert run(*arguments, tmp_path / "here").code == 0
    files = contents(tmp_path / "here")
    assert files == contents(tmp_path / "elsewhere" / "deeper") and len(files) == 21

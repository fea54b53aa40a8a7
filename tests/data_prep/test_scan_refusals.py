"""The errors of ``python -m data_prep scan``: one line, and no files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy
import pytest

from data_prep.scan import TASKS

LENGTH = ("scan", "--split", "length", "--raw-only")


CUTOFF = (
    "argument --cutoff: must be a whole number from 1 to 47, not {!r}: commands have 1 to 48 actions. "
    "Published cutoffs: 22 24 25 26 27 28 30 32 33 36 40"
)
HOLDOUT = "argument --holdout: must be a number from 0 to below 1 (0.1 is a tenth), not {!r}"
SEED = "argument --seed: must be a whole number from 0 to 4294967295, not {!r}"
MIRROR = "--mirror must be a URL such as https://example.org/SCAN, not {!r}"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("--cutoff", value, CUTOFF) for value in ("0", "48", "99", "many", "2_6", "26.0", "-3", "")),
        *(("--holdout", value, HOLDOUT) for value in ("1", "-0.1", "nan", "inf", "some")),
        *(("--seed", value, SEED) for value in ("-1", "4294967296", "1.5")),
        *(("--mirror", value, MIRROR) for value in ("file:///etc", "example.org", "http://", "http://[", "http://a:b")),
        *(("--mirror", value, MIRROR) for value in ("http://a/\xe9", "http://.a")),
        ("--split", "longth", "argument --split: invalid choice: {!r}"),
    ],
)
def test_wrong_value(option: str, value: str, message: str, run, tmp_path: Path) -> None:
    download = ["--download"] if option == "--mirror" else []
    result = run(*LENGTH, *download, "--out", tmp_path / "out", f"{option}={value}")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message.format(value)}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--split simple --cutoff 26", "--cutoff belongs to --split length, not to --split simple"),
        ("--split length --cutoff 26 --holdout 0.1", "--holdout does not go with --cutoff"),
        ("--split length --cutoff 26 --seed 1", "--seed does not go with --cutoff"),
        ("--split length --holdout 0 --seed 1", "--seed has no effect: --split length --holdout 0 draws nothing"),
        ("--split length --mirror http://127.0.0.1", "--mirror belongs to --download: add that"),
        ("--split length --cache-dir x", "--cache-dir belongs to --download: add that"),
        ("--split length --cut 26", "unknown option --cut: did you mean --cutoff?"),
        ("", "the following arguments are required: --split"),
    ],
)
def test_wrong_combination(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("scan", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def with_line(lines: list[str], number: int, line: str) -> list[str]:
    return [*lines[: number - 1], line, *lines[number:]]


@pytest.mark.parametrize(
    ("spoil", "line", "message"),
    [
        (lambda lines: with_line(lines, 7, "IN: fly OUT: I_FLY"), ":7", "unknown word 'fly'"),
        (lambda lines: with_line(lines, 20910, "IN: jump OUT: I_RUN"), ":20910", "wrong actions: number 1 is I_RUN"),
        (lambda lines: with_line(lines, 5, lines[0]), ":5", "is already on line 1"),
        (lambda lines: [line + "\r" for line in lines], ":1", "ends in CR LF"),
        (lambda lines: ["\ufeff" + lines[0], *lines[1:]], ":1", "starts with a byte order mark"),
        (lambda lines: lines, "", "not the official tasks.txt: 4,080,388 bytes with sha256 "),
        (lambda lines: lines[:-1], "", f"expected 4,080,388 bytes with sha256 {TASKS.sha256}"),
        (lambda lines: "\n".join(lines).encode()[:2_000_000], "", "not the official tasks.txt: 2,000,000 bytes with "),
        (lambda lines: b"", "", "not the official tasks.txt: 0 bytes with sha256 "),
    ],
    ids=["word", "actions", "twice", "crlf", "bom", "other-order", "line-less", "cut-off", "nothing"],
)
def test_wrong_official_file(spoil, line: str, message: str, lines: list[str], run, raw_dir, tmp_path: Path) -> None:
    folder = raw_dir(spoil(lines))
    result = run(*LENGTH, "--raw-dir", folder, "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert result.err.startswith(f"error: {folder}/tasks.txt{line}: ") and message in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" + data,
        lambda data: data[:20] + b"\xff" * 20 + data[40:],
        lambda data: b"",
    ],
    ids=["cut-off", "no-gzip", "damaged", "nothing"],
)
def test_broken_gzip(spoil, lines: list[str], run, raw_dir, tmp_path: Path) -> None:
    folder = raw_dir(spoil(gzip.compress("\n".join(lines).encode(), mtime=0)), "tasks.txt.gz")
    result = run(*LENGTH, "--raw-dir", folder, "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert result.err.startswith(f"error: {folder}/tasks.txt.gz: not ")
    assert list(tmp_path.iterdir()) == []


def test_other_sizes_than_the_published_ones(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.scan.LENGTH_SIZES", {"train": 16_990, "gen": 3_921})
    result = run(*LENGTH, "--out", tmp_path / "out")
    assert result == (
        1,
        "",
        "error: subset gen has 3,920 examples instead of the published 3,921: "
        "are these the official files, and complete?\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_another_draw_than_the_reference(
    run, scan_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.scan.splits.RandomState", lambda seed: numpy.random.RandomState(seed + 1))
    result = run(*LENGTH, "--cutoff", 26, "--raw-dir", scan_files, "--out", tmp_path / "out")
    assert result.code == 1 and "the valid of cutoff 26 is not the published one" in result.err
    assert list(tmp_path.iterdir()) == []


def test_holdout_of_nothing(run, tmp_path: Path) -> None:
    result = run(*LENGTH, "--holdout", 0.00001, "--out", tmp_path / "out")
    assert result == (
        1,
        "",
        "error: a --holdout of 1e-05 of 16,990 examples is not even one: choose more, or 0 for none\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_files(run, raw_dir, tmp_path: Path) -> None:
    folder = raw_dir(b"x", "readme.txt")
    out = ["--raw-only", "--out", tmp_path / "out"]
    result = run("scan", "--split", "length", "--raw-dir", folder, *out)
    assert result.code == 1 and f"error: {folder}: the official tasks.txt (sha256 d824" in result.err
    result = run("scan", "--split", "length", "--raw-dir", tmp_path / "nowhere", *out)
    message = "--raw-dir is not a folder: nothing has this name; check it"
    assert result == (1, "", f"error: {tmp_path / 'nowhere'}: {message}\n")
    raw_dir(b"x\n", "tasks_test_simple.txt")
    result = run("scan", "--split", "simple", "--raw-dir", folder, *out)
    assert result.code == 1 and "the official tasks_train_simple.txt (sha256 941bb8" in result.err
    assert list(tmp_path.iterdir()) == []


def test_message_stays_on_one_line_whatever_the_path(run, tmp_path: Path) -> None:
    result = run(*LENGTH, "--raw-dir", "no\nsuch  folder", "--out", tmp_path / "out")
    assert result == (1, "", "error: no such  folder: --raw-dir is not a folder: nothing has this name; check it\n")


def test_mcd_says_what_to_get(run, tmp_path: Path) -> None:
    result = run("scan", "--split", "mcd2", "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "error: the official mcd2.json (sha256 1ba591b2c3c1eb305584d49fde14aced3589099611a668ba28bb696f2dd34e0a) "
        "is needed; pass its folder with --raw-dir. It is in "
        "https://storage.googleapis.com/cfq_dataset/scan-splits.tar.gz (--download gets its tasks.txt)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_mcd_index_file_is_checked(run, raw_dir, scan_files: Path, tmp_path: Path) -> None:
    raw_dir(gzip.decompress((scan_files / "tasks.txt.gz").read_bytes()))
    folder = raw_dir(b"[]", "mcd2.json")
    result = run("scan", "--split", "mcd1", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and f"{folder}: the official mcd1.json (sha256 233b65dc" in result.err
    assert "https://storage.googleapis.com/cfq_dataset/scan-splits.tar.gz" in result.err
    result = run("scan", "--split", "mcd2", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and f"{folder}/mcd2.json: not the official mcd2.json: 2 bytes with sha256 " in result.err
    assert list(tmp_path.iterdir()) == []


def test_help(run) -> None:
    result = run("--help")
    assert result.code == 0 and "scan" in result.out.lower()

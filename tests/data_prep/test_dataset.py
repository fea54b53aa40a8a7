"""The contract of a dataset: options make the command line and the request; files are hashed while they are read."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import inspect
import json
import os
import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

from data_prep import __main__ as command
from data_prep.dataset import (
    DataError,
    Dataset,
    Options,
    Sources,
    add_options,
    check_path,
    fields_of,
    option,
    read_options,
    share,
    whole_number,
)

EXTENDING = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


@dataclass(frozen=True)
class Common(Options):
    late: int = option(3, "later", type=whole_number(0), when_given=True)
    kind: str = option("a", "its kind", choices=("a", "b"))


@dataclass(frozen=True)
class Own(Common):
    size: int | None = option(None, "its size", type=whole_number(1, 9))
    shares: dict[str, float] = option(help="of {}", flag="--{}-share", keys=("valid", "test"), type=share)
    quick: bool = option(False, "be quick", given={"--quick": True, "--slow": False})
    kind: str = option("b", "its kind", choices=("a", "b"))
    found: tuple[str, ...] = ()


def parsed(*arguments: str) -> Own:
    parser = argparse.ArgumentParser()
    add_options(parser, Own)
    return read_options(Own, parser.parse_args(arguments))


def test_own_options_come_before_inherited_ones() -> None:
    assert [f.name for f in fields_of(Own)] == ["size", "shares", "quick", "found", "late", "kind"]


def test_options_of_the_command_line() -> None:
    assert parsed() == Own(late=3, kind="b", size=None, shares={}, quick=False, found=())
    given = parsed("--size", "4", "--test-share", "0.5", "--quick", "--kind", "a", "--late", "7")
    assert given == Own(late=7, kind="a", size=4, shares={"test": 0.5}, quick=True)
    assert parsed("--slow").quick is False


def test_request_has_every_option() -> None:
    """Except one that came later and is not given, so that older requests stay the same."""
    request = {"size": None, "shares": {}, "quick": False, "found": [], "kind": "b"}
    assert parsed().request(Sources()) == request
    assert parsed("--late", "7").request(Sources()) == request | {"late": 7}
    assert list(parsed("--late", "7").request(Sources())) == ["size", "shares", "quick", "found", "late", "kind"]


@pytest.mark.parametrize("dataset", command.DATASETS, ids=lambda dataset: dataset.name)
def test_a_dataset_is_built_from_its_request_and_its_sources_alone(dataset: Dataset) -> None:
    assert issubclass(dataset.options, Options) and issubclass(dataset.sources, Sources)
    assert is_dataclass(dataset.options) and dataset.options.__dataclass_params__.frozen
    assert list(inspect.signature(dataset.build).parameters) == ["options", "sources"]
    both = {f.name for f in fields(dataset.options)} & {f.name for f in fields(dataset.sources)}
    assert not both, f"{both} are options and sources"


def test_file_is_hashed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sources = tmp_path / "file", Sources()
    path.write_bytes(b"x" * 3_000_000)
    with sources.open(path) as stream:
        assert stream.read(5) == b"xxxxx"  # the rest is read at the end of the block
    monkeypatch.setattr(Path, "open", None)
    assert sources.sha256(path) == hashlib.sha256(b"x" * 3_000_000).hexdigest()


def test_file_whose_reading_fails_is_not_known(tmp_path: Path) -> None:
    path, sources = tmp_path / "file", Sources()
    path.write_bytes(b"text")
    with pytest.raises(DataError), sources.open(path):
        raise DataError("wrong")
    path.write_bytes(b"other text")
    assert sources.sha256(path) == hashlib.sha256(b"other text").hexdigest()


def test_packed_file(tmp_path: Path) -> None:
    """It is unpacked, and its hash is that of the file as it is."""
    path, sources = tmp_path / "file.gz", Sources()
    path.write_bytes(gzip.compress(b"text"))
    assert sources.read_bytes(path) == b"text"
    assert sources.sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="not a complete gzip file"):
        sources.read_bytes(path)


def test_dataset_of_extending_md(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "class Palindromes" in block]
    (tmp_path / "palindromes.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import palindromes

    monkeypatch.setattr(command, "DATASETS", (palindromes.Palindromes(),))
    out = ["--raw-only", "--out", tmp_path / "out"]
    assert "PALINDROMES: is a string" in run("palindromes", "--help").out
    assert run("palindromes", "--longest", 7, *out).err.startswith("error: --longest must be even")
    result = run("palindromes", "--longest", 6, "--seed", 3, *out)
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["request"] == {"dataset": "palindromes", "longest": 6, "seed": 3, "raw_only": True}
    assert found["subsets"]["gen"]["longest_source"] == 12 and found["labels"] == ["0", "1"]
    assert run("palindromes", "--raw-only", "--out", tmp_path / "default").code == 0
    for subset in ("train", "valid", "gen"):
        there = tmp_path / "default" / "raw" / subset
        sources, answers = ((there.with_suffix(end)).read_text("utf-8").splitlines() for end in (".src", ".tgt"))
        assert answers == [str(int(line == line[::-1])) for line in sources]
        assert len(answers) > 80 and 0.3 < answers.count("1") / len(answers) < 0.7
        assert subset == "gen" or {len(line.split()) for line in sources} >= {8, 10, 12, 14, 16}
    sys.modules.pop("palindromes")


def test_paths_of_options(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text", "utf-8")
    os.mkfifo(tmp_path / "pipe")
    for name, kind, reason in (
        ("file", "folder", "is not a folder: name the folder that it is in"),
        ("nothing", "folder", "is not a folder: nothing has this name; check it"),
        ("nothing", "file", "is not a file: nothing has this name; check it"),
        (".", "file", "is not a file: it is a folder; name a file in it"),
        ("pipe", "file", "is not a file: it is a pipe or a device; save its content to a file, and name that"),
    ):
        with pytest.raises(DataError) as caught:
            check_path("--option", tmp_path / name, kind)
        assert str(caught.value) == f"{tmp_path / name}: --option {reason}"
    check_path("--option", tmp_path / "file", "file")
    check_path("--option", tmp_path, "folder")
    check_path("--option", None, "file")

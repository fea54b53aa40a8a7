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
from collections.abc import Callable, Iterator
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


@pytest.fixture
def user_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Saves code as a package of the user; the test's imports of it are undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def save(name: str, code: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code, encoding="utf-8")
        names.append(name)
        return tmp_path / name

    yield save
    for name in names:
        if getattr(sys.modules.get(name), "__file__", "") == str(tmp_path / name / "__init__.py"):
            del sys.modules[name]


def example(line: str) -> str:
    """The example of extending.md with such a line."""
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if line in block]
    return code


def test_dataset_of_extending_md(run, user_dir, tmp_path: Path) -> None:
    mine = ["--user-dir", user_dir("my_data", example("class Palindromes")), "palindromes"]
    out = ["--raw-only", "--out", tmp_path / "out"]
    assert "PALINDROMES: is a string" in run(*mine, "--help").out
    assert run(*mine, "--longest", 7, *out).err.startswith("error: --longest must be even")
    result = run(*mine, "--longest", 6, "--seed", 3, *out)
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["request"] == {"dataset": "palindromes", "longest": 6, "seed": 3, "raw_only": True}
    assert found["subsets"]["gen"]["longest_source"] == 12 and found["labels"] == ["0", "1"]
    assert run(*mine, "--raw-only", "--out", tmp_path / "default").code == 0
    for subset in ("train", "valid", "gen"):
        there = tmp_path / "default" / "raw" / subset
        sources, answers = ((there.with_suffix(end)).read_text("utf-8").splitlines() for end in (".src", ".tgt"))
        assert answers == [str(int(line == line[::-1])) for line in sources]
        assert len(answers) > 80 and 0.3 < answers.count("1") / len(answers) < 0.7
        assert subset == "gen" or {len(line.split()) for line in sources} >= {8, 10, 12, 14, 16}


def test_table_of_extending_md(run, user_dir, tmp_path: Path) -> None:
    """A file of the user is hashed in the request; other commands know the dataset, and need no package to verify."""
    lines = [
        f"{verb} {number}\t{' '.join([verb.upper()] * number)}" for verb in ("run", "walk") for number in range(1, 13)
    ]
    table, mine = tmp_path / "commands.tsv", user_dir("my_table", example("class Table"))
    table.write_text("\n".join(lines) + "\n", "utf-8")
    command = ["table", "--tsv", table, "--cutoff", 8, f"--user-dir={mine}", "--out", tmp_path / "out"]
    result = run(*command)
    assert (result.code, result.err) == (0, "") and "next: fairseq-train" in result.out
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    sha256 = hashlib.sha256(table.read_bytes()).hexdigest()
    assert found["request"] == {"dataset": "table", "cutoff": 8, "sha256": sha256, "raw_only": False}
    assert found["origin"] == {"files": [{"name": "tsv", "bytes": table.stat().st_size, "sha256": sha256}]}
    assert {name: subset["size"] for name, subset in found["subsets"].items()} == {"train": 15, "valid": 1, "gen": 8}
    assert run(*command).out.startswith("already prepared")
    assert run("verify", tmp_path / "out").code == 0
    assert run("--user-dir", mine, "reorder", tmp_path / "out", "--out", tmp_path / "again").code == 0
    assert "\ntable " in run("list", "--user-dir", mine).out and "\ntable " not in run("list").out
    table.write_text("jump\tJUMP\nrun\n", "utf-8")
    assert "exists, but sha256 is" in run(*command).err
    result = run(*command[:-1], tmp_path / "other")
    assert result == (1, "", f"error: {table}:2: not a command, a tab and its actions\n")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("mine", "", "mine/__init__.py: has no DATASETS: list an instance of each dataset, DATASETS = (MyDataset(),)"),
        ("json", "DATASETS = (1,)", "json: --user-dir has the name of another Python module: rename the folder"),
        (
            "mine",
            "from data_prep.scan import Scan\nDATASETS = (Scan(),)",
            "mine/__init__.py: the name scan is taken: give the dataset another one",
        ),
    ],
    ids=["empty", "name of a module", "name of a dataset"],
)
def test_user_dir_that_is_wrong(run, user_dir, name: str, code: str, message: str) -> None:
    folder = user_dir(name, code)
    assert run("--user-dir", folder, "scan", "--help") == (1, "", f"error: {folder.parent}/{message}\n")


def test_user_dir_that_is_missing(run, tmp_path: Path) -> None:
    assert run("list", "--user-dir") == (2, "", "error: --user-dir needs the name of a folder\n")
    nothing = "--user-dir is not a folder: nothing has this name; check it"
    assert run("--user-dir", tmp_path / "mine", "list") == (1, "", f"error: {tmp_path / 'mine'}: {nothing}\n")
    no_package = "--user-dir has no __init__.py: save your dataset as that file"
    assert run("--user-dir", tmp_path, "list") == (1, "", f"error: {tmp_path}: {no_package}\n")


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

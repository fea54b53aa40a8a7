"""The order of words: common to all folders of a language, and reordering of folders from the earlier version."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from data_prep.binarize import make_dictionary
from helpers.data_files import contents, manifest

FIRST = ("first", "--train-lengths", 4, "--test-lengths", 8, "--train", 100, "--test", 10)
PARITY = ("parity", "--train-lengths", "5-6", "--test-lengths", 9, "--train", 110, "--test", 10)
RECALL = ("associative_recall", "--blocks", "2-3", "--test-blocks", 4, "--train", 100, "--test", 10)
PCFG = ("pcfg", "--condition", "iid", "--generate", 1000)


def by_frequency(texts, words=()) -> Dictionary:
    """The dictionary of the earlier version."""
    sorted_by_code_point = make_dictionary(texts)
    dictionary = Dictionary()
    for number in range(dictionary.nspecial, len(sorted_by_code_point)):
        dictionary.add_symbol(sorted_by_code_point[number], n=sorted_by_code_point.count[number])
    dictionary.finalize(padding_factor=1)
    return dictionary


@pytest.fixture
def old(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prepares a folder as the earlier version did."""

    def old(*arguments: object, out: str = "old") -> Path:
        with monkeypatch.context() as patch:
            patch.setattr("data_prep.folder.FORMAT", 1)
            patch.setattr("data_prep.binarize.make_dictionary", by_frequency)
            patch.setattr("data_prep.pcfg.Pcfg.words", ())
            assert run(*arguments, "--out", tmp_path / out).code == 0
        return tmp_path / out

    return old


@pytest.fixture
def new(run, tmp_path: Path):
    def new(*arguments: object, out: str = "new") -> Path:
        result = run(*arguments, "--out", tmp_path / out)
        assert result.code == 0, result.err
        return tmp_path / out

    return new


def words(folder: Path, language: str = "src") -> list[str]:
    return Dictionary.load(str(folder / f"dict.{language}.txt")).symbols[Dictionary().nspecial :]


def test_folders_of_one_language_have_one_order(new, old) -> None:
    first, parity = new(*FIRST), new(*PARITY, out="parity")
    for language, expected in (("src", ["0", "1", "CLS"]), ("tgt", ["0", "1"])):
        assert words(first, language) == words(parity, language) == expected
    before = old(*FIRST)
    assert words(before) != words(first) and Counter(words(before)) == Counter(words(first))


def test_all_conditions_of_pcfg_share_one_dictionary(new, old) -> None:
    folder = new(*PCFG)
    assert words(folder) == words(folder, "tgt") == sorted(words(folder))
    assert len(words(folder)) == 535 and "append_twin" in words(folder)
    before = old(*PCFG)
    assert "append_twin" not in words(before) and manifest(before)["vocabulary"] == manifest(folder)["vocabulary"]


def test_folder_of_the_earlier_version_is_told_apart(run, old) -> None:
    folder = old(*FIRST)
    before = contents(folder)
    result = run(*FIRST, "--out", folder)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    start = f"error: {folder}: exists, made by an earlier version with another order of words: choose "
    assert result.err.startswith(f"{start}another --out.") and "python -m data_prep reorder --help" in result.err
    assert contents(folder) == before
    assert run("verify", folder).code == 0
    other = run(*FIRST[:-1], 11, "--out", folder)
    assert other.err.startswith(f"error: {folder}: exists, but test is 10 there and 11 here: ")
    assert run(*FIRST, "--out", folder, "--overwrite").code == 0
    assert words(folder) == ["0", "1", "CLS"]


@pytest.mark.parametrize("data", [[*FIRST, "--raw-only"], ["text", "--unit", "bytes", "--input", __file__]], ids=str)
def test_what_the_earlier_version_made_alike_is_taken(data, run, old) -> None:
    folder = old(*data)
    assert run(*data, "--out", folder) == (0, f"already prepared: {folder}\n", "")


def test_reorder_like_another_folder(run, old, tmp_path: Path, new) -> None:
    """Another split, for a model trained on a folder of the earlier version."""
    trained, folder, out = old(*FIRST), new(*PARITY), tmp_path / "reordered"
    before = contents(folder), contents(trained)
    command = ("reorder", folder, "--like", trained, "--out", out)
    result = run(*command)
    assert result.code == 0 and result.out.endswith(f"words in the order of {trained}\nwritten to {out}\n"), result.err
    assert (contents(folder), contents(trained)) == before
    found, made, like = manifest(out), contents(out), contents(trained)
    for language in ("src", "tgt"):
        assert made[f"dict.{language}.txt"] == like[f"dict.{language}.txt"]
        dictionary = Dictionary.load(str(out / f"dict.{language}.txt"))
        for subset in found["subsets"]:
            binary = data_utils.load_indexed_dataset(str(out / f"{subset}.src-tgt.{language}"), dictionary)
            lines = (folder / "raw" / f"{subset}.{language}").read_text("ascii").splitlines()
            assert [dictionary.string(tokens) for tokens in binary] == lines
    assert set(made) == set(contents(folder)) and made["input0/gen.bin"] == made["gen.src-tgt.src.bin"]
    source = manifest(folder)
    changed = ("request", "files")
    assert {k: v for k, v in found.items() if k not in changed} == {k: v for k, v in source.items() if k not in changed}
    assert found["request"] == source["request"] | {
        "reordered_like": {
            "request": manifest(trained)["request"],
            **{name: manifest(trained)["files"][name] for name in ("dict.src.txt", "dict.tgt.txt")},
        }
    }
    assert run(*command) == (0, f"already prepared: {out}\n", "")
    assert "reordered_like is null there" in run("reorder", trained, "--like", trained, "--out", folder).err
    assert run("verify", out).code == 0


@pytest.mark.parametrize(
    "data", [FIRST, PCFG, [*PARITY, "--raw-only"], RECALL], ids=["classes", "joined", "raw-only", "labels"]
)
def test_reorder_makes_what_is_prepared_today(data, run, old, new, tmp_path: Path) -> None:
    folder = old(*data)
    assert run("reorder", folder, "--out", tmp_path / "reordered").code == 0
    assert contents(tmp_path / "reordered") == contents(new(*[option for option in data if option != "--raw-only"]))


def test_reorder_back(run, old, new, tmp_path: Path) -> None:
    folder, today = old(*FIRST), new(*FIRST)
    assert run("reorder", today, "--like", folder, "--out", tmp_path / "there").code == 0
    assert contents(tmp_path / "there")["gen.src-tgt.src.bin"] == contents(folder)["gen.src-tgt.src.bin"]
    assert run("reorder", tmp_path / "there", "--out", tmp_path / "back").code == 0
    assert contents(tmp_path / "back") == contents(today)


def test_word_that_the_other_folder_lacks(run, new, tmp_path: Path) -> None:
    folder = new(*FIRST)
    other = new("arithmetic", "--train", 1000, "--test", 10, "--deepest", 2, out="other")
    result = run("reorder", folder, "--like", other, "--out", tmp_path / "out")
    message = f"CLS is not in the dictionary of {other}: its models cannot read it"
    assert result == (1, "", f"error: {folder}/raw/train.src:1: {message}\n")
    assert sorted(tmp_path.iterdir()) == [folder, other]


def test_reorder_is_refused(run, new, tmp_path: Path) -> None:
    folder, raw = new(*FIRST), new(*FIRST, "--raw-only", out="raw")
    text = new("text", "--unit", "bytes", "--input", __file__, out="text")
    out = tmp_path / "out"
    for arguments, code, message in (
        ([folder, "--out", folder], 2, "--out and FOLDER are the same folder, which must not change: choose another"),
        ([folder, "--like", raw, "--out", raw], 2, "--out and --like are the same folder"),
        ([folder, "--out", folder / "sub"], 2, "--out is inside FOLDER, which must not change: choose another --out"),
        ([folder, "--like", raw, "--out", raw / "a" / "b"], 2, "--out is inside --like, which must not change"),
        ([text, "--out", out], 1, f"{text}: has no raw/train.src: reorder takes folders of sentence pairs"),
        ([folder, "--like", raw, "--out", out], 1, f"{raw}: has no dict.src.txt: --like takes a folder of sentence"),
        ([tmp_path / "none", "--out", out], 1, f"{tmp_path / 'none'}: not a prepared dataset"),
        ([folder], 2, "the following arguments are required: --out"),
        ([folder, "--out", out, "--raw-only"], 2, "unknown option --raw-only"),
    ):
        result = run("reorder", *arguments)
        assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
        assert result.err.startswith(f"error: {message}")
    (folder / "raw" / "gen.src").write_text("CLS\n")
    for arguments in ([folder], [new(*PARITY, out="whole"), "--like", folder]):
        result = run("reorder", *arguments, "--out", out)
        assert result == (1, "", f"error: {folder}: raw/gen.src has changed since its preparation\n")
    assert not out.exists()


@pytest.mark.parametrize("name", ["subsets", "vocabulary", "rule", "membership", "origin", "request.dataset"])
@pytest.mark.parametrize("value", [None, 1])
def test_dataset_json_without_an_entry(name: str, value: object, run, new, tmp_path: Path) -> None:
    folder = new(*FIRST, "--raw-only")
    found = manifest(folder)
    entries, _, key = name.rpartition(".")
    entries = found[entries] if entries else found
    if value is None:
        del entries[key]
    else:
        entries[key] = value
    (folder / "dataset.json").write_text(json.dumps(found), "utf-8")
    result = run("reorder", folder, "--out", tmp_path / "out")
    fix = "was it changed? Prepare the data again, in a new folder"
    assert result == (1, "", f"error: {folder / 'dataset.json'}: has no {name}: {fix}\n")

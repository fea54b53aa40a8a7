"""CFQ: tokenization, and the output and errors of ``python -m data_prep cfq``."""

from __future__ import annotations

import hashlib
import json
import re
import string
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import cfq
from data_prep.cfq import SIZES, query_words, question_words
from data_prep.dataset import Pair


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Did M0 direct M1", "Did M0 direct M1"),
        ("Did M0 's star influence M1", "Did M0 ' s star influence M1"),
        ("Did M0's star influence M1", "Did M0 ' s star influence M1"),
        ("Did M0 write , edit , and executive produce M1", "Did M0 write , edit , and executive produce M1"),
        (" Who\nis  it?", "Who is it ?"),
        ("a_b-c", "a _ b - c"),
    ],
)
def test_question_words(question: str, words: str) -> None:
    assert question_words(question) == words


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT count(*) WHERE {\nM0 ns:a.b M1\n}", "SELECT count ( * ) WHERE { M0 a.b M1 }"),
        ("?x0 ns:people.person.gender ns:m.02zsn", "?x0 people.person.gender m_02zsn"),
        ("ns:film.actor.film/ns:film.performance.character", "film.actor.film/ns:film.performance.character"),
        ("ns:ns:a m.b xm.c ns:m.m.d", "ns:a m_b xm.c m_m.d"),
        (
            "SELECT count(*) WHERE {\n?x0 ns:film.editor.film M0 .\n?x0 ns:people.person.gender ns:m.02zsn .\n"
            "FILTER ( ?x0 != M1 )\n}",
            "SELECT count ( * ) WHERE { ?x0 film.editor.film M0 . ?x0 people.person.gender "
            "m_02zsn . FILTER ( ?x0 != M1 ) }",
        ),
        ("SELECT DISTINCT ?x0\\n", "SELECT DISTINCT ?x0\\n"),
        ("ns: a ns:", "a"),
    ],
)
def test_query_words(query: str, words: str) -> None:
    assert query_words(query) == words


@given(st.text())
def test_words_stand_between_single_spaces(text: str) -> None:
    for words in (question_words(text), query_words(text)):
        assert words == " ".join(words.split())
    assert question_words(text).replace(" ", "") == "".join(text.split())
    assert question_words(question_words(text)) == question_words(text)


@given(st.text(st.sampled_from("aM0_?'.,-~ é\u2019\t\n")))
def test_question_words_one_character_at_a_time(text: str) -> None:
    """A word is an ASCII mark, or a run of characters that are neither marks nor blanks."""
    words, run = [], ""
    for character in text + " ":
        if character in string.punctuation or character.isspace():
            words += [word for word in (run, character.strip()) if word]
            run = ""
        else:
            run += character
    assert question_words(text) == " ".join(words)


TOKENS = ["ns:", "m.", "m_", "0", "x", "ns:m.02zsn", "ns:ns:a", "a/ns:b", "count(*)", "count(", "^ns:m.x", "{", "?x0"]


@given(st.lists(st.sampled_from([*TOKENS, " ", "\n"])).map("".join))
def test_query_words_as_the_reference_has_them(query: str) -> None:
    """By regular expressions on the whole text, while the code goes word by word."""
    text = re.sub(r"\s+", " ", query.replace("count(*)", "count ( * )")).strip()
    text = re.sub(r"(?:(?<=\s)|^)ns:", "", text)
    text = re.sub(r"(?:(?<=\s)|^)m\.", "m_", text)
    assert query_words(query) == " ".join(text.split())


def test_published_sizes() -> None:
    # A split has half of the questions; that of mcd has one more than the others.
    totals = {split: sum(sizes) for split, sizes in SIZES.items()}
    assert totals == {split: 119_679 if split.startswith("mcd") else 119_678 for split in SIZES}


# ---- invented records instead of the official ones


@pytest.fixture
def fixture_folder(shared_data: Path) -> Path:
    """A folder ``cfq`` with 14 records in the official form."""
    return shared_data / "cfq_fixture" / "cfq"


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes the sizes of the invented splits."""
    sizes = {"mcd1": (8, 3, 3), "mcd2": (7, 3, 3), "mcd3": (7, 3, 3)}
    sizes |= {"query_complexity_split": (8, 3, 3), "random_split": (8, 2, 2)}
    for split, size in sizes.items():
        monkeypatch.setitem(cfq.SIZES, split, size)


def manifest(folder: Path) -> dict:
    return json.loads((folder / "dataset.json").read_text("utf-8"))


def expected_subset(folder: Path, split: str, part: str) -> list[Pair]:
    """A subset, read as a whole and without the code under test, except for the tokenizers."""
    found = json.loads((folder / "dataset.json").read_text("utf-8"))
    chosen = [found[index] for index in json.loads((folder / "splits" / f"{split}.json").read_text("utf-8"))[part]]
    keys = ("questionPatternModEntities", "sparqlPatternModEntities")
    return [Pair(question_words(record[keys[0]]), query_words(record[keys[1]])) for record in chosen]


@pytest.mark.parametrize("split", ["mcd1", "mcd2", "mcd3", "query_complexity_split", "random_split"])
def test_splits(split: str, run, read_subset, fixture_folder: Path, small_sizes, tmp_path: Path) -> None:
    result = run("cfq", "--split", split, "--raw-dir", fixture_folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    names = ("train", "valid", "test") if split == "random_split" else ("train", "dev", "gen")
    for name, part in zip(names, ("trainIdxs", "devIdxs", "testIdxs"), strict=True):
        assert read_subset(tmp_path / "out", name) == expected_subset(fixture_folder, split, part)
    found = manifest(tmp_path / "out")
    assert list(found["subsets"]) == list(names) and found["vocabulary"]["joined"]
    assert "words in the common vocabulary instead of the published 181" in found["membership"]
    files = (fixture_folder / "dataset.json", fixture_folder / "splits" / f"{split}.json")
    assert found["request"]["source_sha256"] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert [file["name"] for file in found["origin"]["files"]] == ["cfq/dataset.json", f"cfq/splits/{split}.json"]
    assert (tmp_path / "out" / "dict.src.txt").read_bytes() == (tmp_path / "out" / "dict.tgt.txt").read_bytes()


def test_archive_and_folder_make_the_same(run, fixture_folder: Path, small_sizes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cfq1.1.tar.gz", "w:gz") as archive:
        archive.add(fixture_folder, "cfq")
    options = ["--split", "mcd1", "--holdout", 0.25, "--seed", 3, "--raw-only"]
    assert run("cfq", *options, "--raw-dir", fixture_folder.parent, "--out", tmp_path / "a").code == 0
    assert run("cfq", *options, "--archive", tmp_path / "cfq1.1.tar.gz", "--out", tmp_path / "b").code == 0
    one, other = manifest(tmp_path / "a"), manifest(tmp_path / "b")
    assert one["request"].pop("source_sha256") != other["request"].pop("source_sha256")
    assert one == other and one["subsets"]["valid"]["size"] == 2 and one["subsets"]["train"]["size"] == 6
    again = run("cfq", *options, "--archive", tmp_path / "cfq1.1.tar.gz", "--out", tmp_path / "b")
    assert again.out == f"already prepared: {tmp_path / 'b'}\n"


def test_other_sizes_than_the_published_ones(run, fixture_folder: Path, tmp_path: Path) -> None:
    result = run("cfq", "--split", "mcd1", "--raw-dir", fixture_folder, "--raw-only", "--out", tmp_path / "out")
    assert result == (
        1,
        "",
        "error: subset train has 8 examples instead of the published 95,743: "
        "are these the official files, and complete?\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_files(run, fixture_folder: Path, tmp_path: Path) -> None:
    out = ["--raw-only", "--out", tmp_path / "out"]
    result = run("cfq", "--split", "mcd1", "--archive", tmp_path / "cfq1.1.tar.gz", *out)
    assert result == (1, "", f"error: {tmp_path / 'cfq1.1.tar.gz'}: --archive is not a file\n")
    result = run("cfq", "--split", "mcd1", "--raw-dir", tmp_path, *out)
    assert result.code == 1 and f"{tmp_path}: has neither dataset.json nor cfq/dataset.json" in result.err
    result = run("cfq", "--split", "question_pattern_split", "--raw-dir", fixture_folder, *out)
    assert result == (1, "", f"error: {fixture_folder}: has no splits/question_pattern_split.json\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--split mcd1", "one of the arguments --archive --raw-dir is required"),
        ("--split mcd1 --raw-dir x --archive y", "argument --archive: not allowed with argument --raw-dir"),
        ("--split mcd4 --raw-dir x", "argument --split: invalid choice: 'mcd4'"),
        ("--split random_split --raw-dir x --holdout 0.1", "--holdout does not go with random_split"),
        ("--split random_split --raw-dir x --seed 1", "--seed has no effect"),
        ("--split mcd1 --raw-dir x --holdout 0 --seed 1", "--seed has no effect"),
        ("--split mcd1 --raw-dir x --seed 1", "--seed has no effect"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("cfq", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []

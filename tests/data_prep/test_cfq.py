"""CFQ: tokenization, its files, and the output and errors of ``python -m data_prep cfq``."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import string
import tarfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import cfq
from data_prep.cfq import (
    KEYS,
    PARTS,
    SIZES,
    CfqFiles,
    CfqOptions,
    query_words,
    question_words,
    read_indices,
    read_pairs,
    records,
)
from data_prep.dataset import DataError, Pair
from helpers.data_files import manifest


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


def test_what_published_files_repeat_of_training_is_counted(run, fixture_folder: Path, small_sizes, tmp_path: Path):
    """Two records may be the same pair."""
    folder = tmp_path / "cfq"
    (folder / "splits").mkdir(parents=True)
    split = json.loads((fixture_folder / "splits" / "mcd1.json").read_text("utf-8"))
    (folder / "splits" / "mcd1.json").write_text(json.dumps(split), "utf-8")
    records = json.loads((fixture_folder / "dataset.json").read_text("utf-8"))
    records[split["testIdxs"][0]] = records[split["trainIdxs"][0]]
    (folder / "dataset.json").write_text(json.dumps(records), "utf-8")
    result = run("cfq", "--split", "mcd1", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert manifest(tmp_path / "out")["subsets"]["gen"]["in_train"] == 1


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
    message = "--archive is not a file: nothing has this name; check it"
    assert result == (1, "", f"error: {tmp_path / 'cfq1.1.tar.gz'}: {message}\n")
    result = run("cfq", "--split", "mcd1", "--raw-dir", tmp_path / "cfq", *out)
    message = "--raw-dir is not a folder: nothing has this name; check it"
    assert result == (1, "", f"error: {tmp_path / 'cfq'}: {message}\n")
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


# ---- any content of the files

FILE = Path("cfq/dataset.json")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=4)


@given(RECORDS, st.integers(1, 50), st.sampled_from([None, 0, 2]), st.booleans())
def test_records_are_those_of_the_whole_file(found: list, size: int, indent: int | None, ascii_only: bool) -> None:
    """Blocks may end within records, words and characters."""
    data = json.dumps(found, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return  # a lone surrogate, invalid in UTF-8
    with mock.patch.object(cfq, "BLOCK", size):
        assert list(records(io.BytesIO(data + b"\n"), FILE)) == found


def test_layout_of_the_official_file() -> None:
    text = '[{\n "complexityMeasures": {"a": 1},\n "question": "x"\n},{\n "complexityMeasures": {"a": 2}\n}]\n'
    assert [record["complexityMeasures"]["a"] for record in records(io.BytesIO(text.encode()), FILE)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "record 0 (counted from 0) cannot be read: '[' expected, not 'the end'"),
        ("  \n", "record 0 (counted from 0) cannot be read: '[' expected"),
        ('{"a": 1}', "record 0 (counted from 0) cannot be read: '[' expected"),
        ("[]", "record 0 (counted from 0) cannot be read: '{' expected, not ']'"),
        ("[", "record 0 (counted from 0) cannot be read: '{' expected, not 'the end'"),
        ('[{"a": 1}, 2]', "record 1 (counted from 0) cannot be read: '{' expected, not '2'"),
        ('[{"a": 1}, ]', "record 1 (counted from 0) cannot be read: '{' expected, not ']'"),
        ('[{"a": 1}', "record 1 (counted from 0) cannot be read: ',' or ']' expected, not 'the end'"),
        ('[{"a": 1} {"a": 2}]', "',' or ']' expected, not '{'"),
        ('[{"a": 1}, {"a": ', "record 1 (counted from 0) cannot be read: Expecting value"),
        ('[{"a": 1}, {"a: 2}]', "record 1 (counted from 0) cannot be read: Unterminated string starting at"),
        ("\ufeff[", "cannot be read: '[' expected, not '\\ufeff'; is the file complete?"),
        ("[{'a': 1}]", "record 0 (counted from 0) cannot be read: Expecting property name"),
        ('[{"a": 1}] x', "the file continues after the list of 1 records"),
        ('[{"a": 1}][', "the file continues after the list of 1 records"),
        ('[{"a": ' + "[" * 100_000, "record 0 (counted from 0) cannot be read: nested too deeply"),
        ('[{"a": ' + "9" * 10_000 + "}]", "record 0 (counted from 0) cannot be read: Exceeds the limit"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_not_a_list_of_records(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(records(io.BytesIO(text.encode()), FILE))
    assert caught.value.path == FILE and message in caught.value.message


def test_not_utf_8() -> None:
    with pytest.raises(DataError, match="record [01] .* cannot be read: not UTF-8, byte 0xff"):
        list(records(io.BytesIO(b'[{"a": 1}, {"b": "\xff"}]'), FILE))
    with pytest.raises(DataError, match="record 0 .* cannot be read: not UTF-8, byte 0xc3"):
        list(records(io.BytesIO(b'[{"b": "\xc3'), FILE))


def test_endless_record_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cfq, "LONGEST_RECORD", 100_000)
    stream = io.BytesIO(b'[{"a": "' + b"x" * 1_000_000)
    with pytest.raises(DataError, match="record 0 .* cannot be read: Unterminated string"):
        list(records(stream, FILE))


def record(question: object = "q", query: object = "s") -> dict:
    return {"other": 1, KEYS[0]: question, KEYS[1]: query}


TEXTS = JSON | st.text("ab \n\t\u2028\u00a0\ufeff\0", max_size=6)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=2) | JSON, max_size=3))
def test_any_records_are_pairs_of_words_or_an_error(found: list) -> None:
    try:
        pairs = read_pairs(io.BytesIO(json.dumps(found).encode()), FILE)
    except DataError as error:
        assert error.path == FILE and "\n" not in str(error)
        return
    assert len(pairs) == len(found)
    assert all(side and side.isprintable() and " ".join(side.split()) == side for pair in pairs for side in pair)


@given(
    st.binary(max_size=30)
    | (JSON | st.dictionaries(st.sampled_from(PARTS), st.lists(st.integers(-1, 9), max_size=3) | JSON, max_size=3)).map(
        lambda found: json.dumps(found).encode()
    )
)
def test_any_split_file_is_positions_or_an_error(data: bytes) -> None:
    try:
        indices = read_indices(io.BytesIO(data), FILE)
    except DataError as error:
        assert error.path == FILE and "\n" not in str(error)
        return
    numbers = [number for part in PARTS for number in indices[part]]
    assert len(set(numbers)) == len(numbers) and min(numbers, default=0) >= 0
    assert indices == {part: json.loads(data)[part] for part in PARTS}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({KEYS[0]: "q"}, "record 1 (counted from 0) has no text sparqlPatternModEntities"),
        ({KEYS[1]: "q"}, "record 1 (counted from 0) has no text questionPatternModEntities"),
        (record(question=3), "record 1 (counted from 0) has no text questionPatternModEntities"),
        (record(query=None), "record 1 (counted from 0) has no text sparqlPatternModEntities"),
        (record(question=""), "record 1 (counted from 0): questionPatternModEntities does not consist of words: ''"),
        (
            record(query="a\ud800"),
            "record 1 (counted from 0): sparqlPatternModEntities does not consist of words: 'a\\ud800'",
        ),
        (record(query="a\0"), "record 1 (counted from 0): sparqlPatternModEntities does not consist of words"),
        (record(query="a ns:<s> b"), "record 1 (counted from 0): <s> is a special symbol of fairseq and cannot be"),
    ],
    ids=["no-query", "no-question", "number", "null", "empty", "surrogate", "control", "special"],
)
def test_record_without_its_texts(wrong: dict, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_pairs(io.BytesIO(json.dumps([record(), wrong]).encode()), FILE)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "not JSON (nested too deeply)"),
        ("[1]", "trainIdxs is not a list of positions"),
        ('{"trainIdxs": [0], "devIdxs": [1]}', "testIdxs is not a list of positions"),
        ('{"trainIdxs": [0], "devIdxs": 1, "testIdxs": [2]}', "devIdxs is not a list of positions"),
        ('{"trainIdxs": [true], "devIdxs": [1], "testIdxs": [2]}', "trainIdxs is not a list of positions"),
        ('{"trainIdxs": [0], "devIdxs": [-1], "testIdxs": [2]}', "devIdxs is not a list of positions"),
        ('{"trainIdxs": [0, 0], "devIdxs": [1], "testIdxs": [2]}', "trainIdxs has a position twice"),
        ('{"trainIdxs": [0, 1], "devIdxs": [2], "testIdxs": [1]}', "testIdxs has a position twice"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_wrong_split_file(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_indices(io.BytesIO(text.encode("latin-1")), Path("mcd1.json"))
    assert message in caught.value.message


# ---- the archive

PAIRS = [Pair(f"question {number}", f"query {number}") for number in range(6)]
DATA = json.dumps([record(*pair) for pair in PAIRS], indent=1).encode()
SPLIT = json.dumps(dict(zip(PARTS, ([0, 1, 5], [2], [3]), strict=True))).encode()
OTHERS = {"cfq/LICENSE": b"x", "cfq/splits/mcd2.json": b"broken", "cfq/splits/all_divergence_splits/mcd1.json": b"?"}


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("prefix", ["cfq/", "./cfq/"])
@pytest.mark.parametrize("split_first", [True, False])
def test_archive(prefix: str, split_first: bool, tmp_path: Path) -> None:
    members = {f"{prefix}splits/mcd1.json": SPLIT, f"{prefix}dataset.json": DATA}
    ordered = dict(members.items() if split_first else reversed(members.items()))
    path = pack(tmp_path / "cfq.tar.gz", ordered | OTHERS)
    found = CfqFiles(archive=path).read("mcd1")
    assert found.pairs == PAIRS and found.indices == {"trainIdxs": [0, 1, 5], "devIdxs": [2], "testIdxs": [3]}
    folder = tmp_path / "unpacked" / "cfq"
    (folder / "splits").mkdir(parents=True)
    (folder / "dataset.json").write_bytes(DATA)
    (folder / "splits" / "mcd1.json").write_bytes(SPLIT)
    for place in (folder, folder.parent):
        assert CfqFiles(raw_dir=place).read("mcd1") == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cfq.tar.gz", "unpacked"]


@pytest.mark.parametrize("name", ["archive", "raw_dir"])
def test_files_are_read_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hashes come from the same pass as the records."""
    (tmp_path / "splits").mkdir()
    (tmp_path / "dataset.json").write_bytes(DATA)
    (tmp_path / "splits" / "mcd1.json").write_bytes(SPLIT)
    path = pack(tmp_path / "cfq.tar.gz", {"cfq/dataset.json": DATA, "cfq/splits/mcd1.json": SPLIT})
    sources = CfqFiles(**{name: path if name == "archive" else tmp_path})
    opened, opening = [], Path.open

    def watched(path: Path, *arguments: object, **options: object) -> object:
        opened.append(path)
        return opening(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)
    sources.read("mcd1")
    found = CfqOptions("mcd1").request(sources)["source_sha256"]
    files = sources.files("mcd1")
    assert sorted(opened) == sorted(files)
    assert found == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"cfq/splits/mcd1.json": SPLIT}, "has no cfq/dataset.json"),
        ({"cfq/dataset.json": DATA}, "has no cfq/splits/mcd1.json"),
        ({"../cfq/dataset.json": DATA, "cfq/splits/mcd1.json": SPLIT}, "has no cfq/dataset.json"),
        ({"cfq/dataset.json": b"[]", "cfq/splits/mcd1.json": SPLIT}, "cfq/dataset.json: record 0"),
        (
            {"cfq/dataset.json": json.dumps([record()] * 3).encode(), "cfq/splits/mcd1.json": SPLIT},
            "splits/mcd1.json names record 5, but dataset.json ends at 2",
        ),
        ({}, "has no cfq/dataset.json"),
    ],
    ids=["no-data", "no-split", "outside", "empty-list", "too-few", "empty"],
)
def test_wrong_archive(members: dict, message: str, tmp_path: Path) -> None:
    path = pack(tmp_path / "cfq.tar.gz", members)
    with pytest.raises(DataError) as caught:
        CfqFiles(archive=path).read("mcd1")
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("large", ["dataset.json", "splits/mcd1.json"])
def test_a_truncated_archive_is_said_to_be_one(large: str, tmp_path: Path) -> None:
    """It ends within a file, whose content is not to blame."""
    noise = "".join(random.Random(1).choices(string.ascii_lowercase, k=200_000))
    members = {"cfq/splits/mcd1.json": SPLIT, "cfq/dataset.json": DATA}
    members.pop(f"cfq/{large}")
    path = pack(tmp_path / "cfq.tar.gz", {**members, f"cfq/{large}": json.dumps([record("a", noise)]).encode()})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError) as caught:
        CfqFiles(archive=path).read("mcd1")
    assert str(caught.value).startswith(f"{path}: not a complete tar or tar.gz archive")


def test_incomplete_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has neither dataset.json nor cfq/dataset.json: name the unpacked folder"):
        CfqFiles(raw_dir=tmp_path).read("mcd1")
    (tmp_path / "dataset.json").write_bytes(b"never read")
    with pytest.raises(DataError, match="has no splits/mcd1.json"):
        CfqFiles(raw_dir=tmp_path).read("mcd1")


def test_memory_is_bounded(large_archive, little_memory) -> None:
    filled = record() | {"filling": [{"a": "x" * 100}] * 100}
    indices = json.dumps(dict.fromkeys(PARTS, [])).encode()
    files = {"cfq/dataset.json": json.dumps([filled] * 1_000).encode(), "cfq/splits/mcd1.json": indices}
    path = large_archive({"cfq/other.json": 8 << 20, **files})
    with little_memory(8 << 20):  # 12 MB of records
        content = CfqFiles(archive=path).read("mcd1")
    assert len(content.pairs) == 1_000 and content.files[0]["bytes"] == len(files["cfq/dataset.json"])

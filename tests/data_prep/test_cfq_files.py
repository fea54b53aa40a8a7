"""Reading the files of CFQ: record by record, from a folder or the archive, with all kinds of errors."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import cfq_files
from data_prep.cfq import query_words, question_words
from data_prep.cfq_files import (
    KEYS,
    PARTS,
    Content,
    Window,
    read_archive,
    read_folder,
    read_indices,
    read_pairs,
    records,
)
from data_prep.dataset import DataError, Pair

FILE = Path("cfq/dataset.json")
PLAIN = (str, str)  # tokenizes nothing


def blocks(data: bytes, size: int = 7) -> Iterator[bytes]:
    """The data in blocks so small that they end within records, words and characters."""
    return (data[start : start + size] for start in range(0, len(data), size))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=4)


@given(RECORDS, st.integers(1, 50), st.sampled_from([None, 0, 2]), st.booleans())
def test_records_are_those_of_the_whole_file(found: list, size: int, indent: int | None, ascii_only: bool) -> None:
    data = json.dumps(found, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return  # a lone surrogate, invalid in UTF-8
    assert list(records(blocks(data + b"\n", size), FILE)) == found


def test_layout_of_the_official_file() -> None:
    text = '[{\n "complexityMeasures": {"a": 1},\n "question": "x"\n},{\n "complexityMeasures": {"a": 2}\n}]\n'
    assert [record["complexityMeasures"]["a"] for record in records(blocks(text.encode()), FILE)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON list: '[' expected at the beginning"),
        ("  \n", "not a JSON list"),
        ('{"a": 1}', "not a JSON list"),
        ("[]", "record 0 (counted from 0) cannot be read: '{' expected, not ']'"),
        ("[", "record 0 (counted from 0) cannot be read: '{' expected, not 'the end'"),
        ('[{"a": 1}, 2]', "record 1 (counted from 0) cannot be read: '{' expected, not '2'"),
        ('[{"a": 1}, ]', "record 1 (counted from 0) cannot be read: '{' expected, not ']'"),
        ('[{"a": 1}', "record 1 (counted from 0) cannot be read: ',' or ']' expected before it, not 'the end'"),
        ('[{"a": 1} {"a": 2}]', "',' or ']' expected before it, not '{'"),
        ('[{"a": 1}, {"a": ', "record 1 (counted from 0) cannot be read: Expecting value"),
        ('[{"a": 1}, {"a: 2}]', "record 1 (counted from 0) cannot be read: Unterminated string"),
        ("[{'a': 1}]", "record 0 (counted from 0) cannot be read: Expecting property name"),
        ('[{"a": 1}] x', "continues after the list of 1 records"),
        ('[{"a": 1}][', "continues after the list of 1 records"),
        ('[{"a": ' + "[" * 100_000, "record 0 (counted from 0) cannot be read: nested too deeply"),
        ('[{"a": ' + "9" * 10_000 + "}]", "record 0 (counted from 0) cannot be read: Exceeds the limit"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_not_a_list_of_records(text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        list(records(blocks(text.encode(), 1 << 16), FILE))
    assert caught.value.path == FILE and message in caught.value.message


def test_not_utf_8() -> None:
    with pytest.raises(DataError, match="record 1 .* cannot be read: not UTF-8, byte 0xff"):
        list(records(blocks(b'[{"a": 1}, {"b": "\xff"}]'), FILE))
    with pytest.raises(DataError, match="record 0 .* cannot be read: not UTF-8, byte 0xc3"):
        list(records(blocks(b'[{"b": "\xc3'), FILE))


@given(st.binary(max_size=60) | st.text(alphabet='[]{},:"a1 \\n', max_size=40).map(str.encode), st.integers(1, 9))
def test_anything_is_records_or_an_error(data: bytes, size: int) -> None:
    try:
        assert list(records(blocks(data, size), FILE)) == json.loads(data)
    except DataError as error:
        assert error.path == FILE and "\n" not in str(error)


def test_only_a_part_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    more = Window.more

    def watched(window: Window) -> bool:
        found = more(window)
        sizes.append(len(window.text))
        return found

    monkeypatch.setattr(Window, "more", watched)
    data = json.dumps([{"a": "x" * 100}] * 5_000).encode()
    assert len(list(records(blocks(data, 1_000), FILE))) == 5_000
    assert len(sizes) > 500 and max(sizes) < 1_000 + 200


def test_memory_is_bounded(large_archive, little_memory) -> None:
    """Only two short texts of each 12 kB record are kept."""
    filled = {"ruleTree": random.Random(1).randbytes(6_000).hex(), **record()}
    files = {"cfq/dataset.json": json.dumps([filled] * 1_000).encode(), "cfq/splits/mcd1.json": split_file()}
    path = large_archive({"cfq/other.json": 8 << 20, **files})
    with little_memory(8 << 20):  # 12 MB of records, in blocks of one that are decoded and joined
        content = read_archive(path, "mcd1", PLAIN)
    assert len(content.pairs) == 1_000 and content.files[0]["bytes"] == len(files["cfq/dataset.json"])


def split_file() -> bytes:
    return json.dumps(dict.fromkeys(PARTS, [])).encode()


def test_endless_record_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cfq_files, "LONGEST_RECORD", 10_000)
    rest = blocks(b'[{"a": "' + b"x" * 1_000_000, 1_000)
    with pytest.raises(DataError, match="record 0 .* cannot be read: Unterminated string"):
        list(records(rest, FILE))
    assert len(list(rest)) > 900


def record(question: object = "q", query: object = "s") -> dict:
    return {"other": 1, KEYS[0]: question, KEYS[1]: query}


TEXTS = JSON | st.text("ab \n\t\u2028\u00a0\ufeff\0", max_size=6)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), TEXTS, max_size=2) | JSON, max_size=3))
def test_any_records_are_pairs_of_words_or_an_error(found: list) -> None:
    try:
        pairs = read_pairs(blocks(json.dumps(found).encode()), FILE, (question_words, query_words))
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
        indices = read_indices(blocks(data), FILE)
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
    ],
    ids=["no-query", "no-question", "number", "null", "empty", "surrogate", "control"],
)
def test_record_without_its_texts(wrong: dict, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_pairs(blocks(json.dumps([record(), wrong]).encode()), FILE, PLAIN)
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
        read_indices(blocks(text.encode("latin-1")), Path("mcd1.json"))
    assert message in caught.value.message


# ---- the archive

PAIRS = [Pair(f"question {number}", f"query {number}") for number in range(6)]
DATASET = json.dumps([record(*pair) for pair in PAIRS], indent=1).encode()
SPLIT = json.dumps(dict(zip(PARTS, ([0, 1, 5], [2], [3]), strict=True))).encode()


def pack(path: Path, members: dict[str, bytes | None]) -> Path:
    """Makes a tar.gz archive; a member without content is a link that leads out of it."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, "../../etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def read(path: Path) -> Content:
    return read_archive(path, "mcd1", PLAIN)


OTHERS = {"cfq/LICENSE": b"x", "cfq/splits/mcd2.json": b"broken", "cfq/splits/all_divergence_splits/mcd1.json": b"?"}


@pytest.mark.parametrize("prefix", ["cfq/", "./cfq/", ""])
@pytest.mark.parametrize("split_first", [True, False])
def test_archive(prefix: str, split_first: bool, tmp_path: Path) -> None:
    members = {f"{prefix}splits/mcd1.json": SPLIT, f"{prefix}dataset.json": DATASET}
    ordered = dict(members.items() if split_first else reversed(members.items()))
    found = read(pack(tmp_path / "cfq.tar.gz", ordered | OTHERS))
    assert found.pairs == PAIRS and found.indices == {"trainIdxs": [0, 1, 5], "devIdxs": [2], "testIdxs": [3]}
    folder = tmp_path / "unpacked" / "cfq"
    (folder / "splits").mkdir(parents=True)
    (folder / "dataset.json").write_bytes(DATASET)
    (folder / "splits" / "mcd1.json").write_bytes(SPLIT)
    for place in (folder, folder.parent):
        assert read_folder(place, "mcd1", PLAIN) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cfq.tar.gz", "unpacked"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"cfq/splits/mcd1.json": SPLIT}, "has no cfq/dataset.json"),
        ({"cfq/dataset.json": DATASET}, "has no cfq/splits/mcd1.json"),
        ({"cfq/dataset.json": None, "cfq/splits/mcd1.json": SPLIT}, "refused: 'cfq/dataset.json' is a symbolic link"),
        ({"cfq/dataset.json": DATASET, "cfq/splits/mcd1.json": None}, "is a symbolic link"),
        ({"../cfq/dataset.json": DATASET, "cfq/splits/mcd1.json": SPLIT}, "leads out of the archive"),
        ({"/cfq/dataset.json": DATASET, "cfq/splits/mcd1.json": SPLIT}, "leads out of the archive"),
        ({"cfq/dataset.json": b"[]", "cfq/splits/mcd1.json": SPLIT}, "cfq/dataset.json: record 0"),
        (
            {"cfq/dataset.json": json.dumps([record()] * 3).encode(), "cfq/splits/mcd1.json": SPLIT},
            "splits/mcd1.json names record 5, but dataset.json ends at 2",
        ),
        ({}, "has no cfq/dataset.json"),
    ],
    ids=["no-data", "no-split", "link-data", "link-split", "outside", "absolute", "empty-list", "too-few", "empty"],
)
def test_wrong_archive(members: dict, message: str, tmp_path: Path) -> None:
    path = pack(tmp_path / "cfq.tar.gz", members)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-9],
        lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
        lambda data: data[:60] + b"\0" * 20 + data[80:],
        lambda data: b"",
        lambda data: b"no archive",
        lambda data: gzip.compress(b"no archive" * 100),
        lambda data: gzip.compress(gzip.decompress(data)[:1_300]),
    ],
    ids=["half", "end", "checksum", "damaged", "nothing", "other", "no-tar", "cut-inside"],
)
def test_broken_archive(spoil, tmp_path: Path) -> None:
    path = pack(tmp_path / "cfq.tar.gz", {"cfq/dataset.json": DATASET, "cfq/splits/mcd1.json": SPLIT})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


def test_incomplete_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has neither dataset.json nor cfq/dataset.json: name the unpacked folder"):
        read_folder(tmp_path, "mcd1", PLAIN)
    (tmp_path / "dataset.json").write_bytes(b"never read")
    with pytest.raises(DataError, match="has no splits/mcd1.json"):
        read_folder(tmp_path, "mcd1", PLAIN)

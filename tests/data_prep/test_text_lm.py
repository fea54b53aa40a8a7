"""Text for language modelling: fairseq reads back the exact text; shares, measures and errors."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from hypothesis import given
from hypothesis import strategies as st

from data_prep import text_corpus, text_lm
from data_prep.dataset import DataError
from data_prep.subwords import SPACE
from data_prep.text_corpus import ENTRY, Span, copy
from data_prep.text_lm import divide, lines_in, whole
from helpers.data_files import manifest

TEXT = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
SUBSETS = ("train", "valid", "test")
PINNED = "f0fe5ddc564af320cb4a0b9af9960a7375aaeaefeb3d6a70a5cd2f91b2013681"


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes bytes to a file in a separate folder."""
    folder = tmp_path_factory.mktemp("text")

    def write(data: bytes, name: str = "text") -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


SAMPLE = "".join(
    f" = Züge {n} = \n\n  the <unk> of {n % 7} @-@ {n * n}\ttrains 汉{chr(0x4E00 + n % 50)} .\n" for n in range(400)
)


def raw(folder: Path, subset: str) -> bytes:
    return (folder / "raw" / f"{subset}.txt").read_bytes()


def blocks_of(folder: Path, subset: str, length: int) -> tuple[Dictionary, list[dict]]:
    """The training examples that fairseq's task makes from a subset."""
    config = LanguageModelingConfig(
        data=str(folder), sample_break_mode="none", tokens_per_sample=length, dataset_impl="mmap", use_plasma_view=False
    )
    task = LanguageModelingTask.setup_task(config)
    task.load_dataset(subset)
    examples = task.datasets[subset]
    return task.dictionary, [examples[index] for index in range(len(examples))]


def decoded(dictionary: Dictionary, tokens: numpy.ndarray) -> bytes:
    """The text of tokens: bytes as ``<0x41>``, the end symbol for a line end, and subwords."""
    parts = []
    for token in tokens:
        symbol = "\n" if token == dictionary.eos() else dictionary[token]
        is_byte = symbol.startswith("<0x") and len(symbol) == 6
        parts.append(bytes([int(symbol[3:5], 16)]) if is_byte else symbol.encode("utf-8"))
    return b"".join(parts)


# ---- bytes


def test_bytes_are_the_text(run, text, tmp_path: Path) -> None:
    """All 256 bytes, in all subsets, in blocks that cut across our entries."""
    data = TEXT.read_bytes() + bytes(range(256)) * 30
    out = tmp_path / "out"
    result = run("text", "--unit", "bytes", "--input", text(data), "--out", out)
    assert result.code == 0 and result.err == "" and "--task sg_language_modeling" in result.out
    assert "--memory-length 512 --eval-memory-length 2048" in result.out
    share = len(data) // 20
    ends = {"train": (0, len(data) - 2 * share), "valid": (-2 * share, -share), "test": (-share, len(data))}
    for subset in SUBSETS:
        part = data[slice(*ends[subset])]
        assert raw(out, subset) == part
        dictionary, examples = blocks_of(out, subset, 100)
        assert decoded(dictionary, numpy.concatenate([example["target"] for example in examples])) == part
        assert [len(example["target"]) for example in examples[:-1]] == [100] * (
            len(part) // 100 - (len(part) % 100 == 0)
        )
        assert manifest(out)["subsets"][subset]["tokens"] == len(part)
    assert examples[0]["source"][0] == dictionary.eos() and list(examples[1]["source"][:1]) == [
        examples[0]["target"][-1]
    ]
    assert [dictionary.index(f"<0x{byte:02X}>") for byte in range(256)] == list(range(4, 260)) and len(
        dictionary
    ) == 260


def test_files_of_repeated_options_are_joined(run, text, tmp_path: Path) -> None:
    content = {name: f"{name}\n".encode() * 40 for name in "abcdef"}
    files = {name: text(data, name) for name, data in content.items()}
    arguments = ["--input", files["a"], files["b"], "--input", files["c"], "--test-input", files["f"]]
    arguments += ["--valid-input", files["d"], "--valid-input", files["e"]]
    result = run("text", "--unit", "bytes", *arguments, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    for subset, names in (("train", "abc"), ("valid", "de"), ("test", "f")):
        assert raw(tmp_path / "out", subset) == b"".join(content[name] for name in names)


def test_entries_are_small(run, text, tmp_path: Path) -> None:
    """fairseq reads whole entries for every block."""
    assert run("text", "--unit", "bytes", "--input", text(bytes(20 * ENTRY)), "--out", tmp_path / "out").code == 0
    entries = data_utils.load_indexed_dataset(str(tmp_path / "out" / "train"))
    assert entries.sizes.tolist() == [ENTRY] * 18 and entries._index.dtype == numpy.uint16


def test_bytes_are_pinned(run, text, tmp_path: Path) -> None:
    assert run("text", "--unit", "bytes", "--input", text(SAMPLE.encode("utf-8")), "--out", tmp_path / "out").code == 0
    digest = hashlib.sha256()
    for path in sorted((tmp_path / "out").glob("*.*")):
        if path.name != "dataset.json":
            digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == PINNED


def test_enwik8(run, text, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file with the size and the hash of Enwik8 is split at 90 and 95 percent, and recorded as Enwik8."""
    data = SAMPLE.encode("utf-8")[:10_000]
    monkeypatch.setattr(text_lm, "ENWIK8_SIZE", 10_000)
    command = ["text", "--unit", "bytes", "--input", text(data)]
    assert "the published ones" not in run(*command, "--raw-only", "--out", tmp_path / "another").out
    monkeypatch.setattr(text_lm, "ENWIK8_SHA1", hashlib.sha1(data, usedforsecurity=False).hexdigest())
    assert "text: the published ones of Enwik8" in run(*command, "--raw-only", "--out", tmp_path / "out").out
    parts = [raw(tmp_path / "out", subset) for subset in SUBSETS]
    assert parts == [data[:9_000], data[9_000:9_500], data[9_500:]]
    other = run(*command, "--valid-share", "0.1", "--raw-only", "--out", tmp_path / "other")
    assert other.code == 0 and "the published ones" not in other.out


# ---- subwords


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_subwords_are_the_text(run, text, kind: str, tmp_path: Path) -> None:
    """Also repeated spaces, empty lines, tabs, ``<unk>`` and letters too rare to be pieces."""
    out = tmp_path / "out"
    command = ["text", "--unit", "sentencepiece", "--model", kind, "--vocab-size", 420, "--out", out]
    result = run(*command, "--input", text(SAMPLE.encode("utf-8")))
    assert result.code == 0 and result.err == ""
    assert b"".join(raw(out, subset) for subset in SUBSETS) == SAMPLE.encode("utf-8")
    for subset in SUBSETS:
        dictionary, examples = blocks_of(out, subset, 64)
        tokens = numpy.concatenate([example["target"] for example in examples])
        assert dictionary.unk() not in tokens and len(dictionary) == 4 + 419
        lines = decoded(dictionary, tokens).decode("utf-8").replace(SPACE, " ").splitlines(keepends=True)
        restored = "".join(line.removeprefix(" ") for line in lines)
        assert restored.encode("utf-8") == raw(out, subset)
        measured = manifest(out)["subsets"][subset]
        assert measured["tokens"] == len(tokens) < measured["bytes"]
        assert measured["lines"] == (tokens == dictionary.eos()).sum()


def test_without_held_out_text(run, text, tmp_path: Path) -> None:
    options = ["--input", text(b"a\n" * 99), "--valid-share", 0, "--test-share", 0, "--raw-only"]
    result = run("text", "--unit", "bytes", *options, "--out", tmp_path / "out")
    assert result.code == 0 and "there is no held-out text" in result.out and "of their own" not in result.out


def test_files_of_their_own(run, text, tmp_path: Path) -> None:
    """The protocol of WikiText-103; the model knows only the text of train."""
    files = {subset: text(f"{subset} {subset}\n\n".encode() * 50, subset) for subset in SUBSETS}
    options = ["--input", files["train"], "--valid-input", files["valid"], "--test-input", files["test"], files["test"]]
    command = ["text", "--unit", "sentencepiece", "--vocab-size", 264, "--out", tmp_path / "out"]
    result = run(*command, *options)
    assert result.code == 0 and "the subsets are files of their own" in result.out
    assert raw(tmp_path / "out", "test") == files["test"].read_bytes() * 2
    symbols = {line.split(" ")[0] for line in (tmp_path / "out" / "dict.txt").read_text("utf-8").splitlines()}
    assert {"t", "n"} <= symbols and not {"v", "d", "e"} & {letter for s in symbols for letter in s if s[:3] != "<0x"}
    assert (tmp_path / "out" / "spm.model").stat().st_size


@pytest.mark.parametrize("end", [b"\n", b""], ids=["newline", "none"])
@pytest.mark.parametrize(("most", "step"), [(50, 2), (51, 2), (99, 2), (100, 1)])
def test_some_lines_to_learn_from(run, text, most: int, step: int, end: bytes, tmp_path: Path) -> None:
    """Of 100 lines. With fewer to learn from, every second one is used; here those have all the letters x."""
    data = b"xxx xx\nyyy yy\n" * 49 + b"xxx xx\nyyy yy" + end
    options = ["--valid-share", "0", "--test-share", "0", "--model-lines", most, "--vocab-size", 260]
    command = ["text", "--unit", "sentencepiece", "--input", text(data), *options, "--out", tmp_path / "out"]
    result = run(*command)
    assert result.code == 0 and "--disable-validation" in result.out
    symbols = (tmp_path / "out" / "dict.txt").read_text("utf-8")
    assert "x " in symbols and ("y" in symbols) == (step == 1)


# ---- shares and measures


@given(
    st.lists(st.binary(max_size=20), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["valid", "test"]), st.sampled_from([0.05, 0.1, 0.25, 0.4])),
    st.booleans(),
)
def test_shares_are_the_text_once(tmp_path_factory, contents: list[bytes], shares: dict, lines: bool) -> None:
    """Of files, and of parts of files."""
    folder = tmp_path_factory.mktemp("parts")
    for index, content in enumerate(contents):
        (folder / str(index)).write_bytes(b"\n" * index + content)
    spans = [whole(folder / str(index))._replace(start=index) for index in range(len(contents))]
    found = divide(spans, shares, lines)
    total = b"".join(contents)
    parts = {name: b"".join(s.path.read_bytes()[s.start : s.end] for s in spans) for name, spans in found.items()}
    assert b"".join(parts.values()) == total
    assert list(parts) == ["train", *(name for name in ("valid", "test") if name in shares)]
    position = 0
    for name, part in parts.items():
        if lines and 0 < position < len(total):
            assert total[position - 1 : position] == b"\n"
        elif not lines and name != "train":
            assert len(part) == int(shares[name] * 100 + 0.5) * len(total) // 100
        position += len(part)


@pytest.mark.parametrize(
    ("content", "cut"), [(b"ab\n" * 20, 30), (b"ab\n" * 21, 33), (b"abcd\n" * 7, 20), (b"a" * 9, 9)]
)
def test_cut_at_the_next_beginning_of_a_line(text, content: bytes, cut: int) -> None:
    """Half of the text is test; a cut at the beginning of a line does not move."""
    spans = divide([whole(text(content))], {"test": 0.5}, lines=True)
    assert spans["train"][0][1:] == (0, cut)


@given(st.binary(max_size=40) | st.text(" \nabé汉", max_size=30).map(str.encode), st.integers(1, 7))
def test_measures(tmp_path_factory, data: bytes, size: int) -> None:
    """For any block size of reading."""
    folder = tmp_path_factory.mktemp("measures")
    (folder / "text").write_bytes(data)
    with mock.patch.object(text_corpus, "BLOCK", size):
        found = copy([Span(folder / "text", 0, len(data))], folder / "copy")
        if b"\0" not in data:
            try:
                lines = list(lines_in([Span(folder / "text", 0, len(data))]))
                assert lines == data.decode("utf-8").removesuffix("\n").split("\n") if data else lines == []
            except UnicodeDecodeError:
                pass
    try:
        characters = len(data.decode("utf-8"))
    except UnicodeDecodeError:
        characters = None
    assert (folder / "copy").read_bytes() == data
    lines = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert found == {"bytes": len(data), "characters": characters, "words": len(data.split()), "lines": lines}


@given(st.text(" \nabé汉😀", min_size=1, max_size=30), st.integers(0, 100), st.integers(1, 7))
def test_a_cut_inside_a_character(tmp_path_factory, text: str, cut: int, size: int) -> None:
    """It counts once, where it begins."""
    folder, data = tmp_path_factory.mktemp("cut"), text.encode()
    (folder / "text").write_bytes(data)
    cut %= len(data) + 1
    with mock.patch.object(text_corpus, "BLOCK", size):
        parts = (Span(folder / "text", 0, cut), Span(folder / "text", cut, len(data)))
        first, second = (copy([span], folder / "copy")["characters"] for span in parts)
    begun = len(data[:cut].decode(errors="ignore"))
    if data[:cut].decode(errors="ignore").encode() != data[:cut]:
        begun += 1
    assert (first, second) == (begun, len(text) - begun)


def test_same_request_same_folder(run, text, tmp_path: Path) -> None:
    path = text(SAMPLE.encode("utf-8"))
    command = ["text", "--unit", "sentencepiece", "--vocab-size", 420, "--input", path, "--out"]
    assert run(*command, tmp_path / "one").code == run(*command, tmp_path / "two").code == 0
    for one in (tmp_path / "one").rglob("*.*"):
        assert one.read_bytes() == (tmp_path / "two" / one.relative_to(tmp_path / "one")).read_bytes()
    assert run(*command, tmp_path / "one").out.startswith("already prepared")
    path.write_bytes(b"another text\n" * 1000)
    assert "exists, but files is" in run(*command, tmp_path / "one").err


@pytest.mark.parametrize(
    ("data", "options", "code", "message"),
    [
        (b"a\n" * 99, ["--vocab-size", "300"], 2, "--vocab-size is for subwords, and --unit bytes has none"),
        (b"a\n" * 99, ["--model", "bpe"], 2, "--model is for subwords"),
        (b"a\n" * 99, ["--model-lines", "0"], 2, "must be a whole number from 1 to 999999999, not '0'"),
        (b"a\n" * 99, ["--valid-share", "0.5", "--test-share", "0.5"], 2, "leave nothing to train on"),
        (b"a\n" * 99, ["--valid-share", "0.5", "--valid-input", "FILE"], 2, "--valid-share and --valid-input both"),
        (b"a\n" * 99, ["--valid-input", "FILE"], 1, "--valid-input has the same text as --input"),
        (b"a\n" * 99, ["--input", "FILE", "FILE"], 1, "--input is given twice"),
        (b"a\n", [], 1, "subset valid is empty"),
        (b"", [], 1, "text: --input is empty: give another file, or leave it out"),
        (gzip.compress(b"a\n" * 99, mtime=0), [], 1, "--input is packed (gzip): unpack it, and name the unpacked file"),
        (lzma.compress(b"a\n"), ["--unit", "sentencepiece"], 1, "--input is packed (xz)"),
        (bz2.compress(b"a\n"), [], 1, "--input is packed (bzip2)"),
        (b"a\n" * 99, ["--test-input", "nowhere"], 1, "nowhere: --test-input is not a file: nothing has this name"),
        (b"a\n" * 99, ["--input", "."], 1, ".: --input is not a file: it is a folder; name a file in it"),
        (b"a\n" * 99, ["--input", "/dev/null"], 1, "/dev/null: --input is not a file: it is a pipe or a device; save"),
        (
            b"a\nb\xff\n",
            ["--unit", "sentencepiece"],
            1,
            ":2: not UTF-8: byte 0xff at position 2; save the file as UTF-8, or use --unit bytes, which accepts any",
        ),
        (b"\xef\xbb\xbfa\n", ["--unit", "sentencepiece"], 1, ":1: starts with a byte order mark"),
        (b"a\nb\r\n", ["--unit", "sentencepiece"], 1, ":2: has a carriage return"),
        (b"a\nb", ["--unit", "sentencepiece", "--input", "OTHER"], 1, "does not end with a newline"),
        (b"a b\n" * 99, ["--unit", "sentencepiece"], 2, "--vocab-size 8000 is too large"),
        (b"a b\n" * 99, ["--unit", "sentencepiece", "--vocab-size", "9"], 2, "--vocab-size 9 is too small"),
        (b"\n" * 99, ["--unit", "sentencepiece"], 1, "there is no text to learn subwords from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(run, text, data: bytes, options: list[str], code: int, message: str, tmp_path: Path) -> None:
    path = text(data)
    files = {"FILE": path, "OTHER": text(b"another\n", "other")}
    options = [files.get(option, option) for option in options]
    result = run("text", "--unit", "bytes", "--input", path, *options, "--out", tmp_path / "out")
    assert result.code == code and message in result.err and result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


PARTS = ["word two\n", "\n", " ", "\r\n", "\r", "\ufeff", "\u2028", "\x85", "é", "汉"]


@given(st.lists(st.sampled_from(PARTS).map(str.encode) | st.binary(max_size=3), max_size=8).map(b"".join))
def test_any_file_is_lines_or_an_error_with_its_line(tmp_path_factory, data: bytes) -> None:
    """With subwords; U+2028 and the like are letters, and only a newline ends a line."""
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(data)
    raw_lines = data.removesuffix(b"\n").split(b"\n") if data else []
    try:
        text_lm.check_lines([path])
    except DataError as error:
        assert error.path == path and "\n" not in str(error)
        line = raw_lines[error.line - 1]
        assert line.startswith(b"\xef\xbb\xbf") or b"\r" in line or line.decode("utf-8", "replace").count("\ufffd")
        return
    assert b"\r" not in data and not data.startswith(b"\xef\xbb\xbf")
    assert [line.encode("utf-8") for line in lines_in([whole(path)])] == raw_lines


def test_subword_that_is_a_symbol_of_fairseq() -> None:
    unit = SimpleNamespace(symbols=["a", "<pad>"])
    corpus = text_corpus.TextCorpus({"train": [Span(TEXT, 0, 1)]}, unit, "", "", {})
    with pytest.raises(DataError, match="<pad> is a special symbol of fairseq"):
        corpus.check()


def test_file_that_becomes_shorter(text, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has changed while it was read"):
        copy([Span(text(b"abc"), 0, 4)], tmp_path / "copy")


def test_file_that_changes_while_it_is_read(run, text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the same size: its hash is not that of the copied text."""
    path = text(SAMPLE.encode())

    def change_and_divide(*arguments):
        path.write_bytes(path.read_bytes()[::-1])
        return divide(*arguments)

    monkeypatch.setattr(text_lm, "divide", change_and_divide)
    result = run("text", "--unit", "bytes", "--input", path, "--raw-only", "--out", tmp_path / "out")
    assert result == (1, "", f"error: {path}: has changed while it was read: start again\n")
    assert not (tmp_path / "out").exists()

"""Parallel corpora: reading of text, and the output and errors of ``python -m data_prep parallel``."""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep.binarize import SPECIALS
from data_prep.dataset import DataError, Pair
from data_prep.draws import draw
from data_prep.parallel import (
    ENTITIES,
    ParallelOptions,
    Split,
    TranslationOptions,
    clean,
    decode,
    pair_up,
    split_by_length,
)
from data_prep.subwords import SPACE, Subwords
from fairseq_sg.scoring.plain_bleu import to_text
from helpers.data_files import lines_of, manifest

SRC, TGT = Path("folder/a.src"), Path("folder/a.tgt")
PINNED = "bc740ea9739d959d5294be9944a94c7c1a395f2ab2d67e962ec6b9e91180db33"

# ---- reading


@given(st.binary(max_size=60), st.binary(max_size=60), st.booleans())
def test_anything_is_pairs_or_an_error(source: bytes, target: bytes, may_be_empty: bool) -> None:
    try:
        pairs, empty = pair_up(SRC, source, TGT, target, unescape=True, may_be_empty=may_be_empty)
    except DataError as error:
        assert error.path in (SRC, TGT) and "\n" not in str(error)
        return
    lines = source.removesuffix(b"\n").count(b"\n") + 1
    assert len(pairs) + empty == lines == target.removesuffix(b"\n").count(b"\n") + 1
    assert may_be_empty or not empty
    assert all(side and " ".join(side.split()) == side for pair in pairs for side in pair)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n")), min_size=1))
def test_only_newlines_end_lines(lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    if not text.startswith("\ufeff"):
        assert decode(SRC, text.encode("utf-8")) == lines


@given(st.text())
def test_clean_text_is_left_as_it_is(line: str) -> None:
    assert clean(clean(line, unescape=False), unescape=False) == clean(line, unescape=False)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("life &apos;s work", "life 's work"),
        ("&quot; Q &amp; A &quot; &#91; 1 &#93; &#124; &lt; &gt; &bra; &ket; &bar;", '" Q & A " [ 1 ] | < > [ ] |'),
        ("&amp;lt; is not &amp;amp;lt;", "&lt; is not &amp;lt;"),
        ("&eacute; &APOS; &; & apos;", "&eacute; &APOS; &; & apos;"),
        (f" two  words\t\u00a0\r{SPACE}\u2028more ", "two words more"),
    ],
)
def test_unescape_and_clean(line: str, expected: str) -> None:
    assert clean(line, unescape=True) == expected
    if "&" in line:
        assert clean(line, unescape=False) == line


def test_entities() -> None:
    assert sorted(ENTITIES.values()) == sorted("&<>\"'[[]]||")


@pytest.mark.parametrize(
    ("source", "target", "path", "line", "message"),
    [
        (b"a\n\xff\nb\n", b"a\nb\nc\n", SRC, 2, "not UTF-8: byte 0xff"),
        (b"a\nb\n", b"\xef\xbb\xbfa\nb\n", TGT, 1, "starts with a byte order mark"),
        (b"a\nb\n", b"a\n", TGT, None, "1 lines, but a.src has 2"),
        (b"a\n \t\nc\n", b"a\nb\nc\n", SRC, 2, "empty line"),
        (b"a\nb\nc", b"a\nb\n\xe2\x96\x81", TGT, 3, "empty line"),
        (b"", b"", SRC, None, "the file is empty"),
        (b"a\nb\n", b"", TGT, None, "the file is empty"),
        (b"", b"a\nb\n", SRC, None, "the file is empty"),
    ],
)
def test_wrong_files(source: bytes, target: bytes, path: Path, line: int | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        pair_up(SRC, source, TGT, target, unescape=False)
    assert (caught.value.path, caught.value.line) == (path, line) and message in caught.value.message


def test_empty_sides_of_training() -> None:
    pairs, empty = pair_up(SRC, b"a\n\nc\nd\n", TGT, b"A\nB\n \nD\n", unescape=False, may_be_empty=True)
    assert (pairs, empty) == ([Pair("a", "A"), Pair("d", "D")], 2)


def test_draw() -> None:
    """Subsets are disjoint and in order, without repeated sources."""
    pairs = [Pair(source, str(number)) for number, source in enumerate("abcdefghijklmnopqrstabcde")]
    train, drawn = draw(pairs, {"valid": 0.2, "test": 0.4}, seed=3)
    parts = [train, drawn["valid"], drawn["test"]]
    assert [len(part) for part in parts] == [25 - 3 - 6, 3, 6] and all(
        part == sorted(part, key=pairs.index) for part in parts
    )
    assert sorted(train + drawn["valid"] + drawn["test"]) == sorted(pairs)
    assert all(pair.source > "e" for pair in drawn["valid"] + drawn["test"])


# ---- the command


def sentences(number: int, seed: int, least: int = 1) -> list[str]:
    """Sentences of 1 to 12 words, all different if there are enough words."""
    random = RandomState(seed)
    words = [f"{a}{b}{c}" for a in "bdgk" for b in "aeiou" for c in ("", "n", "st")]
    return [" ".join(words[i] for i in random.randint(0, 60, random.randint(least, 13))) for _ in range(number)]


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes lines to a file in a separate folder."""
    folder = tmp_path_factory.mktemp("text")

    def write(name: str, lines: list[str]) -> Path:
        (folder / name).write_text("".join(line + "\n" for line in lines), "utf-8")
        return folder / name

    return write


@pytest.fixture
def files(text: Callable[..., Path]) -> list[object]:
    """The options for a training and a test corpus; a target is its source in capitals."""
    train, test = sentences(300, 1, least=3), ["☃ ban", *sentences(60, 2, least=3)]
    train[7:10] = ["", test[5], test[6]]
    parts = {"src": train, "tgt": [line.upper() or "EMPTY" for line in train]}
    parts |= {"test-src": test, "test-tgt": [line.upper() for line in test]}
    return [argument for name, lines in parts.items() for argument in (f"--{name}", text(name, lines))]


def plain(folder: Path, subset: str) -> list[Pair]:
    return [Pair(*pair) for pair in zip(*(lines_of(folder, f"{subset}.plain.{end}") for end in ("src", "tgt")))]


@pytest.mark.parametrize("joint", ["--joint", "--separate"])
def test_length_split(run, files: list[object], joint: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("parallel", *files, "--max-length", 8, "--model", "bpe", "--vocab-size", 90, joint, "--out", out)
    assert result.code == 0 and result.err == ""
    subsets = {name: plain(out, name) for name in ("train", "valid", "test", "gen", "dev")}
    check_lengths(subsets, 8)
    check_pairs(subsets, files, manifest(out)["origin"]["left_out_of_train"])
    check_pieces(out, subsets, joint == "--joint")
    assert "1 with an empty side, 2 whose source is in another subset" in result.out


def check_lengths(subsets: dict[str, list[Pair]], limit: int) -> None:
    for name, pairs in subsets.items():
        lengths = [len(pair.source.split()) for pair in pairs]
        assert min(lengths) > limit if name in ("gen", "dev") else max(lengths) == limit, name


def check_pairs(subsets: dict[str, list[Pair]], files: list[object], left_out: dict[str, int]) -> None:
    """Every pair of the files is in one subset, except those omitted from train."""
    paths = dict(zip(files[::2], files[1::2], strict=True))
    train, test = (set(paths[name].read_text("utf-8").splitlines()) for name in ("--src", "--test-src"))
    found = {name: {pair.source for pair in pairs} for name, pairs in subsets.items()}
    assert found["test"] | found["gen"] == test and found["test"].isdisjoint(found["gen"])
    assert all(pair.target == pair.source.upper() for pairs in subsets.values() for pair in pairs)
    drawn = found["valid"] | found["dev"]
    assert len(drawn) == int(0.05 * 297) and found["train"].isdisjoint(drawn | test)
    long = {line for line in train if len(line.split()) > 8} - test - drawn
    assert found["train"] | drawn | long == train - {""} - test
    assert left_out == {
        "with an empty side": 1,
        "whose source is in another subset": 2,
        "with more than 8 words": len(long),
    }


def check_pieces(out: Path, subsets: dict[str, list[Pair]], joint: bool) -> None:
    """Joined pieces give the text, the models know only letters of train, and the binaries agree."""
    names = {"src": "spm.model", "tgt": "spm.model"} if joint else {end: f"spm.{end}.model" for end in ("src", "tgt")}
    assert sorted(path.name for path in out.glob("*.model")) == sorted(set(names.values()))
    for side, end in enumerate(("src", "tgt")):
        model = Subwords((out / names[end]).read_bytes())
        letters = set("".join(model.pieces[1:]))
        known = "".join(text for pair in subsets["train"] for text in (pair if joint else (pair[side],)))
        assert letters == (set(known) - {" "}) | {SPACE} and "☃" not in letters
        dictionary = Dictionary.load(str(out / f"dict.{end}.txt"))
        assert "☃" in dictionary and len(model.pieces) == 90
        for subset, pairs in subsets.items():
            lines = lines_of(out, f"{subset}.{end}")
            assert list(to_text(dict(enumerate(lines))).values()) == [pair[side] for pair in pairs]
            assert lines == [model.split(pair[side]) for pair in pairs]
            binary = data_utils.load_indexed_dataset(str(out / f"{subset}.src-tgt.{end}"), dictionary)
            assert [dictionary.string(tokens) for tokens in binary] == lines
    same = (out / "dict.src.txt").read_bytes() == (out / "dict.tgt.txt").read_bytes()
    assert same == joint


def test_bytes_are_pinned(run, files: list[object], tmp_path: Path) -> None:
    """Draws, cleaning and BPE merges are the same on every machine."""
    options = ["--model", "bpe", "--vocab-size", 90, "--max-length", 8, "--seed", 5, "--raw-only"]
    assert run("parallel", *files, *options, "--out", tmp_path / "out").code == 0
    digest = hashlib.sha256()
    for path in sorted((tmp_path / "out" / "raw").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == PINNED


def test_shares_and_seed(run, files: list[object], tmp_path: Path) -> None:
    """Without files, both are drawn; another seed draws others; a share of 0 draws none."""
    found = {}
    for seed in (1, 2):
        options = ["--valid-share", "0.1", "--test-share", "0.2", "--seed", seed, "--vocab-size", 60, "--raw-only"]
        assert run("parallel", *files[:4], *options, "--out", tmp_path / str(seed)).code == 0
        found[seed] = {name: [p.source for p in plain(tmp_path / str(seed), name)] for name in ("valid", "test")}
        assert len(plain(tmp_path / str(seed), "train")) == 299 - sum(map(len, found[seed].values()))
    assert found[1] != found[2] and len(found[1]["test"]) == int(0.2 * 299)
    options = ["--valid-share", "0", "--vocab-size", 60, "--raw-only", "--out", tmp_path / "none"]
    assert run("parallel", *files, *options).code == 0
    assert list(manifest(tmp_path / "none")["subsets"]) == ["train", "test"]


def test_length_in_characters(run, files: list[object], tmp_path: Path) -> None:
    options = ["--max-length", 30, "--length-unit", "characters", "--vocab-size", 60, "--raw-only"]
    result = run("parallel", *files, *options, "--out", tmp_path / "out")
    assert result.code == 0 and "at most 30 characters" in result.out
    for name in ("train", "test", "gen"):
        assert all((len(pair.source) > 30) == (name == "gen") for pair in plain(tmp_path / "out", name))


def test_train_all(run, files: list[object], tmp_path: Path) -> None:
    """Long sources stay in train; the other subsets are those without the option."""
    options = ["--max-length", 8, "--vocab-size", 60, "--raw-only"]
    for name, more in {"short": [], "all": ["--train-all"]}.items():
        assert run("parallel", *files, *options, *more, "--out", tmp_path / name).code == 0
    for subset in ("valid", "test", "gen", "dev"):
        assert plain(tmp_path / "short", subset) == plain(tmp_path / "all", subset)
    whole = plain(tmp_path / "all", "train")
    assert plain(tmp_path / "short", "train") == [pair for pair in whole if len(pair.source.split()) <= 8] != whole
    assert len(whole) == 297 - int(0.05 * 297)
    assert "train_all" not in manifest(tmp_path / "short")["request"]
    assert "of valid and test have at most 8 words" in manifest(tmp_path / "all")["rule"]


def test_packed_files(run, files: list[object], tmp_path: Path) -> None:
    options = ["--vocab-size", 60, "--raw-only"]
    assert run("parallel", *files, *options, "--out", tmp_path / "text").code == 0
    for index in range(1, len(files), 2):
        packed = tmp_path / f"{files[index].name}.gz"
        packed.write_bytes(gzip.compress(files[index].read_bytes()))
        files[index] = packed
    assert run("parallel", *files, *options, "--out", tmp_path / "packed").code == 0
    for path in (tmp_path / "text" / "raw").iterdir():
        assert path.read_bytes() == (tmp_path / "packed" / "raw" / path.name).read_bytes()


def test_a_packed_file_without_its_ending(run, files: list[object], tmp_path: Path) -> None:
    packed = tmp_path / "packed.en"
    packed.write_bytes(gzip.compress(b"a line\n"))
    result = run("parallel", "--src", packed, *files[2:], "--out", tmp_path / "out")
    assert result.code == 1 and "--src is packed (gzip): unpack it, and name the unpacked file" in result.err


def test_specials_of_fairseq_in_a_test_set(run, text: Callable[..., Path], tmp_path: Path) -> None:
    """Letters that training lacks, in a row, may spell a special: then they are words."""
    train = ["".join(chr(0x4E00 + (7 * i + j * j) % 300) for j in range(5)) for i in range(100)]
    test = [f"{line} {special}" for line, special in zip(train[::-1], SPECIALS)] + ["<pad>☃"]
    paths = {"src": train, "tgt": train, "test-src": test, "test-tgt": test}
    given = [argument for name, lines in paths.items() for argument in (f"--{name}", text(name, lines))]
    out = tmp_path / "out"
    assert run("parallel", *given, "--model", "bpe", "--vocab-size", 302, "--out", out).code == 0
    assert [line.split()[-len(special) :] for line, special in zip(lines_of(out, "test.src"), SPECIALS)] == [
        list(special) for special in SPECIALS
    ]
    assert lines_of(out, "test.src")[-1] == f"{SPACE} <pad>☃"


def test_ends_of_lines_of_windows(run, files: list[object], tmp_path: Path) -> None:
    """CR LF gives the same bytes as plain newlines; a byte order mark is refused and no files remain."""
    options = ["--vocab-size", 60, "--raw-only"]
    assert run("parallel", *files, *options, "--out", tmp_path / "plain").code == 0
    for index in range(1, len(files), 2):
        files[index].write_bytes(files[index].read_bytes().replace(b"\n", b"\r\n"))
    assert run("parallel", *files, *options, "--out", tmp_path / "windows").code == 0
    for path in (tmp_path / "plain" / "raw").iterdir():
        assert path.read_bytes() == (tmp_path / "windows" / "raw" / path.name).read_bytes()
    files[1].write_bytes(b"\xef\xbb\xbf" + files[1].read_bytes())
    result = run("parallel", *files, *options, "--out", tmp_path / "marked")
    message = "starts with a byte order mark: save the file as UTF-8 without it"
    assert result == (1, "", f"error: {files[1]}:1: {message}\n") and not (tmp_path / "marked").exists()


def test_changed_text_is_not_prepared_already(run, files: list[object], tmp_path: Path) -> None:
    command = ["parallel", *files, "--vocab-size", 60, "--raw-only", "--out", tmp_path / "out"]
    assert run(*command).code == 0
    assert run(*command).out.startswith("already prepared")
    with files[1].open("a") as source, files[3].open("a") as target:
        print("one more", file=source)
        print("ONE MORE", file=target)
    assert "exists, but files is" in run(*command).err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--vocab-size", "1"], 2, "must be a whole number from 2 to 1000000, not '1'"),
        (["--vocab-size", "9999"], 2, "--vocab-size 9999 is too large: this text has at most"),
        (["--vocab-size", "9"], 2, "--vocab-size 9 is too small: this text needs"),
        (["--max-length", "-1"], 2, "must be a whole number from 0 to 999999999, not '-1'"),
        (["--length-unit", "words"], 2, "add --max-length"),
        (["--train-all"], 2, "--train-all needs --max-length"),
        (["--test-share", "0.1"], 2, "--test-share draws a test set, and --test-src gives one"),
        (["--valid-src", "FILE"], 2, "--valid-src and --valid-tgt go together"),
        (["--valid-share", "0", "--seed", "3"], 2, "--seed has no effect"),
        (["--joint", "--separate"], 2, "not allowed with argument --joint"),
        (["--max-length", "12"], 1, "no test sentence has more than 12 words: lower --max-length"),
        (["--max-length", "1"], 1, "no sentence of train has at most 1 words: raise --max-length"),
        (["--valid-share", "0.001"], 1, "a --valid-share of 0.001 of 297 pairs is not even one"),
        (["--src", "nowhere.txt"], 1, "nowhere.txt: --src is not a file: nothing has this name; check it"),
        (["--test-tgt", "."], 1, ".: --test-tgt is not a file: it is a folder; name a file in it"),
        (["--src", "/dev/null"], 1, "/dev/null: --src is not a file: it is a pipe or a device; save its content"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(run, files: list[object], options: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = run("parallel", *files, "--raw-only", *options, "--out", tmp_path / "out")
    assert result.code == code and message in result.err and result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_longer_sentences_are_those_of_a_test_set(run, files: list[object], tmp_path: Path) -> None:
    """The command line tells, so files are not read."""
    files[1].write_bytes(b"\xff\n")
    result = run("parallel", *files[:4], "--max-length", 3, "--test-share", 0, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 2 and "there is no test set: give one, or omit --max-length" in result.err


def test_a_test_set_with_long_sentences_is_advised_where_one_can_be_given() -> None:
    split = Split({"train": [Pair("a b", "c")], "test": [Pair("d", "e")]}, {})
    for kind, advice in ((TranslationOptions, ""), (ParallelOptions, ", or give a test set with long ones")):
        with pytest.raises(DataError) as caught:
            split_by_length(split, kind(max_length=3, length_unit="words"))
        assert caught.value.message == f"no test sentence has more than 3 words: lower --max-length{advice}"


def test_valid_and_test_are_not_one_text(run, files: list[object], tmp_path: Path) -> None:
    options = ["--valid-src", files[5], "--valid-tgt", files[7], "--raw-only", "--out", tmp_path / "out"]
    result = run("parallel", *files, *options)
    assert result.code == 1 and f"{files[5]}: --test-src has the same text as --valid-src" in result.err


def test_valid_and_test_are_not_one_text_in_another_order(run, files: list[object], tmp_path: Path) -> None:
    turned = [tmp_path / f"turned.{side}" for side in ("src", "tgt")]
    for path, file in zip(turned, (files[5], files[7]), strict=True):
        path.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    options = ["--valid-src", turned[0], "--valid-tgt", turned[1], "--raw-only", "--out", tmp_path / "out"]
    result = run("parallel", *files, *options)
    assert result.code == 1 and "--test-src has the same text as --valid-src" in result.err


def test_valid_and_test_are_not_one_packed_text(run, files: list[object], tmp_path: Path) -> None:
    packed = [tmp_path / f"packed.{side}.gz" for side in ("src", "tgt")]
    for path, file in zip(packed, (files[5], files[7]), strict=True):
        path.write_bytes(gzip.compress(file.read_bytes()))
    options = ["--valid-src", packed[0], "--valid-tgt", packed[1], "--raw-only", "--out", tmp_path / "out"]
    result = run("parallel", *files, *options)
    assert result.code == 1 and "--test-src has the same text as --valid-src" in result.err


def test_test_set_with_an_empty_line(run, files: list[object], tmp_path: Path) -> None:
    with files[5].open("a") as source, files[7].open("a") as target:
        print(file=source)
        print("NOTHING", file=target)
    result = run("parallel", *files, "--out", tmp_path / "out")
    assert (result.code, result.err) == (1, f"error: {files[5]}:62: empty line\n")


# ---- words


@pytest.fixture
def words(files: list[object]) -> list[object]:
    """The options for the corpora as whole words."""
    return [*files, "--model", "words"]


def test_words(run, words: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same pairs as in the plain text of subwords, without SentencePiece; dictionaries of all subsets, in order."""
    pieces, out = tmp_path / "pieces", tmp_path / "out"
    assert run("parallel", *words[:-2], "--max-length", 8, "--vocab-size", 60, "--raw-only", "--out", pieces).code == 0
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    result = run("parallel", *words, "--max-length", 8, "--out", out)
    assert result.code == 0 and result.err == ""
    subsets = {}
    for name in ("train", "valid", "test", "gen", "dev"):
        subsets[name] = [Pair(*pair) for pair in zip(*(lines_of(out, f"{name}.{end}") for end in ("src", "tgt")))]
        assert subsets[name] == plain(pieces, name)
    for side, end in enumerate(("src", "tgt")):
        dictionary = Dictionary.load(str(out / f"dict.{end}.txt"))
        every = {word for pairs in subsets.values() for pair in pairs for word in pair[side].split()}
        assert dictionary.symbols[dictionary.nspecial :] == sorted(every)
        binary = data_utils.load_indexed_dataset(str(out / f"gen.src-tgt.{end}"), dictionary)
        assert [dictionary.string(tokens) for tokens in binary] == [pair[side] for pair in subsets["gen"]]
    found = manifest(out)
    assert {path.name for path in out.glob("raw/*.plain.*")} | set(out.glob("*.model")) == set()
    assert (found["request"]["vocab_size"], found["request"]["joint"]) == (None, False)
    assert found["rule"] == "words between spaces; " + manifest(pieces)["rule"].partition("; ")[2]
    assert found["origin"]["left_out_of_train"] == manifest(pieces)["origin"]["left_out_of_train"]
    known, every = (
        {w for name in names for p in subsets[name] for w in p.source.split()} for names in (["train"], subsets)
    )
    assert "☃" in every - known
    assert f"words that train lacks: {len(every - known)} of a source, {len(every - known)} of a target" in result.out


def test_words_are_what_spaces_separate(run, text: Callable[..., Path], tmp_path: Path) -> None:
    """A dictionary of the words of both subsets, and a sign of SentencePiece stays."""
    parts = {
        "src": ["▁walk  twice\t", "run"],
        "tgt": ["W W", "R\u00a0."],
        "test-src": ["▁run"],
        "test-tgt": ["R &amp;"],
    }
    files = [argument for name, lines in parts.items() for argument in (f"--{name}", text(name, lines))]
    out = tmp_path / "out"
    options = ["--model", "words", "--unescape", "--valid-share", "0", "--out", out]
    assert run("parallel", *files, *options).code == 0
    assert lines_of(out, "train.src") == ["▁walk twice", "run"] and lines_of(out, "train.tgt") == ["W W", "R ."]
    dictionaries = [(out / f"dict.{end}.txt").read_text("utf-8").split("\n")[:-1] for end in ("src", "tgt")]
    assert dictionaries == [["run 1", "twice 1", "▁run 1", "▁walk 1"], ["& 1", ". 1", "R 2", "W 2"]]


@pytest.mark.parametrize("name", ["--src", "--test-tgt"])
def test_a_word_that_is_a_special_of_fairseq(run, words: list[object], name: str, tmp_path: Path) -> None:
    path = words[words.index(name) + 1]
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], f"{lines[2]} <pad>", *lines[3:]]) + "\n", "utf-8")
    result = run("parallel", *words, "--raw-only", "--out", tmp_path / "out")
    message = "<pad> is a special symbol of fairseq and cannot be a word: write it in another way"
    assert result == (1, "", f"error: {path}:3: {message}\n") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        "--vocab-size 60",
        "--joint",
        "--separate",
        "--max-length 8 --length-unit characters",
        "--separate --vocab-size 8000",
    ],
)
def test_options_without_effect_on_words(run, words: list[object], options: str, tmp_path: Path) -> None:
    result = run("parallel", *words, *options.split(), "--out", tmp_path / "out")
    message = "--model words makes a dictionary of words for each side, and lengths are in words: omit "
    assert result.code == 2 and result.err.startswith(f"error: {message}") and result.err.count("\n") == 1
    named = result.err.removeprefix(f"error: {message}").strip().split(" and ")
    assert sorted(named) == sorted(flag for flag in ("--vocab-size", "--joint", "--separate") if flag in options) or (
        named == ["--length-unit characters"]
    )


def test_nothing_to_train_on(run, text: Callable[..., Path], tmp_path: Path) -> None:
    train, test = text("train", ["a", "", "b", "a"]), text("test", ["b", "a"])
    files = ["--src", train, "--tgt", train, "--test-src", test, "--test-tgt", test]
    message = "no pair is left to train on: there are 1 with an empty side, 3 whose source is in another subset"
    assert run("parallel", *files, "--out", tmp_path / "out") == (1, "", f"error: {train}: {message}\n")


def test_without_sentencepiece(run, files: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    result = run("parallel", *files, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and "pip install sentencepiece" in result.err

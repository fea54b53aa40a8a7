"""The Mathematics dataset: official files, generated questions, and errors."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import mathematics
from data_prep.dataset import DataError, Pair
from data_prep.draws import PackedPairs
from data_prep.mathematics import (
    EXTRAPOLATIONS,
    FOLDER,
    MODULES,
    SIZES,
    MathematicsSources,
    make_corpus,
    parse,
    places,
    tokenize,
)
from data_prep.mathematics import generator as mathematics_generator
from data_prep.mathematics import sample as mathematics_sample
from data_prep.mathematics.generator import REGIMES, chunks, work
from data_prep.sources import OfficialFile
from helpers.data_files import detokenize, manifest

FILE = Path("train-easy/arithmetic__add_or_sub.txt")
MODULE, WITHOUT = "arithmetic__add_or_sub", "numbers__is_prime"


# ---- one file

TEXT = st.text(st.characters(codec="utf-8", exclude_characters=mathematics.SPACE), min_size=1, max_size=20).filter(
    lambda text: text.isprintable() and text.strip() == text
)


@given(st.text(st.characters(exclude_characters=mathematics.SPACE)))
def test_characters_are_words(text: str) -> None:
    tokens = tokenize(text)
    assert detokenize(tokens) == text
    if text.isprintable() and text:
        assert len(tokens.split()) == len(text) and " ".join(tokens.split()) == tokens


def test_fairseq_gives_the_plain_text_back() -> None:
    data_utils = pytest.importorskip("fairseq.data.data_utils")
    text = "Which is smaller?  (a) -2/9  (b) {x, 'y'}"
    assert data_utils.post_process(tokenize(text), "sentencepiece") == text


@given(st.lists(st.builds(Pair, TEXT, TEXT), max_size=5), st.booleans())
def test_round_trip(pairs: list[Pair], newline: bool) -> None:
    data = "".join(f"{text}\n" for pair in pairs for text in pair).encode()
    if not newline:
        data = data.removesuffix(b"\n")
    assert list(parse(io.BytesIO(data), FILE)) == pairs


def test_spaces_at_the_ends_are_left_out() -> None:
    assert list(parse(io.BytesIO(b" What is 1?  \n1 \n"), FILE)) == [Pair("What is 1?", "1")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "empty line"),
        (b"   ", "empty line"),
        (b"What is 1?\r", "ends in CR LF"),
        (b"What\ris 1?", "holds U+000D"),
        (b"What is\t1?", r"a character that cannot occur in a question or an answer: 'What is\t1?'"),
        (b"What is \0?", "a character that cannot occur in a question or an answer"),
        (b"What is\xc2\xa01?", "a character that cannot occur in a question or an answer"),
        ("What is ▁?".encode(), "a character that cannot occur in a question or an answer: 'What is ▁?'"),
        (b"What is \xff?", "not UTF-8: byte 0xff at position 9"),
        ("What is\u20281?".encode(), "holds U+2028 (LINE SEPARATOR) inside the line"),
        ("\ufeffWhat is 1?".encode(), "a character that cannot occur in a question or an answer"),
        (b"x" * 100_000, "a line has 4,096 bytes or more"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
@pytest.mark.parametrize("number", [3, 4])
def test_wrong_line(line: bytes, message: str, number: int) -> None:
    lines = [b"What is 2?", b"2", b"What is 3?", b"3", b"What is 4?", b"4"]
    lines[number - 1] = line
    stream = io.BytesIO(b"".join(line + b"\n" for line in lines))
    with pytest.raises(DataError) as caught:
        list(parse(stream, FILE))
    assert (caught.value.path, caught.value.line) == (FILE, number) and message in caught.value.message
    assert len(str(caught.value)) < 200


def test_byte_order_mark() -> None:
    with pytest.raises(DataError) as caught:
        list(parse(io.BytesIO("\ufeffWhat is 2?\n2\n".encode()), FILE))
    assert caught.value.line == 1 and "starts with a byte order mark" in caught.value.message


def test_question_without_answer() -> None:
    with pytest.raises(DataError) as caught:
        list(parse(io.BytesIO(b"What is 2?\n2\nWhat is 3?\n"), FILE))
    assert (caught.value.path, caught.value.line) == (FILE, 3)
    assert caught.value.message == "the question 'What is 3?' has no answer: the number of lines is odd"


PIECES = [b"What is 1?", b"1", b"\n", b"\r\n", b" ", b"\0", "▁".encode(), b"\xff", b"\xc2", b"\xe2\x80\xa8"]


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=4), max_size=20).map(b"".join))
def test_anything_is_examples_or_an_error_with_its_line(data: bytes) -> None:
    try:
        pairs = list(parse(io.BytesIO(data), FILE))
        assert 2 * len(pairs) == data.removesuffix(b"\n").count(b"\n") + bool(data)
        assert all(side == side.strip() != "" for pair in pairs for side in pair)
    except DataError as error:
        assert error.path == FILE and 1 <= error.line <= data.count(b"\n") + 1
        assert "\n" not in str(error)


# ---- the subsets

QUESTIONS = st.integers(0, 12).map("What is {}?".format)
FILES = st.lists(st.builds(Pair, QUESTIONS, st.integers(0, 3).map(str)), min_size=1, max_size=25)


@given(st.lists(FILES, min_size=5, max_size=5), st.integers(1, 3))
def test_subsets_are_those_of_the_reference(files: list[list[Pair]], holdout: int) -> None:
    """The stated rule: keep unseen questions; hold out by a fresh generator for every difficulty."""
    seen: set[str] = set()
    kept: list[list[Pair]] = []
    for pairs in files:
        kept.append([])
        for pair in pairs:
            if pair.source not in seen:
                seen.add(pair.source)
                kept[-1].append(pair)
    contents = dict(zip(REGIMES, map(PackedPairs, files), strict=True))
    nothing_new = next((place for place, pairs in zip(places(MODULE), kept, strict=True) if not pairs), None)
    if nothing_new is not None:
        with pytest.raises(DataError, match=f"^all [0-9]+ questions of {nothing_new} are in the files before it: "):
            make_corpus(MODULE, contents, holdout, {}, "", {})
        return
    if min(map(len, kept[:3])) <= holdout:
        with pytest.raises(DataError, match=r"train-\w+ has \d+ different questions, too few for a valid set of \d"):
            make_corpus(MODULE, contents, holdout, {}, "", {})
        return
    train, valid = [], []
    for pairs in kept[:3]:
        drawn = set(numpy.random.RandomState(1234).choice(len(pairs), holdout, replace=False).tolist())
        train += [pair for index, pair in enumerate(pairs) if index not in drawn]
        valid += [pair for index, pair in enumerate(pairs) if index in drawn]
    expected = {"train": train, "valid": valid, "interpolate": kept[3], "gen": kept[4]}
    corpus = make_corpus(MODULE, contents, holdout, {}, "", {})
    found = {name: [Pair(*map(detokenize, pair)) for pair in subset.pairs] for name, subset in corpus.subsets.items()}
    assert found == expected
    assert list(corpus.subsets["valid"].types) == ["easy"] * holdout + ["medium"] * holdout + ["hard"] * holdout
    dropped = sum(map(len, files)) - sum(map(len, kept))
    assert f"repeated questions dropped ({dropped})" in corpus.rule


def test_modules() -> None:
    assert len(MODULES) == len(set(MODULES)) == 56 and list(MODULES) == sorted(MODULES)
    assert len(EXTRAPOLATIONS) == 15 and set(EXTRAPOLATIONS) < set(MODULES) and set(SIZES) < set(EXTRAPOLATIONS)
    assert all(name.startswith(module) for module, name in EXTRAPOLATIONS.items())
    assert places(MODULE) == {
        "train-easy/arithmetic__add_or_sub.txt": "train-easy",
        "train-medium/arithmetic__add_or_sub.txt": "train-medium",
        "train-hard/arithmetic__add_or_sub.txt": "train-hard",
        "interpolate/arithmetic__add_or_sub.txt": "interpolate",
        "extrapolate/arithmetic__add_or_sub_big.txt": "extrapolate",
    }
    assert list(places(WITHOUT).values()) == list(REGIMES[:4])


def test_published_sizes() -> None:
    """Three files of 666,666 and two of 10,000, less what is held out, and the duplicates the table implies."""
    assert 3 * 666_666 - 30_000 - SIZES[MODULE]["train"] == 969
    assert 10_000 - SIZES["numbers__place_value"]["interpolate"] == 12


# ---- small files instead of the official ones


def sums(regime: str) -> bytes:
    """Examples of one regime: five questions of its own, one of them twice, and one of another regime."""
    first = 10 * REGIMES.index(regime)
    numbers = [*range(first, first + 5), first, 0]
    return "".join(f"What is {n} + 1?\n{n + 1}\n" for n in numbers).encode()


def entries(module: str = MODULE, **changed: bytes) -> dict[str, bytes]:
    """Path in the archive -> content, for a module and some unwanted ones; the hardest file comes first."""
    files = {place: changed.get(regime.replace("-", "_"), sums(regime)) for place, regime in places(module).items()}
    others = {"train-readme.txt": b"readme", "train-easy/arithmetic__add_or_sub_in_base.txt": b"\xff", "x/y": b"\0"}
    return {f"{FOLDER}/{place}": data for place, data in [*reversed(files.items()), *others.items()]}


@pytest.fixture
def archive(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes an archive and publishes it in the module."""

    def make(files: dict[str, bytes]) -> Path:
        path = tmp_path_factory.mktemp("archive") / "mathematics_dataset-v1.0.tar.gz"
        with tarfile.open(path, "w:gz") as stream:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                stream.addfile(info, io.BytesIO(data))
        data = path.read_bytes()
        official = OfficialFile(path.name, len(data), hashlib.sha256(data).hexdigest())
        monkeypatch.setattr(mathematics, "ARCHIVE", official)
        return path

    return make


def unpack(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def lines_of(folder: Path, name: str) -> list[str]:
    return (folder / "raw" / name).read_text("utf-8").splitlines()


def questions(folder: Path, subset: str) -> list[str]:
    return [detokenize(line) for line in lines_of(folder, f"{subset}.src")]


def test_archive_and_folder(run, archive, tmp_path: Path) -> None:
    path = archive(entries())
    options = ["mathematics", "--module", MODULE, "--holdout", 1]
    result = run(*options, "--archive", path, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    assert "Mathematics dataset: arithmetic__add_or_sub; repeated questions dropped (10), then 1 of every" in result.out
    assert [line.split()[:2] for line in result.out.splitlines()[3:7]] == [
        ["train", "12"],
        ["valid", "3"],
        ["interpolate", "5"],
        ["gen", "5"],
    ]
    out = tmp_path / "out"
    assert questions(out, "gen") == [f"What is {n} + 1?" for n in range(40, 45)]
    assert sorted(questions(out, "train") + questions(out, "valid")) == sorted(
        f"What is {n} + 1?" for start in (0, 10, 20) for n in range(start, start + 5)
    )
    assert lines_of(out, "interpolate.src")[0] == "W h a t ▁ i s ▁ 3 0 ▁ + ▁ 1 ?"
    assert lines_of(out, "interpolate.tgt")[0] == "3 1"
    assert lines_of(out, "valid.type") == ["easy", "medium", "hard"]
    found = manifest(out)
    assert found["origin"]["files"] == [
        {"name": place, "bytes": len(sums(regime)), "sha256": hashlib.sha256(sums(regime)).hexdigest()}
        for place, regime in places(MODULE).items()
    ]
    assert found["vocabulary"]["joined"] and found["request"]["source"] == "archive"
    assert found["membership"] == "the published ones"
    for folder in (unpack(entries(), tmp_path / "unpacked"), tmp_path / "unpacked" / FOLDER):
        again = tmp_path / f"of-{folder.name}"
        assert run(*options, "--raw-dir", folder, "--raw-only", "--out", again).code == 0
        for text in (out / "raw").iterdir():
            assert text.read_bytes() == (again / "raw" / text.name).read_bytes()
        assert manifest(again)["origin"] == found["origin"]
        assert manifest(again)["membership"].startswith("those of your files")
    changed = tmp_path / "unpacked" / FOLDER / next(iter(places(MODULE)))
    changed.write_bytes(changed.read_bytes().replace(b"What", b"Whit"))
    refused = run(*options, "--raw-dir", tmp_path / "absent", "--raw-only", "--out", again)
    assert refused.code == 1 and "--raw-dir is not a folder: nothing has this name" in refused.err
    refused = run(*options, "--raw-dir", tmp_path / "unpacked", "--raw-only", "--out", again)
    assert refused.code == 1 and "source_sha256 is" in refused.err


def test_files_of_a_folder_that_are_not_complete_are_named(run, monkeypatch, tmp_path: Path) -> None:
    """Whatever the hold-out is; the archive has a hash."""
    folder = unpack(entries(train_hard=sums("train-hard") * 2), tmp_path / "files")
    options = ["mathematics", "--module", MODULE, "--holdout", 1, "--raw-dir", folder, "--raw-only", "--out"]
    message = "train-hard has 14 questions instead of the published 666,666: is the file complete?"
    assert message in run(*options, tmp_path / "short").out and message in manifest(tmp_path / "short")["membership"]
    monkeypatch.setattr(mathematics, "PUBLISHED", dict.fromkeys(REGIMES, 7))
    wrong = "examples: those of your files, whose hashes are in dataset.json; train-hard has 14 questions instead of "
    assert f"{wrong}the published 7: is the file complete?\n" in run(*options, tmp_path / "one").out
    unpack(entries(), folder)
    assert "dataset.json\n" in run(*options, tmp_path / "complete").out


def test_memory_is_bounded(large_archive, little_memory) -> None:
    """Other modules are skipped; only the text of the wanted one is kept."""
    wanted = {f"{FOLDER}/{place}": sums(regime) * 200 for place, regime in places(MODULE).items()}
    others = {f"{FOLDER}/{regime}/algebra__linear_1d.txt": 1 << 20 for regime in places(MODULE).values()}
    path = large_archive({name: (others | wanted)[name] for name in sorted(others | wanted)})
    with little_memory(1 << 20):
        contents, _ = MathematicsSources(archive=path).read(MODULE)
    assert sum(others.values()) == 5 << 20 and [len(pairs) for pairs in contents.values()] == [1_400] * 5


def test_default_number_of_processes(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The number that could be busy; it affects only the time."""
    asked: list[int] = []

    def refuse(module: str, extrapolation: str, sizes: list[int], seed: int, workers: int) -> None:
        asked.append(workers)
        raise DataError("enough")

    monkeypatch.setattr(mathematics, "generate", refuse)
    for processors, generate, options in ((1, 5_000, ()), (4, 5_000, ()), (64, 100, ()), (64, 5_000, ("--workers", 2))):
        monkeypatch.setattr(mathematics, "processors", lambda: processors)
        run("mathematics", "--module", MODULE, "--generate", generate, *options, "--out", tmp_path / "out")
    monkeypatch.setattr(mathematics, "processors", lambda: 64)
    run("mathematics", "--module", MODULE, "--generate", 50_000, "--out", tmp_path / "out")
    assert asked == [1, 4, 5, 2, 16]


def test_binaries(run, tmp_path: Path) -> None:
    dictionary_module = pytest.importorskip("fairseq.data.dictionary")
    folder, out = unpack(entries(), tmp_path / "files"), tmp_path / "out"
    result = run("mathematics", "--module", MODULE, "--raw-dir", folder, "--holdout", 1, "--out", out)
    assert result.code == 0 and "--arch sg_transformer_math" in result.out
    assert "--valid-subset valid,interpolate,gen" in result.out
    assert (out / "dict.src.txt").read_bytes() == (out / "dict.tgt.txt").read_bytes()
    dictionary = dictionary_module.Dictionary.load(str(out / "dict.src.txt"))
    characters = {c for name in ("train", "valid", "interpolate", "gen") for q in questions(out, name) for c in q}
    answers = {c for name in ("train", "valid", "interpolate", "gen") for c in "".join(lines_of(out, f"{name}.tgt"))}
    assert set(dictionary.symbols[dictionary.nspecial :]) == (characters | answers) - {" "} | {"▁"}
    assert run("verify", out).code == 0


def test_module_without_extrapolation(run, tmp_path: Path) -> None:
    folder, out = unpack(entries(WITHOUT), tmp_path / "files"), tmp_path / "out"
    unpack({f"{FOLDER}/extrapolate/{MODULE}_big.txt": b"never read"}, folder)
    result = run("mathematics", "--module", WITHOUT, "--raw-dir", folder, "--holdout", 1, "--raw-only", "--out", out)
    assert result.code == 0 and "there is no gen, since this module has no extrapolation test" in result.out
    assert list(manifest(out)["subsets"]) == ["train", "valid", "interpolate"]


def test_published_sizes_are_checked(run, archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mathematics, "REFERENCE_HOLDOUT", 2)
    monkeypatch.setitem(SIZES, MODULE, {"train": 9, "interpolate": 5, "gen": 5})
    options = ["mathematics", "--module", MODULE, "--archive", archive(entries()), "--raw-only"]
    result = run(*options, "--out", tmp_path / "out")
    assert result.code == 0
    assert [line.split()[:3] for line in result.out.splitlines()[3:5]] == [["train", "9", "9"], ["valid", "6", "-"]]
    monkeypatch.setitem(SIZES, MODULE, {"train": 9, "interpolate": 5, "gen": 6})
    result = run(*options, "--out", tmp_path / "other")
    assert result == (
        1,
        "",
        "error: subset gen has 5 examples instead of the published 6: are these the official files, and complete?\n",
    )
    assert run(*options, "--holdout", 1, "--out", tmp_path / "another").code == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["another", "out"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (entries(train_hard=b"What is 1?\n1\n2\n"), "train-hard/arithmetic__add_or_sub.txt:3: the question '2' has no"),
        (entries(extrapolate=b"What is 1?\n\n"), "extrapolate/arithmetic__add_or_sub_big.txt:2: empty line"),
        (entries(train_easy=b"a\nb\na\nc\n"), "train-easy has 1 different questions, too few for a valid set of 1"),
        (
            entries(interpolate=sums("train-easy")),
            "questions of interpolate/arithmetic__add_or_sub.txt are in the files before it: is it the right file?",
        ),
        (entries(extrapolate=sums("train-hard")), "questions of extrapolate/arithmetic__add_or_sub_big.txt are in"),
        (entries(train_medium=sums("train-easy")), "questions of train-medium/arithmetic__add_or_sub.txt are in"),
        (entries(train_medium=b""), "few for a valid set of 1: the file has 0 of 666,666: get it again"),
    ],
    ids=["odd", "empty-line", "too-few", "nothing-new", "nothing-new-in-gen", "nothing-new-in-train", "empty-file"],
)
def test_wrong_files(files: dict[str, bytes], message: str, run, archive, tmp_path: Path) -> None:
    options = ["mathematics", "--module", MODULE, "--holdout", 1, "--raw-only", "--out", tmp_path / "out"]
    folder = unpack(files, tmp_path / "files")
    for source in (("--archive", archive(files)), ("--raw-dir", folder)):
        result = run(*options, *source)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1) and message in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_missing_file(run, archive, tmp_path: Path) -> None:
    files = entries()
    del files[f"{FOLDER}/extrapolate/arithmetic__add_or_sub_big.txt"]
    options = ["mathematics", "--module", MODULE, "--raw-only", "--out", tmp_path / "out"]
    path = archive(files)
    result = run(*options, "--archive", path)
    assert result == (1, "", f"error: {path}: has no {FOLDER}/extrapolate/arithmetic__add_or_sub_big.txt\n")
    folder = unpack(files, tmp_path / "files")
    result = run(*options, "--raw-dir", folder)
    assert result.code == 1 and f"{folder / FOLDER}: has no extrapolate/arithmetic__add_or_sub_big.txt" in result.err


def test_another_archive(run, archive, tmp_path: Path) -> None:
    path = archive(entries())
    data = path.read_bytes()
    options = ["mathematics", "--module", MODULE, "--archive", path, "--raw-only", "--out", tmp_path / "out"]
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path}: not the official {path.name}: sha256 " in run(*options).err
    path.write_bytes(data + b"x")
    assert f"{len(data) + 1:,} bytes, expected {len(data):,}" in run(*options).err
    path.unlink()
    assert run(*options) == (1, "", f"error: {path}: --archive is not a file: nothing has this name; check it\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "one of the arguments --generate --archive --raw-dir is required"),
        (("--archive", "x", "--generate", 100), "not allowed with argument"),
        (("--raw-dir", "x", "--seed", 2), "--seed belongs to --generate"),
        (("--raw-dir", "x", "--workers", 2), "--workers belongs to --generate"),
        (("--generate", 99), "must be a whole number from 100 to 2000000, not '99'"),
        (("--generate", "1e3"), "must be a whole number from 100 to 2000000, not '1e3'"),
        (("--generate", 100, "--holdout", 100), "--holdout 100 leaves nothing of the 100 questions to train on"),
        (("--generate", 100, "--holdout", 0), "must be a whole number from 1 to 2000000, not '0'"),
        (("--generate", 100, "--workers", 0), "must be a whole number from 1 to 256, not '0'"),
        (("--generate", 100, "--seed", -1), "must be a whole number from 0 to"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_options(options: tuple, message: str, run, tmp_path: Path) -> None:
    result = run("mathematics", "--module", MODULE, *options, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1) and message in result.err
    assert list(tmp_path.iterdir()) == []


def test_unknown_module(run, tmp_path: Path) -> None:
    result = run("mathematics", "--module", "arithmetic", "--generate", 100, "--out", tmp_path / "out")
    assert result.code == 2 and result.err.startswith(
        "error: argument --module: invalid choice: 'arithmetic': did you mean arithmetic__add_or_sub"
    )
    assert result.err.count("\n") == 1 and len(result.err) < 250


# ---- generation: without the package


def test_chunks() -> None:
    assert list(chunks([2_500, 0, 1_000, 1])) == [
        *((0, 0, 1_000), (0, 1, 1_000), (0, 2, 500)),
        *((2, 0, 1_000), (3, 0, 1)),
    ]


def printed(seed: int, worker: int, workers: int, sizes: list[int]) -> list[str]:
    def problem() -> SimpleNamespace:
        import sympy.core.random

        drawn = (random.random(), sympy.core.random.rng.random())
        return SimpleNamespace(question=f"{drawn}", answer=numpy.random.randint(10**9))

    out = io.StringIO()
    before = random.getstate(), numpy.random.get_state()
    work([problem] * len(sizes), seed, sizes, worker, workers, out)
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    return out.getvalue().splitlines()


def test_who_draws_a_chunk_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics_generator, "CHUNK", 4)
    sizes = [10, 10, 3]
    alone = printed(5, 0, 1, sizes)
    shares = [iter(printed(5, worker, 3, sizes)) for worker in range(3)]
    together = [
        next(shares[position % 3]) for position, (_, _, size) in enumerate(chunks(sizes)) for _ in range(2 * size)
    ]
    assert alone == together and not any(list(share) for share in shares)
    assert len(set(alone)) == len(alone) == 46  # no two chunks have the same seed
    assert set(printed(6, 0, 1, sizes)).isdisjoint(alone)


@pytest.mark.parametrize(("question", "answer"), [(160, 30), (161, 1), (1, 31)])
def test_long_problems_are_dropped(question: int, answer: int) -> None:
    drawn = iter([SimpleNamespace(question="q" * question, answer="a" * answer), SimpleNamespace(question=1, answer=2)])
    expected = ("q" * 160, "a" * 30) if (question, answer) == (160, 30) else ("1", "2")
    assert mathematics_generator.draw(lambda: next(drawn)) == expected


def test_missing_package(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    options = ["mathematics", "--module", MODULE, "--generate", 100, "--raw-only", "--out", tmp_path / "out"]
    monkeypatch.setattr(importlib.metadata, "version", version)
    needed = "--generate needs the package mathematics_dataset 1.0.1: pip install mathematics_dataset==1.0.1"
    assert run(*options) == (1, "", f"error: {needed}\n")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1")
    assert run(*options) == (1, "", f"error: {needed} (found: 1.1)\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Replaces the generator by a script."""

    def make(script: str) -> None:
        path = tmp_path_factory.mktemp("fake") / "generator.py"
        path.write_text(script)
        monkeypatch.setattr(mathematics_generator, "__file__", str(path))
        monkeypatch.setattr(mathematics_sample, "check_package", lambda: None)

    return make


def test_generator_that_fails(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    popen = mathematics_sample.subprocess.Popen
    monkeypatch.setattr(
        mathematics_sample.subprocess,
        "Popen",
        lambda *args, **kw: processes.append(popen(*args, **kw)) or processes[-1],
    )
    fake("print('What is 1?\\n1\\nWhat is 2?')\nraise KeyError('no such module')")
    with pytest.raises(DataError, match="the generator of mathematics_dataset failed: KeyError: 'no such module'"):
        mathematics_sample.generate(MODULE, None, [2], 1, 2)
    fake("import sys\nwhile True: print('question\\nanswer')")
    found = mathematics_sample.generate(MODULE, None, [3], 1, 2)
    assert list(found["train-easy"]) == [Pair("question", "answer")] * 3
    assert len(processes) == 4 and all(process.poll() is not None for process in processes)


def test_warnings_of_the_generator_do_not_stop_it(fake) -> None:
    fake("import sys\nsys.stderr.write('w' * 1_000_000)\nprint('question\\nanswer')")
    assert len(mathematics_sample.generate(MODULE, None, [1], 1, 1)["train-easy"]) == 1


# ---- generation: with the package


@pytest.fixture
def package() -> None:
    pytest.importorskip("mathematics_dataset")


def generate(run, out: Path, module: str, *options: object) -> Path:
    result = run("mathematics", "--module", module, "--generate", 100, *options, "--raw-only", "--out", out)
    assert (result.code, result.err) == (0, ""), result.err
    return out


def hash_of(folder: Path) -> str:
    texts = sorted((folder / "raw").iterdir())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in texts)).hexdigest()


def test_generated(run, package, tmp_path: Path) -> None:
    random.seed(3)
    numpy.random.seed(3)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    out = generate(run, tmp_path / "out", MODULE)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states
    found = manifest(out)
    assert found["membership"] == found["origin"]["generated"] == "generated, not the official data"
    assert set(found["origin"]["versions"]) == {"mathematics_dataset", "sympy", "numpy"}
    sizes = {name: subset["size"] for name, subset in found["subsets"].items()}
    assert (sizes["valid"], sizes["gen"]) == (30, 100) and 250 < sizes["train"] <= 270
    assert found["subsets"]["valid"]["types"] == {"easy": 10, "hard": 10, "medium": 10}
    assert hash_of(out) == "ef3ac76f5322b7e020e9eb5c22cdac1da23f5be8e9ed4c8053b625c432d47f0a"


def test_seed_workers_and_hash_seed(run, package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package draws composed problems in the order of sets, and primes from a generator that sympy seeds."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = generate(run, tmp_path / "one", "numbers__is_prime_composed")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    three = generate(run, tmp_path / "three", "numbers__is_prime_composed", "--workers", 3)
    assert hash_of(one) == hash_of(three)
    assert {path.name: path.read_bytes() for path in one.glob("*") if path.is_file()} == {
        path.name: path.read_bytes() for path in three.glob("*") if path.is_file()
    }
    other = generate(run, tmp_path / "other", "numbers__is_prime_composed", "--seed", 2)
    assert set(questions(other, "train")).isdisjoint(questions(one, "train"))
    again = run(
        *("mathematics", "--module", "numbers__is_prime_composed", "--generate", 100),
        *("--workers", 2, "--raw-only", "--out", one),
    )
    assert again.out == f"already prepared: {one}\n"


def test_answers_are_right(run, package, tmp_path: Path) -> None:
    places_of_digits = {"units": 1, "tens": 2, "hundreds": 3, "thousands": 4, "ten thousands": 5}
    out = generate(run, tmp_path / "out", "numbers__place_value")
    checked = Counter()
    for subset in ("train", "valid", "interpolate", "gen"):
        for question, answer in zip(questions(out, subset), lines_of(out, f"{subset}.tgt"), strict=True):
            place, number = question.removeprefix("What is the ").removesuffix("?").split(" digit of ")
            if place in places_of_digits:
                assert number[-places_of_digits[place]] == answer
                checked[subset] += 1
    assert min(checked[subset] for subset in ("train", "valid", "interpolate", "gen")) > 5
    longest = {subset: max(map(len, questions(out, subset))) for subset in ("train", "gen")}
    assert longest["gen"] > longest["train"]


def test_modules_are_those_of_the_package(package) -> None:
    for fixed in mathematics_generator.FIXES:
        mathematics_generator.import_fixed(fixed)
    from mathematics_dataset.modules import modules

    tests, extra = modules.test(), modules.test_extra()
    assert sorted(f"{category}__{name}" for category in tests for name in tests[category]) == list(MODULES)
    names = sorted(f"{category}__{name}" for category in extra for name in extra[category])
    assert names == sorted(EXTRAPOLATIONS.values())
    trained = modules.train(mathematics_generator.third(0))
    assert sorted(f"{category}__{name}" for category in trained for name in trained[category]) == list(MODULES)


def test_another_text_of_the_package(package, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mathematics_dataset.util.composition"
    monkeypatch.setitem(mathematics_generator.FIXES, name, {"no such text": ""})
    with pytest.raises(ValueError, match="composition has no 'no such text': mathematics_dataset 1.0.1 is needed"):
        mathematics_generator.import_fixed(name)


def test_thirds() -> None:
    thirds = [mathematics_generator.third(level)((4.0, 16.0)) for level in range(3)]
    assert thirds == [(4.0, 8.0), (8.0, 12.0), (12.0, 16.0)]

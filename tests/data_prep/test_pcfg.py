"""PCFG SET: the two files, and the output and errors of ``python -m data_prep pcfg``."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import pcfg
from data_prep.dataset import DataError, Pair
from data_prep.pcfg import FOLDERS, HELD_OUT_PAIRS, SIZES, TESTED, VALID_SIZES, like_training
from data_prep.pcfg import files as pcfg_files
from data_prep.pcfg.files import FILES, PcfgFiles, load, parse
from data_prep.pcfg.language import count_functions
from data_prep.pcfg.sample import sample
from data_prep.sources import OfficialFile

SRC, TGT = Path("folder/train.src"), Path("folder/train.tgt")
PAIRS = sample(200, seed=11)


def parse_texts(sources: str, targets: str) -> list[Pair]:
    return parse(SRC, sources.encode("utf-8", "surrogatepass"), TGT, targets.encode("utf-8", "surrogatepass"))


@given(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=10))
def test_round_trip(pairs: list[Pair]) -> None:
    texts = ("".join(line + "\n" for line in lines) for lines in zip(*pairs))
    assert parse_texts(*texts) == pairs


@pytest.mark.parametrize(
    ("source", "target", "path", "line", "message"),
    [
        ("fly A1", "A1", SRC, 2, "unknown word 'fly'"),
        ("append A1", "A1", SRC, 2, "append has no second argument"),
        ("copy A1 ", "A1", SRC, 2, "unknown word ''"),
        ("", "A1", SRC, 2, "empty line"),
        ("copy A1", "", TGT, 2, "empty line"),
        ("copy A1\r", "A1", SRC, 2, "ends in CR LF"),
        ("copy A1", "A1\r", TGT, 2, "ends in CR LF"),
        ("copy A1", "B2", TGT, 2, "wrong target: word 1 is 'B2', but the expression means A1"),
        ("repeat A1", "A1", TGT, 2, "wrong target: word 2 is 'the end', but the expression means A1"),
        ("copy A1", "A1 A1", TGT, 2, "wrong target: word 2 is 'A1', but the expression means the end"),
        ("copy A1", "A1 ", TGT, 2, "wrong target: word 2 is '', but the expression means the end"),
        ("copy A1\ncopy A1", "A1", TGT, None, "2 lines, but train.src has 3"),
        ("copy A1", "A1\nA1", TGT, None, "3 lines, but train.src has 2"),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else "",
)
def test_wrong_line(source: str, target: str, path: Path, line: int | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_texts(f"copy C3\n{source}\n", f"C3\n{target}\n")
    error = caught.value
    assert (error.path, error.line) == (path, line) and message in error.message


PIECES = ["copy", "append", "repeat", "A1", "B2", ",", " ", "\n", "\r\n", "\u2028", "\ufeff", "\0", "copy A1\n", "A1\n"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12).map("".join)


@given(TEXTS, TEXTS)
def test_anything_is_pairs_or_an_error_with_its_file(sources: str, targets: str) -> None:
    try:
        pairs = parse_texts(sources, targets)
        assert "\n".join(pair.source for pair in pairs) == sources.removesuffix("\n")
    except DataError as error:
        assert error.path in (SRC, TGT) and "\n" not in str(error)


# ---- the available official files


@pytest.fixture
def official_files(shared_data: Path) -> PcfgFiles:
    return PcfgFiles(raw_dir=shared_data / "pcfg_set")


def test_official_dev_set(official_files: PcfgFiles) -> None:
    pairs = load("pcfgset/dev", official_files)
    assert {condition: len(like_training(condition, pairs)) for condition in FOLDERS} == VALID_SIZES


@pytest.mark.parametrize("condition", TESTED)
def test_official_test_set_obeys_its_rule(condition: str, official_files: PcfgFiles) -> None:
    pairs = load(f"{condition}/test", official_files)
    assert len(pairs) == SIZES[condition][1]
    assert like_training(condition, pairs) == []


def test_official_test_lines_with_a_held_out_pair_are_all_in_gen(official_files: PcfgFiles) -> None:
    simple, gen = (set(load(name, official_files)) for name in ("pcfgset/test", "systematicity/test"))
    assert {pair for pair in simple if TESTED["systematicity"](pair.source)} == simple & gen
    assert len(simple & gen) == 1_061


def test_missing_train_src(run, shared_data: Path, tmp_path: Path) -> None:
    for condition, folder in FOLDERS.items():
        arguments = ["--condition", condition, "--raw-dir", shared_data / "pcfg_set", "--raw-only"]
        result = run("pcfg", *arguments, "--out", tmp_path / "out")
        blob = FILES[f"{folder}/train.src"].git_blob
        assert result.code == 1 and f"the official train.src (git blob {blob}) is not in this folder." in result.err
        assert f"/data/pcfgset/{folder}/train.src" in result.err
    assert list(tmp_path.iterdir()) == []


# ---- small files instead of the official ones


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with the given pairs as official files, and publishes them in the module.

    The sources of training are known only by their id in git, as the real ones are.
    """

    def make(**files: list[Pair]) -> Path:
        folder = tmp_path_factory.mktemp("small")
        for name, pairs in files.items():
            for end, lines in zip(("src", "tgt"), zip(*pairs), strict=True):
                path = f"{name.replace('__', '/')}.{end}"
                data = "".join(line + "\n" for line in lines).encode("ascii")
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_bytes(data)
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                known = OfficialFile(path, len(data), hashlib.sha256(data).hexdigest(), group="pcfg")
                unknown = OfficialFile(path, None, None, git_blob=blob, group="pcfg")
                monkeypatch.setitem(pcfg_files.FILES, path, unknown if path.endswith("train.src") else known)
        return folder

    return make


def adapt(monkeypatch: pytest.MonkeyPatch, condition: str, subsets: dict[str, list[Pair]]) -> None:
    """Publishes the sizes and the vocabulary of these subsets."""
    train, valid, test = subsets.values()
    words = [{word for pairs in subsets.values() for p in pairs for word in p[side].split()} for side in (0, 1)]
    monkeypatch.setitem(pcfg.SIZES, condition, (len(train), len(test)))
    monkeypatch.setitem(pcfg.VALID_SIZES, condition, len(valid))
    monkeypatch.setattr(pcfg, "VOCABULARY", tuple(map(len, words)))
    monkeypatch.setattr(pcfg, "TOGETHER", len(words[0] | words[1]))


@pytest.mark.parametrize("condition", FOLDERS)
def test_small_files(condition: str, run, read_subset, small, server, tmp_path: Path, monkeypatch) -> None:
    dev, rest = PAIRS[:50], PAIRS[50:]
    tested = [p for p in rest if TESTED[condition](p.source)] if condition in TESTED else rest[:20]
    train = [p for p in rest if p not in tested]
    name = "gen" if condition in TESTED else "test"
    expected = {"train": train, "valid": like_training(condition, dev), name: tested}
    adapt(monkeypatch, condition, expected)
    files = {f"{FOLDERS[condition]}__train": train, "pcfgset__dev": dev, f"{FOLDERS[condition]}__test": tested}
    folder = small(**files)
    options = ["pcfg", "--condition", condition]
    result = run(*options, "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert {subset: read_subset(tmp_path / "out", subset) for subset in expected} == expected
    types = (tmp_path / "out" / "raw" / f"{name}.type").read_text("ascii").splitlines()
    assert types == [f"functions_{count_functions(pair.source):02}" for pair in tested]
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["request"] == {
        **{"dataset": "pcfg", "condition": condition},
        **{"ratio": None, "generate": None, "seed": None, "raw_only": False},
    }
    entry = found["origin"]["files"][0]
    assert entry == {"name": f"{FOLDERS[condition]}/train.src", "git_blob": FILES[entry["name"]].git_blob}
    assert (tmp_path / "out" / "dict.src.txt").read_bytes() == (tmp_path / "out" / "dict.tgt.txt").read_bytes()
    server.files = {f"/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*.*")}
    download = ["--download", "--mirror", server.url, "--cache-dir", tmp_path / "cache"]
    assert run(*options, *download, "--out", tmp_path / "again").code == 0
    for path in (tmp_path / "out").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "out")).read_bytes()


def prepare_small(run, small, tmp_path: Path, condition: str, train: list[Pair], gen: list[Pair]):
    """Prepares files of which only ``dev`` is valid."""
    files = {f"{FOLDERS[condition]}__train": train, "pcfgset__dev": PAIRS[:50], f"{FOLDERS[condition]}__test": gen}
    result = run("pcfg", "--condition", condition, "--raw-dir", small(**files), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert list(tmp_path.iterdir()) == []
    return result.err


def test_right_lines_of_another_file_are_refused(run, small, tmp_path: Path) -> None:
    folder = small(pcfgset__train=PAIRS[60:], pcfgset__dev=PAIRS[:50], pcfgset__test=PAIRS[50:60])
    for end, line in (("src", "copy A1 B2\n"), ("tgt", "A1 B2\n")):
        (folder / "pcfgset" / f"dev.{end}").write_text(line, "ascii")
    result = run("pcfg", "--condition", "iid", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {folder}/pcfgset/dev.src: not the official dev.src: 11 bytes with sha256 ")
    assert list(tmp_path.iterdir()) == []


def test_example_in_the_wrong_subset(run, small, tmp_path: Path) -> None:
    short, long = Pair("copy A1 B2", "A1 B2"), Pair("copy " * 9 + "A1", "A1")
    error = prepare_small(run, small, tmp_path, "productivity", [short, long], [long])
    assert "error: train may not have 'copy copy" in error and "with more than 8 functions" in error
    error = prepare_small(run, small, tmp_path, "productivity", [short], [long, short])
    assert "error: gen may not have 'copy A1 B2'" in error
    held_out = Pair("append swap_first_last A1 B2 , C3", "B2 A1 C3")
    error = prepare_small(run, small, tmp_path, "systematicity", [held_out], [held_out])
    assert "error: train may not have 'append swap_first_last" in error


def test_other_size_than_published(run, small, tmp_path: Path) -> None:
    error = prepare_small(run, small, tmp_path, "iid", PAIRS[50:100], PAIRS[100:])
    assert (
        error == "error: subset train has 50 examples instead of the published 82,622: "
        "are these the official files, and complete?\n"
    )


def test_wrong_target_in_an_official_file(run, small, tmp_path: Path) -> None:
    error = prepare_small(run, small, tmp_path, "iid", [PAIRS[60], Pair("echo A1", "A1")], PAIRS[100:])
    assert "/pcfgset/train.tgt:2: wrong target: word 2 is 'the end', but the expression means A1" in error


def test_second_argument_is_no_held_out_pair() -> None:
    tested = TESTED["systematicity"]
    assert all(tested(f"copy {pair} A1 , B2") for pair in HELD_OUT_PAIRS)
    assert not tested("append A1 , swap_first_last B2") and not tested("repeat copy remove_second A1 , B2")


# ---- generated


@pytest.mark.parametrize("condition", FOLDERS)
def test_generated(condition: str, run, read_subset, tmp_path: Path) -> None:
    options = ["pcfg", "--condition", condition, "--generate", 2_000, "--seed", 9]
    result = run(*options, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0 and "examples: generated, not the official data" in result.out
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["origin"]["generated"] == found["membership"] == "generated, not the official data"
    name = "gen" if condition in TESTED else "test"
    subsets = {subset: read_subset(tmp_path / "out", subset) for subset in ("train", "valid", name)}
    types = (tmp_path / "out" / "raw" / "train.type").read_text("ascii").splitlines()
    assert types == [f"functions_{count_functions(pair.source):02}" for pair in subsets["train"]]
    drawn = sample(2_000, seed=9)
    assert subsets["valid"] == like_training(condition, drawn[:100])
    assert sorted(subsets["train"] + subsets[name]) == sorted(drawn[100:])
    if condition == "productivity":
        assert max(count_functions(pair.source) for pair in subsets["train"]) == 8
    if condition == "iid":
        assert len(subsets["test"]) == 200
    else:
        assert like_training(condition, subsets["train"]) == subsets["train"]
        assert like_training(condition, subsets[name]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--condition iid --seed 1", "--seed belongs to --generate"),
        ("--condition iid --generate 1000 --download", "--generate needs no official files"),
        ("--condition iid --generate 999", "argument --generate: must be a whole number from 1000 to 1000000, not"),
        ("--condition iid --generate 1e4", "argument --generate: must be a whole number"),
        ("--condition local", "argument --condition: invalid choice: 'local'"),
        ("--generate 1000", "the following arguments are required: --condition"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("pcfg", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_of_the_official_files_that_are_here(official_files: PcfgFiles) -> None:
    pairs = [pair for name in ("pcfgset/dev", "pcfgset/test") for pair in load(name, official_files)]
    sources, targets = ({word for pair in pairs for word in pair[side].split()} for side in (0, 1))
    assert (len(sources), len(targets)) == pcfg.VOCABULARY and len(sources | targets) == pcfg.TOGETHER


def test_hashes_of_the_files_that_are_here(shared_data: Path) -> None:
    found = [path for path in FILES if (shared_data / "pcfg_set" / f"{path}.gz").is_file()]
    assert len(found) == 8
    for path in found:
        data = gzip.decompress((shared_data / "pcfg_set" / f"{path}.gz").read_bytes())
        FILES[path].check(Path(path), data)
        assert len(data) == FILES[path].size

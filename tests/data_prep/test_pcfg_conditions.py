"""PCFG SET: substitutivity, localism and overgeneralisation, from small files instead of the official ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.dataset import Pair, shorten
from data_prep.pcfg import exceptions as pcfg_exceptions
from data_prep.pcfg import files as pcfg_files
from data_prep.pcfg import localism as pcfg_unrolled
from data_prep.pcfg import synonyms as pcfg_synonyms
from data_prep.pcfg.files import DEV, PcfgFiles, load
from data_prep.pcfg.language import (
    TWINS,
    count_functions,
    exception_in,
    interpret,
    with_exception,
    without_twins,
)
from data_prep.pcfg.sample import sample
from data_prep.pcfg.synonyms import rename, rename_half
from data_prep.sources import OfficialFile

PAIRS = sample(200, seed=12)
DEV_PAIRS, TEST_PAIRS, TRAIN_PAIRS = PAIRS[:40], PAIRS[40:80], PAIRS[80:]
Files = dict[str, list[Pair] | list[str]]


def means(*sources: str) -> list[Pair]:
    """The sources with their meanings, including synonyms."""
    return [Pair(source, interpret(without_twins(source))) for source in sources]


def excepted(*sources: str) -> list[Pair]:
    """The sources with their exceptional meanings."""
    return [Pair(source, interpret(with_exception(source))) for source in sources]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Files], Path]:
    """Makes a folder with the given pairs or lines as official files, and publishes them in the modules."""

    def make(files: Files) -> Path:
        folder = tmp_path_factory.mktemp("small")
        for name, content in files.items():
            texts = (
                {name: content} if name.endswith("tsv") else dict(zip((f"{name}.src", f"{name}.tgt"), zip(*content)))
            )
            for path, lines in texts.items():
                data = "".join(line + "\n" for line in lines).encode("utf-8")
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
                file = OfficialFile(path, len(data), hashlib.sha256(data).hexdigest())
                monkeypatch.setitem(pcfg_files.FILES, path, file)
        return folder

    return make


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Publishes the vocabulary of these subsets in one module."""

    def publish(module, subsets: dict[str, list[Pair]]) -> None:
        words = [{w for pairs in subsets.values() for p in pairs for w in p[side].split()} for side in (0, 1)]
        monkeypatch.setattr(module, "VOCABULARY", tuple(map(len, words)))
        monkeypatch.setattr(module, "TOGETHER", len(words[0] | words[1]))

    return publish


def types_of(folder: Path, subset: str) -> list[str]:
    return (folder / "raw" / f"{subset}.type").read_text("ascii").splitlines()


def refusal(run, tmp_path: Path, folder: Path, *options: str) -> str:
    """The printed error line of a refused preparation."""
    result = run("pcfg", *options, "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert not (tmp_path / "out").exists()
    return result.err.removeprefix("error: ").replace(f"{folder}/", "")


# ---- substitutivity

PLAIN = [pair for pair in TEST_PAIRS if any(twin.removesuffix("_twin") in pair.source.split() for twin in TWINS)]
RENAMED_FUNCTIONS = [
    next(twin.removesuffix("_twin") for twin in TWINS if twin.removesuffix("_twin") in pair.source.split())
    for pair in PLAIN
]
TWIN_PAIRS = [Pair(rename(p.source, name), p.target) for p, name in zip(PLAIN, RENAMED_FUNCTIONS, strict=True)]
PRIMITIVES = means("append_twin A1 , B2", "swap_first_last_twin A1 B2", "repeat_twin C3", "remove_second_twin C3 , D4")


def synonym_files(variant: str, train: list[Pair], test: list[Pair] = PLAIN, gen: list[Pair] = TWIN_PAIRS) -> Files:
    folder = f"substitutivity/{variant}"
    return {f"{folder}/train": train, DEV: DEV_PAIRS, f"{folder}/test": test, f"{folder}/test_twin": gen}


@pytest.mark.parametrize("variant", pcfg_synonyms.SIZES)
def test_synonyms(variant: str, run, read_subset, small, publish, tmp_path: Path, monkeypatch) -> None:
    equal = variant == "equally_distributed"
    train = rename_half(TRAIN_PAIRS, 3) if equal else TRAIN_PAIRS + PRIMITIVES
    valid = rename_half(DEV_PAIRS, 1) if equal else DEV_PAIRS
    expected = {"train": train, "valid": valid, "test": PLAIN, "gen": TWIN_PAIRS}
    sizes = {name: len(pairs) for name, pairs in expected.items()}
    monkeypatch.setitem(pcfg_synonyms.SIZES, variant, {name: sizes[name] for name in ("train", "test", "gen")})
    monkeypatch.setattr(pcfg_synonyms, "DEV_SIZE", len(DEV_PAIRS))
    publish(pcfg_synonyms, expected)
    folder = small(synonym_files(variant, train))
    result = run("pcfg", "--condition", f"substitutivity_{variant}", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert {subset: read_subset(tmp_path / "out", subset) for subset in expected} == expected
    assert types_of(tmp_path / "out", "test") == types_of(tmp_path / "out", "gen") == RENAMED_FUNCTIONS
    assert types_of(tmp_path / "out", "valid") == [f"functions_{count_functions(p.source):02}" for p in DEV_PAIRS]
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["subsets"]["valid"]["published_size"] == (None if equal else 40)
    assert ("our own draw renames half" in found["membership"]) == equal
    assert [file["name"] for file in found["origin"]["files"]][-1] == f"substitutivity/{variant}/test_twin.tgt"


TWICE = "append append A1 , B2 , repeat C3"
TWICE_TWINS = rename(TWICE, "append")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": means("copy append_twin A1 , B2")},
            "substitutivity/primitive/train.src:121: a synonym is not the only function of 'copy append_twin A1 , B2'",
        ),
        ({"train": [Pair("repeat_twin A1", "A1")]}, "train.tgt:121: wrong target: word 2 is 'the end'"),
        ({"train": [Pair("copy_twin A1", "A1")]}, "train.src:121: unknown word 'copy_twin'"),
        ({"test": means("repeat_twin A1"), "gen": means("repeat_twin A1")}, "test may not have a synonym"),
        ({"dev": means("repeat_twin A1")}, "valid may not have a synonym, as it has in 'repeat_twin A1'"),
        ({"gen": means(TWICE)}, f"/test_twin.src:{len(PLAIN) + 1}: not '{TWICE}' with one function renamed throughout"),
        ({"gen": means(TWICE.replace("append", "append_twin", 1))}, f"test_twin.src:{len(PLAIN) + 1}: not '{TWICE}'"),
        (
            {"gen": means(TWICE_TWINS.replace("repeat", "repeat_twin"))},
            f"test_twin.src:{len(PLAIN) + 1}: not '{TWICE}'",
        ),
        ({"gen": means("append_twin A1 , B2")}, f"test_twin.src:{len(PLAIN) + 1}: not '{TWICE}'"),
        ({"gen": []}, f"test_twin.src: {len(PLAIN)} lines, but the test without synonyms has {len(PLAIN) + 1}"),
    ],
    ids=[
        *("nested-synonym", "target", "no-such-synonym", "synonym-in-test", "synonym-in-dev"),
        *("nothing-renamed", "half-renamed", "two-renamed", "another-line", "short"),
    ],
)
def test_synonyms_refused(changes: dict[str, list[Pair]], message: str, run, small, tmp_path: Path) -> None:
    more = {
        "train": [],
        "dev": [],
        "test": means(TWICE),
        "gen": means(TWICE.replace("append", "append_twin")),
    } | changes
    files = synonym_files("primitive", TRAIN_PAIRS + more["train"], PLAIN + more["test"], TWIN_PAIRS + more["gen"])
    files[DEV] = DEV_PAIRS + more["dev"]
    sizes = {"train": 120 + len(more["train"]), "test": len(PLAIN) + 1, "gen": len(PLAIN) + len(more["gen"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pcfg_synonyms.SIZES, "primitive", sizes)
        patch.setattr(pcfg_synonyms, "DEV_SIZE", 40 + len(more["dev"]))
        assert message in refusal(run, tmp_path, small(files), "--condition", "substitutivity_primitive")


def test_synonyms_of_another_size_than_published(run, small, tmp_path: Path) -> None:
    folder = small(synonym_files("primitive", TRAIN_PAIRS + PRIMITIVES))
    error = refusal(run, tmp_path, folder, "--condition", "substitutivity_primitive")
    assert (
        error == "subset train has 124 examples instead of the published 82,954: "
        "are these the official files, and complete?\n"
    )


def test_rename_half_is_the_same_everywhere() -> None:
    # Pinned: a change here changes the valid set of existing data.
    pairs = sample(1_000, seed=1)
    renamed = rename_half(pairs, 1)
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in renamed)
    assert (
        hashlib.sha256(text.encode("ascii")).hexdigest()
        == "3fa8c3c7335b887604b99f663732cea932422cfe933618e4b28f2e03b725bdf1"
    )
    assert [Pair(without_twins(pair.source), pair.target) for pair in renamed] == pairs
    twins = [word for pair in renamed for word in pair.source.split(" ") if word in TWINS]
    could_be = sum(word + "_twin" in TWINS for pair in pairs for word in pair.source.split(" "))
    assert set(twins) == set(TWINS) and len(twins) / could_be == pytest.approx(0.5, abs=0.03)


# ---- overgeneralisation

EXCEPTIONS = (
    *("reverse echo A1 B2", "copy prepend remove_first A1 , B2 , C3 D4"),
    *("echo remove_first A1 , B2", "append prepend reverse A1 B2 , C3 , D4", "prepend reverse echo A1 B2 , C3"),
)
REGULAR = [pair for pair in TRAIN_PAIRS if exception_in(pair.source) is None]
OVERGENERALISATION = ("--condition", "overgeneralisation", "--ratio", "0.0005")


def exception_files(**changes: list[Pair]) -> Files:
    files = {
        "train": REGULAR + excepted(*EXCEPTIONS),
        "dev": DEV_PAIRS,
        "exception": excepted(*EXCEPTIONS),
        "original": means(*EXCEPTIONS),
    } | changes
    folder = "overgeneralisation"
    return {
        f"{folder}/train_pcfg_ratio=0.0005": files["train"],
        DEV: files["dev"],
        **{f"{folder}/test_pcfg_ratio=0.0005_{test}": files[test] for test in ("exception", "original")},
    }


@pytest.fixture
def publish_exceptions(monkeypatch: pytest.MonkeyPatch, publish) -> dict[str, list[Pair]]:
    """The subsets made from ``exception_files()``, whose sizes become the published ones."""
    valid = [pair for pair in DEV_PAIRS if exception_in(pair.source) is None]
    subsets = {
        "train": REGULAR + excepted(*EXCEPTIONS),
        "valid": valid,
        "exception": excepted(*EXCEPTIONS),
        "original": means(*EXCEPTIONS),
    }
    monkeypatch.setitem(pcfg_exceptions.EXCEPTION_SIZES, "0.0005", len(EXCEPTIONS))
    monkeypatch.setattr(pcfg_exceptions, "REGULAR_SIZE", len(REGULAR))
    monkeypatch.setattr(pcfg_exceptions, "VALID_SIZE", len(valid))
    publish(pcfg_exceptions, subsets)
    return subsets


def test_exceptions(publish_exceptions, run, read_subset, small, server, tmp_path: Path) -> None:
    folder = small(exception_files())
    assert len(publish_exceptions["valid"]) < len(DEV_PAIRS)
    result = run("pcfg", *OVERGENERALISATION, "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert {subset: read_subset(tmp_path / "out", subset) for subset in publish_exceptions} == publish_exceptions
    expected = ["reverse_echo", "prepend_remove_first", "echo_remove_first", "prepend_reverse", "reverse_echo"]
    assert types_of(tmp_path / "out", "exception") == types_of(tmp_path / "out", "original") == expected
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["request"]["ratio"] == "0.0005" and found["subsets"]["original"]["published_size"] == 5
    assert "--valid-subset valid,exception,original" in result.out
    server.files = {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.*")}
    options = ["--download", "--mirror", server.url, "--cache-dir", tmp_path / "cache"]
    assert run("pcfg", *OVERGENERALISATION, *options, "--out", tmp_path / "again").code == 0
    for path in (tmp_path / "out").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "out")).read_bytes()


OTHER = "echo remove_first Z9 , Z8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": REGULAR + means(*EXCEPTIONS)}, f"train_pcfg_ratio=0.0005.tgt:{len(REGULAR) + 1}: wrong target"),
        ({"train": REGULAR + excepted(*EXCEPTIONS, OTHER)}, "train_pcfg_ratio=0.0005.src: 6 exceptions, but 5 are"),
        ({"train": REGULAR + excepted(*EXCEPTIONS[:-1])}, "train_pcfg_ratio=0.0005.src: 4 exceptions, but 5 are"),
        (
            {"train": excepted(OTHER) + REGULAR + excepted(*EXCEPTIONS[1:])},
            f"overgeneralisation/train_pcfg_ratio=0.0005.src:1: '{OTHER}' is not the exception tested on this line",
        ),
        ({"exception": means(*EXCEPTIONS)}, "test_pcfg_ratio=0.0005_exception.tgt:1: wrong target"),
        ({"original": excepted(*EXCEPTIONS)}, "test_pcfg_ratio=0.0005_original.tgt:1: wrong target"),
        ({"original": means(*EXCEPTIONS[:-1], OTHER)}, "_ratio=0.0005_original.src: not the sources of the exceptions"),
        ({"dev": [*DEV_PAIRS, REGULAR[7]]}, "subset valid has"),
    ],
    ids=["regular", "more", "fewer", "other", "exception", "original", "other-sources", "size-of-valid"],
)
def test_exceptions_refused(changes, message, publish_exceptions, run, small, tmp_path: Path) -> None:
    assert message in refusal(run, tmp_path, small(exception_files(**changes)), *OVERGENERALISATION)


def test_only_exceptions_may_be_tested_as_trained(publish_exceptions, run, small, tmp_path: Path) -> None:
    dev = [REGULAR[7], *DEV_PAIRS[1:]]
    assert exception_in(DEV_PAIRS[0].source) is None
    error = refusal(run, tmp_path, small(exception_files(dev=dev)), *OVERGENERALISATION)
    assert error == f"train and valid overlap: example 8 of train is example 1 of valid, {shorten(REGULAR[7].source)}\n"


# ---- localism

# The shortest of the longer strings is a training example.
TRAINED = means("copy A1 B2", "reverse C3")
LONGER = means("copy A1 B2 C3 D4 E5 F6", "append A1 , B2 C3 D4", "copy A1 B2")
DEVELOPED, TESTED = means("copy C3"), means("repeat copy A1 B2", "copy B2", "append reverse A1 B2 , C3")
STEPS = [
    "unrolled\tcopy A1 B2 \t*1",
    "unrolled\trepeat *1\tA1 B2 A1 B2",
    "original\trepeat copy A1 B2\tA1 B2 A1 B2",
    "unrolled\treverse A1 B2 \t*1",
    "unrolled\tappend *1 , C3\tB2 A1 C3",
    "original\tappend reverse A1 B2 , C3\tB2 A1 C3",
]


def localism_files() -> Files:
    sets = {"train": TRAINED, "valid": DEVELOPED, "test": TESTED, "gen": LONGER}
    return {pcfg_unrolled.NAMES[subset]: pairs for subset, pairs in sets.items()} | {pcfg_unrolled.UNROLLED: STEPS}


def test_localism(run, read_subset, small, publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"train": TRAINED, "valid": DEVELOPED, "test": TESTED, "gen": LONGER}
    monkeypatch.setattr(pcfg_unrolled, "SIZES", {subset: len(pairs) for subset, pairs in expected.items()})
    publish(pcfg_unrolled, expected)
    folder = small(localism_files())
    result = run("pcfg", "--condition", "localism", "--raw-dir", folder, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert {subset: read_subset(tmp_path / "out", subset) for subset in expected} == expected
    official = (folder / "localism" / "unrolled_test.tsv").read_bytes()
    assert (tmp_path / "out" / "raw" / "unrolled.tsv").read_bytes() == official
    assert types_of(tmp_path / "out", "gen") == ["letters_06", "letters_03", "letters_02"]
    assert types_of(tmp_path / "out", "test") == ["functions_02", "functions_01", "functions_02"]
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["files"]["raw/unrolled.tsv"] == hashlib.sha256(official).hexdigest()
    assert found["origin"]["files"][-1]["name"] == "localism/unrolled_test.tsv"


def test_localism_of_other_files(run, small, tmp_path: Path) -> None:
    error = refusal(run, tmp_path, small(localism_files()), "--condition", "localism")
    assert (
        error == "subset train has 2 examples instead of the published 82,622: "
        "are these the official files, and complete?\n"
    )
    folder = small(localism_files())
    (folder / pcfg_unrolled.UNROLLED).write_text("\n".join(STEPS[:3]) + "\n", "ascii")
    error = refusal(run, tmp_path, folder, "--condition", "localism")
    assert error.startswith("localism/unrolled_test.tsv: not the official unrolled_test.tsv: ")


# ---- the available official files, and the command line


def test_sizes_that_follow_from_the_official_files_that_are_here(shared_data: Path) -> None:
    files = PcfgFiles(raw_dir=shared_data / "pcfg_set")
    dev, test = load(DEV, files), load("pcfgset/test", files)
    assert len(dev) == pcfg_files.DEV_SIZE
    assert sum(exception_in(pair.source) is None for pair in dev) == pcfg_exceptions.VALID_SIZE
    assert sum(count_functions(pair.source) > 1 for pair in test) == 9_567
    # Training for overgeneralisation also has the lines of the official test without an exception.
    assert sum(exception_in(pair.source) is None for pair in test) == pcfg_exceptions.REGULAR_SIZE - 73_587


def test_official_files_of_every_condition_are_known() -> None:
    for variant in pcfg_synonyms.SIZES:
        for name in ("train", "test", "test_twin"):
            assert f"substitutivity/{variant}/{name}.src" in pcfg_files.FILES
    for ratio in pcfg_exceptions.EXCEPTION_SIZES:
        sources = [f"overgeneralisation/test_pcfg_ratio={ratio}_{test}.src" for test in pcfg_exceptions.TESTS]
        assert pcfg_files.FILES[sources[0]].sha256 == pcfg_files.FILES[sources[1]].sha256
    files = pcfg_files.FILES.values()
    assert len(files) == 53
    assert all((file.sha256 is None) == file.path.endswith("train.src") or "=" in file.path for file in files)
    assert all((file.git_blob is None) == (file.sha256 is not None) == (file.size is not None) for file in files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--condition overgeneralisation",
            "--condition overgeneralisation needs --ratio, and no other condition has it",
        ),
        (
            "--condition iid --ratio 0.001",
            "--condition overgeneralisation needs --ratio, and no other condition has it",
        ),
        ("--condition overgeneralisation --ratio 0.01", "argument --ratio: invalid choice: '0.01'"),
        ("--condition substitutivity", "argument --condition: invalid choice: 'substitutivity'"),
        (
            "--condition localism --generate 1000",
            "--generate makes iid, systematicity, productivity; localism needs the official files",
        ),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("pcfg", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []

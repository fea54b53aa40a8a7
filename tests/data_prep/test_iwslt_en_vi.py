"""IWSLT'15 English-Vietnamese: the official archives, an invented training archive, and errors."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import html
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from data_prep.iwslt_en_vi import FILES, SIZES, IwsltFiles
from fairseq_sg.scoring.plain_bleu import to_text
from helpers.data_files import lines_of, manifest


@pytest.fixture(scope="session")
def archives(shared_data: Path) -> Path:
    """The folder with the official archives, without that of training."""
    return shared_data / "iwslt_en_vi"


@pytest.fixture(scope="session")
def sentences(archives: Path) -> dict[str, list[str]]:
    """The sentences of the official files by name, ``tst2012.en`` …, read without the code under test."""
    found = {}
    for path in archives.glob("*.tgz"):
        with tarfile.open(path) as archive:
            for name in archive.getnames():
                text = archive.extractfile(name).read().decode("utf-8")
                found[name] = [html.unescape(line) for line in text.removesuffix("\n").split("\n")]
    return found


def pack(path: Path, texts: dict[str, str]) -> Path:
    """An archive of text files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode("utf-8"))
            archive.addfile(member, io.BytesIO(text.encode("utf-8")))
    return path


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@pytest.fixture
def whole(
    archives: Path,
    sentences: dict[str, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with all three archives.

    That of training is invented: 600 sentences with an odd separator, an empty side, and two sentences of the test.
    """
    folder = tmp_path_factory.mktemp("iwslt")
    for path in archives.glob("*.tgz"):
        shutil.copyfile(path, folder / path.name)
    english = [f"{line} &quot; {n} &quot;" for n, line in enumerate(sentences["tst2012.en"][:600])]
    vietnamese = [f"{line} &quot; {n} &quot;" for n, line in enumerate(sentences["tst2012.vi"][:600])]
    english[0], vietnamese[1] = "a short\u2028sentence", " "
    english[2], english[3] = "Thank you .", "All right ."
    texts = {"train.en": "\n".join(english) + "\n", "train.vi": "\n".join(vietnamese) + "\n"}
    data = pack(folder / "train-en-vi.tgz", texts).read_bytes()
    monkeypatch.setitem(FILES, "train", dataclasses.replace(FILES["train"], git_blob=git_blob(data)))
    monkeypatch.setitem(SIZES, "train", 600)
    return folder


def sizes(folder: Path) -> dict[str, int]:
    return {name: entry["size"] for name, entry in manifest(folder)["subsets"].items()}


def test_published_lengths(run, whole: Path, sentences: dict[str, list[str]], tmp_path: Path) -> None:
    """Split at 20 English words; every sentence of the official test occurs once."""
    out = tmp_path / "out"
    result = run("iwslt_en_vi", "--raw-dir", whole, "--vocab-size", 900, "--raw-only", "--out", out)
    assert result.code == 0 and result.err == ""
    found = sizes(out)
    train = found.pop("train")
    assert found == {"valid": 1_051, "test": 737, "gen": 531, "dev": 502}
    left_out = manifest(out)["origin"]["left_out_of_train"]
    assert left_out["with an empty side"] == 1 and left_out["whose source is in another subset"] == 2
    assert train + sum(left_out.values()) == 600
    for subset in ("train", "valid", "test", "gen", "dev"):
        long = subset in ("gen", "dev")
        assert all((len(line.split()) > 20) == long for line in lines_of(out, f"{subset}.plain.src")), subset
    for end, language in (("src", "en"), ("tgt", "vi")):
        expected = sentences[f"tst2013.{language}"]
        halves = [lines_of(out, f"{subset}.plain.{end}") for subset in ("test", "gen")]
        assert sorted(halves[0] + halves[1]) == sorted(expected) and halves[0] == [
            x for x in expected if x in halves[0]
        ]
        assert list(to_text(dict(enumerate(lines_of(out, f"gen.{end}")))).values()) == halves[1]
    assert "a short sentence" in lines_of(out, "train.plain.src")
    assert "&quot;" not in "".join(lines_of(out, "train.plain.src"))
    assert [file["name"] for file in manifest(out)["origin"]["files"]] == [file.name for file in FILES.values()]


def test_all_lengths(run, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["iwslt_en_vi", "--raw-dir", whole, "--max-length", 0, "--vocab-size", 1500, "--raw-only", "--out", out]
    result = run(*command)
    assert result.code == 0 and sizes(out) == {"train": 597, "valid": 1_553, "test": 1_268}
    rows = {line.split()[0]: line.split()[2] for line in result.out.splitlines()[3:6]}
    assert rows == {"train": "600", "valid": "1,553", "test": "1,268"}, "published sizes"


def test_packed_archives(run, whole: Path, tmp_path: Path) -> None:
    """As ``--help`` says, files may end in .gz: also those that are packed already."""
    command = ["iwslt_en_vi", "--raw-dir", whole, "--vocab-size", 900, "--raw-only", "--out"]
    assert run(*command, tmp_path / "plain").code == 0
    for path in list(whole.iterdir()):
        (whole / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert run(*command, tmp_path / "packed").code == 0
    plain, packed = ((tmp_path / name / "dataset.json").read_bytes() for name in ("plain", "packed"))
    assert plain == packed


def test_small(run, archives: Path, sentences: dict[str, list[str]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("iwslt_en_vi", "--small", "--raw-dir", archives, "--out", out)
    assert result.code == 0 and "re-split, not the published sets" in result.out
    assert sizes(out) == {"train": 1_040, "valid": 374, "test": 363, "gen": 271, "dev": 260}
    assert set(lines_of(out, "train.plain.src")) <= set(sentences["tst2012.en"])
    first, second = sentences["tst2013.en"][:634], sentences["tst2013.en"][634:]
    assert sorted(lines_of(out, "valid.plain.src") + lines_of(out, "dev.plain.src")) == sorted(first)
    assert sorted(lines_of(out, "test.plain.src") + lines_of(out, "gen.plain.src")) == sorted(second)
    assert manifest(out)["request"] == {
        "dataset": "iwslt_en_vi",
        "small": True,
        "model": "unigram",
        "vocab_size": 2_000,
        "joint": True,
        "max_length": 20,
        "length_unit": "words",
        "raw_only": False,
    }
    assert all((out / f"gen.src-tgt.{name}").stat().st_size for name in ("src.bin", "tgt.idx"))


def test_training_archive_is_needed(run, archives: Path, tmp_path: Path) -> None:
    result = run("iwslt_en_vi", "--raw-dir", archives, "--out", tmp_path / "out")
    assert (result.code, list(tmp_path.iterdir())) == (1, [])
    assert f"{archives}: the official train-en-vi.tgz (git blob 76ce2671526e0b05a9422020820e656b6e2a1472)" in result.err
    assert f"--download gets {IwsltFiles.urls['iwslt_en_vi']}/train-en-vi.tgz" in result.err


def test_other_archives_are_refused(run, whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = whole / "test-2013-en-vi.tgz"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    result = run("iwslt_en_vi", "--raw-dir", whole, "--out", tmp_path / "out")
    assert result.code == 1 and result.err.startswith(f"error: {path}: not the official test-2013-en-vi.tgz")
    monkeypatch.setitem(SIZES, "valid", 1_554)
    result = run("iwslt_en_vi", "--raw-dir", whole, "--out", tmp_path / "out")
    assert result.code == 1 and "dev-2012-en-vi.tgz: has 1,553 pairs instead of the published 1,554" in result.err
    assert list(tmp_path.iterdir()) == []


def test_archive_without_the_text(whole: Path, run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = pack(whole / "train-en-vi.tgz", {"train.en": "a\n"}).read_bytes()
    monkeypatch.setitem(FILES, "train", dataclasses.replace(FILES["train"], git_blob=git_blob(data)))
    result = run("iwslt_en_vi", "--raw-dir", whole, "--out", tmp_path / "out")
    assert (result.code, result.err) == (1, f"error: {whole / 'train-en-vi.tgz'}: has no train.vi\n")


def test_length_unit_alone(run, tmp_path: Path) -> None:
    result = run("iwslt_en_vi", "--max-length", 0, "--length-unit", "words", "--out", tmp_path / "out")
    assert result.code == 2 and "add --max-length" in result.err

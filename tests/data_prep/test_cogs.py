"""COGS: the parser, and the output and errors of ``python -m data_prep cogs``."""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from hypothesis import given
from hypothesis import strategies as st

from data_prep import cogs
from data_prep.cogs import FILES, GEN_2021, LEXICAL, STRUCTURAL, TYPES, parse
from data_prep.dataset import DataError, Pair
from data_prep.sources import OfficialFile
from helpers.data_files import manifest

FILE = Path("folder/gen.tsv")
KNOWN = {"primitive": 1, "in_distribution": 1}
GOOD = "shark\tLAMBDA a . shark ( a )\tprimitive"
SUBSETS = ("train", "valid", "test", "gen")

WORDS = st.text(st.characters(exclude_categories=["Z", "Cc", "Cs"]), min_size=1).filter(lambda w: "\ufeff" not in w)
SENTENCES = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)
ROWS = st.tuples(st.builds(Pair, SENTENCES, SENTENCES), st.sampled_from(sorted(KNOWN)))


@given(st.lists(ROWS, min_size=1, max_size=5, unique_by=lambda row: row[0].source))
def test_round_trip(rows: list[tuple[Pair, str]]) -> None:
    text = "".join(f"{pair.source}\t{pair.target}\t{kind}\n" for pair, kind in rows)
    pairs, types = parse(FILE, text.encode("utf-8"), KNOWN)
    assert list(zip(pairs, types, strict=True)) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty line"),
        ("\t\t", "empty line"),
        ("shark\tshark", "2 columns between tabs instead of sentence, logical form and type"),
        (GOOD + "\t", "4 columns between tabs"),
        ("shark LAMBDA a . shark ( a ) primitive", "1 columns between tabs"),
        ("\tshark\tprimitive", "the sentence is empty"),
        ("shark\t\tprimitive", "the logical form is empty"),
        ("shark\tshark\t", "the type is empty"),
        ("a  shark\tshark\tprimitive", "the sentence does not consist of words between single spaces: 'a  shark'"),
        ("shark\t shark\tprimitive", "the logical form does not consist of words between single spaces: ' shark'"),
        ("shark\tshark\tprimitive ", "the type does not consist of words between single spaces: 'primitive '"),
        ("a\u00a0shark\tshark\tprimitive", "the sentence does not consist of words between single spaces"),
        ("shark\tshark\tcp_recursion", "unknown type 'cp_recursion'"),
        ("hedgehog\tanother\tprimitive", "the sentence 'hedgehog' is already on line 1"),
        (GOOD + "\r", "ends in CR LF"),
        ("shark\u2028\tshark\tprimitive", "holds U+2028 (LINE SEPARATOR) inside the line"),
        ("x" * 300_000 + "\tshark\tnothing", "unknown type 'nothing'"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_wrong_line(line: str, message: str) -> None:
    data = f"hedgehog\tLAMBDA a . hedgehog ( a )\tprimitive\n{line}\n{GOOD}\n".encode()
    with pytest.raises(DataError) as caught:
        parse(FILE, data, KNOWN)
    error = caught.value
    assert (error.path, error.line) == (FILE, 2) and message in error.message
    assert len(str(error)) < 200


PIECES = ["shark", "primitive", "\t", "\t\t", " ", "\n", "\r\n", "\u2028", "\ufeff", "\0", GOOD, GOOD + "\n"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20).map("".join) | st.binary(max_size=100))
def test_anything_is_rows_or_an_error_with_its_line(text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    try:
        pairs, types = parse(FILE, data, KNOWN)
        assert len(pairs) == len(types) == len(data.removesuffix(b"\n").split(b"\n"))
    except DataError as error:
        assert error.path == FILE and 1 <= error.line <= data.count(b"\n") + 1
        assert "\n" not in str(error)


# ---- the official files


@pytest.fixture(scope="session")
def cogs_files(shared_data: Path) -> Path:
    """The folder with the official files."""
    return shared_data / "cogs"


@pytest.fixture(scope="session")
def rows(cogs_files: Path) -> dict[str, list[list[str]]]:
    """The rows of the official files, read without the code under test."""
    texts = {subset: cogs_files / f"{FILES[subset].name}.gz" for subset in SUBSETS}
    return {
        subset: [line.split("\t") for line in gzip.decompress(text.read_bytes()).decode("ascii").splitlines()]
        for subset, text in texts.items()
    }


def lines_of(folder: Path, name: str) -> list[str]:
    return (folder / "raw" / name).read_text("ascii").splitlines()


def test_official_files(run, cogs_files: Path, rows: dict[str, list[list[str]]], tmp_path: Path) -> None:
    result = run("cogs", "--raw-dir", cogs_files, "--out", tmp_path / "out")
    assert result.code == 0 and result.err == ""
    assert [line.split() for line in result.out.splitlines()[3:7]] == [
        ["train", "24,155", "24,155", "22", "153"],
        ["valid", "3,000", "3,000", "21", "162"],
        ["test", "3,000", "3,000", "19", "130"],
        ["gen", "21,000", "21,000", "61", "480"],
    ]
    assert "vocabulary: 745 source and 723 target words, 871 together, in one dictionary" in result.out
    assert "--arch sg_transformer_cogs" in result.out
    for subset, expected in rows.items():
        ends = ("src", "tgt", "type")
        assert [list(row) for row in zip(*(lines_of(tmp_path / "out", f"{subset}.{end}") for end in ends))] == expected
    check_manifest(manifest(tmp_path / "out"), tmp_path / "out")
    check_binaries(tmp_path / "out")


def check_manifest(found: dict, out: Path) -> None:
    assert found["request"] == {"dataset": "cogs", "gen": "2022", "raw_only": False}
    assert found["vocabulary"] == {"source": 745, "target": 723, "together": 871, "joined": True}
    assert found["subsets"]["gen"]["types"] == dict.fromkeys(sorted((*LEXICAL, *STRUCTURAL)), 1_000)
    assert found["subsets"]["train"]["types"] == TYPES["train"] and len(TYPES["train"]) == 14
    data = (out / "raw" / "gen.type").read_bytes()
    assert found["files"]["raw/gen.type"] == hashlib.sha256(data).hexdigest()
    assert [file["name"] for file in found["origin"]["files"]] == ["train.tsv", "dev.tsv", "test.tsv", "gen.tsv"]


def check_binaries(out: Path) -> None:
    """One dictionary of 871 words, and binaries with the same text."""
    assert (out / "dict.src.txt").read_bytes() == (out / "dict.tgt.txt").read_bytes()
    dictionary = Dictionary.load(str(out / "dict.src.txt"))
    assert len(dictionary) == dictionary.nspecial + 871
    for language in ("src", "tgt"):
        dataset = data_utils.load_indexed_dataset(str(out / f"gen.src-tgt.{language}"), dictionary)
        assert [dictionary.string(tokens) for tokens in dataset] == lines_of(out, f"gen.{language}")


def test_types_of_the_published_subsets() -> None:
    assert {subset: sum(types.values()) for subset, types in TYPES.items()} == cogs.SIZES
    assert (len(LEXICAL), len(STRUCTURAL)) == (18, 3)


@pytest.fixture
def old_folder(cogs_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official files as they were before September 2022: 51 subjects are agents in gen.tsv."""
    folder = tmp_path_factory.mktemp("cogs2021")
    for subset in ("train", "valid", "test"):
        name = f"{FILES[subset].name}.gz"
        (folder / name).write_bytes((cogs_files / name).read_bytes())
    lines = gzip.decompress((cogs_files / "gen.tsv.gz").read_bytes()).decode("ascii").split("\n")
    for number in map(int, (cogs_files / "gen_lines_changed_by_2022_fix.txt").read_text("ascii").split()):
        lines[number - 1] = lines[number - 1].replace(" theme ", " agent ")
    (folder / "gen.tsv").write_text("\n".join(lines), "ascii")
    return folder


def test_gen_of_2021(run, old_folder: Path, tmp_path: Path) -> None:
    result = run("cogs", "--raw-dir", old_folder, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        f"error: {old_folder}/gen.tsv: this is the gen.tsv of 2021, before 51 logical forms were "
        "corrected: --gen-2021 takes it\n"
    )
    assert list(tmp_path.iterdir()) == []
    result = run("cogs", "--gen-2021", "--raw-dir", old_folder, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0 and "with gen as it was before the correction of 51" in result.out
    found = manifest(tmp_path / "out")
    assert found["request"]["gen"] == "2021" and found["origin"]["files"][3] == GEN_2021.describe()


def test_gen_of_2022_is_not_that_of_2021(run, cogs_files: Path, tmp_path: Path) -> None:
    result = run("cogs", "--gen-2021", "--raw-dir", cogs_files, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and "this is the gen.tsv of September 2022: omit --gen-2021" in result.err
    assert list(tmp_path.iterdir()) == []


# ---- small files instead of the official ones


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with the given rows as official files, and publishes them in the module."""

    def make(**subsets: list[str]) -> Path:
        folder = tmp_path_factory.mktemp("small")
        for subset, lines in subsets.items():
            data = "".join(line + "\n" for line in lines).encode("utf-8")
            name = FILES[subset].name
            (folder / name).write_bytes(data)
            file = OfficialFile(name, len(data), hashlib.sha256(data).hexdigest(), group="cogs")
            monkeypatch.setitem(cogs.FILES, subset, file)
        types = {s: dict(Counter(line.split("\t")[-1] for line in lines)) for s, lines in subsets.items()}
        monkeypatch.setattr(cogs, "TYPES", types)
        groups = {name: [kind for kind in kinds if kind in types["gen"]] for name, kinds in cogs.GROUPS.items()}
        monkeypatch.setattr(cogs, "GROUPS", groups)
        monkeypatch.setattr(cogs, "SIZES", {subset: len(lines) for subset, lines in subsets.items()})
        words = [{w for ls in subsets.values() for line in ls for w in line.split("\t")[i].split()} for i in (0, 1)]
        monkeypatch.setattr(cogs, "VOCABULARY", tuple(map(len, words)))
        monkeypatch.setattr(cogs, "TOGETHER", len(words[0] | words[1]))
        return folder

    return make


ROWS_OF = {
    "train": ["a b .\tx ( b )\tin_distribution", "c\tx ( c )\tprimitive"],
    "valid": ["b a .\tx ( a )\tin_distribution"],
    "test": ["c a .\tx ( c , a )\tin_distribution"],
    "gen": ["c c .\tx ( c , c )\tcp_recursion", "a a .\tx ( a , a )\tpp_recursion"],
}


def test_small_files(run, small, tmp_path: Path) -> None:
    folder = small(**ROWS_OF)
    assert run("cogs", "--raw-dir", folder, "--out", tmp_path / "out").code == 0
    assert lines_of(tmp_path / "out", "gen.type") == ["cp_recursion", "pp_recursion"]
    assert (tmp_path / "out" / "dict.src.txt").read_text() == "( 6\n) 6\n, 3\n. 5\na 9\nb 3\nc 8\nx 6\n"
    assert run("cogs", "--raw-dir", folder, "--out", tmp_path / "again").code == 0
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "out")).read_bytes()
    assert run("verify", tmp_path / "out").code == 0
    (tmp_path / "out" / "raw" / "gen.type").write_text("pp_recursion\ncp_recursion\n")
    assert "raw/gen.type has changed since its preparation" in run("verify", tmp_path / "out").err


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("SIZES", {"gen": 3}, "subset gen has 2 examples instead of the published 3"),
        ("TOGETHER", 9, "the common vocabulary has 8 words instead of 9"),
        ("VOCABULARY", (5, 7), "the source vocabulary has 4 words instead of 5"),
        ("TYPES", {"gen": {"cp_recursion": 2, "pp_recursion": 1}}, "subset gen has 1 examples of type cp_recursion"),
        ("TYPES", {"gen": {"cp_recursion": 1}}, "gen.tsv:2: unknown type 'pp_recursion'"),
    ],
    ids=["size", "common-vocabulary", "vocabulary", "type-count", "type"],
)
def test_other_than_published(attribute: str, value, message: str, run, small, tmp_path: Path, monkeypatch) -> None:
    folder = small(**ROWS_OF)
    there = getattr(cogs, attribute)
    monkeypatch.setattr(cogs, attribute, there | value if isinstance(value, dict) else value)
    result = run("cogs", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1) and message in result.err
    assert list(tmp_path.iterdir()) == []


def test_sentence_of_training_in_gen(run, small, tmp_path: Path) -> None:
    folder = small(**ROWS_OF | {"gen": ["c\tx ( c )\tcp_recursion"]})
    result = run("cogs", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result == (1, "", "error: train and gen overlap: example 2 of train is example 1 of gen, 'c'\n")


def test_download(run, small, server, tmp_path: Path) -> None:
    folder = small(**ROWS_OF)
    server.files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
    options = ["--download", "--mirror", server.url, "--cache-dir", tmp_path / "cache"]
    assert run("cogs", *options, "--raw-only", "--out", tmp_path / "out").code == 0
    assert {path.name for path in (tmp_path / "cache" / "cogs").iterdir()} == set(server_names(server))


def server_names(server) -> list[str]:
    return [name.removeprefix("/") for name in server.files]


def test_nothing_named(run, tmp_path: Path) -> None:
    result = run("cogs", "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and result.err.startswith(
        "error: the official train.tsv (sha256 220b3804b562c0156ee986eff1bdd15c27e52142549362a64f57baf86e304c78) "
        "is needed; pass its folder with --raw-dir. --download gets "
        "https://raw.githubusercontent.com/najoungkim/COGS/"
    )
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_refused(run, small, tmp_path: Path) -> None:
    folder = small(**ROWS_OF)
    (folder / "test.tsv").write_text("c a b .\tx ( c , a )\tin_distribution\n")
    result = run("cogs", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 1 and f"{folder}/test.tsv: not the official test.tsv: " in result.err
    (folder / "test.tsv").write_text("c a b .\tx ( c , a )\n")
    result = run("cogs", "--raw-dir", folder, "--raw-only", "--out", tmp_path / "out")
    assert result.err.startswith(f"error: {folder}/test.tsv:1: 2 columns between tabs")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_has_both_versions(run, cogs_files: Path, old_folder: Path, server, tmp_path: Path) -> None:
    for folder in (cogs_files, old_folder):
        for path in folder.glob("*.tsv*"):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            server.files[f"/{path.stem if path.suffix == '.gz' else path.name}"] = data
        options = ["--gen-2021"] if folder == old_folder else []
        options += ["--download", "--mirror", server.url, "--cache-dir", tmp_path / "cache", "--raw-only"]
        assert run("cogs", *options, "--out", tmp_path / folder.name).code == 0
    assert server.requests.count("/gen.tsv") == 2
    assert run("cogs", *options[1:], "--overwrite", "--out", tmp_path / cogs_files.name).code == 0
    assert server.requests.count("/gen.tsv") == 2

"""LibreOffice's help: an invented help of three pages, Debian packages made of it, and the real packages."""

from __future__ import annotations

import io
import lzma
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import DataError, Pair
from data_prep.libreoffice_help import (
    align,
    count,
    distinct,
    outlines,
    read_languages,
    read_paragraphs,
    split_by_page,
)
from data_prep.parallel import TranslationOptions, split_by_length
from helpers.data_files import manifest

FRAME = (
    '<html><head><title>x</title></head><body><header><a class="logo"><p dir="auto">LibreOffice {version} Help</p></a>'
    '</header><aside><p id="navigation">Contents</p></aside><div id="DisplayArea">{body}</div>'
    '<footer><p id="bm_module">debug</p></footer></body></html>'
)


def page(body: str, version: str = "7.4") -> bytes:
    return FRAME.format(version=version, body=body).encode("utf-8")


def texts(body: str) -> list[tuple[str, int, str]]:
    """The paragraphs of a page: id, occurrence, text."""
    found = read_paragraphs(Path("help"), {"a.html": page(body)})["a.html"]
    return [(*key, text) for key, text in found.items()]


# ---- paragraphs

SYSTEMS = (
    '<span class="switchinline" id="s"><span hidden="true" class="MAC" id="MAC1">Command\n</span>'
    '<span hidden="true" id="default1">Ctrl</span></span>'
)
PROGRAMS = (
    '<span class="switchinline"><span class="WRITER">Text Box - \n   </span><span class="CALC">Object -\n</span></span>'
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('<p id="p">Choose <span class="menuitem">Edit - <b>Copy</b></span>.</p>', "Choose Edit - Copy."),
        ('<h2 id="p">\n<a name="x"></a>Tables\n  and\u00a0rows </h2>', "Tables and rows"),
        ('<p id="p">one<br>two<br/>three</p>', "one two three"),
        ('<p id="p"><img src="i.png" alt="Icon"> x<sup>2</sup> &amp; &lt;y&gt; &#8211;</p>', "x2 & <y> –"),
        (f'<p id="p">Press {SYSTEMS}+V.</p>', "Press Ctrl+V."),
        (f'<p id="p">{PROGRAMS} <span class="emph">Area</span></p>', "Object - Area"),
        (f'<p id="p"><span class="switchinline"><span class="WIN">a {SYSTEMS}</span></span> b</p>', "a Ctrl b"),
        ('<p id="p">A<span class="switchinline"></span>B</p>', "AB"),
        ('<p id="p"><i>never closed</p>', "never closed"),
        ('<p id="p">a</b> </i>b</p>', "a b"),
        ('<div><table><tr><td><p id="p">cell</p>between</td></tr></table></div>', "cell"),
        ('<p id="p"></p>', ""),
    ],
)
def test_text_of_a_paragraph(body: str, expected: str) -> None:
    assert texts(body) == [("p", 0, expected)]


def test_ids_of_paragraphs() -> None:
    """Repeated ids are numbered; elements without id, of another kind, and around the text are left out."""
    body = '<p id="a">1</p><h6 id="b">2</h6><p>no id</p><p id="a">3</p><div id="c">4</div><pre id="d">5</pre>'
    assert texts(body) == [("a", 0, "1"), ("b", 0, "2"), ("a", 1, "3")]


def test_page_that_is_not_utf8() -> None:
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read_paragraphs(Path("help/de"), {"a/b.html": page("<p id='a'>\n") + b"\xff"})
    assert (caught.value.path, caught.value.line) == (Path("help/de/text/a/b.html"), 2)


@pytest.mark.parametrize("wrong", ["<![bad[ x ]]>", "<![ endif"], ids=["unknown", "cut-off"])
def test_page_that_is_no_html(wrong: str) -> None:
    """Newer versions of Python take such marks for comments."""
    try:
        assert read_paragraphs(Path("help"), {"a.html": page(f"<p id='a'>x</p>{wrong}")})["a.html"]["a", 0] == "x"
    except DataError as error:
        assert error.path == Path("help/text/a.html") and "is no complete HTML" in error.message


# ---- pairs

KEYS = st.tuples(st.sampled_from("abcd"), st.integers(0, 1))
TEXTS = st.sampled_from(["", "x", "X 1", "x 2", "y", "z z", "w"])
HELP = st.dictionaries(st.sampled_from("pqrstuvw"), st.dictionaries(KEYS, TEXTS, max_size=5), max_size=8)


def test_align() -> None:
    sources = {
        "b": {("i", 0): "one", ("i", 1): "two", ("j", 0): "three"},
        "a": {("i", 0): "four"},
        "c": {("i", 0): "x"},
    }
    targets = {"a": {("i", 0): "vier"}, "b": {("j", 0): "drei", ("i", 0): "eins", ("k", 0): "y"}}
    pairs, dropped = align(sources, targets)
    assert list(pairs.items()) == [("a", [Pair("four", "vier")]), ("b", [Pair("one", "eins"), Pair("three", "drei")])]
    assert dropped == {"in one language only": 3}


def test_distinct() -> None:
    pairs = [("a", "A"), ("b", "b"), ("", ""), ("c", ""), ("", "C"), ("a", "A"), ("a", "B"), ("d", "A")]
    kept, dropped = distinct({"p": [], "q": [Pair(*pair) for pair in pairs], "r": [Pair("d", "D"), Pair("e", "E")]})
    assert kept == {"q": [Pair("a", "A"), Pair("d", "A")], "r": [Pair("e", "E")]}
    assert dropped == {
        "empty": 3,
        "the same in both languages": 1,
        "repeated": 1,
        "repeated with another target": 2,
    }


@given(HELP, HELP, st.randoms(use_true_random=False))
def test_alignment_does_not_depend_on_the_order_of_pages(sources: dict, targets: dict, shuffler: random.Random) -> None:
    mixed = [dict(shuffler.sample(list(pages.items()), len(pages))) for pages in (sources, targets)]
    try:
        found = align(sources, targets)
    except DataError:
        with pytest.raises(DataError, match="no paragraph is in both languages"):
            align(*mixed)
        return
    kept = distinct(found.pairs)
    assert list(kept.pairs.items()) == list(distinct(align(*mixed).pairs).pairs.items())
    assert count(kept.pairs) + sum(kept.dropped.values()) == count(found.pairs)
    assert 2 * count(found.pairs) + found.dropped["in one language only"] == count(sources) + count(targets)


WORDS = st.text("aB1 ", min_size=1, max_size=4).filter(str.strip)


@given(
    st.dictionaries(st.text("pq", min_size=1, max_size=6), st.lists(st.builds(Pair, WORDS, WORDS)), min_size=5),
    st.integers(0, 9),
)
def test_split_by_page(pages: dict[str, list[Pair]], seed: int) -> None:
    """Every page is in one subset, and no near-duplicate of another subset is in train."""
    split = split_by_page(pages, {"valid": 0.2, "test": 0.4}, seed)
    number = sum(map(len, split.subsets.values())) + split.left_out["nearly in another subset"]
    assert number == count(pages)
    remaining = sorted(pair for pairs in pages.values() for pair in pairs)
    for pairs in split.subsets.values():
        for pair in pairs:
            remaining.remove(pair)
    tested = {text for name in ("valid", "test") for pair in split.subsets[name] for text in outlines(pair)}
    assert all(outlines(pair) & tested for pair in remaining)
    assert not any(outlines(pair) & tested for pair in split.subsets["train"])


def test_pages_stay_whole() -> None:
    pages = {f"page{n}": [Pair(f"{a} {b}", f"{b} {a}") for a in "stuv"] for n, b in enumerate("abcdefghij")}
    homes = {}
    for seed in range(3):
        subsets = split_by_page(pages, {"valid": 0.1, "test": 0.25}, seed).subsets
        assert {name: len(pairs) for name, pairs in subsets.items()} == {"train": 28, "valid": 4, "test": 8}
        assert all(len({pair.source[-1] for pair in pairs}) == len(pairs) / 4 for pairs in subsets.values())
        homes[seed] = "".join(sorted({pair.source[-1] for pair in subsets["valid"] + subsets["test"]}))
    assert homes == {0: "cei", 1: "cgj", 2: "bef"}


def test_near_duplicates() -> None:
    assert outlines(Pair("Page 12 of A1", "Seite")) == outlines(Pair("page of a", "SEITE 3"))
    assert outlines(Pair("same", "x")).isdisjoint(outlines(Pair("y", "same"))), (
        "a source is no near-duplicate of a target"
    )


# ---- files

SENTENCES = {
    "swriter/a": [("Insert a table", "Tabelle einfügen"), ("Press Enter", "Eingabetaste drücken"), ("OK", "OK")],
    "scalc/b": [
        ("Choose the cell", "Wählen Sie die Zelle"),
        ("The table has many rows", "Die Tabelle hat viele Zeilen"),
    ],
    "shared/c": [("Open a file", "Datei öffnen"), ("Insert the cell and the table", "Zelle und Tabelle einfügen")],
}
MakeHelp = Callable[..., Path]


@pytest.fixture
def help_of(tmp_path_factory: pytest.TempPathFactory) -> MakeHelp:
    """Makes a folder ``help`` of an installed system with the invented pages in English and German."""

    def make(german: str = "7.4") -> Path:
        root = tmp_path_factory.mktemp("installed") / "help"
        for side, (name, version) in enumerate((("en-US", "7.4"), ("de", german))):
            for path, pairs in SENTENCES.items():
                body = "".join(f'<p id="par_{n}"><b>{pair[side]}</b></p>' for n, pair in enumerate(pairs))
                file = root / name / "text" / f"{path}.html"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(page(body, version))
        return root

    return make


def member(name: str, data: bytes) -> bytes:
    """A member of an ar archive, after its padding."""
    header = f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)


def package(root: Path, name: str, path: Path, kind: str = "xz") -> Path:
    """Writes a Debian package with the pages of one language."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in sorted((root / name).rglob("*"), reverse=True):
            archive.add(file, f"./usr/share/libreoffice/help/{file.relative_to(root)}", recursive=False)
        link = tarfile.TarInfo("./usr/share/doc/libreoffice-help")
        link.type, link.linkname = tarfile.SYMTYPE, "libreoffice-common"
        archive.addfile(link)
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", f"data.tar.{kind}": lzma.compress(content.getvalue())}
    path.write_bytes(b"!<arch>\n" + b"".join(member(*part) for part in parts.items()))
    return path


@pytest.fixture
def packages(help_of: MakeHelp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, one of them named as by apt-get."""
    folder, root = tmp_path_factory.mktemp("packages"), help_of()
    package(root, "en-US", folder / "libreoffice-help-en-us_7.4.7-1_all.deb")
    package(root, "de", folder / "libreoffice-help-de_4%3a7.4.7-1_all.deb")
    return folder


OPTIONS = ["--languages", "en-US", "de", "--valid-share", "0", "--test-share", "0.4", "--model", "bpe"]
SIZE = ["--vocab-size", 45]


def test_all_sources_give_the_same_bytes(run, packages: Path, help_of: MakeHelp, tmp_path: Path) -> None:
    """Packages, unpacked packages, an installed help, its parent, and the folder of a language."""
    installed = help_of()
    unpacked = tmp_path / "unpacked"
    for name in ("en-US", "de"):
        shutil.copytree(installed / name, unpacked / f"of {name}" / "usr/share/libreoffice/help" / name)
    found = []
    for number, folder in enumerate((packages, installed, unpacked, installed.parent, installed / "de")):
        out = tmp_path / str(number)
        result = run("libreoffice_help", *OPTIONS, *SIZE, "--raw-dir", folder, "--raw-only", "--out", out)
        assert (result.code, result.err) == (0, ""), folder
        found.append((out / "dataset.json").read_bytes())
    assert len(set(found)) == 1
    assert manifest(tmp_path / "0")["origin"] | {"subwords": ""} == {
        "version": "7.4",
        "pages": {"en-US": 3, "de": 3},
        "paragraphs": {"en-US": 7, "de": 7},
        "dropped": {
            "in one language only": 0,
            "empty": 0,
            "the same in both languages": 1,
            "repeated": 0,
            "repeated with another target": 0,
        },
        "pairs": 6,
        "left_out_of_train": {"nearly in another subset": 0},
        "subwords": "",
    }


def test_names_that_are_not_utf8(run, help_of: MakeHelp, tmp_path: Path) -> None:
    """A package and its folder have the same pages, whatever their names are."""
    installed, folder = help_of(), tmp_path / "packages"
    folder.mkdir()
    for name in ("en-US", "de"):
        path = installed / name / "text" / "shared"
        (path / "c.html").rename(path / os.fsdecode(b"\xfc.html"))
        package(installed, name, folder / f"libreoffice-help-{name.lower()}_7.4.7-1_all.deb")
    for out, pages in {"a": installed, "b": folder}.items():
        result = run("libreoffice_help", *OPTIONS, *SIZE, "--raw-dir", pages, "--raw-only", "--out", tmp_path / out)
        assert (result.code, result.err) == (0, "")
    assert (tmp_path / "a" / "dataset.json").read_bytes() == (tmp_path / "b" / "dataset.json").read_bytes()


def test_training_that_only_repeats(run, help_of: MakeHelp, tmp_path: Path) -> None:
    installed = help_of()
    for name, word in (("en-US", "Page"), ("de", "Seite")):
        for number, path in enumerate(sorted((installed / name).rglob("*.html"))):
            path.write_bytes(page(f'<p id="a">{word} {number}</p><p id="b">{number} {word}</p>'))
    result = run("libreoffice_help", *OPTIONS, *SIZE, "--raw-dir", installed, "--out", tmp_path / "out")
    message = "no pair is left to train on (4 nearly repeat one of valid or test)"
    assert result == (1, "", f"error: {installed}: {message}: lower --valid-share and --test-share\n")


def test_direction_and_lengths(run, packages: Path, tmp_path: Path) -> None:
    """The first language is the source; ``--train-all`` changes train alone."""
    known = {pair for pairs in SENTENCES.values() for pair in pairs}
    found = {}
    for name, more in {"short": [], "all": ["--train-all"]}.items():
        out = tmp_path / name
        options = ["--max-length", 4, "--seed", 3, *more, "--raw-dir", packages, "--out", out]
        result = run("libreoffice_help", *OPTIONS, *SIZE, *options, "--raw-only")
        assert result.code == 0, result.err
        sides = {side: {p.name.split(".")[0]: p for p in out.glob(f"raw/*.plain.{side}")} for side in ("src", "tgt")}
        found[name] = {
            subset: list(zip(*(sides[side][subset].read_text("utf-8").splitlines() for side in ("src", "tgt"))))
            for subset in sides["src"]
        }
        assert {pair for pairs in found[name].values() for pair in pairs} <= known
    short, whole = found["short"], found["all"]
    assert set(short) == {"train", "test", "gen"} and short.pop("train") == [
        pair for pair in whole.pop("train") if len(pair[0].split()) <= 4
    ]
    assert short == whole and all(len(source.split()) > 4 for source, _ in short["gen"])
    assert manifest(tmp_path / "all")["request"]["train_all"] is True


def test_missing_language(run, packages: Path, tmp_path: Path) -> None:
    command = ["libreoffice_help", "--languages", "en-US", "pt-BR", "--out", tmp_path / "out", "--raw-dir"]
    message = "has no help pages of pt-BR, neither libreoffice-help-pt-br_*.deb nor pt-BR/text: get it by apt-get"
    for folder in (packages, tmp_path / "nowhere"):
        result = run(*command, folder)
        assert result.code == 1 and result.err.count("\n") == 1 and list(tmp_path.iterdir()) == []
    assert result.err.startswith(f"error: {tmp_path / 'nowhere'}: has no help pages of en-US")
    assert f"error: {packages}: {message} download libreoffice-help-pt-br" in run(*command, packages).err


def test_package_in_place_of_its_folder(run, packages: Path, tmp_path: Path) -> None:
    (path,) = packages.glob("*-de_*")
    result = run("libreoffice_help", *OPTIONS, "--raw-dir", path, "--out", tmp_path / "out")
    message = "--raw-dir is not a folder: name the folder that it is in"
    assert result == (1, "", f"error: {path}: {message}\n")


def test_versions_that_differ(packages: Path, help_of: MakeHelp) -> None:
    old = help_of(german="7.3")
    with pytest.raises(DataError, match=re.escape("en-US of 7.4 and de of 7.3: both languages must be of one version")):
        read_languages(old, ["en-US", "de"])
    (path,) = packages.glob("*-de_*")
    path.rename(packages / "libreoffice-help-de_7.4.5-2_all.deb")
    with pytest.raises(DataError, match=re.escape("en-US of 7.4.7-1 and de of 7.4.5-2: both")):
        read_languages(packages, ["en-US", "de"])


def test_several_packages(packages: Path) -> None:
    shutil.copyfile(next(packages.glob("*-de_*")), packages / "libreoffice-help-de_7.4.7-2_all.deb")
    with pytest.raises(DataError, match="several packages of de: libreoffice-help-de_4%3a7.4.7-1_all.deb, libre"):
        read_languages(packages, ["en-US", "de"])


def test_broken_packages(packages: Path, help_of: MakeHelp) -> None:
    """Every truncation and a flipped byte are noticed."""
    (path,) = packages.glob("*-de_*")
    data = path.read_bytes()
    start = data.index(b"data.tar.xz")
    for end in (0, 5, 40, start + 20, start + 59, start + 60, len(data) - 60, len(data) - 2):
        path.write_bytes(data[:end])
        with pytest.raises(DataError, match="not a (complete )?Debian package") as caught:
            read_languages(packages, ["en-US", "de"])
        assert caught.value.path == path
    flipped = bytearray(data)
    flipped[(start + len(data)) // 2] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(DataError, match="not a complete Debian package"):
        read_languages(packages, ["en-US", "de"])
    package(help_of(), "de", path, kind="zst")
    with pytest.raises(DataError, match=r"holds data\.tar\.zst, not data\.tar\.xz: unpack it by dpkg-deb -x"):
        read_languages(packages, ["en-US", "de"])
    package(help_of(), "en-US", path)
    with pytest.raises(DataError, match="has no page of de"):
        read_languages(packages, ["en-US", "de"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--languages", "de", "de"], 2, "--languages needs two different languages"),
        (["--languages", "de", "../de"], 2, "must be a language such as en-US or de, not '../de'"),
        (["--languages", "de"], 2, "expected 2 arguments"),
        (["--languages", "en-us", "de"], 2, "such as en-US or de, not 'en-us': did you mean en-US?"),
        (["--languages", "en-US", "SR-Latn"], 2, "not 'SR-Latn': did you mean sr-Latn?"),
        (["--valid-share", "0.6"], 2, "--valid-share and --test-share leave nothing to train on"),
        (["--valid-share", "0.3"], 1, "a --valid-share of 0.3 of 3 pages is not even one"),
        (["--valid-share", "0", "--test-share", "0", "--seed", "3"], 2, "--seed has no effect: nothing is drawn"),
        (["--train-all"], 2, "--train-all needs --max-length"),
        (["--max-length", "9"], 1, "no test sentence has more than 9 words"),
    ],
)
def test_refusals(run, packages: Path, options: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = run("libreoffice_help", *OPTIONS, *options, "--raw-dir", packages, "--out", tmp_path / "out")
    assert result.code == code and message in result.err and result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- the real packages


def test_statistics_of_the_packages(shared_data: Path) -> None:
    """Debian's 7.4.7-1+deb12u14, English and German."""
    folder = shared_data / "libreoffice_help"
    if not folder.is_dir():
        pytest.skip(f"no packages at {folder}")
    sources, targets = (read_paragraphs(folder, pages) for pages in read_languages(folder, ["en-US", "de"]).values())
    assert (len(sources), len(targets), count(sources), count(targets)) == (2_560, 2_560, 69_037, 69_037)
    found = align(sources, targets)
    kept = distinct(found.pairs)
    assert found.dropped | kept.dropped == {
        "in one language only": 0,
        "empty": 3_154,
        "the same in both languages": 10_117,
        "repeated": 18_898,
        "repeated with another target": 1_923,
    }
    pairs = [pair for page in kept.pairs.values() for pair in page]
    lengths = [len(pair.source.split()) for pair in pairs]
    assert (len(kept.pairs), len(pairs), sum(lengths)) == (2_367, 34_945, 480_558)
    assert [sum(length > limit for length in lengths) for limit in (20, 40)] == [7_636, 1_885]
    check_split(kept.pairs)


def check_split(pages: dict[str, list[Pair]]) -> None:
    """The subsets, and that ``--train-all`` changes train alone."""
    split = split_by_page(pages, {"valid": 0.05, "test": 0.05}, seed=1)
    assert split.left_out == {"nearly in another subset": 240}
    assert {name: len(pairs) for name, pairs in split.subsets.items()} == {
        "train": 31_178,
        "valid": 1_962,
        "test": 1_565,
    }
    options = TranslationOptions(max_length=20, length_unit="words")
    short, whole = (split_by_length(split, replace(options, train_all=every)) for every in (False, True))
    sizes = {name: len(pairs) for name, pairs in short.subsets.items()}
    assert sizes == {"train": 24_299, "valid": 1_528, "test": 1_245, "gen": 320, "dev": 434}
    assert whole.subsets == short.subsets | {"train": split.subsets["train"]}
    assert whole.left_out["with more than 20 words"] == 0

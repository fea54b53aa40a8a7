"""LibreOffice's help pages: a parallel corpus in a hundred languages, paragraph by paragraph under the same ids.

    Choose Format - Paragraph - Drop Caps tab.  ->  Wählen Sie Format – Absatz… – Register: Initialen.
    Select the type of hatch lines that you want to use.  ->  Wählen Sie die gewünschte Schraffurart.

The pages are read from Debian packages (``apt-get download libreoffice-help-de``), from folders unpacked from them, or
from an installed LibreOffice. Any two languages make a corpus; they must be of one version.

A paragraph is an element p or h1 … h6 with an id. Paragraphs are aligned by page, id, and occurrence of the id in the
page. Inline markup is kept as text, and an image gives nothing. Of text that depends on the system or the program, one
form is kept: the default one. Omitted and counted are paragraphs in one language only, empty ones, those that are the
same in both languages, and those whose source occurred before.

Splits are by page: ``--valid-share`` and ``--test-share`` of the pages. Omitted from train, and counted, are pairs with
the source or the target of a pair of another subset, except for case and digits. ``--max-length`` changes neither. It
makes a test of length generalization, as in ``python -m data_prep parallel``:

    train, valid, test    the pairs whose source has at most L words; longer ones are omitted from train
    gen, dev              the longer ones of the pages of test and of valid

``--train-all`` keeps the longer ones in train: the upper reference for models trained on short ones.

Source: LibreOffice's help, www.libreoffice.org, as packaged by Debian. Its licence is the MPL 2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from numpy.random import RandomState

from data_prep.corpus import Corpus
from data_prep.dataset import (
    DataError,
    Dataset,
    Pair,
    Sources,
    UsageError,
    check_path,
    option,
    seed_number,
    share,
    shorten,
)
from data_prep.draws import DEFAULT_SHARE, exact, seed_of, shares_of
from data_prep.parallel import HELD_OUT, Split, TranslationOptions, clean, split_by_length, subword_corpus
from data_prep.progress import progress
from data_prep.text import decode_utf8

INSTALLED = Path("/usr/share/libreoffice/help")
DEFAULT_SEED = 1
PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
HEADER_END, FOOTER = '<div id="DisplayArea"', "<footer>"  # the text is between them
REPEATED = "nearly in another subset"  # why a pair is omitted from train
Pages = dict[str, bytes]  # path below the folder ``text`` -> HTML
Key = tuple[str, int]  # the id of a paragraph and how often the page had it before
Paragraphs = dict[str, dict[Key, str]]  # page -> key -> text


def language(text: str) -> str:
    """The argument type of ``--languages``: the name of a folder of LibreOffice's help."""
    if not re.fullmatch("[A-Za-z]{2,3}(-[A-Za-z]+)*", text):
        raise argparse.ArgumentTypeError(f"must be a language such as en-US or de, not {shorten(text)}")
    first, *others = text.split("-")
    usual = "-".join([first.lower(), *(part.upper() if len(part) == 2 else part for part in others)])
    if text != usual:
        raise argparse.ArgumentTypeError(f"must be a language such as en-US or de, not {text!r}: did you mean {usual}?")
    return text


@dataclass(frozen=True)
class HelpFiles(Sources):
    """Where the help pages are."""

    raw_dir: Path = option(
        INSTALLED,
        f"folder of the packages, unpacked packages, or installed help pages (default: {INSTALLED})",
        type=Path,
        metavar="FOLDER",
    )
    _pages: dict[str, dict[str, Pages]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.raw_dir.exists():  # of a missing folder, ``find`` says how to get it
            check_path("--raw-dir", self.raw_dir, "folder")

    def pages(self, languages: list[str]) -> dict[str, Pages]:
        """The pages by language, read once; see ``read_languages``."""
        key = " ".join(languages)
        if key not in self._pages:
            self._pages[key] = read_languages(self.raw_dir, languages)
        return self._pages[key]


@dataclass(frozen=True, kw_only=True)
class HelpOptions(TranslationOptions):
    """The options of LibreOffice's help; ``pages`` has the hash of the pages of every language."""

    languages: list[str] = option(help="source and target: en-US de", type=language, nargs=2, metavar="LANGUAGE")
    pages: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = option(
        help=f"share of the pages drawn for {{}} (default: {DEFAULT_SHARE})",
        flag="--{}-share",
        keys=tuple(HELD_OUT),
        type=share,
    )
    seed: int | None = option(None, f"seed of the draw of pages (default: {DEFAULT_SEED})", type=seed_number)

    def complete(self, sources: HelpFiles) -> HelpOptions:
        if self.languages[0] == self.languages[1]:
            raise UsageError("--languages needs two different languages")
        shares = shares_of(self.shares, HELD_OUT)
        seed = seed_of(self.seed, any(shares.values()), DEFAULT_SEED, "nothing is drawn")
        # Recorded without a draw too, as earlier versions did.
        return replace(super().complete(sources), shares=shares, seed=DEFAULT_SEED if seed is None else seed)

    def identify(self, sources: HelpFiles) -> HelpOptions:
        return replace(self, pages={name: digest(pages) for name, pages in sources.pages(self.languages).items()})


class LibreOfficeHelp(Dataset):
    """``python -m data_prep libreoffice_help``."""

    name = "libreoffice_help"
    title = "LibreOffice's help pages in two languages"
    source = "Debian packages libreoffice-help-*"
    licence = "MPL 2.0"
    size = "2 to 4 MB a language"
    arch = "sg_transformer"
    splits = ("length", "all")
    options = HelpOptions
    sources = HelpFiles

    def build(self, options: HelpOptions, sources: HelpFiles) -> Corpus:
        texts, languages = sources.pages(options.languages), options.languages
        sides = [read_paragraphs(find(sources.raw_dir, name), pages) for name, pages in texts.items()]
        found = align(*sides)
        kept = distinct(found.pairs)
        split = split_by_page(kept.pairs, options.shares, options.seed)
        if not split.subsets["train"]:
            raise DataError(
                f"no pair is left to train on ({split.left_out[REPEATED]:,} nearly repeat one of valid or test): lower "
                "--valid-share and --test-share",
                sources.raw_dir,
            )
        dropped = found.dropped | kept.dropped
        membership = f"{count(kept.pairs):,} pairs of {len(kept.pairs):,} pages; dropped: " + ", ".join(
            f"{number:,} {reason}" for reason, number in dropped.items()
        )
        origin = {
            "version": version(texts[languages[0]]),
            "pages": dict(zip(languages, map(len, sides), strict=True)),
            "paragraphs": dict(zip(languages, map(count, sides), strict=True)),
            "dropped": dropped,
            "pairs": count(kept.pairs),
        }
        return subword_corpus(split_by_length(split, options), {}, membership, origin, options)


class Aligned(NamedTuple):
    """Pairs by page, in the order of the pages, and the numbers of dropped paragraphs: reason -> number."""

    pairs: dict[str, list[Pair]]
    dropped: dict[str, int]


# ---- files


def read_languages(folder: Path, languages: list[str]) -> dict[str, Pages]:
    """The pages by language.

    Raises:
        DataError: a language is missing, a package is broken, or the languages are of different versions.
    """
    found = {name: find(folder, name) for name in languages}
    pages = {name: read_pages(path, name) for name, path in found.items()}
    versions = package_versions(found.values()) or list(map(version, pages.values()))
    if len(set(versions)) > 1:
        named = " and ".join(f"{name} of {number}" for name, number in zip(languages, versions, strict=True))
        raise DataError(f"holds {named}: both languages must be of one version", folder)
    return pages


def find(folder: Path, name: str) -> Path:
    """The package of a language, or its folder with the folder ``text``. Raises DataError."""
    package = f"libreoffice-help-{name.lower()}"
    packages = sorted(folder.glob(f"{package}_*.deb"))
    if len(packages) > 1:
        listed = ", ".join(path.name for path in packages)
        raise DataError(f"several packages of {name}: {listed}; leave one", folder)
    inside = f"usr/share/libreoffice/help/{name}"
    places = [folder / name, folder / "help" / name, folder / inside, *sorted(folder.glob(f"*/{inside}"))]
    if (folder / "text").is_dir():  # the folder of one language, beside that of the other
        places.append(folder.parent / name)
    found = packages or [path for path in places if (path / "text").is_dir()]
    if not found:
        message = f"has no help pages of {name}, neither {package}_*.deb nor {name}/text"
        raise DataError(
            f"{message}: get it by apt-get download {package}, and name the folder that has it by --raw-dir", folder
        )
    return found[0]


def read_pages(path: Path, name: str) -> Pages:
    """The pages of a language, sorted by name, from its package or folder. Raises DataError."""
    if path.suffix == ".deb":
        pages = dict(package_pages(path, name))
    else:
        root = path / "text"
        pages = {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*.html")}
    if not pages:
        raise DataError(f"has no page of {name}", path)
    return dict(sorted(pages.items()))


def package_pages(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the pages in a Debian package, an ar archive with a tar archive. Raises DataError."""
    member, data = package_data(path)
    if member != "data.tar.xz":
        raise DataError(f"holds {member}, not data.tar.xz: unpack it by dpkg-deb -x, and name that folder", path)
    try:
        data = lzma.decompress(data)  # as a whole, so that the checksum at the end is compared
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for entry in archive:
                found = re.search(f"(?:^|/)help/{name}/text/(.+[.]html)$", entry.name)
                if found and entry.isfile():
                    yield found[1], archive.extractfile(entry).read()
    except (lzma.LZMAError, tarfile.TarError) as error:
        raise DataError(f"not a complete Debian package ({error})", path) from None


def package_data(path: Path) -> tuple[str, bytes]:
    """Name and content of the member ``data.tar…`` of a Debian package. Raises DataError."""
    data = path.read_bytes()
    if not data.startswith(b"!<arch>\n"):
        raise DataError("not a Debian package", path)
    start = 8
    while start + 60 <= len(data):
        name = data[start : start + 16].decode("latin-1").rstrip(" /")
        size = data[start + 48 : start + 58].strip()
        end = start + 60 + (int(size) if size.isdigit() else len(data))
        if end > len(data):
            break
        if name.startswith("data.tar"):
            return name, data[start + 60 : end]
        start = end + end % 2
    raise DataError("not a complete Debian package: download it again", path)


def package_versions(paths: Collection[Path]) -> list[str]:
    """The versions in the names of packages, without epochs; none if one path is not a package."""
    found = [re.search("_(?:[0-9]+%3a)?([^_]+)", path.name) for path in paths if path.suffix == ".deb"]
    return [] if len(found) < len(paths) else [match[1].removesuffix(".deb") for match in found]


def version(pages: Pages) -> str:
    """The version in the header of the first page, such as 7.4; ``unknown`` if there is none."""
    found = re.search(rb'class="logo".*?([0-9]+[.][0-9]+)', next(iter(pages.values())), re.DOTALL)
    return found[1].decode() if found else "unknown"


def digest(pages: Pages) -> str:
    """The hash of all pages and their names: the same for a package and for its unpacked folder."""
    found = hashlib.sha256()
    for name, page in pages.items():
        found.update(f"{name}\0{len(page)}\0".encode(errors="surrogateescape"))  # a name need not be UTF-8
        found.update(page)
    return found.hexdigest()


# ---- paragraphs


class Element(NamedTuple):
    """An open element inside a paragraph: its class, and its text so far, or the text of each of its variants."""

    tag: str
    kind: str
    text: list[str]
    variants: dict[str, str]

    def content(self) -> str:
        """The text. Of variants it is the default one, which has no class, or the first class by name."""
        if self.kind == "switchinline":
            return self.variants[min(self.variants)] if self.variants else ""
        return "".join(self.text)


class Reader(HTMLParser):
    """Collects the text of the paragraphs of a page in ``paragraphs``.

    A ``switchinline`` has a child for each system or program, of which the browser shows one. The class of the child
    names the system or program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: dict[Key, str] = {}
        self.occurrences: Counter[str] = Counter()
        self.key: Key = ("", 0)
        self.open: list[Element] = []  # the paragraph, and the elements inside it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.open and tag == "br":
            self.open[-1].text.append(" ")
        if tag in VOID:
            return
        attributes = dict(attrs)
        name = attributes.get("id")
        if not self.open and tag in PARAGRAPHS and name:
            self.key = (name, self.occurrences[name])
            self.occurrences[name] += 1
        elif not self.open:
            return
        self.open.append(Element(tag, attributes.get("class") or "", [], {}))

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1].text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if not any(element.tag == tag for element in self.open):
            return
        last = None
        while last is None or last.tag != tag:
            last = self.open.pop()
            self.give(last)

    def give(self, element: Element) -> None:
        """Gives the text of a closed element to the one around it."""
        text = element.content()
        if not self.open:
            self.paragraphs[self.key] = clean(text, unescape=False)
        elif self.open[-1].kind == "switchinline":
            self.open[-1].variants[element.kind] = text.removesuffix("\n")
        else:
            self.open[-1].text.append(text)


def read_paragraphs(path: Path, pages: Pages) -> Paragraphs:
    """The paragraphs of the pages of ``path``. Raises DataError for a page that is not UTF-8, or no HTML."""
    found = {}
    for name, page in progress(pages.items(), f"reading {path.name}", len(pages)):
        file = path / "text" / name
        lines = page.split(b"\n")
        reader = Reader()
        text = "\n".join(decode_utf8(file, number, line) for number, line in enumerate(lines, start=1))
        try:
            reader.feed(text.partition(HEADER_END)[2].partition(FOOTER)[0])
            reader.close()
        except AssertionError as error:  # of HTMLParser, for an unknown or unfinished <![…
            raise DataError(f"is no complete HTML ({error}): get the page again", file) from error
        found[name] = reader.paragraphs
    return found


# ---- pairs


def align(sources: Paragraphs, targets: Paragraphs) -> Aligned:
    """Pairs the paragraphs with equal pages and keys; a side may be empty. Raises DataError if there is no pair."""
    pairs = {
        page: [Pair(text, targets[page][key]) for key, text in sources[page].items() if key in targets[page]]
        for page in sorted(sources.keys() & targets.keys())
    }
    if not count(pairs):
        raise DataError("no paragraph is in both languages: are these LibreOffice's help pages?")
    alone = count(sources) + count(targets) - 2 * count(pairs)
    return Aligned(pairs, {"in one language only": alone})


def count(pages: Mapping[str, Sized]) -> int:
    """The number of paragraphs or pairs of all pages."""
    return sum(map(len, pages.values()))


def distinct(pages: dict[str, list[Pair]]) -> Aligned:
    """Keeps, in the order of the pages, the first pair of every source that has a target of its own."""
    kept: dict[str, list[Pair]] = {}
    dropped = dict.fromkeys(("empty", "the same in both languages", "repeated", "repeated with another target"), 0)
    known: dict[str, str] = {}
    for page, pairs in pages.items():
        for pair in pairs:
            if not all(pair):
                dropped["empty"] += 1
            elif pair.source == pair.target:
                dropped["the same in both languages"] += 1
            elif pair.source in known:
                same = known[pair.source] == pair.target
                dropped["repeated" if same else "repeated with another target"] += 1
            else:
                known[pair.source] = pair.target
                kept.setdefault(page, []).append(pair)
    return Aligned(kept, dropped)


def split_by_page(pages: dict[str, list[Pair]], shares: Mapping[str, float], seed: int) -> Split:
    """Draws the pages of valid and test, and omits pairs from train that nearly repeat a side of theirs.

    The draw uses numpy's frozen legacy generator, which is the same in every version.

    Raises:
        DataError: a subset would not have even one page.
    """
    names, home = list(pages), dict.fromkeys(pages, "train")
    order = iter(RandomState(seed).permutation(len(names)))
    for subset, part in shares.items():
        number = int(exact(part) * len(names))
        if part and not number:
            what = f"a --{subset}-share of {part:g} of {len(names):,} pages"
            raise DataError(f"{what} is not even one: choose more, or 0 for none")
        home |= {names[position]: subset for position in islice(order, number)}
    subsets = {
        name: [pair for page, pairs in pages.items() if home[page] == name for pair in pairs]
        for name in ("train", *shares)
        if name == "train" or shares[name]
    }
    tested = {text for name in subsets if name != "train" for pair in subsets[name] for text in outlines(pair)}
    train = [pair for pair in subsets["train"] if tested.isdisjoint(outlines(pair))]
    return Split(subsets | {"train": train}, {REPEATED: len(subsets["train"]) - len(train)})


def outlines(pair: Pair) -> set[tuple[int, str]]:
    """Both sides in small letters and without digits, numbered: near-duplicates have one in common."""
    return {(side, " ".join(re.sub("[0-9]", "", text.lower()).split())) for side, text in enumerate(pair)}

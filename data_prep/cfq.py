"""CFQ: questions about films and the SPARQL queries that answer them (Keysers et al. 2020).

    Did M0 direct M1             ->  SELECT count ( * ) WHERE { M0 film.director.film M1 }
    Was M0 a female film editor  ->  SELECT count ( * ) WHERE { M0 a film.editor . M0 people.person.gender m_02zsn }
    Did M0 's star influence M1  ->  SELECT count ( * ) WHERE { ?x0 film.actor.film/ns:film.performance.film M0 .
                                     ?x0 influence.influence_node.influenced M1 }

Records are used with their questionPatternModEntities and sparqlPatternModEntities, tokenized as in the reference
(transformer_generalization, Csordás et al. 2021):

    questions   Every ASCII punctuation mark is a word, so M0's is M0 ' s.
    queries     Words are separated by white space, and ``count(*)`` is four words. A word loses one leading ``ns:``;
                then a leading ``m.`` becomes ``m_``.

Source and target share one dictionary.

Splits, by the official index files:

    mcd1, mcd2, mcd3            maximum compound divergence: 95,743 to train, 11,968 ``dev``, 11,968 ``gen``
    query_complexity_split      training queries are short, those of ``dev`` and ``gen`` long ("output length")
    question_complexity_split, question_pattern_split, query_pattern_split
                                likewise by the complexity or the pattern of question or query
    random_split                ``train``, ``valid`` and ``test`` are drawn alike

``dev`` has the distribution of ``gen``, not of training, except with random_split. By default the training set is
complete. The authors recommend tuning on a part of it: ``--holdout 0.1`` takes a tenth as ``valid``.

Source: cfq1.1.tar.gz of github.com/google-research/google-research/tree/master/cfq, CC BY 4.0: ``--archive FILE``, or
``--raw-dir FOLDER`` for the unpacked folder ``cfq``. Its size and hash are not known here. The hashes of the input
are recorded, and the sizes of the subsets are checked. The code was tested on small invented files of the same form,
never on the archive itself.
"""

from __future__ import annotations

import io
import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.binarize import check_words
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import (
    DataError,
    Dataset,
    Hashing,
    Json,
    Options,
    Pair,
    Sources,
    UsageError,
    check_path,
    check_sizes,
    option,
    seed_number,
    share,
)
from data_prep.draws import hold_out, seed_of
from data_prep.progress import progress
from data_prep.sources import members

# Published sizes of trainIdxs, devIdxs and testIdxs.
SIZES = {
    "mcd1": (95_743, 11_968, 11_968),
    "mcd2": (95_743, 11_968, 11_968),
    "mcd3": (95_743, 11_968, 11_968),
    "query_complexity_split": (100_654, 9_512, 9_512),
    "query_pattern_split": (94_600, 12_489, 12_589),
    "question_complexity_split": (98_999, 10_339, 10_340),
    "question_pattern_split": (95_654, 12_115, 11_909),
    "random_split": (95_744, 11_967, 11_967),
}
TOGETHER = 181  # words, published
DEFAULT_SEED = 1
LARGEST_DATASET, LARGEST_SPLIT = 1 << 34, 1 << 26  # bytes; the official ones have some 4 GB and 2 MB
BLOCK = 1 << 16  # characters per read: some three records
LONGEST_RECORD = 1 << 24  # characters; records have some 20,000
WHITE = " \t\n\r"
DECODER = json.JSONDecoder()
KEYS = ("questionPatternModEntities", "sparqlPatternModEntities")
DATASET = "cfq/dataset.json"
PARTS = ("trainIdxs", "devIdxs", "testIdxs")
PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")


@dataclass(frozen=True)
class CfqFiles(Sources):
    """The archive, or the folder unpacked from it."""

    archive: Path | None = option(None, "the official cfq1.1.tar.gz", one_of="source", type=Path, metavar="FILE")
    raw_dir: Path | None = option(None, "the folder cfq unpacked from it", one_of="source", type=Path, metavar="FOLDER")

    def __post_init__(self) -> None:
        check_path("--archive", self.archive, "file")

    def dataset(self) -> Path:
        """The path of dataset.json in the folder, which is ``cfq`` or contains it. Raises DataError if it is absent."""
        check_path("--raw-dir", self.raw_dir, "folder")
        for path in (self.raw_dir / "dataset.json", self.raw_dir / "cfq" / "dataset.json"):
            if path.is_file():
                return path
        raise DataError("has neither dataset.json nor cfq/dataset.json: name the unpacked folder", self.raw_dir)

    def files(self, split: str) -> list[Path]:
        """The files that are read for a split. Raises DataError for a missing one."""
        if self.archive is not None:
            return [self.archive]
        files = [self.dataset(), self.dataset().parent / "splits" / f"{split}.json"]
        if not files[1].is_file():
            raise DataError(f"has no splits/{split}.json", files[0].parent)
        return files

    def streams(self, split: str) -> Iterator[tuple[str, BinaryIO, Path]]:
        """Yields name, content and path of dataset.json and of the file of a split, in any order. Raises DataError."""
        limits = {DATASET: LARGEST_DATASET, f"cfq/splits/{split}.json": LARGEST_SPLIT}
        files = self.files(split)
        if self.archive is not None:
            with self.open(self.archive) as packed:
                for name, stream in members(self.archive, packed, limits):
                    yield name, stream, self.archive / name
            return
        for name, path in zip(reversed(limits), reversed(files)):  # the small file first, so its errors come at once
            with self.open(path) as stream:
                yield name, stream, path

    def read(self, split: str) -> Content:
        """Reads dataset.json and the file of a split. Raises DataError."""
        pairs, indices, files = [], {}, []
        for name, stream, path in self.streams(split):
            hashing = Hashing(stream)
            if name == DATASET:
                pairs = read_pairs(hashing, path)
                files.insert(0, hashing.describe(name))
            else:
                indices = read_indices(hashing, path)
                files.append(hashing.describe(name))
        greatest = max((number for numbers in indices.values() for number in numbers), default=0)
        if greatest >= len(pairs):
            message = f"splits/{split}.json names record {greatest:,}, but dataset.json ends at {len(pairs) - 1:,}"
            raise DataError(message, self.archive or self.raw_dir)
        return Content(pairs, indices, files)


@dataclass(frozen=True)
class CfqOptions(Options):
    """The options of CFQ; ``source_sha256`` has the hashes of the files."""

    split: str = option(choices=tuple(SIZES))
    holdout: float | None = option(
        None,
        "share of the training questions that becomes valid (default: 0, no valid; not with "
        "random_split, which has its own)",
        type=share,
    )
    seed: int | None = option(None, f"seed of --holdout (default: {DEFAULT_SEED})", type=seed_number)
    source_sha256: tuple[str, ...] = ()

    def complete(self, sources: CfqFiles) -> CfqOptions:
        holdout = self.holdout or 0.0
        if self.split == "random_split":
            if self.holdout is not None:
                raise UsageError("--holdout does not go with random_split, which has its own validation set")
            holdout = None
        return replace(self, holdout=holdout, seed=seed_of(self.seed, bool(holdout), DEFAULT_SEED))

    def identify(self, sources: CfqFiles) -> CfqOptions:
        return replace(self, source_sha256=tuple(map(sources.sha256, sources.files(self.split))))


class Cfq(Dataset):
    """``python -m data_prep cfq``."""

    name = "cfq"
    title = "CFQ"
    source = "cfq1.1.tar.gz of google-research"
    licence = "CC BY 4.0"
    size = "some 260 MB"
    arch = "sg_transformer_cfq"
    splits = tuple(SIZES)
    options = CfqOptions
    sources = CfqFiles

    def build(self, options: CfqOptions, sources: CfqFiles) -> Corpus:
        pairs, indices, files = sources.read(options.split)
        names = ("train", "valid", "test") if options.split == "random_split" else ("train", "dev", "gen")
        subsets = {name: [pairs[i] for i in indices[part]] for name, part in zip(names, PARTS, strict=True)}
        published = dict(zip(names, SIZES[options.split], strict=True))
        check_sizes(subsets, published)
        rule, membership = f"split by the index file {options.split}.json", "the published ones"
        if options.holdout:
            train, valid = hold_out(subsets["train"], options.holdout, options.seed)
            subsets = {"train": train, "valid": valid, "dev": subsets["dev"], "gen": subsets["gen"]}
            rule += f"; valid is {options.holdout:g} of the questions that occur once in train"
        made = {name: Subset(found, published=published.get(name)) for name, found in subsets.items()}
        corpus = Corpus(made, rule, membership, {"files": files}, joined=True, official=True)
        words = corpus.counts.together
        if words == TOGETHER:
            return corpus
        different = f", but with {words} words in the common vocabulary instead of the published {TOGETHER}"
        return replace(corpus, membership=membership + different)


class Content(NamedTuple):
    """All pairs, the indices of one split under the names in ``PARTS``, and the descriptions of the two files."""

    pairs: list[Pair]
    indices: dict[str, list[int]]
    files: list[Json]


def question_words(question: str) -> str:
    """Splits a question into words between single spaces."""
    return " ".join(PUNCTUATION.sub(r" \1 ", question).split())


def query_words(query: str) -> str:
    """Splits a query into words between single spaces."""
    words = (word.removeprefix("ns:") for word in query.replace("count(*)", "count ( * )").split())
    return " ".join("m_" + word.removeprefix("m.") if word.startswith("m.") else word for word in words if word)


class JsonText:
    """The text of a JSON file, of which only the current part is in memory. Methods raise ValueError."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.text = io.TextIOWrapper(stream, encoding="utf-8", newline=""), ""

    def peek(self) -> str:
        """The next character that is not white space, at which ``text`` then begins; '' at the end."""
        self.text = self.text.lstrip(WHITE)
        while not self.text and self.more():
            self.text = self.text.lstrip(WHITE)
        return self.text[:1]

    def more(self) -> bool:
        """Reads the next block; returns whether there was one."""
        block = self.stream.read(BLOCK)
        self.text += block
        return bool(block)

    def skip(self, allowed: str) -> str:
        """Moves past the next character, which must be one of ``allowed``, and returns it."""
        character = self.peek()
        if not character or character not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{expected} expected, not {character or 'the end'!r}")
        self.text = self.text[1:]
        return character

    def record(self) -> Json:
        """Reads the next object. Raises RecursionError, too."""
        if self.peek() != "{":
            raise ValueError(f"'{{' expected, not {self.peek() or 'the end'!r}")
        while True:
            try:
                value, end = DECODER.raw_decode(self.text)
            except json.JSONDecodeError as error:
                if len(self.text) > LONGEST_RECORD or not self.more():
                    raise ValueError(error.msg) from None
            else:
                self.text = self.text[end:]
                return value


def records(stream: BinaryIO, path: Path) -> Iterator[Json]:
    """Yields the objects of a JSON file that is one list of objects.

    Raises DataError with the number of the record, counted from 0, for any other content.
    """
    text, number = JsonText(stream), 0
    try:
        text.skip("[")
        separator = ","
        while separator == ",":
            yield text.record()
            number += 1
            separator = text.skip(",]")
        if text.peek():
            raise ValueError(f"the file continues after the list of {number:,} records")
    except DataError:
        raise  # of a broken archive
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"record {number:,} (counted from 0) cannot be read: {reason(error)}; is the file complete?", path
        ) from None


def reason(error: Exception) -> str:
    """Describes ``error`` for a message."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, byte 0x{error.object[error.start]:02x}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_pairs(stream: BinaryIO, path: Path) -> list[Pair]:
    """Returns question and query of every record of dataset.json, split into words. Raises DataError."""
    pairs = []
    for number, record in enumerate(progress(records(stream, path), "reading dataset.json", unit=" records")):
        place = f"record {number:,} (counted from 0)"
        for key in KEYS:
            if not isinstance(record.get(key), str):
                raise DataError(f"{place} has no text {key}", path)
        pair = Pair(question_words(record[KEYS[0]]), query_words(record[KEYS[1]]))
        for key, text in zip(KEYS, pair, strict=True):
            if not text or not text.isprintable():
                raise DataError(f"{place}: {key} does not consist of words: {text[:60]!a}", path)
        check_words(pair.target.split(" "), path, place=f"{place}: ")  # marks are words of their own in a question
        pairs.append(pair)
    return pairs


def read_indices(stream: BinaryIO, path: Path) -> dict[str, list[int]]:
    """Reads a split file: three lists of distinct positions in dataset.json. Raises DataError."""
    try:
        found: Any = json.load(stream)
    except DataError:
        raise  # of a broken archive
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({reason(error)})", path) from None
    seen: set[int] = set()
    for part in PARTS:
        numbers = found.get(part) if isinstance(found, dict) else None
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise DataError(f"{part} is not a list of positions", path)
        if len(numbers) != len(set(numbers)) or not seen.isdisjoint(numbers):
            raise DataError(f"{part} has a position twice", path)
        seen.update(numbers)
    return {part: found[part] for part in PARTS}

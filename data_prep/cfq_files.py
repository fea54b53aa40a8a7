"""Reads the files of CFQ: dataset.json (some 4 GB) record by record, from a folder or out of the archive.

The archive is read once, from beginning to end, without writing any of it to disk.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.archive import members
from data_prep.dataset import DataError, Json, Pair
from data_prep.progress import progress

BLOCK = 1 << 20  # bytes per read
LARGEST_DATASET, LARGEST_SPLIT = 1 << 34, 1 << 26  # bytes; the official ones have some 4 GB and 2 MB
LONGEST_RECORD = 1 << 24  # characters; records have some 20,000
KEYS = ("questionPatternModEntities", "sparqlPatternModEntities")
PARTS = ("trainIdxs", "devIdxs", "testIdxs")
DECODER = json.JSONDecoder()
# Tokenizers of questions and of queries: words between single spaces.
Words = tuple[Callable[[str], str], Callable[[str], str]]


class Content(NamedTuple):
    """All pairs, the indices of one split under the names in ``PARTS``, and the descriptions of the two files."""

    pairs: list[Pair]
    indices: dict[str, list[int]]
    files: list[Json]


class Hashed:
    """A binary stream that is read once, in blocks, and counts and hashes its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size, self.hash = stream, 0, hashlib.sha256()

    def blocks(self) -> Iterator[bytes]:
        while block := self.stream.read(BLOCK):
            self.size += len(block)
            self.hash.update(block)
            yield block

    def describe(self, name: str) -> Json:
        """The entry in ``dataset.json``, after everything has been read."""
        return {"name": name, "bytes": self.size, "sha256": self.hash.hexdigest()}


class Window:
    """The UTF-8 text of a file, of which only the current part is in memory."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.blocks = blocks
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.position = "", 0

    def more(self) -> bool:
        """Reads the next block; returns False at the end. Raises UnicodeDecodeError."""
        block = next(self.blocks, b"")
        self.text = self.text[self.position :] + self.decode(block, final=not block)
        self.position = 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is not white space, or '' at the end."""
        while True:
            while self.position < len(self.text) and self.text[self.position] in " \t\n\r":
                self.position += 1
            if self.position < len(self.text) or not self.more():
                return self.text[self.position : self.position + 1]

    def skip(self) -> str:
        """Returns the character of ``peek`` and moves past it."""
        character = self.peek()
        self.position += len(character)
        return character

    def record(self) -> Json:
        """Reads the JSON object at the next character. Raises ValueError or RecursionError."""
        if self.peek() != "{":
            raise ValueError(f"'{{' expected, not {self.peek() or 'the end'!r}")
        while True:
            try:
                value, self.position = DECODER.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                if len(self.text) - self.position > LONGEST_RECORD or not self.more():
                    raise ValueError(error.msg) from None


def records(blocks: Iterator[bytes], path: Path) -> Iterator[Json]:
    """Yields the objects of a JSON file that is one list of objects.

    Raises DataError with the number of the record, counted from 0, for any other content.
    """
    window, number = Window(blocks), 0
    try:
        if window.skip() != "[":
            raise DataError("not a JSON list: '[' expected at the beginning", path)
        while True:
            yield window.record()
            number += 1
            separator = window.skip()
            if separator == "]":
                break
            if separator != ",":
                raise ValueError(f"',' or ']' expected before it, not {separator or 'the end'!r}")
        if window.peek():
            raise DataError(f"continues after the list of {number:,} records", path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"record {number:,} (counted from 0) cannot be read: {reason(error)}", path) from None


def reason(error: Exception) -> str:
    """Describes ``error`` for a message."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, byte 0x{error.object[error.start]:02x}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_pairs(blocks: Iterator[bytes], path: Path, words: Words) -> list[Pair]:
    """Returns question and query of every record, each tokenized by its function. Raises DataError."""
    pairs = []
    for number, record in enumerate(progress(records(blocks, path), "reading dataset.json", unit=" records")):
        for key in KEYS:
            if not isinstance(record.get(key), str):
                raise DataError(f"record {number:,} (counted from 0) has no text {key}", path)
        pair = Pair(*(split(record[key]) for split, key in zip(words, KEYS, strict=True)))
        for key, text in zip(KEYS, pair, strict=True):
            if not text or not text.isprintable():
                raise DataError(
                    f"record {number:,} (counted from 0): {key} does not consist of words: {text[:60]!a}", path
                )
        pairs.append(pair)
    return pairs


def read_indices(blocks: Iterator[bytes], path: Path) -> dict[str, list[int]]:
    """Reads a split file: three lists of distinct positions in dataset.json. Raises DataError."""
    try:
        found: Any = json.loads(b"".join(blocks))
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


class Reader:
    """Reads dataset.json and the file of one split, in any order."""

    def __init__(self, split: str, words: Words) -> None:
        self.places = ("dataset.json", f"splits/{split}.json")
        self.words = words
        self.pairs: list[Pair] = []
        self.indices: dict[str, list[int]] = {}
        self.files: dict[str, Json] = {}

    def take(self, place: str, stream: BinaryIO, path: Path) -> None:
        """Reads one of ``places``; ``path`` is for messages. Raises DataError."""
        data = Hashed(stream)
        if place == "dataset.json":
            self.pairs = read_pairs(data.blocks(), path, self.words)
        else:
            self.indices = read_indices(data.blocks(), path)
        self.files[place] = data.describe(f"cfq/{place}")

    def content(self, path: Path) -> Content:
        """Joins both files. Raises DataError if one is missing, or if the split names a missing record."""
        for place in self.places:
            if place not in self.files:
                raise DataError(f"has no cfq/{place}", path)
        greatest = max((number for numbers in self.indices.values() for number in numbers), default=0)
        if greatest >= len(self.pairs):
            last = len(self.pairs) - 1
            raise DataError(f"{self.places[1]} names record {greatest:,}, but dataset.json ends at {last:,}", path)
        return Content(self.pairs, self.indices, [self.files[place] for place in self.places])


def read_folder(folder: Path, split: str, words: Words) -> Content:
    """Reads an unpacked archive: ``folder`` is ``cfq`` or contains it. Raises DataError."""
    reader, base = Reader(split, words), find_dataset(folder).parent
    for place in reversed(reader.places):  # the small file first, so its errors come at once
        if not (base / place).is_file():
            raise DataError(f"has no {place}", base)
        with (base / place).open("rb") as stream:
            reader.take(place, stream, base / place)
    return reader.content(folder)


def find_dataset(folder: Path) -> Path:
    """The path of dataset.json. Raises DataError if there is none."""
    for path in (folder / "dataset.json", folder / "cfq" / "dataset.json"):
        if path.is_file():
            return path
    raise DataError("has neither dataset.json nor cfq/dataset.json: name the unpacked folder", folder)


def read_archive(path: Path, split: str, words: Words) -> Content:
    """Reads the archive from beginning to end. Raises DataError, also for what ``archive.members`` refuses."""
    reader = Reader(split, words)
    limits = dict(zip(reader.places, (LARGEST_DATASET, LARGEST_SPLIT), strict=True))
    for name, stream in members(path, lambda name: limits.get(name.removeprefix("cfq/"))):
        reader.take(name.removeprefix("cfq/"), stream, path / name)
    return reader.content(path)

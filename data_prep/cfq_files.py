"""Reads the files of CFQ: dataset.json of some 4 GB record by record, never whole, from a folder or out of the archive.

The archive is read from its beginning to its end, once, and nothing of it is written to the disk.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.archive import members
from data_prep.common import DataError, Json, Pair
from data_prep.progress import progress

BLOCK = 1 << 20  # bytes read at a time
LARGEST_DATASET, LARGEST_SPLIT = 1 << 34, 1 << 26  # bytes; the official ones have some 4 GB and 2 MB
LONGEST_RECORD = 1 << 24  # characters; records have some 20,000
KEYS = ("questionPatternModEntities", "sparqlPatternModEntities")
PARTS = ("trainIdxs", "devIdxs", "testIdxs")
DECODER = json.JSONDecoder()
# What puts a question, and what puts a query, into words between single spaces.
Words = tuple[Callable[[str], str], Callable[[str], str]]


class Content(NamedTuple):
    """All pairs, the indices of one split by the names in ``PARTS``, and the descriptions of the two files."""

    pairs: list[Pair]
    indices: dict[str, list[int]]
    files: list[Json]


class Hashed:
    """A binary stream that is read once, in blocks; it counts and hashes what was read."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size, self.hash = stream, 0, hashlib.sha256()

    def blocks(self) -> Iterator[bytes]:
        while block := self.stream.read(BLOCK):
            self.size += len(block)
            self.hash.update(block)
            yield block

    def describe(self, name: str) -> Json:
        """The entry in ``dataset.json``, after everything was read."""
        return {"name": name, "bytes": self.size, "sha256": self.hash.hexdigest()}


class Window:
    """The text of a file in UTF-8, of which only the part that is being read is in memory."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.blocks = blocks
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.position = "", 0

    def more(self) -> bool:
        """Takes in the next block; False at the end. Raises UnicodeDecodeError."""
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
        """Goes behind what ``peek`` returns, and returns it."""
        character = self.peek()
        self.position += len(character)
        return character

    def record(self) -> Json:
        """The JSON object that begins at the next character. Raises ValueError, RecursionError."""
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
    """The objects of a file that is one JSON list of objects, one after the other.

    Raises DataError, with the number of the record counted from 0, for anything else.
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
            raise DataError(f"goes on behind the list of {number:,} records", path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"record {number:,} (counted from 0) cannot be read: {reason(error)}", path) from None


def reason(error: Exception) -> str:
    """What is wrong, for a message."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, byte 0x{error.object[error.start]:02x}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_pairs(blocks: Iterator[bytes], path: Path, words: Words) -> list[Pair]:
    """The question and the query of every record, each put into words by one of the two functions. Raises DataError."""
    pairs = []
    for number, record in enumerate(progress(records(blocks, path), "reading dataset.json", unit=" records")):
        for key in KEYS:
            if not isinstance(record.get(key), str):
                raise DataError(f"record {number:,} (counted from 0) has no text {key}", path)
        pair = Pair(*(split(record[key]) for split, key in zip(words, KEYS, strict=True)))
        for key, text in zip(KEYS, pair, strict=True):
            if not text or not text.isprintable():
                raise DataError(f"record {number:,} (counted from 0): {key} is not words: {text[:60]!a}", path)
        pairs.append(pair)
    return pairs


def read_indices(blocks: Iterator[bytes], path: Path) -> dict[str, list[int]]:
    """The content of a split file: three lists of different positions in dataset.json. Raises DataError."""
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
            raise DataError(f"{part} has a position that is there already", path)
        seen.update(numbers)
    return {part: found[part] for part in PARTS}


class Reader:
    """Takes in dataset.json and the file of one split, in whatever order they come."""

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
        """Puts both together. Raises DataError if one did not come, or if the split names a record that is missing."""
        for place in self.places:
            if place not in self.files:
                raise DataError(f"has no cfq/{place}", path)
        greatest = max((number for numbers in self.indices.values() for number in numbers), default=0)
        if greatest >= len(self.pairs):
            last = len(self.pairs) - 1
            raise DataError(f"{self.places[1]} names record {greatest:,}, and dataset.json ends with {last:,}", path)
        return Content(self.pairs, self.indices, [self.files[place] for place in self.places])


def read_folder(folder: Path, split: str, words: Words) -> Content:
    """Reads an unpacked archive: ``folder`` is ``cfq`` or has it. Raises DataError."""
    reader, base = Reader(split, words), find_dataset(folder).parent
    for place in reversed(reader.places):  # the small file first: what is wrong with it is then said at once
        if not (base / place).is_file():
            raise DataError(f"has no {place}", base)
        with (base / place).open("rb") as stream:
            reader.take(place, stream, base / place)
    return reader.content(folder)


def find_dataset(folder: Path) -> Path:
    """Where dataset.json is. Raises DataError."""
    for path in (folder / "dataset.json", folder / "cfq" / "dataset.json"):
        if path.is_file():
            return path
    raise DataError("has neither dataset.json nor cfq/dataset.json: name the unpacked folder", folder)


def read_archive(path: Path, split: str, words: Words) -> Content:
    """Reads the archive from its beginning to its end; see ``archive.members`` for what is
    refused. Raises DataError.
    """
    reader = Reader(split, words)
    limits = dict(zip(reader.places, (LARGEST_DATASET, LARGEST_SPLIT), strict=True))
    for name, stream in members(path, lambda name: limits.get(name.removeprefix("cfq/"))):
        reader.take(name.removeprefix("cfq/"), stream, path / name)
    return reader.content(path)

"""Reads published text files strictly and writes our own; errors name the file and the line."""

from __future__ import annotations

import codecs
import hashlib
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from data_prep.dataset import DataError, shorten

# Characters other than newline at which Python's str.splitlines and similar tools start a line.
LINE_SEPARATORS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def sha256(path: Path) -> str:
    """The hash of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def split_lines(path: Path, data: bytes) -> list[str]:
    """The lines of a UTF-8 text file, without their newlines.

    Raises:
        DataError: for a byte order mark, bytes that are not UTF-8, a carriage return or another character that some
            tools take for a line end (U+2028 …), and an empty line; see ``check_beginning`` and ``decode_line``.
    """
    return [decode_line(path, number, raw) for number, raw in enumerate(raw_lines(path, data), start=1)]


def raw_lines(path: Path, data: bytes) -> list[bytes]:
    """The lines of a text file as bytes; only a newline ends a line. Raises DataError for a byte order mark."""
    check_beginning(path, data)
    return data.removesuffix(b"\n").split(b"\n")


def check_beginning(path: Path, data: bytes) -> None:
    """Raises DataError for a byte order mark, which would become a letter of the first word."""
    if data.startswith(codecs.BOM_UTF8):
        raise DataError("starts with a byte order mark: save the file as UTF-8 without it", path, 1)


def decode_utf8(path: Path, number: int, raw: bytes) -> str:
    """Decodes line ``number``. Raises DataError if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}; save the file as UTF-8"
        raise DataError(message, path, number) from None


def decode_line(path: Path, number: int, raw: bytes) -> str:
    """Decodes and checks one line for ``split_lines``."""
    line = decode_utf8(path, number, raw)
    if line.endswith("\r"):
        raise DataError("ends in CR LF: save the file with plain newlines", path, number)
    for character in LINE_SEPARATORS:
        if character in line:
            name = unicodedata.name(character, "a control character that separates lines")
            raise DataError(f"holds U+{ord(character):04X} ({name}) inside the line", path, number)
    if not line.strip():
        raise DataError("empty line", path, number)
    return line


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes lines of tokens so that fairseq reads back the same tokens.

    Raises DataError for an empty line, or for tokens not separated by exactly one plain space.
    """
    with path.open("wb") as stream:
        for number, line in enumerate(lines, start=1):
            if not line or " ".join(line.split()) != line:
                raise DataError(f"not tokens separated by single spaces: {shorten(line)}", path.name, number)
            stream.write(line.encode("utf-8") + b"\n")

"""Reads published text files strictly, writes our own; every complaint names the file and the line."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import unicodedata
import zlib
from collections.abc import Iterable
from pathlib import Path

from data_prep.common import DataError

# Where Python's str.splitlines, and tools like it, would start a new line though no newline stands there.
LINE_SEPARATORS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shorten(text: str, width: int = 60) -> str:
    """``text`` quoted for a message: on one line, and never long."""
    return repr(text if len(text) <= width else text[: width - 1] + "…")


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in ``.gz``.

    Raises DataError for a broken gzip file; OSError where there is nothing to read.
    """
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"not a whole gzip file ({error})", path) from None


def split_lines(path: Path, data: bytes) -> list[str]:
    """The lines of a text file in UTF-8, without their newlines.

    Raises DataError for what ``check_beginning`` and ``decode_line`` refuse: a byte order mark, bytes that are
    not UTF-8, a carriage return or another character that some tools take for the end of a line (U+2028 …), and a
    line with nothing on it.
    """
    return [decode_line(path, number, raw) for number, raw in enumerate(raw_lines(path, data), start=1)]


def raw_lines(path: Path, data: bytes) -> list[bytes]:
    """The lines of a text file as bytes; nothing but a newline ends one. Raises DataError for a byte order mark."""
    check_beginning(path, data)
    return data.removesuffix(b"\n").split(b"\n")


def check_beginning(path: Path, data: bytes) -> None:
    """Raises DataError for a byte order mark, which would be a letter of the first word."""
    if data.startswith(codecs.BOM_UTF8):
        raise DataError("starts with a byte order mark: save the file as UTF-8 without it", path, 1)


def decode_utf8(path: Path, number: int, raw: bytes) -> str:
    """The text of line ``number``. Raises DataError if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}; save the file as UTF-8"
        raise DataError(message, path, number) from None


def decode_line(path: Path, number: int, raw: bytes) -> str:
    """One line of ``split_lines``."""
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
    """Writes lines of tokens that fairseq will read back as just these tokens.

    Raises DataError for a line that is empty, or whose tokens are not separated by exactly one plain space.
    """
    with path.open("wb") as stream:
        for number, line in enumerate(lines, start=1):
            if not line or " ".join(line.split()) != line:
                raise DataError(f"not tokens separated by single spaces: {shorten(line)}", path.name, number)
            stream.write(line.encode("utf-8") + b"\n")

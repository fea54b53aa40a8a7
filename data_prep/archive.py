"""Reads members of a tar archive in one pass from its beginning to its end; nothing of it is ever written to the disk.

An archive may be made to do harm. Refused as a whole, whatever is wanted of it, is one with

    a path that leads out of it (absolute, or with ``..``), or the same path twice
    a link, a device, a pipe, or a sparse file: published data are plain files and folders
    more bytes, unpacked, than its reader allows, or many more than it has packed (a bomb), or endless headers
    an end that is missing, or a checksum of gzip that is wrong
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data_prep.common import DataError
from data_prep.text import shorten

BLOCK = 1 << 16  # bytes read at a time
LARGEST = 1 << 35  # bytes, unpacked: 32 GiB
MOST_MEMBERS = 100_000
MOST_HEADERS = 1 << 20  # bytes before a member, and behind the last one
RATIO = 100  # bytes unpacked for a packed one; text has less than 20
HARMLESS = 1 << 24  # bytes that may be packed by any ratio: small archives are mostly filling
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


class Header(tarfile.TarInfo):
    """A header of ``tarfile``. Left to itself, ``tarfile`` takes a damaged or missing one
    for the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where a header should be") from None


class Unpacked:
    """The bytes of the archive, unpacked, as ``tarfile`` reads a stream; at most ``allowed`` of them."""

    def __init__(self, path: Path, packed: BinaryIO, stream: BinaryIO) -> None:
        self.path, self.packed, self.stream = path, packed, stream
        self.size, self.allowed = 0, MOST_HEADERS

    def read(self, size: int) -> bytes:
        """The next bytes. Raises DataError for too many of them."""
        block = self.stream.read(size)
        self.size += len(block)
        if self.size > HARMLESS and self.size > RATIO * self.packed.tell():
            raise DataError(
                f"{self.packed.tell():,} bytes unpack to {self.size:,} or more, as in no archive of data", self.path
            )
        if self.size > self.allowed:
            raise DataError(f"more than {MOST_HEADERS:,} bytes of headers, or behind the end", self.path)
        return block


class Member(io.RawIOBase):
    """One file of the archive, until the next one is asked for. Reading raises DataError."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with complaints(self.path):
            block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


@contextmanager
def complaints(path: Path) -> Iterator[None]:
    """Turns what gzip and ``tarfile`` raise for a broken archive into DataError."""
    try:
        yield
    except DataError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        reason = "headers nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"not a whole archive of tar or tar.gz ({reason})", path) from None


def members(path: Path, wanted: Callable[[str], int | None], largest: int = LARGEST) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of every wanted file of an archive (.tar, .tar.gz or .tgz), in their order there.

    wanted   name -> greatest size in bytes, or None for a file that is passed over; names as in the archive, without
             ``./`` at the beginning.
    largest  of the whole archive, unpacked, in bytes.

    A content can be read until the next one is asked for, not to its end if that is not needed. That the archive is
    whole is known when the iteration has come to its end. Raises DataError for what the module lists, for a wanted file
    that is too large and for what is no archive; OSError where there is nothing to read.
    """
    with path.open("rb") as packed, complaints(path):
        zipped = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        stream = gzip.GzipFile(fileobj=packed) if zipped else packed
        unpacked = Unpacked(path, packed, stream)
        with tarfile.open(fileobj=unpacked, mode="r|", tarinfo=Header) as archive:
            names: set[str] = set()
            for member in archive:
                name = check_member(path, member, names)
                end = member.offset_data + member.size
                if end > largest:
                    raise DataError(f"{end:,} bytes or more, unpacked; {largest:,} are expected at most", path)
                unpacked.allowed = end + MOST_HEADERS
                limit = wanted(name) if member.type in REGULAR else None
                if limit is not None and member.size > limit:
                    raise DataError(f"has {member.size:,} bytes; {limit:,} are expected at most", path / name)
                if limit is not None:
                    yield name, io.BufferedReader(Member(path / name, archive.extractfile(member)), BLOCK)
        while unpacked.read(BLOCK):  # gzip has its checksum at the end
            pass


def check_member(path: Path, member: tarfile.TarInfo, names: set[str]) -> str:
    """The name of a member, and adds it to those that are there. Raises DataError for a member that is refused."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    if member.name.startswith("/") or ".." in parts or not member.name.isprintable():
        raise DataError(f"refused: the path {shorten(member.name)} leads out of the archive, or is none", path)
    if member.issparse() or member.type not in (*REGULAR, tarfile.DIRTYPE):
        kind = "a sparse file" if member.issparse() else KINDS.get(member.type, f"of the unknown type {member.type!r}")
        raise DataError(f"refused: {shorten(member.name)} is {kind}, neither a file nor a folder", path)
    if member.size < 0 or (member.size and member.isdir()):
        raise DataError(f"refused: {shorten(member.name)} has a size of {member.size:,} bytes", path)
    if name in names:
        raise DataError(f"refused: {shorten(member.name)} is there twice", path)
    if len(names) == MOST_MEMBERS:
        raise DataError(f"refused: more than {MOST_MEMBERS:,} files and folders", path)
    names.add(name)
    return name


def read_members(path: Path, wanted: Mapping[str, int], largest: int = LARGEST) -> dict[str, bytes]:
    """The content of small files of an archive: ``wanted`` maps their names to their greatest sizes in bytes.

    Returns them in the order of ``wanted``. Raises DataError as ``members`` does, and for a file that is not there.
    """
    found = {name: stream.read() for name, stream in members(path, wanted.get, largest)}
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise DataError(f"has no {missing}", path)
    return {name: found[name] for name in wanted}

"""Reads members of a tar archive in one pass, without writing any of them to disk.

The archive is untrusted. It is refused, whichever members are wanted, if it has

    a path that leads out of it (absolute, or with ``..``), or the same path twice
    a link, a device, a pipe, or a sparse file: published data are plain files and folders
    too many bytes unpacked, a compression ratio that is too high (a bomb), or too many bytes of headers
    no end (truncated), or a wrong gzip checksum
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

from data_prep.dataset import DataError
from data_prep.text import shorten

BLOCK = 1 << 16  # bytes per read
LARGEST = 1 << 35  # bytes, unpacked: 32 GiB
MOST_MEMBERS = 100_000
MOST_HEADERS = 1 << 20  # bytes before a member and after the last one
RATIO = 100  # unpacked bytes per packed byte; text has less than 20
HARMLESS = 1 << 24  # bytes allowed at any ratio: small archives are mostly padding
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


class Header(tarfile.TarInfo):
    """A tar header. ``tarfile`` alone takes a damaged or missing header for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} in place of a header") from None


class Unpacked:
    """The unpacked bytes as a stream for ``tarfile``, at most ``allowed`` of them."""

    def __init__(self, path: Path, packed: BinaryIO, stream: BinaryIO) -> None:
        self.path, self.packed, self.stream = path, packed, stream
        self.size, self.allowed = 0, MOST_HEADERS

    def read(self, size: int) -> bytes:
        """Returns the next bytes. Raises DataError if they are too many."""
        block = self.stream.read(size)
        self.size += len(block)
        if self.size > HARMLESS and self.size > RATIO * self.packed.tell():
            raise DataError(
                f"{self.packed.tell():,} bytes unpack to {self.size:,} or more: no archive of data has such a ratio",
                self.path,
            )
        if self.size > self.allowed:
            raise DataError(f"more than {MOST_HEADERS:,} bytes of headers, or after the end", self.path)
        return block


class Member(io.RawIOBase):
    """One file of the archive, readable until the next one is requested. Reading raises DataError."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with as_data_errors(self.path):
            block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


@contextmanager
def as_data_errors(path: Path) -> Iterator[None]:
    """Converts errors of gzip and ``tarfile`` for a broken archive to DataError."""
    try:
        yield
    except DataError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        reason = "headers nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"not a complete tar or tar.gz archive ({reason})", path) from None


def members(path: Path, wanted: Callable[[str], int | None], largest: int = LARGEST) -> Iterator[tuple[str, BinaryIO]]:
    """Yields name and content of every wanted file of an archive (.tar, .tar.gz or .tgz), in archive order.

    A content is readable until the next one is requested; it need not be read to its end. The archive is fully checked
    only when the iteration ends.

    Args:
        path: the archive.
        wanted: maps a name to the maximum size in bytes, or to None to skip the file. Names are those of the archive
            without a leading ``./``.
        largest: the maximum size of the whole archive, unpacked, in bytes.

    Raises:
        DataError: the archive is refused (see the module), is not an archive, or a wanted file is too large.
        OSError: the file cannot be read.
    """
    with path.open("rb") as packed, as_data_errors(path):
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
                    raise DataError(f"{end:,} bytes or more, unpacked; expected at most {largest:,}", path)
                unpacked.allowed = end + MOST_HEADERS
                limit = wanted(name) if member.type in REGULAR else None
                if limit is not None and member.size > limit:
                    raise DataError(f"has {member.size:,} bytes; expected at most {limit:,}", path / name)
                if limit is not None:
                    yield name, io.BufferedReader(Member(path / name, archive.extractfile(member)), BLOCK)
        while unpacked.read(BLOCK):  # the gzip checksum is at the end
            pass


def check_member(path: Path, member: tarfile.TarInfo, names: set[str]) -> str:
    """Returns the name of a member and adds it to the known ones. Raises DataError for a refused member."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    if member.name.startswith("/") or ".." in parts or not member.name.isprintable():
        raise DataError(f"refused: the path {shorten(member.name)} leads out of the archive, or is empty", path)
    if member.issparse() or member.type not in (*REGULAR, tarfile.DIRTYPE):
        kind = "a sparse file" if member.issparse() else KINDS.get(member.type, f"of the unknown type {member.type!r}")
        raise DataError(f"refused: {shorten(member.name)} is {kind}, neither a file nor a folder", path)
    if member.size < 0 or (member.size and member.isdir()):
        raise DataError(f"refused: {shorten(member.name)} has a size of {member.size:,} bytes", path)
    if name in names:
        raise DataError(f"refused: {shorten(member.name)} occurs twice", path)
    if len(names) == MOST_MEMBERS:
        raise DataError(f"refused: more than {MOST_MEMBERS:,} files and folders", path)
    names.add(name)
    return name


def read_members(path: Path, wanted: Mapping[str, int], largest: int = LARGEST) -> dict[str, bytes]:
    """Returns the contents of small files of an archive, in the order of ``wanted`` (name -> maximum size in bytes).

    Raises DataError as ``members`` does, and for a missing file.
    """
    found = {name: stream.read() for name, stream in members(path, wanted.get, largest)}
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise DataError(f"has no {missing}", path)
    return {name: found[name] for name in wanted}

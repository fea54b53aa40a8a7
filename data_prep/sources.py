"""Published files: finds them in the user's folder or downloads them into a cache, checks them, and reads archives.

The sizes and hashes of all published files are in ``files.sha256``.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import BinaryIO, ClassVar

from data_prep.dataset import BLOCK, DataError, Json, Sources, UsageError, check_path, option
from data_prep.folder import discard_dead, hidden_folder
from data_prep.progress import bar

TABLE = Path(__file__).with_name("files.sha256")
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt; doubles each time
TIMEOUT = 30.0  # seconds without an answer from the server
LARGEST = 1 << 28  # bytes of a file of unknown size


@dataclass(frozen=True)
class OfficialFile:
    """A published file: its path below the address of its dataset, and its uncompressed size in bytes and sha256.

    If size and sha256 are unknown, ``git_blob`` is known: the id of the file in git, as ``git hash-object FILE`` prints
    it. ``group`` is the first folder of its line in ``files.sha256``.
    """

    path: str
    size: int | None
    sha256: str | None
    git_blob: str | None = None
    group: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def digest(self) -> str:
        """The expected hash, in words."""
        return f"git blob {self.git_blob}" if self.sha256 is None else f"sha256 {self.sha256}"

    def digest_of(self, data: bytes) -> str:
        """The ``digest`` of ``data``."""
        if self.sha256 is None:
            blob = b"blob %d\0" % len(data) + data
            return f"git blob {hashlib.sha1(blob, usedforsecurity=False).hexdigest()}"
        return f"sha256 {hashlib.sha256(data).hexdigest()}"

    def matches(self, data: bytes) -> bool:
        """Whether ``data`` are this file."""
        return self.digest_of(data) == self.digest

    def check(self, path: Path | str, data: bytes) -> None:
        """Raises DataError unless ``data``, read from ``path``, are this file."""
        if not self.matches(data):
            size = "" if self.size is None else f"{self.size:,} bytes with "
            raise DataError(
                f"not the official {self.name}: {len(data):,} bytes with "
                f"{self.digest_of(data)}, expected {size}{self.digest}. Get it again, or name a folder that has it by "
                "--raw-dir",
                path,
            )

    def describe(self) -> Json:
        """The entry of this file in ``dataset.json``."""
        if self.sha256 is None:
            return {"name": self.name, "git_blob": self.git_blob}
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256}


def official_files(group: str) -> dict[str, OfficialFile]:
    """The published files of one group in ``files.sha256``, by path."""
    found = {}
    for line in TABLE.read_text(encoding="ascii").splitlines():
        if line.startswith("#"):
            continue
        digest, size, place = line.split()
        folder, _, path = place.partition("/")
        if folder == group:
            blob = digest.removeprefix("git:") if digest.startswith("git:") else None
            known = (None, None, blob) if blob else (int(size), digest, None)
            found[path] = OfficialFile(path, *known, group)
    return found


@dataclass(frozen=True)
class OfficialFiles(Sources):
    """The published files of one dataset, from the sources that the command line names.

    Attributes:
        urls: group of files -> address to download them from; the first one is the usual one.
        elsewhere: name of a file -> how to get it, if it is not at that address.
    """

    urls: ClassVar[Mapping[str, str]] = MappingProxyType({})
    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})

    raw_dir: Path | None = option(None, "folder with the official files (also as .gz)", type=Path, metavar="FOLDER")
    download: bool = option(False, "download the official files that are not in --raw-dir", given={"--download": True})
    mirror: str | None = option(None, "base URL to download from, instead of the official one", metavar="URL")
    cache_dir: Path | None = option(
        None,
        "where downloads are kept (default: $XDG_CACHE_HOME/fairseq_sg, or else ~/.cache/fairseq_sg)",
        type=Path,
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        """Raises UsageError for options that need ``--download``, DataError for a wrong ``--raw-dir``."""
        for name in ("mirror", "cache_dir"):
            if getattr(self, name) is not None and not self.download:
                raise UsageError(f"--{name.replace('_', '-')} belongs to --download: add that, or omit it")
        if self.mirror is not None and not is_web_address(self.mirror):
            raise UsageError(f"--mirror must be a URL such as https://example.org/SCAN, not {self.mirror!r}")
        check_path("--raw-dir", self.raw_dir, "folder")

    @property
    def asked_for(self) -> bool:
        """Whether the command line names a source of official files."""
        return self.download or self.raw_dir is not None

    def find(self, file: OfficialFile) -> Path | None:
        """The path of the file in ``--raw-dir``: its official path or its bare name, with or without ``.gz``."""
        if self.raw_dir is None:
            return None
        names = [file.path, file.path + ".gz", file.name, file.name + ".gz"]
        return next((self.raw_dir / name for name in names if (self.raw_dir / name).is_file()), None)

    def get(self, file: OfficialFile) -> Path:
        """The local path of the file, downloaded if necessary. Raises DataError if it cannot be found."""
        found = self.find(file)
        if found is not None and not (self.download and self._is_another(file, found)):
            return found
        url = f"{(self.mirror or self.urls[file.group]).rstrip('/')}/{file.path}"
        elsewhere = self.elsewhere.get(file.name)
        if self.download and elsewhere is None:
            return download(file, url, (self.cache_dir or default_cache()) / file.group / file.path)
        missing = "is not in this folder" if self.raw_dir else "is needed; pass its folder with --raw-dir"
        way = elsewhere or f"--download gets {url}"
        raise DataError(f"the official {file.name} ({file.digest}) {missing}. {way}", self.raw_dir)

    def _is_another(self, file: OfficialFile, found: Path) -> bool:
        """Whether a file with the bare name of ``file`` belongs to another folder: PCFG SET has many ``train.src``."""
        return found.parent == self.raw_dir and file.path != file.name and not file.matches(self.read_bytes(found))

    def read(self, file: OfficialFile) -> tuple[Path, bytes]:
        """The path and the uncompressed content of a file. Raises DataError for a truncated one.

        Other damage is left to the caller, who checks single lines first for better messages, then
        calls ``OfficialFile.check``.
        """
        path = self.get(file)
        data = self.read_bytes(path)
        if not data.endswith(b"\n"):
            file.check(path, data)
        return path, data


def default_cache() -> Path:
    """$XDG_CACHE_HOME/fairseq_sg, or ~/.cache/fairseq_sg."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fairseq_sg"


def is_web_address(text: str) -> bool:
    """Whether ``text`` is an ASCII http or https URL with a host and, if any, a numeric port."""
    try:
        parts = urllib.parse.urlsplit(text)
        if not (text.isascii() and parts.scheme in ("http", "https") and parts.hostname):
            return False
        return bool(parts.hostname.encode("idna")) and (parts.port or 1) > 0
    except ValueError:
        return False


def download(file: OfficialFile, url: str, target: Path) -> Path:
    """Downloads a file to ``target``, which appears only complete and checked. A right one is kept.

    Raises:
        DataError: the server has no such file, sends another one, or cannot be reached in ``ATTEMPTS`` attempts; or the
            disk is full.
    """
    if target.is_file() and file.matches(target.read_bytes()):
        return target
    size = "" if file.size is None else f" ({file.size:,} bytes)"
    print(f"downloading {url}{size}", file=sys.stderr)
    data = fetch(file, url)
    file.check(url, data)
    try:
        discard_dead(target)
        with hidden_folder(target, "--cache-dir") as room:
            part = room / "made" / target.name
            part.parent.mkdir()
            with part.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, target)
    except OSError as error:
        message = f"cannot be written ({error.strerror}): make room, or name another folder by --cache-dir"
        raise DataError(message, target) from None
    return target


def fetch(file: OfficialFile, url: str) -> bytes:
    """The content of a URL, in several attempts. Raises DataError as ``download`` does."""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                return receive(file, response)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}, {error.reason}"
            if error.code not in (408, 429) and error.code < 500:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    raise DataError(f"cannot be downloaded ({reason}); get it another way and pass its folder with --raw-dir", url)


def receive(file: OfficialFile, response: http.client.HTTPResponse) -> bytes:
    """Reads an answer, but little more than the file should have. Raises ConnectionError if it ends too early."""
    size = response.length if file.size is None else file.size
    data = bytearray()
    with bar(file.name, size, "B") as shown:
        while len(data) <= (LARGEST if size is None else size) and (block := response.read(BLOCK)):
            data += block
            shown.update(len(block))
    if size is not None and len(data) < size:
        raise ConnectionError(f"the connection ended after {len(data):,} of {size:,} bytes")
    return bytes(data)


@contextmanager
def as_data_errors(path: Path) -> Iterator[None]:
    """Converts errors of a broken archive to DataError."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"not a complete tar or tar.gz archive ({error})", path) from None


class Member(io.RawIOBase):
    """One file of an archive. Reading raises DataError if the archive is broken."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with as_data_errors(self.path):
            return self.stream.readinto(buffer)


def members(path: Path, packed: BinaryIO, wanted: Mapping[str, int]) -> Iterator[tuple[str, BinaryIO]]:
    """Yields name and content of the wanted files of a tar archive, as ``select`` does.

    Args:
        path, packed: see ``select``.
        wanted: name, without a leading ``./`` -> maximum size in bytes.

    Raises:
        DataError: as ``select`` does, and if a wanted member is missing.
    """
    missing = dict(wanted)
    for name, stream in select(path, packed, missing.get):
        del missing[name]  # of two members with this name, the first
        yield name, stream
    for name in missing:
        raise DataError(f"has no {name}", path)


def select(path: Path, packed: BinaryIO, limit: Callable[[str], int | None]) -> Iterator[tuple[str, BinaryIO]]:
    """Yields name and content of files of a tar archive, in archive order, without writing them to disk.

    A content is readable until the next one is requested.

    Args:
        path: the archive, for messages.
        packed: its bytes; packed by gzip or not.
        limit: name, without a leading ``./`` -> maximum size in bytes, or None for a file that is not wanted.

    Raises:
        DataError: the archive is broken, or a wanted member is too large, or no file.
    """
    with as_data_errors(path):
        zipped = packed.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
        stream = gzip.GzipFile(fileobj=packed) if zipped else packed
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                most = limit(name)
                if most is None:
                    continue
                if not member.isreg():
                    raise DataError("is not a plain file", path / name)
                if member.size > most:
                    raise DataError(f"has {member.size:,} bytes; expected at most {most:,}", path / name)
                yield name, io.BufferedReader(Member(path, archive.extractfile(member)), BLOCK)
        while stream.read(BLOCK):  # the gzip checksum is at the end
            pass

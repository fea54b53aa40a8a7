"""Finds the published files of a dataset in the user's folder, or downloads them into a cache, and checks them."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath

from data_prep.dataset import DataError, Json, UsageError
from data_prep.folder import lock_file, sync
from data_prep.progress import bar
from data_prep.text import read_bytes

ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt; doubles each time
TIMEOUT = 30.0  # seconds without an answer from the server


@dataclass(frozen=True)
class OfficialFile:
    """A published file: its path below the base URL, and its uncompressed size in bytes and sha256.

    ``where`` tells how to get a file that cannot be downloaded from the base URL. If size and sha256 are unknown,
    ``git_blob`` is known: the id of the file in git, as ``git hash-object FILE`` prints it.
    """

    path: str
    size: int | None
    sha256: str | None
    where: str | None = None
    git_blob: str | None = None

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

    def is_at(self, path: Path) -> bool:
        """Whether the uncompressed file at ``path`` is this file."""
        return path.is_file() and self.matches(path.read_bytes())

    def check(self, path: Path, data: bytes) -> None:
        """Raises DataError unless ``data``, read from ``path``, are this file."""
        if not self.matches(data):
            size = "" if self.size is None else f"{self.size:,} bytes with "
            raise DataError(
                f"not the official {self.name}: {len(data):,} bytes with "
                f"{self.digest_of(data)}, expected {size}{self.digest}",
                path,
            )

    def describe(self) -> Json:
        """The entry of this file in ``dataset.json``."""
        if self.sha256 is None:
            return {"name": self.name, "git_blob": self.git_blob}
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256}


class OfficialFiles:
    """The published files of one dataset, from the sources that the command line names."""

    def __init__(self, args: argparse.Namespace, dataset: str, base_url: str) -> None:
        """Raises UsageError for options that need ``--download``, DataError for a wrong ``--raw-dir``."""
        for option in ("mirror", "cache_dir"):
            if getattr(args, option) is not None and not args.download:
                raise UsageError(f"--{option.replace('_', '-')} belongs to --download: add that, or omit it")
        if args.mirror is not None and not is_web_address(args.mirror):
            raise UsageError(f"--mirror must be a URL such as https://example.org/SCAN, not {args.mirror!r}")
        if args.raw_dir is not None and not args.raw_dir.is_dir():
            raise DataError("--raw-dir is not a folder", args.raw_dir)
        self.raw_dir: Path | None = args.raw_dir
        self.download: bool = args.download
        self.base_url = (args.mirror or base_url).rstrip("/")
        self.cache = (args.cache_dir or default_cache()) / dataset

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
        if found is not None:
            return found
        if self.download and file.where is None:
            return download(file, f"{self.base_url}/{file.path}", self.cache / file.path)
        way = file.where or f"--download gets {self.base_url}/{file.path}"
        missing = "is not in this folder" if self.raw_dir else "is needed; pass its folder with --raw-dir"
        raise DataError(f"the official {file.name} ({file.digest}) {missing}. {way}", self.raw_dir)

    def read(self, file: OfficialFile) -> tuple[Path, bytes]:
        """The path and the uncompressed content of a file. Raises DataError for a truncated one.

        Other damage is left to the caller, who checks single lines first for better messages, then
        calls ``OfficialFile.check``.
        """
        path = self.get(file)
        data = read_bytes(path)
        if not data.endswith(b"\n"):
            file.check(path, data)
        return path, data


def add_source_arguments(parser: argparse.ArgumentParser, base_url: str) -> None:
    """Adds the options for the source of official files."""
    parser.add_argument("--raw-dir", type=Path, metavar="FOLDER", help="folder with the official files (also as .gz)")
    parser.add_argument("--download", action="store_true", help="download the official files that are not in --raw-dir")
    parser.add_argument("--mirror", metavar="URL", help=f"base URL to download from (default: {base_url})")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="FOLDER",
        help="where downloads are kept (default: $XDG_CACHE_HOME/fairseq_sg, or else ~/.cache/fairseq_sg)",
    )


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


class Unfinished(Exception):
    """A transfer that may succeed when it is retried."""


def download(file: OfficialFile, url: str, target: Path) -> Path:
    """Downloads a file to ``target``, which appears only complete and checked.

    Bytes are collected in ``target`` + ``.part``, which survives a failure, so that the next attempt or run requests
    only the rest. If several runs download the same file, one does and the others wait.

    Raises:
        DataError: the server has no such file, sends another one, or cannot be reached in ``ATTEMPTS`` attempts; or the
            disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be made ({error.strerror}): name another folder by --cache-dir"
        raise DataError(message, target.parent) from None
    part = target.with_name(target.name + ".part")
    stream = None
    while stream is None:
        if file.is_at(target):
            return target
        stream = lock_file(part, wait=True)
    with stream:
        try:
            if not file.is_at(target):  # another run may have downloaded it meanwhile
                size = "" if file.size is None else f" ({file.size:,} bytes)"
                print(f"downloading {url}{size}", file=sys.stderr)
                retry(file, url, stream)
                os.replace(part, target)
                sync(target.parent)
        finally:
            if part.exists() and part.stat().st_size == 0:
                part.unlink()
    return target


def retry(file: OfficialFile, url: str, stream: FileIO) -> None:
    """Calls ``transfer`` until it succeeds. Raises DataError as ``download`` does."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return transfer(file, url, stream)
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}, {error.reason}"
            if error.code == 416:  # our part is longer than the server's file
                clear(stream)
            elif error.code not in (408, 429) and error.code < 500:
                break
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (Unfinished, OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    raise DataError(f"cannot be downloaded ({reason}); get it another way and pass its folder with --raw-dir", url)


def transfer(file: OfficialFile, url: str, stream: FileIO) -> None:
    """Tries once to complete ``stream``, which holds the first bytes of the file, or none."""
    have = stream.seek(0, os.SEEK_END)
    if file.size is None or have >= file.size:
        have = clear(stream)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not resumed:
            clear(stream)
        size = promised_size(url, response) if file.size is None else file.size
        with bar(file.name, size, "B") as shown:
            shown.update(stream.tell())
            while stream.tell() <= size and (block := response.read(1 << 16)):
                append(stream, block)
                shown.update(len(block))
    if stream.tell() < size:
        raise Unfinished(f"the connection ended after {stream.tell():,} of {size:,} bytes")
    check_transfer(file, url, stream, resumed)


def promised_size(url: str, response: http.client.HTTPResponse) -> int:
    """The size of the file according to the server. Raises DataError if it does not say."""
    size = response.headers.get("Content-Length", "")
    if not size.isdecimal():
        raise DataError("the server does not give the size of the file; get it another way and use --raw-dir", url)
    return int(size)


def append(stream: FileIO, block: bytes) -> None:
    """Writes all of ``block``. Raises DataError if the disk is full: a retry would not help."""
    left = memoryview(block)
    try:
        while left:
            left = left[stream.write(left) :]
    except OSError as error:
        message = f"cannot be written ({error.strerror}): make room, or name a folder on another disk by --cache-dir"
        raise DataError(message, stream.name) from None


def clear(stream: FileIO) -> int:
    """Truncates a file opened for appending; returns its new length, 0."""
    stream.truncate(0)
    return stream.seek(0)


def check_transfer(file: OfficialFile, url: str, stream: FileIO, resumed: bool) -> None:
    """Discards wrong bytes: raises Unfinished if some come from an earlier run, else DataError."""
    try:
        file.check(Path(stream.name), Path(stream.name).read_bytes())
    except DataError as error:
        clear(stream)
        if resumed:
            raise Unfinished("the rest does not fit the part from an earlier run") from None
        raise DataError(error.message, url) from None
    os.fsync(stream.fileno())

"""Files that are written atomically, locks on folders, and the ``dataset.json`` of data folders."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from fairseq_sg.errors import UsageError


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside ``path``, which it becomes at the end. After an error, ``path`` is as before.

    Folders above it are made. A pipe or a device is written to itself. Of processes and threads that write ``path`` at
    the same time, each has a temporary file of its own; those of writers that were killed are removed.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(path)
    temporary, lock = _locked(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        lock.close()


def _locked(path: Path) -> tuple[Path, IO[bytes]]:
    """A new temporary file, and the stream whose lock says that its writer lives."""
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        lock = open(temporary, "xb")
        with contextlib.suppress(OSError):  # a file system without locks, where none is removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, lock
        lock.close()  # another writer removed it before it was locked


def _remove_left_behind(path: Path) -> None:
    """Removes temporary files of ``path`` that nobody has locked."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), open(left, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time read and write the files of a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def check_writable(what: str, path: str | Path, read: Iterable[str | Path] = ()) -> None:
    """Raises UsageError for a folder, and where no file can be made; folders above ``path`` may not exist yet.

    So it does for one of the files ``read``, which the command reads. ``what`` names the option and the file.
    """
    if os.path.isdir(path):
        raise UsageError(f"{what} is a folder: name a file")
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {folder}: {os.strerror(error.errno)}") from error
    for file in read:
        if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
            raise UsageError(f"{what} would overwrite {file}, which the command reads: name another file")


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """JSON without escapes; what is none of its types becomes a text."""
    write_text(path, json.dumps(value, indent=indent, default=str, ensure_ascii=False) + "\n")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The ``dataset.json`` of a data folder. Raises UsageError where there is none, or if it cannot be read."""
    path = os.path.join(folder, "dataset.json")
    if not folder or not os.path.isfile(path):
        what = "has no dataset.json" if os.path.isdir(folder) else "does not exist"
        raise UsageError(
            f"the data folder {folder or '(none was given)'} {what}: make it with `python -m data_prep` "
            "(`python -m data_prep --help` lists the datasets; for text of your own, `parallel` or `text`)"
        )
    try:
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        if not isinstance(found, dict) or not isinstance(found.get("request") or {}, dict):
            raise ValueError("it has no entries of data_prep")
        return found
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}): prepare the data in a new folder with `python -m data_prep`"
        ) from None

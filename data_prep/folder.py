"""Makes a dataset folder appear atomically, in spite of interruptions and parallel runs."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from data_prep.dataset import DataError

WORKSPACE = ".data_prep-"


def lock_file(path: Path, *, wait: bool, create: bool = True) -> FileIO | None:
    """Opens ``path`` for appending without a buffer, and locks it. The lock ends with the stream or the process.

    Returns None if another process holds the lock (without ``wait``), or has moved or removed the file in the meantime.
    Raises DataError if the file system has no locks.
    """
    try:
        stream = path.open("ab" if create else "r+b", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
            return stream
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        stream.close()
        raise DataError(f"cannot be locked ({error.strerror}): name a folder on another file system", path) from None
    stream.close()
    return None


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A locked, hidden folder beside ``out``, on the same file system.

    Make the future ``out`` inside it, and move it out with ``publish``. When the block ends, the folder is removed,
    with parent folders that were made for it and are empty. Raises DataError if it cannot be made.
    """
    above = [folder for folder in out.parents if not folder.exists()]
    try:
        with hidden_folder(out) as room:
            yield room
    finally:
        for folder in above:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def hidden_folder(out: Path) -> Iterator[Path]:
    """The folder of ``workspace``, without removing its parents."""
    lock = None
    while lock is None:  # another run may discard this workspace before it is locked
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            room = Path(tempfile.mkdtemp(prefix=f".{out.name}{WORKSPACE}", dir=out.parent))
        except OSError as error:
            reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
            raise DataError(f"cannot be made ({reason}): choose another --out", out) from None
        try:
            lock = lock_file(room / "lock", wait=False)
        except DataError:
            shutil.rmtree(room)
            raise
    with lock:
        try:
            yield room
        finally:
            discard(room)


def discard(room: Path) -> None:
    """Removes a workspace, the lock last, so that an interrupted removal can be resumed."""
    for path in room.iterdir():
        if path.name != "lock":
            shutil.rmtree(path)
    (room / "lock").unlink()
    room.rmdir()


def discard_dead(out: Path) -> None:
    """Removes workspaces for ``out`` whose process has ended."""
    for name in glob.glob(f".{glob.escape(out.name)}{WORKSPACE}*", root_dir=out.parent, include_hidden=True):
        room = out.parent / name
        lock = lock_file(room / "lock", wait=False, create=False)
        if lock is not None:
            with lock:
                discard(room)
        else:
            # In use, or dead before it was locked: then it is empty, and rmdir removes only empty folders.
            with suppress(OSError):
                room.rmdir()


def publish(made: Path, out: Path, room: Path, *, replace: bool = False) -> None:
    """Moves the folder ``made`` to ``out``, which may be an empty folder.

    With ``replace``, existing content of ``out`` moves into the workspace ``room`` first and is removed with it. Raises
    DataError, with ``out`` unchanged, if there is content that must not be replaced.
    """
    for path in [made, *made.rglob("*")]:
        sync(path)
    if replace:
        os.rename(out, room / "replaced")
    try:
        os.rename(made, out)
    except OSError as error:
        if replace:
            os.rename(room / "replaced", out)
        raise DataError(f"cannot be moved there ({error.strerror}): is another run making it?", out) from None
    sync(out.parent)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk, so that a crash leaves no name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

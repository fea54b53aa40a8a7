"""Prepares a dataset in a folder atomically, and recognizes prepared folders."""

from __future__ import annotations

import argparse
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from data_prep.binarize import require_fairseq
from data_prep.dataset import DataError, Dataset, Json, Material
from data_prep.text import sha256

# Format of dataset.json and of its folder, raised when older folders become unusable. Up to 1, dictionaries were sorted
# by the frequency of words in the folder.
FORMAT = 2
MANIFEST = "dataset.json"
WORKSPACE = ".data_prep-"
REPLACED = "replaced"  # in a workspace: the folder that the new one replaces
CHANGED = "has changed since its preparation"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of writing; they name no file


def prepare(dataset: Dataset, args: argparse.Namespace) -> None:
    """Makes ``args.out``, unless it is already prepared, and prints a summary.

    Raises UsageError, DataError or OSError; then ``args.out`` is unchanged and temporary files are removed.
    """
    options, sources = dataset.read(args)

    def request() -> Json:
        return {"dataset": dataset.name, **options.request(sources), "raw_only": args.raw_only}

    out = real_path(args.out)
    discard_dead(out)
    replace = is_occupied(out)
    if replace and args.overwrite:
        check_replaceable(out)
    elif replace:
        check_same(out, request())
        say([f"already prepared: {args.out}"])
        return
    check_place(out)
    if dataset.binarizes and not args.raw_only:
        require_fairseq(", or use --raw-only to write only the text")
    with workspace(out) as room:
        material = dataset.build(options, sources)
        material.check()
        made = room / "made"
        try:
            description = write(made, material, request())  # now, as files are hashed while they are read
            sources.check_unchanged()
            published = publish(made, out, room, replace=replace)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DataError(
                    f"cannot be written ({error.strerror}): make room, or choose another --out", out
                ) from None
            raise
    if not published:
        say([f"already prepared: {args.out}"])
        return
    lines = [f"{dataset.title}: {material.rule}", *material.summary(description), f"written to {args.out}"]
    if not args.raw_only:
        commands = material.training_commands(dataset, args.out)
        lines += [start + command for start, command in zip(("next: ", *["  or: "] * len(commands)), commands)]
    say(lines)


def real_path(out: Path) -> Path:
    """``--out`` as an absolute path without links. Raises DataError for a relative one without a current folder."""
    try:
        return Path(os.path.realpath(out))
    except FileNotFoundError:
        raise DataError("the current folder is gone: give --out as an absolute path", out) from None


def say(lines: list[str]) -> None:
    """Prints the result. The data exist even if standard output is closed."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # Otherwise Python flushes the rest at exit and fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_occupied(out: Path) -> bool:
    """Whether ``out`` has content that needs permission to overwrite. An empty folder has none."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def check_place(out: Path) -> None:
    """Raises DataError for an ``out`` that cannot be moved or replaced: a mount point, and a folder with the process in
    it.
    """
    with suppress(FileNotFoundError):  # the current folder may have been removed
        here = Path(os.getcwd())
        if out in (here, *here.parents):
            raise DataError("is the current folder, or a folder above it: name a new folder by --out", out)
    if os.path.ismount(out):
        raise DataError("is a mount point, which cannot be replaced: choose a folder inside it by --out", out)


def write(folder: Path, material: Material, request: Json) -> Json:
    """Fills ``folder`` with the data and ``dataset.json``, and returns the content of the latter."""
    folder.mkdir(parents=True)
    material.write(folder, request["raw_only"])
    content = manifest(folder, material, request)
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def manifest(folder: Path, material: Material, request: Json) -> Json:
    """The content of ``dataset.json``, without dates and local paths, so that equal data have equal bytes."""
    return {
        "format": FORMAT,
        "fairseq_sg": version(),
        "request": request,
        "origin": material.origin,
        "rule": material.rule,
        "membership": material.membership,
        **material.describe(),
        "files": {name: sha256(folder / name) for name in files_in(folder)},
    }


def files_in(folder: Path) -> list[str]:
    """All files below ``folder`` except ``dataset.json``, as sorted relative paths."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in files if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def version() -> str:
    """The version of fairseq_sg, which stands beside this package; read, not imported."""
    text = (Path(__file__).parents[1] / "fairseq_sg" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def read_manifest(folder: Path) -> Json:
    """Reads the ``dataset.json`` of a prepared folder. Raises DataError if it is not one, or cannot be read."""
    path = folder / MANIFEST
    cause, reason = None, f"no {MANIFEST} of ours"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hashes = found["files"].values()
        known = "format" in found and isinstance(found["request"], dict)
        known = known and bool(hashes) and all(isinstance(digest, str) for digest in hashes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        known, cause = False, error
        if not folder.exists():
            reason = "there is no such folder"
        elif isinstance(error, OSError) and path.exists():
            reason = f"{MANIFEST} cannot be read: {error.strerror}"
        elif isinstance(error, ValueError):
            reason = f"{MANIFEST} is cut off or was changed: {error}"
    if not known:
        raise DataError(f"not a prepared dataset ({reason}), left unchanged: choose another folder", folder) from cause
    return found


def missing_file(folder: Path, found: Json) -> str | None:
    """The first file of ``dataset.json`` that ``folder`` lacks, or None."""
    return next((name for name in found["files"] if not (folder / name).is_file()), None)


def changed_file(folder: Path, found: Json) -> str | None:
    """The first file of ``folder`` whose hash is not that in ``dataset.json``, or None. It reads them all."""
    for name, digest in found["files"].items():
        path = folder / name
        if path.is_file() and sha256(path) != digest:
            return name
    return None


def damage(folder: Path, found: Json) -> str | None:
    """A difference between the files of ``folder`` and its ``dataset.json``, or None."""
    if (missing := missing_file(folder, found)) is not None:
        return f"{missing} is missing"
    changed = changed_file(folder, found)
    return None if changed is None else f"{changed} {CHANGED}"


def verify(folder: Path) -> int:
    """Checks a prepared folder against its ``dataset.json``; returns the number of files. Raises DataError."""
    found = read_manifest(folder)
    problem = damage(folder, found)
    if problem is not None:
        raise DataError(problem, folder)
    return len(found["files"])


def has_old_order(found: Json) -> bool:
    """Whether the folder of this ``dataset.json`` has dictionaries sorted by frequency, as
    earlier versions made them.
    """
    return found["format"] == 1 and "dict.src.txt" in found["files"]


def check_same(out: Path, request: Json) -> None:
    """Raises DataError unless ``out`` is unchanged and has the data of ``request``."""
    found = read_manifest(out)
    there, here = ({"format": m["format"], **m["request"]} for m in (found, {"format": FORMAT, "request": request}))
    if there["format"] == 1:  # differs only in the order of words
        there["format"] = FORMAT
    differences = [
        f"{key} is {json.dumps(there.get(key))} there and {json.dumps(here.get(key))} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    missing = missing_file(out, found)
    if differences or missing is not None:
        problem = ", ".join(differences) or f"{missing} is missing"
        fix = "choose another --out" + ("" if has_old_order(found) else ", or replace it by --overwrite")
        raise DataError(f"exists, but {problem}: {fix}", out)
    changed = changed_file(out, found)
    if changed is not None:
        raise DataError(f"exists, but {changed} {CHANGED}: choose another --out, or move the folder away", out)
    if has_old_order(found):
        raise DataError(
            "exists, made by an earlier version with another order of words: choose another --out. Models "
            "trained on it need these data, or new data in this order (python -m data_prep reorder --help). "
            "Without such models, use --overwrite",
            out,
        )


def check_replaceable(out: Path) -> None:
    """Raises DataError unless ``out`` holds only a prepared dataset, without files that the user added or changed."""
    found = read_manifest(out)
    foreign = next((name for name in files_in(out) if name not in found["files"]), None)
    if foreign is not None:
        raise DataError(f"--overwrite would delete {foreign}, which is not part of this dataset: move it away", out)
    changed = changed_file(out, found)
    if changed is not None:
        raise DataError(
            f"--overwrite would delete {changed}, which {CHANGED}: move it away, or delete the folder yourself", out
        )


def lock_file(path: Path, create: bool = True) -> FileIO | None:
    """Opens ``path`` for appending without a buffer, and locks it. The lock ends with the stream or the process.

    Returns None if another process holds the lock, or has moved or removed the file in the meantime; for a file that is
    there, also if it is another user's or its file system cannot be written to.
    Raises DataError if the file system has no locks.
    """
    try:
        stream = path.open("ab" if create else "r+b", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
def hidden_folder(out: Path, flag: str = "--out") -> Iterator[Path]:
    """The folder of ``workspace``, without removing its parents; ``flag`` names another place."""
    lock = None
    while lock is None:  # another run may discard this workspace before it is locked
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            room = Path(tempfile.mkdtemp(prefix=f".{out.name}{WORKSPACE}", dir=out.parent))
        except OSError as error:
            reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
            raise DataError(f"cannot be made ({reason}): choose another {flag}", out) from None
        try:
            lock = lock_file(room / "lock")
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
    with suppress(FileNotFoundError):  # another run may take the empty folder for a dead one
        room.rmdir()


def discard_dead(out: Path) -> None:
    """Removes workspaces for ``out`` whose process has ended."""
    ending = "?" * 8  # of mkdtemp: a longer one is of another folder, whose name begins like this workspace
    for name in glob.glob(f".{glob.escape(out.name)}{WORKSPACE}{ending}", root_dir=out.parent, include_hidden=True):
        room = out.parent / name
        lock = lock_file(room / "lock", create=False)
        if lock is not None:
            with lock:
                put_back(room, out)
                discard(room)
        else:
            # In use, or dead before it was locked: then it is empty, and rmdir removes only empty folders.
            with suppress(OSError):
                room.rmdir()


def publish(made: Path, out: Path, room: Path, *, replace: bool = False) -> bool:
    """Moves the folder ``made`` to ``out``, which may be an empty folder.

    With ``replace``, existing content of ``out`` moves into the workspace ``room`` first and is removed with it.

    Returns:
        False if another run has just put the same data there, and nothing was moved; else True.

    Raises:
        DataError: there is content that must not be replaced; ``out`` is unchanged.
    """
    for path in [made, *made.rglob("*")]:
        sync(path)
    replaced = room / REPLACED
    replace = replace and is_occupied(out)  # it may have gone while the new data were made
    if replace:
        # Again: files may have come while the new ones were made.
        check_replaceable(out)
    try:
        if replace:
            os.rename(out, replaced)
        os.rename(made, out)
        if replace:
            # Under another name, nothing puts it back if this run is killed before it is removed.
            os.rename(replaced, room / "old")
    except BaseException as error:
        put_back(room, out)
        if not isinstance(error, OSError):
            raise
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        if taken and is_same(made, out):
            return False
        advice = "is another run making it?" if taken else "choose another --out"
        raise DataError(f"cannot be moved there ({error.strerror}): {advice}", out) from None
    sync(out.parent)
    return True


def is_same(made: Path, out: Path) -> bool:
    """Whether ``out`` has the request and the files of ``made``."""
    try:
        return read_manifest(out) == read_manifest(made)
    except DataError:
        return False


def put_back(room: Path, out: Path) -> None:
    """Moves a replaced folder back where no other has taken its place."""
    if (room / REPLACED).exists() and not out.exists():
        os.rename(room / REPLACED, out)


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk, so that a crash leaves no name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""From a request to a folder: makes the data, has them written, describes them, and knows what is already done."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import os
import sys
import tomllib
from pathlib import Path

from data_prep.binarize import require_fairseq
from data_prep.common import DataError, Dataset, Json, Material
from data_prep.folder import discard_dead, publish, workspace
from data_prep.text import sha256

# Of dataset.json and of the folder around it; raised by a change that makes older folders unusable. Until 1, the words
# of a dictionary were sorted by their frequency in the folder.
FORMAT = 2
MANIFEST = "dataset.json"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of writing, which name no file


def prepare(dataset: Dataset, args: argparse.Namespace) -> None:
    """Makes ``args.out``, or says that it is made already. Prints a summary.

    Raises UsageError, DataError or OSError, and then leaves ``args.out`` as it was and nothing beside it.
    """
    request = {"dataset": dataset.name, **dataset.request(args), "raw_only": args.raw_only}
    out = Path(os.path.realpath(args.out))
    discard_dead(out)
    replace = is_occupied(out)
    if replace and args.overwrite:
        check_replaceable(out)
    elif replace:
        check_same(out, request)
        print(f"already prepared: {args.out}")
        return
    if not args.raw_only:
        require_fairseq()
    with workspace(out) as room:
        material = dataset.build(args, request)
        material.check()
        made = room / "made"
        try:
            description = write(made, material, request)
            publish(made, out, room, replace=replace)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DataError(
                    f"cannot be written ({error.strerror}): make room, or name another --out", out
                ) from None
            raise
    lines = [f"{dataset.title}: {material.rule}", *material.summary(description), f"written to {args.out}"]
    if not args.raw_only:
        commands = material.training_commands(dataset, args.out)
        lines += [start + command for start, command in zip(("next: ", *["  or: "] * len(commands)), commands)]
    say(lines)


def say(lines: list[str]) -> None:
    """Prints what was done. It is done even if nobody reads that any more."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # What is left in the stream would be an error again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_occupied(out: Path) -> bool:
    """Whether something is at ``out`` that must not be written over unasked. An empty folder is not."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def write(folder: Path, material: Material, request: Json) -> Json:
    """Makes ``folder`` with the data and ``dataset.json``, whose content it returns."""
    folder.mkdir(parents=True)
    material.write(folder, request["raw_only"])
    content = manifest(folder, material, request)
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def manifest(folder: Path, material: Material, request: Json) -> Json:
    """The content of ``dataset.json``: no date and no path of this machine, so that equal data have equal bytes."""
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
    """Every file below ``folder`` but ``dataset.json``, relative, in alphabetical order."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in files if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def version() -> str:
    """The version of fairseq_sg, from the checkout this file is in or else from the installed package."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return importlib.metadata.version("fairseq_sg")


def read_manifest(folder: Path) -> Json:
    """The ``dataset.json`` of a prepared folder. Raises DataError if it is not one."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hashes = found["files"].values()
        known = "format" in found and isinstance(found["request"], dict)
        known = known and bool(hashes) and all(isinstance(digest, str) for digest in hashes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known = False
    if not known:
        raise DataError(f"not a prepared dataset (no {MANIFEST} of ours), left as it is: name another folder", folder)
    return found


def damage(folder: Path, found: Json) -> str | None:
    """The first way in which the files of ``folder`` differ from its ``dataset.json``, or None."""
    for name, expected in found["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path) != expected:
            return f"{name} has changed since it was made"
    return None


def verify(folder: Path) -> int:
    """Checks a prepared folder against its ``dataset.json``; returns the number of files. Raises DataError."""
    found = read_manifest(folder)
    problem = damage(folder, found)
    if problem is not None:
        raise DataError(problem, folder)
    return len(found["files"])


def has_old_order(found: Json) -> bool:
    """Whether a folder with this ``dataset.json`` was made when dictionaries were sorted by frequency, and has such."""
    return found["format"] == 1 and "dict.src.txt" in found["files"]


def check_same(out: Path, request: Json) -> None:
    """Raises DataError unless ``out`` is, whole and unchanged, what ``request`` would make."""
    found = read_manifest(out)
    there, here = ({"format": m["format"], **m["request"]} for m in (found, {"format": FORMAT, "request": request}))
    if there["format"] == 1:  # is the same but for the order of words
        there["format"] = FORMAT
    differences = [
        f"{key} is {json.dumps(there.get(key))} there and {json.dumps(here.get(key))} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    problem = ", ".join(differences) or damage(out, found)
    if problem is not None:
        raise DataError(f"is there already, and {problem}: --overwrite replaces it, or name another --out", out)
    if has_old_order(found):
        raise DataError(
            "is there already, made by an earlier version, with its words in another order: name another --out. Models "
            "that were trained on it need it as it is, or new data in its order (python -m data_prep reorder --help); "
            "if there are none, --overwrite makes it again",
            out,
        )


def check_replaceable(out: Path) -> None:
    """Raises DataError unless ``out`` holds a prepared dataset and nothing of the user's besides."""
    found = read_manifest(out)
    foreign = next((name for name in files_in(out) if name not in found["files"]), None)
    if foreign is not None:
        raise DataError(f"--overwrite would delete {foreign}, which is not part of this dataset: move it away", out)

"""From a request to a folder: makes the corpus, writes, binarizes and describes it, and knows what is already done."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import tomllib
from collections import Counter
from pathlib import Path

from data_prep.binarize import LANGUAGES, binarize, require_fairseq
from data_prep.common import Corpus, DataError, Dataset, Json, Pair, check_corpus, count_words
from data_prep.folder import discard_dead, publish, workspace
from data_prep.text import sha256, write_lines

FORMAT = 1  # of dataset.json and of the folder around it; raised by a change that makes older folders unusable
MANIFEST = "dataset.json"


def prepare(dataset: Dataset, args: argparse.Namespace) -> None:
    """Makes `args.out`, or says that it is made already. Prints a summary.

    Raises UsageError, DataError or OSError, and then leaves `args.out` as it was and nothing beside it.
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
    corpus = dataset.build(args, request)
    check_corpus(corpus)
    with workspace(out) as room:
        made = room / "made"
        write(made, corpus, request)
        publish(made, out, room, replace=replace)
    print_summary(dataset, corpus, request, args.out)


def is_occupied(out: Path) -> bool:
    """Whether something is at `out` that must not be written over unasked. An empty folder is not."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def write(folder: Path, corpus: Corpus, request: Json) -> None:
    """Writes the raw text, the binaries unless only the text is asked for, and `dataset.json`."""
    (folder / "raw").mkdir(parents=True)
    for name, pairs in corpus.subsets.items():
        for language, side in zip(LANGUAGES, Pair._fields, strict=True):
            write_lines(folder / "raw" / f"{name}.{language}", (getattr(pair, side) for pair in pairs))
    for name, types in corpus.types.items():
        write_lines(folder / "raw" / f"{name}.type", types)
    if not request["raw_only"]:
        binarize(folder, corpus.subsets, joined=corpus.joined)
    text = json.dumps(manifest(folder, corpus, request), indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def manifest(folder: Path, corpus: Corpus, request: Json) -> Json:
    """The content of `dataset.json`: no date and no path of this machine, so that equal data have equal bytes."""
    return {
        "format": FORMAT,
        "fairseq_sg": version(),
        "request": request,
        "origin": corpus.origin,
        "rule": corpus.rule,
        "membership": corpus.membership,
        "subsets": {
            name: {"published_size": corpus.published.get(name), **measure(pairs), **count_types(corpus, name)}
            for name, pairs in corpus.subsets.items()
        },
        "vocabulary": count_words(corpus.subsets)._asdict() | ({"joined": True} if corpus.joined else {}),
        "files": {name: sha256(folder / name) for name in files_in(folder)},
    }


def measure(pairs: list[Pair]) -> Json:
    """The size of a subset and the greatest lengths in it, in words, the end symbol not counted."""
    return {
        "size": len(pairs),
        "longest_source": max(len(pair.source.split()) for pair in pairs),
        "longest_target": max(len(pair.target.split()) for pair in pairs),
    }


def count_types(corpus: Corpus, name: str) -> Json:
    """The entry `types` of a subset: type -> number of examples, in alphabetical order; none if it has no types."""
    return {"types": dict(sorted(Counter(corpus.types[name]).items()))} if name in corpus.types else {}


def files_in(folder: Path) -> list[str]:
    """Every file below `folder` but `dataset.json`, relative, in alphabetical order."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in files if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def version() -> str:
    """The version of fairseq_sg, from the checkout this file is in or else from the installed package."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return importlib.metadata.version("fairseq_sg")


def read_manifest(folder: Path) -> Json:
    """The `dataset.json` of a prepared folder. Raises DataError if it is not one."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hashes = found["files"].values()
        known = "format" in found and isinstance(found["request"], dict) and all(isinstance(h, str) for h in hashes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known = False
    if not known:
        raise DataError(f"not a prepared dataset (no {MANIFEST} of ours), left as it is: name another folder", folder)
    return found


def damage(folder: Path, found: Json) -> str | None:
    """The first way in which the files of `folder` differ from its `dataset.json`, or None."""
    for name, expected in found["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256(path) != expected:
            return f"{name} has changed since it was made"
    return None


def verify(folder: Path) -> int:
    """Checks a prepared folder against its `dataset.json`; returns the number of files. Raises DataError."""
    found = read_manifest(folder)
    problem = damage(folder, found)
    if problem is not None:
        raise DataError(problem, folder)
    return len(found["files"])


def check_same(out: Path, request: Json) -> None:
    """Raises DataError unless `out` is, whole and unchanged, what `request` would make."""
    found = read_manifest(out)
    there, here = ({"format": m["format"], **m["request"]} for m in (found, {"format": FORMAT, "request": request}))
    differences = [
        f"{key} is {json.dumps(there.get(key))} there and {json.dumps(here.get(key))} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    problem = ", ".join(differences) or damage(out, found)
    if problem is not None:
        raise DataError(f"is there already, and {problem}: --overwrite makes it anew, or name another --out", out)


def check_replaceable(out: Path) -> None:
    """Raises DataError unless `out` holds a prepared dataset and nothing of the user's besides."""
    found = read_manifest(out)
    foreign = next((name for name in files_in(out) if name not in found["files"]), None)
    if foreign is not None:
        raise DataError(f"--overwrite would delete {foreign}, which is not part of this dataset: move it away", out)


def print_summary(dataset: Dataset, corpus: Corpus, request: Json, out: Path) -> None:
    """Tells what was made, from what, and how to go on."""
    print(f"{dataset.title}: {corpus.rule}")
    print(f"examples: {corpus.membership}")
    print(f"{'subset':10}{'size':>10}{'published':>12}{'longest source':>17}{'longest target':>17}")
    for name, pairs in corpus.subsets.items():
        size, source, target = measure(pairs).values()
        published = corpus.published.get(name)
        print(f"{name:10}{size:>10,}{'-' if published is None else format(published, ','):>12}{source:>17}{target:>17}")
    words = count_words(corpus.subsets)
    together = f", {words.together} together, in one dictionary" if corpus.joined else ""
    print(f"vocabulary: {words.source} source and {words.target} target words{together}")
    print(f"written to {out}")
    if not request["raw_only"]:
        print(f"next: {training_command(dataset, corpus, out)}")


def training_command(dataset: Dataset, corpus: Corpus, out: Path) -> str:
    """A `fairseq-train` command for the folder. The first subset named for validation picks the best checkpoint."""
    validation = ",".join(sorted((name for name in corpus.subsets if name != "train"), key=lambda n: n != "valid"))
    return (
        f"fairseq-train {shlex.quote(str(out))} --user-dir fairseq_sg --task sg_translation --arch {dataset.arch}"
        f" --criterion cross_entropy_orthogonality --valid-subset {validation}"
        " --optimizer adam --lr 0.001 --batch-size 64 --max-update 10000"
    )

"""Files of prepared folders, and texts in the form of published files: the inverses of what ``data_prep`` does."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from data_prep.dataset import Pair
from data_prep.mathematics import SPACE


def scan_line(pair: Pair) -> str:
    """The line of an official file of SCAN."""
    return f"IN: {pair.source} OUT: {pair.target}"


def detokenize(tokens: str) -> str:
    """The plain text of the Mathematics dataset that ``tokenize`` split into characters."""
    return tokens.replace(" ", "").replace(SPACE, " ")


def contents(folder: Path) -> dict[str, bytes]:
    """Path in a folder -> the bytes of the file."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def manifest(folder: Path) -> dict:
    """``dataset.json``."""
    return json.loads((folder / "dataset.json").read_text("utf-8"))


def lines_of(folder: Path, name: str) -> list[str]:
    """The lines of ``raw/NAME``."""
    return (folder / "raw" / name).read_text("utf-8").removesuffix("\n").split("\n")


def digest(folder: Path) -> str:
    """A hash of the raw text of all subsets, in alphabetical order."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted((folder / "raw").iterdir()))).hexdigest()


def with_reversed_words(data: Path, folder: Path, language: str) -> Path:
    """A copy of a prepared folder with the words of one dictionary in reverse order."""
    shutil.copytree(data, folder)
    dictionary = folder / f"dict.{language}.txt"
    dictionary.write_text("".join(reversed(dictionary.read_text().splitlines(keepends=True))))
    changed = manifest(folder)
    changed["files"][dictionary.name] = hashlib.sha256(dictionary.read_bytes()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(changed))
    return folder

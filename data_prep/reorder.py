"""Writes the data of a prepared folder with the dictionaries of another one.

A model knows words by their numbers, so it reads only data with the order of words of its training data. Folders of one
language have the same order, but earlier versions sorted words by their frequency in the folder.

    python -m data_prep reorder data-bin/scan_mcd1 --like data-bin/scan26_old --out data-bin/scan_mcd1_old_order

writes SCAN's mcd1 for models trained on data-bin/scan26_old. Without ``--like``, the order is that of a new
preparation. The text is that of raw/SUBSET.{src,tgt}. Both folders stay unchanged. A word that the dictionaries of
``--like`` lack is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data_prep.binarize import LANGUAGES, binarize, binarize_like, link_labels, require_fairseq
from data_prep.dataset import DataError, Dataset, Json, Material, Options, Sources, UsageError, option
from data_prep.folder import MANIFEST, files_in, read_manifest, real_path, verify

DICTIONARIES = tuple(f"dict.{language}.txt" for language in LANGUAGES)
LIKE = "reordered_like"  # the entry of the request
#: What dataset.json must have beside that, with its type.
NEEDED = {"subsets": dict, "vocabulary": dict, "rule": str, "membership": str, "origin": dict}


@dataclass(frozen=True)
class ReorderSources(Sources):
    """The prepared folder with the data, and the one with the order of words."""

    folder: Path = option(flag="FOLDER", help="the prepared folder with the data", type=Path)
    like: Path | None = option(None, "the prepared folder with the order of words", type=Path, metavar="OTHER")


@dataclass(frozen=True)
class ReorderOptions(Options):
    """The request of the folder with the data."""

    def request(self, sources: ReorderSources) -> Json:
        """The request of the folder, with the folder that gives the order. Raises DataError for another kind."""
        request = {name: value for name, value in read_pairs(sources.folder)["request"].items() if name != LIKE}
        if sources.like is not None:
            other = read_manifest(sources.like)
            if not set(DICTIONARIES) <= set(other["files"]):
                message = f"has no {DICTIONARIES[0]}: --like takes a folder of sentence pairs, made without --raw-only"
                raise DataError(message, sources.like)
            request[LIKE] = {"request": other["request"], **{name: other["files"][name] for name in DICTIONARIES}}
        return request


class Reorder(Dataset):
    """``python -m data_prep reorder``: a dataset made from a prepared one."""

    name, title = "reorder", "reordered"
    binarizes = False  # without its own ``require_fairseq`` and --raw-only: the text is there already
    options = ReorderOptions
    sources = ReorderSources

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self.datasets = datasets

    def read(self, args: argparse.Namespace) -> tuple[Options, Sources]:
        out = real_path(args.out)
        for name, folder in (("FOLDER", args.folder), ("--like", args.like)):
            if folder is None:
                continue
            if os.path.realpath(folder) == str(out):
                raise UsageError(f"--out and {name} are the same folder, which must not change: choose another --out")
            if Path(os.path.realpath(folder)) in out.parents:
                raise UsageError(f"--out is inside {name}, which must not change: choose another --out")
        return super().read(args)

    def build(self, options: ReorderOptions, sources: ReorderSources) -> Reordered:
        require_fairseq()
        request = options.request(sources)
        verify(sources.folder)
        if sources.like is not None:
            verify(sources.like)
        dataset = self.datasets.get(request["dataset"])
        return Reordered(sources.folder, sources.like, dataset.words if dataset else ())


class Reordered(Material):
    """The data of ``folder`` in the order of the folder ``like``, or of a new preparation;
    ``words`` as in ``Corpus``.
    """

    def __init__(self, folder: Path, like: Path | None, words: tuple[str, ...]) -> None:
        self.folder, self.like, self.words, self.found = folder, like, words, read_pairs(folder)
        self.rule, self.membership, self.origin = (self.found[name] for name in ("rule", "membership", "origin"))

    def check(self) -> None:
        """Does nothing: the data were checked at their preparation."""

    def write(self, folder: Path, raw_only: bool) -> None:
        """Copies all files except dictionaries and binaries, which are rebuilt. Raises
        DataError for an unknown word.
        """
        for name in files_in(self.folder):
            made_again = name.endswith((".bin", ".idx")) or PurePosixPath(name).name in ("dict.txt", *DICTIONARIES)
            if name in self.found["files"] and not made_again:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / name, folder / name)
        subsets = self.found["subsets"]
        if self.like is None:
            binarize(folder, subsets, joined="joined" in self.found["vocabulary"], words=self.words)
        else:
            try:
                binarize_like(folder, subsets, self.like)
            except DataError as error:
                text = self.folder / "raw" / str(error.path)
                message = f"{error.message} of {self.like}: its models cannot read it"
                raise DataError(message, text, error.line) from None
        if "labels" in self.found:
            link_labels(folder, subsets)

    def describe(self) -> Json:
        kept = ("subsets", "vocabulary", "groups", "labels", "no_label", "bits")
        return {name: self.found[name] for name in kept if name in self.found}

    def summary(self, description: Json) -> list[str]:
        return [f"words in the order of {self.like or 'a new preparation'}"]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        return []


def read_pairs(folder: Path) -> Json:
    """Reads the ``dataset.json`` of a folder of sentence pairs. Raises DataError for another folder, and where an entry
    is missing.
    """
    found = read_manifest(folder)
    absent = [name for name, kind in NEEDED.items() if not isinstance(found.get(name), kind)]
    if not isinstance(found["request"].get("dataset"), str):
        absent.append("request.dataset")
    subsets = () if "subsets" in absent else found["subsets"]
    texts = [f"raw/{subset}.{language}" for subset in subsets for language in LANGUAGES]
    missing = next((text for text in texts if text not in found["files"]), None)
    if missing is not None:
        message = f"has no {missing}: reorder takes folders of sentence pairs"
        raise DataError(message, folder)
    if absent:
        message = f"has no {absent[0]}: was it changed? Prepare the data again, in a new folder"
        raise DataError(message, folder / MANIFEST)
    return found

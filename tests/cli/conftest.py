"""The dataset and the trained models that the tests of whole commands share, made once for all processes of pytest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("fairseq")

from numpy.random import RandomState

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write
from data_prep.scan.grammar import generate
from helpers.commands import KINDS, SHORT, succeed, training
from helpers.labelled_data import write_labelled
from helpers.once import once


@pytest.fixture(scope="session")
def data(common_folder) -> Path:
    """Short SCAN commands in the form of ``data_prep``; ``gen`` has longer ones than ``train`` and ``valid``.

    The sizes of ``valid`` and ``gen`` are no multiples of 8, the last of which fairseq would leave out.
    """
    return once(common_folder / "data", write_short_scan)


@pytest.fixture(scope="session")
def labelled(common_folder) -> Path:
    return once(common_folder / "labelled", lambda folder: write_labelled(folder) and None)


def write_short_scan(folder: Path) -> None:
    pairs = generate()
    shuffled = [pairs[index] for index in RandomState(0).permutation(len(pairs))]
    short = [pair for pair in shuffled if actions(pair) <= 4]
    longer = [pair for pair in shuffled if actions(pair) == 5]
    subsets = {"train": short[:1000], "valid": short[1000:1101], "gen": longer[:45]}
    corpus = Corpus(
        subsets={name: Subset(pairs) for name, pairs in subsets.items()},
        rule="a part of the short commands",
        membership="drawn for the tests",
        origin={"generator": "data_prep.scan_grammar"},
        vocabulary=(13, 6),
    )
    write(folder, corpus, {"dataset": "scan", "raw_only": False})


def actions(pair: Pair) -> int:
    return len(pair.target.split())


@pytest.fixture(scope="session")
def checkpoint(common_folder, data) -> Path:
    """That of a model after one update."""
    folder = once(
        common_folder / "one_update", lambda folder: succeed("fairseq-train", *training(data, folder, *SHORT)) and None
    )
    return folder / "checkpoint_last.pt"


class Trained(NamedTuple):
    """A trained model: its checkpoint, and what the first and the resumed training printed."""

    checkpoint: Path
    first: str
    resumed: str


@pytest.fixture(scope="session")
def trained(common_folder, data) -> Callable[[str], Trained]:
    """Trains a kind of model for three epochs, then resumes until it gets a good part of the sentences right."""

    def train(kind: str) -> Trained:
        def make(folder: Path) -> None:
            arguments, epochs = KINDS[kind]
            for name, stop in (("first", 3), ("resumed", epochs)):
                printed = succeed("fairseq-train", *training(data, folder, *arguments, "--max-epoch", stop))
                (folder / f"{name}.log").write_text(printed)

        folder = once(common_folder / kind, make)
        first, resumed = ((folder / f"{name}.log").read_text() for name in ("first", "resumed"))
        return Trained(folder / "checkpoint_last.pt", first, resumed)

    return train

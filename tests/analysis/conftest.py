"""The folders and checkpoints of the analysis tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("fairseq")

from fairseq_sg.analysis import Loaded, load
from helpers.analysis_models import CLASSIFIERS, checkpoint, ctlpp_folder, pairs_folder, text_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """``pairs``, ``ctlpp`` and ``text``."""
    room = tmp_path_factory.mktemp("data")
    folders = {"pairs": pairs_folder, "ctlpp": ctlpp_folder, "text": text_folder}
    return {name: make(room / name) for name, make in folders.items()}


@pytest.fixture(scope="session")
def saved(folders, tmp_path_factory) -> Callable[..., str]:
    """The checkpoint of a model of ``analysis_models``, by default on the folder that fits it."""
    room, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(model: str, data: str | None = None) -> str:
        data = data or ("ctlpp" if model in CLASSIFIERS else "text" if model == "lm" else "pairs")
        if (model, data) not in made:
            made[model, data] = str(checkpoint(room / f"{model}-{data}.pt", folders[data], model))
        return made[model, data]

    return get


@pytest.fixture
def loaded(saved) -> Callable[..., Loaded]:
    return lambda *which: load(saved(*which))

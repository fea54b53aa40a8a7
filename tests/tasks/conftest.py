"""The data folder that most tests of the task share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.small_folders import random_pairs, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """100 samples of training, 100 of validation and 13 of generalization."""
    pytest.importorskip("fairseq")
    subsets = {"train": random_pairs(100, 1), "valid": random_pairs(100, 2), "gen": random_pairs(13, 3)}
    return write_folder(tmp_path_factory.mktemp("data") / "bin", subsets)

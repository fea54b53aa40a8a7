"""What all tests share: one thread, a fixed seed, and where real data lies if it is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers")
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _deterministic():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the repository; a clone of a user's own has none, and its tests skip."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no real data at {path}")
    return path


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory) -> Path:
    """A folder of this session, the same one in all of its processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "common"
    folder.mkdir(exist_ok=True)
    return folder

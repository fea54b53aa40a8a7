"""Processes of all tests here are forked from the one that commands are forked from."""

from __future__ import annotations

import pytest

from helpers import forked


@pytest.fixture(scope="session", autouse=True)
def processes_have_imported_torch() -> None:
    """A process that `isolated` starts first would preload nothing: each later one would import torch by itself."""
    forked.ensure_running()

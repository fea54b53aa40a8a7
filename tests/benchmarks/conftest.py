"""What the tests of all benchmarks share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def threads():
    """Restores the number of threads, which the benchmarks set for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

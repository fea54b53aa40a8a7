"""Every test of an operator runs on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def operators_choose_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """TensorFloat-32 products have 10 bits of mantissa, which no float32 tolerance survives."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before

"""Helpers of the tests of Triton kernels. They run on a GPU, or on the CPU under Triton's interpreter.

These files are not collected by themselves, since the interpreter has to be chosen before Triton is first imported:
``test_triton_kernels.py`` runs them in a process of their own. To debug one:

    TRITON_INTERPRET=1 python -m pytest tests/ops/triton_geometric.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from helpers.comparison import Results, with_gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"

if INTERPRETED:
    import fairseq_sg.kernels.interpreter  # noqa: F401  (tensor cores)


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Memory that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def compare(run: Callable[..., Callable], inputs: Mapping[str, Tensor], fast: str, **options) -> Results:
    """The kernels' results with gradients, once they are known to be as exact as those in torch.

    Largest errors against float64 are at most 3 times those of `fast` and of naive (whichever is larger), plus some
    float32 roundings of the largest number, and of 1 (gradients may be the small difference of large terms).
    """
    actual, torch_fast, naive = (with_gradients(run(name, **options), inputs) for name in ("triton", fast, "naive"))
    exact = with_gradients(run("naive", **options), {name: x.double() for name, x in inputs.items()})
    assert actual.keys() == exact.keys()
    for name, truth in exact.items():
        assert actual[name].dtype == naive[name].dtype, name
        assert actual[name].shape == truth.shape, name
        error, *allowed = (float(error_of(out[name], truth)) for out in (actual, torch_fast, naive))
        # Triton's interpreter cuts float32 off to bfloat16 instead of rounding it.
        times = 6 if INTERPRETED and actual[name].dtype == torch.bfloat16 else 3
        slack = 8 * torch.finfo(torch.float32).eps * (1 + float(largest(truth)))
        assert error <= times * max(allowed) + slack, f"{name}: error {error:.3g}, torch {allowed}, slack {slack:.3g}"
    return actual


def error_of(out: Tensor, truth: Tensor) -> Tensor:
    return largest(out.double() - truth)


def largest(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())


def count_launches(monkeypatch: pytest.MonkeyPatch, module) -> list[str]:
    """The kernels that a module of kernels launches from now on, by name."""
    launched: list[str] = []
    launch = module.launch

    def counted(kernel, *arguments, **options) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(module, "launch", counted)
    return launched

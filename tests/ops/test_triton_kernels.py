"""Kernels in Triton: their own tests, in a process of their own, and when they are chosen."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_sg.ops import (
    cvmm,
    geometric_attention,
    linear_attention,
    relative_attention,
    triton_support,
)
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from helpers.commands import run

HERE = Path(__file__).resolve().parent
HAS_TRITON = importlib.util.find_spec("triton") is not None


def operators(x, **options):
    return {
        "linear_attention": lambda: linear_attention(x, x, x, causal=True, **options),
        "geometric_attention": lambda: geometric_attention(x, **options),
        "cvmm": lambda: cvmm(x.flatten(0, 2), torch.arange(len(x.flatten(0, 2))) % 6, x.flatten(0, 1), **options),
        "relative_attention": lambda: relative_attention(x, x, x, x, torch.cat([x, x], 2)[0, :, 1:], **options),
    }


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: bash scripts/setup.sh --with-triton")
def test_kernels():
    """On a GPU, or under the interpreter, which has to be chosen before the first import of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    files = sorted(HERE.glob("triton_*.py"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert len(files) == 4 and " passed" in done.stdout and "skipped" not in done.stdout


def test_automatic_choice_on_a_cpu_is_torch(monkeypatch):
    """Also under the interpreter: it is for tests."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "launch", None)
    x = torch.rand(2, 3, 5, 5)
    for name, fast in (
        ("linear_attention", "chunked"),
        ("geometric_attention", "scan"),
        ("cvmm", "grouped"),
        ("relative_attention", "shift"),
    ):
        assert torch.equal(operators(x)[name](), operators(x, implementation=fast)[name]())


@pytest.mark.parametrize("name", operators(None))
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_refused_where_it_cannot_run(name, how, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.rand(2, 3, 5, 5)
    message = f"{name} cannot run its implementation 'triton' here: the tensors are on the CPU"
    if how == "environment":
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(ValueError, match=message):
        operators(x, **({"implementation": "triton"} if how == "argument" else {}))[name]()


def test_reasons(monkeypatch):
    """Dtype, then devices, then the device itself, then what is installed."""
    single, double, meta = torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")
    assert "not float64" in triton_support.why_not_triton(single, double)
    assert "several devices: cpu, meta" in triton_support.why_not_triton(single, meta)
    monkeypatch.setattr(triton_support, "why_not_installed", lambda: pytest.fail("nothing runs there"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert triton_support.why_not_triton(single) == "the tensors are on the CPU"
    assert "not for meta" in triton_support.why_not_triton(meta)
    monkeypatch.setattr(triton_support, "why_not_installed", lambda: None)
    for yes in ("1", "true", "ON"):  # as Triton reads it
        monkeypatch.setenv("TRITON_INTERPRET", yes)
        assert triton_support.why_not_triton(single) is None
    monkeypatch.setattr(triton_support, "why_not_installed", lambda: "Triton 3.1.0 is older than 3.3")
    assert triton_support.why_not_triton(single) == "Triton 3.1.0 is older than 3.3"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("raise ImportError('no libcuda')", "Triton cannot be imported: no libcuda"),
        ("", "Triton cannot be imported: module 'triton' has no attribute '__version__'"),
        ("__version__ = '3.2rc1'", "Triton 3.2rc1 is older than 3.3"),
        ("__version__ = '3.10'", None),
    ],
    ids=["broken", "another module", "old", "new"],
)
def test_installations(file, reason, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text(file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    found = triton_support.why_not_installed.__wrapped__()
    sys.modules.pop("triton", None)
    assert found == reason


def test_a_grid_beyond_what_a_gpu_takes():
    with pytest.raises(ValueError, match="cut them into 65,536 tiles of at most 65,535: choose another implementation"):
        triton_support.launch(None, (70_000, 65_536), torch.ones(1))


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((9, 0), None, None),
        ((8, 0), None, None),
        ((7, 5), None, "compute capability 7.5 is below 8.0"),
        ((9, 0), "6.2", "kernels are for Nvidia GPUs, not for ROCm"),
    ],
    ids=["Hopper", "Ampere", "Turing", "ROCm"],
)
def test_which_gpus(capability, hip, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert triton_support._why_not_on.__wrapped__(torch.device("cuda", 0), False) == reason


@pytest.mark.parametrize(("size", "expected"), [(0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (65, 64), (300, 64)])
def test_power_of_two(size, expected):
    assert triton_support.power_of_two(size, 16, 64) == expected


def test_operators_work_where_importing_triton_fails():
    code = "import sys; sys.modules['triton'] = None; import torch, fairseq_sg.ops as ops; x = torch.rand(1, 2, 4, 4); "
    code += "ops.linear_attention(x, x, x); ops.orthogonality_loss(x); ops.geometric_attention(x); "
    code += "ops.cvmm(x[0, 0], torch.zeros(4, dtype=torch.long), x[0]); "
    code += "ops.relative_attention(x, x, x, x, torch.rand(2, 7, 4)); print('done')"
    done = run("-c", code)
    assert done.code == 0 and done.out.strip() == "done", done.err

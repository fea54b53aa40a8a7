"""``fairseq-sg kernels list``: what it says is what operators do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fairseq_sg.kernels import listing
from fairseq_sg.kernels.__main__ import main
from fairseq_sg.ops import (
    cvmm,
    geometric_attention,
    linear_attention,
    orthogonality_loss,
    relative_attention,
    relative_logits,
    spectral_multiply,
    triton_support,
)
from fairseq_sg.ops.cvmm import sort_selection
from fairseq_sg.ops.dispatch import DEFAULTS, ENVIRONMENT_VARIABLE, OPERATORS


class Chosen(Exception):
    """Raised by an implementation in place of running."""


def calls(batch: int, rows: int) -> dict[str, object]:
    x, p = torch.rand(batch, 1, 3, 2), torch.rand(1, 5, 2)
    one_matrix = torch.zeros(rows, dtype=torch.long)
    return {
        "cvmm": lambda: cvmm(torch.rand(rows, 2), one_matrix, torch.rand(1, 2, 2)),
        "geometric_attention": lambda: geometric_attention(torch.rand(batch, 1, 3, 3)),
        "linear_attention": lambda: linear_attention(x, x, x, causal=True),
        "orthogonality_loss": lambda: orthogonality_loss(x),
        "relative_attention": lambda: relative_attention(x, x, x, x, p),
        "relative_logits": lambda: relative_logits(x, p),
        "spectral_multiply": lambda: spectral_multiply(torch.rand(batch, 1, 8), torch.rand(1, 1, 2, 2)),
    }


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_defaults_on_a_cpu_are_what_operators_run(operator, monkeypatch):
    """Few and many sequences and rows reach every default that is listed, and no other implementation."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)

    def raises(name):
        def implementation(*arguments, **options):
            raise Chosen(name)

        return implementation

    for name in OPERATORS[operator]:
        monkeypatch.setitem(OPERATORS[operator], name, raises(name))
    chosen = set()
    for batch, rows in ((1, 4), (64, 512)):
        with pytest.raises(Chosen) as found:
            calls(batch, rows)[operator]()
        chosen.add(str(found.value))
    assert chosen == {name for device, name in DEFAULTS[operator] if device == "cpu"}


def test_defaults_on_a_gpu_do_not_depend_on_sizes():
    """The functions that choose by size take what stands for tensors on a GPU."""
    from fairseq_sg.ops import relative
    from fairseq_sg.ops.cvmm import _automatic

    for many in (1, 1000):
        q = SimpleNamespace(shape=(many, 1, 3, 2), dtype=torch.float32, device=torch.device("cuda"))
        assert ("cuda", relative._in_torch(q)) in DEFAULTS["relative_logits"]
        x = SimpleNamespace(device=torch.device("cuda"), is_cuda=True)
        routing = sort_selection(torch.zeros(many, dtype=torch.long), 1)
        assert ("cuda", _automatic(x, [None], routing, None)) in DEFAULTS["cvmm"]


def test_every_implementation_has_its_line(capsys, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["list"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    for operator, implementations in OPERATORS.items():
        for name in implementations:
            (line,) = [line for line in words if line[:2] == [operator, name]]
            assert ("no:" in line) == (name == "triton") or torch.cuda.is_available()


@pytest.mark.parametrize("automatic", [True, False])
def test_kernels_on_a_gpu(automatic, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(triton_support, "AUTOMATIC", automatic)
    monkeypatch.setattr(listing, "why_not", lambda implementation, device: None)
    assert listing.state("geometric_attention", "triton", "cuda") == ("default" if automatic else "by name")
    other = "default for calls that the kernel does not take" if automatic else "default"
    assert listing.state("geometric_attention", "scan", "cuda") == other
    assert listing.state("orthogonality_loss", "gram", "cuda") == "default"
    assert listing.state("geometric_attention", "naive", "cuda") == "by name"
    assert listing.state("geometric_attention", "scan", "cpu") == "default"


def test_reasons(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert listing.state("cvmm", "triton", "cpu") == "no: Triton's kernels are for GPUs"
    monkeypatch.setattr(triton_support, "why_not_installed", lambda: "Triton is not installed")
    assert listing.state("cvmm", "triton", "cuda") == "no: Triton is not installed"
    monkeypatch.setattr(triton_support, "why_not_installed", lambda: None)
    assert listing.state("cvmm", "triton", "cuda") == "no: there is no GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert listing.state("cvmm", "triton", "cpu") == "by name: Triton's interpreter"


def test_the_environment_chooses(monkeypatch, capsys):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
    assert listing.state("cvmm", "naive", "cpu") == "default" and listing.state("cvmm", "grouped", "cpu") == "by name"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "flex")
    assert listing.state("relative_attention", "flex", "cpu") == "default"
    assert listing.state("cvmm", "grouped", "cpu") == "default"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nave")
    assert main(["list"]) == 1 and "no operator has an implementation 'nave'" in capsys.readouterr().err

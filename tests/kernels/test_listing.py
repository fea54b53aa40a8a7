"""``fairseq-sg kernels list``: what it says is what operators do."""

from __future__ import annotations

import pytest
import torch

from fairseq_sg.kernels import listing
from fairseq_sg.kernels.__main__ import main
from fairseq_sg.ops import (
    cvmm,
    geometric_attention,
    linear_attention,
    memory,
    orthogonality_loss,
    relative_attention,
    relative_logits,
    spectral_multiply,
    triton_support,
)
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE, OPERATORS
from fairseq_sg.ops.tuning import Point, Tuning


class Chosen(Exception):
    """Raised by an implementation instead of running."""


def calls_of_memory(batch: int) -> dict[str, object]:
    cells, u, r = torch.rand(batch, 3, 3), torch.rand(batch, 3), torch.rand(batch, 1, 3)
    return {
        "allocation": lambda: memory.allocation(u),
        "content_weights": lambda: memory.content_weights(cells, r, u[:, :1]),
        "follow": lambda: memory.follow(cells, r),
        "links": lambda: memory.links(cells, u, u),
        "read": lambda: memory.read(cells, r),
        "retention": lambda: memory.retention(r, u[:, :1]),
        "usage": lambda: memory.usage(u, u, u),
        "write": lambda: memory.write(cells, u, u, u),
    }


def calls(batch: int, rows: int) -> dict[str, object]:
    x, p = torch.rand(batch, 1, 3, 2), torch.rand(1, 5, 2)
    one_matrix = torch.zeros(rows, dtype=torch.long)
    return {
        "cvmm": lambda: cvmm(torch.rand(rows, 2), one_matrix, torch.rand(1, 2, 2)),
        "geometric_attention": lambda: geometric_attention(torch.rand(batch, 1, 3, 3)),
        "linear_attention": lambda: linear_attention(x, x, x, causal=True),
        **{f"memory_{name}": call for name, call in calls_of_memory(batch).items()},
        "orthogonality_loss": lambda: orthogonality_loss(x),
        "relative_attention": lambda: relative_attention(x, x, x, x, p),
        "relative_logits": lambda: relative_logits(x, p),
        "spectral_multiply": lambda: spectral_multiply(torch.rand(batch, 1, 8), torch.rand(1, 1, 2, 2)),
    }


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_defaults_on_a_cpu_are_what_operators_run(operator, monkeypatch):
    """Few and many sequences and rows reach every default that is listed, and no other implementation."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    known = OPERATORS[operator].implementations

    def raises(name):
        def implementation(*arguments, **options):
            raise Chosen(name)

        return implementation

    for name in known:
        monkeypatch.setitem(known, name, raises(name))
    chosen = set()
    for batch, rows in ((1, 4), (64, 512)):
        with pytest.raises(Chosen) as found:
            calls(batch, rows)[operator]()
        chosen.add(str(found.value))
    assert chosen == {name for name in known if listing.default(operator, name, "cpu") is not None}


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_rules_on_a_gpu_do_not_depend_on_sizes(operator):
    known = OPERATORS[operator]
    for many in (1, 1 << 20):
        assert known.rule("cuda", torch.float32, (many,) * len(known.sizes)) == known.default


def test_every_implementation_has_its_line(capsys, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    words = [line.split() for line in printed.splitlines()]
    for operator, known in OPERATORS.items():
        for name in known.implementations:
            (line,) = [line for line in words if line[:2] == [operator, name]]
            assert ("no:" in line) == (name == "triton") or torch.cuda.is_available()
    assert (
        "CPU: not tuned, so the operators' own rules decide (python -m fairseq_sg.kernels tune --device cpu)" in printed
    )


def test_what_was_verified_and_measured(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    ms = {"grouped": [2.0, 2.0, 2.0], "blocks": [1.0, 1.0, 1.0]}
    points = [
        Point("cvmm", "float32", (64, 4096, 64), ms),
        Point("cvmm", "float32", (2, 4096, 64), ms | {"blocks": [3] * 3}),
    ]
    verdicts = {"cvmm": {"grouped": "", "blocks": ""}, "geometric_attention": {"scan": "it crashed: SIGSEGV"}}
    tuning = Tuning({"device": "a CPU", "driver": ""}, verdicts, points)
    monkeypatch.setattr(listing, "tuning_of", lambda device: tuning if device == "cpu" else None)
    assert listing.state("cvmm", "grouped", "cpu") == "default"
    assert listing.state("cvmm", "blocks", "cpu") == "default near 1 of 2 sizes measured, if rows_per_matrix >= 256"
    assert listing.state("geometric_attention", "scan", "cpu") == "never: it fails here"
    assert (
        "CPU: 2 implementations verified, 2 sizes measured; never run, as they fail here: geometric_attention scan"
        in (listing.tuned("cpu"))
    )
    tuning.points[:] = [Point("cvmm", "float32", (1024, 4096, 64), ms | {"grouped": [0.5] * 3})]
    assert listing.state("cvmm", "grouped", "cpu") == "default also near 1 of 1 sizes measured"


def test_what_runs_in_the_place_of_what_fails(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    verdicts = {"cvmm": {"grouped": "it crashed: SIGSEGV"}, "orthogonality_loss": {"gram": "value is off"}}
    tuning = Tuning({"device": "a CPU", "driver": ""}, verdicts)
    monkeypatch.setattr(listing, "tuning_of", lambda device: tuning)
    states = {(o, name): listing.state(o, name, "cpu") for o in verdicts for name in OPERATORS[o].implementations}
    assert states["cvmm", "blocks"] == states["orthogonality_loss", "naive"] == "default"
    assert states["cvmm", "grouped"] == states["orthogonality_loss", "gram"] == "never: it fails here"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "gram")
    assert listing.state("orthogonality_loss", "gram", "cpu") == "default"
    assert listing.state("orthogonality_loss", "naive", "cpu") == "by name"


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
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "blocks")
    assert listing.state("cvmm", "blocks", "cpu") == "default" and listing.state("cvmm", "grouped", "cpu") == "by name"
    assert listing.state("geometric_attention", "scan", "cpu") == "default"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nave")
    assert main(["list"]) == 1 and "no operator has an implementation 'nave'" in capsys.readouterr().err

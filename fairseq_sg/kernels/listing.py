"""Which implementation of every operator can run on this machine, and which one runs by default."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

import fairseq_sg.ops  # noqa: F401  (declares the operators)
from fairseq_sg.ops import triton_support
from fairseq_sg.ops.dispatch import DEFAULTS, ENVIRONMENT_VARIABLE, OPERATORS, requested

DEVICES = ("cpu", "cuda")
HEADER = ("operator", "implementation", "CPU", "GPU")


def why_not(implementation: str, device: str) -> str | None:
    """Why an implementation cannot run on a device of this machine, "cpu" or "cuda"; None where it can.

    Where there is no GPU, None for "cuda" means that nothing else is missing.
    """
    if implementation != "triton":
        return None
    if device == "cpu":
        if triton_support.why_not_here(torch.device("cpu")) is None:
            return None
        return "Triton's kernels are for GPUs"
    if torch.cuda.is_available():
        return triton_support.why_not_here(torch.device("cuda", torch.cuda.current_device()))
    return triton_support.why_not_installed() or "there is no GPU"


def default(operator: str, implementation: str, device: str) -> str | None:
    """When ``implementation="auto"`` runs this one on a device: "" where nothing is said, None for never."""
    name = requested(operator)
    if name is not None:
        return "" if name == implementation else None
    when = DEFAULTS[operator].get((device, implementation))
    if device == "cuda" and triton_support.AUTOMATIC and why_not("triton", device) is None:
        if implementation == "triton":
            return ""
        if "triton" in OPERATORS[operator] and when is not None:
            return "for calls that the kernel does not take"
    return when


def state(operator: str, implementation: str, device: str) -> str:
    """One cell of the table."""
    reason = why_not(implementation, device)
    if reason is not None:
        return f"no: {reason}"
    when = default(operator, implementation, device)
    if when is not None:
        return f"default {when}".rstrip()
    return "by name: Triton's interpreter" if (implementation, device) == ("triton", "cpu") else "by name"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Operator, implementation, and its state on a CPU and on a GPU."""
    for operator, implementations in sorted(OPERATORS.items()):
        for implementation in implementations:
            yield operator, implementation, *(state(operator, implementation, device) for device in DEVICES)


def table() -> list[str]:
    """The lines that ``fairseq-sg kernels list`` prints."""
    cells = [HEADER, *rows()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none here"
    lines += ["", f"GPU: {gpu}. torch {torch.__version__}."]
    lines.append('default: what implementation="auto" runs. by name: runs if a call or the environment asks for it.')
    if os.environ.get(ENVIRONMENT_VARIABLE):
        lines.append(f"{ENVIRONMENT_VARIABLE}={os.environ[ENVIRONMENT_VARIABLE]} is set.")
    else:
        lines.append(f"{ENVIRONMENT_VARIABLE}=NAME asks for one in a whole program.")
    return lines

"""Which implementation of every operator can run on this machine, and which one runs by default."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

import fairseq_sg.ops  # noqa: F401  (declares the operators)
from fairseq_sg.ops import triton_support
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE, requested
from fairseq_sg.ops.operators import OPERATORS, TRITON
from fairseq_sg.ops.tuning import COMMAND, Tuning, path_of, tuning_on
from fairseq_sg.tables import aligned

DEVICES = ("cpu", "cuda")
HEADER = ("operator", "implementation", "CPU", "GPU")


def why_not(implementation: str, device: str) -> str | None:
    """Why an implementation cannot run on a device of this machine, "cpu" or "cuda"; None where it can.

    Where there is no GPU, None for "cuda" means that nothing else is missing.
    """
    if implementation != TRITON:
        return None
    if device == "cpu":
        if triton_support.why_not_here(torch.device("cpu")) is None:
            return None
        return "Triton's kernels are for GPUs"
    if torch.cuda.is_available():
        return triton_support.why_not_here(here("cuda"))
    return triton_support.why_not_installed() or "there is no GPU"


def here(device: str) -> torch.device:
    """The device of this process, as tensors have it."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def tuning_of(device: str) -> Tuning | None:
    """What was measured on a device of this machine; None for nothing."""
    return None if device == "cuda" and not torch.cuda.is_available() else tuning_on(here(device))


def default(operator: str, implementation: str, device: str) -> str | None:
    """When ``implementation="auto"`` runs this one on a device: "" where nothing is said, None for never."""
    name = requested(operator)
    if name is not None:
        return "" if name == implementation else None
    known, tuning = OPERATORS[operator], tuning_of(device)
    usual, found = known.default, []
    if tuning is not None:
        usual = tuning.working(operator, torch.float32, usual)
        points = [point for point in tuning.points if point.operator == operator]
        fastest = [p for p in points if tuning.fastest_at(p) == implementation != tuning.rule_at(p)]
        if fastest:
            also = "also " * (implementation == usual)
            found.append(f"{also}near {len(fastest)} of {len(points)} sizes measured")
    size, least, name = known.rules.get(device, ("", 0, ""))
    if implementation == name != usual:
        found.append(f"if {size} >= {least}")
    return ", ".join(found) if found or implementation == usual else None


def state(operator: str, implementation: str, device: str) -> str:
    """One cell of the table."""
    reason = why_not(implementation, device)
    if reason is not None:
        return f"no: {reason}"
    tuning = tuning_of(device)
    fails = tuning is not None and tuning.verdicts.get(operator, {}).get(implementation)
    if fails and requested(operator) != implementation:
        return "never: it fails here"
    when = default(operator, implementation, device)
    if when is not None:
        return f"default {when}".rstrip()
    return "by name: Triton's interpreter" if (implementation, device) == (TRITON, "cpu") else "by name"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Operator, implementation, and its state on a CPU and on a GPU."""
    for operator, known in sorted(OPERATORS.items()):
        for implementation in known.implementations:
            yield operator, implementation, *(state(operator, implementation, device) for device in DEVICES)


def table() -> list[str]:
    """The lines that ``fairseq-sg kernels list`` prints."""
    lines = aligned([HEADER, *rows()], left=len(HEADER))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none here"
    lines += ["", f"GPU: {gpu}. torch {torch.__version__}."]
    lines += [tuned(device) for device in DEVICES if device == "cpu" or torch.cuda.is_available()]
    lines.append('default: what implementation="auto" runs. by name: runs if a call or the environment asks for it.')
    if os.environ.get(ENVIRONMENT_VARIABLE):
        lines.append(f"{ENVIRONMENT_VARIABLE}={os.environ[ENVIRONMENT_VARIABLE]} is set.")
    else:
        lines.append(f"{ENVIRONMENT_VARIABLE}=NAME asks for one in a whole program.")
    return lines


def tuned(device: str) -> str:
    """Whether a device was verified and measured, in one line."""
    tuning, name = tuning_of(device), {"cpu": "CPU", "cuda": "GPU"}[device]
    if tuning is None:
        return f"{name}: not tuned, so the operators' own rules decide ({COMMAND} --device {device})"
    wrong = tuning.failing()
    verified = sum(not text for verdicts in tuning.verdicts.values() for text in verdicts.values())
    failing = f"; never run, as they fail here: {', '.join(wrong)}" if wrong else ""
    path = path_of(here(device))
    return f"{name}: {verified} implementations verified, {len(tuning.points)} sizes measured{failing} ({path})"

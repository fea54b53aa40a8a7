"""Every kernel compiles for a GPU, and forbidden properties are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NO_TRITON = "Triton for Nvidia GPUs is not installed: bash scripts/setup.sh --with-triton"
pytest.importorskip("triton.backends.nvidia", reason=NO_TRITON)

HERE = Path(__file__).resolve().parent


def compiled(change: str, *arguments: str) -> subprocess.CompletedProcess:
    """The result of a separate process, which has no GPU afterwards, after a change."""
    run = f"import sys; from helpers import triton_compiled as compiled; {change}; compiled.main(sys.argv[1:])"
    command = [sys.executable, "-c", run, *arguments, "--quick", "--capability", "90", "--dtype", "bfloat16"]
    # From the root of the clone, for fairseq_sg.
    options = dict(cwd=HERE.parents[1], env=os.environ | {"PYTHONPATH": str(HERE.parent)})
    return subprocess.run(command, **options, capture_output=True, text=True, timeout=1800)


def test_all_kernels_compile_for_hopper():
    done = compiled("pass")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {
        tuple(line.split(" | ")[:1] + line.split(" | ")[3:4]) for line in done.stdout.splitlines() if "bfloat16" in line
    }
    assert {operator.strip("| ") for operator, _ in rows} == {
        "linear_attention", "geometric_attention", "cvmm", "relative_attention"
    }  # fmt: skip
    assert len(rows) == 14


@pytest.mark.parametrize(
    ("change", "operator", "message"),
    [
        (
            "from fairseq_sg.ops.cvmm import triton as k; tile = k._tile; k._tile = lambda "
            "*a: tile(*a) | {'num_stages': 3}",
            "cvmm",
            "leaves asynchronous products running that read registers",
        ),
        ("compiled.SHARED = dict.fromkeys(compiled.SHARED, 4096)", "relative_attention", "bytes of shared memory"),
    ],
    ids=["asynchronous", "memory"],
)
def test_what_is_wrong_is_found(change, operator, message):
    done = compiled(change, operator)
    assert done.returncode == 1 and message in done.stderr

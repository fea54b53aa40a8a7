"""The models on a simulated device, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from helpers import simulated

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(simulated.compiler() is None, reason="there is no C++ compiler")
def test_models_on_a_device():
    environment = os.environ | {"SIMULATED_DEVICE": str(simulated.library())}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "on_device.py")]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout

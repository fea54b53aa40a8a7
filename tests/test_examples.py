"""The scripts of ``examples`` and the sessions of docs/python.md, run in an empty folder."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("matplotlib")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory) -> tuple[Path, str]:
    """The folder in which examples/first_steps.py has run, and what the script itself printed."""
    folder = tmp_path_factory.mktemp("examples")
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(REPOSITORY / "examples" / "first_steps.py")]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result.stdout


def test_first_steps(first_steps):
    folder, printed = first_steps
    (accuracy,) = re.findall(r"^inputs of 5 to 12 symbols: (.*) %$", printed, re.MULTILINE)
    assert float(accuracy) > 99
    found = dict(re.findall(r"^length_(\d+): (.*) % of 200$", printed, re.MULTILINE))
    assert list(found) == ["20", "40", "80"] and 50 < float(found["20"]) <= 100
    assert "['1', '0']" in printed and (folder / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_every_cell_begins_with_its_sign():
    for path in (REPOSITORY / "examples").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        cells = [line for line in lines if line.startswith("# %%")]
        assert len(cells) > 4 and set(cells) == {"# %%", "# %% [markdown]"}, path


def test_the_sessions_of_python_md(first_steps, monkeypatch):
    monkeypatch.chdir(first_steps[0])
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(REPOSITORY / "docs" / "python.md")
    failures, examples = doctest.testfile(page, module_relative=False, optionflags=flags, encoding="utf-8")
    assert examples > 10 and failures == 0

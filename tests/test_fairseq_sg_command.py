"""``fairseq-sg``: every command under one name; how a command ends."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fairseq_sg
from fairseq_sg.__main__ import COMMANDS, PACKAGES, main
from fairseq_sg.errors import exit_code

REPOSITORY = Path(__file__).resolve().parents[1]


def run(code: str, **options: object) -> subprocess.CompletedProcess:
    """The result of Python code in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_get_the_remaining_arguments(name, monkeypatch):
    pytest.importorskip("fairseq")
    module = importlib.import_module(f"fairseq_sg.{name}" + ".__main__" * (name in PACKAGES))
    monkeypatch.setattr(module, "main", lambda line: len(line) if line == ["a", "--b", "-h"] else -1)
    assert main([name, "a", "--b", "-h"]) == 3


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert main([]) == 2 and capsys.readouterr().out == printed


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fairseq_sg {fairseq_sg.__version__}\n"


@pytest.mark.parametrize(("name", "meant"), [("evaluat", "did you mean evaluate?"), ("x", "choose from evaluate, ")])
def test_an_unknown_command_is_one_line(name, meant, capsys):
    assert main([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: there is no command {name}: {meant}") and line.endswith(", ".join(COMMANDS))


def test_help_needs_no_torch():
    result = run(
        "import sys; sys.modules |= dict.fromkeys(['torch', 'fairseq', 'numpy']); sys.argv = ['fairseq-sg', '--help']\n"
        "from fairseq_sg.__main__ import main; sys.exit(main())",
        stdout=subprocess.PIPE,
    )
    assert result.returncode == 0 and "evaluate" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "words,end",
    [
        (["analysis", "maps", "checkpoint.pt"], "`fairseq-sg doctor` tells what is missing"),
        (["evaluate", "checkpoint.pt"], "`fairseq-sg doctor` says how to install it"),  # the plugin's own error
    ],
)
def test_without_fairseq_the_doctor_is_named(words, end):
    result = run(
        f"import sys; sys.modules['fairseq'] = None\nfrom fairseq_sg.__main__ import main; sys.exit(main({words}))"
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith(end)


# How a command ends.


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_command_ends_with_what_its_main_returns(code):
    assert exit_code(lambda *arguments: code + sum(arguments), 1, -1) == code


def start(*line: str, **options: object) -> subprocess.Popen:
    """``python -m`` with a module and its arguments."""
    if line[0] in ("fairseq_sg.options", "fairseq_sg.experiments"):
        pytest.importorskip("fairseq")
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-m", *line], env=env, text=True, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize(
    "line",
    [
        "fairseq_sg kernels list",
        "fairseq_sg --help",
        "fairseq_sg.doctor",
        "fairseq_sg.options",
        "fairseq_sg.experiments list",
    ],
)
def test_a_reader_that_has_left_ends_the_command_quietly(line):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*line.split(), stdout=writing)
    os.close(writing)
    assert (process.stderr.read(), process.wait(60)) == ("", 1)


def test_a_reader_that_leaves_later_ends_the_command_quietly():
    line = "fairseq_sg.experiments show thesis_table_7_4 --device cpu"
    process = start(*line.split(), stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith("Language models: ")
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 1)


@pytest.mark.parametrize("name", [*COMMANDS, "experiments.workers"])
def test_every_command_ends_this_way(name):
    path = REPOSITORY / "fairseq_sg" / name.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    last = ast.parse(file.read_text("utf-8")).body[-1].body[-1]
    assert ast.unparse(last).startswith("sys.exit(exit_code(main")

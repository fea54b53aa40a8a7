"""The project as a whole: one version, imports that go one way, no path of a machine, no unsafe loading."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairseq_sg
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from helpers.commands import run

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "fairseq_sg"
#: Folders that set-up, tests and trainings leave behind; they are no part of the project.
LEFT_BEHIND = {"build", "dist", "data-bin", "checkpoints", "runs", "outputs", "__pycache__"}

#: folder -> what of fairseq and fairseq_sg its files may import
LAYERS = {
    "ops": ("fairseq_sg.ops",),
    "modules": (
        "fairseq_sg.ops",
        "fairseq_sg.modules",
        "fairseq_sg.registry",
        "fairseq_sg.ranges",
        "fairseq_sg.errors",
    ),
    "models": (
        "fairseq",
        "fairseq_sg.plugin",
        "fairseq_sg.ops",
        "fairseq_sg.modules",
        "fairseq_sg.models",
        "fairseq_sg.registry",
        "fairseq_sg.ranges",
        "fairseq_sg.errors",
    ),
    "kernels": (
        "fairseq_sg.ops",
        "fairseq_sg.kernels",
        "fairseq_sg.modules.cpu",
        "fairseq_sg.tables",
        "fairseq_sg.parsers",
        "fairseq_sg.errors",
        "fairseq_sg.files",
    ),
    "optim": ("fairseq", "fairseq_sg.optim", "fairseq_sg.errors"),
    "scoring": ("fairseq", "fairseq_sg.scoring", "fairseq_sg.parsers", "fairseq_sg.errors"),
    # Experiments run fairseq's commands and read their logs.
    "experiments": (
        "data_prep",
        "fairseq_sg.experiments",
        "fairseq_sg.scoring",
        "fairseq_sg.parsers",
        "fairseq_sg.ranges",
        "fairseq_sg.errors",
        "fairseq_sg.files",
        "fairseq_sg.lengths",
        "fairseq_sg.tables",
    ),
}


def project_files() -> Iterator[Path]:
    """All files of the project, also those that are not committed yet."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                if (
                    path.name not in LEFT_BEHIND
                    and path.suffix != ".egg-info"
                    and (not path.name.startswith(".") or path.name in (".ci", ".github"))
                ):
                    yield from walk(path)
            elif path.suffix not in (".png", ".pyc") and path.name != ".git":  # a file in a worktree of git
                yield path

    return walk(REPOSITORY)


def python_files(folder: Path) -> list[Path]:
    return [path for path in project_files() if path.suffix == ".py" and path.is_relative_to(folder)]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it, by their full names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            # In `from fairseq_sg import modules` it is the name that is the module.
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "fairseq_sg"
                else [node.module]
            )


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_one_version():
    """The one of the package; the distribution reads it (tests/cli/test_installation.py), others repeat it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"]
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == fairseq_sg.__version__
    date = re.search(r"^date-released: (.*)$", citation, re.MULTILINE)[1]
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{fairseq_sg.__version__}] - {date}\n" in changes


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer):
    files = python_files(PACKAGE / layer)
    assert files
    for path in files:
        ours = [m for m in imports(path) if within(m, "fairseq") or within(m, "fairseq_sg") or within(m, "data_prep")]
        wrong = [m for m in ours if not any(within(m, allowed) for allowed in LAYERS[layer])]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {', '.join(wrong)}"


def test_data_preparation_needs_no_model():
    for path in python_files(REPOSITORY / "data_prep"):
        assert not [module for module in imports(path) if within(module, "fairseq_sg") or within(module, "torch")], path


def test_nothing_that_is_installed_imports_what_is_not():
    for folder in (PACKAGE, REPOSITORY / "data_prep"):
        for path in python_files(folder):
            others = ("tests", "benchmarks", "pytest", "hypothesis")
            assert not [m for m in imports(path) if m.split(".")[0] in others], path


def test_no_test_file_imports_another():
    """What they share is in ``helpers``; so any file runs alone."""
    for path in python_files(REPOSITORY / "tests"):
        found = {part for module in imports(path) for part in module.split(".")}
        assert not [name for name in found if name.startswith(("test_", "conftest"))], path


def test_operators_and_modules_work_without_fairseq():
    code = (
        "import sys; sys.modules['fairseq'] = None\n"
        "import torch, fairseq_sg.ops, fairseq_sg.modules\n"
        "from fairseq_sg.modules.attention import ATTENTION_REGISTRY\n"
        "x = torch.randn(5, 2, 16)\n"
        "for name, kind in ATTENTION_REGISTRY.items():\n"
        "    out = kind(16, 2, role='encoder')(x).output\n"
        "    assert out.shape == x.shape, name\n"
        "assert not [m for m in sys.modules if m.startswith('fairseq.')]\n"
        "print(len(ATTENTION_REGISTRY))\n"
    )
    result = run("-c", code)
    assert result.code == 0, result.err
    assert int(result.out) == len(ATTENTION_REGISTRY)


def test_no_path_of_a_machine():
    """Paths of a home, or of the place where this was made, mean nothing to others (/home/someone is an example)."""
    pattern = re.compile(
        r"(?<![\w.~*>}/-])/(?:" + "|".join(("work", "root", "home", "Users", "opt/pypi")) + r")/(?!someone\b)\w+"
    )
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            found += [f"{path.relative_to(REPOSITORY)}:{number}: {match}" for match in pattern.findall(line)]
    assert not found


def test_checkpoints_are_loaded_as_plain_data():
    """Every ``torch.load`` says ``weights_only=True``: a checkpoint from elsewhere must not run code."""
    for path in python_files(REPOSITORY):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.serialization.load"):
                safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                assert safe, f"{path.relative_to(REPOSITORY)}:{node.lineno}: torch.load without weights_only=True"


def test_the_documents_agree_on_where_the_cases_of_an_attention_go():
    for name in ("CONTRIBUTING.md", "docs/extending.md"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        assert "tests/helpers/attention_kinds/" in text and "`CASES`" not in text, name


def test_set_up_deletes_no_environment_of_another_project(tmp_path):
    """It has an interpreter that does not fit, and no stamp of ours."""
    (tmp_path / "bin").mkdir()
    for name, text in {"pyvenv.cfg": "", "notes.txt": "", "bin/python": "#!/bin/sh\necho 3.10\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "python").chmod(0o755)
    env = os.environ | {"SG_VENV": str(tmp_path), "SG_TORCH": "torch==0"}
    done = subprocess.run(["bash", REPOSITORY / "scripts" / "setup.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "is an environment of other projects, and its files would be" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "notes.txt", "pyvenv.cfg"}

"""``python -m fairseq_sg.doctor`` where all is well, and where something is missing, old or wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_sg import compat, doctor
from helpers.commands import launch, run

REPOSITORY = Path(__file__).resolve().parents[1]

#: Runs before everything in a Python process: makes modules look absent.
ABSENT = "import sys; sys.modules.update(dict.fromkeys({names!r}))"
#: Makes upstream's fairseq look installed instead of fairseq-fixed.
UPSTREAM = """
import importlib.metadata as metadata
version = metadata.version
def pretend(name):
    if name == "fairseq-fixed":
        raise metadata.PackageNotFoundError(name)
    return "0.12.2" if name == "fairseq" else version(name)
metadata.version = pretend
"""


def examine(customization: str) -> tuple[int, str]:
    """Exit code and output of the doctor in a Python that runs ``customization`` first."""
    code = f"{customization}\nimport runpy; runpy.run_module('fairseq_sg.doctor', run_name='__main__')"
    result = run("-c", code, PYTHONPATH=str(REPOSITORY))
    assert result.err == ""
    return result.code, result.out


@pytest.mark.skipif(compat.fairseq_version() is None, reason="fairseq is not installed")
def test_a_working_installation():
    """In a process of its own: an import prints nothing."""
    code, out, err = launch("python", "-m", "fairseq_sg.doctor")
    assert (code, err) == (0, "")
    assert "WRONG" not in out and out.endswith("everything that training needs is there\n")
    assert f"--user-dir fairseq_sg finds {REPOSITORY / 'fairseq_sg'}" in out
    for name in (
        "sg_translation",
        "cross_entropy_orthogonality",
        "exact_match",
        "torch_adam",
        "sg_transformer_scan",
        "elu",
        "shared",
    ):
        assert name in out
    for attention in ("linear", "relative", "softmax"):
        assert f"ok     {attention} attention trains on cpu (loss " in out


@pytest.mark.parametrize(
    "names,problems",
    [
        pytest.param(["torch"], ["torch is missing", "fix: pip install 'torch>=2.6'"], id="torch"),
        pytest.param(
            ["fairseq"], ["fairseq-fixed is missing", f"{compat.FAIRSEQ}, or bash scripts/setup.sh"], id="fairseq"
        ),
        pytest.param(
            ["hydra", "sacrebleu"],
            ["hydra-core is missing", "sacrebleu is missing", "pip install 'sacrebleu>=2.0'"],
            id="libraries",
        ),
    ],
)
def test_missing_parts_are_named_with_the_fix(names, problems):
    code, out = examine(ABSENT.format(names=names))
    assert code == 1
    for problem in problems:
        assert problem in out
    assert "attention trains" not in out and out.endswith("to fix before training\n")


def test_upstreams_fairseq_is_refused():
    code, out = examine(UPSTREAM)
    assert code == 1
    assert "WRONG  the installed fairseq is fairseq 0.12.2" in out and "fix: pip uninstall fairseq" in out


@pytest.mark.parametrize(
    "version,status", [((3, 10, 14), "WRONG"), ((3, 11, 0), "ok"), ((3, 12, 9), "ok"), ((3, 13, 0), "WRONG")]
)
def test_python(version, status):
    finding = doctor.check_python(version)
    assert finding.status == status and f"Python 3.{version[1]}" in finding.message
    assert ("PYTHON=" in finding.fix) == (status == "WRONG")


@pytest.mark.parametrize(
    "version,status", [("2.5.1+cu121", "WRONG"), ("2.6.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0a0", "ok")]
)
def test_torch_versions(version, status, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    finding = doctor.check_library("torch", "torch", "2.6")
    assert finding.status == status and version in finding.message


def test_a_library_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor.check_library("broken", "broken_library", "1.0")
    assert (
        finding.status == "WRONG"
        and finding.message == "broken cannot be imported: RuntimeError: built for another numpy"
    )


@pytest.mark.parametrize("there", ["nothing", "another-folder", "set-up"])
def test_user_dir_from_elsewhere(there, tmp_path, monkeypatch):
    """fairseq looks beside its own package; scripts/setup.sh puts a package there that hands over to the clone."""
    fairseq = tmp_path / "site" / "fairseq"
    fairseq.mkdir(parents=True)
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[fairseq])
    )
    monkeypatch.chdir(tmp_path)
    if there != "nothing":
        (tmp_path / "site" / "fairseq_sg").mkdir()
    if there == "set-up":
        init = f'__path__.insert(0, "{REPOSITORY}/fairseq_sg")\n'
        (tmp_path / "site" / "fairseq_sg" / "__init__.py").write_text(init)
        assert doctor.check_user_dir() == doctor.ok(f"--user-dir fairseq_sg finds {REPOSITORY / 'fairseq_sg'}")
        return
    finding = doctor.check_user_dir()
    assert finding.status == "note" and f"--user-dir {REPOSITORY / 'fairseq_sg'}" in finding.fix
    assert ("nothing from here" if there == "nothing" else "another folder") in finding.message


def test_the_compiler_is_named_when_there_is_none(monkeypatch):
    monkeypatch.setattr(doctor, "HAS_WHEEL", True)
    assert list(doctor.check_compiler()) == []
    monkeypatch.setattr(doctor, "HAS_WHEEL", False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = doctor.check_compiler()
    assert finding.status == "WRONG" and "no C++ compiler (no-such-compiler)" in finding.message
    monkeypatch.setenv("CXX", sys.executable)
    (finding,) = doctor.check_compiler()
    assert finding.status == "ok"


def test_an_optional_library_comes_with_its_command():
    finding = doctor.check_optional("no-such-library", "plots", "pip install no-such-library")
    assert str(finding) == "note   no no-such-library (for plots)\n       fix: pip install no-such-library"


@pytest.mark.parametrize("of_setup", [True, False])
def test_only_an_environment_of_the_setup_may_be_deleted(of_setup, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if of_setup:
        (tmp_path / ".fairseq_sg").touch()
    note = list(doctor.check_devices())[-1]
    command = f"rm -r {tmp_path}; SG_VENV={tmp_path} bash scripts/setup.sh"
    assert note.fix == (command if of_setup else "install a torch with CUDA")


def test_operators_on_this_machine(monkeypatch, tmp_path):
    import torch

    from fairseq_sg.ops import tuning

    cpu = torch.device("cpu")
    monkeypatch.setenv(tuning.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for verdict, status in ((None, "ok"), ("", "ok"), ("it crashed: SIGSEGV", "note")):
        if verdict is not None:
            tuning.write(tuning.Tuning(tuning.key_of(cpu), {"cvmm": {"blocks": verdict}}), tuning.path_of(cpu))
        tuning.tuning_on.cache_clear()
        (found,) = doctor.check_kernels()
        assert found.status == status
        assert ("not tuned" in found.message) == (verdict is None) and ("cvmm blocks" in found.message) == bool(verdict)
    tuning.tuning_on.cache_clear()
    assert "fairseq-sg kernels verify --device cpu" in found.fix

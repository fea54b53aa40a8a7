"""``--user-dir``: from the clone (all other tests), from elsewhere by its path, by name where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from cli_commands import REPOSITORY, Result, metrics, run, succeed, training

SHORT = ["--max-update", "2", "--valid-subset", "valid"]


def test_from_another_folder_by_its_path(data, tmp_path):
    printed = succeed(
        "fairseq-train", *training(data, "run", *SHORT, "--user-dir", REPOSITORY / "fairseq_sg"), cwd=tmp_path
    )
    assert len(metrics(printed, "valid")) == 1 and (tmp_path / "run" / "checkpoint_last.pt").is_file()


def test_from_another_folder_by_its_name(data, tmp_path):
    if not Path(sys.prefix, ".fairseq_sg").is_file():
        pytest.skip("this environment was not made by scripts/setup.sh")
    printed = succeed("fairseq-train", *training(data, "run", *SHORT), cwd=tmp_path)
    assert len(metrics(printed, "valid")) == 1 and (tmp_path / "run" / "checkpoint_last.pt").is_file()
    code = succeed("python", "-c", "import fairseq_sg.ops as o; print(o.__file__)", cwd=tmp_path)
    assert Path(code.strip()) == REPOSITORY / "fairseq_sg" / "ops" / "__init__.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder of packages, with fairseq and a normal (not editable) installation of this project side by side."""
    source, site = (tmp_path_factory.mktemp("installed") / name for name in ("source", "site"))
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("fairseq_sg", "data_prep"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    result = run("python", *pip, "--target", site, source)
    assert result.code == 0, result.err
    for package in (fairseq, fairseq_cli):  # folders of their own: fairseq looks for the plugin beside the one it is in
        (site / package.__name__).mkdir()
        for path in Path(package.__file__).parent.iterdir():
            os.symlink(path, site / package.__name__ / path.name)
    return site


def run_installed(site: Path, cwd: Path, *arguments: object) -> Result:
    """A module that is run with the packages in ``site`` before all others."""
    return run("python", "-m", *arguments, cwd=cwd, PYTHONPATH=str(site))


def test_an_installation_is_whole(installed):
    def files(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in (".py", ".yaml")}

    for package in ("fairseq_sg", "data_prep"):
        assert files(installed / package) == files(REPOSITORY / package)


def test_by_name_where_it_is_installed(installed, data, tmp_path):
    result = run_installed(installed, tmp_path, "fairseq_cli.train", *training(data, "run", *SHORT))
    assert result.code == 0, result.err
    assert len(metrics(result.out + result.err, "valid")) == 1


def test_the_doctor_of_an_installation_names_it(installed, tmp_path):
    result = run_installed(installed, tmp_path, "fairseq_sg.doctor")
    assert result.code == 0, result.out
    assert f"--user-dir fairseq_sg finds {installed / 'fairseq_sg'}" in result.out


def test_attention_of_a_users_own_directory(data, tmp_path):
    """The example of docs/extending.md, with its option, in training and, from the checkpoint alone, in validation."""
    code = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)[1]
    mine = tmp_path / "my_attentions"
    mine.mkdir()
    (mine / "__init__.py").write_text(f"import fairseq_sg.plugin\n\n{code}")
    environment = {"PYTHONPATH": str(REPOSITORY)}
    options = ["--encoder-attention", "mean", "--mean-scale", "2", "--user-dir", mine]
    succeed("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options), **environment)
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    program = (
        "import fairseq_sg.plugin, my_attentions, sys\n"
        "from fairseq.checkpoint_utils import load_model_ensemble\n"
        "(model,), _ = load_model_ensemble([sys.argv[1]])\n"
        "attention = model.encoder.stack.layers[1].self_attn\n"
        "print(type(attention).__name__, attention.mean_scale)\n"
    )
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    printed = run("python", "-c", program, checkpoint, cwd=tmp_path, **environment)
    assert printed.out.splitlines()[-1] == "MeanAttention 2.0", printed.err
    wrong = run("fairseq-train", *training(data, "no", *SHORT, "--mean-scale", "2", "--user-dir", mine), **environment)
    assert "--mean-scale 2.0 has no effect on the chosen mechanisms" in wrong.err.splitlines()[-1]

"""The source distribution and the wheel, and the wheel installed where the clone cannot be imported."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fairseq_sg
from helpers.commands import COMMANDS, REPOSITORY, Result, launch, metrics

FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
FOLDERS = ("fairseq_sg", "data_prep", "tests", "benchmarks", "scripts")
PACKAGES = ("fairseq_sg", "data_prep")
#: Builds the source distribution, and the wheel from it, into the folder that is its argument.
BUILD = """
import os, shutil, sys
from setuptools import build_meta
out = sys.argv[1]
source = os.path.join(out, build_meta.build_sdist(out))
shutil.unpack_archive(source, out)
os.chdir(source.removesuffix(".tar.gz"))
build_meta.build_wheel(out)
"""
RECIPE = """
title: Parity
source: nobody
data:
  parity:
    folder: parity
    prepare: parity --train-lengths 2-6 --test-lengths 8 --train 100 --test 100
    subsets: [valid, gen]
steps: 4
validate_every: 2
batch_size_valid: 50
seeds: 1
unit: percent
checkpoint: last
train: >-
  --task sg_classification --criterion classification --arch sg_lstm_ctl --hidden-dim 16 --no-source-bos
  --optimizer torch_adam --lr 1e-3 --batch-size 16
columns:
  IID: {subset: valid}
  OOD: {subset: gen}
rows:
  lstm: {label: an LSTM, arguments: ""}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution and the wheel of a copy of the clone."""
    source, out = (tmp_path_factory.mktemp("built") / name for name in ("source", "out"))
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, source)
    out.mkdir()
    result = launch("python", "-c", BUILD, out, cwd=source)
    assert result.code == 0, result.err
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """An environment with the wheel, and with links to the packages that are installed here, but not to the clone."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, symlinks=True)
    site = site_of(folder)
    for package in sorted({path for key in ("purelib", "platlib") for path in Path(sysconfig.get_path(key)).iterdir()}):
        if package.name.startswith(("fairseq_sg", "data_prep", "__editable__")):
            continue
        if package.name in ("fairseq", "fairseq_cli"):
            # Folders of their own: fairseq looks for the plugin beside the one it is in.
            (site / package.name).mkdir()
            for path in package.iterdir():
                os.symlink(path, site / package.name / path.name)
        else:
            os.symlink(package, site / package.name)
    (wheel,) = built.glob("*.whl")
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python", "install", "--quiet")
    result = launch("python", *pip, "--no-deps", "--no-index", wheel)
    assert result.code == 0, result.err
    command = (COMMANDS / "fairseq-train").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "bin" / "fairseq-train").write_text("".join([f"#!{folder}/bin/python\n", *command[1:]]))
    (folder / "bin" / "fairseq-train").chmod(0o755)
    return folder


def site_of(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def succeed(environment: Path, cwd: Path, name: str, *arguments: object) -> Result:
    """Runs a program of the environment, which must succeed."""
    result = launch(str(environment / "bin" / name), *arguments, cwd=cwd)
    assert result.code == 0, result.out[-3000:] + result.err[-3000:]
    return result


def code_and_settings(root: Path, suffixes: tuple[str, ...] = (".py", ".yaml", ".sha256")) -> set[str]:
    return {str(path.relative_to(root.parent)) for path in root.rglob("*") if path.suffix in suffixes}


def test_what_is_distributed(built):
    """All code, recipes and configurations, but neither tests nor benchmarks."""
    ours = set.union(*(code_and_settings(REPOSITORY / package) for package in PACKAGES))
    assert "fairseq_sg/experiments/recipes/quickstart.yaml" in ours and "fairseq_sg/config/scan.yaml" in ours
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = Parser().parsestr(archive.read(metadata).decode())
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert described["Version"] == fairseq_sg.__version__
    assert {"fairseq", "experiments"} <= set(described.get_all("Provides-Extra"))
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | set(FILES) <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "scripts"))]


def test_the_command_from_elsewhere(installed, tmp_path):
    assert "experiments" in succeed(installed, tmp_path, "fairseq-sg", "--help").out
    code = "import data_prep, fairseq_sg, sys; print(data_prep.__file__, fairseq_sg.__file__, *sys.path, sep='\\n')"
    found = succeed(installed, tmp_path, "python", "-c", code).out.splitlines()
    assert [Path(line) for line in found[:2]] == [site_of(installed) / name / "__init__.py" for name in PACKAGES[::-1]]
    assert str(REPOSITORY) not in found[2:]


def test_a_recipe_and_a_training_by_name(installed, tmp_path):
    """The recipe prepares its data; ``--user-dir fairseq_sg`` is found by name on the same data."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    run_recipe = ("experiments", "run", "tiny.yaml", "--device", "cpu", "--jobs", "1", "--memory-guard", "0")
    printed = succeed(installed, tmp_path, "fairseq-sg", *run_recipe).out
    assert "an LSTM" in printed
    (trained,) = json.loads((tmp_path / "runs" / "tiny" / "results.json").read_text())["records"]
    assert trained["result"]["steps"] == 4 and set(trained["result"]["accuracy"]) == {"valid", "gen"}
    assert [start["commit"] for start in trained["starts"]] == [f"version {fairseq_sg.__version__}"]

    options = "--task sg_classification --criterion classification --optimizer torch_adam --lr 1e-3 --batch-size 16"
    options += " --arch sg_lstm_ctl --hidden-dim 16 --no-source-bos --max-update 2 --cpu --log-format json"
    data = tmp_path / "data-bin" / "parity"
    result = succeed(
        installed, tmp_path, "fairseq-train", data, "--user-dir", "fairseq_sg", *options.split(), "--save-dir", "run"
    )
    assert len(metrics(result.out + result.err, "valid")) == 1 and (tmp_path / "run" / "checkpoint_last.pt").is_file()


def test_the_doctor_names_the_installation(installed, tmp_path):
    printed = succeed(installed, tmp_path, "fairseq-sg", "doctor").out
    assert f"--user-dir fairseq_sg finds {site_of(installed) / 'fairseq_sg'}" in printed

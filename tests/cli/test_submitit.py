"""hydra's submitit launcher with ``fairseq-hydra-train``: two jobs on this machine, and an array up to its submission
to SLURM. Skipped where hydra-submitit-launcher is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from helpers.commands import REPOSITORY, launch

TINY = ["common.cpu=true", "optimization.max_update=6", "dataset.batch_size=16", "dataset.batch_size_valid=64"]

submitit = pytest.importorskip("submitit", reason="pip install hydra-submitit-launcher")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install hydra-submitit-launcher")


def sweep(launcher: str, data: Path, folder: Path, *more: str, **env: str):
    """The shipped configuration with two normalizations, a job each."""
    arguments = [
        *("--config-dir", REPOSITORY / "fairseq_sg" / "config", "--config-name", "scan", "--multirun", *TINY),
        *(f"hydra/launcher={launcher}", f"hydra.sweep.dir={folder / 'sweep'}", "hydra.sweep.subdir=${hydra.job.num}"),
        *(f"common.user_dir={REPOSITORY / 'fairseq_sg'}", f"task.data={data}", "model.qk_norm=l1,l2"),
        f"checkpoint.save_dir={folder}/${{model.qk_norm}}",
    ]
    where = {"PYTHONPATH": str(Path(submitit.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    return launch("fairseq-hydra-train", *arguments, *more, cwd=folder, **where | env)


def test_two_jobs_on_this_machine(data, tmp_path):
    result = sweep("submitit_local", data, tmp_path, "hydra.launcher.timeout_min=10")
    assert result.code == 0, result.out + result.err
    for norm in ("l1", "l2"):
        state = torch.load(tmp_path / norm / "checkpoint_last.pt", weights_only=True)
        assert state["cfg"]["model"]["qk_norm"] == norm
        assert state["optimizer_history"][-1]["num_updates"] == 6
    logs = [path.read_text() for path in (tmp_path / "sweep").rglob("*_log.out")]
    assert len(logs) == 2 and all("done training" in log for log in logs)


def test_an_array_up_to_its_submission(data, tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, script in {"sbatch": f'cp "$1" {tmp_path}/submitted; exit 1', "srun": "exit 1"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    more = "partition=a100 gpus_per_node=1 cpus_per_task=2 timeout_min=240 array_parallelism=1".split()
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    result = sweep("submitit_slurm", data, tmp_path, *(f"hydra.launcher.{option}" for option in more), PATH=path)
    assert result.code != 0 and "sbatch" in result.err  # the one above takes nothing
    script = (tmp_path / "submitted").read_text()
    for line in ("--array=0-1%1", "--partition=a100", "--gpus-per-node=1", "--cpus-per-task=2", "--time=240"):
        assert f"#SBATCH {line}\n" in script
    assert "submitit.core._submit" in script

"""A training that is killed, or whose disk is full, loses nothing but what came after its last checkpoint.

``SG_KILLS=20 python -m pytest tests/cli/test_nothing_lost.py`` is the long form; the short one kills three times.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.commands import LINEAR, REPOSITORY, run, start_training, training
from helpers.states import assert_same_state

KILLS = int(os.environ.get("SG_KILLS", "3"))
UPDATES = 8 * KILLS
#: A checkpoint every second update: much of the time something is being written.
ARGUMENTS = [
    *LINEAR,
    *"--dropout 0.1 --batch-size 16 --valid-subset gen --log-interval 1 --log-format simple --num-workers 0".split(),
    *"--save-interval-updates 2 --validate-interval-updates 2 --keep-interval-updates 2".split(),
]


def arguments(data: Path, folder: Path, updates: int) -> list[str]:
    return training(data, folder, *ARGUMENTS, "--user-dir", REPOSITORY / "fairseq_sg", "--max-update", updates)


def finish(process) -> int:
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """The folder of an uninterrupted training, with what it printed in ``log``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the process that the others are forked from
        folder = tmp_path_factory.mktemp("whole")
        process = start_training(arguments(data, folder, UPDATES), folder / "log")
        assert finish(process) == 0, (folder / "log").read_text()[-3000:]
    return folder


def test_killed_at_random_moments(data, whole, tmp_path):
    random, log, killed = np.random.default_rng(0), tmp_path / "log", 0
    before, _, after = (whole / "log").read_text().partition("Preparing to save")
    checkpoint_long = len(after) / (UPDATES / 2)  # what is printed from one checkpoint to the next
    log.touch()
    for _ in range(KILLS):
        process = start_training(arguments(data, tmp_path, UPDATES), log)
        until = log.stat().st_size + len(before) + checkpoint_long * random.uniform(0, 5)
        while log.stat().st_size < until and process.is_alive():
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        assert finish(process) in (0, -9), log.read_text()[-3000:]
        killed += process.exitcode == -9
        for checkpoint in tmp_path.glob("*.pt"):
            assert torch.load(checkpoint, weights_only=True)["optimizer_history"]
    assert killed > KILLS / 2
    assert finish(start_training(arguments(data, tmp_path, UPDATES), log)) == 0, log.read_text()[-3000:]
    assert "Loaded checkpoint" in log.read_text()
    for name in ("last", "best"):
        assert_same_state(*(folder / f"checkpoint_{name}.pt" for folder in (whole, tmp_path)))


def test_a_complete_training_makes_no_other_step(data, whole, tmp_path):
    for name in ("last", "best"):
        shutil.copyfile(whole / f"checkpoint_{name}.pt", tmp_path / f"checkpoint_{name}.pt")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    made = run("fairseq-train", *arguments(data, tmp_path, UPDATES))
    assert (
        made.code == 0 and f"nothing is left to train: {UPDATES} of {UPDATES} updates are made" in made.out + made.err
    )
    assert {path: path.read_bytes() for path in tmp_path.glob("*.pt")} == before


def test_a_full_disk(data, whole, tmp_path):
    """The training ends with one line, what was saved stays as it was, and with room it goes on to the same weights."""
    log = tmp_path / "log"
    assert finish(start_training(arguments(data, tmp_path, 4), log)) == 0
    saved = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    assert {path.name for path in saved} == {f"checkpoint_{name}.pt" for name in ("1_2", "1_4", "best", "last")}
    size = (tmp_path / "checkpoint_last.pt").stat().st_size
    assert finish(start_training(arguments(data, tmp_path, UPDATES), log, largest_file=size // 2)) == 1
    message = f"error: there is no room for the checkpoint {tmp_path / 'checkpoint_1_6.pt'} (File too large). Earlier"
    assert log.read_text().splitlines()[-1].startswith(message)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.pt*")} == saved
    assert finish(start_training(arguments(data, tmp_path, UPDATES), log)) == 0, log.read_text()[-3000:]
    assert_same_state(whole / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt")


def test_a_full_disk_while_data_are_prepared(tmp_path):
    made = run("data_prep", "scan", "--split", "simple", "--out", tmp_path / "data", largest_file=50_000)
    assert made.code == 1 and "File too large" in made.err and "Traceback" not in made.err
    assert not list(tmp_path.iterdir())

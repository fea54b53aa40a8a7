"""Training in two processes (gloo, on the CPU) equals training in one with gradients accumulated over two batches."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_commands import KINDS, check, finish, metrics, start, succeed, training
from test_resume import assert_same_state

#: What fairseq needs to train in several processes without a GPU.
GLOO = (
    "--distributed-world-size 2 --distributed-backend gloo --distributed-no-spawn --device-id 0 "
    "--ddp-backend legacy_ddp"
).split()
MODEL = [*KINDS["linear"][0], "--batch-size", "16"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_in_two(data: Path, folder: Path, *more: object) -> str:
    """What the first of the two processes printed; both must succeed."""
    rendezvous = ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"]
    arguments = training(data, folder, *MODEL, *GLOO, *rendezvous, *more)
    processes = [start("fairseq-train", *arguments, "--distributed-rank", rank) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:  # read both at once: a full pipe of one would stop the other, too
        first, second = pool.map(finish, processes)
    assert second.code == 0, second.out + second.err
    return check(first)


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> tuple[Path, str]:
    """Two epochs in two processes: the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, train_in_two(data, folder, "--max-epoch", "2")


def test_two_processes_equal_one_that_accumulates(two, data, tmp_path):
    one = succeed("fairseq-train", *training(data, tmp_path / "one", *MODEL, "--update-freq", "2", "--max-epoch", "2"))
    for subset, gradients in (("train", ["gnorm"]), ("valid", []), ("gen", [])):
        here, there = (metrics(printed, subset) for printed in (one, two[1]))
        assert len(here) == len(there) == 2
        for name in ["loss", "nll_loss", "accuracy", "orthogonality_encoder", "num_updates", *gradients]:
            last_digit = 1e-3 if name == "gnorm" else 1e-4
            assert [m[name] for m in there] == pytest.approx([m[name] for m in here], abs=1.5 * last_digit), (
                subset,
                name,
            )
    assert here[-1]["num_updates"] == 64


def test_two_processes_resume_bit_equal(two, data, tmp_path):
    for stop in ("1", "2"):
        train_in_two(data, tmp_path / "stopped", "--max-epoch", stop)
    assert_same_state(two[0] / "checkpoint_last.pt", tmp_path / "stopped" / "checkpoint_last.pt")

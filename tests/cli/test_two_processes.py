"""Training in two processes (gloo, on the CPU) equals training in one with gradients accumulated over two batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import classifiers
from helpers.commands import KINDS, LAUNCHER, in_two, launch, metrics, run, succeed, training
from helpers.labelled_data import write_labelled
from helpers.states import assert_same_state

#: 25 batches an epoch: an odd number.
MODEL = [*KINDS["linear"][0], "--batch-size", "40"]


def train_in_two(data: Path, folder: Path, *more: object) -> str:
    return in_two(*training(data, folder, *MODEL, *more))


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
    assert here[-1]["num_updates"] == 26


def test_two_processes_resume_bit_equal(two, data, tmp_path):
    for stop in ("1", "2"):
        train_in_two(data, tmp_path / "stopped", "--max-epoch", stop)
    assert_same_state(two[0] / "checkpoint_last.pt", tmp_path / "stopped" / "checkpoint_last.pt")


def test_bfloat16_in_two_processes(data, tmp_path):
    """The sum of the gradients is fairseq's for a CPU or GPUs, not that of its TPUs."""
    options = ["--bf16", "--max-update", "12"]
    two = metrics(train_in_two(data, tmp_path / "two", *options), "valid")[-1]
    one = succeed("fairseq-train", *training(data, tmp_path / "one", *MODEL, *options, "--update-freq", "2"))
    assert two["loss"] == pytest.approx(metrics(one, "valid")[-1]["loss"], rel=0.02)


def test_types_and_a_gap_at_the_end_of_an_epoch(tmp_path):
    """Five batches for two: the second process fills the gap with a batch of the last validation, which has types."""
    labelled = write_labelled(tmp_path / "data")
    options = [
        "--batch-size",
        60,
        "--validate-interval-updates",
        2,
        "--max-epoch",
        1,
        "--required-batch-size-multiple",
        1,
    ]
    model = [*classifiers.KINDS["sg_encoder"], "--encoder-ffn", "sigma_moe", "--moe-experts", 4]
    printed = in_two(*classifiers.training(labelled, tmp_path / "run", *model, *options))
    (trained,) = metrics(printed, "train")
    assert trained["num_updates"] == 3 and trained["bsz"] == 100 and "accuracy_length_8" not in trained
    assert [m["num_updates"] for m in metrics(printed, "gen")] == [2, 3]


def test_a_process_that_fails_ends_all_of_them(data, tmp_path):
    """The second one, killed while the first waits for its gradients."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, threading\n"
        "if sys.argv[-1] == '1' or '1' == sys.orig_argv[-1]:\n"
        "    print('the second one', flush=True)\n"
        "    threading.Timer(0.5, os._exit, (3,)).start()\n"
    )
    arguments = [word for word in training(data, tmp_path / "run", *MODEL, "--max-epoch", "2") if word != "--cpu"]
    result = launch("python", "-m", LAUNCHER, 2, "fairseq-train", *arguments, PYTHONPATH=str(tmp_path))
    assert result.code == 1 and result.err.splitlines()[-1].startswith(
        "error: process 1 of 2 failed; see its output above"
    )
    assert "the second one" in result.err and not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    "line,message",
    [
        (["0", "fairseq-train", "x"], "workers: '0' is not a number from 1 on"),
        (["2", "fairseq-validate", "x"], "after the number of processes comes fairseq-train with its arguments"),
        (["2", "fairseq-train", "x", "--cpu"], "--cpu is set by this command: omit it"),
        (["2", "fairseq-train", "--ddp_backend=c10d"], "--ddp_backend=c10d is set by this command"),
    ],
)
def test_wrong_command_lines(line, message):
    result = run(LAUNCHER, *line)
    assert result.code == 2 and message in result.err

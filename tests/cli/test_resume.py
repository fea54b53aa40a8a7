"""A training that was stopped and resumed equals one that was not, bit for bit; checkpoints hold plain data only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fairseq_sg.plugin  # noqa: F401
from helpers.commands import LINEAR, RELATIVE, REPOSITORY, check, launch, metrics, start_training, succeed, training
from helpers.states import assert_same_state

#: case -> its arguments; each chooses the best checkpoint by another measure
CASES = {
    "torch_adam-accuracy": [
        *LINEAR,
        *"--orthogonality-weight 1e-4 --patience 5 --keep-best-checkpoints 1".split(),
        *"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
    ],
    "adam-bleu": [
        *RELATIVE,
        *"--optimizer adam --lr-scheduler inverse_sqrt --warmup-updates 10".split(),
        *["--eval-bleu", "--eval-bleu-args", '{"beam": 2}'],
        *"--best-checkpoint-metric bleu --maximize-best-checkpoint-metric".split(),
    ],
    "torch_adam-bfloat16": [*LINEAR, "--bf16"],
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Case -> folders of an uninterrupted training, and of one stopped within an epoch and at the end of one."""
    made = {}

    def train(case: str) -> tuple[Path, Path]:
        if case not in made:
            whole, stopped = (tmp_path_factory.mktemp(case) / name for name in ("whole", "stopped"))
            arguments = ["--dropout", "0.1", "--batch-size", "64", *CASES[case]]
            succeed("fairseq-train", *training(data, whole, *arguments, "--max-epoch", "3"))
            for stop in (["--max-update", "11"], ["--max-epoch", "2"], ["--max-epoch", "3"]):
                printed = succeed("fairseq-train", *training(data, stopped, *arguments, *stop))
            assert [m["epoch"] for m in metrics(printed, "valid")] == [3]
            made[case] = whole, stopped
        return made[case]

    return train


@pytest.mark.parametrize("case", CASES)
def test_resumed_training_equals_an_uninterrupted_one(case, runs):
    whole, stopped = runs(case)
    assert_same_state(whole / "checkpoint_last.pt", stopped / "checkpoint_last.pt")


@pytest.mark.parametrize("case,measure", [("torch_adam-accuracy", "accuracy"), ("adam-bleu", "bleu")])
def test_the_best_checkpoint_is_kept_by_its_measure(case, measure, runs):
    for folder in runs(case):
        last, best = (torch.load(folder / f"checkpoint_{name}.pt", weights_only=True) for name in ("last", "best"))
        assert last["extra_state"]["best"] == best["extra_state"]["val_loss"] >= last["extra_state"]["val_loss"] > 0
    kept = list(runs(case)[0].glob(f"checkpoint.best_{measure}_*.pt"))
    assert len(kept) == (case == "torch_adam-accuracy")


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_hold_plain_data_only(case, runs):
    """torch reads them with ``weights_only=True`` where it knows nothing of the plugin; counts of BLEU are numpy's."""
    path = runs(case)[0] / "checkpoint_last.pt"
    code = "import sys, torch; print(*torch.serialization.get_unsafe_globals_in_checkpoint(sys.argv[1]))"
    found = set(check(launch("python", "-c", code, path)).split())
    numpys = {"numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar"}
    assert found <= (numpys if "bleu" in case else set())


def test_patience_ends_a_training_that_gets_no_better_and_is_remembered_when_it_was_stopped(data, tmp_path):
    """The first validation is the best one; two later it is enough, however often the training was stopped between."""
    arguments = "--lr 1e-12 --patience 2 --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split()
    arguments += ["--batch-size", "250", "--user-dir", REPOSITORY / "fairseq_sg", "--num-workers", "0"]

    def train(folder: str, epochs: int) -> str:
        log = tmp_path / f"{folder}-{epochs}.log"
        process = start_training(training(data, tmp_path / folder, *arguments, "--max-epoch", epochs), log)
        process.join(300)
        assert process.exitcode == 0, log.read_text()[-3000:]
        return log.read_text()

    enough = "early stop since valid performance hasn't improved for last 2 runs"
    whole = train("whole", 9)
    assert [m["epoch"] for m in metrics(whole, "valid")] == [1, 2, 3] and enough in whole
    assert enough not in train("stopped", 2)
    stopped = train("stopped", 9)
    assert [m["epoch"] for m in metrics(stopped, "valid")] == [3] and enough in stopped
    checkpoint = tmp_path / "stopped" / "checkpoint_last.pt"
    assert_same_state(tmp_path / "whole" / "checkpoint_last.pt", checkpoint)
    before = checkpoint.read_bytes()
    again = train("stopped", 10)
    assert "nothing is left to train: the last 2 validations were no better, and --patience is 2" in again
    assert not metrics(again, "valid") and checkpoint.read_bytes() == before

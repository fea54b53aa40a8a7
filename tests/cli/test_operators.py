"""Operators through fairseq's commands: learned, validated on other grids, resumed bit for bit, refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.commands import metrics, run, succeed
from helpers.fields import write_waves
from helpers.once import once
from helpers.states import assert_same_state

SMALL = (
    "--arch sg_operator_burgers_small --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-layers 2 "
    "--spectral-dim 8 --modes 6 --readout-dim 8"
)


@pytest.fixture(scope="session")
def folder(common_folder) -> Path:
    return once(common_folder / "waves", lambda folder: write_waves(folder) and None)


def training(data: Path, folder: Path, *more: object) -> list[str]:
    fixed = (
        "--user-dir fairseq_sg --task sg_operator --criterion relative_l2 --h1-weight 0.1 --optimizer torch_adam "
        "--cpu --lr 1e-2 --lr-scheduler one_cycle --batch-size 8 --valid-subset valid,test_128 --batch-size-valid 8 "
        "--log-format json --best-checkpoint-metric relative_l2 --no-epoch-checkpoints --num-workers 0"
    )
    return [str(argument) for argument in [data, *fixed.split(), *SMALL.split(), "--save-dir", folder, *more]]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> tuple[Path, str]:
    """An uninterrupted training of 20 updates, 5 an epoch: folder and log."""
    out = tmp_path_factory.mktemp("whole")
    return out, succeed("fairseq-train", *training(folder, out, "--max-update", 20))


def test_something_is_learned_and_holds_on_a_finer_grid(whole):
    for subset in ("valid", "test_128"):
        errors = [m["relative_l2"] for m in metrics(whole[1], subset)]
        assert errors[-1] < 0.6 < errors[0]


def test_a_training_stopped_within_an_epoch_equals_an_uninterrupted_one(whole, folder, tmp_path):
    """The schedule, and β₁ with it, go by --max-update, so what stops the training is the end of an epoch, or a
    checkpoint within one.
    """
    succeed("fairseq-train", *training(folder, tmp_path, "--max-update", 20, "--max-epoch", 1))
    succeed(
        "fairseq-train",
        *training(folder, tmp_path, "--max-update", 20, "--max-epoch", 2, "--save-interval-updates", 3),
    )
    within = tmp_path / "checkpoint_2_9.pt"
    assert within.exists()
    succeed("fairseq-train", *training(folder, tmp_path, "--max-update", 20, "--restore-file", within))
    assert_same_state(whole[0] / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt")


def test_validation_of_several_grids_in_one_run(whole, folder):
    out, printed = whole
    validated = succeed(
        "fairseq-validate", folder, *"--user-dir fairseq_sg --task sg_operator --cpu --batch-size 4".split(),
        *["--log-format", "json", "--path", out / "checkpoint_last.pt"],
        *["--valid-subset", "valid,test,test_64,test_128"],
    )  # fmt: skip
    for subset in ("valid", "test_128"):
        last, again = metrics(printed, subset)[-1], metrics(validated, subset)[0]
        for name in ("loss", "relative_l2", "h1"):
            assert again[name] == pytest.approx(last[name], rel=1e-4), (subset, name)
    errors = [metrics(validated, subset)[0]["relative_l2"] for subset in ("test", "test_64", "test_128")]
    assert max(errors) < 1.01 * min(errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--criterion", "regression"], "--h1-weight has no effect here: it is an option of --criterion relative_l2"),
        (["--arch", "sg_encoder"], "--modes has no effect here: it is an option of --arch sg_operator"),
        (["--valid-subset", "valid,test_512"], "has no subset 'test_512'"),
        (["--modes", 18], "--modes 18 is more than a grid of 32 points has: choose 17 or fewer"),
        (["--maximize-best-checkpoint-metric"], "--best-checkpoint-metric relative_l2 would keep the worst"),
        (["--one-cycle-rise", 2], "--one-cycle-rise is 2.0: choose a number above 0 and below 1"),
        (["--max-update", 0], "give --max-update"),
        (["--h1-weight", -1], "--h1-weight is -1.0: choose 0 or more"),
    ],
)
def test_wrong_commands(arguments, message, folder, tmp_path):
    refused = run("fairseq-train", *training(folder, tmp_path, "--max-update", 5, *arguments))
    assert refused.code != 0 and message in refused.err and "Traceback" not in refused.err, refused.err
    assert not list(tmp_path.glob("*.pt"))

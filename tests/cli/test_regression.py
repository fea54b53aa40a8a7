"""Regressors through fairseq's commands: learned, validated and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.commands import metrics, run, succeed
from helpers.once import once
from helpers.prompts import write_prompts
from helpers.states import assert_same_state

SMALL = (
    "--arch sg_regressor --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    "--decoder-layers 2 --pre-norm --position learned --learned-positions 11 --dropout 0.1"
)


@pytest.fixture(scope="session")
def folder(common_folder) -> Path:
    return once(common_folder / "prompts", lambda folder: write_prompts(folder) and None)


def training(data: Path, folder: Path, *more: object) -> list[str]:
    fixed = (
        "--user-dir fairseq_sg --task sg_regression --criterion regression --optimizer torch_adam --lr 3e-3 --cpu "
        "--batch-size 16 --epoch-size 80 --valid-subset valid,query_orthogonal --batch-size-valid 8 --log-format json "
        "--best-checkpoint-metric mse_last --no-epoch-checkpoints"
    )
    return [str(argument) for argument in [data, *fixed.split(), *SMALL.split(), "--save-dir", folder, *more]]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> tuple[Path, str]:
    """An uninterrupted training of 4 epochs of 5 batches, two of which make an update: folder and log."""
    out = tmp_path_factory.mktemp("whole")
    arguments = ["--update-freq", 2, "--max-epoch", 4, "--num-workers", 0]
    return out, succeed("fairseq-train", *training(folder, out, *arguments))


def test_a_training_stopped_within_an_epoch_equals_an_uninterrupted_one(whole, folder, tmp_path):
    for stop in (["--max-update", 4], ["--max-epoch", 2], ["--max-epoch", 4]):
        arguments = ["--update-freq", 2, *stop, "--num-workers", 0]
        succeed("fairseq-train", *training(folder, tmp_path, *arguments))
    assert_same_state(whole[0] / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt")


def test_validation_gives_the_numbers_of_training(whole, folder):
    out, printed = whole
    (best,) = [min(metrics(printed, "valid"), key=lambda m: m["mse_last"])]
    validated = succeed(
        "fairseq-validate", folder, *"--user-dir fairseq_sg --cpu --batch-size 64 --log-format json".split(),
        *["--path", out / "checkpoint_best.pt", "--valid-subset", "valid,test,x_double"],
    )  # fmt: skip
    again = metrics(validated, "valid")[0]
    for name in ("loss", "mse", "mse_last", "mse_last_mean"):
        assert again[name] == pytest.approx(best[name], rel=1e-4), name
    assert metrics(validated, "x_double")[0]["mse_last"] > again["mse_last"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--criterion", "cross_entropy"], "choose --criterion regression"),
        (["--maximize-best-checkpoint-metric"], "--best-checkpoint-metric mse_last would keep the worst checkpoint"),
        (["--valid-subset", "gen"], "has no subset 'gen'"),
        (["--label-smoothing", 0.1], "--label-smoothing"),
    ],
)
def test_wrong_commands(arguments, message, folder, tmp_path):
    refused = run("fairseq-train", *training(folder, tmp_path, "--max-update", 1, *arguments))
    assert refused.code != 0 and message in refused.err and "Traceback" not in refused.err, refused.err


def test_a_loss_on_the_last_loop(folder, tmp_path):
    looped = ["--depth", "looped", "--loops", 2, "--loop-loss", "last"]
    printed = succeed("fairseq-train", *training(folder, tmp_path, "--max-update", 1, *looped))
    (validated, *_) = metrics(printed, "valid")
    assert len({validated[name] for name in ("mse", "mse_last", "mse_last_mean")}) == 3

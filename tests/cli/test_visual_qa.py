"""Questions on images through fairseq's commands: learned, and all questions counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.sort_of_clevr.questions import TYPES
from helpers.commands import metrics, run, succeed
from helpers.once import once
from helpers.scenes import write_scenes

GROUPS = ("unary", "binary", "ternary")


@pytest.fixture(scope="session")
def folder(common_folder) -> Path:
    return once(common_folder / "scenes", lambda folder: write_scenes(folder, scenes=16, test_scenes=7) and None)


def training(data: Path, folder: Path, *more: object) -> list[str]:
    fixed = (
        "--user-dir fairseq_sg --task sg_visual_qa --arch sg_encoder_sort_of_clevr --criterion classification --cpu "
        "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-layers 2 --encoder-attention linear --qk-norm l2 "
        "--orthogonality-weight 1e-3 --optimizer torch_adam --lr 3e-3 --batch-size 32 --valid-subset valid,test "
        "--batch-size-valid 64 --log-format json --accuracy-by types --best-checkpoint-metric accuracy_unary "
        "--maximize-best-checkpoint-metric --no-epoch-checkpoints --required-batch-size-multiple 1"
    )
    return [str(argument) for argument in [data, *fixed.split(), "--save-dir", folder, *more]]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> tuple[Path, str]:
    """An uninterrupted training of 20 updates, 15 of them in the first epoch: folder and log."""
    out = tmp_path_factory.mktemp("whole")
    return out, succeed("fairseq-train", *training(folder, out, "--max-update", 20, "--num-workers", 0))


def test_twenty_updates_and_a_validation(whole):
    """The loss falls, and each accuracy is logged; groups are equally large, so theirs have the mean of all."""
    for subset in ("valid", "test"):
        first, last = metrics(whole[1], subset)
        assert last["nll_loss"] < first["nll_loss"] < 4
        assert {f"accuracy_{name}" for name in (*GROUPS, *TYPES)} <= set(last)
        mean = sum(last[f"accuracy_{group}"] for group in GROUPS) / 3
        assert last["accuracy"] == pytest.approx(mean, abs=1e-3)
        assert last["accuracy"] * 210 / 100 == pytest.approx(round(last["accuracy"] * 210 / 100), abs=0.01)
        assert last["orthogonality_encoder"] > 0


def test_validation_gives_the_numbers_of_training(whole, folder):
    out, printed = whole
    best = max(metrics(printed, "valid"), key=lambda m: m["accuracy_unary"])
    validated = succeed(
        "fairseq-validate", folder, *"--user-dir fairseq_sg --cpu --batch-size 50 --log-format json".split(),
        *["--path", out / "checkpoint_best.pt", "--valid-subset", "valid,test,train"],
    )  # fmt: skip
    again = metrics(validated, "valid")[0]
    for name in ("loss", "accuracy", "accuracy_binary"):
        assert again[name] == pytest.approx(best[name], rel=1e-4), name
    assert metrics(validated, "train")[0]["accuracy"] * 480 / 100 == pytest.approx(
        round(metrics(validated, "train")[0]["accuracy"] * 480 / 100), abs=0.01
    )


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--question-batches", "both"], "--question-batches is 'both': choose from separate, mixed"),
        (["--attention-dropout", 0.1], "--attention-dropout 0.1 has no effect on the chosen mechanisms"),
        (["--valid-subset", "gen"], "has no subset 'gen'"),
        (["--best-checkpoint-metric", "accuracy_quaternary"], "accuracy_quaternary"),
    ],
)
def test_wrong_commands(arguments, message, folder, tmp_path):
    refused = run("fairseq-train", *training(folder, tmp_path, "--max-update", 1, *arguments))
    assert refused.code != 0 and message in refused.err and "Traceback" not in refused.err, refused.err

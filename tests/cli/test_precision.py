"""``--bf16``, ``--memory-efficient-bf16`` and ``--fp16`` on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from helpers.commands import MIXED, evaluation, metrics, run, succeed, training

ADAM = ["--optimizer", "adam", "--adam-betas", "(0.9,0.98)"]


@pytest.mark.parametrize(
    "arguments", [["--bf16"], ["--memory-efficient-bf16", *ADAM]], ids=["bf16", "memory_efficient"]
)
def test_bfloat16_trains_and_continues(arguments, data, tmp_path):
    """The same loss as in float32 but for rounding, parameters of its precision; evaluation in bfloat16 is refused."""
    losses = {}
    for name, more in (("float32", arguments[1:]), ("bfloat16", arguments)):
        command = training(data, tmp_path / name, *MIXED, *more, "--max-epoch", 1)
        losses[name] = metrics(succeed("fairseq-train", *command), "train")[0]["loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02) and losses["bfloat16"] != losses["float32"]
    checkpoint = tmp_path / "bfloat16" / "checkpoint_last.pt"
    weights = [x for x in torch.load(checkpoint, weights_only=True)["model"].values() if x.is_floating_point()]
    assert weights and all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in weights)
    printed = [succeed("fairseq-train", *command, "--max-epoch", epochs) for epochs in (2, 3)]
    [first], [second] = (metrics(lines, "train") for lines in printed)
    assert second["loss"] < first["loss"] < losses["bfloat16"] and second["num_updates"] == 1.5 * first["num_updates"]
    options = evaluation(data, checkpoint, "--valid-subset", "gen", "--batch-size", 64, "--log-format", "json")
    [plain] = metrics(succeed("fairseq-validate", *options), "gen")
    [in_training] = metrics(printed[1], "gen")
    assert plain["loss"] == pytest.approx(in_training["loss"], rel=0.02)
    result = run("fairseq-validate", *options, arguments[0])
    assert result.code != 0 and f"{arguments[0]} has no effect here: fairseq evaluates in float32" in result.err


def test_bfloat16_takes_several_update_frequencies(data, tmp_path):
    """fairseq's optimizer asks for a window of the loss scale, which bfloat16 lacks."""
    command = training(data, tmp_path / "c", *MIXED, "--bf16", "--update-freq", "2,1", "--max-epoch", 2)
    first, second = metrics(succeed("fairseq-train", *command), "train")
    assert second["num_updates"] == 3 * first["num_updates"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fp16"], "--fp16 only on a GPU: leave it out, or choose --bf16"),
        (["--amp"], "--amp only on a GPU: leave it out, or choose --bf16"),
        (["--memory-efficient-bf16"], "--memory-efficient-bf16 choose --optimizer adam"),
    ],
)
def test_what_cannot_train(arguments, message, data, tmp_path):
    result = run("fairseq-train", *training(data, tmp_path / "c", *arguments))
    assert result.code == 1 and "Traceback" not in result.err
    assert message in result.err.splitlines()[-1]
    assert not list((tmp_path / "c").glob("*.pt"))

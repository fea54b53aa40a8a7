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
    """The same loss as in float32 but for rounding, parameters of its precision; evaluation is in float32."""
    losses = {}
    for name, more in (("float32", arguments[1:]), ("bfloat16", arguments)):
        command = training(data, tmp_path / name, *MIXED, *more, "--max-epoch", 1)
        losses[name] = metrics(succeed("fairseq-train", *command), "train")[0]["loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02) and losses["bfloat16"] != losses["float32"]
    checkpoint = tmp_path / "bfloat16" / "checkpoint_last.pt"
    weights = [x for x in torch.load(checkpoint, weights_only=True)["model"].values() if x.is_floating_point()]
    assert weights and all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in weights)
    [first], [second] = (
        metrics(succeed("fairseq-train", *command, "--max-epoch", epochs), "train") for epochs in (2, 3)
    )
    assert second["loss"] < first["loss"] < losses["bfloat16"] and second["num_updates"] == 1.5 * first["num_updates"]
    options = evaluation(data, checkpoint, "--valid-subset", "gen", "--batch-size", 64, "--log-format", "json")
    (plain,), (half,) = (metrics(succeed("fairseq-validate", *options, *more), "gen") for more in ([], ["--bf16"]))
    assert [plain[name] for name in ("accuracy", "loss")] == [half[name] for name in ("accuracy", "loss")]


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

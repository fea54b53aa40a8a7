"""A training beside files of measurements: one that does not count changes nothing, one that counts only rounding."""

from __future__ import annotations

import json

import pytest
import torch

from fairseq_sg.ops import tuning
from fairseq_sg.ops.tuning import Point, Tuning
from helpers.commands import RELATIVE, metrics, run, training

CPU = torch.device("cpu")
#: Not what the rules choose for these sizes, and what they choose.
OTHER, RULE = "naive", "shift"


def measured() -> Tuning:
    ms = {RULE: [2.0, 2.0, 2.0], OTHER: [1.0, 1.0, 1.0]}
    points = [Point("relative_logits", "float32", (2, 128, 16, 8), ms)]
    return Tuning(tuning.key_of(CPU), {"relative_logits": {RULE: "", OTHER: ""}}, points)


@pytest.fixture(scope="module")
def losses(data, tmp_path_factory):
    """Losses of two epochs with a text in the place of the file, and what was said of it."""

    def function(text: str | None) -> tuple[list[tuple[float, float]], list[str]]:
        folder = tmp_path_factory.mktemp("tuned")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(tuning.FOLDER_VARIABLE, str(folder))
            path = tuning.path_of(CPU)
            if text is not None:
                path.write_text(text)
            arguments = training(data, folder / "run", *RELATIVE, "--max-epoch", 2, "--seed", 3)
            done = run("fairseq-train", *arguments)
        printed = done.out + done.err
        assert done.code == 0, printed[-3000:]
        found = [(one["loss"], one["gnorm"]) for one in metrics(printed, "train")]
        return found, [line for line in printed.splitlines() if str(path) in line]

    return function


@pytest.fixture(scope="module")
def without(losses):
    found, said = losses(None)
    assert len(found) == 2 and said == []
    return found


def edited(**changes) -> str:
    content = json.loads(measured().as_json())
    content["key"].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (measured().as_json()[:-30], "it is damaged"),
        (edited(operators="0123456789abcdef"), "it is of other operators"),
        (edited(device="NVIDIA H100 80GB HBM3", driver="550.54.15"), "it is of another device"),
    ],
    ids=["damaged", "stale", "foreign"],
)
def test_a_file_that_does_not_count_changes_nothing(text, reason, losses, without):
    found, said = losses(text)
    assert found == without
    assert len(said) == 1 and f"is ignored: {reason}" in said[0]


def test_a_file_that_counts_changes_rounding(losses, without):
    """It is followed: see tests/ops/test_tuning.py."""
    found, said = losses(measured().as_json())
    assert said == []
    for one, other in zip(found, without, strict=True):
        assert one == pytest.approx(other, rel=0.02)

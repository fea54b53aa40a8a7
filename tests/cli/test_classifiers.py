"""Classifiers through fairseq's commands: trained, validated, deepened, refused."""

from __future__ import annotations

import pytest

from helpers.classifiers import KINDS, SUBSETS, evaluation, training
from helpers.commands import metrics, run, succeed


@pytest.mark.parametrize("kind", KINDS)
def test_trains_validates_and_keeps_the_best(kind, labelled, tmp_path):
    printed = succeed("fairseq-train", *training(labelled, tmp_path, *KINDS[kind], "--max-epoch", 6))
    curves = {subset: metrics(printed, subset) for subset in SUBSETS}
    assert curves["valid"][-1]["accuracy"] > 90 > curves["valid"][0]["accuracy"]
    assert {"accuracy_length_8", "accuracy_length_9"} <= set(curves["gen"][-1])
    best = max(range(6), key=lambda epoch: (curves["dev"][epoch]["accuracy"], epoch))
    validated = succeed("fairseq-validate", *evaluation(labelled, tmp_path / "checkpoint_best.pt"))
    for subset in SUBSETS:
        (again,) = metrics(validated, subset)
        for name in ("accuracy", "loss"):
            assert again[name] == pytest.approx(curves[subset][best][name], abs=2e-4), (subset, name)


def test_more_steps_at_test_time(labelled, tmp_path):
    printed = succeed("fairseq-train", *training(labelled, tmp_path, *KINDS["sg_encoder"], "--max-epoch", 1))
    deeper = ["--model-overrides", "{'encoder_layers': 24}"]
    validated = succeed("fairseq-validate", *evaluation(labelled, tmp_path / "checkpoint_last.pt", *deeper))
    assert metrics(validated, "valid")[0]["loss"] != pytest.approx(metrics(printed, "valid")[0]["loss"], abs=1e-3)


def test_default_criterion_is_refused(labelled, tmp_path):
    arguments = training(labelled, tmp_path, *KINDS["sg_lstm"], "--criterion", "cross_entropy", "--max-update", 1)
    refused = run("fairseq-train", *arguments)
    assert refused.code != 0 and "choose --criterion classification" in refused.err
    assert "Traceback" not in refused.err

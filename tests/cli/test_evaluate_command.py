"""``python -m fairseq_sg.evaluate`` on a model that fairseq-train has trained, against fairseq-validate."""

from __future__ import annotations

import json

import pytest

from helpers.commands import evaluation, metrics, run, succeed


def test_it_agrees_with_fairseq_validate_to_the_sample(trained, data, tmp_path):
    checkpoint, numbers = trained("relative").checkpoint, tmp_path / "numbers.json"
    printed = succeed("fairseq_sg.evaluate", checkpoint, "--device", "cpu", "--json", numbers)
    more = ["--valid-subset", "valid,gen", "--batch-size", "50", "--log-format", "json", "--num-workers", "0"]
    log = succeed("fairseq-validate", *evaluation(data, checkpoint, *more))
    found = json.loads(numbers.read_text())["subsets"]
    assert {name: values["sentences"] for name, values in found.items()} == {"valid": 101, "gen": 45}
    for name, values in found.items():
        (expected,) = metrics(log, name)
        assert values["right"] == round(expected["accuracy"] * values["sentences"] / 100)
        assert values["tokens_right"] == round(expected["token_accuracy"] * values["tokens"] / 100)
        assert values["nll_loss"] == pytest.approx(expected["nll_loss"], abs=1e-4)
        assert f"{expected['accuracy']:.2f}" in printed and f"{values['nll_loss']:.4f}" in printed
    assert 0 < found["valid"]["right"] < 101
    copy = tmp_path / "copy.pt"
    copy.write_bytes(before := checkpoint.read_bytes())
    refused = run("fairseq_sg.evaluate", copy, "--device", "cpu", "--json", copy)
    assert refused.code == 1 and f"--json {copy} would overwrite {copy}, which the command reads" in refused.err
    assert copy.read_bytes() == before
    assert [line for line in log.splitlines() if "units: loss " in line and "accuracy, % of sentences" in line]

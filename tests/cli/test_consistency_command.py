"""``python -m fairseq_sg.analysis consistency`` on the checkpoints of a training, against ``fairseq_sg.evaluate``."""

from __future__ import annotations

import json

import pytest

from data_prep.dataset import Pair
from helpers.commands import succeed, training
from helpers.pcfg_folders import EXCEPTIONS, TRAIN, overgeneralisation_folder


def test_the_profile_of_a_training_agrees_with_evaluate(tmp_path):
    # One of the four exceptions is trained by the rule, so that a model which has learned all overgeneralises once.
    (first, (_, by_rule, _)), *others = EXCEPTIONS.items()
    train = [*TRAIN, Pair(first, by_rule), *(Pair(source, trained) for source, (_, _, trained) in others)]
    data, runs = overgeneralisation_folder(tmp_path / "data", train=train), tmp_path / "runs"
    # One batch is an epoch here, and an epoch's checkpoint has its number.
    arguments = training(data, runs, "--max-update", 80, "--save-interval", 40, "--disable-validation")
    arguments.remove("--no-epoch-checkpoints")
    succeed("fairseq-train", *arguments, "--valid-subset", "exception")
    profile = [f"tiny={runs}/checkpoint[0-9]*.pt", "--device", "cpu", "--out", tmp_path / "profile.svg"]
    printed = succeed("fairseq_sg.analysis", "consistency", *profile)
    found = json.loads((tmp_path / "profile.json").read_text())["models"]["tiny"]
    assert list(found) == ["40", "80"]
    for updates, (scores,) in found.items():
        line = [runs / f"checkpoint{updates}.pt", "--device", "cpu", "--json", tmp_path / "numbers.json"]
        succeed("fairseq_sg.evaluate", *line)
        subsets = json.loads((tmp_path / "numbers.json").read_text())["subsets"]
        assert scores["all"]["overgeneralised"] == subsets["original"]["accuracy"]
        assert scores["all"]["memorised"] == subsets["exception"]["accuracy"]
    assert scores["all"] == {"pairs": 4, "overgeneralised": 25, "memorised": 75, "other": 0}
    assert scores["reverse_echo"]["overgeneralised"] == pytest.approx(100 / 3)
    assert "peak: 25.00 % overgeneralised at " in printed
    assert (tmp_path / "profile.svg").read_text().startswith("<?xml")

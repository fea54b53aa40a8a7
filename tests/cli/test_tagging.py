"""Labels of words through fairseq's commands: trained, validated, resumed, measured, refused; a DNC as a classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import classifiers
from helpers.commands import metrics, run, succeed
from helpers.labelled_data import write_labelled
from helpers.labelled_words import TAGGERS, evaluation, training, write_labelled_words
from helpers.once import once
from helpers.states import assert_same_state


@pytest.fixture(scope="session")
def words(common_folder) -> Path:
    return once(common_folder / "labelled_words", lambda folder: write_labelled_words(folder) and None)


@pytest.mark.parametrize("kind", ["sg_dnc", "sg_encoder"])
def test_trains_and_validates(kind, words, tmp_path):
    printed = succeed("fairseq-train", *training(words, tmp_path, *TAGGERS[kind].split(), "--max-epoch", 5))
    curves = {subset: metrics(printed, subset) for subset in ("valid", "gen")}
    assert curves["valid"][-1]["loss"] < 0.9 * curves["valid"][0]["loss"]
    assert {"accuracy_repeats_3", "word_error_repeats_4", "mean_word_error"} <= set(curves["gen"][-1])
    last = tmp_path / "checkpoint_last.pt"
    validated = succeed("fairseq-validate", *evaluation(words, last))
    succeed("fairseq_sg.evaluate", last, "--device", "cpu", "--json", tmp_path / "found.json")
    measured = json.loads((tmp_path / "found.json").read_text())["subsets"]
    for subset, curve in curves.items():
        (again,) = metrics(validated, subset)
        for name in ("accuracy", "token_accuracy", "nll_loss"):
            assert again[name] == pytest.approx(curve[-1][name], abs=2e-4), (subset, name)
            assert measured[subset][name] == pytest.approx(curve[-1][name], abs=2e-4), (subset, name)


def test_resumed_training_equals_an_uninterrupted_one(words, tmp_path):
    arguments = [*TAGGERS["sg_dnc"].split(), "--batch-size", 16]
    succeed("fairseq-train", *training(words, tmp_path / "whole", *arguments, "--max-update", 20))
    for stop in (7, 20):
        succeed("fairseq-train", *training(words, tmp_path / "stopped", *arguments, "--max-update", stop))
    assert_same_state(*(tmp_path / name / "checkpoint_last.pt" for name in ("whole", "stopped")))


def test_blanks_that_are_scored_count_in_every_command(words, tmp_path):
    arguments = [*TAGGERS["sg_transformer_lm"].split(), "--score-blanks", "--max-update", 2]
    curve = metrics(succeed("fairseq-train", *training(words, tmp_path, *arguments)), "gen")
    last = tmp_path / "checkpoint_last.pt"
    (validated,) = metrics(succeed("fairseq-validate", *evaluation(words, last)), "gen")
    succeed("fairseq_sg.evaluate", last, "--device", "cpu", "--json", tmp_path / "found.json")
    measured = json.loads((tmp_path / "found.json").read_text())["subsets"]["gen"]["nll_loss"]
    assert measured == pytest.approx(validated["nll_loss"], abs=2e-4)
    assert measured == pytest.approx(curve[-1]["nll_loss"], abs=2e-4)
    assert "mean norm of all heads" in succeed(
        "fairseq_sg.analysis", "norms", last, "--subset", "gen", "--format", "none"
    )


def test_the_best_checkpoint_by_a_type_that_the_first_batch_lacks(words, tmp_path):
    """Batches are sorted by length, so the first ones have the fewest repeats."""
    arguments = [*TAGGERS["sg_lstm"].split(), "--batch-size-valid", 1, "--max-update", 2, "--valid-subset", "gen"]
    arguments += ["--best-checkpoint-metric", "accuracy_repeats_4"]
    succeed("fairseq-train", *training(words, tmp_path, *arguments))
    assert (tmp_path / "checkpoint_best.pt").exists()


def test_other_cells_at_test_time(words, tmp_path):
    succeed("fairseq-train", *training(words, tmp_path, *TAGGERS["sg_dnc"].split(), "--max-update", 2))
    more = ["--model-overrides", "{'memory_cells': 9}"]
    last = tmp_path / "checkpoint_last.pt"
    found = [metrics(succeed("fairseq-validate", *evaluation(words, last, *o)), "gen") for o in ([], more)]
    assert found[0][0]["loss"] != found[1][0]["loss"]


def test_a_dnc_classifies(common_folder, tmp_path):
    """As on CTL: the class is read after the last symbol."""
    data = once(common_folder / "labelled", lambda folder: write_labelled(folder) and None)
    kind = "--arch sg_dnc_ctl --memory-variant ds --memory-cells 8 --memory-width 8 --controller-dim 32 --embed-dim 8"
    arguments = [*kind.split(), "--no-source-bos", "--lr", "2e-2", "--max-epoch", "6"]
    arguments = [word for word in classifiers.training(data, tmp_path, *arguments) if word not in ("--dropout", "0")]
    curve = metrics(succeed("fairseq-train", *arguments), "valid")
    assert curve[-1]["accuracy"] > 60 > curve[0]["accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--criterion cross_entropy", "--task sg_tagging needs another criterion: choose --criterion tagging"),
        ("--arch sg_transformer", "choose sg_dnc, sg_lstm, sg_encoder or sg_transformer_lm"),
        ("--no-source-bos", "--no-source-bos has no effect with --task sg_tagging"),
        (
            "--best-checkpoint-metric accuracy_repeats_4 --valid-subset gen,valid",
            "accuracy_repeats_4', and a validation on 'valid' measures",
        ),
        ("--output letters", "--output is 'letters': choose from words, bits"),
        ("--arch sg_dnc --memory-variant mm", "--memory-variant is 'mm': letters of 'mds'"),
        (
            "--arch sg_dnc --memory-variant ds --memory-mask",
            "--memory-variant sets all three switches: leave --memory-mask",
        ),
        ("--arch sg_dnc --mask-floor 0.1", "--mask-floor is for masks: add --memory-mask"),
        ("--arch sg_dnc --memory-cells 0", "--memory-cells is 0"),
        ("--arch sg_dnc --controller gru", "unknown controller 'gru'"),
        ("--arch sg_dnc --compile reduce-overhead", "--compile is 'reduce-overhead': choose from none, default"),
        ("--arch sg_dnc --input-embedding codes", "--input-embedding is 'codes': choose from learned, bits"),
        ("--arch sg_lstm --task sg_classification --criterion classification", "the targets of .* are no classes"),
    ],
)
def test_refused(arguments, message, words, tmp_path):
    import re

    default = [] if "--arch" in arguments else TAGGERS["sg_lstm"].split()
    refused = run("fairseq-train", *training(words, tmp_path / "save", *default, "--max-update", 1, *arguments.split()))
    assert refused.code != 0 and re.search(message, refused.err), refused.err[-2000:]
    assert "Traceback" not in refused.err and not (tmp_path / "save" / "checkpoint_last.pt").exists()

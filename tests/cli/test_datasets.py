"""Prepared folders in fairseq's own commands: classes as one-word targets, accuracy by type, text for language models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli_commands import evaluation, metrics, run, succeed, training

from data_prep.__main__ import main


def prepare(folder: Path, *arguments: object) -> Path:
    assert main([*map(str, arguments), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """Strings of 4 to 6 symbols to train on; 8 and 10 to test on."""
    folder = tmp_path_factory.mktemp("first") / "data"
    return prepare(folder, "first", "--train-lengths", "4-6", "--test-lengths", "8,10", "--train", 200, "--test", 60)


def test_classes_are_trained_as_targets_of_one_word_and_logged_by_type(first, tmp_path):
    trained = succeed("fairseq-train", *training(first, tmp_path, "--max-epoch", 3, "--accuracy-by", "types"))
    last = metrics(trained, "gen")[-1]
    by_length = [last["accuracy_length_8"], last["accuracy_length_10"]]
    assert last["accuracy"] == pytest.approx(sum(by_length) / 2, abs=1e-3)
    common = evaluation(
        first, tmp_path / "checkpoint_last.pt", "--valid-subset", "gen", "--batch-size", 50, "--log-format", "json"
    )
    (plain,) = metrics(succeed("fairseq-validate", *common), "gen")
    assert plain["accuracy"] == last["accuracy"]
    (typed,) = metrics(succeed("fairseq-validate", *common, "--accuracy-by", "types"), "gen")
    assert [typed["accuracy_length_8"], typed["accuracy_length_10"]] == by_length


def test_classes_are_read_by_fairseqs_own_sentence_prediction(first, tmp_path):
    result = run(
        *("fairseq-train", first, "--task", "sentence_prediction", "--num-classes", 2, "--arch", "roberta"),
        *("--criterion", "sentence_prediction", "--encoder-layers", 1, "--encoder-embed-dim", 16),
        *("--encoder-ffn-embed-dim", 16, "--encoder-attention-heads", 2, "--max-positions", 32, "--batch-size", 32),
        *("--optimizer", "adam", "--lr", "1e-3", "--max-update", 3, "--valid-subset", "gen", "--cpu", "--no-save"),
        *("--user-dir", "fairseq_sg", "--log-format", "json", "--classification-head-name", "classes"),
        "--no-shuffle",
    )
    assert result.code == 0, result.err[-3000:]
    assert 0 <= metrics(result.out + result.err, "gen")[-1]["accuracy"] <= 100


@pytest.mark.parametrize("unit", [["bytes"], ["sentencepiece", "--vocab-size", 600]], ids=["bytes", "subwords"])
def test_text_is_read_by_fairseqs_own_language_modeling(unit, tmp_path):
    text = Path(sys.modules["argparse"].__file__)
    folder = prepare(tmp_path / "text", "text", "--input", text, "--unit", *unit)
    result = run(
        *("fairseq-train", folder, "--task", "language_modeling", "--arch", "transformer_lm", "--max-update", 2),
        *("--sample-break-mode", "none", "--tokens-per-sample", 64, "--batch-size", 8, "--decoder-layers", 1),
        *("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 2, "--cpu"),
        *("--optimizer", "adam", "--lr", "1e-3", "--valid-subset", "valid", "--no-save", "--user-dir", "fairseq_sg"),
        *("--log-format", "json"),
    )
    assert result.code == 0, result.err[-3000:]
    assert metrics(result.out + result.err, "valid")[-1]["loss"] > 0

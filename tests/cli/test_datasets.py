"""Prepared folders in fairseq's own commands: classes as one-word targets, accuracy by type, text for language
models.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from helpers.commands import REPOSITORY, evaluation, metrics, run, succeed, training, translations


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


def test_classes_are_read_by_fairseqs_own_sentence_prediction(first):
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


def test_whole_words_of_the_user(tmp_path):
    """Two files are prepared and trained on; evaluation counts their words, and answers consist of them."""
    verbs = ("walk", "run", "look", "jump")
    sources = [" ".join(words) for n in range(1, 5) for words in itertools.product(verbs, repeat=n)]
    for name, lines in (("src", sources), ("tgt", [line.upper() for line in sources])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    options = "--model words --max-length 2 --valid-share 0 --test-share 0.4".split()
    files = ["--src", tmp_path / "src", "--tgt", tmp_path / "tgt"]
    folder = prepare(tmp_path / "data", "parallel", *files, *options)
    succeed("fairseq-train", *training(folder, tmp_path, "--max-update", 60, "--valid-subset", "test,gen"))
    checkpoint, written = tmp_path / "checkpoint_last.pt", tmp_path / "numbers.json"
    succeed("fairseq_sg.evaluate", checkpoint, "--device", "cpu", "--json", written)
    numbers = json.loads(written.read_text())
    lengths = {name: list(found["lengths"]) for name, found in numbers["subsets"].items()}
    assert lengths == {"test": ["1", "2"], "gen": ["3", "4"]} and "length_unit" not in numbers
    generated = translations(succeed("fairseq-generate", *evaluation(folder, checkpoint, "--gen-subset", "test")))
    assert {one.target for one in generated.values()} == set((folder / "raw" / "test.tgt").read_text().splitlines())
    assert {word for one in generated.values() for word in one.hypothesis.split()} <= {verb.upper() for verb in verbs}


TEXT = ("text", "--unit", "bytes", "--input", __file__)
STRINGS = "first --train-lengths 4-6 --test-lengths 8 --train 100 --test 20"
SMALL_ENCODER, SMALL_DECODER = (
    f"--{side}-layers 1 --{side}-embed-dim 16 --{side}-ffn-embed-dim 16 --{side}-attention-heads 2 "
    for side in ("encoder", "decoder")
)
SHORT = "--tokens-per-sample 16 --memory-length 16 --eval-memory-length 16 --batch-size 4"


@pytest.mark.parametrize(
    ("data", "number", "validates", "smaller"),
    [
        (STRINGS, 0, "valid,gen", SMALL_ENCODER + SMALL_DECODER),
        (STRINGS, 1, "valid,gen", SMALL_ENCODER),
        ("scan --split length --cutoff 1", 0, "", SMALL_ENCODER + SMALL_DECODER),
        (shlex.join(TEXT), 0, "valid,test", SMALL_DECODER + SHORT),
    ],
    ids=["translation", "classification", "nothing-to-validate-on", "text"],
)
def test_training_command_as_it_is_printed(data, number, validates, smaller, tmp_path, capsys):
    """It validates and saves at the end rather than in every epoch, into a folder of its own, beside nothing else."""
    prepare(tmp_path / "my data", *shlex.split(data))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [line.partition(": ")[2] for line in lines if line.startswith(("next: ", "or: "))]
    command, *arguments = shlex.split(commands[number])
    (tmp_path / "fairseq_sg").symlink_to(REPOSITORY / "fairseq_sg")
    # More than two epochs.
    arguments += [*smaller.split(), "--max-update", "12", "--cpu", "--num-workers", "0", "--log-format", "json"]
    printed = succeed(command, *arguments, cwd=tmp_path)
    assert [len(metrics(printed, subset)) for subset in ("valid", "gen", "test")] == [
        int(subset in validates) for subset in ("valid", "gen", "test")
    ]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == ("my data_classifier" if number else "my data")
    best = {"checkpoint_best.pt"} if validates else set()
    assert {path.name for path in saved.iterdir()} == {"checkpoint_last.pt"} | best


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

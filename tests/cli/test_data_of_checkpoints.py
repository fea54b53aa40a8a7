"""A checkpoint knows the data it was trained on: other dictionaries, data and tasks are refused, changed options are
named.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from helpers.commands import SHORT, Result, evaluation, run, training
from helpers.data_files import with_reversed_words

COMMANDS = {
    "fairseq-validate": ["--valid-subset", "gen", "--batch-size", "64"],
    "fairseq-generate": ["--gen-subset", "gen", "--batch-size", "64", "--beam", "1"],
    "fairseq-interactive": ["--beam", "1"],
}


def refusal(result: Result) -> str:
    """The one line that a command has ended with."""
    assert result.code != 0 and "Traceback" not in result.out + result.err, result.out[-2000:] + result.err[-2000:]
    line = result.err.splitlines()[-1]
    assert line.startswith("error: "), line
    return line


@pytest.fixture(scope="module")
def reversed_words(data, tmp_path_factory) -> Path:
    """The same folder with the words of its target dictionary in reverse order."""
    return with_reversed_words(data, tmp_path_factory.mktemp("reversed") / "data", "tgt")


@pytest.fixture(scope="module")
def other_request(data, tmp_path_factory) -> Path:
    """The same folder as if it had been prepared by another request."""
    folder = tmp_path_factory.mktemp("other") / "data"
    shutil.copytree(data, folder)
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["request"]["cutoff"] = 30
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_other_dictionaries_are_refused(command, checkpoint, data, reversed_words):
    result = run(command, *evaluation(reversed_words, checkpoint, *COMMANDS[command]), text="jump twice\n")
    expected = f"the model was trained on {data}, and the target dictionary of {reversed_words} has other words, or "
    assert expected in refusal(result)
    assert not re.search("^[DH]-0|accuracy [0-9]", result.out, re.MULTILINE)


def test_other_folders_with_the_same_dictionaries_are_evaluated(checkpoint, other_request):
    command = "fairseq-validate"
    result = run(command, *evaluation(other_request, checkpoint, *COMMANDS[command]))
    assert result.code == 0 and "WARNING" not in result.out + result.err


def resumed(checkpoint: Path, folder: Path, data: Path, *more: object) -> Result:
    """The result of a training that found a checkpoint in its --save-dir; a refused one leaves it as it was."""
    folder.mkdir()
    last = folder / "checkpoint_last.pt"
    shutil.copyfile(checkpoint, last)
    result = run("fairseq-train", *training(data, folder, *SHORT, "--max-update", "2", *more))
    assert result.code == 0 or last.read_bytes() == checkpoint.read_bytes()
    return result


def test_a_training_is_not_resumed_on_other_data(checkpoint, data, other_request, reversed_words, tmp_path):
    line = refusal(resumed(checkpoint, tmp_path / "request", other_request))
    assert f"was trained on {data}, and {other_request} has other data (cutoff was None, and here it is 30)" in line
    line = refusal(resumed(checkpoint, tmp_path / "words", reversed_words, "--reset-dataloader"))
    assert f"the target dictionary of {reversed_words} has other words" in line


def test_a_moved_folder_is_the_same_data(checkpoint, data, tmp_path):
    shutil.copytree(data, tmp_path / "moved")
    assert resumed(checkpoint, tmp_path / "run", tmp_path / "moved").code == 0


def test_new_data_are_taken_where_the_command_says_so(checkpoint, other_request, tmp_path):
    assert resumed(checkpoint, tmp_path / "run", other_request, "--reset-dataloader").code == 0
    arguments = training(other_request, tmp_path / "tuned", *SHORT, "--finetune-from-model", checkpoint)
    assert run("fairseq-train", *arguments).code == 0


def test_a_fine_tuning_is_not_resumed_on_other_data(checkpoint, data, other_request, tmp_path):
    line = refusal(resumed(checkpoint, tmp_path / "run", other_request, "--finetune-from-model", checkpoint))
    assert f"was trained on {data}, and {other_request} has other data" in line


def test_a_training_is_not_resumed_with_another_task(checkpoint, data, tmp_path):
    line = refusal(
        resumed(checkpoint, tmp_path / "run", data, "--task", "translation", "--arch", "transformer_iwslt_de_en")
    )
    assert "was trained with --task sg_translation, and this is --task translation" in line


def test_another_kind_of_schedule_goes_on_only_if_asked(checkpoint, data, tmp_path):
    inverse = ["--lr-scheduler", "inverse_sqrt", "--warmup-updates", "5"]
    line = refusal(resumed(checkpoint, tmp_path / "refused", data, *inverse))
    assert "was trained with --lr-scheduler fixed, and this is --lr-scheduler inverse_sqrt" in line
    result = resumed(checkpoint, tmp_path / "reset", data, *inverse, "--reset-lr-scheduler")
    assert result.code == 0 and "--lr-scheduler fixed (here inverse_sqrt)" in result.out + result.err


@pytest.mark.parametrize(
    "options,named",
    [
        (["--seed", "7"], "--seed 1 (here 7)"),
        (["--batch-size", "256"], "--batch-size 512 (here 256)"),
        (["--lr", "1e-3"], "--lr [0.005] (here [0.001])"),
        (["--lr-shrink", "0.5"], "--lr-shrink 0.1 (here 0.5)"),
        (["--length-window", "16"], "--length-window 1 (here 16)"),
    ],
    ids=["seed", "batch-size", "lr", "schedule", "task"],
)
def test_changed_options_are_named(options, named, checkpoint, data, tmp_path):
    result = resumed(checkpoint, tmp_path / "run", data, *options)
    (line,) = [line for line in (result.out + result.err).splitlines() if "was trained with other options" in line]
    assert line.endswith(f"training resumes with those of this command: {named}")


def test_an_old_checkpoint_loads_with_a_warning(checkpoint, data, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    state["task_state"] = {}
    torch.save(state, tmp_path / "old.pt")
    result = run("fairseq-validate", *evaluation(data, tmp_path / "old.pt", *COMMANDS["fairseq-validate"]))
    assert result.code == 0
    assert f"Check that {data} is the very folder it was trained on" in result.out + result.err
    assert "Check that" in (lambda r: r.out + r.err)(resumed(tmp_path / "old.pt", tmp_path / "run", data))


def test_an_older_folder_trains_with_a_warning(data, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(data, folder)
    manifest = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(manifest | {"format": 1}))
    result = run("fairseq-train", *training(folder, tmp_path / "run", *SHORT))
    assert result.code == 0
    assert f"`python -m data_prep reorder {folder} --out NEW`" in result.out + result.err


def test_the_default_task_of_fairseq_is_refused(data, tmp_path):
    line = refusal(run("fairseq-train", *training(data, tmp_path / "run", *SHORT, "--task", "translation")))
    assert line.endswith("choose --task sg_translation") and not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_brings_its_task(command, checkpoint, data):
    """fairseq's commands have the task ``translation``, or none, where ``--task`` is not given."""
    arguments = evaluation(data, checkpoint, *COMMANDS[command], "--log-format", "json")
    without = [word for i, word in enumerate(arguments) if "--task" not in (word, arguments[i - 1])]
    results = [run(command, *given, text="jump twice\n") for given in (arguments, without)]

    def said(result: Result) -> list[str]:
        """Sentences, scores and metrics, without times."""
        found = re.findall(r"^[SHDT]-.*$|Generate gen.*$|\| gen \| \{.*$", result.out, re.MULTILINE)
        return [re.sub(r'"gen_wps": "[^"]*"', "", line) for line in found]

    assert [result.code for result in results] == [0, 0], results[1].err
    assert said(results[0]) and said(results[0]) == said(results[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_how_a_checkpoint_is_named(command, checkpoint, data):
    arguments = evaluation(data, checkpoint)
    for options, message in (
        (["--path", checkpoint.parent], f"--path {checkpoint.parent} is a folder: name a checkpoint in it, such as "),
        (["--model-overrides", "{'depth': "], "--model-overrides is \"{'depth': \": give a dict such as "),
        (["--model-overrides", "[1]"], "--model-overrides is '[1]': give a dict such as "),
    ):
        assert message in refusal(run(command, *arguments, *options))
    nameless = [word for i, word in enumerate(arguments) if "--path" not in (word, arguments[i - 1])]
    assert "--path is missing: name the checkpoint" in refusal(run(command, *nameless))


@pytest.mark.parametrize("option", ["--max-tokens", "--max-tokens-valid"])
def test_batches_must_have_room_for_every_sample(option, data, tmp_path):
    line = refusal(run("fairseq-train", *training(data, tmp_path / "run", *SHORT, option, "6")))
    assert re.search(rf"{option} is 6, and sample \d+ of '(train|gen)' has \d+ tokens: choose at least as many", line)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_subset_that_is_not_there(checkpoint, data, tmp_path):
    expected = f"the data folder {data} has no subset 'test': it has train, valid, gen"
    for command, options in (("fairseq-validate", ["--valid-subset", "test"]), ("fairseq-generate", [])):
        assert expected in refusal(run(command, *evaluation(data, checkpoint, "--batch-size", "64", *options)))
    assert expected in refusal(run("fairseq-train", *training(data, tmp_path, *SHORT, "--valid-subset", "test")))


def test_a_subset_whose_files_are_gone(checkpoint, data, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("gen.src-tgt*"))
    arguments = evaluation(tmp_path / "data", checkpoint, *COMMANDS["fairseq-validate"])
    assert "lacks files of its subset 'gen'" in refusal(run("fairseq-validate", *arguments))


def test_words_that_are_not_known_and_empty_lines(checkpoint, data):
    text = "jump twice\njmp twice twixe\n\n"
    printed = run("fairseq-interactive", *evaluation(data, checkpoint, "--beam", "1"), text=text).out
    warnings = [line.partition("WARNING | ")[2] for line in printed.splitlines() if "WARNING" in line]
    assert [line.partition(" | ")[2] for line in warnings] == [
        "'jmp', 'twixe' are not in the dictionary and read as <unk>: the answer to 'jmp twice twixe' means nothing",
        "an empty line was read: the answer to it means nothing",
    ]
    assert len(re.findall("^D-", printed, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    "options,message",
    [
        (
            ["--best-checkpoint-metric", "acuracy"],
            "is 'acuracy', and a validation on 'gen' measures loss, nll_loss, accuracy",
        ),
        (
            ["--best-checkpoint-metric", "accuracy"],
            "the worst checkpoint as the best: add --maximize-best-checkpoint-metric",
        ),
        (
            ["--maximize-best-checkpoint-metric"],
            "the worst checkpoint as the best: leave --maximize-best-checkpoint-metric out",
        ),
        (["--eval-bleu", "--eval-bleu-args", "{beam: 2"], "--eval-bleu-args is '{beam: 2', and must be JSON such as"),
    ],
    ids=["unknown-metric", "smallest-accuracy", "largest-loss", "bleu-arguments"],
)
def test_what_would_end_a_training_later_or_keep_its_worst_checkpoint(options, message, data, tmp_path):
    assert message in refusal(run("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options)))
    assert not list(tmp_path.rglob("*.pt"))


def test_any_metric_of_a_validation_may_choose_the_best_checkpoint(data, tmp_path):
    options = ["--orthogonality-weight", "0.1", "--best-checkpoint-metric", "orthogonality_encoder"]
    assert run("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options)).code == 0

"""Wrong input: a command fails, its last line says what is wrong and how to fix it, and nothing is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from helpers.commands import (
    LINEAR,
    RELATIVE,
    REPOSITORY,
    SHORT,
    Result,
    evaluation,
    run,
    start_training,
    succeed,
    training,
    translations,
)


def assert_refused(result: Result, message: str) -> None:
    """The command failed with one line, not with a traceback."""
    assert result.code != 0
    assert re.fullmatch(f"error: {message}", result.err.splitlines()[-1]), result.err
    assert "Traceback" not in result.out + result.err


@pytest.mark.parametrize(
    "options,message",
    [
        (
            ["--encoder-attention", "lineer"],
            r"unknown attention 'lineer' \(--encoder-attention, .*\): choose from .*linear, .*softmax.*",
        ),
        (
            [*LINEAR, "--orthogonality-weight", "1e-4", "--orthogonality-roles", "encoder,decodr"],
            r"--orthogonality-roles has 'decodr': choose from encoder, decoder, cross",
        ),
        # A resumed training would have other batches.
        (["--rebuild-batches"], "new batches each epoch are on, and --rebuild-batches .* Leave the option out"),
        (["--update-ordered-indices-seed"], "--update-ordered-indices-seed takes .*, or leave the option out"),
        (["--curriculum", "2"], "with --curriculum, fairseq keeps the order of the first epoch, .*, or leave .*"),
        (["--dataset-impl", "raw"], "--dataset-impl is raw, and data_prep writes mmap: leave it out"),
        (["--skip-remainder-batch", "--batch-size", "4096"], "--skip-remainder-batch leaves no update .* 1 batch: .*"),
        (["--ema-decay", "0.5"], "--ema-decay has no effect without --store-ema: add it, or leave the option out"),
    ],
    ids=[
        *("unknown-attention", "roles", "rebuild-batches", "seed-of-epochs", "curriculum", "kind-of-files"),
        *("no-batch-left", "averages"),
    ],
)
def test_options(options, message, data, tmp_path):
    assert_refused(run("fairseq-train", *training(data, tmp_path / "run", *options)), message)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("exists", [True, False], ids=["not-prepared", "missing"])
def test_data_folders(exists, data, tmp_path):
    folder = tmp_path / "data"
    if exists:
        shutil.copytree(data, folder, ignore=shutil.ignore_patterns("dataset.json"))
    what = "has no dataset.json" if exists else "does not exist"
    message = rf"the data folder {re.escape(str(folder))} {what}: make it with `python -m data_prep` .*"
    assert_refused(run("fairseq-train", *training(folder, tmp_path / "run")), message)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_checkpoint_that_was_cut_off(checkpoint, data, tmp_path):
    broken = tmp_path / "checkpoint_last.pt"
    broken.write_bytes(checkpoint.read_bytes()[:20_000])
    message = (
        rf"the checkpoint {re.escape(str(broken))} cannot be read: it was cut off, or is no checkpoint \(\w+: .*\)\. "
        "Restore a copy of it, or name another checkpoint"
    )
    assert_refused(run("fairseq-validate", *evaluation(data, broken, "--batch-size", "64")), message)


def refused_training(arguments: list[str], folder: Path) -> str:
    """The last line of a training that must fail, in which nothing may be written."""
    log = folder / "log"
    log.touch()
    before = {path: path.read_bytes() for path in folder.rglob("*.pt")}
    process = start_training([*arguments, "--user-dir", str(REPOSITORY / "fairseq_sg"), "--num-workers", "0"], log)
    process.join(300)
    assert process.exitcode == 1 and "Traceback" not in log.read_text(), log.read_text()[-3000:]
    assert {path: path.read_bytes() for path in folder.rglob("*.pt")} == before
    return log.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    "file,options,differs",
    [
        ("--save-dir", RELATIVE, "it lacks encoder.stack.layers.0.self_attn.content_bias, .* and 9 more"),
        (
            "--restore-file",
            ["--encoder-layers", "1"],
            "it also has encoder.stack.layers.1.self_attn.q_proj.weight, .* and 9 more",
        ),
        (
            "--finetune-from-model",
            ["--decoder-ffn-embed-dim", "48"],
            r"other sizes of decoder\.stack\.layers\.0\.\S*fc1\.weight \(\[64, 32\], here \[48, 32\]\), .* and 3 more",
        ),
    ],
    ids=["lacking", "besides", "sizes"],
)
def test_a_checkpoint_of_another_model(file, options, differs, checkpoint, data, tmp_path):
    if file == "--save-dir":
        restored = tmp_path / "run" / "checkpoint_last.pt"
        restored.parent.mkdir()
        shutil.copyfile(checkpoint, restored)
        chosen = []
    else:
        restored, chosen = checkpoint, [file, checkpoint]
    line = refused_training(training(data, tmp_path / "run", *options, *chosen), tmp_path)
    message = (
        f"error: {re.escape(str(restored))}: the checkpoint belongs to another model: {differs}. Check the options .*"
    )
    assert re.fullmatch(message, line), line


def test_a_checkpoint_of_another_optimizer(checkpoint, data, tmp_path):
    line = refused_training(
        training(data, tmp_path / "run", "--optimizer", "adam", "--restore-file", checkpoint), tmp_path
    )
    reason = "Optimizer does not match; please reset the optimizer (--reset-optimizer). TorchAdam vs FairseqAdam"
    assert line == f"error: {checkpoint}: {reason}"


def test_a_checkpoint_of_another_mechanism_with_the_same_parameters(checkpoint, data, tmp_path):
    options = ["--logit-scale", "log_length", "--orthogonality-weight", "0.5", "--restore-file", checkpoint]
    result = run("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options))
    assert result.code == 0, result.err[-5000:]
    (line,) = [line for line in (result.out + result.err).splitlines() if "was trained with other options" in line]
    assert line.endswith(
        "; training resumes with those of this command: --logit-scale sqrt_dim (here log_length), "
        "--orthogonality-weight 0.0 (here 0.5)"
    )


def test_a_checkpoint_that_does_not_fit_its_own_options(checkpoint, data):
    overrides = ["--model-overrides", "{'encoder_layers': 3}", "--batch-size", "64"]
    message = (
        r"the checkpoint belongs to another model: it lacks encoder\.stack\.layers\.2\..* and \d+ more\. "
        r"Check the options of the model \(--model-overrides in an evaluation\), .*"
    )
    assert_refused(run("fairseq-validate", *evaluation(data, checkpoint, *overrides)), message)


@pytest.mark.parametrize("command", ["fairseq-validate", "fairseq-generate"])
def test_overrides_of_an_option_that_there_is_not(command, checkpoint, data):
    overrides = ["--model-overrides", "{'encoder_layer': 2}", "--batch-size", "64"]
    message = "--model-overrides names 'encoder_layer', which is not an option of the model that is loaded"
    assert_refused(run(command, *evaluation(data, checkpoint, *overrides)), message)


def test_overrides_of_another_type(checkpoint, data):
    overrides = ["--model-overrides", "{'encoder_layers': 'two'}", "--batch-size", "64"]
    message = "--encoder-layers is 'two': choose a whole number"
    assert_refused(run("fairseq-validate", *evaluation(data, checkpoint, *overrides)), message)


def test_a_checkpoint_that_is_not_there(data, tmp_path):
    missing = tmp_path / "none.pt"
    assert_refused(
        run("fairseq-generate", *evaluation(data, missing)), f"there is no checkpoint {missing}: check --path"
    )
    line = refused_training(training(data, tmp_path / "run", "--restore-file", missing), tmp_path)
    assert line == f"error: there is no checkpoint {missing}: check --restore-file"


LEARNED = ["--position", "learned", "--learned-positions"]


def test_a_sentence_beyond_the_last_learned_position(data, tmp_path):
    """It is found before the training begins, not at the first validation."""
    line = refused_training(training(data, tmp_path / "run", *LEARNED, "8"), tmp_path)
    assert re.match(
        r"error: sample \d+ has \d+ and \d+ tokens, and the maximum is 8 and 8; .* --learned-positions ", line
    )
    assert "| begin training epoch 1" not in (tmp_path / "log").read_text()


def test_no_sentence_is_generated_beyond_the_last_learned_position(data, tmp_path):
    """``gen`` has sources to 12 tokens and targets of 6; a model that was not trained does not stop by itself."""
    arguments = [*LEARNED, "12", "--max-update", "1", "--lr", "1e-9", "--valid-subset", "gen"]
    succeed("fairseq-train", *training(data, tmp_path, *arguments))
    checkpoint = tmp_path / "checkpoint_last.pt"
    chosen = ["--gen-subset", "gen", "--batch-size", "64", "--beam", "1", "--max-len-b", "40"]
    printed = succeed("fairseq-generate", *evaluation(data, checkpoint, *chosen))
    lengths = [len(translation.hypothesis.split()) for translation in translations(printed).values()]
    assert len(lengths) == 45 and max(lengths) == 11

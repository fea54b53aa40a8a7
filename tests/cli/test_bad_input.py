"""Wrong input: a command fails, its last line says what is wrong and how to mend it, and nothing is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cli_commands import LINEAR, RELATIVE, Result, evaluation, run, succeed, training


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
            ["--qk-norm", "l2"],
            r"--qk-norm l2 has no effect on the chosen mechanisms; it is an option of: .*linear attention.*",
        ),
        (
            ["--encoder-attention-heads", "5"],
            r"the width 32 is not divisible by .* heads 5: choose another --encoder-attention-heads or .*",
        ),
        (
            [*LINEAR, "--orthogonality-weight", "1e-4", "--orthogonality-roles", "encoder,decodr"],
            r"--orthogonality-roles has 'decodr': choose from encoder, decoder, cross",
        ),
        (
            [*RELATIVE, "--position", "sinusoidal"],
            r"--position sinusoidal has no effect: relative attention brings .*; leave the option out",
        ),
        (
            ["--cross-attention", "relative"],
            r"relative attention cannot serve as 'cross' .*; choose another --cross-attention",
        ),
    ],
    ids=["unknown-attention", "option-without-effect", "heads", "roles", "positions-twice", "role-of-attention"],
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


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    """A barely trained model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    succeed("fairseq-train", *training(data, folder, "--max-update", "1", "--valid-subset", "gen"))
    return folder / "checkpoint_last.pt"


def test_a_checkpoint_that_was_cut_off(checkpoint, data, tmp_path):
    broken = tmp_path / "checkpoint_last.pt"
    broken.write_bytes(checkpoint.read_bytes()[:20_000])
    message = (
        rf"the checkpoint {re.escape(str(broken))} is not a whole file of torch's: .* name another one with --path .*"
    )
    assert_refused(run("fairseq-validate", *evaluation(data, broken, "--batch-size", "64")), message)


def test_a_checkpoint_of_another_model(checkpoint, data, tmp_path):
    arguments = training(data, tmp_path / "run", *RELATIVE, "--restore-file", checkpoint)
    result = run("fairseq-train", *arguments)
    assert result.code != 0
    message = f"Cannot load model parameters from checkpoint {checkpoint}; please ensure that the architectures match."
    assert result.err.splitlines()[-1] == f"Exception: {message}"
    assert not list(tmp_path.rglob("*.pt"))

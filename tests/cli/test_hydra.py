"""``fairseq-hydra-train`` with the configuration that is shipped, and evaluation from its checkpoint."""

from __future__ import annotations

import re

import pytest
import torch
from cli_commands import REPOSITORY, evaluation, metrics, run, succeed, translations

import fairseq_sg  # noqa: F401
from fairseq_sg.models.architectures import ARCHITECTURES

TINY = ["common.cpu=true", "optimization.max_update=6", "dataset.batch_size=16", "dataset.batch_size_valid=64"]


def hydra(*overrides: object, cwd=REPOSITORY):
    arguments = ["--config-dir", REPOSITORY / "fairseq_sg" / "config", "--config-name", "scan", *TINY, *overrides]
    return run("fairseq-hydra-train", *arguments, cwd=cwd, PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """A folder in which the shipped configuration was trained, with paths relative to it."""
    folder = tmp_path_factory.mktemp("hydra")
    (folder / "data").symlink_to(data)
    more = [
        f"common.user_dir={REPOSITORY / 'fairseq_sg'}",
        "task.data=data",
        "checkpoint.save_dir=run",
        "+model.decoder_layers=2",
    ]
    result = hydra(*more, cwd=folder)
    assert result.code == 0, result.out + result.err
    assert re.search(r"valid on 'gen' subset \| loss .* accuracy", result.out)
    return folder


def test_architecture_options_and_overrides_arrive(folder):
    model = torch.load(folder / "run" / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    chosen = {
        "encoder_attention": "linear",
        "cross_attention": "linear",
        "qk_norm": "l2",
        "depth": "shared",
        "dropout": 0.1,
    }
    assert {name: model[name] for name in chosen} == chosen
    sizes = ARCHITECTURES["sg_transformer_scan"] | {"decoder_layers": 2}
    assert {name: model[name] for name in sizes} == sizes


def test_only_checkpoints_are_written(folder):
    assert {path.name for path in folder.iterdir()} == {"data", "run"}
    assert {path.name for path in (folder / "run").iterdir()} == {"checkpoint_best.pt", "checkpoint_last.pt"}


def test_its_checkpoint_validates_and_generates(folder, data):
    checkpoint = folder / "run" / "checkpoint_best.pt"
    more = ["--batch-size", "64", "--valid-subset", "valid", "--log-format", "json"]
    assert len(metrics(succeed("fairseq-validate", *evaluation(data, checkpoint, *more)), "valid")) == 1
    more = ["--batch-size", "64", "--gen-subset", "gen", "--scoring", "exact_match", "--beam", "1", "--max-len-b", "10"]
    assert len(translations(succeed("fairseq-generate", *evaluation(data, checkpoint, *more)))) == 45


@pytest.mark.parametrize(
    "override,message",
    [
        ("+model.encoder_atention=linear", r"Key 'encoder_atention' not in 'SGTransformerConfig'"),
        ("model.qk_norm=l3", r"unknown query/key normalization 'l3' \(--qk-norm\): choose from l1, l2, none, rms"),
    ],
    ids=["misspelt", "unknown"],
)
def test_wrong_options_are_refused(override, message, data, tmp_path):
    result = hydra(f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", override)
    assert result.code != 0
    assert re.search(message, result.err), result.err
    assert not list(tmp_path.rglob("*.pt"))


def test_no_data_is_refused(tmp_path):
    result = hydra(f"checkpoint.save_dir={tmp_path / 'run'}")
    assert result.code != 0 and "the data folder (none was given) does not exist" in result.err

"""``fairseq-hydra-train`` with the configuration that is shipped, and evaluation from its checkpoint."""

from __future__ import annotations

import re

import pytest
import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.models.architectures import ARCHITECTURES
from helpers.commands import REPOSITORY, check, evaluation, launch, metrics, run, succeed, translations

TINY = ["common.cpu=true", "optimization.max_update=6", "dataset.batch_size=16", "dataset.batch_size_valid=64"]


def hydra(*overrides: object, cwd=REPOSITORY):
    arguments = ["--config-dir", REPOSITORY / "fairseq_sg" / "config", "--config-name", "scan", *TINY, *overrides]
    return launch("fairseq-hydra-train", *arguments, cwd=cwd, PYTHONWARNINGS="ignore")


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


CONFIG = ["--config-dir", REPOSITORY / "fairseq_sg" / "config", "--config-name", "scan", *TINY]

MISTAKES = {
    "model.qk_norm=l3": r"unknown query/key normalization 'l3' \(--qk-norm\): choose from l1, l2, none, rms",
    "model.dropout=-1": "--dropout is -1.0: choose a number from 0 to 1",
    "+model.encoder_atention=linear": "model.encoder_atention is no option of sg_transformer_scan: did you mean "
    "model.encoder_attention or .*",
    "+model.encoder_layers=three": "encoder_layers: Value 'three' of type 'str' could not be converted to Integer",
    "model._name=sg_transformer_scn": "model._name is 'sg_transformer_scn': did you mean sg_transformer_scan or .*",
    "optimization.clip_norm=-1": "--clip-norm is -1.0: choose 0 or more",
}


@pytest.mark.parametrize("override,message", MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line(override, message, data, tmp_path):
    """hydra's warnings of fairseq's age come before the plugin is loaded; nothing comes after the message."""
    result = run(
        "fairseq-hydra-train", *CONFIG, f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", override
    )
    assert result.code == 1 and re.fullmatch(f"error: {message}", result.err.splitlines()[-1]), result.err
    assert "Traceback" not in result.err and "Error executing job" not in result.err
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("command", ["fairseq-hydra-train", "fairseq_sg.hydra_train"])
def test_what_the_configuration_asks_for_must_be_given(command, data, tmp_path):
    given = {"task.data": data, "checkpoint.save_dir": tmp_path / "run"}
    for missing in given:
        overrides = [f"{key}={value}" for key, value in given.items() if key != missing]
        overrides.append(f"common.user_dir={REPOSITORY / 'fairseq_sg'}")
        result = run(command, *CONFIG, *overrides, cwd=tmp_path)
        assert result.code == 1 and result.err.splitlines()[-1] == f"error: {missing} is missing: give {missing}=…"
    assert not list(tmp_path.iterdir())


PLAIN = {
    "model.qk_norn=l2": "there is no option model.qk_norn: did you mean model.qk_norm or model.norm or model.pre_norm?",
    "model.encoder_layers=2": "model.encoder_layers is not set in the file of the configuration: put a plus before it, "
    "+model.encoder_layers=…",
    "common.log_intervall=2": "there is no option common.log_intervall: did you mean common.log_interval or "
    "common.log_file or common.log_format?",
    "modl.dropout=0": "there is no group of options modl: did you mean model?",
    "common.log_interval=x": "Error merging override common.log_interval=x Value 'x' of type 'str' could not be "
    "converted to Integer",
    "common.seed=-1": "--seed is -1: choose 0 or more",
}


@pytest.mark.parametrize("override,message", PLAIN.items(), ids=PLAIN)
def test_with_the_plugin_loaded_first_hydra_s_own_errors_are_one_line_too(override, message, data, tmp_path):
    result = run(
        "fairseq_sg.hydra_train", *CONFIG, f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", override
    )
    assert result.code == 1 and result.out + result.err == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["fairseq-hydra-train", "fairseq_sg.hydra_train"])
def test_a_misspelt_configuration_is_named(command, data, tmp_path):
    config = [*CONFIG[:2], "--config-name", "scann"]
    overrides = [f"+task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}"]
    overrides.append(f"common.user_dir={REPOSITORY / 'fairseq_sg'}")
    result = run(command, *config, *overrides, cwd=tmp_path)
    assert result.code == 1 and "Traceback" not in result.err
    message = f"error: --config-name is 'scann', and {CONFIG[1]} has no scann.yaml: "
    assert result.err.splitlines()[-1].startswith(message) and "scan" in result.err.rpartition(message)[2]
    assert not list(tmp_path.rglob("*.pt"))


def test_jobs_of_a_sweep_that_share_a_folder_are_refused(data, tmp_path):
    """The second would find the checkpoint of the first. A sweep with folders of its own runs, and runs again."""
    common = [f"hydra.sweep.dir={tmp_path / 'sweep'}", f"task.data={data}", "optimization.max_update=1"]
    common += ["dataset.max_valid_steps=1", "dataset.num_workers=0", "model.qk_norm=l1,l2"]
    for _ in range(2):
        done = run(
            "fairseq_sg.hydra_train", "-m", *CONFIG, *common, f"checkpoint.save_dir={tmp_path}/${{model.qk_norm}}"
        )
        assert done.code == 0, done.err
    assert all((tmp_path / norm / "checkpoint_last.pt").exists() for norm in ("l1", "l2"))
    refused = run("fairseq_sg.hydra_train", "-m", *CONFIG, *common, f"checkpoint.save_dir={tmp_path}/shared")
    message = f"the checkpoint {tmp_path}/shared/checkpoint_last.pt was trained with other options: --qk-norm l1 "
    assert refused.code == 1 and message in refused.err and "put the swept options into it" in refused.err


def test_a_training_with_the_plugin_loaded_first_prints_no_noise(data, tmp_path):
    """In a process of its own: some of the noise is of imports. The advice of the configuration's file is followed."""
    overrides = [f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", "+model.encoder_layers=1"]
    overrides += ["common.log_interval=2", "+optimizer.adam_betas='(0.9, 0.98)'", "dataset.num_workers=0"]
    printed = check(launch("python", "-m", "fairseq_sg.hydra_train", *CONFIG, *overrides))
    assert "DEBUG" not in printed and "version_base" not in printed and "done training" in printed
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    assert state["cfg"]["model"]["encoder_layers"] == 1
    assert state["last_optimizer_state"]["param_groups"][0]["betas"] == (0.9, 0.98)

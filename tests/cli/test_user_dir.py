"""``--user-dir``: from the clone (all other tests), from elsewhere by its path and name; of a user's own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from helpers.commands import REPOSITORY, check, launch, metrics, run, training

SHORT = ["--max-update", "2", "--valid-subset", "valid"]


def test_from_another_folder_by_its_path(data, tmp_path):
    printed = check(
        launch("fairseq-train", *training(data, "run", *SHORT, "--user-dir", REPOSITORY / "fairseq_sg"), cwd=tmp_path)
    )
    assert len(metrics(printed, "valid")) == 1 and (tmp_path / "run" / "checkpoint_last.pt").is_file()


def test_from_another_folder_by_its_name(data, tmp_path):
    if not Path(sys.prefix, ".fairseq_sg").is_file():
        pytest.skip("this environment was not made by scripts/setup.sh")
    printed = check(launch("fairseq-train", *training(data, "run", *SHORT), cwd=tmp_path))
    assert len(metrics(printed, "valid")) == 1 and (tmp_path / "run" / "checkpoint_last.pt").is_file()
    code = check(launch("python", "-c", "import fairseq_sg.ops as o; print(o.__file__)", cwd=tmp_path))
    assert Path(code.strip()) == REPOSITORY / "fairseq_sg" / "ops" / "__init__.py"


@pytest.fixture
def mine(tmp_path):
    """The folder of the first example of docs/extending.md."""
    code = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs" / "extending.md").read_text(), re.DOTALL)[1]
    folder = tmp_path / "my_attentions"
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    return folder


def test_attention_of_a_users_own_directory(data, mine, tmp_path):
    """The example of docs/extending.md, with its option, in training and, from the checkpoint alone, in validation."""
    environment = {"PYTHONPATH": str(REPOSITORY)}
    options = ["--encoder-attention", "mean", "--mean-scale", "2", "--user-dir", mine]
    check(run("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options), **environment))
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    program = (
        "import fairseq_sg.plugin, my_attentions, sys\n"
        "from fairseq.checkpoint_utils import load_model_ensemble\n"
        "(model,), _ = load_model_ensemble([sys.argv[1]])\n"
        "attention = model.encoder.stack.layers[1].self_attn\n"
        "print(type(attention).__name__, attention.mean_scale)\n"
    )
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    printed = run("-c", program, checkpoint, cwd=tmp_path, **environment)
    assert printed.out.splitlines()[-1] == "MeanAttention 2.0", printed.err
    other = tmp_path / "other_attentions"
    other.mkdir()
    (other / "__init__.py").write_text("")
    for given in ([], ["--user-dir", other]):
        missing = run("fairseq_sg.evaluate", checkpoint, *given, **environment)
        assert missing.code == 1 and missing.err.startswith("error: unknown attention 'mean'"), missing.err
        assert missing.err.endswith(f"{checkpoint} was trained with --user-dir {mine}, so give that\n")
    assert "subset" in check(run("fairseq_sg.evaluate", checkpoint, "--user-dir", mine, **environment))
    shown = check(run("fairseq_sg.options", "mean", "--user-dir", mine, **environment))
    assert shown.startswith("attention mean, chosen by --encoder-attention, ") and "  --mean-scale\n" in shown
    nowhere = run("fairseq_sg.options", "mean", "--user-dir", tmp_path / "nowhere", **environment)
    assert nowhere.code == 2 and nowhere.err.startswith(f"error: there is no folder {tmp_path / 'nowhere'}: ")
    wrong = run(
        "fairseq-train",
        *training(data, tmp_path / "no", *SHORT, "--mean-scale", "2", "--user-dir", mine),
        **environment,
    )
    assert "--mean-scale 2.0 has no effect on the chosen mechanisms" in wrong.err.splitlines()[-1]


def test_a_decoder_that_sees_later_words(data, mine, tmp_path):
    """The example of docs/extending.md hides nothing: as a decoder's, it is refused before its first update."""
    code = (mine / "__init__.py").read_text()
    (mine / "__init__.py").write_text(code.replace('{"encoder", "cross"}', '{"encoder", "decoder", "cross"}'))
    options = ["--decoder-attention", "mean", "--user-dir", mine]
    refused = run("fairseq-train", *training(data, tmp_path / "run", *SHORT, *options), PYTHONPATH=str(REPOSITORY))
    assert refused.code == 1 and refused.err.splitlines()[-1].startswith(
        "error: this decoder, which has my_attentions.MeanAttention, sees later words: "
    )


def test_attention_of_a_users_own_directory_under_hydra(data, mine, tmp_path):
    config = ["--config-dir", REPOSITORY / "fairseq_sg" / "config", "--config-name", "scan", "common.cpu=true"]
    config += ["optimization.max_update=1", f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}"]
    config += [f"common.user_dir={mine}", "model.encoder_attention=mean", "model.qk_norm=none", "dataset.num_workers=0"]
    unset = run("fairseq_sg.hydra_train", *config, "model.mean_scale=2")
    assert unset.err == (
        "error: model.mean_scale is not set in the file of the configuration: put a plus before it, "
        "+model.mean_scale=…\n"
    )
    check(run("fairseq_sg.hydra_train", *config, "+model.mean_scale=2"))
    model = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    assert (model["encoder_attention"], model["mean_scale"]) == ("mean", 2.0)

"""The task of functions: batches of several grids, folders, models and criteria that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from omegaconf import DictConfig, OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.sg_operator import FieldDataset, SGOperatorTask, SGOperatorTaskConfig
from helpers.fields import write_waves
from helpers.prompts import write_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_waves(tmp_path_factory.mktemp("waves") / "out")


def task(folder: Path) -> SGOperatorTask:
    return SGOperatorTask.setup_task(SGOperatorTaskConfig(data=str(folder), train_subset="train"))


@pytest.mark.parametrize(("subset", "points"), [("train", 32), ("test", 32), ("test_64", 64), ("test_128", 128)])
def test_a_batch_has_the_functions_and_the_grid_of_its_subset(subset, points, folder):
    of = task(folder)
    of.load_dataset(subset)
    dataset = of.dataset(subset)
    batch = dataset.collater([dataset[4], dataset[1]])
    for name, found in (
        ("input", batch["net_input"]["a"]),
        ("target", batch["target"]),
        ("gradient", batch["gradient"]),
    ):
        np.testing.assert_array_equal(found.numpy(), np.load(folder / f"{subset}.{name}.npy")[[4, 1]])
    assert batch["net_input"]["a"].dtype == torch.float32
    assert batch["target"].dtype == batch["gradient"].dtype == batch["net_input"]["axis"].dtype == torch.float64
    np.testing.assert_allclose(batch["net_input"]["axis"], np.arange(points) / points, rtol=1e-15)
    assert batch["spacing"] == pytest.approx(1 / points) and batch["id"].tolist() == [4, 1]
    assert (batch["nsentences"], batch["ntokens"], dataset.size(0)) == (2, 2 * points, points)
    assert dataset.collater([]) == {}


def test_the_distance_of_points_is_that_of_the_targets_grid(folder):
    """Data of an inverse problem have targets on a coarser grid."""
    facts = task(folder).fields._replace(periodic=False)
    dataset = FieldDataset(facts, {"input": np.zeros((2, 9), "float32"), "target": np.zeros((2, 5), "float32")})
    assert dataset.collater([dataset[0]])["spacing"] == 1 / 4


def test_shared_points_have_equal_coordinates(folder):
    facts = task(folder).fields
    torch.testing.assert_close(facts.axis(64)[::2], facts.axis(32), rtol=0, atol=0)
    nodes = facts._replace(periodic=False)
    torch.testing.assert_close(nodes.axis(7)[::2], nodes.axis(4))
    assert nodes.axis(5)[-1] == 1


def test_evaluation_has_every_function(folder):
    of = task(folder)
    of.load_dataset("test")
    itr = of.get_batch_iterator(of.dataset("test"), max_sentences=4, required_batch_size_multiple=8)
    assert sorted(i for b in itr.next_epoch_itr(shuffle=False) for i in b["id"].tolist()) == list(range(9))


def test_the_record_of_the_data(folder):
    assert task(folder).trained_on["requests"][0]["dataset"] == "burgers" and task(folder).max_positions() is None


def test_a_folder_of_other_data(tmp_path):
    with pytest.raises(UsageError, match="has no functions on grids: make a folder with `python -m data_prep burgers`"):
        task(write_prompts(tmp_path / "prompts"))
    with pytest.raises(UsageError, match="takes one folder"):
        SGOperatorTask.setup_task(SGOperatorTaskConfig(data="a:b"))


def test_wrong_subsets_and_files(folder, tmp_path):
    of = task(folder)
    with pytest.raises(UsageError, match="has no subset 'test_512': it has train, valid, test, test_64, test_128"):
        of.load_dataset("test_512")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "test.target.npy").write_bytes((folder / "test.target.npy").read_bytes()[:90])
    (broken / "valid.gradient.npy").unlink()
    for subset, message in (("test", "subset 'test' of .* cannot be read"), ("valid", "lacks files of its subset")):
        with pytest.raises(UsageError, match=message):
            task(broken).load_dataset(subset)


def test_another_version(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "old")
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["origin"]["version"] = 0
    (tmp_path / "old" / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="was made by version 0 of its generator, and the task needs version 1"):
        task(tmp_path / "old")


def test_models_and_criteria_that_do_not_fit(folder):
    of = task(folder)
    with pytest.raises(UsageError, match="this --arch predicts no functions"):
        of.build_model(OmegaConf.create({"_name": "sg_regressor"}))
    with pytest.raises(UsageError, match="choose --criterion relative_l2"):
        of.build_criterion(DictConfig({"_name": "cross_entropy", "sentence_avg": True}))
    with pytest.raises(UsageError, match="generates no text"):
        of.build_generator([], None)


def test_a_batch_of_fewer_points_than_a_function(folder):
    of = task(folder)
    of.load_dataset("test")
    with pytest.raises(UsageError, match="--max-tokens is 31, and a function has 32 tokens"):
        of.get_batch_iterator(of.dataset("test"), max_tokens=31)


@pytest.mark.parametrize("array, part", [("input", np.s_[:3]), ("target", np.s_[:3]), ("gradient", np.s_[:, :16])])
def test_arrays_that_do_not_fit(array, part, folder, tmp_path):
    """Fewer functions than the other arrays have, and gradients on another grid than the targets."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    np.save(copy / f"test.{array}.npy", np.load(copy / f"test.{array}.npy")[part])
    with pytest.raises(
        UsageError, match=r"test\.\w+\.npy has float32 \(.*\), and float32 \(.*\) is needed: prepare the"
    ):
        task(copy).load_dataset("test")

"""The task of prompts: the same ones for any number of workers and after a resume, frozen tests, errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from omegaconf import DictConfig

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.regression import Regression
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.sg_regression import DrawnPrompts, SGRegressionConfig, SGRegressionTask
from helpers.prompts import SIZES, write_prompts
from helpers.workers import end_workers

EPOCH = 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "out")


def task(folder: Path, **options) -> SGRegressionTask:
    values = {"epoch_size": EPOCH, "train_subset": "train", "seed": 1} | options
    return SGRegressionTask.setup_task(SGRegressionConfig(data=str(folder), **values))


def iterator(of: SGRegressionTask, workers: int = 0, epoch: int = 1, **options):
    """fairseq's iterator over the batches of training, as its trainer makes it."""
    return of.get_batch_iterator(
        of.dataset("train"),
        max_sentences=4,
        seed=1,
        num_workers=workers,
        epoch=epoch,
        grouped_shuffling=False,
        **options,
    )


def batches(of: SGRegressionTask, epochs: int, workers: int) -> list[dict]:
    of.load_dataset("train")
    found, epoch = [], 1
    while epoch <= epochs:
        batches_of_epoch = iterator(of, workers, epoch)
        found += list(batches_of_epoch.next_epoch_itr())
        epoch = batches_of_epoch.next_epoch_idx
    end_workers(batches_of_epoch)
    return found


def same(one: list[dict], two: list[dict]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a["id"], b["id"])
        and torch.equal(a["net_input"]["x"], b["net_input"]["x"])
        and torch.equal(a["target"], b["target"])
        for a, b in zip(one, two, strict=True)
    )


def test_batches_are_the_prompts_of_their_epoch(folder):
    of = task(folder)
    found = batches(of, 2, workers=0)
    assert sorted(i for batch in found[:4] for i in batch["id"].tolist()) == list(range(EPOCH))
    for number, batch in enumerate(found):
        x, y, target = batch["net_input"]["x"], batch["net_input"]["y"], batch["target"]
        assert (x.dtype, y.dtype, target.dtype) == (torch.float32, torch.float32, torch.float64)
        assert batch["ntokens"] == 11 * batch["nsentences"] == 11 * len(x)
        torch.testing.assert_close(y.double(), target[:, :-1], rtol=0, atol=0)
        for index, row, values in zip(batch["id"].tolist(), x, target, strict=True):
            expected = of.prompts.draw(1, "train", 1 + number // 4, index)
            assert (row.numpy() == expected[0]).all() and (values.numpy() == expected[1]).all()


def test_the_value_of_the_query_is_no_input(folder):
    batch = batches(task(folder), 1, workers=0)[0]
    inputs = torch.cat([value.flatten() for value in batch["net_input"].values()]).double()
    assert not torch.isin(batch["target"][:, -1], inputs).any()
    assert torch.isin(batch["target"][:, :-1], inputs).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers, folder):
    """fairseq keeps workers between epochs, with a copy of the dataset of the epoch in which they started."""
    assert same(batches(task(folder), 3, workers), batches(task(folder), 3, workers=0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_within_an_epoch_changes_nothing(workers, folder):
    whole = batches(task(folder), 2, workers=0)
    of = task(folder)
    of.load_dataset("train")
    stopped = iterator(of, workers, epoch=2)
    batches_of_epoch = stopped.next_epoch_itr()
    first = [next(batches_of_epoch) for _ in range(2)]
    state = stopped.state_dict()
    of = task(folder)
    of.load_dataset("train")
    resumed = iterator(of, workers, epoch=state["epoch"])
    resumed.load_state_dict(state)
    assert same(first + list(resumed.next_epoch_itr()), whole[4:])
    end_workers(stopped, resumed)


def test_seeds_and_epochs_have_other_prompts(folder):
    found = [batches(task(folder, seed=seed), 2, workers=0) for seed in (1, 2)]
    x = torch.cat([batch["net_input"]["x"] for of_seed in found for batch in of_seed])
    assert len({row.numpy().tobytes() for row in x}) == 4 * EPOCH


def test_shards_share_an_epoch(folder):
    of = task(folder)
    of.load_dataset("train")
    ids = [
        i
        for shard in range(2)
        for batch in iterator(of, num_shards=2, shard_id=shard).next_epoch_itr()
        for i in (batch["id"].tolist() if batch else ())
    ]
    assert sorted(ids) == list(range(EPOCH))


def test_a_copy_of_the_dataset_draws_the_same(folder):
    of = task(folder)
    dataset = DrawnPrompts(of.prompts, EPOCH, 5, "train")
    dataset.set_epoch(3)
    copy = pickle.loads(pickle.dumps(dataset))
    assert all((a == b).all() for i in (4, 2) for a, b in zip(dataset.prompt(i), copy.prompt(i), strict=True))


def test_frozen_subsets(folder):
    """Every prompt of the file, also where the number is no multiple of 8, in every epoch the same."""
    of = task(folder)
    for subset, points in (("valid", 6), ("test", 6), ("x_double", 6), ("query_orthogonal", 3)):
        of.load_dataset(subset)
        found = []
        for epoch in (1, 2):
            rows = of.get_batch_iterator(
                of.dataset(subset), max_sentences=8, required_batch_size_multiple=8, epoch=epoch
            ).next_epoch_itr(shuffle=False)
            found.append(torch.cat([batch["target"] for batch in rows]))
        assert found[0].shape == (21, points) and torch.equal(*found)
        assert (found[0].numpy() == np.load(folder / f"{subset}.y.npy")).all()


def test_other_names_of_the_training_set(folder):
    """``--train-subset`` names the subset that is drawn, and with it its prompts."""
    of = task(folder, train_subset="valid")
    of.load_dataset("valid")
    assert len(of.dataset("valid")) == EPOCH
    assert (of.dataset("valid")[0]["x"].numpy() == of.prompts.draw(1, "valid", 1, 0)[0]).all()


def built(of: SGRegressionTask, arch: str, **options):
    return of.build_model(DictConfig({"_name": arch, **options}))


def test_long_prompts_are_refused(folder):
    of = task(folder)
    of.load_dataset("valid")
    model = built(of, "sg_regressor", **SIZES, position="learned", learned_positions=9)
    with pytest.raises(UsageError, match="sample 0 has 11 tokens, and the maximum is 9; .*--learned-positions"):
        of.get_batch_iterator(of.dataset("valid"), max_sentences=8, max_positions=model.max_positions())


def test_batches_without_room_for_a_prompt(folder):
    of = task(folder)
    of.load_dataset("train")
    with pytest.raises(UsageError, match="--max-tokens is 10, and a prompt has 11 tokens: choose at least as many"):
        of.get_batch_iterator(of.dataset("train"), max_tokens=10, grouped_shuffling=False)
    rows = of.get_batch_iterator(of.dataset("train"), max_tokens=25, seed=1, grouped_shuffling=False).next_epoch_itr()
    assert sorted(batch["nsentences"] for batch in rows) == [1] + [2] * 6


def test_other_models_and_criteria_are_refused(folder):
    of = task(folder)
    with pytest.raises(UsageError, match="this --arch predicts no numbers: choose .* --arch sg_regressor"):
        built(of, "sg_encoder")
    with pytest.raises(UsageError, match="choose --criterion regression"):
        of.build_criterion(DictConfig({"_name": "cross_entropy", "sentence_avg": False}))
    assert isinstance(of.build_criterion(DictConfig({"_name": "regression"})), Regression)
    with pytest.raises(UsageError, match="a regressor generates no text"):
        of.build_generator([], None)
    with pytest.raises(UsageError, match="fairseq-eval-lm is for language models: use fairseq-validate"):
        of.eval_lm_dataloader(None)


def rewritten(folder: Path, tmp_path: Path, **entries) -> Path:
    (tmp_path / "dataset.json").write_text(json.dumps(json.loads((folder / "dataset.json").read_text()) | entries))
    return tmp_path


def test_wrong_folders(folder, tmp_path):
    with pytest.raises(UsageError, match=f"the data folder {tmp_path}/nothing does not exist: make it with"):
        task(tmp_path / "nothing")
    with pytest.raises(UsageError, match="takes one folder, not 'a:b'"):
        task(Path("a:b"))
    with pytest.raises(UsageError, match="has no prompts: make a folder with `python -m data_prep in_context`"):
        task(rewritten(folder, tmp_path, origin={}))
    with pytest.raises(UsageError, match="was made by version 0 of its generator.* version 1: make the data in a new"):
        task(rewritten(folder, tmp_path, origin={"generator": "data_prep.in_context", "version": 0}))
    with pytest.raises(UsageError, match="--epoch-size is 0: choose 1 or more"):
        task(folder, epoch_size=0)


def test_missing_subsets(folder, tmp_path):
    with pytest.raises(UsageError, match="has no subset 'gen': it has valid, test, x_double, query_orthogonal"):
        task(folder).load_dataset("gen")
    of = task(rewritten(folder, tmp_path))
    with pytest.raises(UsageError, match="lacks files of its subset 'valid'"):
        of.load_dataset("valid")
    (tmp_path / "valid.x.npy").write_bytes(b"cut off")
    with pytest.raises(UsageError, match="the files of subset 'valid' of .* cannot be read, and may be cut off"):
        of.load_dataset("valid")


@pytest.mark.parametrize("array, change", [("x", 3), ("y", 3), ("x", "float64"), ("y", "int32")])
def test_arrays_that_do_not_fit(array, change, folder, tmp_path):
    """Fewer samples than the other array has, and another type."""
    for name in "xy":
        values = np.load(folder / f"valid.{name}.npy")
        changed = values[:change] if isinstance(change, int) else values.astype(change)
        np.save(tmp_path / f"valid.{name}.npy", changed if name == array else values)
    with pytest.raises(UsageError, match=r"valid\.[xy]\.npy has \w+ \(.*\), and float32 \(.*\) is needed: prepare the"):
        task(rewritten(folder, tmp_path)).load_dataset("valid")


def test_checkpoints_record_the_request(folder, tmp_path):
    of = task(folder)
    record = of.state_dict()["trained_on"]
    assert record["dictionaries"] == {} and record["requests"][0]["function"] == "linear"
    of.load_state_dict({"trained_on": record})
    of.check_resumed(record, new_data=False)
    other = task(write_prompts(tmp_path / "other", "--seed", 2))
    other.load_state_dict({"trained_on": record})  # an evaluation on other prompts
    with pytest.raises(UsageError, match="has other data \\(seed was 1, and here it is 2\\)"):
        other.check_resumed(record, new_data=False)

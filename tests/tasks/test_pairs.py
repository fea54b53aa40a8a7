"""Batches of pairs padded at once are fairseq's, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import numpy as np
import torch
from fairseq.data import AppendTokenDataset, LanguagePairDataset
from hypothesis import given
from hypothesis import strategies as st

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask
from helpers.small_folders import random_pairs, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "pairs", {"train": random_pairs(80, 1)})


def dataset_of(folder, multiple: int = 1, **options):
    defaults = {"train_subset": "train", "dataset_impl": None, "required_seq_len_multiple": multiple}
    task = SGTranslationTask.setup_task(SGTranslationConfig(data=str(folder), **defaults, **options))
    task.load_dataset("train")
    return task.dataset("train")


def same(found, expected) -> bool:
    """The same keys in the same order, types, values, dtypes and strides."""
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[name], expected[name]) for name in expected)
    if torch.is_tensor(expected):
        layout = found.dtype, found.stride()
        return torch.equal(found, expected) and layout == (expected.dtype, expected.stride())
    return type(found) is type(expected) and found == expected


@given(
    numbers=st.lists(st.integers(0, 79), min_size=1, max_size=20),
    multiple=st.sampled_from([1, 4, 8]),
    no_source_bos=st.booleans(),
    left_pad_source=st.booleans(),
    left_pad_target=st.booleans(),
)
def test_batches_are_those_of_fairseq(folder, numbers, multiple, **options):
    dataset = dataset_of(folder, multiple, **options)
    numbers = [np.int64(number) for number in numbers]
    samples = dataset.__getitems__(numbers)
    assert samples == numbers
    expected = LanguagePairDataset.collater(dataset, [dataset[number] for number in numbers])
    assert same(dataset.collater(samples), expected)


def test_other_data_are_padded_by_fairseq(folder):
    """Data that are not in one file, and what the fast way does not know."""
    dataset = dataset_of(folder)
    whole = dataset.collater(dataset.__getitems__([3, 1, 2]))
    for change in (
        {"src": [dataset.src[number] for number in range(80)]},
        {"tgt": AppendTokenDataset(dataset.tgt)},
        {"append_bos": True},
        {"input_feeding": False},
        {"src_lang_id": 1},
    ):
        before = {name: getattr(dataset, name) for name in change}
        vars(dataset).update(change)
        samples = dataset.__getitems__([3, 1, 2])
        assert [sample["id"] for sample in samples] == [3, 1, 2]
        batch = dataset.collater(samples)
        assert torch.equal(batch["id"], whole["id"])
        assert ("prev_output_tokens" in batch["net_input"]) == ("input_feeding" not in change)
        assert ("src_lang_id" in batch["net_input"]) == ("src_lang_id" in change)
        vars(dataset).update(before)
    assert dataset.collater([]) == {}

"""Accuracy by type: the counts against a loop over the sentences, workers that add up, folders that do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.logging import metrics

from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.cross_entropy_orthogonality import (
    CrossEntropyOrthogonality,
)
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.breakdown import Breakdown, log_breakdown, sums_of_logs
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask
from helpers.small_folders import random_pairs, write_folder

TYPES = ["deep", "flat", "flat", "odd", "deep", "flat", "deep"]
GROUPS = {"structural": ["deep"], "lexical": ["flat", "odd"]}


@pytest.fixture
def typed(tmp_path):
    """A folder whose ``gen`` has types, and ``valid`` has none."""
    subsets = {"train": random_pairs(20, 1), "valid": random_pairs(5, 2), "gen": random_pairs(len(TYPES), 3)}
    folder = write_folder(tmp_path / "bin", subsets)
    (folder / "raw").mkdir()
    write_types(folder, TYPES)
    counts = {kind: TYPES.count(kind) for kind in set(TYPES)}
    manifest = {"subsets": {"train": {"types": {"no": 1}}, "valid": {}, "gen": {"types": counts}}, "groups": GROUPS}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


def write_types(folder, kinds) -> None:
    (folder / "raw" / "gen.type").write_text("".join(f"{kind}\n" for kind in kinds))


def task(folder, **values) -> SGTranslationTask:
    defaults = dict(train_subset="train", dataset_impl=None, required_seq_len_multiple=1)
    return SGTranslationTask.setup_task(SGTranslationConfig(data=str(folder), **(defaults | values)))


class Answers(torch.nn.Module):
    """A model that answers the sentences in ``right`` with their targets and others with the begin symbol."""

    def __init__(self, targets, right, symbols):
        super().__init__()
        self.answer = torch.where(right[:, None], targets, torch.zeros_like(targets))
        self.symbols = symbols

    def forward(self, **inputs):
        return torch.nn.functional.one_hot(self.answer, self.symbols).float() * 9, {}


def evaluate(built, indices, right):
    """The criterion's logs on some samples of ``gen``, of which those in ``right`` are answered."""
    dataset = built.dataset("gen")
    batch = dataset.collater([dataset[i] for i in indices])
    model = Answers(batch["target"], torch.tensor([int(i) in right for i in batch["id"]]), len(built.target_dictionary))
    criterion = CrossEntropyOrthogonality(SGCriterionConfig(sentence_avg=False), built).eval()
    return criterion(model, batch)[2]


def logged(logs) -> dict:
    with metrics.aggregate() as values:
        CrossEntropyOrthogonality.reduce_metrics(logs)
    return {key: value for key, value in values.get_smoothed_values().items() if key.startswith("accuracy")}


def percent(kinds, right) -> float:
    members = [i for i, kind in enumerate(TYPES) if kind in kinds]
    return round(100 * sum(i in right for i in members) / len(members), 4)


@pytest.mark.parametrize("accuracy_by", ["groups", "types", "none"])
def test_accuracy_of_groups_and_types(typed, accuracy_by):
    built, right = task(typed, accuracy_by=accuracy_by), {0, 2, 3}
    built.load_dataset("gen")
    logs = [evaluate(built, [4, 1, 0], right), evaluate(built, [6, 2, 5, 3], right)]
    expected = {"accuracy": round(100 * 3 / 7, 4)}
    if accuracy_by != "none":
        expected |= {f"accuracy_{name}": percent(kinds, right) for name, kinds in GROUPS.items()}
    if accuracy_by == "types":
        expected |= {f"accuracy_{kind}": percent([kind], right) for kind in set(TYPES)}
    assert logged(logs) == expected


def test_workers_log_the_same_entries_whatever_they_were_given(typed):
    built = task(typed, accuracy_by="types")
    built.load_dataset("gen")
    first, second = evaluate(built, [0, 4], {0}), evaluate(built, [1, 3], set())
    assert list(first) == list(second)
    assert "accuracy_odd" not in logged([first]) and logged([first])["accuracy_deep"] == 50


@pytest.mark.parametrize("subset", ["train", "valid"])
def test_other_subsets_have_no_types(typed, subset):
    built = task(typed)
    built.load_dataset(subset)
    dataset = built.dataset(subset)
    assert "type" not in dataset.collater([dataset[0]])


def test_folder_without_raw_text_has_no_breakdown(typed):
    (typed / "raw" / "gen.type").unlink()
    built = task(typed)
    built.load_dataset("gen")
    dataset = built.dataset("gen")
    assert "type" not in dataset.collater([dataset[0]])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [(TYPES[:-1], "6 types for 7 examples"), ([*TYPES[:-1], "new"], "the unknown type 'new'")],
    ids=["too-few", "unknown"],
)
def test_types_that_do_not_fit(typed, kinds, message):
    write_types(typed, kinds)
    with pytest.raises(UsageError, match=f"gen.type has {message}: prepare the folder again"):
        task(typed).load_dataset("gen")


def test_unknown_choice(typed):
    with pytest.raises(UsageError, match="--accuracy-by is 'type': choose from none, groups, types"):
        task(typed, accuracy_by="type")


def test_broken_manifest(typed):
    (typed / "dataset.json").write_text("[1")
    with pytest.raises(UsageError, match="dataset.json cannot be read"):
        Breakdown(str(typed))


def test_second_folder_of_a_list_has_its_own_types(typed, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(typed, other)
    write_types(other, reversed(TYPES))
    breakdown = Breakdown(f"{typed}:{other}", "types")
    by_epoch = [[breakdown.types[i] for i in breakdown.types_of("gen", 7, epoch)] for epoch in (1, 2, 3)]
    assert by_epoch == [TYPES, TYPES[::-1], TYPES]


def test_the_training_set_may_have_types_of_its_own(typed):
    (typed / "raw" / "train.type").write_text("no\n" * 20)
    breakdown = Breakdown(str(typed), "types")
    assert [breakdown.types[i] for i in breakdown.types_of("train", 20)] == ["no"] * 20
    assert breakdown.names_in("train") == ["no"] and set(breakdown.names_in("gen")) == {*GROUPS, *TYPES}


def test_a_group_of_two_folders_has_the_types_of_both(typed, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(typed, other)
    manifest = json.loads((typed / "dataset.json").read_text()) | {"groups": {"structural": ["odd"]}}
    (other / "dataset.json").write_text(json.dumps(manifest))
    breakdown = Breakdown(f"{typed}:{other}")
    assert [breakdown.types[i] for i in breakdown.reports["structural"]] == ["deep", "odd"]


def test_calls_are_weighed_by_their_counts():
    """A validation reduces the logs of each batch by themselves."""
    calls = [
        {"n_of_a": 1.0, "exact_of_a": 1.0, "tokens_of_a": 2.0, "right_of_a": 2.0},
        {"n_of_a": 3.0, "exact_of_a": 0.0, "tokens_of_a": 8.0, "right_of_a": 4.0},
    ]
    with metrics.aggregate() as values:
        for sums in calls:
            log_breakdown(sums)
    assert values.get_smoothed_values() == {"accuracy_a": 25.0, "word_error_a": 40.0, "mean_word_error": 40.0}


def test_nothing_counted_nothing_logged():
    with metrics.aggregate() as values:
        log_breakdown({"n_of_a": 0.0, "exact_of_a": 0.0, "loss": 1.0})
    assert not values.get_smoothed_values()


def test_sums_of_logs(monkeypatch):
    """Numbers and tensors of any kind; one transfer, however many tensors there are."""
    logs = [
        {"loss": torch.tensor(0.5), "n": 3, "exact": torch.tensor(2), "seconds": np.float32(0.25), "name": "x"},
        {
            "loss": torch.tensor([1.5]),
            "n": torch.tensor(2**30 + 1),
            "of_type": torch.tensor(True),
            "all": torch.ones(2),
        },
    ]
    transfers, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: transfers.append(x.shape) or tolist(x))
    sums = sums_of_logs(logs)
    assert sums == {"loss": 2.0, "n": 2.0**30 + 4, "exact": 2.0, "seconds": 0.25, "of_type": 1.0}
    assert transfers == [torch.Size([5])]
    assert sums_of_logs([]) == {}

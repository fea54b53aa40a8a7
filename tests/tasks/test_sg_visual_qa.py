"""The task of images and questions: batches, the same for any number of workers and after a resume; memory; errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from omegaconf import DictConfig

import fairseq_sg.plugin  # noqa: F401
from data_prep.sort_of_clevr.questions import TYPES, types_of
from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.sg_visual_qa import SGVisualQAConfig, SGVisualQATask
from helpers.scenes import ARCH, SIZES, write_scenes
from helpers.workers import end_workers

SCENES, TEST_SCENES = 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes") / "out", scenes=SCENES, test_scenes=TEST_SCENES)


def task(folder: Path, **options) -> SGVisualQATask:
    values = {"train_subset": "train"} | options
    return SGVisualQATask.setup_task(SGVisualQAConfig(data=str(folder), **values))


def iterator(of: SGVisualQATask, workers: int = 0, epoch: int = 1, **options):
    """fairseq's iterator over the batches of training, as its trainer makes it."""
    arguments = {"max_sentences": 16, "seed": 1, "grouped_shuffling": False} | options
    return of.get_batch_iterator(of.dataset("train"), num_workers=workers, epoch=epoch, **arguments)


def batches(of: SGVisualQATask, epochs: int, workers: int = 0, **options) -> list[dict]:
    of.load_dataset("train")
    found, epoch = [], 1
    while epoch <= epochs:
        batches_of_epoch = iterator(of, workers, epoch, **options)
        found += list(batches_of_epoch.next_epoch_itr())
        epoch = batches_of_epoch.next_epoch_idx
    end_workers(batches_of_epoch)
    return found


def same(one: list[dict], two: list[dict]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a["id"], b["id"])
        and torch.equal(a["target"], b["target"])
        and all(torch.equal(a["net_input"][name], b["net_input"][name]) for name in ("images", "questions"))
        for a, b in zip(one, two, strict=True)
    )


def ids(found: list[dict]) -> list[int]:
    return [i for batch in found for i in batch["id"].tolist()]


def group_of(batch: dict) -> set[int]:
    return set((types_of(batch["net_input"]["questions"].numpy()) // 3).tolist())


def test_a_batch(folder):
    found = batches(task(folder), 1)
    arrays = {name: np.load(folder / f"train.{name}.npy") for name in ("images", "questions", "answers")}
    for batch in found:
        images, questions = batch["net_input"]["images"], batch["net_input"]["questions"]
        assert images.dtype == questions.dtype == torch.uint8 and batch["target"].dtype == torch.int64
        assert batch["nsentences"] == len(images) == len(batch["target"]) and batch["ntokens"] == 26 * len(images)
        assert "type" not in batch
        for row, i in enumerate(batch["id"].tolist()):
            assert (images[row].numpy() == arrays["images"][i // 30]).all()
            assert (questions[row].numpy() == arrays["questions"][i // 30, i % 30]).all()
            assert batch["target"][row] == arrays["answers"][i // 30, i % 30]


def test_separate_batches(folder):
    """Each of one group, none lost or twice; 60 questions a group are three batches of 16 and one of 12."""
    found = batches(task(folder), 2)
    for epoch in (found[:12], found[12:]):
        assert sorted(ids(epoch)) == list(range(30 * SCENES))
        assert all(len(group_of(batch)) == 1 for batch in epoch)
        assert sorted(batch["nsentences"] for batch in epoch) == [12] * 3 + [16] * 9
    assert ids(found[:12]) != ids(found[12:])
    orders = [[group_of(batch).pop() for batch in epoch] for epoch in (found[:12], found[12:])]
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def test_mixed_batches(folder):
    found = batches(task(folder, question_batches="mixed"), 1)
    assert sorted(ids(found)) == list(range(30 * SCENES)) and ids(found) != list(range(30 * SCENES))
    assert sorted(batch["nsentences"] for batch in found) == [4] + [16] * 11
    assert sum(len(group_of(batch)) > 1 for batch in found) > 9


def test_multiples_of_the_batch_size(folder):
    """fairseq's default of 8 leaves out the rest of a group, here 4 of 60, as the released code does."""
    found = batches(task(folder), 1, required_batch_size_multiple=8)
    assert all(batch["nsentences"] % 8 == 0 for batch in found) and len(ids(found)) == len(set(ids(found)))
    assert {i % 30 // 10: 56 for i in ids(found)} == {g: sum(i % 30 // 10 == g for i in ids(found)) for g in range(3)}


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers, folder):
    assert same(batches(task(folder), 3, workers), batches(task(folder), 3))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["separate", "mixed"])
def test_a_resume_within_an_epoch_changes_nothing(kind, workers, folder):
    whole = batches(task(folder, question_batches=kind), 2)
    of = task(folder, question_batches=kind)
    of.load_dataset("train")
    stopped = iterator(of, workers, epoch=2)
    batches_of_epoch = stopped.next_epoch_itr()
    first = [next(batches_of_epoch) for _ in range(5)]
    state = stopped.state_dict()
    of = task(folder, question_batches=kind)
    of.load_dataset("train")
    resumed = iterator(of, workers, epoch=state["epoch"])
    resumed.load_state_dict(state)
    assert same(first + list(resumed.next_epoch_itr()), whole[len(whole) // 2 :])
    end_workers(stopped, resumed)


def test_shards_share_an_epoch(folder):
    found = [ids([b for b in batches(task(folder), 1, num_shards=2, shard_id=shard) if b]) for shard in range(2)]
    assert sorted(found[0] + found[1]) == list(range(30 * SCENES)) and min(map(len, found)) > 80


@pytest.mark.parametrize("subset", ["valid", "test"])
def test_evaluation_has_every_question_with_its_type(subset, folder):
    """In order, also where the number is no multiple of 8, in every epoch the same."""
    of = task(folder, accuracy_by="types")
    of.load_dataset(subset)
    for epoch in (1, 2):
        rows = of.get_batch_iterator(of.dataset(subset), max_sentences=50, required_batch_size_multiple=8, epoch=epoch)
        found = list(rows.next_epoch_itr(shuffle=False))
        assert ids(found) == list(range(30 * TEST_SCENES))
        assert (
            torch.cat([b["target"] for b in found]).numpy() == np.load(folder / f"{subset}.answers.npy").ravel()
        ).all()
        kinds = [of.breakdown.types[number] for batch in found for number in batch["type"].tolist()]
        assert kinds == [TYPES[k] for b in found for k in types_of(b["net_input"]["questions"].numpy())]
    assert {"unary", "binary", "ternary", *TYPES} == set(of.breakdown.reports)


def test_the_training_set_is_evaluated_beside_its_training(folder):
    of = task(folder)
    of.load_dataset("train")
    training = iterator(of)
    evaluation = of.get_batch_iterator(of.dataset("train"), max_sentences=50)
    assert training is not evaluation and iterator(of) is training


def anonymous_memory() -> int:
    """Bytes of the process that no file backs."""
    with open("/proc/self/status") as stream:
        (line,) = [line for line in stream if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux only")
def test_images_stay_in_their_file(tmp_path):
    """60 MB of images are read in batches, and none of it stays; over epochs, memory is flat."""
    folder = write_scenes(tmp_path / "out", scenes=3, test_scenes=1)
    size = 3_500
    for name in ("images", "questions", "answers"):
        array = np.load(folder / f"train.{name}.npy")
        large = np.lib.format.open_memmap(folder / f"train.{name}.npy", "w+", array.dtype, (size, *array.shape[1:]))
        large[:] = array[:1]
        large.flush()
        del large
    of = task(folder)
    of.load_dataset("train")
    assert isinstance(of.dataset("train").images, np.memmap)
    used = []
    for epoch in (1, 2, 3):
        batches_of_epoch = iterator(of, epoch=epoch, max_sentences=1_000)
        assert sum(batch["nsentences"] for batch in batches_of_epoch.next_epoch_itr()) >= 30 * size - 24
        used.append(anonymous_memory())
    assert max(used) - min(used) < 20_000_000, used


# Errors.


def built(of: SGVisualQATask, arch: str, **options):
    return of.build_model(DictConfig({"_name": arch, **options}))


def test_models_and_criteria(folder):
    of = task(folder)
    assert built(of, ARCH, **SIZES).encoder.embedding.grid == (5, 5)
    for arch in ("sg_lstm", "sg_transformer", "sg_regressor"):
        with pytest.raises(UsageError, match=f"this --arch reads no images: choose .* --arch {ARCH}"):
            built(of, arch)
    with pytest.raises(UsageError, match="choose --criterion classification"):
        of.build_criterion(DictConfig({"_name": "cross_entropy", "sentence_avg": False}))
    with pytest.raises(UsageError, match="a classifier generates nothing"):
        of.build_generator([], None)


def rewritten(folder: Path, tmp_path: Path, **entries) -> Path:
    (tmp_path / "dataset.json").write_text(json.dumps(json.loads((folder / "dataset.json").read_text()) | entries))
    return tmp_path


def test_wrong_folders(folder, tmp_path):
    with pytest.raises(
        UsageError, match="takes one folder, not 'a:b': make it with `python -m data_prep sort_of_clevr`"
    ):
        task(Path("a:b"))
    with pytest.raises(UsageError, match="has no images with questions: make a folder with"):
        task(rewritten(folder, tmp_path, origin={}))
    with pytest.raises(UsageError, match="was made by version 0 of its generator.* version 1: make the data in a new"):
        task(rewritten(folder, tmp_path, origin={"generator": "data_prep.sort_of_clevr", "version": 0}))
    with pytest.raises(UsageError, match="--question-batches is 'both': choose from separate, mixed"):
        task(folder, question_batches="both")
    with pytest.raises(UsageError, match="--accuracy-by is 'kinds'"):
        task(folder, accuracy_by="kinds")


def test_wrong_arrays(folder, tmp_path):
    """A missing, a truncated and a wrong array: one message, which names the file or the way to it."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    of = task(copy)
    with pytest.raises(UsageError, match="has no subset 'gen': it has train, valid, test"):
        of.load_dataset("gen")
    answers = copy / "valid.answers.npy"
    whole = answers.read_bytes()
    for content in (None, whole[: len(whole) // 2], b""):
        answers.unlink() if content is None else answers.write_bytes(content)
        message = "lacks files of its subset 'valid'" if content is None else "subset 'valid' of .* cannot be read"
        with pytest.raises(UsageError, match=message):
            of.load_dataset("valid")
    for wrong in (np.zeros((TEST_SCENES, 30)), np.zeros((TEST_SCENES + 1, 30), np.uint8), np.zeros((4, 29), np.uint8)):
        np.save(answers, wrong)
        with pytest.raises(UsageError, match=r"valid.answers.npy has .* and uint8 \(4, 30\) is needed: prepare"):
            of.load_dataset("valid")
    answers.write_bytes(whole)
    (copy / "raw" / "valid.type").write_text("unary_shape\n")
    with pytest.raises(UsageError, match="valid.type has 1 types for 120 examples"):
        of.load_dataset("valid")


def test_batches_without_room_for_a_question(folder):
    of = task(folder)
    of.load_dataset("train")
    with pytest.raises(UsageError, match="--max-tokens is 25, and a question has 26 tokens: choose at least as many"):
        iterator(of, max_sentences=None, max_tokens=25)
    found = list(iterator(of, max_sentences=None, max_tokens=26 * 20).next_epoch_itr())
    assert {batch["nsentences"] for batch in found} == {20}


def test_checkpoints_record_the_request(folder, tmp_path):
    of = task(folder)
    record = of.state_dict()["trained_on"]
    assert record["dictionaries"] == {} and record["requests"][0]["line"] == "published"
    of.load_state_dict({"trained_on": record})
    of.check_resumed(record, new_data=False)
    other = task(write_scenes(tmp_path / "other", "--line", "segment", scenes=1, test_scenes=1))
    with pytest.raises(UsageError, match="has other data \\(line was published, and here it is segment\\)"):
        other.check_resumed(record | {"requests": [record["requests"][0] | {"scenes": 1, "test_scenes": 1}]}, False)

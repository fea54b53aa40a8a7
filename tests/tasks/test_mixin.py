"""The base of our tasks: samples that are too long, batches without a thread that reads ahead."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

pytest.importorskip("fairseq")

from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks import FairseqTask
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.mixin import SGTask
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask
from fairseq_sg.trainer import SGTrainer
from helpers.small_folders import random_pairs, write_folder
from helpers.trainers import build


class Task(SGTask, FairseqTask):
    """The mixin on fairseq's base."""


class Sentences:
    """Sentences of some lengths; with ``pairs``, each is its own target."""

    def __init__(self, *lengths: int, pairs: bool = False):
        self.lengths, self.pairs = np.array(lengths), pairs

    def size(self, index: int):
        return (self.lengths[index],) * 2 if self.pairs else self.lengths[index]

    def filter_indices_by_size(self, indices, most):
        long = self.lengths[indices] > np.min(most)
        return indices[~long], indices[long].tolist()


def made(folder) -> SGTranslationTask:
    config = dict(data=str(folder), train_subset="train", dataset_impl=None, required_seq_len_multiple=1)
    return SGTranslationTask.setup_task(SGTranslationConfig(**config))


def test_a_sentence_that_is_too_long_is_named(caplog):
    task, indices = Task(None), np.array([2, 1, 0])
    assert task.filter_indices_by_size(indices, Sentences(3, 4, 5), 5).tolist() == [2, 1, 0]
    with pytest.raises(UsageError, match="^sample 2 has 5 tokens, and the maximum is 4; .*--learned-positions"):
        task.filter_indices_by_size(indices, Sentences(3, 4, 5), 4)
    with pytest.raises(
        UsageError, match="^sample 2 has 5 and 5 tokens, and the maximum is 9 and 3; .*--skip-invalid-size"
    ):
        task.filter_indices_by_size(indices, Sentences(3, 4, 5, pairs=True), (9, 3))
    assert not caplog.records
    assert task.filter_indices_by_size(indices, Sentences(3, 4, 5), 3, True).tolist() == [0]
    assert "2 samples are longer than 3 tokens and are left out, the first of them [2, 1]; " in caplog.text
    # A line of fairseq-interactive is left out; a subset is not.
    task.datasets["gen"] = Sentences(3, 4, 5)
    assert len(task.filter_indices_by_size(indices, Sentences(3, 4, 5), 2, True)) == 0
    with pytest.raises(UsageError, match="^all 3 samples are longer than 2 tokens; "):
        task.filter_indices_by_size(indices, task.datasets["gen"], 2, True)


def test_types_are_asked_for_and_there_are_none(folder, caplog):
    """In training: an evaluation asks for them on any data."""
    for accuracy_by in ("groups", "types"):
        assert "--accuracy-by types" not in caplog.text
        trainer = build(SGTrainer, folder, "--accuracy-by", accuracy_by)
        trainer.task.load_dataset("valid")
        trainer.task.check_training(trainer)
    assert "--accuracy-by types logs nothing more" in caplog.text


MIXED_UP = "leave both out. The first loss scale is --fp16-init-scale"
NO_WINDOW = "^--fp16 with several values of --update-freq .*: add --fp16-scale-wind"


@pytest.mark.parametrize(
    "options,message",
    [
        (["--amp"], None),
        (["--amp", "--fp16-init-scale", "4"], None),
        (["--amp-init-scale", "4"], None),
        (["--amp", "--amp-init-scale", "4"], MIXED_UP),
        (["--amp", "--amp-scale-window", "100"], MIXED_UP),
        (["--fp16", "--update-freq", "2"], None),
        (["--fp16", "--update-freq", "2,1", "--fp16-scale-window", "100"], None),
        (["--fp16", "--update-freq", "2,1"], NO_WINDOW),
        (["--memory-efficient-fp16", "--update-freq", "2,1"], NO_WINDOW),
    ],
)
def test_options_of_a_loss_scale_that_fairseq_mixes_up_or_lacks_are_refused(folder, options, message, monkeypatch):
    trainer = build(SGTrainer, folder, *options)
    trainer.task.load_dataset("valid")
    monkeypatch.setattr(trainer, "cuda", True)
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        trainer.task.check_training(trainer)


def test_a_criterion_that_would_leave_out_losses_of_layers_is_refused(folder):
    trainer = build(SGTrainer, folder, "--depth", "shared_act")
    trainer.task.load_dataset("valid")
    trainer.task.check_training(trainer)
    trainer._criterion = CrossEntropyCriterion(trainer.task, False)
    message = "have losses .ponder., which this --criterion leaves out: choose --criterion cross_entropy_orthogonality"
    with pytest.raises(UsageError, match=message):
        trainer.task.check_training(trainer)


def test_a_folder_that_was_prepared_again(folder):
    task = made(folder)
    before = task.trained_on | {"dictionaries": task.trained_on["dictionaries"] | {"target": "of other words"}}
    with pytest.raises(UsageError, match=f"on {folder} before that folder was prepared again: its target dictionary"):
        task.check_dictionaries(before)


@pytest.mark.parametrize("name", ["spm.model", "spm.src.model"])
def test_plain_text_for_a_model_of_subwords(name, tmp_path, caplog):
    task = made(write_folder(tmp_path, {"train": random_pairs(4, 3)}))
    unknown = "'q' is not in the dictionary and read as <unk>: the answer to 'q' means nothing"
    task.get_interactive_tokens_and_lengths(["q"], str)
    (tmp_path / name).touch()
    task.get_interactive_tokens_and_lengths(["q"], str)
    task.get_interactive_tokens_and_lengths(["q"], lambda line: f"{line} ")  # a --bpe has cut it
    fix = f". Plain text needs --bpe sentencepiece --sentencepiece-model {tmp_path / name}"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [unknown, unknown + fix, unknown]


def test_alignments_need_cross_attention(folder):
    with pytest.raises(UsageError, match="--print-alignment is for models with cross-attention: leave it out"):
        made(folder).build_generator([nn.Linear(1, 1)], GenerationConfig(print_alignment="soft"))


def test_no_thread_reads_ahead(folder):
    """Python would end it within torch's code, and abort."""
    task = made(folder)
    task.load_dataset("valid")
    batches = task.get_batch_iterator(task.dataset("valid"), max_sentences=4, data_buffer_size=10)
    before = threading.active_count()
    epoch = batches.next_epoch_itr(shuffle=False)
    next(epoch)
    assert threading.active_count() == before

"""The base of all tasks of this plugin."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.tasks import FairseqTask

from data_prep.subwords import model_file
from fairseq_sg import generation
from fairseq_sg.checkpoints import load_weights
from fairseq_sg.compat import wrap
from fairseq_sg.declared import dataclasses_of
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.models.config import drop_removed
from fairseq_sg.modules.cpu.memory import keep_for_training
from fairseq_sg.modules.feedforward.workers import no_contribution
from fairseq_sg.optim.torch_adam import TorchAdam
from fairseq_sg.ranges import flag
from fairseq_sg.registry import emitted_losses
from fairseq_sg.resuming import early_stopping
from fairseq_sg.tasks.data_record import DataRecord, hash_of_words, reordering
from fairseq_sg.tasks.training_checks import TrainingChecks
from fairseq_sg.trainer import counting

logger = logging.getLogger(__name__)
#: What fairseq raises for the files of an indexed dataset that are cut off, by where they end.
CUT_OFF = (ValueError, AttributeError, AssertionError, struct.error)
#: The first ``format`` of ``dataset.json`` whose dictionaries have the canonical order of their family of data.
CANONICAL_ORDER = 2


class SGTask(DataRecord, TrainingChecks):
    """A mixin, to be named before a task class of fairseq.

    ``cfg.data`` is one folder of ``data_prep``, or several with colons between, one for each epoch in turn.
    """

    #: The task's name, and the criterion that it needs, or "".
    name = criterion = ""
    #: Whether an input has at least one word; a language model may be asked to begin a text.
    takes_words = True
    #: Why ``--step-graphs`` and ``--stacked`` refuse a training of this task, or "".
    not_recorded = ""
    #: Why no command generates, and what is measured instead; "" for a task that generates.
    generates_nothing = ""

    # Data.

    @cached_property
    def manifests(self) -> list[dict[str, Any]]:
        """``dataset.json`` of every folder."""
        return [read_manifest(folder) for folder in utils.split_paths(self.cfg.data)]

    def check_folders(self) -> None:
        """Raises UsageError where a folder has other dictionaries than the first, by which all folders are read."""
        first, *others = utils.split_paths(self.cfg.data)
        for path in sorted(Path(first).glob("dict.*.txt")) if others else ():
            words = hash_of_words(Dictionary.load(str(path)))
            for folder in others:
                other = Path(folder) / path.name
                if not other.is_file() or hash_of_words(Dictionary.load(str(other))) != words:
                    raise UsageError(
                        f"{other} has other words than {path}, or another order of words, and all folders are read by "
                        f"the first one's: {reordering(folder, first)}"
                    )

    @classmethod
    def load_dictionary(cls, filename: str) -> Dictionary:
        """Raises UsageError for a file that is missing, cut off, or not the one that was prepared."""
        path = Path(filename)
        prepared = read_manifest(str(path.parent)).get("files", {}).get(path.name)
        try:
            if prepared and hashlib.sha256(path.read_bytes()).hexdigest() != prepared:
                raise ValueError("dataset.json has another sha256")
            return super().load_dictionary(filename)
        except Exception as error:
            raise UsageError(
                f"{filename} cannot be read, or is not the file that was prepared ({error}): "
                "`python -m data_prep verify FOLDER` checks its folder"
            ) from error

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        older = [m for m in self.manifests if "format" in m and m["format"] < CANONICAL_ORDER]
        if older and split == "train" and epoch == 1:
            logger.warning(
                "%s was prepared before version 0.2, with its words in order of their frequency: a model that is "
                "trained on it can be evaluated on this folder alone. `python -m data_prep reorder %s --out NEW` makes "
                "a folder in the order that all splits share",
                self.cfg.data, self.cfg.data,
            )  # fmt: skip

    def get_batch_iterator(self, dataset, *args, **kwargs):
        """fairseq's, but evaluation never drops a last batch that is not a multiple of
        ``--required-batch-size-multiple``, and no thread reads batches ahead.

        At exit, Python ends such a daemon thread anywhere, also within torch's C++ code, which aborts the process.
        ``--num-workers`` reads ahead as well.
        """
        if not asks_for_training(kwargs):
            kwargs["required_batch_size_multiple"] = 1
            # The iterator in the cache is the one of the training in progress.
            if dataset is self.datasets.get(getattr(self.cfg, "train_subset", None)):
                kwargs["disable_iterator_cache"] = True
        return super().get_batch_iterator(dataset, *args, **kwargs | {"data_buffer_size": 0})

    def filter_indices_by_size(self, indices, dataset, max_positions=None, ignore_invalid_inputs=False):
        """``indices`` without samples that are too long.

        Raises UsageError for such a sample unless ``ignore_invalid_inputs``, and where all of a subset are too long.
        """
        kept, left_out = dataset.filter_indices_by_size(indices, max_positions)
        if len(left_out) == 0:
            return kept
        most, size = numbers(max_positions), numbers(dataset.size(left_out[0]))
        own = [flag(name) for name in ("max_source_positions", "max_target_positions") if hasattr(self.cfg, name)]
        limits = (
            f"the limit is the least of {', '.join(own)} and what" if own else "the limit is what"
        ) + " the model's own options say, such as --learned-positions and --randomized-eval-length"
        if len(kept) == 0 and ignore_invalid_inputs and any(known is dataset for known in self.datasets.values()):
            raise UsageError(f"all {len(left_out):,} samples are longer than {most} tokens; {limits}")
        if not ignore_invalid_inputs:
            raise UsageError(
                f"sample {left_out[0]} has {size} tokens, and the maximum is {most}; {limits}; "
                "--skip-invalid-size-inputs-valid-test leaves such samples out"
            )
        logger.warning(
            "%d samples are longer than %s tokens and are left out, the first of them %s; %s",
            len(left_out), most, left_out[:10], limits,
        )  # fmt: skip
        return kept

    def no_such_subset(self, split: str) -> UsageError:
        """The error for a subset that the data folder lacks."""
        there = [name for manifest in self.manifests for name in manifest.get("subsets", {})]
        if split in there:
            return UsageError(
                f"the data folder {self.cfg.data} lacks files of its subset {split!r}: `python -m data_prep verify "
                "FOLDER` names them; prepare the folder again"
            )
        return UsageError(
            f"the data folder {self.cfg.data} has no subset {split!r}: it has {', '.join(there) or 'none'}"
        )

    def cut_off(self, split: str, error: Exception) -> UsageError:
        """The error for a subset whose files cannot be read."""
        return UsageError(
            f"the files of subset {split!r} of {self.cfg.data} cannot be read, and may be cut off ({error}): "
            "`python -m data_prep verify FOLDER` names them; prepare the folder again"
        )

    @property
    def cutting(self) -> str:
        """Advice for a line that was not cut into the subwords of the data; "" for data of words."""
        file = model_file(Path(utils.split_paths(self.cfg.data)[0]), getattr(self.cfg, "source_lang", None) or "src")
        return f". Plain text needs --bpe sentencepiece --sentencepiece-model {file}" if file else ""

    def get_interactive_tokens_and_lengths(self, lines: list[str], encode_fn) -> tuple[list, list]:
        """For ``fairseq-interactive``; warns of empty lines and of words that the model does not know."""
        for line in lines:
            encoded = encode_fn(line)
            words = encoded.split()
            unknown = [word for word in words if self.source_dictionary.index(word) == self.source_dictionary.unk()]
            if not words and self.takes_words:
                logger.warning("an empty line was read: the answer to it means nothing")
            elif unknown:
                logger.warning(
                    "%s not in the dictionary and read as %s: the answer to %r means nothing%s",
                    f"{', '.join(map(repr, dict.fromkeys(unknown)))} {'is' if len(set(unknown)) == 1 else 'are'}",
                    self.source_dictionary.unk_word,
                    line,
                    self.cutting if encoded == line else "",
                )
        return super().get_interactive_tokens_and_lengths(lines, encode_fn)

    def build_generator(self, models, args, *more, **kwargs):
        """fairseq's generator, whose first output may be the end symbol where ``args`` say nothing of ``min_len``.

        Raises UsageError for options that it gets wrong (``generation``); the generator, where no output has a score.
        """
        if self.generates_nothing:
            raise UsageError(f"{self.generates_nothing} is what fairseq-validate reports")
        if not hasattr(args, "min_len"):
            args.min_len = 0
        if getattr(args, "constraints", None):
            # With an end symbol as the first output, fairseq's search would leave the constraints out.
            args.min_len = max(args.min_len, 1)
        generation.check(args, getattr(self.cfg, "left_pad_target", False))
        drawn, words = getattr(args, "sampling_topk", -1), len(self.target_dictionary)
        if drawn > words:
            raise UsageError(f"--sampling-topk is {drawn}: the model has {words} words, choose at most as many")
        if getattr(args, "print_alignment", None) and not all(hasattr(model, "encoder") for model in models):
            raise UsageError("--print-alignment is for models with cross-attention: leave it out")
        generator = super().build_generator(models, args, *more, **kwargs)
        if getattr(generator, "min_len", 1) == 0:
            # One of the words but padding is then the end symbol, which a larger beam would extend.
            generator.beam_size = min(generator.beam_size, words - 2)
        wrap(generator, "generate", generation.with_scores)
        return generator

    # Models and training.

    #: The losses that the model emits, with their default weights; None where nothing is known of them.
    emitted_losses: dict[str, float] | None = None

    def build_model(self, cfg, from_checkpoint: bool = False):
        """A model, which names weights that do not fit it (``load_weights``).

        Raises UsageError for a removed option that the checkpoint's model was trained with.
        """
        model = super().build_model(without_removed("model", cfg), from_checkpoint)
        self.emitted_losses = emitted_losses(model)
        wrap(model, "load_state_dict", load_weights)
        return model

    def build_criterion(self, cfg, from_checkpoint: bool = False):
        """A criterion.

        Raises UsageError for one that is not for this task, and for a removed option that the checkpoint's model was
        trained with.
        """
        criterion = super().build_criterion(without_removed("criterion", cfg), from_checkpoint)
        if self.criterion and not isinstance(criterion, CRITERION_REGISTRY[self.criterion]):
            raise UsageError(f"--task {self.name} needs another criterion: choose --criterion {self.criterion}")
        return criterion

    def eval_lm_dataloader(self, *args, **kwargs):
        raise UsageError("fairseq-eval-lm is for language models: use fairseq-validate")

    @staticmethod
    def recorded(sample: dict[str, Any]) -> dict[str, Any]:
        """What a recorded or stacked step reads of a batch: another value that is no tensor is another graph."""
        return sample

    def of_one_length(self, samples: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Training batches with more padding, where that makes their shapes equal."""
        return samples

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """Loss, sample size and logs of a batch, after its backward pass: fairseq's, without its walks through all
        modules. Another base's step, or mixed precision, is left to the base.

        With ``ignore_grad`` the batch fills a gap: it counts nowhere (``trainer``).
        """
        step = super().train_step
        if isinstance(optimizer, TorchAdam):
            criterion = optimizer.autocasting(criterion)
        with no_contribution(ignore_grad):
            if step.__func__ is not FairseqTask.train_step or isinstance(optimizer, AMPOptimizer):
                loss, size, logs = step(sample, model, criterion, optimizer, update_num, ignore_grad)
            else:
                if not model.training:
                    model.train()
                for part in counting(model):
                    part.set_num_updates(update_num)
                loss, size, logs = criterion(model, sample)
                if ignore_grad:
                    loss *= 0
                optimizer.backward(loss)
        if ignore_grad:
            size, logs = zero(size), {name: zero(value) for name, value in logs.items()}
        return loss, size, logs

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Entries that fairseq adds to a checkpoint's ``extra_state``: the counts of ``--patience`` (``resuming``)."""
        patience = dict(vars(early_stopping()))
        return {"patience": patience} if patience else {}

    def begin_epoch(self, epoch, model) -> None:
        super().begin_epoch(epoch, model)
        keep_for_training(model)


def without_removed(group: str, cfg):
    """The configuration of a ``model`` or ``criterion`` (``group``) after ``drop_removed``."""
    choice = getattr(cfg, "_name", None) or getattr(cfg, "arch" if group == "model" else group, None)
    declared = dataclasses_of(group).get(choice)
    return cfg if declared is None else drop_removed(cfg, declared)


def zero(value: Any) -> Any:
    """The zero in the place of a number, or of the numbers of a tensor."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def asks_for_training(arguments: dict[str, Any]) -> bool:
    """Whether ``get_batch_iterator`` is called for training: only fairseq's trainer then names this argument."""
    return "grouped_shuffling" in arguments


def numbers(sizes) -> str:
    """A size, or those of source and target."""
    try:
        return " and ".join(map(str, sizes))
    except TypeError:
        return str(sizes)


def check_whole(data: Any) -> None:
    """Raises ValueError where the block of an indexed dataset lacks something that its index names."""
    block, index = getattr(data, "_bin_buffer_mmap", None), getattr(data, "_index", None)
    if block is None or len(data) == 0:
        return
    if block.nbytes < index._pointers[-1] + index._sizes[-1] * index.dtype().itemsize:
        raise ValueError("one is shorter than its index says")

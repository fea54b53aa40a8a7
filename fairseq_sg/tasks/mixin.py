"""The base of all tasks of this plugin.

A checkpoint records the data it was trained on (``task_state["trained_on"]``): the folder, the request that it was
prepared by, and a hash of each dictionary's words in their order. An embedding is a row number: with another order of
words, a model runs without an error and its outputs mean nothing. So another dictionary is refused.
"""

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
from fairseq.dataclass.configs import CommonConfig
from fairseq.logging import metrics
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.tasks import FairseqTask

from data_prep.subwords import model_file
from fairseq_sg import generation
from fairseq_sg.checkpoints import load_weights
from fairseq_sg.compat import wrap
from fairseq_sg.criterions.base import LayerLosses
from fairseq_sg.declared import dataclasses_of
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.modules.cpu.memory import keep_for_training
from fairseq_sg.modules.feedforward.workers import no_contribution
from fairseq_sg.optim.torch_adam import TorchAdam
from fairseq_sg.ranges import flag
from fairseq_sg.registry import emitted_losses
from fairseq_sg.resuming import early_stopping
from fairseq_sg.trainer import counting

logger = logging.getLogger(__name__)
#: What fairseq raises for the files of an indexed dataset that are cut off, by where they end.
CUT_OFF = (ValueError, AttributeError, AssertionError, struct.error)
#: Metrics whose largest, and whose smallest, value is the best, by how their names begin.
LARGEST, SMALLEST = (
    ("accuracy", "token_accuracy", "bleu"),
    ("loss", "nll_loss", "ppl", "word_ppl", "bits_per_word", "bpc", "bpb", "mse", "relative_l2", "h1", "word_error",
     "mean_word_error"),
)  # fmt: skip
#: The first ``format`` of ``dataset.json`` whose dictionaries have the canonical order of their family of data.
CANONICAL_ORDER = 2


class SGTask:
    """A mixin, to be named before a task class of fairseq.

    ``cfg.data`` is one folder of ``data_prep``, or several with colons between, one for each epoch in turn.
    """

    #: The task's name, and the criterion that it needs, or "".
    name = criterion = ""
    #: Whether an input has at least one word; a language model may be asked to begin a text.
    takes_words = True
    #: Why ``--step-graphs`` refuses a training of this task, or "".
    not_recorded = ""
    #: Why no command generates, and what is measured instead; "" for a task that generates.
    generates_nothing = ""

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
                        f"the first one's: `python -m data_prep reorder {folder} --like {first} --out NEW` makes one "
                        "where the words are the same"
                    )

    # The record of the data in checkpoints.

    @cached_property
    def trained_on(self) -> dict[str, Any]:
        """The record of the data that a checkpoint keeps; plain values."""
        sides = {"source": self.source_dictionary, "target": self.target_dictionary}
        return {
            "data": self.cfg.data,
            "requests": [manifest.get("request") for manifest in self.manifests],
            # Tasks on arrays have no dictionaries.
            "dictionaries": {side: hash_of_words(words) for side, words in sides.items() if words is not None},
        }

    def state_dict(self) -> dict[str, Any]:
        """The ``task_state`` that fairseq writes into a checkpoint."""
        return {**super().state_dict(), "trained_on": self.trained_on}

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Entries that fairseq adds to a checkpoint's ``extra_state``: the counts of ``--patience`` (``resuming``)."""
        patience = dict(vars(early_stopping()))
        return {"patience": patience} if patience else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called with a checkpoint's ``task_state`` before its model is built for an evaluation.

        Raises UsageError for a model that was trained with other dictionaries than the folder's.
        """
        super().load_state_dict({name: value for name, value in state.items() if name != "trained_on"})
        self.check_dictionaries(state.get("trained_on"))

    def check_dictionaries(self, trained_on: dict[str, Any] | None) -> None:
        """Raises UsageError where the dictionaries of a checkpoint's record are not the folder's.

        Warns of a checkpoint without a record.
        """
        here = self.trained_on
        if trained_on is None:
            logger.warning(
                "the checkpoint does not record its dictionaries (it was made before version 0.2). Check that %s is "
                "the very folder it was trained on: with another order of words, its outputs mean nothing",
                here["data"],
            )
            return
        there = trained_on["data"]
        for side, words in here["dictionaries"].items():
            if trained_on["dictionaries"].get(side) == words:
                continue
            if words in trained_on["dictionaries"].values():
                raise UsageError(
                    f"the model was trained with the languages of {there} in the other direction: give the "
                    "--source-lang and --target-lang of the training"
                )
            if there == here["data"]:
                raise UsageError(
                    f"the model was trained on {there} before that folder was prepared again: its {side} dictionary "
                    "had other words, or another order of words. Restore that folder, or train into another --save-dir"
                )
            raise UsageError(
                f"the model was trained on {there}, and the {side} dictionary of {here['data']} has other words, or "
                "another order of words. Evaluate on a folder with the dictionaries of training: "
                + self.with_dictionaries_of(there)
            )

    def with_dictionaries_of(self, there: str) -> str:
        """How to make a folder with the data of ``cfg.data`` and the dictionaries of the folder ``there``."""
        return (
            f"`python -m data_prep reorder {self.cfg.data} --like {there} --out NEW` makes one where the words are the "
            "same"
        )

    def check_resumed(self, trained_on: dict[str, Any] | None, new_data: bool) -> None:
        """Raises UsageError where a training cannot be resumed on the folder.

        Args:
            trained_on: the checkpoint's record. new_data: whether the command says that its data are others, by
                ``--reset-dataloader`` or ``--finetune-from-model``; the dictionaries must be the same all the same.
        """
        self.check_dictionaries(trained_on)
        if trained_on is None or new_data:
            return
        different = different_requests(trained_on["requests"], self.trained_on["requests"])
        if different:
            raise UsageError(
                f"the checkpoint was trained on {trained_on['data']}, and {self.cfg.data} has other data "
                f"({different}). Resume with the folder of training, train into another --save-dir, or use "
                "--finetune-from-model with another --save-dir to begin a new training from its weights"
            )

    # Data.

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

    def check_training(self, trainer) -> None:
        """Called before a checkpoint is looked for and before the first update (``resuming``).

        Raises UsageError for options that would end the training at its start or at its first validation, leave out
        losses of the model, keep the worst checkpoint, or draw other batches in a resumed training.
        """
        criterion = trainer.get_criterion()
        if self.emitted_losses and not isinstance(criterion, LayerLosses):
            raise UsageError(
                f"the model's layers have losses ({', '.join(sorted(self.emitted_losses))}), which this --criterion "
                "leaves out: choose --criterion cross_entropy_orthogonality"
            )
        if isinstance(criterion, LayerLosses):
            criterion.check_training(trainer.get_model())
        for option in ("fp16", "amp") if not trainer.cuda else ():
            if trainer.cfg.common[option]:
                raise UsageError(
                    f"fairseq trains with --{option} only on a GPU: leave it out, or choose --bf16, which is slow on "
                    "a CPU"
                )
        common = trainer.cfg.common
        if common.amp and (common.amp_scale_window is not None or common.amp_init_scale != CommonConfig.amp_init_scale):
            raise UsageError(
                "fairseq takes --amp-init-scale for the window, and only beside --amp-scale-window: leave both out. "
                "The first loss scale is --fp16-init-scale"
            )
        if common.fp16 and common.fp16_scale_window is None and len(trainer.cfg.optimization.update_freq) > 1:
            raise UsageError(
                "--fp16 with several values of --update-freq needs a window of its loss scale, which fairseq makes for "
                "one value: add --fp16-scale-window, such as 4096 updates"
            )
        self._check_batches(trainer.cfg.dataset)
        if getattr(self.cfg, "accuracy_by", None) == "types" and not self.breakdown.types:
            logger.warning("--accuracy-by types logs nothing more: the examples in %s have no types", self.cfg.data)
        cfg = trainer.cfg.checkpoint
        metric, largest = cfg.best_checkpoint_metric, cfg.maximize_best_checkpoint_metric
        if trainer.cfg.dataset.disable_validation:
            return
        if metric.startswith(SMALLEST if largest else LARGEST):
            change = (
                "leave --maximize-best-checkpoint-metric out" if largest else "add --maximize-best-checkpoint-metric"
            )
            raise UsageError(f"--best-checkpoint-metric {metric} would keep the worst checkpoint as the best: {change}")
        data = trainer.cfg.dataset
        # fairseq reads it in the logs of every subset.
        for subset in data.valid_subset.split(",") if metric != "loss" else ():
            known = measured(trainer, subset)
            # Of the training set, types are not measured; of a part of a subset, not all.
            whole = subset != data.train_subset and data.max_valid_steps is None
            if metric not in known and metric not in (self.measured_by_type(subset, known) if whole else ()):
                raise UsageError(
                    f"--best-checkpoint-metric is {metric!r}, and a validation on {subset!r} measures "
                    f"{', '.join(known)}"
                )

    def _check_batches(self, cfg) -> None:
        """Raises UsageError for options with which a resumed training would have other batches."""
        # To fairseq's parser, the option of something that is on turns it off.
        if not getattr(self.cfg, "rebuild_batches", True):
            raise UsageError(
                "new batches each epoch are on, and --rebuild-batches would turn them off: a resumed training would "
                "have other batches. Leave the option out"
            )
        if cfg.update_ordered_indices_seed and not cfg.update_epoch_batch_itr:
            raise UsageError(
                "--update-ordered-indices-seed takes the epoch in which a training begins or is resumed: add "
                "--update-epoch-batch-itr True, or leave the option out"
            )
        if cfg.curriculum and not cfg.update_epoch_batch_itr:
            raise UsageError(
                "with --curriculum, fairseq keeps the order of the first epoch, and a resumed training has another: "
                "add --update-epoch-batch-itr True, or leave the option out"
            )

    def measured_by_type(self, subset: str, known: Sequence[str]) -> list[str]:
        """The metrics by type or group of a whole subset; the first batch, with ``known``, may lack some types."""
        breakdown = getattr(self, "breakdown", None)
        names = breakdown.names_in(subset) if breakdown is not None else []
        return [f"{metric}_{name}" for metric in ("accuracy", "word_error") if metric in known for name in names]

    def eval_lm_dataloader(self, *args, **kwargs):
        raise UsageError("fairseq-eval-lm is for language models: use fairseq-validate")

    @staticmethod
    def recorded(sample: dict[str, Any]) -> dict[str, Any]:
        """What a step with ``--step-graphs`` reads of a batch: another value that is no tensor is another graph."""
        return sample

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

    def begin_epoch(self, epoch, model) -> None:
        super().begin_epoch(epoch, model)
        keep_for_training(model)


def without_removed(group: str, cfg):
    """The configuration of a ``model`` or ``criterion`` (``group``) after ``drop_removed``."""
    from fairseq_sg.models.config import drop_removed

    choice = getattr(cfg, "_name", None) or getattr(cfg, "arch" if group == "model" else group, None)
    declared = dataclasses_of(group).get(choice)
    return cfg if declared is None else drop_removed(cfg, declared)


def zero(value: Any) -> Any:
    """The zero in the place of a number, or of the numbers of a tensor."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def asks_for_training(arguments: dict[str, Any]) -> bool:
    """Whether ``get_batch_iterator`` is called for training: only fairseq's trainer then names this argument."""
    return "grouped_shuffling" in arguments


def measured(trainer, subset: str) -> list[str]:
    """The metrics that a validation logs, found with its first batch."""
    batch = next(trainer.get_valid_iterator(subset).next_epoch_itr(shuffle=False))
    with metrics.aggregate(new_root=True) as logged:
        trainer.valid_step(batch)
    return [name for name in logged.get_smoothed_values() if not name.startswith("_")]


def hash_of_words(dictionary: Dictionary) -> str:
    """SHA-256 of a dictionary's words in their order. Their counts, which no model sees, differ between splits."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def numbers(sizes) -> str:
    """A size, or those of source and target."""
    try:
        return " and ".join(map(str, sizes))
    except TypeError:
        return str(sizes)


def different_requests(there: list, here: list) -> str:
    """The first difference between the requests of two lists of folders, in words; "" where there is none."""
    if len(there) != len(here):
        return f"{len(there)} folders then, {len(here)} here"
    for one, two in zip(there, here, strict=True):
        for name in sorted({*(one or {}), *(two or {})}):
            values = [(request or {}).get(name) for request in (one, two)]
            if values[0] != values[1]:
                return f"{name} was {values[0]}, and here it is {values[1]}"
    return ""


def check_whole(data: Any) -> None:
    """Raises ValueError where the block of an indexed dataset lacks something that its index names."""
    block, index = getattr(data, "_bin_buffer_mmap", None), getattr(data, "_index", None)
    if block is None or len(data) == 0:
        return
    if block.nbytes < index._pointers[-1] + index._sizes[-1] * index.dtype().itemsize:
        raise ValueError("one is shorter than its index says")

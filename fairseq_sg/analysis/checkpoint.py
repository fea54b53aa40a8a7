"""The model of a checkpoint, with its task and the subsets of its data."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from omegaconf.errors import ValidationError
from torch import nn

import fairseq_sg.plugin  # noqa: F401
from data_prep.dataset import DataError
from data_prep.parallel import clean
from data_prep.subwords import SPACE, Subwords, model_file
from fairseq_sg.checkpoints import not_registered, option_names, read, values
from fairseq_sg.declared import kinds_of
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.lengths import has_plain_text, plain_lengths, unit_of
from fairseq_sg.models.labels import labels_words
from fairseq_sg.parsers import choice, nearest
from fairseq_sg.ranges import check_type
from fairseq_sg.registry import UnknownName
from fairseq_sg.tasks.segment_memory import Remembering
from fairseq_sg.tasks.streams import Streams, Text


@dataclass
class Loaded:
    """A trained model in evaluation mode with its task.

    ``data`` is the folder, ``arch`` the architecture's name, ``cfg`` the training's configuration,
    ``updates`` the number of its updates, and ``trained_on`` its data.
    """

    model: nn.Module
    task: Any
    data: str
    arch: str
    device: torch.device
    cfg: Any
    updates: int
    trained_on: str

    @property
    def folder(self) -> str:
        """The first folder of ``data``."""
        return utils.split_paths(self.data)[0]

    @property
    def has_decoder(self) -> bool:
        return hasattr(self.model, "decoder")

    @property
    def labels_words(self) -> bool:
        """Whether every word has a label (``sg_tagging``)."""
        return labels_words(self.task)

    @property
    def is_language_model(self) -> bool:
        return self.has_decoder and not hasattr(self.model, "encoder") and not self.labels_words

    @property
    def reads_images(self) -> bool:
        """Whether inputs are images and questions (``sg_visual_qa``) instead of words."""
        return getattr(self.task, "inputs", "tokens") == "image_question"

    @property
    def examples(self) -> str:
        """What the examples of a subset are called."""
        return "questions" if self.reads_images else "sentences"

    @property
    def subsets(self) -> list[str]:
        """The subsets of the data folder: those that are binarized, or arrays that the task reads."""
        if hasattr(self.task, "subset_names"):
            return self.task.subset_names
        return sorted({path.name.partition(".")[0] for path in Path(self.folder).glob("*.idx")})

    @property
    def longest_target(self) -> int | None:
        """The maximum target length over all subsets, with the end symbol; None without targets."""
        return max(map(int, self._sizes(self.data, "*", "target")), default=None)

    def trained_lengths(self, side: str) -> tuple[int, int] | None:
        """The least and most words of a ``side``, "source" or "target", in training, of all its folders; None where
        they are gone. The unit is ``length_unit``.
        """
        subset = self.task.cfg.train_subset
        if self._plain:
            folders = utils.split_paths(self.trained_on)
            if not all(map(has_plain_text, folders)):
                return None
            sizes = np.concatenate([self.plain_lengths(folder, subset, side) for folder in folders])
        else:
            sizes = self._sizes(self.trained_on, subset, side) - 1  # without the end symbol
        return (int(sizes.min()), int(sizes.max())) if len(sizes) else None

    @cached_property
    def _plain(self) -> bool:
        return has_plain_text(self.folder)

    @cached_property
    def length_unit(self) -> str:
        """What lengths count: words or characters; of subwords without their plain text, pieces."""
        if self._plain:
            return unit_of(read_manifest(self.folder))
        return "pieces" if any(word.startswith(SPACE) for word in self.task.source_dictionary.symbols) else "words"

    def lengths(self, name: str, dataset: Any, side: str) -> np.ndarray:
        """The length of every sentence of a subset on a ``side``, "source" or "target", in ``length_unit``, without
        begin and end symbols, int64 (sentences,).

        Raises UsageError where the plain text of subwords is not that of the subset.
        """
        if self._plain:
            found = self.plain_lengths(self.folder, name, side)
            if len(found) != len(dataset):
                raise UsageError(
                    f"the plain text of the subset {name!r} in {self.folder}/raw has {len(found):,} lines for "
                    f"{len(dataset):,} sentences: prepare the folder again with `python -m data_prep`"
                )
            return found
        sizes, dictionary = {
            "source": (dataset.src_sizes, self.task.source_dictionary),
            "target": (dataset.tgt_sizes, self.task.target_dictionary),
        }[side]
        symbols = np.isin(dataset[0][side].numpy(), [dictionary.bos(), dictionary.eos()]).sum()
        return np.asarray(sizes, dtype=np.int64) - symbols

    def plain_lengths(self, folder: str, subset: str, side: str) -> np.ndarray:
        """The lengths of a subset's plain text in ``length_unit``, int64 (sentences,)."""
        found = plain_lengths(folder, subset, getattr(self.task.cfg, f"{side}_lang"), self.length_unit)
        return np.array(found, dtype=np.int64)

    def _sizes(self, data: str, subset: str, side: str) -> np.ndarray:
        """The tokens of every sentence in the files of some folders, with the end symbol."""
        task = self.task.cfg
        lang, dictionary = getattr(task, f"{side}_lang"), getattr(self.task, f"{side}_dictionary")
        ending = f"{subset}.{task.source_lang}-{task.target_lang}.{lang}.idx"
        paths = [path for folder in utils.split_paths(data) for path in Path(folder).glob(ending)]
        files = [load_indexed_dataset(str(path.with_suffix("")), dictionary) for path in paths]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(file.sizes) for file in files)])

    @cached_property
    def of_bytes(self) -> bool:
        """Whether the data are a text in bytes (``python -m data_prep text --unit bytes``)."""
        if not os.path.isfile(os.path.join(self.folder, "dataset.json")):
            return False
        return (read_manifest(self.folder).get("request") or {}).get("unit") == "bytes"

    @cached_property
    def pieces(self) -> dict[str, Subwords]:
        """The models of SentencePiece in the data folder, for "source" and "target"; {} for data of words.

        Raises UsageError without SentencePiece.
        """
        languages = {
            side: getattr(self.task.cfg, f"{side}_lang", None) or language
            for side, language in (("source", "src"), ("target", "tgt"))
        }
        files = {side: model_file(Path(self.folder), language) for side, language in languages.items()}
        try:
            return {side: Subwords(path.read_bytes()) for side, path in files.items() if path is not None}
        except DataError as error:
            raise UsageError(str(error)) from None  # SentencePiece is not installed

    def split(self, text: str, side: str = "source") -> list[str]:
        """A text as words of the data, cut as the data were."""
        if self.of_bytes:
            return [f"<0x{byte:02X}>" for byte in text.encode()]
        if side not in self.pieces:
            return text.split()
        if not self.is_language_model:
            text = clean(text, unescape=False)
        # A piece may have white space other than the blank.
        return [piece for piece in self.pieces[side].split(text).split(" ") if piece]

    def subset(self, name: str) -> Any:
        """Loads a subset of the data folder. Raises UsageError for an unknown or empty one."""
        self.named_subsets(name)
        if name not in self.task.datasets:
            try:
                self.task.load_dataset(name)
            except FileNotFoundError:
                raise UsageError(f"the data folder {self.data} has no subset {name!r}") from None
        if not len(self.task.datasets[name]):
            raise UsageError(f"the subset {name!r} of {self.data} is empty")
        return self.task.datasets[name]

    def named_subsets(self, text: str) -> list[str]:
        """Comma separated names of subsets, each once. Raises UsageError for an unknown one."""
        names, there = list(dict.fromkeys(name.strip() for name in text.split(","))), self.subsets
        for name in names:
            if there and name not in there:
                raise UsageError(f"the data folder {self.data} has no subset {choice(name, there)}")
        return names

    def batches(self, dataset: Any, size: int, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields the first ``limit`` sentences in batches of ``size``, on the model's device.

        fairseq sorts the sentences of a batch by length; ``id`` identifies them. Sentences of running text are
        segments, of which ``size`` are read side by side.
        """
        if isinstance(dataset, Text):
            segment = self.task.cfg.tokens_per_sample
            rows = max(1, min(size, len(dataset) // segment))
            dataset = Streams(dataset, rows, rows, segment, all_tokens=True)
            # Complete batches: each row of the next one continues the same row of this one.
            batches = dataset.batches()[: None if limit is None else max(1, limit // rows)]
        else:
            count = len(dataset) if limit is None else min(limit, len(dataset))
            batches = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        for batch in batches:
            yield utils.apply_to_sample(lambda x: x.to(self.device), dataset.collater([dataset[i] for i in batch]))

    def run(self, batch: dict[str, Any]) -> Any:
        """The model's output for one of ``batches``; a language model remembers earlier batches."""
        model, length = self.model, getattr(self.task, "eval_memory_length", 0)
        if length:
            model = Remembering(model, self.task.evaluated, batch["segment"], length)
        return model(**batch["net_input"])


def load(
    checkpoint: str,
    data: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: str = "cpu",
    user_dir: str | None = None,
    kinds: Collection[str] = ("words",),
    fix: str = "--data",
) -> Loaded:
    """Loads the model of a checkpoint as fairseq's commands do.

    Args:
        checkpoint: the file.
        data: the data folder; by default that of the training.
        overrides: new values of training options by name, such as ``{"encoder_layers": 24}``.
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto``.
        user_dir: a folder with the user's own mechanisms, as fairseq's ``--user-dir``.
        kinds: of models that are accepted: of ``words``, of ``text`` (language models), of ``images`` and questions;
            or of ``numbers`` or ``functions`` alone.
        fix: the option that names the model's data folder, for an error.

    Raises:
        UsageError: a missing file, folder, option or GPU; a truncated checkpoint; weights that do not fit the model; an
            invalid option value; a kind of model that is not accepted.
    """
    if not os.path.isfile(checkpoint):
        raise UsageError(absent(checkpoint))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device is {device}, but PyTorch finds no GPU: choose cpu or auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _import(user_dir)
    read(checkpoint)
    state = checkpoint_utils.load_checkpoint_to_cpu(checkpoint)
    cfg, overrides = state.get("cfg"), dict(overrides or {})
    if cfg is None:
        raise UsageError(f"the checkpoint {checkpoint} has no configuration: it is not from fairseq 0.12")
    _check_overrides(overrides, cfg, checkpoint)
    trained_on = cfg.task.data
    data = _data_folder(overrides.get("data", trained_on) if data is None else data, trained_on, fix)
    if "accuracy_by" in option_names(cfg):
        # Makes the task read the types of all examples.
        overrides.setdefault("accuracy_by", "types")
    checkpoint_utils.overwrite_args_by_name(cfg, overrides | {"data": data})
    model, cfg, task = _built(checkpoint, state, user_dir)
    arch = getattr(cfg.model, "_name", None) or type(model).__name__
    updates = (state.get("optimizer_history") or [{}])[-1].get("num_updates", 0)
    loaded = Loaded(model.to(device).eval(), task, data, arch, torch.device(device), cfg, updates, trained_on)
    _check_kinds(loaded, checkpoint, kinds)
    return loaded


def _import(user_dir: str | None) -> None:
    try:
        utils.import_user_module(Namespace(user_dir=user_dir))
    except FileNotFoundError as error:
        if error.errno is not None:  # not from fairseq: a file that the user's module reads
            raise
        raise UsageError(
            f"there is no folder {user_dir}: give the folder of your own mechanisms with --user-dir"
        ) from None


def _check_overrides(overrides: Mapping[str, Any], cfg: Any, checkpoint: str) -> None:
    known, declared = option_names(cfg), kinds_of(cfg)
    for name, value in overrides.items():
        if name not in known and name not in declared:
            raise UsageError(f"--model-overrides names {name!r}, which is not an option in {checkpoint}")
        try:
            check_type(name, value, declared.get(name))
        except UsageError as error:
            raise UsageError(f"--model-overrides has an invalid value: {error}") from None


def _built(checkpoint: str, state: dict[str, Any], user_dir: str | None) -> tuple[nn.Module, Any, Any]:
    """The model, configuration and task of a checkpoint's content. Raises UsageError as ``load``."""
    _check_registered(state["cfg"], checkpoint)
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], state=state)
        return model, cfg, task
    except ValidationError as error:
        raise UsageError(f"--model-overrides has an invalid value: {error}") from error
    except UnknownName as error:
        own = state["cfg"].common.user_dir
        if own is None or user_dir and os.path.abspath(user_dir) == os.path.abspath(own):
            raise
        raise UsageError(f"{error}; {checkpoint} was trained with --user-dir {own}, so give that") from error


def _data_folder(data: str | None, trained_on: str | None, fix: str) -> str:
    """``data`` if it is a folder, or begins with one."""
    folder = utils.split_paths(data or "")[:1]
    if not folder or not os.path.isdir(folder[0]):
        which = f"{data}, which the checkpoint was trained on," if data == trained_on else data
        more = "" if data == trained_on else f"; the checkpoint was trained on {trained_on}"
        raise UsageError(f"the data folder {which} does not exist: give one with {fix}{more}")
    return data


def _check_registered(cfg: Any, checkpoint: str) -> None:
    """Raises UsageError if fairseq does not know the task or the model, as without the user's own module."""
    models = {*ARCH_MODEL_REGISTRY, *MODEL_REGISTRY}
    for option, group, registered in (("task", cfg.task, TASK_REGISTRY), ("arch", cfg.model, models)):
        name = values(group).get("_name")
        if name is not None and name not in registered:
            own = f" (it was {cfg.common.user_dir})" if cfg.common.user_dir else ""
            raise UsageError(not_registered(checkpoint, option, name) + own)


def _check_kinds(loaded: Loaded, checkpoint: str, kinds: Collection[str]) -> None:
    """Raises UsageError if the model is of none of the kinds that an analysis takes."""
    wanted = next((kind for kind in PREDICTED if kind in kinds), "words")
    check_kind(loaded.model, loaded.arch, checkpoint, wanted)
    if wanted == "words" and "text" not in kinds and loaded.is_language_model:
        raise UsageError(
            f"{loaded.arch} is a language model: this analysis needs an encoder–decoder model or a classifier; "
            "`experts` and `masks` take language models too"
        )
    if loaded.reads_images and "images" not in kinds:
        raise UsageError(f"{loaded.arch} was trained on images: this analysis needs a model of words")


#: What a model predicts, if that is not words -> what it ``reads``, a model that does, and the command for it.
PREDICTED = {
    "numbers": ("prompts", "a regressor, such as sg_regressor", "regression"),
    "functions": ("fields", "sg_operator", "operator"),
}


def check_kind(model: nn.Module, arch: str, checkpoint: str, wanted: str) -> None:
    """Raises UsageError for a model that predicts something else than ``wanted``: words, numbers or functions."""
    inputs = getattr(model, "reads", ())
    predicted = next((what for what, (read, *_) in PREDICTED.items() if read in inputs), "words")
    if predicted == wanted:
        return
    if wanted in PREDICTED:
        raise UsageError(f"{arch} predicts no {wanted}: this analysis needs {PREDICTED[wanted][1]}")
    command = PREDICTED[predicted][2]
    raise UsageError(f"{arch} predicts {predicted}: run `fairseq-sg analysis {command} {checkpoint}`")


def absent(checkpoint: str) -> str:
    """The error message for a checkpoint's name that is not a file."""
    there = Path(checkpoint)
    if there.is_dir():
        files = sorted(str(path) for path in there.glob("*.pt"))
        return f"{checkpoint} is a folder: give a checkpoint in it" + (f", such as {files[-1]}" if files else "")
    name, _, path = checkpoint.partition("=")
    if os.path.isfile(path):
        return (
            f"there is no checkpoint {checkpoint}: only `accuracy`, `consistency`, `operator` and `regression` take "
            f"names of models, omit {name}="
        )
    if not there.parent.is_dir():
        return f"there is no checkpoint {checkpoint}: there is no folder {there.parent}"
    files = sorted(path.name for path in there.parent.glob("*.pt"))
    known = nearest(there.name, files) or (f": {there.parent} has {', '.join(files[:5])}" if files else "")
    return f"there is no checkpoint {checkpoint}{known}"

"""A checkpoint, the sentence or subset for its analysis, and the model's answers."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from omegaconf.errors import ValidationError
from torch import Tensor, nn

import fairseq_sg.plugin  # noqa: F401
from data_prep.dataset import DataError
from data_prep.parallel import clean
from data_prep.sort_of_clevr.questions import words_of
from data_prep.subwords import SPACE, Subwords, model_file
from fairseq_sg.analysis.record import Recording, record
from fairseq_sg.checkpoints import not_registered, option_names, read, values
from fairseq_sg.criterions.cross_entropy_orthogonality import best
from fairseq_sg.criterions.oracle_length import given_length
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
    def subsets(self) -> list[str]:
        """The subsets of the data folder: those that are binarized, or arrays that the task reads."""
        if hasattr(self.task, "subset_names"):
            return self.task.subset_names
        return sorted({path.name.partition(".")[0] for path in Path(utils.split_paths(self.data)[0]).glob("*.idx")})

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
        return has_plain_text(utils.split_paths(self.data)[0])

    @cached_property
    def length_unit(self) -> str:
        """What lengths count: words or characters; of subwords without their plain text, pieces."""
        if self._plain:
            return unit_of(read_manifest(utils.split_paths(self.data)[0]))
        return "pieces" if any(word.startswith(SPACE) for word in self.task.source_dictionary.symbols) else "words"

    def lengths(self, name: str, dataset: Any, side: str) -> np.ndarray:
        """The length of every sentence of a subset on a ``side``, "source" or "target", in ``length_unit``, without
        begin and end symbols, int64 (sentences,).

        Raises UsageError where the plain text of subwords is not that of the subset.
        """
        if self._plain:
            folder = utils.split_paths(self.data)[0]
            found = self.plain_lengths(folder, name, side)
            if len(found) != len(dataset):
                raise UsageError(
                    f"the plain text of the subset {name!r} in {folder}/raw has {len(found):,} lines for "
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
        folder = utils.split_paths(self.data)[0]
        if not os.path.isfile(os.path.join(folder, "dataset.json")):
            return False
        return (read_manifest(folder).get("request") or {}).get("unit") == "bytes"

    @cached_property
    def pieces(self) -> dict[str, Subwords]:
        """The models of SentencePiece in the data folder, for "source" and "target"; {} for data of words.

        Raises UsageError without SentencePiece.
        """
        folder = Path(utils.split_paths(self.data)[0])
        languages = {
            side: getattr(self.task.cfg, f"{side}_lang", None) or language
            for side, language in (("source", "src"), ("target", "tgt"))
        }
        files = {side: model_file(folder, language) for side, language in languages.items()}
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
    _check_registered(cfg, checkpoint)
    try:
        (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], state=state)
    except ValidationError as error:
        raise UsageError(f"--model-overrides has an invalid value: {error}") from error
    except UnknownName as error:
        own = cfg.common.user_dir
        if user_dir is not None or own is None:
            raise
        raise UsageError(f"{error}; {checkpoint} was trained with --user-dir {own}, so give that") from error
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


@dataclass
class Sentence:
    """One sentence and the model's answer to it.

    Attributes:
        inputs: the model's arguments, a batch of one.
        source: the words that the encoder reads, with begin and end symbols.
        previous: the words that the decoder reads, from the first on; empty for a model without a decoder.
        expected: the words that the decoder should answer: the given target, or the model's own output.
        predicted: the words that it does answer; for a model without a decoder, the class.
        complete: False if the model's own output was cut at the maximum length.
    """

    inputs: dict[str, Tensor]
    source: list[str]
    previous: list[str]
    expected: list[str]
    predicted: list[str]
    complete: bool = True

    def words(self, role: str) -> dict[str, list[str]]:
        """The labels of rows (``queries``) and columns (``keys``) of the attention matrices in a role.

        Rows of the decoder's self-attention are named by the word it reads there, rows of cross-attention by
        the word it should answer.
        """
        return {
            "encoder": {"queries": self.source, "keys": self.source},
            "decoder": {"queries": self.previous, "keys": self.previous},
            "cross": {"queries": self.expected, "keys": self.source},
        }[role]

    def facts(self) -> dict[str, Any]:
        return {"source": self.source, "target": self.expected, "output": self.predicted, "complete": self.complete}

    def summary(self) -> list[str]:
        cut = "" if self.complete else "  (cut at the longest target of the data, or at --max-len)"
        return [f"source  {' '.join(self.source)}", f"output  {' '.join(self.predicted)}{cut}"]


@torch.no_grad()
def read_sentence(
    loaded: Loaded,
    source: str | Sequence[str],
    target: str | Sequence[str] | None = None,
    longest: int | None = None,
) -> Sentence:
    """The sentence ``source`` with a target or with the model's own output.

    Sentences are in words of the data. Where those are pieces of SentencePiece, a text without ▁ at the beginning of
    a word is plain, and is split.

    The own output is generated greedily, up to ``longest`` words including the end symbol. The default of ``longest``
    is the maximum target length of the data. With ``--oracle-length`` there is no end symbol, and ``longest`` is the
    number of words.

    Raises UsageError for an unknown word, an empty text, a target for a model without a decoder, a ``longest`` where no
    output is generated, a model that labels words, and an output without an end and of no given length.
    """
    if longest is not None and (target is not None or not loaded.has_decoder):
        raise UsageError("--max-len limits an output that the model generates, and it generates none here: omit it")
    if loaded.labels_words:
        raise UsageError(f"{loaded.arch} labels words: this analysis needs an encoder–decoder model or a classifier")
    task, model = loaded.task, loaded.model
    source, target = as_words(loaded, source, "source"), as_words(loaded, target, "target")
    tokens = encode(source, task.source_dictionary, "--input", loaded.data)
    dataset = task.build_dataset_for_inference([tokens], [len(tokens)])
    inputs = dataset.collater([dataset[0]])["net_input"]
    inputs = {name: x.to(loaded.device) for name, x in inputs.items() if isinstance(x, Tensor)}
    words = [task.source_dictionary[i] for i in inputs["src_tokens"][0].tolist()]
    answers = task.target_dictionary
    if not loaded.has_decoder:
        if target is not None:
            raise UsageError(f"{loaded.arch} has no decoder: omit --target")
        predicted = model(**inputs)[0].argmax(-1).item()
        return Sentence(inputs, words, [], [], [answers[answers.nspecial + predicted]])
    eos, complete = answers.eos(), True
    if target is None:
        if given_length(task) and longest is None:
            raise UsageError(
                f"with --oracle-length, {loaded.arch} cannot end an output: give --target, or the number of words as "
                "--max-len"
            )
        output = _greedy(loaded, inputs, longest or loaded.longest_target or 200)
        complete = output[-1:] == [eos] or given_length(task)
    else:
        output = encode(target, answers, "--target", loaded.data, "target").tolist()
        output = output[:-1] if given_length(task) else output
    inputs["prev_output_tokens"] = torch.tensor([[eos, *output[: len(output) - 1]]], device=loaded.device)
    predicted = _answers(loaded, model(**inputs)[0])[0].tolist()
    previous = inputs["prev_output_tokens"][0].tolist()
    named = ([answers[i] for i in indices] for indices in (previous, output, predicted))
    return Sentence(inputs, words, *named, complete=complete)


def as_words(loaded: Loaded, given: str | Sequence[str] | None, side: str) -> Sequence[str] | None:
    """A text as words of the data; words, and pieces with their ▁, stay as they are."""
    if not isinstance(given, str):
        return given
    words = given.split()
    return words if any(word.startswith(SPACE) for word in words) else loaded.split(given, side)


@dataclass(kw_only=True)
class Question(Sentence):
    """One question on an image; ``source`` names CLS and the patches, ``predicted`` has the model's answer.

    Attributes:
        image: uint8 (H, W, 3).
        subset, index: where the question is.
        words_asked: the question in words; answer: the right answer.
    """

    image: np.ndarray
    subset: str
    index: int
    words_asked: str
    answer: str

    def facts(self) -> dict[str, Any]:
        asked = {"subset": self.subset, "index": self.index, "question": self.words_asked, "answer": self.answer}
        return {**asked, "output": self.predicted[0], "source": self.source}

    def summary(self) -> list[str]:
        return [f"question {self.index} of {self.subset}: {self.words_asked}", f"answer  {self.told}"]

    @property
    def told(self) -> str:
        """The model's answer, and the right one where that is another."""
        right = self.predicted == [self.answer]
        return self.predicted[0] + ("" if right else f", and {self.answer} is right")


@torch.no_grad()
def read_questions(loaded: Loaded, subset: str, indices: Sequence[int]) -> list[Question]:
    """Questions of a subset by their numbers from 0 on, with the model's answers. Raises UsageError for others."""
    dataset, task = loaded.subset(subset), loaded.task
    for index in indices:
        if not 0 <= index < len(dataset):
            raise UsageError(f"--index is {index}: {subset} has the questions 0 to {len(dataset) - 1:,}")
    found = []
    for index in indices:
        batch = dataset.collater([dataset[index]])
        inputs = {name: x.to(loaded.device) for name, x in batch["net_input"].items()}
        image, bits = (batch["net_input"][name][0].numpy() for name in ("images", "questions"))
        answer = task.answers[loaded.model(**inputs)[0].argmax(-1).item()]
        right = task.answers[batch["target"].item()]
        names = loaded.model.encoder.embedding.names
        place = {"subset": subset, "index": index, "words_asked": words_of(bits), "answer": right}
        found.append(Question(inputs, names, [], [], [answer], image=image, **place))
    return found


@torch.no_grad()
def record_sentence(loaded: Loaded, args: Namespace) -> tuple[Sentence, Recording]:
    """The sentence or question that the options of ``add_sentence`` define, and the recording of its pass.

    Raises UsageError for an option of the other kind of model.
    """
    if loaded.reads_images:
        if args.index is None or args.target is not None or args.max_len is not None:
            raise UsageError(
                f"{loaded.arch} was trained on images: give --index, the number of a question in --subset, instead of "
                "--input, --target and --max-len"
            )
        sentence: Sentence = read_questions(loaded, args.subset or "test", [args.index])[0]
    elif args.input is None:
        raise UsageError(f"{loaded.arch} reads words: give --input instead of --index")
    elif args.subset is not None:
        raise UsageError(f"{loaded.arch} reads the words of --input: omit --subset, which is for models of images")
    else:
        sentence = read_sentence(loaded, args.input, args.target, args.max_len)
    with record(loaded.model) as recording:
        loaded.model(**sentence.inputs)
    return sentence, recording


def encode(line: str | Sequence[str], dictionary: Dictionary, name: str, data: str, side: str = "source") -> Tensor:
    """The words of a line, or of a list, and the end symbol, int64.

    Raises UsageError, in which the line is called ``name``, for an unknown word and a line without words.
    """
    words = line.split() if isinstance(line, str) else line
    if not words:
        raise UsageError(f"{name} has no words")
    numbers = numbers_of(words, dictionary, name, f"the {side} dictionary of {data}")
    return torch.tensor([*numbers, dictionary.eos()])


def numbers_of(words: Sequence[str], dictionary: Dictionary, name: str, which: str) -> list[int]:
    """The numbers of words. Raises UsageError for an unknown one of ``name``, in which the dictionary is ``which``."""
    for word in words:
        if dictionary.index(word) < dictionary.nspecial:
            known = nearest(word, dictionary.symbols[dictionary.nspecial :])
            raise UsageError(f"{name} has the word {word!r}, which is not in {which}{known}")
    return [dictionary.index(word) for word in words]


def _greedy(loaded: Loaded, inputs: dict[str, Tensor], longest: int) -> list[int]:
    """The model's greedy output, up to the end symbol or to ``longest`` words."""
    model, end = loaded.model, loaded.task.target_dictionary.eos()
    encoder_out = model.encoder(**inputs)
    output: list[int] = []
    while len(output) < longest and output[-1:] != [end]:
        previous = torch.tensor([[end, *output]], device=loaded.device)
        logits = model.decoder(previous, encoder_out=encoder_out)[0]
        output.append(int(_answers(loaded, logits)[0, -1]))
    return output


def _answers(loaded: Loaded, logits: Tensor) -> Tensor:
    """The best words, int64 (B, N); with ``--oracle-length``, the end symbol is none. Logits are (B, N, V)."""
    dictionary = loaded.task.target_dictionary
    if given_length(loaded.task):
        logits = logits.clone()
        logits[..., dictionary.eos()] = -torch.inf
    return best(logits, dictionary.pad())

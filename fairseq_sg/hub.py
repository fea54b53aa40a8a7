"""Trained models in Python: ``fairseq_sg.load(CHECKPOINT)`` (docs/python.md).

    model = fairseq_sg.load("runs/scan26/relative-seed1/checkpoint_best.pt")
    model.translate(["jump twice"])        # ["I_JUMP I_JUMP"]
    model.accuracy("gen")                  # exact match in percent, as fairseq_sg.evaluate prints it

Of fairseq's hub interface this uses the search alone (``GeneratorHubInterface.generate``). The rest does not fit: its
loader ignores the data folder that the checkpoint names, it silently reads an unknown word as ``<unk>``, and it knows
neither classifiers nor the texts of ``sg_language_modeling``.
"""

from __future__ import annotations

import copy
import math
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data.data_utils import post_process
from fairseq.dataclass.configs import DatasetConfig, GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg import evaluate, ranges
from fairseq_sg.analysis import checkpoint as checkpoints
from fairseq_sg.analysis.attention_maps import roles_of
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.record import record
from fairseq_sg.analysis.sentence import encode, read_sentence
from fairseq_sg.checks import FAIRSEQ
from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import choice

#: The options of fairseq-generate that ``translate`` takes beside the beam.
SEARCH = (
    *("max_len_a", "max_len_b", "min_len", "lenpen", "unnormalized", "unkpen", "temperature", "no_repeat_ngram_size"),
    *("sampling", "sampling_topk", "sampling_topp"),
)
#: Options of the commands -> the arguments that they are here.
ARGUMENTS = {"--model-overrides": "overrides", "--input": "source", "--max-len": "longest"} | {
    ranges.flag(name): name for name in ("data", "device", "user_dir", "target", "batch_size", "beam", *SEARCH)
}

TRANSLATES, CLASSIFIES, SCORES = "an encoder–decoder model", "a classifier", "a language model"
ANSWERS, LABELS = "a classifier of images", "a model that labels words"
#: kind of model -> its methods
METHODS = {
    TRANSLATES: (".translate", ".accuracy", ".evaluate", ".attention"),
    CLASSIFIES: (".classify", ".accuracy", ".evaluate", ".attention"),
    SCORES: (".score", ".evaluate"),
    ANSWERS: (".accuracy", ".evaluate"),
    LABELS: (".accuracy", ".evaluate"),
}


def load(
    checkpoint: str | os.PathLike,
    data: str | os.PathLike | None = None,
    device: str | torch.device = "auto",
    overrides: dict[str, Any] | None = None,
    user_dir: str | os.PathLike | None = None,
) -> TrainedModel:
    """Loads a trained model; its task and its options are the checkpoint's.

    Args:
        checkpoint: a file of fairseq-train, such as ``runs/NAME/checkpoint_best.pt``.
        data: the data folder; by default the one of the training.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` is a GPU where there is one.
        overrides: other options than those of the training, such as ``{"encoder_layers": 24}``.
        user_dir: the folder of mechanisms of your own, as fairseq's ``--user-dir``.

    Raises:
        UsageError: no such file; a file that is no checkpoint; no such data folder, or one with other dictionaries; an
            unknown option or a value that does not fit the weights; no GPU.
    """
    for name, path in (("checkpoint", checkpoint), ("data", data), ("user_dir", user_dir)):
        if not isinstance(path, (str, os.PathLike)) and (path is not None or name == "checkpoint"):
            raise UsageError(f"`{name}` is {path!r}: give a path")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise UsageError(f"`overrides` is {overrides!r}: give a dict of options")
    checkpoint, data, user_dir = (path if path is None else os.fspath(path) for path in (checkpoint, data, user_dir))
    device = str(device)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"`device` is {device!r}: choose cpu, cuda, cuda:1 (and so on) or auto")
    # The weights that are drawn and then replaced leave the user's random numbers as they were.
    with arguments(), torch.random.fork_rng(devices=[]):
        return TrainedModel(
            checkpoints.load(checkpoint, data, overrides, device, user_dir, ("words", "text", "images")),
            checkpoint,
        )


@dataclass
class AttentionMaps:
    """The attention weights of one sentence.

    Attributes:
        weights: role (``encoder``, ``decoder``, ``cross``) -> float32 (heads, queries, keys) of every step: of every
            layer, or of every turn of a shared one.
        queries, keys: role -> the words of rows and of columns. Rows of cross-attention are named by the word to
            predict there.
        source: the words that the encoder reads, with begin and end symbols.
        target: the words that the decoder should answer: the given target, or the model's own output.
        output: the words that the model answers; a classifier's class.
    """

    weights: dict[str, list[np.ndarray]]
    queries: dict[str, list[str]]
    keys: dict[str, list[str]]
    source: list[str]
    target: list[str]
    output: list[str]

    def __repr__(self) -> str:
        sizes = [
            f"{role} {len(steps)} × {' × '.join(map(str, steps[0].shape))}" for role, steps in self.weights.items()
        ]
        return f"<AttentionMaps, steps × heads × queries × keys: {', '.join(sizes)}>"


class TrainedModel:
    """A model of ``load``, in evaluation mode.

    Sentences are in words of the data. Where the data are subwords of SentencePiece or bytes, they are plain text.

    Attributes:
        loaded: model, task and data folder, for the functions of ``fairseq_sg.analysis``.
        checkpoint: the file.
    """

    def __init__(self, loaded: Loaded, checkpoint: str):
        self.loaded, self.checkpoint = loaded, checkpoint

    def __repr__(self) -> str:
        return (
            f"<{self.loaded.arch}, {self.kind}: {', '.join(METHODS[self.kind])}; data {self.loaded.data}, "
            f"{self.loaded.device}>"
        )

    @property
    def kind(self) -> str:
        if self.loaded.labels_words:
            return LABELS
        if not self.loaded.has_decoder:
            return ANSWERS if self.loaded.reads_images else CLASSIFIES
        return TRANSLATES if hasattr(self.loaded.model, "encoder") else SCORES

    # Answers.

    def translate(
        self, sentences: str | Sequence[str], beam: int = 1, batch_size: int = 64, **search: Any
    ) -> str | list[str]:
        """The best output for every sentence, as ``fairseq-generate`` finds it; for one sentence, one output.

        Args:
            beam: the width of the beam; 1 is greedy.
            search: further options of fairseq-generate: ``lenpen=0.6``, ``max_len_b=50``, … (``SEARCH``). By default an
                output has at most 200 words, and may be empty.

        Raises UsageError for an unknown word or option, a sentence that is too long, and another kind of model.
        """
        self._needs(".translate")
        for name in search:
            if name not in SEARCH:
                raise UsageError(f".translate has no argument {choice(name, ('beam', 'batch_size', *SEARCH))}")
        for name, value in {"beam": beam, **search}.items():
            if value is None:
                raise UsageError(f"`{name}` is None: leave it out")
        check_values(beam=beam, batch_size=batch_size, **search)
        if isinstance(sentences, str):
            return self.translate([sentences], beam, batch_size, **search)[0]
        sentences = texts_of(sentences)
        if not sentences:
            return []
        self._search.cfg.dataset.batch_size, self._search.cfg.dataset.max_tokens = batch_size, None
        tokens = self._read(sentences)
        with arguments():
            try:
                found = self._search.generate(tokens, beam=beam, **{"min_len": 0, "nbest": beam} | search)
            except AssertionError as error:  # of options that do not fit together, such as min_len above max_len_b
                raise UsageError(f"fairseq's search refuses these arguments of .translate: {error}") from error
        dictionary = self.loaded.task.target_dictionary
        return [self._joined(dictionary.string(best[0]["tokens"])) for best in found]

    def classify(self, sentences: str | Sequence[str], batch_size: int = 64) -> str | list[str]:
        """The class of every sentence, a word of the data; for one sentence, one class.

        Raises UsageError for an unknown word, a sentence that is too long, and another kind of model.
        """
        self._needs(".classify")
        check_values(batch_size=batch_size)
        if isinstance(sentences, str):
            return self.classify([sentences])[0]
        tokens, task = self._read(texts_of(sentences)), self.loaded.task
        dataset = task.build_dataset_for_inference(tokens, list(map(len, tokens)))
        found = [""] * len(tokens)
        with torch.no_grad():
            for batch in self.loaded.batches(dataset, batch_size):
                classes = self.loaded.run(batch)[0].argmax(-1) + task.target_dictionary.nspecial
                for number, index in zip(batch["id"].tolist(), classes.tolist(), strict=True):
                    found[number] = task.target_dictionary[index]
        return found

    @torch.no_grad()
    def score(self, texts: str | Sequence[str]) -> float | list[float]:
        """The log probability of every text in bits (base 2), the sum over its tokens; for one text, one number.

        A text is read from its beginning, in one pass and by itself, so that no score depends on other texts.

        Raises UsageError for an unknown word, a text that is empty or too long, and another kind of model.
        """
        self._needs(".score")
        if isinstance(texts, str):
            return self.score([texts])[0]
        model, found = self.loaded.model, []
        for number, text in enumerate(texts_of(texts), start=1):
            tokens = self._read_text(text, f"text {number}").to(self.loaded.device)[None]
            start = tokens.new_full((1, 1), self.loaded.task.source_dictionary.eos())
            logits = model(torch.cat([start, tokens[:, :-1]], dim=1))[0]
            of_tokens = logits.double().log_softmax(-1).gather(-1, tokens[..., None])
            found.append(of_tokens.sum().item() / math.log(2))
        return found

    # Numbers.

    def accuracy(self, subset: str, batch_size: int = 64) -> float:
        """The exact match on a subset of the data folder in percent, as ``python -m fairseq_sg.evaluate`` prints it.

        Raises UsageError for an unknown subset and for a language model.
        """
        self._needs(".accuracy")
        return self.evaluate(subset, batch_size)["accuracy"]

    def evaluate(self, subset: str, batch_size: int = 64) -> dict[str, Any]:
        """All numbers of ``python -m fairseq_sg.evaluate`` for a subset, by the names of its ``--json``.

        Of a text, ``batch_size`` is the number of parallel streams, and another one gives other numbers.

        Raises UsageError for an unknown subset.
        """
        check_values(batch_size=batch_size)
        if not isinstance(subset, str):
            raise UsageError(f"`subset` is {subset!r}: give the name of a subset")
        return evaluate.measure(self.loaded, subset, batch_size, self.checkpoint)

    def attention(self, source: str, target: str | None = None, longest: int | None = None) -> AttentionMaps:
        """The attention weights of all roles, steps and heads for one sentence.

        Args:
            target: the output whose words the decoder reads; by default the model's own greedy output.
            longest: the most words of its own output, with the end symbol; by default the longest target of the data.

        Raises UsageError for an unknown word, a target for a classifier, a language model, and for a model without
        attentions of fairseq_sg.
        """
        self._needs(".attention")
        check_texts(source, *[] if target is None else [target])
        words = self.loaded.split(source)
        target = None if target is None else self.loaded.split(target, "target")
        with arguments():
            ranges.check_type("max_len", longest, int | None)
        if longest is not None and longest < 1:
            raise UsageError(f"`longest` is {longest}: choose 1 or more words")
        with arguments():
            sentence = read_sentence(self.loaded, words, target, longest)
        with torch.no_grad(), record(self.loaded.model) as recording:
            self.loaded.model(**sentence.inputs)
        roles = roles_of(recording, self.loaded.arch)
        words = {role: sentence.words(role) for role in roles}
        return AttentionMaps(
            {role: [call.weights[0].float().cpu().numpy() for call in recording.steps(role)] for role in roles},
            {role: words[role]["queries"] for role in roles},
            {role: words[role]["keys"] for role in roles},
            sentence.source,
            sentence.expected,
            sentence.predicted,
        )

    # Text and tokens.

    def _needs(self, method: str) -> None:
        methods = METHODS[self.kind]
        if method not in methods:
            raise UsageError(f"{self.loaded.arch} is {self.kind} and has no {method}: use {', '.join(methods)}")

    def _read(self, sentences: Sequence[str]) -> list[Tensor]:
        """The tokens of every sentence and its end symbol, int64. Raises UsageError for one that is too long."""
        task, model = self.loaded.task, self.loaded.model
        for number, sentence in enumerate(sentences, start=1):
            if "\n" in sentence:
                raise UsageError(f"sentence {number} has a line break: give a list with a string for each sentence")
        rows = [
            encode(self.loaded.split(sentence), task.source_dictionary, f"sentence {number}", self.loaded.data)
            for number, sentence in enumerate(sentences, start=1)
        ]
        dataset = task.build_dataset_for_inference(rows, list(map(len, rows)))
        most = source_limit(utils.resolve_max_positions(task.max_positions(), model.max_positions()))
        for index in range(len(rows)):
            size = source_limit(dataset.size(index))
            if size > most:
                raise UsageError(f"sentence {index + 1} has {size} tokens: the model takes at most {most}")
        return rows

    def _read_text(self, text: str, name: str) -> Tensor:
        """The tokens of a text for a language model, int64. Raises UsageError for one that is too long."""
        dictionary, limit = self.loaded.task.source_dictionary, source_limit(self.loaded.model.max_positions())
        # In a text of subwords, the end symbol stands for the end of a line.
        lines = [text] if self.loaded.of_bytes else text.split("\n")
        end = torch.tensor([dictionary.eos()])
        tokens = [
            encode(self.loaded.split(line), dictionary, name, self.loaded.data) if line else end for line in lines
        ]
        tokens = torch.cat(tokens)[:-1]
        if len(tokens) == 0:
            raise UsageError(f"{name} is empty")
        if len(tokens) > limit:
            raise UsageError(f"{name} has {len(tokens)} tokens: the model takes at most {limit}")
        return tokens

    @cached_property
    def _search(self) -> GeneratorHubInterface:
        loaded = self.loaded
        found = GeneratorHubInterface(copy.deepcopy(loaded.cfg), loaded.task, [loaded.model]).to(loaded.device)
        # fairseq's replaces a method of the model, which then can neither be pickled nor trained.
        vars(loaded.model).pop("train", None)
        return found

    def _joined(self, words: str) -> str:
        """Words of the target as text."""
        return post_process(words, "sentencepiece" if "target" in self.loaded.pieces else "none")


def check_values(**values: Any) -> None:
    """Raises UsageError for a value that is not of the type, or not in the range, of fairseq's option of that name."""
    kinds = typing.get_type_hints(GenerationConfig) | typing.get_type_hints(DatasetConfig)
    with arguments():
        for name, value in values.items():
            ranges.check_type(name, value, kinds.get(name))
            ranges.check_value(name, value, FAIRSEQ.get(name, {}))


def texts_of(given: Any) -> list[str]:
    """Several texts. Raises UsageError for what is none."""
    if not isinstance(given, Iterable):
        check_texts(given)
    texts = list(given)
    check_texts(*texts)
    return texts


def check_texts(*texts: Any) -> None:
    """Raises UsageError for one that is no string."""
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"{text!r} is no text: give a string, or a list of strings where several are read")


def source_limit(sizes: Any) -> float:
    """Of the sizes (or largest sizes) of source and target that of the source; infinity for None."""
    size = sizes[0] if isinstance(sizes, (tuple, list)) else sizes
    return math.inf if size is None else size


@contextmanager
def arguments() -> Iterator[None]:
    """Messages of the commands name options; here they are arguments."""
    try:
        yield
    except UsageError as error:
        named = re.sub("--[a-z]+(-[a-z]+)*", lambda flag: _argument(flag[0]), str(error))
        raise UsageError(named) from None


def _argument(option: str) -> str:
    return f"`{ARGUMENTS[option]}`" if option in ARGUMENTS else option

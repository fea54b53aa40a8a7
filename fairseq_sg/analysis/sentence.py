"""A sentence, or a question on an image, for an analysis of a model, and the model's answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from data_prep.sort_of_clevr.questions import words_of
from data_prep.subwords import SPACE
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.record import Recording, record
from fairseq_sg.criterions.cross_entropy_orthogonality import best
from fairseq_sg.criterions.oracle_length import given_length
from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import nearest


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

"""Generation by fairseq's generators: options that they get wrong, and outputs that do not depend on their batch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_sg.errors import UsageError


def check(args: Any, left_pad_target: bool = False) -> None:
    """Raises UsageError for options of generation that have no effect together, or whose outputs are wrong.

    Args:
        args: fairseq's ``GenerationConfig``, or a namespace with some of its options.
    """

    def given(name: str, otherwise: Any) -> Any:
        value = getattr(args, name, otherwise)
        return otherwise if value is None else value

    beam, nbest, sampling = given("beam", 5), given("nbest", 1), given("sampling", False)
    scored = given("score_reference", False)
    if given("diverse_beam_groups", -1) > 0:
        raise UsageError("fairseq's --diverse-beam-groups mixes up the sentences of a batch: leave it out")
    if given("match_source_len", False):
        raise UsageError(
            "fairseq's --match-source-len counts the symbols at the ends of a source as words, and the longest source "
            "of the batch: choose --max-len-a and --max-len-b"
        )
    if sampling and nbest != beam:
        raise UsageError(f"--sampling draws {beam} outputs of a sentence (--beam): give --nbest {beam}, or --beam 1")
    if nbest > beam > 0:
        raise UsageError(f"--nbest {nbest} needs as many hypotheses: give --beam {nbest}")
    if given("retain_iter_history", False) or given("print_step", False):
        raise UsageError(
            "--retain-iter-history and --print-step are for models that decode iteratively: leave them out"
        )
    if scored and given("print_alignment", None):
        raise UsageError("--score-reference has no alignments: leave --print-alignment out")
    if left_pad_target and (scored or given("prefix_size", 0) > 0):
        raise UsageError(
            "fairseq reads --prefix-size and --score-reference from the left end of targets, where --left-pad-target "
            "has padding: leave it out, outputs do not depend on it"
        )


def with_scores(generate: Callable, *args, **kwargs) -> list:
    """The outputs of fairseq's ``generate``. Raises UsageError where no hypothesis has a score: its search fails."""
    try:
        return generate(*args, **kwargs)
    except AssertionError as error:
        # Its step is the last, and no output has ended.
        if not re.fullmatch(r"(\d+) < \1", str(error)):
            raise
        raise UsageError(
            "fairseq's search finds no output with a finite score. If `fairseq-sg evaluate` has a loss of NaN, the "
            "training has diverged: take an earlier checkpoint"
        ) from error


#: Options that fairseq's parsers of evaluations have and its commands do not read, with what to do.
UNREAD = {
    "num_shards": "fairseq evaluates all shards at once: leave it out",
    "shard_id": "fairseq evaluates all shards at once: leave it out",
    "max_valid_steps": "it is for validations in training: leave it out",
    "criterion": "the criterion is that of the training: leave it out",
    "lm_path": "fairseq gives the language model the folder of the translations: leave it out",
    "batch_size_valid": "it is for validations in training: choose --batch-size",
    "max_tokens_valid": "it is for validations in training: choose --max-tokens",
    **{
        f"iter_decode_{name}": "it is for models that decode iteratively: leave it out"
        for name in ("eos_penalty", "max_iter", "force_max_iter", "with_beam", "with_external_reranker")
    },
    "decoding_format": "it is for models that decode iteratively: leave it out",
    **{
        name: "it is for tasks of speech: leave it out"
        for name in ("beam_mt", "max_len_a_mt", "max_len_b_mt", "lenpen_mt", "eos_token")
    },
    "no_early_stop": "fairseq does not read it: leave it out",
    "no_beamable_mm": "it is for fairseq's convolutional models: leave it out",
    "diverse_beam_strength": "it is for --diverse-beam-groups: leave it out",
    "replace_unk": "the dictionaries have all words of the data: leave it out",
    "max_sentences_valid": "it is for validations in training: choose --batch-size",
    "nval": "it is for validations in training: leave it out",
    "lm_weight": "there is no language model: leave it out",
    "sacrebleu": "choose --scoring sacrebleu",
    **{
        name: "fairseq evaluates in float32, or in float16 with --fp16: leave it out"
        for name in ("bf16", "memory_efficient_bf16", "amp")
    },
}
#: The same of ``fairseq-validate`` alone, and of all other commands.
UNREAD_BY_VALIDATE = {
    "gen_subset": "choose --valid-subset",
    "results_path": "results are printed: leave it out",
    "scoring": "nothing is generated: use fairseq-generate",
}
UNREAD_BY_OTHERS = {"valid_subset": "choose --gen-subset"}
#: The same of ``fairseq-interactive`` alone.
UNREAD_BY_INTERACTIVE = {
    "prefix_size": "there are no references: use fairseq-generate",
    "score_reference": "there are no references: use fairseq-generate",
    "scoring": "there are no references: use fairseq-generate",
    "results_path": "results are printed: leave it out",
    "quiet": "its outputs are what it is for: leave it out",
    "gen_subset": "the inputs are those of --input: leave it out",
    "valid_subset": "the inputs are those of --input: leave it out",
}
#: Values of ``--post-process`` that remove all spaces; after them, a ``--bpe`` finds no subwords to join.
REMOVES_SPACES = ("sentencepiece", "wordpiece", "letter", "_EOW")
#: Packages of fairseq's scorers.
PACKAGES = {"wer": "editdistance", "meteor": "nltk", "bert_score": "bert_score"}


def check_command(args: Any, words: list[str]) -> None:
    """``check`` for a command that evaluates a checkpoint.

    Args:
        args: all options of the command. words: those that were given.
    """
    interactive = hasattr(args, "buffer_size")
    validates = not hasattr(args, "beam") and not hasattr(args, "context_window")
    unread = UNREAD | (UNREAD_BY_VALIDATE if validates else UNREAD_BY_OTHERS)
    unread |= UNREAD_BY_INTERACTIVE if interactive else {}
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        if why := unread.get(flag.removeprefix("--").replace("-", "_")):
            raise UsageError(f"{flag} has no effect here: {why}")
    if not hasattr(args, "beam"):
        return
    check(args)
    if args.distributed_world_size > 1:
        raise UsageError(
            f"--distributed-world-size {args.distributed_world_size}: fairseq generates in one process, and only one "
            "part of the sentences: leave it out"
        )
    if not args.sampling and (args.sampling_topk > 0 or args.sampling_topp > 0):
        raise UsageError("--sampling-topk and --sampling-topp are for --sampling: add it")
    if args.score_reference and args.scoring == "exact_match":
        raise UsageError("--score-reference generates nothing that --scoring exact_match could count: leave one out")
    if args.min_len > args.max_len_b and not args.max_len_a:
        raise UsageError(f"--min-len {args.min_len} is above --max-len-b {args.max_len_b}: choose a larger --max-len-b")
    if args.bpe and args.post_process in REMOVES_SPACES:
        raise UsageError(
            f"--bpe {args.bpe} and --post-process {args.post_process} both join the subwords, and the second time the "
            "spaces between words go: leave one of the two out"
        )
    package = PACKAGES.get(args.scoring)
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f"--scoring {args.scoring} needs a package: pip install {package.replace('_', '-')}")
    if interactive and args.print_alignment == "soft":
        raise UsageError("--print-alignment soft is for fairseq-generate: choose hard, or leave it out")
    if interactive and args.input != "-" and not os.path.isfile(args.input):
        raise UsageError(f"--input {args.input}: there is no such file")
    if interactive and (args.batch_size or 0) > max(args.buffer_size, 1):
        raise UsageError(f"--batch-size {args.batch_size} needs as many lines: add --buffer-size {args.batch_size}")


def by_length(sample: dict[str, Any], pad: int, generate: Callable[[dict[str, Any], Tensor], list]) -> list:
    """The outputs for a batch, generated together where sources have the same length.

    Args:
        sample: fairseq's batch. pad: the padding symbol, on either side of ``src_tokens``.
        generate: gets some sentences as a batch without padding, and their numbers, int64 (b,); returns their outputs.
    """
    inputs = {name: x for name, x in sample["net_input"].items() if torch.is_tensor(x)}
    tokens, lengths = inputs["src_tokens"], inputs["src_lengths"]  # (B, M), (B,)
    found: list[Any] = [None] * len(lengths)
    for length in lengths.unique():
        rows = (lengths == length).nonzero().squeeze(1)
        real = tokens[rows].ne(pad).any(0)
        part = {name: x[rows] for name, x in inputs.items()} | {"src_tokens": tokens[rows][:, real]}
        for row, outputs in zip(rows.tolist(), generate({"net_input": part}, rows), strict=True):
            found[row] = outputs
    return found

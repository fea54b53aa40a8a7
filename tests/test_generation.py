"""Options of generation that fairseq gets wrong, and batches of inputs of one length."""

from __future__ import annotations

import re
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import options

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.generation import by_length, check, check_command


def test_what_is_right():
    for args in ({}, {"beam": 3, "nbest": 3, "sampling": True, "sampling_topk": 2}, {"nbest": None, "prefix_size": 2}):
        check(Namespace(**args))


@pytest.mark.parametrize(
    "args, message",
    [
        ({"diverse_beam_groups": 2}, "--diverse-beam-groups mixes up the sentences of a batch"),
        ({"match_source_len": True}, "--match-source-len counts the symbols at the ends of a source"),
        ({"sampling": True}, "give --nbest 5, or --beam 1"),
        ({"beam": 2, "nbest": 3}, "--nbest 3 needs as many hypotheses: give --beam 3"),
        ({"print_step": True}, "are for models that decode iteratively"),
        ({"score_reference": True, "print_alignment": "hard"}, "leave --print-alignment out"),
    ],
)
def test_what_is_wrong(args, message):
    with pytest.raises(UsageError, match=message):
        check(Namespace(**args))


@pytest.mark.parametrize("args", [{"score_reference": True}, {"prefix_size": 2}])
def test_what_reads_targets_from_their_left_end(args):
    check(Namespace(**args))
    with pytest.raises(UsageError, match="--left-pad-target has padding"):
        check(Namespace(**args), left_pad_target=True)


GENERATE = dict(
    beam=5, scoring="bleu", score_reference=False, min_len=0, max_len_a=0, max_len_b=200, batch_size=None,
    sampling=False, sampling_topk=-1, sampling_topp=-1.0, input="-", print_alignment=None, bpe=None, post_process=None,
    distributed_world_size=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "args, words, message",
    [
        ({}, ["--num-shards=2"], "--num-shards has no effect here: fairseq evaluates all shards at once"),
        ({}, ["--max-valid-steps", "2"], "--max-valid-steps has no effect here"),
        ({}, ["--bf16"], "--bf16 has no effect here: fairseq evaluates in float32, or in float16 with --fp16"),
        ({}, ["--amp"], "--amp has no effect here: fairseq evaluates in float32"),
        (
            {},
            ["--batch-size-valid", "2"],
            "--batch-size-valid has no effect here: it is for validations in training: choose --batch-size",
        ),
        ({}, ["--iter-decode-max-iter=2"], "--iter-decode-max-iter has no effect here: it is for models that decode"),
        ({"buffer_size": 0}, ["--prefix-size", "1"], "--prefix-size has no effect here: there are no references"),
        ({"buffer_size": 2, "batch_size": 4}, [], "--batch-size 4 needs as many lines: add --buffer-size 4"),
        (
            {"distributed_world_size": 2},
            [],
            "--distributed-world-size 2: fairseq generates in one process, and only one",
        ),
        ({"sampling_topk": 3}, [], "--sampling-topk and --sampling-topp are for --sampling: add it"),
        ({"sampling_topp": 0.9}, [], "--sampling-topk and --sampling-topp are for --sampling: add it"),
        ({"min_len": 9, "max_len_b": 5}, [], "--min-len 9 is above --max-len-b 5"),
        ({"score_reference": True, "scoring": "exact_match"}, [], "--score-reference generates nothing"),
        (
            {"bpe": "sentencepiece", "post_process": "sentencepiece"},
            [],
            "--bpe sentencepiece and --post-process sentencepiece both join the subwords, and the second time",
        ),
        ({"scoring": "bert_score"}, [], "--scoring bert_score needs a package: pip install bert-score"),
        ({"buffer_size": 0, "input": "no/such/file"}, [], "--input no/such/file: there is no such file"),
        ({}, ["--replace-unk"], "--replace-unk has no effect here: the dictionaries have all words of the data"),
        ({}, ["--valid-subset", "gen"], "--valid-subset has no effect here: choose --gen-subset"),
        ({}, ["--sacrebleu"], "--sacrebleu has no effect here: choose --scoring sacrebleu"),
        ({}, ["--decoding-format", "unigram"], "--decoding-format has no effect here: it is for models that decode"),
        ({}, ["--lenpen-mt", "2"], "--lenpen-mt has no effect here: it is for tasks of speech: leave it out"),
        ({}, ["--no-early-stop"], "--no-early-stop has no effect here: fairseq does not read it: leave it out"),
        ({}, ["--diverse-beam-strength", "1"], "--diverse-beam-strength has no effect here: it is for --diverse-beam-"),
        ({"buffer_size": 0}, ["--gen-subset", "x"], "--gen-subset has no effect here: the inputs are those of --input"),
        ({"buffer_size": 0}, ["--quiet"], "--quiet has no effect here: its outputs are what it is for: leave it out"),
        ({"buffer_size": 0}, ["--results-path", "x"], "--results-path has no effect here: results are printed"),
        ({"buffer_size": 0, "print_alignment": "soft"}, [], "--print-alignment soft is for fairseq-generate"),
    ],
)
def test_wrong_commands(args, words, message):
    check_command(Namespace(**GENERATE), ["--beam", "5", "--prefix-size", "1"])
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        check_command(Namespace(**{**GENERATE, **args}), words)


def test_subwords_that_are_joined_once():
    for args in ({"bpe": "sentencepiece"}, {"post_process": "sentencepiece"}):
        check_command(Namespace(**{**GENERATE, **args}), [])
    # These only remove the sign "@@ ".
    check_command(Namespace(**{**GENERATE, "bpe": "subword_nmt", "post_process": "subword_nmt"}), [])


def test_the_subset_of_another_command():
    check_command(Namespace(), ["--valid-subset", "gen"])
    with pytest.raises(UsageError, match="^--gen-subset has no effect here: choose --valid-subset"):
        check_command(Namespace(), ["--gen-subset", "gen"])
    check_command(Namespace(context_window=0), ["--gen-subset", "gen"])  # fairseq-eval-lm


def test_an_empty_output_is_allowed():
    for parser in (options.get_generation_parser, options.get_interactive_generation_parser):
        arguments = ["data", "--path", __file__, "--task", "sg_translation"]
        with pytest.raises(UsageError, match="cannot be read"):
            options.parse_args_and_arch(made := parser(), arguments)
        assert made.get_default("min_len") == 0


@pytest.mark.parametrize("left", [False, True])
def test_outputs_by_length(left):
    rows = [[5, 6, 7], [5, 6], [7, 7, 7], [8, 9, 8, 9, 8]]
    padded = [[0] * (5 - len(row)) + row if left else row + [0] * (5 - len(row)) for row in rows]
    inputs = {"src_tokens": torch.tensor(padded), "src_lengths": torch.tensor([len(row) for row in rows])}
    asked = []

    def generate(part, numbers):
        asked.append((part["net_input"]["src_tokens"].tolist(), part["net_input"]["src_lengths"].tolist()))
        return [f"output {number}" for number in numbers.tolist()]

    found = by_length({"net_input": inputs | {"prev_output_tokens": None}}, 0, generate)
    assert found == ["output 0", "output 1", "output 2", "output 3"]
    assert asked == [([rows[1]], [2]), ([rows[0], rows[2]], [3, 3]), ([rows[3]], [5])]

"""Beam search with decoding states against the same search over full forward passes of every prefix."""

from __future__ import annotations

import itertools

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig

import fairseq_sg.plugin  # noqa: F401
from helpers.commands import KINDS


def search(task, model, subset: str, with_states: bool) -> dict:
    """Sentence -> its five hypotheses, best first, from fairseq's own generator."""
    generator = task.build_generator([model], GenerationConfig(beam=5))
    assert generator.model.has_incremental
    generator.model.has_incremental = with_states
    hypotheses = {}
    for sample in task.get_batch_iterator(task.dataset(subset), max_sentences=16).next_epoch_itr(shuffle=False):
        found = task.inference_step(generator, [model], sample)
        hypotheses |= dict(zip(sample["id"].tolist(), found))
    return hypotheses


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_equals_search_over_full_passes(kind, trained):
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained(kind).checkpoint)])
    task.load_dataset("gen")
    by_states, by_full_passes = (search(task, models[0].eval(), "gen", states) for states in (True, False))
    assert set(by_states) == set(by_full_passes) == set(range(45))
    for i, hypotheses in by_states.items():
        for found, expected in zip(hypotheses, by_full_passes[i], strict=True):
            assert found["tokens"].tolist() == expected["tokens"].tolist()
            torch.testing.assert_close(found["positional_scores"], expected["positional_scores"], rtol=1e-4, atol=1e-4)


def test_a_beam_of_all_words_extends_no_ended_output(trained):
    """fairseq cuts a larger beam to one word less than there are, and one of the first candidates is the end symbol."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained(next(iter(KINDS))).checkpoint)])
    task.load_dataset("gen")
    words, end = len(task.target_dictionary), task.target_dictionary.eos()
    logits = torch.zeros(words)
    logits[end] = 0.1
    models[0].decoder.output_layer = lambda features: logits.repeat(*features.shape[:-1], 1)
    generator = task.build_generator([models[0].eval()], GenerationConfig(beam=words, min_len=0))
    sample = next(task.get_batch_iterator(task.dataset("gen"), max_sentences=16).next_epoch_itr(shuffle=False))
    hypotheses = itertools.chain.from_iterable(task.inference_step(generator, models, sample))
    found = [hypothesis["tokens"].tolist() for hypothesis in hypotheses]
    assert all(tokens.index(end) == len(tokens) - 1 for tokens in found)
    assert len(found) == 16 * (words - 2)


@pytest.mark.parametrize("kind", KINDS)
def test_alignments_are_the_attention_weights_of_the_hypothesis(kind, trained):
    """``--print-alignment soft``; without it a generator asks for no weights."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained(kind).checkpoint)])
    model = models[0].eval()
    task.load_dataset("gen")
    sample = next(task.get_batch_iterator(task.dataset("gen"), max_sentences=16).next_epoch_itr(shuffle=False))
    generator = task.build_generator(models, GenerationConfig(beam=2, print_alignment="soft"))
    found = task.inference_step(generator, models, sample)
    sources = sample["net_input"]["src_tokens"]
    for source, hypotheses in zip(sources, found, strict=True):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens[-1:], tokens[:-1]])
            with torch.no_grad():
                weights = model(source[None], None, previous[None], need_attn=True)[1]["attn"][0][0]
            rows = torch.tensor([[float(x) for x in row] for row in hypothesis["alignment"]])
            real = source.ne(task.source_dictionary.pad())
            # The start symbol, which is not printed, is not counted.
            real &= source.ne(task.source_dictionary.bos())
            torch.testing.assert_close(rows, weights[:, real], rtol=0, atol=1e-5)
    task.build_generator(models, GenerationConfig(beam=2))
    with torch.no_grad():
        assert model(**sample["net_input"])[1]["attn"] == [None]

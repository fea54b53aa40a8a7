"""Decoders with attentions of a user's own are run before a training: those that see later words are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Attention
from fairseq_sg.tasks.causality import check_decoder, own_modules
from helpers.models import build

WORDS = 9  # those of helpers.models.task, with the special ones


class Causal(Attention):
    """Softmax attention that hides later keys."""

    roles = frozenset({"encoder", "decoder", "cross"})

    def attend(self, q, k, v, context):
        scores = q @ k.transpose(-1, -2)  # (B, H, N, M)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + self.offset(q, k))
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ v, None


class Peeking(Causal):
    """Hides nothing."""

    def attend(self, q, k, v, context):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v, None


class Forgetting(Causal):
    """Decodes with the last key alone."""

    def extend(self, q, k, v, state, context):
        return self.attend(q, k, v, context)[0], {"length": 0}


@pytest.fixture
def registered(monkeypatch):
    def put(kind):
        monkeypatch.setitem(ATTENTION_REGISTRY, "own", kind)
        monkeypatch.setattr(kind, "registered_name", "own", raising=False)

    return put


MODELS = {"translation": ({}, {"cross_attention": "own"}), "language model": ({"model": SGTransformerLM}, {})}


@pytest.mark.parametrize("made,also", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind,problem", [(Causal, ""), (Peeking, "sees later words"), (Forgetting, "word by word")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_decoding_would_not_give(made, also, kind, problem, dtype, registered):
    registered(kind)
    model = build(**made, decoder_attention="own", **also).to(dtype)
    assert own_modules(model) == [f"{__name__}.{kind.__name__}"]
    before = torch.get_rng_state()
    if problem:
        with pytest.raises(UsageError, match=f"which has {__name__}.{kind.__name__}, .*{problem}"):
            check_decoder(model, WORDS, torch.device("cpu"))
    else:
        check_decoder(model, WORDS, torch.device("cpu"))
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_models_without_modules_of_a_users_own_are_not_run(monkeypatch):
    model = build()
    monkeypatch.setattr(model.decoder, "forward", None)
    check_decoder(model, WORDS, torch.device("cpu"))
    assert own_modules(model) == []

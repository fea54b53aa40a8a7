"""Whole models on one implementation of an operator: the same results; an unknown name is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.models import sg_dnc, sg_encoder, sg_lstm, sg_operator, sg_regressor, sg_transformer, sg_transformer_lm
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from helpers.models import PAD, build, pair


@pytest.mark.parametrize("choice", ["naive", "shift", "chunked"])
@pytest.mark.parametrize("kind", ["relative", "abs_rel"])
def test_training_and_decoding(kind, choice, monkeypatch):
    model = build(depth="shared", encoder_attention=kind, decoder_attention=kind)
    source, target = pair()

    def results():
        model.train().zero_grad()
        out = model(source, None, target)[0][target.ne(PAD)]
        out.square().sum().backward()
        found = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            encoder_out, state = model.eval().encoder(source), {}
            steps = [model.decoder(target[:, :n], encoder_out, incremental_state=state)[0] for n in range(1, 5)]
        return [*found, *steps]

    expected = results()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, choice)
    for actual, reference in zip(results(), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "model", [sg_transformer, sg_transformer_lm, sg_encoder, sg_lstm, sg_dnc, sg_regressor, sg_operator]
)
def test_a_choice_that_nobody_can_follow_is_refused_when_the_model_is_built(model, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "flexx")
    with pytest.raises(UsageError, match=f"{ENVIRONMENT_VARIABLE}: no operator has an implementation 'flexx'"):
        model.configuration.read(SimpleNamespace())

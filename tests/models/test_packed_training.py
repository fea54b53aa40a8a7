"""A packed batch trains like a padded one: every attention, feedforward layer, update and depth, in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.cpu.packing import Packing
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.update import UPDATE_REGISTRY
from helpers.models import FFN_OPTIONS, PAD, UPDATE_OPTIONS, attention_options, build, pair
from helpers.packing import assert_equal, pack_by, together


def compare(monkeypatch, left_pad=False, value_roles=(), batches=3, **options):
    model, (source, target) = build(left_pad=left_pad, **options), pair(left_pad)
    packed, padded, count = together(
        model, lambda: model(source, None, target, value_roles=value_roles), target.ne(PAD), monkeypatch
    )
    assert count == batches
    assert_equal(packed, padded)
    return packed


sides = pytest.mark.parametrize("left_pad", [False, True], ids=["right", "left"])


@sides
@pytest.mark.parametrize("depth", sorted(DEPTH_REGISTRY))
@pytest.mark.parametrize("attention", sorted(ATTENTION_REGISTRY))
def test_attentions(attention, depth, left_pad, monkeypatch):
    more = {"loops": 2} if depth == "looped" else {}
    compare(monkeypatch, left_pad, depth=depth, **more, **attention_options(attention))


@pytest.mark.parametrize("update", sorted(UPDATE_REGISTRY))
@pytest.mark.parametrize("ffn", sorted(FEEDFORWARD_REGISTRY))
def test_feedforward_layers_and_updates(ffn, update, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    names = {"encoder_ffn": ffn, "decoder_ffn": ffn, "encoder_update": update, "decoder_update": update}
    compare(monkeypatch, depth="shared", **names, **FFN_OPTIONS.get(ffn, {}), **UPDATE_OPTIONS.get(update, {}))


@pytest.mark.parametrize("padding", ["exclude", "include"])
def test_ponder_loss(padding, monkeypatch):
    losses = compare(monkeypatch, depth="shared_act", act_ponder_padding=padding)[1]
    assert losses["ponder"].gt(0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"pre_norm": True, "untied_output": True},
        {"logit_scale": "log_length"},
        {**attention_options("linear"), "linear_attention_denominator": "none"},
        {"position": "t5"},
        {"position": "rotary"},
        {"encoder_embed_dim": 8},
    ],
    ids=str,
)
def test_further_options(options, monkeypatch):
    compare(monkeypatch, **options)


def test_losses_on_values(monkeypatch):
    roles = ("encoder", "decoder", "cross")
    assert set(compare(monkeypatch, value_roles=roles)[1]) == set(roles)


def test_values_at_padding_are_zero():
    model, (source, target) = build(), pair()
    values = model(source, None, target, value_roles=model.attention_roles)[1]["values"]
    for found in values.values():
        for value, mask in found:
            assert mask.any() and (value.transpose(1, 2)[mask] == 0).all() and value.transpose(1, 2)[~mask].all()


def test_classifier_and_language_model(monkeypatch):
    source, target = pair()
    model = build(SGEncoder)
    packed, padded, count = together(model, lambda: model(source), None, monkeypatch)
    assert count == 1
    assert_equal(packed, padded)
    model = build(SGTransformerLM)
    packed, padded, count = together(model, lambda: model(target), target.ne(PAD), monkeypatch)
    assert count == 1
    assert_equal(packed, padded)


def test_features(monkeypatch):
    model, (source, target) = build(), pair()
    run = lambda: model(source, None, target, features_only=True)  # noqa: E731
    packed, padded, _ = together(model, run, target.ne(PAD), monkeypatch)
    assert packed[0].size(-1) == 12
    assert_equal(packed, padded)


def test_outside_training_everything_has_its_place(monkeypatch):
    """And where all states, attention weights or a memory are asked for."""
    model, (source, target) = build(), pair()

    def never(mask):
        raise AssertionError("packed")

    pack_by(monkeypatch, never)
    with pytest.raises(AssertionError, match="packed"):
        model(source, None, target)
    model(source, None, target, return_all_hiddens=True)
    encoder_out = model.encoder(source, None, return_all_hiddens=True)
    assert model.decoder(target, encoder_out, need_attn=True)[1]["attn"][0].shape == (3, 8, 9)
    streams = build(SGTransformerLM)
    assert streams(target, memory_length=4)[1]["memory"]["position"] == 8
    model.eval()(source, None, target)


def test_garbage_and_a_row_of_padding_alone(monkeypatch):
    """Embeddings of padding that are no zeros reach nothing."""
    pack_by(monkeypatch, Packing)
    model, (source, target) = build(), pair()
    source[1] = PAD
    real = target.ne(PAD)
    clean = model(source, None, target)[0][real]
    with torch.no_grad():
        for embedding in (model.encoder.embedding, model.decoder.embedding):
            embedding.tokens.weight[PAD] = 1e9
    logits = model(source, None, target)[0][real]
    others = [i for i in range(logits.size(-1)) if i != PAD]  # the table is the output matrix too
    torch.testing.assert_close(logits[:, others], clean[:, others])


@pytest.mark.parametrize(
    ("options", "training", "evaluation"),
    [({"depth": "shared"}, 1, 2), ({"depth": "separate"}, 2, 2), ({"depth": "looped", "loops": 3}, 2, 6)],
    ids=lambda x: x["depth"] if isinstance(x, dict) else "",
)
def test_a_repeated_layer_projects_the_source_once(options, training, evaluation):
    model, (source, target) = build(**options), pair()
    calls = []
    for name, module in model.named_modules():
        if name.endswith("cross_attn.k_proj"):
            module.register_forward_hook(lambda *_: calls.append(1))
    model(source, None, target)
    assert len(calls) == training
    model.eval()(source, None, target)
    assert len(calls) == training + evaluation


def test_dropout_and_a_resumed_generator_repeat_to_the_bit():
    model, (source, target) = build(dropout=0.3), pair()
    state = torch.get_rng_state()
    first = model(source, None, target)[0]
    torch.set_rng_state(state)
    assert torch.equal(model(source, None, target)[0], first)
    assert not torch.equal(model(source, None, target)[0], first)

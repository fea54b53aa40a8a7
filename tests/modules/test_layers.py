"""Encoder and decoder layers against their equations: norm before and after, dropout where it is documented, losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.layers import DecoderLayer, EncoderLayer
from fairseq_sg.modules.update import Residual
from helpers.configs import config_of

DIM, FFN = 8, 12
norm_places = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
attentions = pytest.mark.parametrize("attention", ["softmax", "linear", "relative"])


def config(**options):
    widths = dict(encoder_ffn_embed_dim=FFN, decoder_ffn_embed_dim=FFN, qk_norm="l2")
    return config_of(DIM, 2, **(widths | options))


def randomize(layer: nn.Module) -> nn.Module:
    """Norms and biases start at one and zero, which would hide where they stand."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.5)
    return layer.double().eval()


def encoder_layer(attention="softmax", **options) -> EncoderLayer:
    return randomize(EncoderLayer(config(**options), attention, "dense"))


def decoder_layer(attention="softmax", cross="softmax", **options) -> DecoderLayer:
    return randomize(DecoderLayer(config(**options), attention, cross, "dense"))


def layer_norm(x, norm):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def sublayer(x, function, norm, pre_norm):
    """x ← x + f(LN(x)) before, x ← LN(x + f(x)) after."""
    return x + function(layer_norm(x, norm)) if pre_norm else layer_norm(x + function(x), norm)


def seen_by_encoder(padding=None, **options) -> Context:
    return Context(padding_mask=padding, key_padding_mask=padding, **options)


def seen_by_decoder(source, source_padding=None, padding=None, return_weights=False, roles=(), **options) -> Context:
    cross = Context(
        padding_mask=source_padding,
        key_padding_mask=source_padding,
        return_weights=return_weights,
        return_values="cross" in roles,
        **options,
    )
    return Context(padding_mask=padding, return_values="decoder" in roles, source=source, cross=cross)


def inputs(n=5, m=6):
    torch.manual_seed(1)
    x, memory = torch.randn(n, 2, DIM, dtype=torch.float64), torch.randn(m, 2, DIM, dtype=torch.float64)
    padding, memory_padding = torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, m, dtype=torch.bool)
    padding[1, 3:] = True
    memory_padding[0, 4:] = True
    return x, memory, padding, memory_padding


@norm_places
@attentions
def test_encoder_layer(attention, pre_norm):
    layer = encoder_layer(attention, pre_norm=pre_norm)
    x, _, padding, _ = inputs()
    got, weights, values, losses = layer(x, seen_by_encoder(padding))
    expected = sublayer(
        x, lambda x: layer.self_attn(x, x, seen_by_encoder(padding))[0], layer.self_attn_residual.norm, pre_norm
    )
    expected = sublayer(expected, layer.update.ffn, layer.update.residual.norm, pre_norm)
    torch.testing.assert_close(got, expected)
    assert weights is None and values == losses == {}


@norm_places
@attentions
def test_decoder_layer(attention, pre_norm):
    cross = "linear" if attention == "linear" else "softmax"
    layer = decoder_layer(attention, cross, pre_norm=pre_norm)
    x, memory, padding, memory_padding = inputs()
    context = replace(seen_by_decoder(memory, memory_padding, padding), key_padding_mask=padding)
    got, weights, values, losses = layer(x, context)
    expected = sublayer(
        x, lambda x: layer.self_attn(x, x, seen_by_encoder(padding))[0], layer.self_attn_residual.norm, pre_norm
    )
    expected = sublayer(
        expected,
        lambda x: layer.cross_attn(x, memory, seen_by_encoder(memory_padding))[0],
        layer.cross_attn_residual.norm,
        pre_norm,
    )
    expected = sublayer(expected, layer.update.ffn, layer.update.residual.norm, pre_norm)
    torch.testing.assert_close(got, expected)
    assert weights is None and values == losses == {}


@norm_places
def test_decoder_layer_without_cross_attention(pre_norm):
    layer = decoder_layer(cross=None, pre_norm=pre_norm)
    x, *_ = inputs()
    expected = sublayer(x, lambda x: layer.self_attn(x)[0], layer.self_attn_residual.norm, pre_norm)
    expected = sublayer(expected, layer.update.ffn, layer.update.residual.norm, pre_norm)
    torch.testing.assert_close(layer(x)[0], expected)
    assert not any("cross" in name for name, _ in layer.named_parameters())


@attentions
def test_decoder_layer_is_causal_and_sees_all_of_the_source(attention):
    layer = decoder_layer(attention, "linear" if attention == "linear" else "softmax")
    x, memory, _, memory_padding = inputs()
    got = layer(x, seen_by_decoder(memory, memory_padding))[0]
    changed = x.clone()
    changed[3:] += 10
    after = layer(changed, seen_by_decoder(memory, memory_padding))[0]
    assert torch.equal(after[:3], got[:3]) and (after[3:] != got[3:]).all(-1).all()
    other = memory.clone()
    other[4:, 0] += 10  # padding of the first sentence
    assert torch.equal(layer(x, seen_by_decoder(other, memory_padding))[0][:, 0], got[:, 0])
    assert (layer(x, seen_by_decoder(other, memory_padding))[0][:, 1] == got[:, 1]).all()
    other[3] += 10
    assert (layer(x, seen_by_decoder(other, memory_padding))[0] != got).any(-1).all()


def test_weights_on_request():
    x, memory, padding, memory_padding = inputs()
    weights = encoder_layer()(x, seen_by_encoder(padding, return_weights=True)).weights
    assert weights.shape == (2, 5, 5) and (weights[1, :, 3:] == 0).all()
    weights = decoder_layer()(x, seen_by_decoder(memory, memory_padding, return_weights=True)).weights
    assert weights.shape == (2, 5, 6) and (weights[0, :, 4:] == 0).all()  # those of the cross-attention
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, dtype=torch.float64))


@norm_places
def test_values_are_those_of_their_attention(pre_norm):
    """With their padding, and of what the attention sees: with pre-norm, the normalized input."""
    x, memory, padding, memory_padding = inputs()

    def assert_values(got, attention, seen, mask):
        expected = attention.v_proj(seen).unflatten(-1, (2, -1)).permute(1, 2, 0, 3)
        torch.testing.assert_close(got.values, expected)
        assert got.padding_mask is mask

    encoder = encoder_layer(pre_norm=pre_norm)
    out, _, got, _ = encoder(x, seen_by_encoder(padding, return_values=True))
    seen = layer_norm(x, encoder.self_attn_residual.norm) if pre_norm else x
    assert set(got) == {"encoder"}
    assert_values(got["encoder"], encoder.self_attn, seen, padding)
    assert torch.equal(out, encoder(x, seen_by_encoder(padding)).x)

    decoder = decoder_layer(pre_norm=pre_norm)
    arguments = (memory, memory_padding, padding)
    got = decoder(x, seen_by_decoder(*arguments, roles=("decoder", "cross"))).values
    seen = layer_norm(x, decoder.self_attn_residual.norm) if pre_norm else x
    assert set(got) == {"decoder", "cross"}
    assert_values(got["decoder"], decoder.self_attn, seen, padding)
    assert_values(got["cross"], decoder.cross_attn, memory, memory_padding)
    assert set(decoder(x, seen_by_decoder(*arguments, roles=("cross",))).values) == {"cross"}


def test_a_source_that_is_projected_once_has_the_same_values():
    """The same numbers and derivatives as of steps that project it again, from one and the same tensor."""
    x, memory, padding, memory_padding = inputs()
    decoder = decoder_layer()

    def steps(projected):
        found, y = [], x
        for _ in range(3):
            context = seen_by_decoder(memory, memory_padding, padding, roles=("cross",), projected=projected)
            y, _, values, _ = decoder(y, context)
            found.append(values["cross"].values)
        total = sum((v.square().sum() for v in found), y.sum())
        return found, torch.autograd.grad(total, list(decoder.cross_attn.v_proj.parameters()))

    again, once = steps(None), steps({})
    assert once[0][0] is once[0][1] is once[0][2] and again[0][0] is not again[0][1]
    torch.testing.assert_close(once, again)


def test_losses_and_mask_of_the_feedforward_layer():
    """A mixture of experts needs to know what is padding, in the layout of its input, and emits losses of its own."""
    x, memory, padding, memory_padding = inputs()

    class Noisy(nn.Module):
        def forward(self, x, padding_mask=None, return_losses=False):
            assert return_losses
            self.mask = padding_mask
            return 0 * x, {"balance": x.new_tensor(3.0)}

    for layer, context in (
        (encoder_layer(), seen_by_encoder(padding)),
        (decoder_layer(), seen_by_decoder(memory, memory_padding, padding)),
    ):
        layer.update.ffn = Noisy()
        assert layer(x, context).losses == {"balance": 3.0} and torch.equal(layer.update.ffn.mask, padding.T)


# Dropout: in every documented place, in training alone.


@norm_places
def test_residual_drops_the_update_and_not_the_stream(pre_norm):
    residual = Residual(1000, 0.25, pre_norm)
    x, update = torch.full((20, 1000), 5.0), torch.ones(20, 1000)
    assert torch.equal(residual.before(x), residual.norm(x) if pre_norm else x)
    out = residual.train().after(x, update)
    if not pre_norm:
        torch.manual_seed(0)
        out = residual.after(x, update)
        torch.manual_seed(0)
        torch.testing.assert_close(out, residual.norm(x + residual.dropout(update)))
        return
    assert set((3 * (out - 5)).round().unique().tolist()) == {0.0, 4.0}  # 1 / (1 − p) or nothing
    assert (out - 5).mean().item() == pytest.approx(1.0, abs=0.02)
    assert (residual.eval().after(x, update) == 6).all()


PLACES = {
    "dropout": lambda layer, x: layer_norm(layer_norm(x, layer.self_attn_residual.norm), layer.update.residual.norm),
    "activation_dropout": lambda layer, x: layer_norm(
        attended(layer, x) + layer.update.ffn.fc2.bias, layer.update.residual.norm
    ),
    "attention_dropout": lambda layer, x: without_attention(layer, x),
}


def attended(layer, x):
    return layer_norm(x + layer.self_attn(x)[0], layer.self_attn_residual.norm)


def without_attention(layer, x):
    return sublayer(layer_norm(x, layer.self_attn_residual.norm), layer.update.ffn, layer.update.residual.norm, False)


@pytest.mark.parametrize("place", PLACES)
def test_dropping_everything_at_one_place(place):
    x, *_ = inputs()
    layer = encoder_layer(**{place: 1.0})
    plain = encoder_layer()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], plain(x)[0])
    assert not torch.allclose(layer.train()(x)[0], plain(x)[0])
    torch.testing.assert_close(layer(x)[0], PLACES[place](layer, x))


def test_dropout_reaches_all_three_sublayers_of_the_decoder():
    x, memory, _, _ = inputs()
    layer = decoder_layer(dropout=1.0).train()
    expected = x
    for residual in (layer.self_attn_residual, layer.cross_attn_residual, layer.update.residual):
        expected = layer_norm(expected, residual.norm)
    torch.testing.assert_close(layer(x, seen_by_decoder(memory))[0], expected)


@pytest.mark.parametrize("attention", ["softmax", "relative"])
def test_attention_dropout_is_on_the_weights_after_the_softmax(attention):
    """With Values of ones, an output is the sum of the kept weights over 1 − p: mean 1, single keys missing."""
    layer = encoder_layer(attention, attention_dropout=0.5).train()
    with torch.no_grad():
        layer.self_attn.v_proj.weight.zero_()
        layer.self_attn.q_proj.weight.zero_()
        layer.self_attn.out_proj.weight.copy_(torch.eye(DIM))
        layer.self_attn.v_proj.bias = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    x = torch.randn(4, 4000, DIM, dtype=torch.float64)
    out = layer.self_attn(x)[0]
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    if attention == "softmax":  # logits 0: each weight is ¼, so kept ones count ½ each
        assert set((2 * out).round().unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
        torch.testing.assert_close((2 * out).round(), 2 * out)

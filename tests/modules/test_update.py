"""The copy gate against its equations, and what a closed and an open gate do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from fairseq_sg.modules.feedforward import DenseFeedForward
from fairseq_sg.modules.layers import DecoderLayer, EncoderLayer
from fairseq_sg.modules.norm import NoNorm
from fairseq_sg.modules.update import CopyGateUpdate, FeedForwardOnlyUpdate, ResidualUpdate, build_update
from helpers.configs import config_of
from helpers.models import build

DIM = 8


def gate(**options) -> CopyGateUpdate:
    torch.manual_seed(0)
    return build_update("copy_gate", config_of(DIM, 2, **options), "dense", "encoder").double().eval()


def states(n=5, b=3):
    torch.manual_seed(1)
    return torch.randn(2, n, b, DIM, dtype=torch.float64)


def dense(ffn, x, activation):
    return ffn.fc2.weight @ activation(ffn.fc1.weight @ x + ffn.fc1.bias) + ffn.fc2.bias


def layer_norm(x, norm):
    variance = ((x - x.mean()) ** 2).mean()
    return (x - x.mean()) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("content", ["layer_norm", "tanh", "residual"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equations(content, activation):
    update = gate(copy_gate_content=content, ffn_activation=activation, copy_gate_ffn_dim=3)
    assert update.gate.fc1.out_features == 3
    for parameter in update.parameters():
        nn.init.normal_(parameter)
    a, h = states()
    got, losses = update(a, h, None)
    assert losses == {}
    function = {"relu": lambda x: x.clamp(min=0), "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2}[activation]
    for n in range(5):
        for b in range(3):
            x = a[n, b]
            new = dense(update.ffn, x, function)
            if content == "tanh":
                u = new.exp() - (-new).exp()
                u = u / (new.exp() + (-new).exp())
            else:
                u = layer_norm(new + x if content == "residual" else new, update.norm)
            g = 1 / (1 + (-dense(update.gate, x, function)).exp())
            torch.testing.assert_close(got[n, b], g * u + (1 - g) * h[n, b], rtol=1e-10, atol=1e-12)


def test_closed_gate_copies_to_the_bit_and_open_gate_updates():
    update = gate()
    a, h = states()
    nn.init.zeros_(update.gate.fc2.weight)
    nn.init.constant_(update.gate.fc2.bias, -800.0)
    assert torch.equal(update(a, h, None)[0], h)
    nn.init.constant_(update.gate.fc2.bias, 800.0)
    assert torch.equal(update(a, h, None)[0], update.norm(update.ffn(a)))


def test_gates_start_nearly_closed():
    g = gate().gates(states(200)[0])
    assert 0.03 < g.mean().item() < 0.08  # σ(−3) = 0.047


def test_dropout_closes_whole_columns_in_training_alone():
    update = gate(copy_gate_dropout=0.25)
    a, h = states(100, 40)
    kept = update.gates(a)
    assert torch.equal(kept, gate().gates(a))
    update.train()
    torch.manual_seed(2)
    dropped = update.gates(a)
    closed = (dropped == 0).all(-1)
    assert 0.2 < closed.double().mean().item() < 0.3
    assert torch.equal(dropped[~closed], kept[~closed])
    got = update(a, h, None)[0]
    copied = (got == h).all(-1)
    assert 0.2 < copied.double().mean().item() < 0.3


def test_gradients():
    update = gate()
    a, h = (x.clone().requires_grad_() for x in states(3, 2))
    assert torch.autograd.gradcheck(lambda a, h: update(a, h, None)[0], (a, h))
    update(a, h, None)[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in update.parameters())


def test_reference_start():
    """The gain of a tanh on the last matrix of the content, PyTorch's own bound with ``tanh``, and none on the
    gate's.
    """
    torch.manual_seed(0)
    wide = build_update("copy_gate", config_of(200, 2), "dense", "encoder")
    bound = (6 / 400) ** 0.5
    assert wide.ffn.fc2.weight.abs().max().item() == pytest.approx(bound * 5 / 3, rel=1e-3)
    assert wide.gate.fc2.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert (wide.gate.fc2.bias == -3).all()
    for width in (200, 800):
        config = config_of(200, 2, copy_gate_content="tanh", encoder_ffn_embed_dim=width)
        tanh = build_update("copy_gate", config, "dense", "encoder")
        assert tanh.ffn.fc2.weight.abs().max().item() == pytest.approx(width**-0.5, rel=1e-3)
    for content in ("layer_norm", "tanh"):  # another start has no gain
        config = config_of(200, 2, copy_gate_content=content, ffn_init="torch")
        other = build_update("copy_gate", config, "dense", "encoder")
        assert other.ffn.fc2.weight.abs().max().item() == pytest.approx(200**-0.5, rel=1e-3)
    plain = build_update("copy_gate", config_of(200, 2, copy_gate_content="residual"), "dense", "encoder")
    assert plain.ffn.fc2.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)


class Emits(nn.Module):
    def forward(self, x, padding_mask=None, return_losses=False):
        self.mask = padding_mask
        return x, {"balance": torch.tensor(3.0)}


def test_losses_and_mask_of_the_feedforward_layer():
    update, mask = gate(), torch.tensor([[False, True]])
    update.ffn = Emits()
    assert update(*states(1, 2), mask)[1] == {"balance": 3.0} and update.ffn.mask is mask


@pytest.mark.parametrize("attention", sorted(ATTENTION_REGISTRY))
def test_layers_with_any_attention(attention):
    """h' = update(a, h), a being LN(h + Attention(h)), and in a decoder after cross-attention too."""
    torch.manual_seed(0)
    config = config_of(DIM, 2)
    x = states()[0]
    encoder = EncoderLayer(config, attention, "dense", "copy_gate").double().eval()
    a = encoder.self_attn_residual.norm(x + encoder.self_attn(x)[0])
    torch.testing.assert_close(encoder(x)[0], encoder.update(a, x, None)[0])
    decoder = DecoderLayer(config, attention, "softmax", "dense", "copy_gate").double().eval()
    source = states()[1]
    a = decoder.self_attn_residual.norm(x + decoder.self_attn(x)[0])
    a = decoder.cross_attn_residual.norm(a + decoder.cross_attn(a, source)[0])
    torch.testing.assert_close(decoder(x, Context(source=source, cross=Context()))[0], decoder.update(a, x, None)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre_norm": True}, "copy_gate .--encoder-update, --decoder-update. is post-norm: leave --pre-norm out"),
        ({"copy_gate_content": "sum"}, "--copy-gate-content is 'sum': choose from layer_norm, tanh, residual"),
        ({"copy_gate_dropout": 1.0}, "--copy-gate-dropout is 1.0: choose a number from 0 to below 1"),
        ({"ffn_activation": "swish"}, "--ffn-activation is 'swish': choose from relu, gelu"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        gate(**options)


def test_updates_are_built_outside_a_model_and_equal_those_of_a_configuration():
    """By keywords, as every registry's mechanisms: no configuration is needed."""
    options = {"copy_gate_content": "residual", "copy_gate_ffn_dim": 3, "ffn_activation": "gelu"}
    built = gate(**options)
    torch.manual_seed(0)
    alone = CopyGateUpdate(DIM, DenseFeedForward(DIM, DIM, ffn_activation="gelu"), **options).double().eval()
    a, h = states()
    torch.testing.assert_close(alone(a, h, None)[0], built(a, h, None)[0], rtol=0, atol=0)
    residual = ResidualUpdate(DIM, DenseFeedForward(DIM, 2 * DIM), dropout=0.5, pre_norm=True).double().eval()
    assert residual.residual.dropout.p == 0.5
    torch.testing.assert_close(residual(a, h, None)[0], a + residual.ffn(residual.residual.norm(a)))


# feedforward_only


def test_feedforward_only_equation():
    torch.manual_seed(0)
    update = FeedForwardOnlyUpdate(DIM, DenseFeedForward(DIM, 12), pre_norm=True).double().eval()
    for parameter in update.parameters():
        nn.init.normal_(parameter)
    a, h = (x.clone().requires_grad_() for x in states(3, 2))
    got, losses = update(a, h, None)
    assert losses == {}
    for n in range(3):
        for b in range(2):
            new = dense(update.ffn, layer_norm(a[n, b], update.residual.norm), lambda x: x.clamp(min=0))
            torch.testing.assert_close(got[n, b], h[n, b] + new, rtol=1e-10, atol=1e-12)
    # What is not read by the feedforward layer goes on unchanged.
    (to_h,) = torch.autograd.grad(got.sum(), h)
    assert torch.equal(to_h, torch.ones_like(h))
    assert torch.autograd.gradcheck(lambda a, h: update(a, h, None)[0], (a, h))


def test_dropout_of_feedforward_only_is_on_the_new_content():
    update = FeedForwardOnlyUpdate(DIM, DenseFeedForward(DIM, 12), dropout=1.0, pre_norm=True).double().train()
    a, h = states()
    assert torch.equal(update(a, h, None)[0], h)


@pytest.mark.parametrize("attention", ["relative", "linear"])
def test_layers_whose_attention_is_read_by_the_feedforward_layer_alone(attention):
    torch.manual_seed(0)
    config = config_of(DIM, 2, pre_norm=True)
    x, source = states()
    layer = DecoderLayer(config, attention, "softmax", "dense", "feedforward_only").double().eval()
    a = x + layer.self_attn(layer.self_attn_residual.norm(x))[0]
    a = a + layer.cross_attn(layer.cross_attn_residual.norm(a), source)[0]
    got = layer(x, Context(source=source, cross=Context()))[0]
    torch.testing.assert_close(got, x + layer.update.ffn(layer.update.residual.norm(a)))
    nn.init.zeros_(layer.update.ffn.fc2.weight)
    nn.init.zeros_(layer.update.ffn.fc2.bias)
    assert torch.equal(layer(x, Context(source=source, cross=Context()))[0], x)


def test_feedforward_only_is_for_pre_norm():
    for update in ("encoder_update", "decoder_update"):
        with pytest.raises(UsageError, match="feedforward_only .* is pre-norm: add --pre-norm"):
            build(**{update: "feedforward_only"})


def test_feedforward_only_without_norms():
    update = FeedForwardOnlyUpdate(DIM, DenseFeedForward(DIM, 12), norm=NoNorm).double().eval()
    a, h = states()
    torch.testing.assert_close(update(a, h, None)[0], h + update.ffn(a))


def test_unknown_update():
    with pytest.raises(ValueError, match=r"unknown update 'copy' .*choose from copy_gate, feedforward_only, residual"):
        build_update("copy", config_of(DIM, 2), "dense", "encoder")

"""Norms of hidden states: layer norm with and without ε, no norm, and where a model has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.layers import EncoderLayer
from fairseq_sg.modules.norm import NORM_REGISTRY, LayerNorm, NoNorm, final_norm_of, norm_of
from helpers.configs import config_of
from helpers.models import build, pair


def random_norm(dim: int, eps: float) -> LayerNorm:
    norm = LayerNorm(dim, layer_norm_eps=eps).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("eps", [1e-5, 0.3, 0.0])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 2, 6), (2, 0, 6), (5, 1)])
def test_equation_and_gradients(eps, shape):
    norm = random_norm(shape[-1], eps)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=shape[-1] > 1)
    got = norm(x)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in (*shape[:-1], 1))).tolist():
        row = x[tuple(place[:-1] if isinstance(place, list) else ())]
        centred = row - row.mean()
        size = (centred.square().mean() + eps).sqrt()
        want = norm.bias if size == 0 else centred / size * norm.weight + norm.bias
        torch.testing.assert_close(got[tuple(place[:-1] if isinstance(place, list) else ())], want)
    if x.numel() and shape[-1] > 1:
        inputs = (x, norm.weight, norm.bias)
        assert torch.autograd.gradcheck(lambda x, *_: norm(x), inputs)


def test_the_default_is_torchs_layer_norm_to_the_bit():
    torch.manual_seed(0)
    x = torch.randn(7, 3, 10)
    ours, theirs = LayerNorm(10), nn.LayerNorm(10)
    assert torch.equal(ours(x), theirs(x)) and ours.eps == theirs.eps == 1e-5
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_without_eps_a_state_without_direction_is_0(dtype):
    norm = LayerNorm(4, layer_norm_eps=0.0).to(dtype)
    x = torch.tensor([[0, 0, 0, 0], [3, 3, 3, 3], [1, -1, 0, 0]], dtype=dtype, requires_grad=True)
    y = norm(x)
    assert y.dtype == dtype and y[:2].eq(0).all() and y.isfinite().all()
    torch.testing.assert_close(y[2], torch.tensor([2**0.5, -(2**0.5), 0, 0], dtype=dtype))
    y.square().sum().backward()
    assert x.grad.isfinite().all() and x.grad[:2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [3, 7, 10])
@pytest.mark.parametrize("value", [0.1, 123.456, -1e-3])
def test_without_eps_equal_entries_have_no_direction(value, dim, dtype):
    """Also where their mean is rounded."""
    x = torch.full((2, dim), value, dtype=dtype, requires_grad=True)
    y = LayerNorm(dim, layer_norm_eps=0.0).to(dtype)(x)
    (y * torch.arange(dim)).sum().backward()
    assert y.eq(0).all() and x.grad.eq(0).all()


@settings(derandomize=True)
@given(st.integers(-30, 30), st.integers(2, 9), st.integers(0, 1000))
def test_without_eps_the_size_of_a_state_does_not_matter(exponent, dim, seed):
    """Also where the squares of its entries are 0 in float32."""
    norm = LayerNorm(dim, layer_norm_eps=0.0)
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(norm(x * 2.0**exponent), norm(x))


def test_wrong_options():
    with pytest.raises(UsageError, match="--layer-norm-eps is -1: choose 0 or more"):
        LayerNorm(4, layer_norm_eps=-1)
    with pytest.raises(UsageError, match=r"unknown norm 'rms' \(--norm\): choose from layer, none"):
        norm_of(SimpleNamespace(norm="rms"))
    assert set(NORM_REGISTRY) == {"layer", "none"}
    for options, message in (
        (dict(norm="none", layer_norm_eps=0.1), "--layer-norm-eps 0.1 has no effect on the chosen mechanisms"),
        (dict(norm="none", pre_norm=True), "--pre-norm has no effect with --norm none"),
        (
            dict(encoder_update="copy_gate", pre_norm=True),
            "--pre-norm has no effect with --encoder-update, .* copy_gate",
        ),
        (dict(no_final_norm=True), "--no-final-norm is for --pre-norm"),
    ):
        with pytest.raises(UsageError, match=message):
            build(**options)


# In models.


def test_every_norm_of_a_model_has_the_chosen_kind():
    for options in ({}, {"encoder_update": "copy_gate", "decoder_update": "copy_gate"}, {"pre_norm": True}):
        model = build(layer_norm_eps=0.25, **options)
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        assert len(norms) >= 2 * 2 + 2 * 3 and {norm.eps for norm in norms} == {0.25}
    model = build(norm="none", encoder_update="copy_gate")
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())


def test_a_layer_without_norm_adds_its_sublayers():
    layer = EncoderLayer(config_of(8, 2, norm="none"), "softmax", "dense").double()
    assert isinstance(layer.update.residual.norm, NoNorm)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    a = x + layer.self_attn(x, None, Context()).output
    torch.testing.assert_close(layer(x).x, a + layer.update.ffn(a))


def test_the_last_norm_of_a_pre_norm_model():
    with_, without = build(pre_norm=True), build(pre_norm=True, no_final_norm=True)
    source, target = pair()
    for side in ("encoder", "decoder"):
        assert isinstance(getattr(with_, side).final_norm, LayerNorm)
        assert isinstance(getattr(without, side).final_norm, nn.Identity)
    without.load_state_dict(with_.state_dict(), strict=False)
    for model in (with_, without):
        for side in ("encoder", "decoder"):
            getattr(model, side).final_norm = nn.Identity()
    lengths = torch.full((3,), source.size(1))
    assert torch.equal(with_(source, lengths, target)[0], without(source, lengths, target)[0])
    assert isinstance(final_norm_of(config_of(8, 2, pre_norm=False), 8), nn.Identity)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_padding_is_no_nan_without_eps(pre_norm):
    """Without positions, the state of padding is 0."""
    model = build(SGEncoder, layer_norm_eps=0.0, pre_norm=pre_norm, position="indicator", embedding_scaling="none")
    tokens = pair()[0]
    for training in (True, False):
        model.train(training).zero_grad()
        out = model(tokens)[0]
        out.square().sum().backward()
        assert out.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


def test_half_precision_without_eps():
    model = build(SGTransformer, layer_norm_eps=0.0).half().eval()
    source, target = pair()
    assert model(source, torch.full((3,), source.size(1)), target)[0].isfinite().all()

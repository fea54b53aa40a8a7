"""Gated absolute and relative attention beside what ``test_attention.py`` holds; the softmax kinds' learned scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context, build_attention
from fairseq_sg.modules.position import PRECISE, sinusoid
from helpers.attention_cases import HEADS, WIDTH, Case, by_rows, padding_of
from helpers.attention_kinds import abs_rel
from helpers.configs import config_of

roles = pytest.mark.parametrize("role", ["encoder", "decoder"])


def with_gate(role: str, bias: float):
    """The attention with r_i = σ(bias) for all i."""
    module = Case("abs_rel", role).build()
    nn.init.zeros_(module.gate.weight)
    nn.init.constant_(module.gate.bias, bias)
    return module


@roles
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_open_gate_is_relative_attention(role, side):
    module, relative = with_gate(role, 1e4), Case("relative", role).build()
    shared = {name: x for name, x in module.state_dict().items() if not name.startswith("gate")}
    relative.load_state_dict(shared)
    x, padding = Case("abs_rel", role).inputs()[0], None if side == "none" else padding_of(7, side)
    got, expected = (m(x, None, Context(key_padding_mask=padding, return_weights=True)) for m in (module, relative))
    torch.testing.assert_close(got, expected)


@roles
def test_a_closed_gate_is_absolute_attention(role):
    module, (x, _) = with_gate(role, -1e4), Case("abs_rel", role).inputs()
    q, k = (p(x).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for p in (module.q_proj, module.k_proj))
    p = module.pos_proj(sinusoid(torch.arange(7), WIDTH).double()).unflatten(-1, (HEADS, -1)).transpose(0, 1)
    logits = (q + module.content_bias) @ k.mT + (q + module.position_bias) @ p.mT
    if role == "decoder":
        logits = logits.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    weights = (logits / math.sqrt(WIDTH // HEADS)).softmax(-1)
    torch.testing.assert_close(module(x, None, Context(return_weights=True))[1], weights)


def test_a_position_has_one_value_whatever_the_length_of_its_sequence():
    module, k = Case("abs_rel", "decoder").build(), torch.zeros(1, HEADS, 4, WIDTH // HEADS).double()
    whole = module._absolute(k, Context(first=PRECISE - 2))  # two positions below it, two from it on
    short = module._absolute(k[:, :, :2], Context(first=PRECISE - 2))
    torch.testing.assert_close(whole[:, :, :2], short, rtol=0, atol=1e-12)


def test_each_head_and_position_has_its_own_gate():
    """Row by row, with gates between 0 and 1 that differ."""
    case = Case("abs_rel", "encoder")
    module, (x, _) = case.build(), case.inputs()
    nn.init.normal_(module.gate.weight)
    gates = module.gate(x).sigmoid()
    assert gates.std(0).min() > 1e-2 and gates.std(2).min() > 1e-3
    torch.testing.assert_close(module(x)[0], by_rows(abs_rel.row, module, x, x)[0], rtol=0, atol=2e-6)


def test_the_start_of_the_sentence_matters_unlike_in_relative_attention():
    module, (x, _) = with_gate("encoder", 0.0), Case("abs_rel", "encoder").inputs()
    moved = torch.cat([x[:1] * 0, x])
    assert not torch.allclose(module(moved)[0][1:], module(x)[0], atol=1e-2)
    hidden = torch.zeros(3, 8, dtype=torch.bool)
    hidden[:, 0] = True
    torch.testing.assert_close(module(moved, None, Context(key_padding_mask=hidden))[0][1:], module(x)[0])


@pytest.mark.parametrize(
    "init,squares",
    [
        ("reference", {"q": 3 / 64, "k": 2 / 64, "v": 2 / 64, "out": 1 / 64, "pos": 3 / 64}),
        ("fused", {"q": 3 / 64, "k": 2 / 64, "v": 2 / 64, "out": 1 / 64, "pos": 3 / 64}),
        ("glorot", dict.fromkeys(["q", "k", "v", "out", "pos"], 3 / 64)),
        ("torch", dict.fromkeys(["q", "k", "v", "out", "pos"], 1 / 64)),
    ],
)
def test_initialization(init, squares):
    module = ATTENTION_REGISTRY["abs_rel"](64, 4, role="encoder", attention_init=init)
    for name, square in squares.items():
        bound = math.sqrt(square)
        assert 0.97 * bound < getattr(module, f"{name}_proj").weight.abs().max() <= bound
    assert (module.content_bias == 0).all() and (module.position_bias == 0).all()


def test_other_position_numbers_are_refused():
    config = config_of(WIDTH, HEADS, position="randomized", randomized_base="relative")
    assert build_attention("relative", config, "encoder").position is None
    with pytest.raises(UsageError, match="--position randomized is not defined for abs_rel attention"):
        build_attention("abs_rel", config, "encoder")


def test_cross_attention_is_refused():
    with pytest.raises(
        UsageError, match="abs_rel attention cannot serve as 'cross' attention: its roles are encoder, decoder"
    ):
        ATTENTION_REGISTRY["abs_rel"](WIDTH, HEADS, role="cross")


# --attention-scale learned, in all kinds that take it.


@pytest.mark.parametrize("name", ["softmax", "relative", "abs_rel", "compositional"])
@pytest.mark.parametrize("options", [{}, {"logit_scale": "log_length"}], ids=["sqrt_dim", "log_length"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_learned_scale(name, options, need_weights):
    """It starts at 1/√d_head, multiplies all logits, and learns."""
    case = Case(name, "decoder", options)
    module, fixed, (x, _) = case.build(attention_scale="learned"), case.build(), case.inputs()
    start = ATTENTION_REGISTRY.find(name)(WIDTH, HEADS, role="decoder", attention_scale="learned").learned_scale
    assert start.item() == pytest.approx((WIDTH // HEADS) ** -0.5)
    nn.init.constant_(module.learned_scale, start.item())
    torch.testing.assert_close(
        *(m(x, None, Context(return_weights=need_weights))[0] for m in (module, fixed)), rtol=1e-5, atol=1e-6
    )
    nn.init.constant_(module.learned_scale, 0.9)
    fixed.scale = 0.9
    out = module(x, None, Context(return_weights=need_weights))[0]
    torch.testing.assert_close(out, fixed(x, None, Context(return_weights=need_weights))[0], rtol=1e-6, atol=1e-7)
    out.square().sum().backward()
    assert module.learned_scale.grad.abs() > 1e-6


def test_there_is_no_learned_scale_unless_asked_for():
    assert "learned_scale" not in Case("softmax", "encoder").build().state_dict()


@roles
def test_attention_dropout_is_on_the_weights_in_training_only(role):
    case = Case("abs_rel", role)
    module, (x, _) = case.build(attention_dropout=1.0), case.inputs()
    torch.testing.assert_close(module(x)[0], case.build()(x)[0])
    assert (module.train()(x)[0] == 0).all() and (module(x)[0] == 0).all()


@roles
def test_autocast(role):
    case = Case("abs_rel", role)
    module, (x, _) = case.build(dtype=torch.float32), case.inputs(dtype=torch.float32)
    expected = module(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)[0]
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 4e-2

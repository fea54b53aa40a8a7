"""Galerkin and Fourier attention beside what ``test_attention.py`` holds: the paper's formulas, states, precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from helpers.attention_cases import HEADS, WIDTH, Case, padding_of, reference

D = WIDTH // HEADS
kinds = pytest.mark.parametrize("name", ["galerkin", "fourier"])


def build(name: str, role: str, dtype=torch.float64, **options):
    """With gains as well as biases that differ from head to head."""
    module = Case(name, role, options).build(dtype)
    for norm in (module.q_norm, module.k_norm, module.v_norm):
        if not isinstance(norm, nn.Identity):
            nn.init.normal_(norm.weight)
    return module


def layer_norms(norm) -> list:
    """One nn.LayerNorm a head with the same gains and biases."""
    out = []
    for h in range(HEADS):
        out.append(nn.LayerNorm(D, dtype=torch.float64))
        out[h].weight.data, out[h].bias.data = norm.weight[h, 0].detach(), norm.bias[h, 0].detach()
    return out


def heads(projection, x):
    return projection(x).unflatten(-1, (HEADS, D)).permute(2, 1, 0, 3)  # (H, B, N, D)


@pytest.mark.parametrize("scale", ["head_dim", "none"])
def test_fourier_is_the_papers_formula_in_its_order(scale):
    module, (x, _) = build("fourier", "encoder", fourier_scale=scale), Case("fourier", "encoder").inputs()
    out = []
    for q, k, v, q_norm, k_norm in zip(
        *(heads(p, x) for p in (module.q_proj, module.k_proj, module.v_proj)),
        layer_norms(module.q_norm),
        layer_norms(module.k_norm),
        strict=True,
    ):
        A = q_norm(q) @ k_norm(k).mT / len(x)
        out.append((A / math.sqrt(D) if scale == "head_dim" else A) @ v)
    torch.testing.assert_close(module(x)[0], torch.cat(out, -1).transpose(0, 1))


@kinds
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_gains_of_the_norms(name, role, side):
    module, (query, key) = build(name, role), Case(name, role).inputs()
    padding = padding_of(key.size(0), side)
    out, weights, _ = module(query, key, Context(key_padding_mask=padding, return_weights=True))
    expected = reference(module, query, key, padding)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(weights, expected[1])


@kinds
def test_the_causal_form_is_the_encoders_over_each_prefix(name):
    module, encoder = build(name, "decoder"), build(name, "encoder")
    encoder.load_state_dict(module.state_dict())
    x = Case(name, "decoder").inputs()[0]
    out = module(x)[0]
    for n in range(len(x)):
        torch.testing.assert_close(out[n], encoder(x[: n + 1])[0][n])


@kinds
def test_weights_give_the_output(name):
    module, (x, _) = build(name, "encoder"), Case(name, "encoder").inputs()
    out, weights, _ = module(x, None, Context(return_weights=True))
    values = module.v_norm(module._split_heads(module.v_proj(x), HEADS))
    torch.testing.assert_close((weights @ values).permute(2, 0, 1, 3).flatten(2), out)


@kinds
@pytest.mark.parametrize("role", ["decoder", "cross"])
def test_the_state_is_constant(name, role):
    sizes = []
    for length in (1, 50):
        module, (query, key) = build(name, role), Case(name, role).inputs(queries=length, keys=length)
        state = {}
        for n in range(length):
            module(query[n : n + 1], key if role == "cross" else None, Context(state=state))
        (kept,) = state.values()
        sizes.append({name: x.shape for name, x in kept.items() if torch.is_tensor(x)})
    assert sizes[0] == sizes[1] and {"S", "z"} <= sizes[0].keys()


@kinds
def test_steps_with_padding_before_and_between_them(name):
    """A whole step of padding counts nothing."""
    module, x = build(name, "decoder"), Case(name, "decoder").inputs(queries=6)[0]
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0, :3] = padding[1, 2] = True
    full, state = module(x, None, Context(key_padding_mask=padding))[0], {}
    steps = [
        module(x[n : n + 1], None, Context(key_padding_mask=padding[:, n : n + 1], state=state))[0] for n in range(6)
    ]
    torch.testing.assert_close(torch.cat(steps), full)
    assert (full[:3, 0] == 0).all()


@kinds
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_sums_beyond_float16(name, role):
    """The sum over 400 keys is beyond 65504; the mean is 2000·scale."""
    module = Case(name, role).build(torch.float16)
    key = torch.zeros(400, 1, module.k_proj.in_features, dtype=torch.float16)
    query = torch.ones(400 if role != "cross" else 2, 1, WIDTH, dtype=torch.float16)
    key = query if role != "cross" else key
    for norm, value in ((module.q_norm, 0.5), (module.k_norm, 5.0), (module.v_norm, 100.0)):
        if not isinstance(norm, nn.Identity):
            nn.init.zeros_(norm.weight)
            nn.init.constant_(norm.bias, value)
    nn.init.constant_(module.q_proj.weight, 0.5 / WIDTH)
    if name == "fourier":
        nn.init.constant_(module.v_proj.weight, 100.0 / module.v_proj.in_features)
        key = torch.ones_like(key)
    out = module(query, key)[0].float()
    torch.testing.assert_close(out, torch.full_like(out, 0.5 * 5 * D * 100 * module.scale), rtol=1e-2, atol=0)


@kinds
@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_autocast_in_full_and_in_steps(name, role):
    module, (query, key) = build(name, role, torch.float32), Case(name, role).inputs(dtype=torch.float32)
    expected = module(query, key)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(query, key)[0]
        outs = [out]
        if role != "encoder":
            state, memory = {}, key if role == "cross" else None
            steps = [module(query[n : n + 1], memory, Context(state=state))[0] for n in range(len(query))]
            outs.append(torch.cat(steps))
    for out in outs:
        assert out.dtype == torch.bfloat16
        assert (out.float() - expected).norm() / expected.norm() < 4e-2


@kinds
def test_values_are_those_before_their_norm(name):
    module, (x, _) = build(name, "encoder"), Case(name, "encoder").inputs()
    values, _ = module(x, None, Context(return_values=True)).values
    assert torch.equal(values, module._split_heads(module.v_proj(x), HEADS))


# Projections.


@kinds
def test_initialization(name):
    module = ATTENTION_REGISTRY[name](64, 4, role="cross", kv_dim=48)
    for projection, inputs in ((module.q_proj, 64), (module.k_proj, 48), (module.v_proj, 48)):
        glorot = projection.weight - 0.01 * torch.eye(64, inputs)
        bound = 0.01 * math.sqrt(6 / (64 + inputs))
        assert 0.97 * bound < glorot.abs().max() <= bound + 1e-8
    for init, bound in (("glorot", math.sqrt(3 / 64)), ("torch", 1 / 8)):
        module = ATTENTION_REGISTRY[name](64, 4, role="encoder", attention_init=init)
        assert 0.97 * bound < module.q_proj.weight.abs().max() <= bound


def test_an_unknown_scale_is_refused():
    with pytest.raises(UsageError, match="--fourier-scale is 'x': choose from head_dim, none"):
        ATTENTION_REGISTRY["fourier"](WIDTH, HEADS, role="encoder", fourier_scale="x")


@kinds
def test_returned_weights_are_not_rounded_by_autocast(name):
    """They are the matrix that the output was made with, in float32."""
    module = build(name, "encoder", torch.float32)
    q, k = (torch.randn(2, HEADS, 9, D) for _ in "qk")
    expected = module._weights(q, k, 9, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module._weights(q, k, 9, None), expected, rtol=0, atol=0)

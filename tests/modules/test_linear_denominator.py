"""Linear attention without its denominator: against the sum key by key, in models, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.position import RotaryPosition
from helpers.attention_cases import HEADS, ROLES, WIDTH, Case, padding_of
from helpers.decoding import assert_steps_equal_full_passes
from helpers.models import LINEAR, build, pair

UNDIVIDED = {"linear_attention_denominator": "none"}
rotations = pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])


def attention(role: str, rotary: bool):
    position = {"position": partial(RotaryPosition, causal=role == "decoder")} if rotary else {}
    return Case("linear", role, UNDIVIDED).build(**position)


def key_by_key(module, query, key, padding):
    """O_n = R_n Q̂_n Σ_i (R_i K̂_i)ᵀ V_i over the keys that n sees, through the output projection."""
    q, k, v = (
        projection(x).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
        for projection, x in ((module.q_proj, query), (module.k_proj, key), (module.v_proj, key))
    )
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    if module.position is not None:
        q, k = module.position.rotate(q, 0), module.position.rotate(k, 0)
    out = [[[v.new_zeros(WIDTH // HEADS)] for _ in range(q.size(2))] for _ in range(q.size(0) * HEADS)]
    for b in range(q.size(0)):
        for h in range(HEADS):
            for n in range(q.size(2)):
                for i in range(k.size(2)):
                    if not padding[b, i] and (i <= n or not module.causal):
                        out[b * HEADS + h][n].append((q[b, h, n] @ k[b, h, i]) * v[b, h, i])
    heads = torch.stack([torch.stack([sum(terms) for terms in rows]) for rows in out])  # (B H, N, E)
    return module.out_proj(heads.unflatten(0, (-1, HEADS)).permute(2, 0, 1, 3).flatten(2))


@pytest.mark.parametrize(("role", "rotary"), [*((role, False) for role in ROLES), ("encoder", True), ("decoder", True)])
@pytest.mark.parametrize("length", [1, 6])
def test_equals_the_sum_key_by_key(role, rotary, length):
    module = attention(role, rotary)
    query, key = Case("linear", role).inputs(queries=length)
    padding = padding_of(key.size(0), "right") if key.size(0) > 2 else torch.zeros(3, key.size(0), dtype=torch.bool)
    query = query.clone().requires_grad_()
    key = key.clone().requires_grad_() if role == "cross" else query
    out, weights, _ = module(query, key, Context(key_padding_mask=padding, return_weights=True))
    lean = module(query, key, Context(key_padding_mask=padding))[0]
    expected = key_by_key(module, query, key, padding)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # angles are float32
    torch.testing.assert_close(lean, out, rtol=1e-12, atol=1e-12)
    values = module.v_proj(key).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
    torch.testing.assert_close(module.out_proj((weights @ values).permute(2, 0, 1, 3).flatten(2)), out)
    wanted = [query, *([key] if role == "cross" else []), *module.parameters()]
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(lean, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_outputs_are_linear_in_the_values_and_grow_with_the_keys():
    module = attention("encoder", False)
    x = torch.randn(5, 1, WIDTH, dtype=torch.float64)
    once = module(x)[0]
    torch.testing.assert_close(module(x, torch.cat([x, x]))[0], 2 * once)


@rotations
def test_decoding_equals_the_full_pass_after_reordering(rotary):
    position = {"position": "rotary"} if rotary else {}
    model = build(**LINEAR, **UNDIVIDED, **position).eval()
    begin = torch.full((2, 1), 2)
    assert_steps_equal_full_passes(model, pair()[0][:2], begin, words=5, steps=6, rtol=1e-6, atol=1e-6)


@rotations
def test_segments_with_memory_are_the_whole_stream(rotary):
    position = {"position": "rotary"} if rotary else {}
    model = build(SGTransformerLM, decoder_attention="linear", pre_norm=True, **UNDIVIDED, **position).eval()
    tokens = torch.randint(4, 9, (3, 9), generator=torch.Generator().manual_seed(3))
    logits, memory = [], None
    for segment in tokens.split(4, dim=1):
        out, extra = model(segment, memory=memory, memory_length=100)
        memory = extra["memory"]
        logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_attention_denominator": "mean"}, "--linear-attention-denominator is 'mean': choose from sum, none"),
        (
            UNDIVIDED | {"linear_attention_eps": 1e-3},
            "--linear-attention-eps 0.001 has no effect with --linear-attention-denominator none: leave one of them",
        ),
        (UNDIVIDED | {"feature_map": "exp"}, "--feature-map exp divides a Query's features .* choose a --qk-norm"),
        (UNDIVIDED | {"feature_map": "performer"}, "--feature-map performer divides a Query's features"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build(**LINEAR, **options)


@pytest.mark.parametrize("kind", ["softmax", "galerkin", "relative"])
def test_other_attentions_have_no_such_option(kind):
    message = "--linear-attention-denominator none has no effect .* an option of: linear attention"
    with pytest.raises(UsageError, match=message):
        build(encoder_attention=kind, decoder_attention=kind, **UNDIVIDED)

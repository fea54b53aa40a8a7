"""Compositional attention beside what ``test_attention.py`` holds: its special cases, positions, dropout, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context, build_attention
from helpers.attention_cases import HEADS, ROLES, WIDTH, Case
from helpers.configs import config_of

E = WIDTH // HEADS


def as_softmax(module, case: Case):
    """Softmax attention whose heads all have the one Value projection of a module with R = 1."""
    softmax = Case("softmax", case.role, {}, case.position).build()
    for name in ("q_proj", "k_proj", "out_proj"):
        getattr(softmax, name).load_state_dict(getattr(module, name).state_dict())
    softmax.v_proj.weight.data = module.v_proj.weight.detach().repeat(HEADS, 1)
    return softmax


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("position", [None, "rotary", "alibi", "t5"])
def test_one_retrieval_is_softmax_attention_with_shared_values(role, position):
    if role == "cross" and position is not None:
        return pytest.skip("cross-attention has no positions")
    case = Case("compositional", role, {"retrievals": 1}, position)
    module, (query, key) = case.build(), case.inputs()
    softmax = as_softmax(module, case)
    if position is not None:
        softmax.position.load_state_dict(module.position.state_dict())
    expected, weights, _ = softmax(query, key, Context(return_weights=True))
    out, got, _ = module(query, key, Context(return_weights=True))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(got, weights)
    if role == "decoder":
        state = {}
        steps = [module(query[n : n + 1], None, Context(state=state))[0] for n in range(len(query))]
        torch.testing.assert_close(torch.cat(steps), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("score", ["dot", "concat"])
def test_equal_retrievals_are_one(score):
    """Retrievals with the same Values: whichever is chosen, the output is that of one."""
    one = Case("compositional", "encoder", {"retrievals": 1}).build()
    three = Case("compositional", "encoder", {"retrievals": 3, "retrieval_score": score}).build()
    for name in ("q_proj", "k_proj", "out_proj"):
        getattr(three, name).load_state_dict(getattr(one, name).state_dict())
    three.v_proj.weight.data = one.v_proj.weight.detach().repeat(3, 1)
    x = Case("compositional", "encoder").inputs()[0]
    torch.testing.assert_close(three(x)[0], one(x)[0])


def test_a_strong_preference_takes_one_retrieval():
    """Scores far apart: the output is that of the retrieval with the higher score, for each search by itself."""
    module = Case("compositional", "encoder", {"retrievals": 2, "retrieval_score": "concat"}).build()
    one = Case("compositional", "encoder", {"retrievals": 1}).build()
    x = Case("compositional", "encoder").inputs()[0]
    for name in ("q_proj", "k_proj", "out_proj"):
        getattr(one, name).load_state_dict(getattr(module, name).state_dict())
    nn.init.constant_(module.retrieval_k.weight, 1e6)
    chosen = []
    for r in range(2):
        one.v_proj.weight.data = module.v_proj.weight.detach()[r * E : (r + 1) * E]
        one.out_proj.weight.data = torch.eye(WIDTH, dtype=torch.float64)
        chosen.append(one(x)[0].unflatten(-1, (HEADS, E)))
    first = chosen[0].sum(-1, keepdim=True) > chosen[1].sum(-1, keepdim=True)
    assert first.any() and not first.all()
    expected = module.out_proj(torch.where(first, *chosen).flatten(2))
    torch.testing.assert_close(module(x)[0], expected)


def test_concat_is_the_linear_layer_on_query_and_retrieved():
    """softmax over r of Linear([q̄, O_r]), a layer with a bias: what it adds for q̄ and the bias changes nothing."""
    module = Case("compositional", "encoder", {"retrievals": 3, "retrieval_score": "concat"}).build()
    x, found = Case("compositional", "encoder").inputs()[0], torch.randn(3, HEADS, 7, 3, E, dtype=torch.float64)
    layer, project = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((16 + E, 1), (WIDTH, HEADS * 16)))
    layer.weight.data[:, 16:] = module.retrieval_k.weight.detach()
    query = module._split_heads(project(x), HEADS).unsqueeze(-2).expand(-1, -1, -1, 3, -1)
    expected = (layer(torch.cat([query, found], -1)).softmax(-2) * found).sum(-2)
    torch.testing.assert_close(module._retrieve(found, x), expected)


def test_concat_starts_as_the_released_layer():
    """U(±1/√(d_head + d_qk)): the released layer reads the query beside what was retrieved."""
    weight = ATTENTION_REGISTRY["compositional"](512, 8, role="encoder", retrieval_score="concat").retrieval_k.weight
    assert 0.9 * 96**-0.5 < weight.abs().max() <= 96**-0.5


def test_the_choice_depends_on_the_input_that_asks():
    """Cross-attention with equal searches: only the retrievals' queries tell the two rows apart."""
    module = Case("compositional", "cross").build()
    nn.init.zeros_(module.q_proj.weight)
    query, key = Case("compositional", "cross").inputs(queries=2)
    out = module(query, key)[0]
    assert (out[0] - out[1]).abs().max() > 1e-3
    nn.init.zeros_(module.retrieval_q.weight)
    out = module(query, key)[0]
    torch.testing.assert_close(out[0], out[1])


def test_parameters():
    module = ATTENTION_REGISTRY["compositional"](64, 4, role="cross", kv_dim=48, retrievals=3, retrieval_dim=5)
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (64, 64),
        "k_proj.weight": (64, 48),
        "v_proj.weight": (48, 48),
        "out_proj.weight": (64, 64),
        "retrieval_q.weight": (20, 64),
        "retrieval_q.bias": (20,),
        "retrieval_k.weight": (5, 16),
    }
    assert 0.97 / 8 < module.retrieval_q.weight.abs().max() <= 1 / 8
    assert 32 * 4 == ATTENTION_REGISTRY["compositional"](64, 4, role="encoder").retrieval_q.out_features


def test_values_are_those_of_every_retrieval():
    case = Case("compositional", "encoder", {"retrievals": 4})
    module, (x, _) = case.build(), case.inputs()
    values, _ = module(x, None, Context(return_values=True)).values
    assert values.shape == (3, 4, 7, E)
    torch.testing.assert_close(values[:, 2], (x @ module.v_proj.weight[2 * E : 3 * E].T).transpose(0, 1))


@pytest.mark.parametrize("role", ROLES)
def test_attention_dropout_is_on_the_searches_in_training_only(role):
    case = Case("compositional", role, {"retrievals": 1})
    module, (query, key) = case.build(attention_dropout=0.5), case.inputs()
    torch.testing.assert_close(module(query, key)[0], case.build()(query, key)[0])
    expected = module(query, key)[0]
    module.train()
    torch.manual_seed(3)
    for need_weights in (False, True):
        # Sentences of one batch have draws of their own.
        many = (x.repeat(1, 1500, 1) for x in (query, key))
        out = module(*many, Context(return_weights=need_weights))[0]
        draws = out.unflatten(1, (1500, -1)).transpose(0, 1)  # (draw, N, B, E)
        assert not torch.equal(draws[0], draws[1])
        torch.testing.assert_close(draws.mean(0), expected, rtol=0, atol=0.15)


@pytest.mark.parametrize("role", ROLES)
def test_autocast_in_full_and_in_steps(role):
    case = Case("compositional", role)
    module, (query, key) = case.build(dtype=torch.float32), case.inputs(dtype=torch.float32)
    expected = module(query, key)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [module(query, key)[0]]
        if role != "encoder":
            state, memory = {}, key if role == "cross" else None
            steps = [module(query[n : n + 1], memory, Context(state=state))[0] for n in range(len(query))]
            outs.append(torch.cat(steps))
    for out in outs:
        assert out.dtype == torch.bfloat16
        assert (out.float() - expected).norm() / expected.norm() < 4e-2


@pytest.mark.parametrize(
    "options,message",
    [
        ({"retrievals": 0}, "--retrievals is 0: choose 1 or more"),
        ({"retrieval_dim": 0}, "--retrieval-dim is 0: choose 1 or more"),
        ({"retrieval_score": "x"}, "--retrieval-score is 'x': choose from dot, concat"),
        (
            {"retrieval_score": "concat", "retrieval_dim": 8},
            "--retrieval-dim 8 has no effect without --retrieval-score dot",
        ),
        ({"retrievals": 1, "retrieval_dim": 8}, "have no effect with --retrievals 1: leave them out"),
        ({"retrievals": 1, "retrieval_score": "concat"}, "have no effect with --retrievals 1: leave them out"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(UsageError, match=message):
        build_attention("compositional", config_of(WIDTH, HEADS, **options), "encoder")

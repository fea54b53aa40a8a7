"""Relative attentions by the operator ``relative_attention``: what it computes is what they compute without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention import Context, build_attention, relative
from fairseq_sg.modules.attention.relative import RelativeAttention
from fairseq_sg.modules.cpu.dropout import dropout
from fairseq_sg.ops import relative_attention
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from helpers.attention_cases import CASES, HEADS, WIDTH, WINDOWS, Case, padding_of
from helpers.configs import config_of

both = [c for c in CASES if c.name in ("relative", "abs_rel") and not c.window]
cases = pytest.mark.parametrize("case", both, ids=str)
decoders = pytest.mark.parametrize("case", [c for c in both if c.role == "decoder"], ids=str)
relatives = [c for c in both if c.name == "relative"]
implementations = pytest.mark.parametrize("implementation", ["naive", "shift"])


@pytest.fixture
def calls(monkeypatch):
    """What the operator was called with."""
    found = []

    def watched(*tensors, **options):
        found.append(options)
        return relative_attention(*tensors, **options)

    monkeypatch.setattr(relative, "relative_attention", watched)
    return found


def results(module: nn.Module, x: torch.Tensor, **options):
    """Output and gradients, all over everything that has one."""
    x = x.clone().requires_grad_()
    out = module(x, x, Context(**options))[0]
    torch.manual_seed(3)
    leaves = [x, *(p for p in module.parameters())]
    return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@cases
@implementations
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_equals_what_is_computed_without_it(case, implementation, side, calls, monkeypatch):
    module, x = case.build().train(), case.inputs()[0]
    options = {"key_padding_mask": None if side == "none" else padding_of(x.size(0), side)}
    if side != "none" and case.role == "encoder":
        options["key_padding_mask"][2] = True
    expected = results(module, x, **options)
    assert not calls
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, implementation)
    actual = results(module, x, **options)
    assert len(calls) == 1
    assert_equal(actual, expected)


@decoders
@implementations
def test_step_by_step(case, implementation, calls, monkeypatch):
    module, x = case.build(), case.inputs(queries=6)[0]
    expected = module(x, x)[0]
    state: dict = {}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, implementation)
    # Two new positions at once, then one after the other.
    parts = [x[:2], *x[2:].split(1)]
    steps = [module(part, None, Context(state=state))[0] for part in parts]
    assert len(calls) == 5
    torch.testing.assert_close(torch.cat(steps), expected, rtol=1e-9, atol=1e-11)


@decoders
def test_after_a_memory(case, calls, monkeypatch):
    module, x = case.build().train(), case.inputs(queries=9)[0]
    options = {"memory": x[:4], "first": 3}
    expected = module(x[4:], None, Context(**options))[0]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
    actual = module(x[4:], None, Context(**options))[0]
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@cases
def test_weights_are_computed_without_it(case, calls, monkeypatch):
    module, x = case.build(), case.inputs()[0]
    expected = module(x, x, Context(return_weights=True))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
    actual = module(x, x, Context(return_weights=True))
    assert not calls
    assert_equal(actual, expected)


@pytest.mark.parametrize("kind", ["relative", "abs_rel"])
@pytest.mark.parametrize("training", [True, False])
def test_who_is_called_when_nobody_asks(kind, training, calls):
    """On a CPU no operator; elsewhere the operator, which chooses an implementation."""
    case = next(c for c in CASES if c.name == kind)
    module, x = case.build().train(training), case.inputs()[0]
    module(x, x)
    assert not calls
    shape = module.to("meta")(x.to("meta"))[0].shape
    assert len(calls) == 1 and "implementation" not in calls[0] and shape == x.shape


@pytest.mark.parametrize("kind", ["relative", "abs_rel"])
def test_dropout_on_weights_is_the_operators_in_training(kind, calls):
    case = next(c for c in CASES if c.name == kind)
    module, x = case.build(attention_dropout=0.5).train(), case.inputs()[0]
    module(x, x)
    assert not calls
    module.to("meta")(x.to("meta"))
    module.eval()(x.to("meta"))
    assert [options["dropout_p"] for options in calls] == [0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["relative", "abs_rel"])
def test_autocast(kind, dtype, calls, monkeypatch):
    case = next(c for c in CASES if c.name == kind)
    module, x = case.build(torch.float32).train(), case.inputs(dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        expected = module(x, x)[0]
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
        actual = module(x, x)[0]
    assert len(calls) == 1
    assert actual.dtype == expected.dtype == dtype
    near = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, expected, rtol=near, atol=near)
    gradients = [
        torch.autograd.grad(out.float().square().mean(), module.q_proj.weight)[0] for out in (actual, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=near, atol=near * gradients[1].abs().max().item())


def test_dropout_on_weights_with_one_name_for_all_operators(calls, monkeypatch):
    """The bias has an implementation of that name, and the operator is not called."""
    module, x = relatives[0].build(attention_dropout=0.5).train(), relatives[0].inputs()[0]
    found = []
    for name in ("auto", "naive"):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
        torch.manual_seed(4)
        found.append(module(x, x)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "shift")
    module.eval()(x, x)
    assert len(calls) == 1


def test_positions_of_ones_own_do_without_it(calls, monkeypatch):
    module, x = relatives[0].build(), relatives[0].inputs(queries=5)[0]
    positions = torch.tensor([0, 2, 3, 7, 9])
    expected = module(x, x, Context(positions=positions)).output
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
    assert torch.equal(module(x, x, Context(positions=positions)).output, expected)
    assert not calls


@pytest.mark.parametrize("role", WINDOWS)
def test_a_window_does_without_it(calls, monkeypatch, role):
    module = RelativeAttention(WIDTH, HEADS, role=role, **WINDOWS[role]).double()
    x = relatives[0].inputs(queries=5)[0]
    expected = module(x, x).output
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "naive")
    torch.testing.assert_close(module(x, x).output, expected)
    assert not calls


def test_no_random_number_is_drawn(monkeypatch):
    module = RelativeAttention(WIDTH, HEADS, role="encoder").train()
    x = torch.randn(4, 2, WIDTH)
    before = torch.get_rng_state()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "shift")
    module(x, x)
    assert torch.equal(torch.get_rng_state(), before)


# Dropout on keys.


class Dropped(nn.Module):
    """Distances, as a projection that drops half of them."""

    def __init__(self, projection: nn.Linear):
        super().__init__()
        self.projection, self.weight = projection, projection.weight

    def forward(self, sinusoids: torch.Tensor) -> torch.Tensor:
        return dropout(self.projection(sinusoids), 0.5, training=True)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["relative", "abs_rel"])
def test_dropout_on_keys_is_on_keys_and_distances_in_training_only(name, role, monkeypatch):
    case = Case(name, role)
    module, plain, x = case.build(relative_key_dropout=0.5), case.build(), case.inputs()[0]
    before = plain(x)[0]
    assert torch.equal(module(x)[0], before)
    module.train()
    torch.manual_seed(3)
    out = module(x)[0]
    torch.manual_seed(3)
    with monkeypatch.context() as asked:
        asked.setenv(ENVIRONMENT_VARIABLE, "naive")
        torch.testing.assert_close(module(x)[0], out, rtol=1e-9, atol=1e-11)
    torch.manual_seed(3)
    kept = dropout(module._split_heads(module.k_proj(x), HEADS), 0.5, training=True)
    plain.pos_proj = Dropped(plain.pos_proj)
    q, v = (plain._split_heads(project(x), HEADS) for project in (plain.q_proj, plain.v_proj))
    seen = {"x": x} if name == "abs_rel" else {}
    torch.testing.assert_close(out, plain._join_heads(plain.attend(q, kept, v, Context(), **seen)[0]))
    assert not torch.allclose(out, before)


def test_dropout_on_keys_is_refused_where_distances_are_not_projected():
    positions = {"position": "randomized", "randomized_base": "relative", "relative_key_dropout": 0.5}
    with pytest.raises(UsageError, match="--relative-key-dropout is on projected distances, and with --position rand"):
        build_attention("relative", config_of(WIDTH, HEADS, **positions), "encoder")

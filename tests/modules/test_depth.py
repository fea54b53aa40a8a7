"""Stacks of layers: which layer works at each step, on which decoding state, and what is collected on the way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairseq_sg.modules.attention import Context, Values
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.layers import LayerOutput

KINDS = ("separate", "shared", "shared_act", "looped")
kinds = pytest.mark.parametrize("kind", KINDS)
#: Those whose output is the last step's.
plain_kinds = pytest.mark.parametrize("kind", ["separate", "shared"])
OPTIONS = {
    f.name: f.default
    for cls in DEPTH_REGISTRY.values()
    if cls.options is not None
    for f in dataclasses.fields(cls.options)
}


class Recorder(nn.Module):
    """A layer x -> a·x + b that counts its calls per decoding state, as an attention keeps its cache."""

    def __init__(self, number: int):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0 + number))
        self.key = f"recorder{number}"
        self.calls = []

    def forward(self, x, context):
        self.calls.append(context)
        if context.state is not None:
            cache = context.state.get(self.key, x.new_zeros(x.size(1), 0))
            context.state[self.key] = torch.cat([cache, x[0, :, :1]], dim=1)
        x = self.scale * x + context.first
        weights = x.mean(-1) if context.return_weights else None
        values = {"decoder": Values(x, None)} if context.return_values else {}
        return LayerOutput(x, weights, values, {"size": x.abs().sum(), f"of_{self.key}": x.sum()})

    def reorder_incremental_state(self, incremental_state, new_order):
        if self.key in incremental_state:
            incremental_state[self.key] = incremental_state[self.key].index_select(0, new_order)


def stack(kind: str, steps: int):
    """A decoder's stack of recorders, and the recorders."""
    built = []

    def build_layer(step):
        built.append(Recorder(len(built)))
        return built[-1]

    return DEPTH_REGISTRY.build(kind, SimpleNamespace(**OPTIONS), build_layer, steps, 3), built


def test_registry():
    assert set(DEPTH_REGISTRY) == set(KINDS)
    with pytest.raises(
        ValueError, match=r"unknown depth 'deep' \(--depth\): choose from looped, separate, shared, shared_act$"
    ):
        stack("deep", 2)


@kinds
@pytest.mark.parametrize("steps", [0, -1])
def test_at_least_one_step(kind, steps):
    with pytest.raises(ValueError, match=rf"at least one layer, not {steps} \(--encoder-layers, --decoder-layers\)"):
        stack(kind, steps)


@plain_kinds
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_in_order(kind, steps):
    module, built = stack(kind, steps)
    assert len(built) == (steps if kind == "separate" else 1)
    assert sum(p.numel() for p in module.parameters()) == len(built)
    with torch.no_grad():
        for i, layer in enumerate(built):
            layer.scale.fill_(2.0 + i)
    x = torch.randn(4, 2, 3)
    expected, states = x, []
    for step in range(steps):
        expected = (2.0 + step if kind == "separate" else 2.0) * expected + 5
        states.append(expected)
    out = module(x, Context(first=5), keep_hidden=True)
    torch.testing.assert_close(out.x, expected)
    assert len(out.hidden_states) == steps
    for got, state in zip(out.hidden_states, states):
        torch.testing.assert_close(got, state)
    assert module(x, Context(first=5)).hidden_states == []


@plain_kinds
def test_losses_are_collected_in_the_order_of_the_steps(kind):
    module, _ = stack(kind, 3)
    out = module(torch.ones(4, 2, 3), keep_hidden=True)
    assert [v.item() for v in out.losses["size"]] == [x.abs().sum().item() for x in out.hidden_states]
    names = {"size", *(f"of_recorder{i}" for i in range(3 if kind == "separate" else 1))}
    assert set(out.losses) == names
    assert len(out.losses["of_recorder0"]) == (1 if kind == "separate" else 3)


@kinds
def test_values_are_collected_in_the_order_of_the_steps(kind):
    module, _ = stack(kind, 3)
    out = module(torch.ones(4, 2, 3), Context(return_values=True), keep_hidden=True)
    assert [v.values.sum().item() for v in out.values["decoder"]] == [x.sum().item() for x in out.hidden_states]
    assert module(torch.ones(4, 2, 3)).values == {}


@kinds
def test_each_step_gets_its_memory(kind):
    module, built = stack(kind, 3)
    memory = [torch.full((2, 2, 3), float(step)) for step in range(3)]
    module(torch.ones(4, 2, 3), memory=memory, keep_hidden=True)
    calls = [call.memory for layer in built for call in layer.calls]
    assert len(calls) == 3 and all(got is given for got, given in zip(calls, memory))


@plain_kinds
def test_weights_are_asked_of_the_last_step_alone(kind):
    module, built = stack(kind, 3)
    out = module(torch.ones(4, 2, 3), Context(return_weights=True))
    torch.testing.assert_close(out.weights, out.x.mean(-1))
    asked = [call.return_weights for layer in built for call in layer.calls]
    assert asked == [False, False, True]
    assert module(torch.ones(4, 2, 3)).weights is None


@kinds
def test_each_step_has_a_decoding_state_of_its_own(kind):
    module, built = stack(kind, 3)
    with torch.no_grad():
        for layer in built:
            layer.scale.fill_(2.0)
    state = {}
    for token in (1.0, 10.0):
        x = torch.stack([torch.full((3,), token), torch.full((3,), -token)])[None]
        module(x, Context(state=state))
    caches = [(module.layer_for_step(step), module.state_for_step(step, state)) for step in range(3)]
    for step, (layer, own) in enumerate(caches):
        scale = 2.0**step
        assert own[layer.key].tolist() == [[scale, 10 * scale], [-scale, -10 * scale]]
    assert all(x is not None for _, x in caches)


@kinds
def test_no_decoding_state_outside_decoding(kind):
    module, built = stack(kind, 2)
    assert [module.state_for_step(step, None) for step in range(2)] == [None, None]
    assert [module.layer_for_step(step) for step in range(2)] == [built[0], built[-1]]


@kinds
def test_reordering_reaches_the_states_of_all_steps(kind):
    """As fairseq does it: every module that can reorder is handed the whole decoding state."""
    module, _ = stack(kind, 3)
    state = {}
    module(torch.arange(12.0).view(1, 4, 3), Context(state=state))
    before = [module.state_for_step(step, state)[module.layer_for_step(step).key].clone() for step in range(3)]
    order = torch.tensor([2, 0, 0])
    for part in module.modules():
        if hasattr(part, "reorder_incremental_state"):
            part.reorder_incremental_state(state, order)
    for step, old in enumerate(before):
        layer, own = module.layer_for_step(step), module.state_for_step(step, state)
        assert torch.equal(own[layer.key], old[order]), f"step {step}"


def test_reordering_an_empty_state_makes_none():
    module, _ = stack("shared", 3)
    state = {}
    module.reorder_incremental_state(state, torch.tensor([0]))
    assert state == {}


def test_shared_layer_s_gradient_sums_over_its_steps():
    module, (layer,) = stack("shared", 3)
    with torch.no_grad():
        layer.scale.fill_(2.0)
    module(torch.ones(1, 1, 1)).x.sum().backward()
    assert layer.scale.grad.item() == pytest.approx(3 * 2.0**2)  # d a³ / da

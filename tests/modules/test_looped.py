"""Looped layers against a loop that is written out, and in models: decoding, memory, checkpoints, one kind a layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.attention import Context
from fairseq_sg.modules.depth import LoopedLayers
from fairseq_sg.modules.layers import LayerOutput
from helpers.models import PAD, build, pair

injections = pytest.mark.parametrize("injection", ["add", "none"])


class Tanh(nn.Module):
    """A layer x -> tanh(W x + b) without attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, context):
        return LayerOutput(self.linear(x).tanh(), None, {}, {})


def written_out(x, layers, loops, injection):
    """The inputs and the states of every step, and the states after every loop."""
    inputs, states, ends = [], [], []
    o = x if injection == "none" else torch.zeros_like(x)
    for _ in range(loops):
        if injection == "add":
            o = o + x
        for layer in layers:
            inputs.append(o)
            o = torch.tanh(o @ layer.linear.weight.T + layer.linear.bias)
            states.append(o)
        ends.append(o)
    return inputs, states, ends


@given(layers=st.integers(1, 3), loops=st.integers(1, 4), injection=st.sampled_from(["add", "none"]))
@settings(max_examples=20)
def test_equals_the_loop_written_out(layers, loops, injection):
    torch.manual_seed(3)
    module = LoopedLayers(lambda step: Tanh(), layers, 3, loops=loops, loop_injection=injection)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    out = module(x, keep_hidden=True)
    inputs, states, ends = written_out(x, module.layers, loops, injection)
    for got, expected in ((out.inputs, inputs), (out.hidden_states, states), (out.loop_states, ends)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert out.x is out.loop_states[-1] and module.steps == layers * loops
    # Every loop has a loss of its own, with a weight that tells it from the others.
    wanted = [x, *module.parameters()]
    got, expected = (
        torch.autograd.grad(sum((n + 1) * state.square().sum() for n, state in enumerate(found)), wanted)
        for found in (out.loop_states, ends)
    )
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_hidden_states_the_loops_are_still_there():
    module = LoopedLayers(lambda step: Tanh(), 2, 3, loops=3)
    out = module(torch.ones(1, 1, 3, dtype=torch.float64))
    assert out.inputs == out.hidden_states == [] and len(out.loop_states) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loops": 0}, "--loops is 0: choose 1 or more"),
        ({"loop_injection": "concat"}, "--loop-injection is 'concat': choose from add, none"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        LoopedLayers(lambda step: Tanh(), 2, 3, **options)
    with pytest.raises(UsageError, match=message):
        build(depth="looped", **options)


def test_options_are_for_looped_layers_alone():
    with pytest.raises(UsageError, match="--loops 2 has no effect .* an option of: looped depth"):
        build(depth="separate", loops=2)


@injections
def test_one_loop_is_separate_layers(injection):
    source, target = pair()
    looped, separate = build(depth="looped", loop_injection=injection), build(depth="separate")
    assert all(torch.equal(a, b) for a, b in zip(looped.parameters(), separate.parameters(), strict=True))
    separate.load_state_dict(looped.state_dict())
    assert torch.equal(looped(source, None, target)[0], separate(source, None, target)[0])


def test_more_loops_with_the_same_checkpoint():
    """Without injection, two loops over two layers are four layers, of which two pairs are the same."""
    source, target = pair()
    model = build(depth="looped", loop_injection="none")
    deeper = build(depth="looped", loop_injection="none", loops=2)
    deeper.load_state_dict(model.state_dict())
    four = build(depth="separate", encoder_layers=4, decoder_layers=4)
    for side in ("encoder", "decoder"):
        for step, layer in enumerate(getattr(four, side).stack.layers):
            layer.load_state_dict(getattr(model, side).stack.layers[step % 2].state_dict())
    rest = {name: value for name, value in model.state_dict().items() if ".stack." not in name}
    assert not four.load_state_dict(rest, strict=False).unexpected_keys
    expected = four(source, None, target)[0]
    torch.testing.assert_close(deeper(source, None, target)[0], expected)
    assert not torch.allclose(model(source, None, target)[0], expected)


def test_an_encoder_with_injection_is_its_layers_called_in_a_loop():
    model = build(SGEncoder, depth="looped", loops=3, pre_norm=True).eval()
    encoder, source = model.encoder, pair()[0]
    out = encoder(source, return_all_hiddens=True)
    x = encoder.embedding(source).transpose(0, 1)  # (M, B, C)
    context, o = Context(padding_mask=source.eq(PAD), key_padding_mask=source.eq(PAD)), 0
    for _ in range(3):
        o = o + x
        for layer in encoder.stack.layers:
            o = layer(o, context).x
    torch.testing.assert_close(out["encoder_out"][0], encoder.final_norm(o))
    assert len(out["encoder_states"]) == 6 and torch.equal(
        encoder.final_norm(out["encoder_states"][-1]), out["encoder_out"][0]
    )


def test_every_layer_has_the_mechanisms_that_are_named_for_it():
    names = {"encoder_attention": "relative,linear", "cross_attention": "linear,softmax", "decoder_ffn": "dense,topk"}
    model = build(depth="looped", loops=3, **names, topk_k=4)
    kinds = [layer.self_attn.registered_name for layer in model.encoder.stack.layers]
    cross = [layer.cross_attn.registered_name for layer in model.decoder.stack.layers]
    ffn = [layer.update.ffn.registered_name for layer in model.decoder.stack.layers]
    assert (kinds, cross, ffn) == (["relative", "linear"], ["linear", "softmax"], ["dense", "topk"])
    with pytest.raises(UsageError, match="--encoder-attention names 3 layers, and --encoder-layers is 2"):
        build(depth="looped", loops=3, encoder_attention="linear,linear,linear")


def language_model(**options):
    values = dict(decoder_attention="relative", depth="looped", loops=3, pre_norm=True) | options
    return build(SGTransformerLM, **values).eval()


@injections
def test_segments_with_memory_are_the_whole_stream(injection):
    model = language_model(loop_injection=injection)
    tokens = torch.randint(4, 9, (3, 11), generator=torch.Generator().manual_seed(5))
    logits, memory = [], None
    for segment in tokens.split(4, dim=1):
        out, extra = model(segment, memory=memory, memory_length=100)
        memory = extra["memory"]
        logits.append(out)
    whole = model(tokens)[0]
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-9, atol=1e-9)
    # An entry for every layer of every loop, and the start of a loop has the input of its layer.
    assert len(memory["hidden"]) == 6
    assert (out - model(segment)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["relative", "linear", "galerkin"])
def test_decoding_a_language_model_step_by_step_equals_the_full_pass(kind):
    model = language_model(decoder_attention=kind)
    tokens = torch.randint(4, 9, (3, 7), generator=torch.Generator().manual_seed(5))
    state, order = {}, torch.tensor([2, 0, 0])
    for n in range(1, 8):
        if n == 4:
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
        step = model.decoder(tokens[:, :n], incremental_state=state)[0][:, 0]
        torch.testing.assert_close(step, model(tokens)[0][:, n - 1], rtol=1e-9, atol=1e-9)

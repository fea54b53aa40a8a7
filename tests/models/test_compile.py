"""``--compile``: the same results and gradients, the same checkpoints, few compilations, and where nothing is compiled.

The compiler here is dynamo alone, with what it captures run as it is, but for one test with torch's derivative of it.
"""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer import resolve
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules import compilation
from fairseq_sg.ops import orthogonality_loss
from helpers.models import build, tokens

#: Lengths of source and target sentences of one batch after the other.
BATCHES = (([9, 2, 5], [3, 8, 4]), ([7, 2, 5, 6], [6, 2, 9, 9]), ([12, 3], [4, 11]), ([5, 5, 5], [17, 2, 9]))


class Counting:
    """A backend: how many graphs were captured."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    found = Counting()
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "BACKEND", found)
    # The compiler's own messages, which pytest would collect, take most of its time.
    logging.disable(logging.INFO)
    yield found
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


def both(**options):
    """The same model, as it is and compiled."""
    plain, compiled = build(**options), build(compile="default", **options)
    compiled.load_state_dict(plain.state_dict())
    return plain, compiled


def batch(lengths, classifier: bool):
    torch.manual_seed(2)
    sides = [tokens(rows, words, False) for rows, words in zip(lengths, (7, 5))]
    return sides[:1] if classifier else (sides[0], None, sides[1])


def results(model, inputs, **options):
    """Output at real positions, losses, gradients."""
    model.zero_grad()
    out, extra = model(*inputs, **options)
    out = out if len(inputs) == 1 else out[inputs[-1].ne(1)]
    losses = [torch.stack(values) for values in extra["aux_losses"].values()]
    losses += [
        orthogonality_loss(values, padding_mask=mask) for found in extra["values"].values() for values, mask in found
    ]
    (out.square().sum() + sum(loss.sum() for loss in losses)).backward()
    return [out.detach(), *losses, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(actual, expected, near=1e-9):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=near)


RELATIVE = {"encoder_attention": "relative", "decoder_attention": "relative"}


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        # One for the encoder's layers; of a shared decoder layer one more, where the source is projected.
        ({"depth": "shared", **RELATIVE}, 3),
        ({"depth": "separate", "encoder_layers": 4, "decoder_layers": 4}, 2),
        ({"depth": "looped", "loops": 2, **RELATIVE}, 3),
        # Linear attention goes two ways, for short and for long sentences.
        ({"model": SGEncoder, "depth": "shared_act", "encoder_attention": "linear"}, 2),
    ],
    ids=lambda x: "" if isinstance(x, int) else x["depth"],
)
def test_results_and_number_of_compilations(options, graphs, backend):
    plain, compiled = both(**options)
    for lengths in BATCHES:
        inputs = batch(lengths, "model" in options)
        assert_equal(results(compiled, inputs), results(plain, inputs))
    assert backend.graphs == graphs


def test_many_kinds_of_models_in_one_process(monkeypatch):
    """torch compiles a function eight times, and then runs it uncompiled without an error."""
    monkeypatch.setattr(torch._dynamo.config, "fail_on_cache_limit_hit", True)
    inputs = batch(BATCHES[0], False)
    for kind in ("softmax", "relative", "linear", "abs_rel", "geometric"):
        plain, compiled = both(depth="shared", decoder_attention=kind)
        assert_equal(results(compiled, inputs), results(plain, inputs))


def test_derivatives_of_the_compiler(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    plain, compiled = both(model=SGEncoder, depth="shared")
    for lengths in BATCHES[:2]:
        assert_equal(results(compiled, batch(lengths, True)), results(plain, batch(lengths, True)))


def test_autocast(backend):
    """The compiled layers multiply in the dtype of the caller's autocast."""
    inputs, found = batch(BATCHES[0], False), []
    for model in both(depth="shared", **RELATIVE):
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = model(*inputs)
        out[inputs[-1].ne(1)].float().square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert out.dtype == torch.bfloat16 and {grad.dtype for grad in found[-1]} == {torch.float32}
    plain, compiled = (torch.cat([grad.flatten() for grad in grads]) for grads in found)
    assert (plain - compiled).norm() < 2e-2 * plain.norm() and backend.graphs == 3


def test_what_cannot_be_compiled_is_left_out(backend):
    """A mixture of experts: the layer around it is compiled, in parts."""
    plain, compiled = both(model=SGEncoder, encoder_ffn="sigma_moe", moe_expert_dropout=0.0)
    for lengths in BATCHES[:2]:
        inputs = batch(lengths, True)
        found = []
        for model in (plain, compiled):
            out, extra = model(*inputs)
            model.zero_grad()
            out.square().sum().backward()
            found.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert_equal(*found)
    assert 2 <= backend.graphs <= 8


def test_features_that_are_drawn_again(backend):
    """The number of updates is no part of the compiled code."""
    options = {"encoder_attention": "linear", "feature_map": "performer", "performer_redraw": 2}
    model = build(model=SGEncoder, compile="default", **options).train()
    inputs, graphs = batch(BATCHES[0], True), []
    for step in range(6):
        for part in model.modules():
            if hasattr(part, "redraw_every"):
                part.set_num_updates(step)
        model(*inputs)[0].sum().backward()
        graphs.append(backend.graphs)
    assert graphs[-1] == graphs[0] > 0


def test_losses_on_values(backend):
    plain, compiled = both(model=SGEncoder)
    inputs, roles = batch(BATCHES[0], True), ("encoder",)
    assert_equal(results(compiled, inputs, value_roles=roles), results(plain, inputs, value_roles=roles))
    assert backend.graphs == 1


def test_memory_of_segments(backend):
    plain, compiled = both(model=SGTransformerLM, decoder_layers=1)
    found = []
    for model in (plain, compiled):
        memory, outs = None, []
        for segment in tokens([12, 12], 5, False).fill_(5).split(4, dim=1):
            out, extra = model(segment, memory=memory, memory_length=5)
            memory = extra["memory"]
            outs.append(out)
        torch.cat(outs).square().sum().backward()
        found.append([*outs, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_equal(*found)
    assert backend.graphs


def test_dropout_is_drawn_anew(backend):
    model = build(model=SGEncoder, compile="default", dropout=0.5)
    inputs, found = batch(BATCHES[0], True), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(*inputs)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert backend.graphs == 1


@pytest.mark.parametrize("precision", ["half", "autocast"])
def test_low_precision(precision, backend):
    plain, compiled = (model.float() for model in both(model=SGEncoder, encoder_attention="relative"))
    inputs, found = batch(([5, 5, 5],), True), []
    for model in (plain, compiled):
        model = model.bfloat16() if precision == "half" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            found.append(results(model, inputs))
    assert found[0][0].dtype == torch.bfloat16
    assert_equal(*found, near=5e-2)
    assert backend.graphs == 1


def test_checkpoints_are_the_same(backend):
    plain, compiled = both(model=SGEncoder, depth="shared")
    compiled(*batch(BATCHES[0], True))
    assert backend.graphs == 1
    assert list(compiled.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(compiled.state_dict())


def test_a_copy_has_its_own_parameters(backend):
    _, compiled = both(model=SGEncoder)
    inputs = batch(BATCHES[0], True)
    before = compiled(*inputs)[0]
    other = copy.deepcopy(compiled)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    assert not torch.allclose(other(*inputs)[0], before)
    assert torch.equal(compiled(*inputs)[0], before)
    # Nor is compiled code in what another process gets.
    layer = compiled.encoder.stack.layers[0]
    assert pickle.loads(pickle.dumps(layer._compilation)).mode == "default"


@pytest.mark.parametrize("where", ["evaluation", "no gradients", "decoding", "hook"])
def test_where_nothing_is_compiled(where, backend):
    model, inputs = build(compile="default"), batch(BATCHES[0], False)
    seen = []
    if where == "evaluation":
        model.eval()(*inputs)
    elif where == "no gradients":
        with torch.no_grad():
            model(*inputs)
    elif where == "decoding":
        encoder_out = model.eval().encoder(inputs[0])
        model.train().decoder(inputs[2][:, :1], encoder_out, incremental_state={})
    elif where == "hook":
        for side in (model.encoder, model.decoder):
            for layer in side.stack.layers:
                layer.self_attn.q_proj.register_forward_hook(lambda *arguments: seen.append(arguments))
        model(*inputs)
        assert len(seen) == 4
    assert backend.graphs == 0


def test_decoding_is_as_uncompiled(backend):
    plain, compiled = both(depth="shared", **RELATIVE)
    source, _, target = batch(BATCHES[0], False)
    state, found = {}, []
    with torch.no_grad():
        encoder_out = compiled.eval().encoder(source)
        for length in range(1, 4):
            found.append(compiled.decoder(target[:, :length], encoder_out, incremental_state=state)[0])
        expected = plain.eval()(source, None, target[:, :3])[0]
    torch.testing.assert_close(torch.cat(found, 1)[1:], expected[1:], rtol=1e-9, atol=1e-9)


def test_none_is_the_default(backend):
    model = build()
    model(*batch(BATCHES[0], False))
    assert backend.graphs == 0
    assert all(part._compilation is None for part in model.modules() if isinstance(part, compilation.Compilable))


def test_an_unknown_mode_is_answered_with_the_choices():
    with pytest.raises(UsageError, match="--compile is 'fast': choose from none, default, reduce-overhead, max-autot"):
        resolve(SimpleNamespace(compile="fast"))


def test_graphs_on_a_cpu_are_refused_in_training_alone(backend):
    """A model that was trained with them is still evaluated there."""
    model, inputs = build(compile="reduce-overhead"), batch(BATCHES[0], False)
    model.eval()(*inputs)
    with pytest.raises(UsageError, match="--compile reduce-overhead is for CUDA graphs, and this trains on cpu"):
        model.train()(*inputs)
    assert backend.graphs == 0

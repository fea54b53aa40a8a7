"""The recording equals the computation, and does not change it."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch

from fairseq_sg.analysis import record

MODELS = ["softmax", "linear", "gated", "mixed", "encoder"]


def batch_of(loaded, size: int = 6) -> dict:
    """Sentences of several lengths, with padding."""
    inputs = next(loaded.batches(loaded.subset("valid"), size))["net_input"]
    if loaded.has_decoder:
        assert inputs["src_tokens"].eq(loaded.task.source_dictionary.pad()).any()
    return inputs


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_are_the_same_to_the_bit_and_hooks_are_gone(kind, loaded):
    loaded = loaded(kind)
    inputs = batch_of(loaded)
    more = {"need_attn": True} if loaded.has_decoder else {}
    before = hooks(loaded.model)
    plain, extra = loaded.model(**inputs, **more)
    with record(loaded.model) as recording:
        assert hooks(loaded.model) > before
        recorded, extra_recorded = loaded.model(**inputs, **more)
    assert recording.attentions and torch.equal(plain, recorded)
    if loaded.has_decoder:
        assert torch.equal(extra["attn"][0], extra_recorded["attn"][0])
        torch.testing.assert_close(recording.steps("cross")[-1].weights.mean(1), extra["attn"][0])
    assert hooks(loaded.model) == before
    with pytest.raises(KeyError), record(loaded.model):
        raise KeyError
    assert hooks(loaded.model) == before


@torch.no_grad()
@pytest.mark.parametrize(
    "kind,encoder,decoder", [("softmax", 2, 2), ("linear", 3, 3), ("gated", 4, 2), ("encoder", 3, 0)]
)
def test_one_call_a_step(kind, encoder, decoder, loaded):
    loaded = loaded(kind)
    inputs = batch_of(loaded)
    with record(loaded.model) as recording:
        loaded.model(**inputs)
    assert recording.roles == ["encoder", "decoder", "cross"][: 3 if decoder else 1]
    (B, M), N = inputs["src_tokens"].shape, decoder and inputs["prev_output_tokens"].size(1)
    expected = {"encoder": (encoder, M, M), "decoder": (decoder, N, N), "cross": (decoder, N, M)}
    for role, (steps, queries, keys) in expected.items():
        calls = recording.steps(role)
        assert len(calls) == steps
        for call in calls:
            assert call.weights.shape == (B, 4, queries, keys) and call.values.shape == (B, 4, keys, 4)
            assert call.norms["query.projected"].shape == (B, 4, queries)
            assert call.norms["key.projected"].shape == (B, 4, keys)


@torch.no_grad()
def test_softmax_weights_are_probabilities_causal_and_none_on_padding(loaded):
    loaded = loaded("softmax")
    inputs = batch_of(loaded)
    padding = inputs["src_tokens"].eq(loaded.task.source_dictionary.pad())
    with record(loaded.model) as recording:
        loaded.model(**inputs)
    for call in recording.attentions:
        torch.testing.assert_close(call.weights.sum(-1), torch.ones_like(call.weights.sum(-1)))
        if call.role == "decoder":
            assert not call.weights.triu(1).any() and call.weights.tril().any()
        else:
            assert not call.weights.masked_select(padding[:, None, None, :]).any()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softmax", "linear", "gated"])
def test_weights_times_values_is_the_output(kind, loaded):
    """Each step's own weights and Values, in the order of the steps."""
    loaded = loaded(kind)
    outputs = {}
    handles = [
        module.register_forward_hook(lambda m, a, out, name=name: outputs.setdefault(name, []).append(out[0]))
        for name, module in loaded.model.named_modules()
        if name.endswith("_attn")
    ]
    with record(loaded.model) as recording:
        loaded.model(**batch_of(loaded))
    for handle in handles:
        handle.remove()
    for name, made in outputs.items():
        calls = [call for call in recording.attentions if call.module == name]
        project = loaded.model.get_submodule(name).out_proj
        for call, output in zip(calls, made, strict=True):
            heads = (call.weights @ call.values).permute(2, 0, 1, 3).flatten(2)
            torch.testing.assert_close(project(heads), output, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_norms_before_and_after(loaded):
    loaded = loaded("linear")
    inputs = batch_of(loaded)
    attention = loaded.model.encoder.stack.layer.self_attn
    x = loaded.model.encoder.embedding(inputs["src_tokens"])  # (B, M, C)
    with record(loaded.model) as recording:
        loaded.model(**inputs)
    first = recording.steps("encoder")[0]
    for name, project in (("query", attention.q_proj), ("key", attention.k_proj)):
        heads = project(x).unflatten(-1, (4, 4)).transpose(1, 2)
        torch.testing.assert_close(first.norms[f"{name}.projected"], heads.pow(2).sum(-1).sqrt())
        mapped = torch.nn.functional.elu(heads) + 1
        torch.testing.assert_close(first.norms[f"{name}.mapped"], mapped.pow(2).sum(-1).sqrt())
        torch.testing.assert_close(first.norms[f"{name}.normalized"], torch.ones(heads.shape[:3]), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "kind,sides", [("gated", {"encoder": 4, "decoder": 2}), ("encoder", {"encoder": 3, "decoder": 0})]
)
def test_gates_are_those_of_every_step(kind, sides, loaded):
    loaded = loaded(kind)
    states = {side: [] for side in sides}
    handles = [
        getattr(loaded.model, side).stack.layer.update.register_forward_pre_hook(
            lambda module, args, side=side: states[side].append((module, args[0]))
        )
        for side, steps in sides.items()
        if steps
    ]
    with record(loaded.model) as recording:
        loaded.model(**batch_of(loaded))
    for handle in handles:
        handle.remove()
    for side, steps in sides.items():
        calls = recording.gates(side)
        assert len(calls) == steps
        for call, (update, a) in zip(calls, states[side], strict=True):
            expected = update.gate.fc2(update.gate.fc1(a).relu()).sigmoid().transpose(0, 1)
            assert ((call.gates > 0) & (call.gates < 1)).all()
            torch.testing.assert_close(call.gates, expected)
        assert not calls or not torch.equal(calls[0].gates, calls[-1].gates)


def test_training_and_decoding_are_refused(loaded):
    loaded = loaded("softmax")
    inputs = batch_of(loaded)
    loaded.model.train()
    with pytest.raises(ValueError, match="evaluation mode"), record(loaded.model):
        raise AssertionError("it was recorded")
    loaded.model.eval()
    encoder_out = loaded.model.encoder(inputs["src_tokens"])
    with pytest.raises(ValueError, match="record full passes"), record(loaded.model):
        loaded.model.decoder(inputs["prev_output_tokens"][:, :1], encoder_out, incremental_state={})
    assert hooks(loaded.model) == 0

"""Language models: a memory of earlier segments is as the whole stream, for every causal attention; published sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.data import TruncatedDictionary
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from torch import nn

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import LM_ARCHITECTURES
from fairseq_sg.models.decoder import remember
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.losses import Statistic
from helpers.models import dictionary

PAD, EOS = 1, 2
STEPS = 3
MAPS = {
    "cosformer": dict(cosformer_horizon=40),
    "performer": dict(performer_redraw="never"),
    "taylor": dict(feature_dim="4"),
    "rebased": dict(feature_dim="4"),
}
#: Every causal attention, with every position inside it, or added to the embeddings.
KINDS = {
    **{
        name: dict(decoder_attention=name)
        for name, kind in ATTENTION_REGISTRY.items()
        if kind.remembers and "decoder" in kind.roles and name != "linear"
    },
    "learned": dict(position="learned", learned_positions=64),
    "nope": dict(position="none"),
    "rotary": dict(position="rotary"),
    "alibi": dict(position="alibi"),
    "t5": dict(position="t5", t5_buckets=8, t5_max_distance=12),
    "log_length": dict(logit_scale="log_length", position="none"),
    "relative": dict(decoder_attention="relative", attention_scale="learned"),
    "compositional-rotary": dict(decoder_attention="compositional", position="rotary"),
    "linear-rotary": dict(decoder_attention="linear", position="rotary", qk_norm="l2"),
    **{
        f"linear-{name}": dict(decoder_attention="linear", feature_map=name, **MAPS.get(name, {}))
        for name in FEATURE_MAP_REGISTRY
    },
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def build(kind: str = "relative", dtype=torch.float64, **options) -> SGTransformerLM:
    """A small model, its biases and the like not at zero, where mistakes would not show."""
    sizes = dict(decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_attention_heads=2, decoder_layers=STEPS)
    torch.manual_seed(1)
    model = SGTransformerLM.build_model(
        SimpleNamespace(**(sizes | dict(pre_norm=True) | KINDS[kind] | options)),
        SimpleNamespace(source_dictionary=dictionary(20), target_dictionary=dictionary(20)),
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def stream(length: int = 17, rows: int = 3) -> torch.Tensor:
    return torch.randint(4, 24, (rows, length), generator=torch.Generator().manual_seed(5))


def in_segments(model, tokens, length: int, memory_length: int, **more):
    """Logits of a stream that is read in segments, and the memory after each."""
    logits, memories, memory = [], [], None
    for segment in tokens.split(length, dim=1):
        out, extra = model(segment, memory=memory, memory_length=memory_length, **more)
        memory = extra["memory"]
        logits.append(out)
        memories.append(memory)
    return torch.cat(logits, dim=1), memories


def test_all_causal_attentions_and_maps_are_here():
    named = {options.get("decoder_attention", "softmax") for options in KINDS.values()}
    assert named == {name for name, kind in ATTENTION_REGISTRY.items() if kind.remembers and "decoder" in kind.roles}
    assert all(f"linear-{name}" in KINDS for name in FEATURE_MAP_REGISTRY)


@kinds
@pytest.mark.parametrize("depth,segment", [("separate", 5), ("separate", 1), ("shared", 5)])
def test_segments_with_memory_are_the_whole_stream(kind, depth, segment):
    model = build(kind, depth=depth)
    tokens = stream()
    whole = model(tokens)[0]
    parts, memories = in_segments(model, tokens, segment, memory_length=100)
    # Sinusoids are float32, and some features.
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    assert [memory["position"] for memory in memories] == [*range(segment, 17, segment), 17]
    assert all(h.shape == (17, 3, 16) for h in memories[-1]["hidden"]) and len(memories[-1]["hidden"]) == STEPS
    torch.testing.assert_close(parts[:, :segment], model(tokens[:, :segment])[0])
    # The memory matters: without it, the logits differ.
    assert (whole[:, segment:] - model(tokens[:, segment:])[0]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [
    dict(depth="shared_act", act_threshold=0.7), dict(depth="shared_act", act_variant="dehghani"), dict(pre_norm=False),
    dict(decoder_update="copy_gate", pre_norm=False),
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_depths_norms_and_updates(options):
    model = build("relative", **options)
    tokens = stream()
    torch.testing.assert_close(in_segments(model, tokens, 4, 100)[0], model(tokens)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ffn", FEEDFORWARD_REGISTRY)
def test_every_feedforward_layer(ffn):
    model = build("relative", decoder_ffn=ffn, decoder_ffn_embed_dim=256)
    parts, _ = in_segments(model, stream(), 5, 100)
    torch.testing.assert_close(parts, model(stream())[0], rtol=1e-5, atol=1e-6)
    logits, extra = model.train()(stream(), memory_length=4)
    losses = [sum(v for v in values if not isinstance(v, Statistic)) for values in extra["aux_losses"].values()]
    (logits.square().mean() + sum(losses)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@kinds
def test_a_memory_that_is_too_short_forgets(kind):
    """With one layer, what the memory no longer has changes nothing, and what it still has does."""
    model = build(kind, decoder_layers=1)
    tokens = stream(12)
    parts, memories = in_segments(model, tokens, 4, memory_length=6)
    assert [memory["hidden"][0].size(0) for memory in memories] == [4, 6, 6]
    for hidden in memories[-1]["hidden"]:  # nothing else is kept alive
        assert hidden.untyped_storage().nbytes() == hidden.nbytes
    changed = tokens.clone()
    changed[:, :2] = 4 + (changed[:, :2] - 3) % 20
    forgotten = in_segments(model, changed, 4, memory_length=6)[0]
    torch.testing.assert_close(forgotten[:, 8:], parts[:, 8:], rtol=0, atol=0)
    changed[:, 2:4] = 4 + (changed[:, 2:4] - 3) % 20
    remembered = in_segments(model, changed, 4, memory_length=6)[0]
    assert (remembered[:, 8:] - parts[:, 8:]).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["softmax", "abs_rel"])
def test_absolute_positions_go_on_beyond_what_is_remembered(kind):
    """The last segment alone, at the positions that it has in the stream, with what the memory holds."""
    model = build(kind, decoder_layers=1)
    tokens = stream(12)
    memories = in_segments(model, tokens[:, :8], 4, memory_length=6)[1]
    out = model(tokens[:, 8:], memory=memories[-1], memory_length=6)[0]
    # The same tokens at the same positions, in one segment.
    start = {"hidden": [h[:0] for h in memories[-1]["hidden"]], "position": 2}
    torch.testing.assert_close(
        out, model(tokens[:, 2:], memory=start, memory_length=6)[0][:, -4:], rtol=1e-6, atol=1e-7
    )
    elsewhere = {**memories[-1], "position": 108}
    assert (model(tokens[:, 8:], memory=elsewhere, memory_length=6)[0] - out).abs().max() > 1e-3


def test_absolute_positions_far_along_a_stream():
    """Beyond the table, angles are still exact: products of sinusoids depend on distances alone."""
    positions = build("softmax").decoder.embedding.positions
    near = positions(torch.arange(6)[None], 6)[0].double()
    for start in (1 << 14, 1 << 30):
        far = positions(start + torch.arange(6)[None], start + 6)[0].double()
        torch.testing.assert_close(far @ far.T, near @ near.T, rtol=1e-4, atol=1e-4)
    assert len(positions.table) <= 1 << 14


@kinds
def test_gradients_reach_projections_through_memory_and_nothing_of_the_past(kind):
    """d/dW of a segment after a memory is d/dW of the same with the memory's states as constants."""
    model = build(kind, decoder_layers=1, depth="separate")
    tokens = stream(10)
    with torch.no_grad():
        memory = model(tokens[:, :6], memory_length=6)[1]["memory"]
    linked = model(tokens[:, :6], memory_length=6)[1]["memory"]
    assert not any(h.requires_grad for h in linked["hidden"])
    logits = model(tokens[:, 6:], memory=linked, memory_length=6)[0]
    attention = model.decoder.stack.layers[0].self_attn
    weights = [
        attention.k_proj.weight,
        attention.v_proj.weight,
        model.decoder.stack.layers[0].self_attn_residual.norm.weight,
    ]
    gradients = torch.autograd.grad(logits.square().sum(), weights)
    embeddings = model.decoder.embedding.tokens.weight

    # The whole as one stream, the memory's embeddings without gradient.
    def value(weight, direction, eps):
        with torch.no_grad():
            weight += eps * direction
            out = model(tokens[:, 6:], memory=memory, memory_length=6)[0].square().sum()
            weight -= eps * direction
        return out

    for weight, gradient in zip(weights, gradients, strict=True):
        direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(7))
        # A step so small that no ReLU changes its side.
        expected = (value(weight, direction, 1e-6) - value(weight, direction, -1e-6)) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-4, atol=1e-5)
    only_now = torch.autograd.grad(model(tokens[:, 6:], memory=linked, memory_length=6)[0].sum(), embeddings)[0]
    earlier = sorted(set(tokens[:, :6].flatten().tolist()) - set(tokens[:, 6:].flatten().tolist()))
    assert earlier and not only_now[earlier].any() and only_now.any()


def test_keys_of_memory_have_gradients_of_their_own():
    """Had the projections of memory none, the gradient would be that of the segment alone."""
    model = build("relative", decoder_layers=1)
    tokens = stream(10)
    memory = model(tokens[:, :6], memory_length=6)[1]["memory"]
    attention = model.decoder.stack.layers[0].self_attn
    seen = []
    attention.k_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.retain_grad() or out))
    model(tokens[:, 6:], memory=memory, memory_length=6)[0].square().sum().backward()
    assert seen[0].size(0) == 10 and seen[0].grad[:6].any()


@kinds
def test_weights_are_those_of_the_whole(kind):
    attention = build(kind).decoder.stack.layers[0].self_attn
    x = torch.randn(9, 2, 16, dtype=torch.float64)
    out, weights, _ = attention(x[6:], None, Context(memory=x[:6], return_weights=True))
    whole_out, whole, _ = attention(x, None, Context(return_weights=True))
    torch.testing.assert_close(out, whole_out[6:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, whole[:, :, 6:], rtol=1e-5, atol=1e-6)
    for wrong in (dict(key_padding_mask=torch.zeros(2, 9, dtype=torch.bool)), dict(state={})):
        with pytest.raises(ValueError, match="attention to a memory has no"):
            attention(x[6:], None, Context(memory=x[:6], **wrong))


@pytest.mark.parametrize("kind", ["relative", "linear-elu", "softmax", "geometric", "galerkin"])
def test_rows_that_have_ended_change_no_other(kind):
    model = build(kind)
    tokens = stream(10)
    tokens[1, 4:] = PAD
    tokens[2, 7:] = PAD
    parts, _ = in_segments(model, tokens, 5, 100)
    assert parts.isfinite().all()
    alone = in_segments(model, tokens[:1], 5, 100)[0]
    torch.testing.assert_close(parts[:1], alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts[1:2, :4], model(tokens[1:2, :4])[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["relative", "linear-elu", "t5", "galerkin"])
def test_half_precision(kind):
    model = build(kind)
    tokens = stream()
    expected = in_segments(model, tokens, 5, 8)[0]
    out, memories = in_segments(model.to(torch.bfloat16), tokens, 5, 8)
    assert out.dtype == memories[0]["hidden"][0].dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.1, atol=0.15)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = in_segments(model.float(), tokens, 5, 8)[0]
    torch.testing.assert_close(mixed.double(), expected, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 12])
def test_a_memory_has_as_many_positions_as_it_is_asked_for(length):
    """Whether a segment, here of four positions, is shorter than the memory, as long, or longer."""
    earlier, h = torch.randn(6, 2, 3), torch.randn(4, 2, 3)
    kept = remember(h, [torch.zeros(6, 2, 3), earlier], 1, length)
    assert torch.equal(kept, torch.cat([earlier, h])[-length:])


def test_memory_length_zero_keeps_nothing():
    assert "memory" not in build()(stream())[1]


def test_hidden_states_and_values_are_of_the_segment():
    model = build("relative")
    tokens = stream(10)
    memory = model(tokens[:, :6], memory_length=6)[1]["memory"]
    options = dict(memory=memory, memory_length=6, value_roles=("decoder",), return_all_hiddens=True)
    extra = model(tokens[:, 6:], **options)[1]
    shapes = [(values.size(2), padding_mask.size(1)) for values, padding_mask in extra["values"]["decoder"]]
    assert shapes == [(4, 4)] * STEPS and [h.size(0) for h in extra["inner_states"]] == [4] * STEPS
    assert model.attention_roles == ("decoder",)


# Decoding.


@kinds
def test_decoding_step_by_step_is_the_full_pass(kind):
    model = build(kind)
    tokens = stream()
    whole, state = model(tokens)[0], {}
    for n in range(1, 18):
        step = model.decoder(tokens[:, :n], incremental_state=state)[0]
        torch.testing.assert_close(step[:, 0], whole[:, n - 1], rtol=1e-5, atol=1e-5)


def test_generation_continues_prompts_greedily():
    """fairseq's generator, with beams that are reordered, gives what the full pass would choose."""
    model = build("relative", dtype=torch.float32)
    words = dictionary(20)
    prompts = stream(4)
    for beam in (1, 3):
        generator = SequenceGenerator([model], words, beam_size=beam, max_len_b=9, min_len=9)
        sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((3,), 4)}}
        out = generator.generate([model], sample, prefix_tokens=prompts, bos_token=EOS)
        for row, hypotheses in enumerate(out):
            tokens = hypotheses[0]["tokens"]
            assert tokens[:4].tolist() == prompts[row].tolist() and len(tokens) == 10
            logits = model(torch.cat([torch.tensor([EOS]), tokens[:-1]])[None])[0][0]
            scores = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(hypotheses[0]["positional_scores"], scores, rtol=1e-3, atol=1e-4)
            if beam == 1:
                logits[:, [PAD, EOS]] = -torch.inf
                assert tokens[4:-1].tolist() == logits[4:-1].argmax(-1).tolist()


# Options.


@pytest.mark.parametrize(
    "options,message",
    [
        ({"linear_init": "deep"}, "--linear-init is 'deep': choose from mechanism, depth"),
        ({"linear_init": "depth", "attention_init": "torch"}, "--attention-init torch has no effect with --linear"),
        ({"linear_init": "depth", "ffn_init": "torch"}, "--ffn-init torch has no effect with --linear-init depth"),
        ({"decoder_head_dim": 0}, "--decoder-head-dim is 0: choose 1 or more"),
        ({"decoder_attention": "square"}, "unknown attention 'square'"),
        ({"qk_norm": "l2"}, "--qk-norm l2 has no effect"),
        ({"input_embedding": "learned"}, "--input-embedding is for --task sg_tagging: leave it out"),
        ({"kind": "galerkin", "decoder_head_dim": 5}, "2 heads of width 5 do not add up to .* 16: choose --decoder-"),
    ],
)  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build(**{"kind": "relative"} | options)


def test_a_translation_needs_another_model():
    task = TranslationTask(SimpleNamespace(), dictionary(20), dictionary(20))
    with pytest.raises(UsageError, match="this --arch is a language model: choose --task sg_language_modeling"):
        SGTransformerLM.build_model(SimpleNamespace(), task)


def test_a_memory_needs_positions_and_attentions_that_go_on(monkeypatch):
    model = build("softmax", position="randomized")
    model(stream())
    with pytest.raises(UsageError, match="--position randomized numbers whole sentences"):
        model(stream(), memory_length=4)
    model = build("relative", position="randomized", randomized_base="relative")
    with pytest.raises(UsageError, match="--position randomized numbers whole sentences"):
        model(stream(), memory_length=4)
    model = build("softmax")
    with pytest.raises(ValueError, match="decoding step by step"):
        model.decoder(stream(), incremental_state={}, memory_length=4)
    memory = model(stream(), memory_length=4)[1]["memory"]
    model.decoder.left_pad_target = True
    with pytest.raises(UsageError, match="a memory is for rows that are padded on the right: leave --left-pad-target"):
        model(stream(), memory_length=4)
    model.decoder.left_pad_target = False
    monkeypatch.setattr(type(model.decoder.stack.layers[0].self_attn), "remembers", False)
    with pytest.raises(UsageError, match="softmax attention as decoder has no memory of earlier segments"):
        model(stream(), memory=memory, memory_length=4)


def test_learned_positions_end():
    model = build("learned")
    memory = {**model(stream(), memory_length=4)[1]["memory"], "position": 60}
    with pytest.raises(UsageError, match="longer than --learned-positions 64"):
        model(stream(), memory=memory, memory_length=4)


def test_heads_of_another_width():
    model = build("relative", decoder_head_dim=5)
    attention = model.decoder.stack.layers[0].self_attn
    assert attention.q_proj.out_features == attention.pos_proj.out_features == attention.out_proj.in_features == 10
    torch.testing.assert_close(in_segments(model, stream(), 5, 100)[0], model(stream())[0], rtol=1e-5, atol=1e-6)
    for kind in ("linear-elu", "abs_rel", "geometric", "compositional"):
        build(kind, decoder_head_dim=5)(stream())


def test_dropout_after_the_embedding_and_before_the_output():
    model = build("relative", dropout=0.3)
    assert model.decoder.embedding.dropout.p == model.decoder.output_dropout.p == 0.3
    model = build("relative", dropout=0.3, embedding_dropout=0.2)
    assert (model.decoder.embedding.dropout.p, model.decoder.output_dropout.p) == (0.2, 0.3)
    features = torch.ones(2, 3, 16, dtype=torch.float64)
    model.decoder.output_dropout.p = 1.0
    assert torch.equal(model.train().decoder.output_layer(features), model.decoder.output_bias.expand(2, 3, -1))


def test_output_layer_starts_as_a_linear_layer_of_pytorch():
    """As the released code leaves it: uniform to 1/√d = 0.25 for weight and bias."""

    def decoder(**options):
        sizes = dict(decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_attention_heads=2, decoder_layers=1)
        task = SimpleNamespace(source_dictionary=dictionary(20), target_dictionary=dictionary(20))
        return SGTransformerLM.build_model(SimpleNamespace(**sizes, **options), task).decoder

    for parameter in (decoder().output_weight, decoder().output_bias):
        assert 0.2 < parameter.abs().max() <= 0.25 and parameter.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.3)


# Sizes, and how they start.


def architecture(name: str, **options) -> SGTransformerLM:
    words = 256 if name.endswith("e8") else 8000 - 1
    options = dict(decoder_attention="relative", attention_scale="learned", attention_dropout=0.0) | options
    config = SimpleNamespace(**LM_ARCHITECTURES[f"sg_transformer_lm_{name}"], **options)
    task = SimpleNamespace(source_dictionary=dictionary(words), target_dictionary=dictionary(words))
    return SGTransformerLM.build_model(config, task)


def test_outputs_may_be_fewer_than_inputs():
    """``--output-dictionary-size`` of fairseq's ``language_modeling``."""
    sizes = SimpleNamespace(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, decoder_layers=1)
    words = dictionary(20)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=TruncatedDictionary(words, 10))
    assert SGTransformerLM.build_model(sizes, task)(stream())[0].shape == (3, 17, 10)


@pytest.mark.parametrize("name,millions", [("wt_s", 47), ("wt_s_star", 238), ("wt_b", 262), ("e8", 41)])
def test_parameter_counts(name, millions):
    """Csordás 2023, Table F.2, within 1 %."""
    with torch.device("meta"):
        model = architecture(name)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_linear_layers_start_by_depth():
    model = architecture("e8")
    layer = model.decoder.stack.layers[3]
    linears = [part for part in layer.self_attn.modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 5 and model.decoder.final_norm.weight.shape == (512,)
    for linear in [*linears, layer.update.ffn.fc1, layer.update.ffn.fc2]:
        std = (2 / (12 * linear.in_features)) ** 0.5
        assert linear.weight.std().item() == pytest.approx(std, rel=0.01)
        assert linear.weight.abs().max().item() <= 2 / 0.8796 * std
        assert linear.bias is None or not linear.bias.any()
    assert layer.self_attn.learned_scale is not None


def test_parts_of_an_attention_that_are_no_projections_start_as_their_method_says():
    model = architecture(
        "e8", decoder_attention="linear", feature_map="hedgehog", attention_scale="head_dim", attention_dropout=None
    )
    (name, weight), *_ = ((n, p) for n, p in model.named_parameters() if n.endswith("query_map.weight"))
    assert torch.equal(weight, torch.eye(len(weight)).expand_as(weight)), name

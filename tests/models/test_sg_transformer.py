"""The encoder–decoder model: published sizes, decoding, padding, options and their errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ARCHITECTURES
from fairseq_sg.models.sg_transformer import SGTransformer, configuration, resolve
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from helpers.decoding import assert_steps_equal_full_passes
from helpers.models import dictionary

SPECIALS = 4  # fairseq's <s>, <pad>, </s>, <unk>


def task(source=13, target=6, left_pad_target=False):
    return SimpleNamespace(
        source_dictionary=dictionary(source),
        target_dictionary=dictionary(target),
        cfg=SimpleNamespace(left_pad_target=left_pad_target),
    )


def tiny(left_pad_target=False, **options) -> SGTransformer:
    sizes = {
        f"{side}_{k}": v
        for side in ("encoder", "decoder")
        for k, v in (("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", 2), ("layers", 2))
    }
    torch.manual_seed(0)
    return SGTransformer.build_model(SimpleNamespace(**(sizes | options)), task(left_pad_target=left_pad_target)).eval()


KINDS = {
    "softmax": {},
    "linear": dict(encoder_attention="linear", decoder_attention="linear", cross_attention="linear", qk_norm="l2"),
    # Its features depend on positions, which count real tokens.
    "cosformer": dict(
        encoder_attention="linear",
        decoder_attention="linear",
        cross_attention="linear",
        feature_map="cosformer",
        cosformer_horizon=40,
    ),
    "relative": dict(encoder_attention="relative", decoder_attention="relative"),
    "mixed": dict(encoder_attention="relative", decoder_attention="linear", cross_attention="softmax"),
    "abs_rel": dict(encoder_attention="abs_rel", decoder_attention="abs_rel"),
    "geometric": dict(encoder_attention="geometric", decoder_attention="geometric"),
    "compositional": {f"{name}_attention": "compositional" for name in ("encoder", "decoder", "cross")},
    "galerkin": {f"{name}_attention": "galerkin" for name in ("encoder", "decoder", "cross")},
    "fourier": {f"{name}_attention": "fourier" for name in ("encoder", "decoder", "cross")},
    "ndr": dict(
        encoder_attention="geometric",
        decoder_attention="relative",
        encoder_update="copy_gate",
        decoder_update="copy_gate",
    ),
    "pre_norm": dict(pre_norm=True, untied_output=True),
    "feedforward_only": dict(encoder_update="feedforward_only", decoder_update="feedforward_only", pre_norm=True),
}
#: Depth -> its options.
DEPTHS = {
    "separate": {},
    "shared": {},
    "shared_act": {},
    "looped": {"loops": 3},
}
kinds = pytest.mark.parametrize("kind", KINDS)
depths = pytest.mark.parametrize("depth", DEPTHS)


@pytest.mark.parametrize(
    "arch,vocabulary,options,published",
    [
        ("scan", (13, 6), {}, 992_007),
        ("scan", (13, 6), {"depth": "shared"}, 332_551),
        ("scan", (13, 6), KINDS["relative"], 1_091_847),
        ("scan", (13, 6), KINDS["relative"] | {"depth": "shared"}, 365_831),
        ("cogs", (871, 871), {}, 9_297_256),
        ("pcfg", (535, 535), {}, 44_651_544),
    ],
    ids=["scan", "scan-universal", "scan-relative", "scan-relative-universal", "cogs", "pcfg"],
)
def test_parameter_counts_of_the_thesis(arch, vocabulary, options, published):
    """Csordás 2023, Table C.2. The reference's tables have V_in + 2 and V_out + 1 rows, fairseq's V + 4 on either
    side.
    """
    sizes = ARCHITECTURES[f"sg_transformer_{arch}"]
    model = SGTransformer.build_model(SimpleNamespace(**(sizes | options)), task(*vocabulary))
    width = sizes["encoder_embed_dim"]
    extra = (SPECIALS - 2) * width + (SPECIALS - 1) * width + (SPECIALS - 1)
    assert sum(p.numel() for p in model.parameters()) - extra == published


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_builds(arch):
    config = resolve(SimpleNamespace(**ARCHITECTURES[arch]))
    assert config.encoder_embed_dim % config.encoder_attention_heads == 0
    assert config.depth == ("shared" if "universal" in arch else "separate")


@depths
def test_each_side_has_its_own_number_of_steps(depth):
    model = tiny(depth=depth, decoder_layers=4, **DEPTHS[depth])
    loops = DEPTHS[depth].get("loops", 1)
    assert (model.encoder.stack.steps, model.decoder.stack.steps) == (2 * loops, 4 * loops)


def test_a_window_that_no_attention_has_is_refused():
    tiny(attention_window=2, encoder_attention_window=3)
    tiny(attention_window=2, encoder_attention_window=3, encoder_attention="geometric", decoder_attention="geometric")
    with pytest.raises(UsageError, match="--attention-window is for self-attention of a decoder, of the kinds"):
        tiny(attention_window=2, decoder_attention="linear")
    with pytest.raises(
        UsageError, match="--encoder-attention-window is for self-attention of an encoder, of the kinds"
    ):
        tiny(encoder_attention_window=2, encoder_attention="galerkin")


def batch(left_pad=False):
    """Two sentences of different length on either side, and the same without padding one by one."""
    src = [[4, 5, 6, 7, 2], [8, 9, 2]]
    tgt = [[2, 4, 5], [2, 6, 7, 8, 9]]

    def pad(rows):
        width = max(map(len, rows))
        return torch.tensor([[1] * (width - len(r)) + r if left_pad else r + [1] * (width - len(r)) for r in rows])

    return src, tgt, pad(src), pad(tgt)


@kinds
@depths
@pytest.mark.parametrize("left_pad", [False, True], ids=["right", "left"])
def test_padding_changes_nothing(kind, depth, left_pad):
    options = KINDS[kind] | ({"cross_attention": "softmax"} if left_pad and kind == "cosformer" else {})
    model = tiny(depth=depth, left_pad_target=left_pad, **DEPTHS[depth], **options)
    src, tgt, src_batch, tgt_batch = batch(left_pad)
    together = model(src_batch, None, tgt_batch)[0]
    for i in range(2):
        alone = model(torch.tensor([src[i]]), None, torch.tensor([tgt[i]]))[0][0]
        part = together[i, -len(tgt[i]) :] if left_pad else together[i, : len(tgt[i])]
        torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-5)


def test_positions_in_cross_attention_need_targets_that_are_padded_on_the_right():
    """A folded source is read without the padding of the prefix."""
    with pytest.raises(UsageError, match="--feature-map cosformer in cross-.* leave --left-pad-target out"):
        tiny(left_pad_target=True, **KINDS["cosformer"])


@kinds
@depths
@pytest.mark.parametrize("left_pad", [False, True], ids=["right", "left"])
def test_decoding_step_by_step_after_reordering_equals_full_passes(kind, depth, left_pad):
    """As beam search does it: encoder output and decoding state reordered between the steps, sentences repeated and
    dropped. With padding on the left, the second sentence begins later.
    """
    options = KINDS[kind] | ({"cross_attention": "softmax"} if left_pad and kind == "cosformer" else {})
    model = tiny(depth=depth, left_pad_target=left_pad, **DEPTHS[depth], **options)
    begin = torch.tensor([[2], [1 if left_pad else 2]])
    assert_steps_equal_full_passes(model, batch()[2], begin, words=6, steps=6, rtol=1e-4, atol=1e-5)


def test_reordering_keeps_every_key_of_the_encoders_output():
    model = tiny()
    out = model.encoder(batch()[2], torch.tensor([5, 3]), return_all_hiddens=True, return_values=True)
    got = model.encoder.reorder_encoder_out(out, torch.tensor([1, 1, 0]))
    assert set(got) == set(out)
    assert torch.equal(got["encoder_out"][0][:, 2], out["encoder_out"][0][:, 0])
    assert torch.equal(got["encoder_states"][1][:, 0], out["encoder_states"][1][:, 1])
    assert got["values"] is out["values"] and len(out["values"]["encoder"]) == 2


@kinds
def test_shared_layer_takes_more_steps_with_the_same_checkpoint(kind):
    model = tiny(depth="shared", **KINDS[kind])
    deeper = tiny(depth="shared", **(KINDS[kind] | {"encoder_layers": 5, "decoder_layers": 4}))
    deeper.load_state_dict(model.state_dict())
    _, _, src, tgt = batch()
    assert not torch.allclose(model(src, None, tgt)[0], deeper(src, None, tgt)[0])
    two = tiny(
        depth="separate", **KINDS[kind]
    )  # unrolled: two layers with the shared layer's weights are the same function
    for side in ("encoder", "decoder"):
        for layer in getattr(two, side).stack.layers:
            layer.load_state_dict(getattr(model, side).stack.layer.state_dict())
    rest = {k: v for k, v in model.state_dict().items() if ".stack." not in k}
    assert not two.load_state_dict(rest, strict=False).unexpected_keys
    torch.testing.assert_close(two(src, None, tgt)[0], model(src, None, tgt)[0])


@kinds
def test_every_parameter_learns(kind):
    model = tiny(**KINDS[kind]).train()
    _, _, src, tgt = batch()
    model(src, None, tgt)[0].square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


def test_values_by_role_and_application():
    model = tiny(depth="shared", encoder_layers=3)
    _, _, src, tgt = batch()
    roles = model.attention_roles
    values = model(src, None, tgt, value_roles=roles)[1]["values"]
    assert {role: len(found) for role, found in values.items()} == {"encoder": 3, "decoder": 2, "cross": 2}
    longer = torch.cat([tgt, torch.ones(2, 3, dtype=torch.long)], dim=1)
    wider = torch.cat([src, torch.ones(2, 4, dtype=torch.long)], dim=1)
    padded = model(wider, None, longer, value_roles=roles)[1]["values"]
    for role in roles:
        for (short, mask), (long, long_mask) in zip(values[role], padded[role], strict=True):
            assert long_mask[:, mask.size(1) :].all() and torch.equal(long_mask[:, : mask.size(1)], mask)
            torch.testing.assert_close(
                long.transpose(1, 2)[~long_mask], short.transpose(1, 2)[~mask], rtol=1e-4, atol=1e-4
            )
    extra = model(src, None, tgt, value_roles=("decoder",))[1]
    assert list(extra["values"]) == ["decoder"] and extra["aux_losses"] == {}
    assert model(src, None, tgt)[1]["values"] == {}


def test_cross_attention_weights_on_request():
    model = tiny()
    src, tgt, src_batch, tgt_batch = batch()
    weights = model(src_batch, None, tgt_batch, need_attn=True)[1]["attn"][0]
    assert weights.shape == (2, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
    assert (weights[1, :, 3:] == 0).all()
    assert model(src_batch, None, tgt_batch)[1]["attn"] == [None]


# Embeddings, as the reference has them.


@pytest.mark.parametrize(("scaling", "scale"), [("token_up", 4.0), ("none", 1.0)])
def test_embedding_scaling_is_that_of_both_sides(scaling, scale):
    model = tiny(embedding_scaling=scaling)
    assert model.encoder.embedding.token_scale == model.decoder.embedding.token_scale == scale


def test_bias_of_an_untied_output_starts_as_in_a_linear_layer_of_pytorch():
    options = {"encoder_layers": 1, "decoder_layers": 1}
    for untied in (False, True):
        decoder = SGTransformer.build_model(SimpleNamespace(**options, untied_output=untied), task()).decoder
        bound = decoder.embedding.dim**-0.5 if untied else 0.0
        assert 0.8 * bound <= decoder.output_bias.abs().max().item() <= bound


def test_relative_side_has_no_positions_no_scale_no_dropout_glorot():
    model = SGTransformer.build_model(
        SimpleNamespace(**(KINDS["mixed"] | {"encoder_layers": 1, "decoder_layers": 1})), task()
    ).train()
    encoder, decoder = model.encoder.embedding, model.decoder.embedding
    tokens = torch.tensor([[4, 4, 5]])
    assert torch.equal(encoder(tokens), encoder.tokens(tokens))
    bound = math.sqrt(6 / (17 + 512))
    assert 0.97 * bound < encoder.tokens.weight.abs().max().item() <= bound
    assert decoder.dropout.p == 0.1 and not torch.equal(decoder(tokens)[0, 0], decoder(tokens)[0, 1])


def test_sequences_longer_than_the_position_table():
    model = tiny()
    long = torch.randint(4, 10, (1, 700))
    with torch.no_grad():
        assert model(long, None, long)[0].isfinite().all()


# One mechanism a layer.


HYBRID = dict(
    encoder_attention="relative,linear,softmax",
    decoder_attention="linear, relative,linear",
    cross_attention="softmax,linear,softmax",
    encoder_layers=3,
    decoder_layers=3,
)


def test_every_layer_has_the_attention_that_is_named_for_it():
    model = tiny(**HYBRID)
    kinds = [layer.self_attn.registered_name for layer in model.encoder.stack.layers]
    assert kinds == ["relative", "linear", "softmax"]
    layers = model.decoder.stack.layers
    assert [layer.self_attn.registered_name for layer in layers] == ["linear", "relative", "linear"]
    assert [layer.cross_attn.registered_name for layer in layers] == ["softmax", "linear", "softmax"]
    assert model.encoder.embedding.positions.registered_name == "sinusoidal"
    same = tiny(**HYBRID | {"encoder_attention": "relative,relative,relative"})
    assert same.encoder.embedding.positions.registered_name == "none"


def test_hybrid_decodes_as_it_trains_and_learns():
    model = tiny(**HYBRID)
    _, _, src, tgt = batch()
    full, state = model(src, None, tgt)[0], {}
    encoder_out = model.encoder(src, None)
    steps = [model.decoder(tgt[:, : n + 1], encoder_out, incremental_state=state)[0] for n in range(3)]
    torch.testing.assert_close(torch.cat(steps, 1), full[:, :3], rtol=1e-4, atol=1e-5)
    full.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


# Options: what has no effect or makes no sense is refused.


@pytest.mark.parametrize(
    "options,message",
    [
        ({"qk_norm": "l2"}, r"--qk-norm l2 has no effect on the chosen mechanisms; it is an option of: linear "
            r"attention"),
        ({**KINDS["linear"], "attention_dropout": 0.3}, r"--attention-dropout 0.3 has no effect .* an option of: "
            r".*softmax attention.*relative attention"),
        ({"encoder_attention": "lineer"}, r"unknown attention 'lineer' .*choose from .*linear, relative, softmax"),
        ({"cross_attention": "relative"}, r"relative attention cannot serve as 'cross' attention: its roles are "
            r"encoder, decoder; choose another --cross-attention"),
        ({"encoder_attention_heads": 5}, r"the width 16 is not divisible by the number of attention heads 5: choose "
            r"another --encoder-attention-heads or --encoder-embed-dim"),
        ({"depth": "deep"}, r"unknown depth 'deep' \(--depth\): choose from looped, separate, shared"),
        ({"encoder_layers": 0}, r"--encoder-layers is 0: choose 1 or more"),
        ({"encoder_attention": "linear,relative", "encoder_layers": 3}, r"--encoder-attention names 2 layers, and "
            r"--encoder-layers is 3: name one"),
        ({"cross_attention": "linear,softmax,linear"}, r"--cross-attention names 3 layers, and --decoder-layers is 2: "
            r"name one"),
        ({"encoder_attention": "linear,relative", "depth": "shared"}, r"--encoder-attention names 2 layers, and "
            r"--depth shared has one for all steps"),
        ({"encoder_attention": "linear,lineer"}, r"unknown attention 'lineer'"),
        ({"decoder_ffn": "dense,dense,dense"}, r"--decoder-ffn names 3 layers, and --decoder-layers is 2"),
        ({"encoder_ffn": "moe"}, r"unknown feedforward layer 'moe' .*choose from dense"),
        ({"position": "learnt"}, r"unknown position 'learnt' \(--position\): choose from .*none, .*sinusoidal"),
        ({**KINDS["relative"], "position": "sinusoidal"}, r"--position sinusoidal has no effect: relative attention "
            r"brings its own positions; leave the option out$"),
        ({**KINDS["relative"], "position": "randomized"}, r"leave the option out, or give --randomized-base relative$"),
        ({"embedding_scaling": "up"}, r"--embedding-scaling is 'up': choose from auto, token_up, none, position_down"),
        ({"ffn_init": "zeros"}, r"--ffn-init is 'zeros': choose from reference, scaled, torch"),
    ],
)  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_configuration_has_every_option_of_every_mechanism():
    from dataclasses import fields

    names = {f.name for f in fields(configuration.dataclass)}
    for cls in ATTENTION_REGISTRY.values():
        assert {f.name for f in fields(cls.options)} <= names

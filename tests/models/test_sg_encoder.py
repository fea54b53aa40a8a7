"""The classifiers: which column is read, whatever the padding; sizes as published; options and their errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ENCODER_ARCHITECTURES, LSTM_ARCHITECTURES
from fairseq_sg.models.encoder import SGTransformerEncoder
from fairseq_sg.models.sg_encoder import SGEncoder, first_column, last_column, resolve
from fairseq_sg.models.sg_lstm import SGLSTM
from helpers.models import dictionary

PAD = 1
CLASSES = 5
#: Begin symbol, words, end symbol.
SENTENCES = [[0, 4, 5, 6, 7, 8, 2], [0, 9, 8, 2], [0, 4, 4, 5, 2]]

TRANSFORMERS = {
    "softmax": {},
    "relative": dict(encoder_attention="relative", embedding_scaling="position_down"),
    "ndr": dict(
        encoder_attention="geometric", encoder_update="copy_gate", depth="shared", embedding_scaling="none",
    ),
    "act": dict(encoder_attention="geometric", depth="shared_act"),
    "linear": dict(encoder_attention="linear", pre_norm=True),
}  # fmt: skip
LSTMS = {"lstm": dict(layers=2), "bilstm": dict(bidirectional=True, layers=2)}
KINDS = TRANSFORMERS | LSTMS
kinds = pytest.mark.parametrize("kind", KINDS)


def task(words=8, classes=CLASSES):
    return SimpleNamespace(source_dictionary=dictionary(words), num_classes=classes)


def encoder(**options) -> SGEncoder:
    sizes = dict(encoder_embed_dim=16, encoder_ffn_embed_dim=32, encoder_attention_heads=2, encoder_layers=3)
    return SGEncoder.build_model(SimpleNamespace(**(sizes | options)), task())


def lstm(**options) -> SGLSTM:
    return SGLSTM.build_model(SimpleNamespace(**(dict(embed_dim=6, hidden_dim=8) | options)), task())


def build(kind: str, **options):
    torch.manual_seed(0)
    make = lstm if kind in LSTMS else encoder
    return make(**(KINDS[kind] | options)).eval()


def pad(rows, left: bool, extra: int = 0):
    width = max(map(len, rows)) + extra
    return torch.tensor([[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows])


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_first_and_last_column(left):
    mask = pad(SENTENCES, left, extra=2).eq(PAD)
    first, last = first_column(mask).tolist(), last_column(mask).tolist()
    assert first == ([2, 5, 4] if left else [0, 0, 0])
    assert last == ([8, 8, 8] if left else [6, 3, 4])


def test_row_of_padding_alone_has_columns():
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert first_column(mask).tolist() == [0] and last_column(mask).tolist() == [2]


@pytest.mark.parametrize("readout", ["first", "last"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_class_is_read_from_the_column(readout, left):
    model = build("relative", readout=readout)
    tokens = pad(SENTENCES, left)
    states = model.encoder(tokens)["encoder_out"][0]
    symbol = {"first": 0, "last": 2}[readout]
    logits = model(tokens)[0]
    for row in range(3):
        column = tokens[row].tolist().index(symbol)
        torch.testing.assert_close(logits[row], model.classifier(states[column, row]))


def test_words_are_read_from_the_last_column_by_default():
    tokens = pad(SENTENCES, False)
    assert torch.equal(build("softmax")(tokens)[0], build("softmax", readout="last")(tokens)[0])


def test_a_readout_of_every_column_is_no_choice():
    """What the architecture has is let through."""
    labels = SimpleNamespace(**vars(task()), labels_words=True)
    sizes = dict(encoder_embed_dim=16, encoder_ffn_embed_dim=32, encoder_attention_heads=2, encoder_layers=3)
    SGEncoder.build_model(SimpleNamespace(**sizes, arch="sg_encoder_ctl", readout="last"), labels)
    SGEncoder.build_model(SimpleNamespace(**sizes), labels)
    for arch, readout in (("sg_encoder_ctl", "first"), ("sg_encoder", "last")):
        with pytest.raises(UsageError, match="--readout has no effect with --task sg_tagging"):
            SGEncoder.build_model(SimpleNamespace(**sizes, arch=arch, readout=readout), labels)


@kinds
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_changes_nothing(kind, left):
    model = build(kind)
    together = model(pad(SENTENCES, left, extra=3))[0]
    assert together.shape == (3, CLASSES)
    for row, sentence in enumerate(SENTENCES):
        torch.testing.assert_close(together[row], model(torch.tensor([sentence]))[0][0], rtol=1e-4, atol=1e-5)


@kinds
def test_row_of_padding_alone_is_finite_and_changes_no_other(kind):
    model = build(kind)
    rows = torch.cat([pad(SENTENCES, False), torch.full((1, 7), PAD)])
    logits = model(rows)[0]
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:3], model(rows[:3])[0], rtol=1e-4, atol=1e-5)


@kinds
def test_every_parameter_learns(kind):
    model = build(kind).train()
    logits, extra = model(pad(SENTENCES, False))
    loss = logits.square().sum() + sum(sum(values) for values in extra.get("aux_losses", {}).values())
    loss.backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


@kinds
def test_state_dict_makes_the_same_model(kind):
    model, other = build(kind), build(kind)
    for p in other.parameters():
        torch.nn.init.normal_(p)
    other.load_state_dict(model.state_dict())
    tokens = pad(SENTENCES, False)
    assert torch.equal(model(tokens)[0], other(tokens)[0])


def test_encoder_is_that_of_sg_transformer_and_takes_more_steps():
    model, deeper = build("ndr"), build("ndr", encoder_layers=7)
    assert type(model.encoder) is SGTransformerEncoder
    deeper.load_state_dict(model.state_dict())
    tokens = pad(SENTENCES, False)
    _, extra = deeper(tokens, return_all_hiddens=True)
    assert len(extra["inner_states"]) == 7
    torch.testing.assert_close(extra["inner_states"][2], model(tokens, return_all_hiddens=True)[1]["inner_states"][-1])


def test_values_of_every_application():
    model = build("relative", depth="shared")
    values = model(pad(SENTENCES, False), value_roles=("encoder",))[1]["values"]
    assert [len(found) for found in values.values()] == [3] and list(values) == ["encoder"]
    assert model(pad(SENTENCES, False))[1]["values"] == {} and model.attention_roles == ("encoder",)


# Options.


@pytest.mark.parametrize(
    "scaling,std", [("none", 1.0), ("position_down", (2 / 512) ** 0.5), ("auto", (2 / 1512) ** 0.5)]
)
def test_embeddings_of_gated_and_relative_models(scaling, std):
    """N(0, 1), Kaiming and Glorot: the three starts that the reference's models have (without scale or positions)."""
    config = resolve(SimpleNamespace(encoder_attention="relative", embedding_scaling=scaling, encoder_embed_dim=512))
    model = SGTransformerEncoder(config, dictionary(996))
    assert model.embedding.tokens.weight[4:].std().item() == pytest.approx(std, rel=0.02)
    assert model.embedding.token_scale == 1.0 and model.embedding.dropout.p == 0.0


@pytest.mark.parametrize(
    "options,message",
    [
        ({"input_embedding": "bits"}, "--input-embedding bits needs --task sg_tagging and words of bits"),
        ({"readout": "middle"}, "--readout is 'middle': choose from first, last"),
        ({"encoder_attention": "square"}, "unknown attention 'square'"),
        ({"qk_norm": "l2"}, "--qk-norm l2 has no effect on the chosen mechanisms"),
        ({"position": "sinusoidal", "encoder_attention": "relative"}, "--position sinusoidal has no effect"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        encoder(**options)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"hidden_dim": 7, "bidirectional": True}, "--hidden-dim is 7: with --bidirectional choose an even number"),
        ({"layers": 0}, "--layers is 0: choose 1 or more"),
        ({"embed_dim": 0}, "--embed-dim is 0: choose 1 or more"),
    ],
)
def test_wrong_options_of_the_lstm(options, message):
    with pytest.raises(UsageError, match=message):
        lstm(**options)


@pytest.mark.parametrize("model", [SGEncoder, SGLSTM])
def test_task_without_classes(model):
    with pytest.raises(
        UsageError, match="this --arch is a classifier: choose --task sg_classification, sg_visual_qa or sg_tagging"
    ):
        model.build_model(SimpleNamespace(), SimpleNamespace(source_dictionary=dictionary(3)))


# Sizes.


#: Width, feedforward, heads, steps of Csordás 2023, Tables D.3 to D.5 and E.1.2 (of CTL++ the released code's
#: feedforward, where the text has 1024 and 512), and the released code's column; the last of Park & Kim 2024, 5.1.
SIZES = {
    "sg_encoder_ctl": (256, 512, 1, 14, "last"),
    "sg_encoder_ctl_baseline": (128, 256, 4, 11, "last"),
    "sg_encoder_arithmetic": (256, 1024, 4, 15, "last"),
    "sg_encoder_arithmetic_baseline": (128, 256, 4, 11, "first"),
    "sg_encoder_listops": (512, 1024, 16, 20, "first"),
    "sg_encoder_listops_baseline": (256, 1024, 16, 6, "first"),
    "sg_encoder_ctlpp": (256, 512, 4, 8, "first"),
    "sg_encoder_ctlpp_baseline": (128, 256, 4, 8, "first"),
    "sg_encoder_sort_of_clevr": (256, 512, 4, 4, "first"),
}
#: Embeddings, width, layers: the tables' for LSTMs of one direction, the released code's for bidirectional ones too.
LSTM_SIZES = {
    "sg_lstm_ctl": (16, 200, 1),
    "sg_lstm_arithmetic": (200, 200, 2),
    "sg_lstm_listops": (512, 512, 4),
    "sg_lstm_ctlpp": (256, 256, 1),
}


def test_sizes_are_those_of_the_tables():
    options = ("embed_dim", "ffn_embed_dim", "attention_heads", "layers")
    built = {}
    for arch, values in ENCODER_ARCHITECTURES.items():
        config = resolve(SimpleNamespace(**values))
        assert config.depth == "shared"
        built[arch] = (*(getattr(config, f"encoder_{option}") for option in options), config.readout)
    assert built == SIZES
    assert {arch: tuple(values.values()) for arch, values in LSTM_ARCHITECTURES.items()} == LSTM_SIZES


@pytest.mark.parametrize("arch", LSTM_ARCHITECTURES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_lstm_builds(arch, bidirectional):
    model = lstm(**LSTM_ARCHITECTURES[arch], bidirectional=bidirectional)
    _, width, layers = LSTM_SIZES[arch]
    assert model.lstm.num_layers == layers
    assert model.classifier.in_features == width
    assert model.lstm.hidden_size == (width // 2 if bidirectional else width)


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


ROUTER = dict(encoder_attention="geometric", encoder_update="copy_gate")
CTLPP = dict(copy_gate_content="residual", ffn_activation="gelu", activation_dropout=0.0, attention_bias=True)


@pytest.mark.parametrize(
    ("name", "words", "classes", "options"),
    [("ctl", 19, 8, {}), ("arithmetic", 14, 10, {}), ("listops", 15, 10, {}), ("ctlpp", 40, 8, CTLPP)],
)
def test_parameters_of_the_router_are_those_of_its_equations(name, words, classes, options):
    """Csordás 2023, eq. 5.1 to 5.10, counted by hand. Table E.1 has 679k for CTL++."""
    arch = f"sg_encoder_{name}"
    router = SGEncoder.build_model(
        SimpleNamespace(**ENCODER_ARCHITECTURES[arch] | ROUTER | options), task(words, classes)
    )
    d, ffn, heads, *_ = SIZES[arch]
    attention = 4 * d * d + (4 * d if options else d) + 2 * heads * (d + 1) + 3
    data, gate, norms = 2 * d * ffn + ffn + d, 2 * d * d + 2 * d, 2 * 2 * d
    assert parameters(router) == (words + 4) * d + attention + data + gate + norms + classes * (d + 1)
    if name == "ctlpp":
        assert parameters(router) == 674_067


def test_parameter_count_of_the_lstm_of_ctlpp():
    """Csordás 2023, Table E.1: 408k. The reference has a row of embeddings for each of the 40 words and one more, we
    four.
    """
    bilstm = SGLSTM.build_model(SimpleNamespace(**LSTM_ARCHITECTURES["sg_lstm_ctlpp"], bidirectional=True), task(40, 8))
    assert round((parameters(bilstm) - 3 * 256) / 1000) == 408


# LSTMs.


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_reads_the_final_state_of_each_direction_of_the_last_layer(layers, bidirectional):
    model = build("lstm", layers=layers, bidirectional=bidirectional)
    for sentence in SENTENCES:
        outputs, _ = model.lstm(model.embedding(torch.tensor([sentence])))
        half = outputs.size(-1) // 2
        # The backward direction ends at the first column.
        state = torch.cat([outputs[0, -1, :half], outputs[0, 0, half:]]) if bidirectional else outputs[0, -1]
        torch.testing.assert_close(model(torch.tensor([sentence]))[0][0], model.classifier(state))


def test_lstm_has_dropout_on_embeddings_and_between_layers(recwarn):
    one, two = build("lstm", layers=1, dropout=0.5), build("lstm", layers=2, dropout=0.5)
    assert (one.lstm.dropout, two.lstm.dropout, one.dropout.p) == (0.0, 0.5, 0.5) and not recwarn.list
    tokens = pad(SENTENCES, False)
    assert not torch.equal(one.train()(tokens)[0], one(tokens)[0]) and torch.equal(
        one.eval()(tokens)[0], one(tokens)[0]
    )

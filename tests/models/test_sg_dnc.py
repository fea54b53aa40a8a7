"""``sg_dnc`` and labels of words by other models: padding, batches, switches, sizes, compiled steps."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.data import Dictionary

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import DNC_ARCHITECTURES
from fairseq_sg.models.sg_dnc import SGDNC, resolve
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_lstm import SGLSTM
from fairseq_sg.models.sg_transformer_lm import SGTransformerLM
from fairseq_sg.modules import compilation
from fairseq_sg.modules.memory import CONTROLLER_REGISTRY
from fairseq_sg.modules.memory.feedforward import FeedForwardController

PAD = 1
SENTENCES = [[4, 5, 6, 7, 8], [9, 8], [4, 4, 5]]
SMALL = dict(memory_cells=4, memory_width=3, read_heads=2, controller_dim=5, embed_dim=4)
ENCODER = dict(encoder_embed_dim=8, encoder_ffn_embed_dim=8, encoder_attention_heads=2, encoder_layers=2)
DECODER = dict(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_attention_heads=2, decoder_layers=2)
VARIANTS = ["dnc", *("".join(v) for n in (1, 2, 3) for v in itertools.combinations("mds", n))]
MODELS = {
    **{f"sg_dnc {variant}": (SGDNC, SMALL | {"memory_variant": variant}) for variant in VARIANTS},
    "sg_dnc feedforward": (SGDNC, SMALL | {"memory_variant": "mds", "controller": "feedforward"}),
    "sg_lstm": (SGLSTM, dict(embed_dim=4, hidden_dim=6, bidirectional=True)),
    "sg_encoder": (SGEncoder, ENCODER | {"encoder_attention": "relative", "dropout": 0.0}),
    "sg_transformer_lm": (SGTransformerLM, DECODER | {"decoder_attention": "relative", "dropout": 0.0}),
}


def task(left=False, bits=False, labels=True) -> SimpleNamespace:
    dictionary = Dictionary()
    for word in range(6):
        dictionary.add_symbol(f"w{word}")
    table = torch.randint(0, 2, (10, 7)).float() if bits else None
    return SimpleNamespace(
        source_dictionary=dictionary, num_classes=3, labels_words=labels, source_bits=table,
        cfg=SimpleNamespace(left_pad_source=left),
    )  # fmt: skip


def build(kind: str, **options):
    model, values = MODELS[kind]
    torch.manual_seed(0)
    return model.build_model(SimpleNamespace(**values), task(**options)).eval()


def pad(rows, left: bool, extra: int = 0):
    width = max(map(len, rows)) + extra
    return torch.tensor([[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_and_the_batch_change_no_label(kind, left):
    model = build(kind, left=left)
    together = model(pad(SENTENCES, left, extra=2))[0]
    assert together.shape == (3, 7, 3)
    for row, sentence in zip(together, SENTENCES, strict=True):
        row = row[7 - len(sentence) :] if left else row[: len(sentence)]
        torch.testing.assert_close(row, model(torch.tensor([sentence]))[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_the_class_is_that_of_the_last_word(left):
    every, last = build("sg_dnc mds"), build("sg_dnc mds", labels=False)
    found = last(pad(SENTENCES, left, extra=2))[0]
    expected = torch.stack([every(torch.tensor([sentence]))[0][0, -1] for sentence in SENTENCES])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert last(torch.full((1, 3), PAD))[0].isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind.startswith(("sg_dnc m", "sg_l", "sg_e", "sg_t"))])
@pytest.mark.parametrize("bits", [False, True], ids=["learned", "bits"])
def test_every_parameter_learns(kind, bits):
    model = build(kind, bits=bits).train()
    model(pad(SENTENCES, False))[0].square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_bits_are_the_input(monkeypatch):
    """As they are for a DNC without --embed-dim: its first layer sees ±1."""
    model = SGDNC.build_model(SimpleNamespace(**SMALL | {"embed_dim": None}, memory_variant="mds"), task(bits=True))
    seen = []
    monkeypatch.setattr(model.dnc.controller, "project", lambda x: seen.append(x) or x.new_zeros(*x.shape[:2], 20))
    model(pad(SENTENCES, True))
    assert set(seen[0].unique().tolist()) == {-1.0, 1.0} and seen[0].shape == (3, 5, 7)


def test_width_of_embeddings():
    def embedding(bits, **values):
        return SGDNC.build_model(SimpleNamespace(**SMALL | {"embed_dim": None} | values), task(bits=bits)).embedding

    assert [embedding(bits).embedding_dim for bits in (False, True)] == [256, 7]
    assert [embedding(bits, embed_dim=4).embedding_dim for bits in (False, True)] == [4, 4]


@dataclass
class GearOptions:
    gear_teeth: int = field(default=3, metadata={"help": "text", "least": 1})


def test_a_controller_of_the_user_has_options(monkeypatch):
    class Gear(FeedForwardController):
        options = GearOptions

        def __init__(self, inputs, reads, dim, layers, *, gear_teeth=3):
            super().__init__(inputs, reads, dim, layers)
            self.teeth = gear_teeth

    monkeypatch.setattr(CONTROLLER_REGISTRY, "watchers", [*CONTROLLER_REGISTRY.watchers])
    before = dict(CONTROLLER_REGISTRY)
    try:
        CONTROLLER_REGISTRY.register("gear")(Gear)
        config = SimpleNamespace(**SMALL, controller="gear", gear_teeth=5)
        assert SGDNC.build_model(config, task()).dnc.controller.teeth == 5
        with pytest.raises(UsageError, match="--gear-teeth 5 has no effect"):
            resolve(SimpleNamespace(**SMALL, gear_teeth=5))
        with pytest.raises(UsageError, match="--gear-teeth is 0: choose 1 or more"):
            resolve(SimpleNamespace(**SMALL, controller="gear", gear_teeth=0))
    finally:
        CONTROLLER_REGISTRY.clear()
        CONTROLLER_REGISTRY.update(before)
        for refresh in CONTROLLER_REGISTRY.watchers:
            refresh()


def test_switches():
    for variant in VARIANTS:
        config = resolve(SimpleNamespace(**SMALL, memory_variant=variant))
        found = "".join(
            letter
            for letter, name in zip("mds", ("mask", "deallocate", "sharpen"))
            if getattr(config, f"memory_{name}")
        )
        assert (found or "dnc") == variant
    one = resolve(SimpleNamespace(**SMALL, memory_sharpen=True))
    assert one.memory_sharpen and not one.memory_mask and not one.memory_deallocate
    with pytest.raises(UsageError, match="--memory-variant is ''"):
        resolve(SimpleNamespace(**SMALL, memory_variant=""))


def test_options_reach_the_memory():
    values = SMALL | {"memory_variant": "m", "mask_floor": 0.1, "mask_bias": 0.0, "interface_clamp": 3.0}
    dnc = SGDNC.build_model(SimpleNamespace(**values, usage_gradient=True, controller_layers=2), task()).dnc
    assert dnc.interface.mask_floor == 0.1 and dnc.interface.clamp == 3.0 and not dnc.interface.masks.bias.any()
    assert not dnc.detach_usage and dnc.controller.layers == 2 and not dnc.deallocate
    assert dnc.interface.sharpness is None


@pytest.mark.parametrize(
    ("arch", "cells", "width", "heads", "dim", "embed_dim"),
    [
        ("sg_dnc_copy", 16, 16, 1, 32, 256),
        ("sg_dnc_recall", 64, 32, 1, 128, 256),
        ("sg_dnc_key_value", 16, 32, 1, 32, 256),
        ("sg_dnc_babi", 256, 64, 4, 256, 256),
        ("sg_dnc_ctl", 21, 200, 4, 200, 16),
    ],
)
def test_sizes(arch, cells, width, heads, dim, embed_dim):
    model = SGDNC.build_model(SimpleNamespace(**DNC_ARCHITECTURES[arch], memory_variant="mds"), task())
    assert (model.dnc.cells, model.dnc.width, model.dnc.heads) == (cells, width, heads)
    assert (model.dnc.controller.dim, model.embedding.embedding_dim) == (dim, embed_dim)


def test_a_compiled_step_is_the_step(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    plain = build("sg_dnc mds").train()
    model = copy.deepcopy(plain)
    model.dnc.compile_mode = "default"
    tokens = pad(SENTENCES, False)
    for one in (plain, model):
        one(tokens)[0].square().sum().backward()
    assert model.dnc._compiled_step is not None and copy.deepcopy(model).dnc._compiled_step is None
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)

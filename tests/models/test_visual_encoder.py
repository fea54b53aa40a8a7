"""``sg_encoder`` on images and questions: a transcription in plain torch, sizes, starts, every mechanism, options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.classification import Classification
from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.patches import patch_positions
from helpers.scenes import SIZES, TASK, build, random_batch, small

ENCODER_KINDS = [name for name, kind in ATTENTION_REGISTRY.items() if "encoder" in kind.roles]


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "options,expected",
    [
        ({}, 684_554),
        ({"encoder_attention_heads": 8}, 684_554),
        ({"encoder_attention": "linear"}, 684_554),
        ({"encoder_attention": "linear", "qk_norm": "l2"}, 684_554),
        ({"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}, 60_554),
        ({"encoder_embed_dim": 128, "encoder_ffn_embed_dim": 256}, 194_826),
        ({"encoder_attention": "compositional"}, 686_602),
    ],
)
def test_parameters_of_the_released_code(options, expected):
    assert parameters(build(**options)) == expected


# A transcription of the model in plain torch.


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).softmax(-1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = q @ k.transpose(-1, -2)
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def transcription(w: dict[str, Tensor], attend, images: Tensor, questions: Tensor, heads: int, steps: int) -> Tensor:
    """Logits (B, 10) from the weights by name."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    x = images.double().permute(0, 3, 2, 1) / 255
    kernel = w["encoder.embedding.patches.weight"]
    x = F.conv2d(x, kernel.view(-1, 3, 15, 15), w["encoder.embedding.patches.bias"], stride=15)
    x = x.flatten(2).transpose(1, 2) + patch_positions(25, len(kernel))
    x = torch.cat([w["encoder.embedding.cls"].expand(len(x), 1, -1), x], 1)
    q = linear("encoder.embedding.question", questions.double())[:, None].expand_as(x)
    x = linear("encoder.embedding.joint", torch.cat([x, q], -1))
    layer = next(name for name in w if name.endswith("self_attn.q_proj.weight")).removesuffix("self_attn.q_proj.weight")
    for _ in range(steps):
        y = norm(f"{layer}self_attn_residual.norm", x)
        split = [
            linear(f"{layer}self_attn.{part}_proj", y).unflatten(-1, (heads, -1)).transpose(1, 2) for part in "qkv"
        ]
        x = x + linear(f"{layer}self_attn.out_proj", attend(*split).transpose(1, 2).flatten(2))
        y = norm(f"{layer}update.residual.norm", x)
        x = x + linear(f"{layer}update.ffn.fc2", linear(f"{layer}update.ffn.fc1", y).relu())
    return linear("classifier", x[:, 0])


@pytest.mark.parametrize("kind,attend", [("softmax", softmax_attention), ("linear", linear_attention)])
def test_model_is_the_transcription(kind, attend):
    """Logits, and gradients of the loss, in float64."""
    model = small(encoder_attention=kind).double()
    images, questions = random_batch(4)
    target = torch.tensor([0, 9, 3, 3])
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = transcription(weights, attend, images, questions, heads=2, steps=3)
    found = model(images=images, questions=questions)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    F.cross_entropy(found, target).backward()
    F.nll_loss(expected.log_softmax(1), target).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-7, atol=1e-10, msg=name)


def test_dropout_is_in_the_feedforward_layer_alone():
    model = build()
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert sorted(name.rpartition("layer")[2] for name, p in rates.items() if p) == [
        ".update.ffn.dropout",
        ".update.residual.dropout",
    ]
    assert all(p in (0.0, 0.1) for p in rates.values())
    attention = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    assert attention.attention_dropout == 0.0
    assert next(m for n, m in small(dropout=0.3).named_modules() if n.endswith("update.residual.dropout")).p == 0.3


def test_starts_are_those_of_pytorch():
    """Weights and biases U(±1/√fan_in), those of attention too; no norm after the last layer."""
    for name, p in build().named_parameters():
        if "norm" in name or name.endswith("cls"):
            continue
        fan_in = {"fc2": 512, "patches": 675, "question": 18}.get(name.split(".")[-2], 256)
        assert p.abs().max().item() == pytest.approx(fan_in**-0.5, rel=0.1 if p.dim() == 2 else 0.35), name
    assert isinstance(build().encoder.final_norm, torch.nn.Identity)


@pytest.mark.parametrize("kind", ENCODER_KINDS)
def test_every_attention_serves(kind):
    """Each example by itself, every parameter learns, and Values have all positions of every application."""
    model = small(encoder_attention=kind)
    images, questions = random_batch()
    logits, extra = model(images=images, questions=questions, value_roles=("encoder",))
    assert logits.shape == (3, 10) and len(extra["values"]["encoder"]) == 3
    assert all(v.values.size(2) == 26 and v.padding_mask is None for v in extra["values"]["encoder"])
    torch.testing.assert_close(logits[1:2], model(images[1:2], questions[1:2])[0], rtol=1e-4, atol=1e-5)
    model.train()
    model(images=images, questions=questions)[0].square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_ffn": "sigma_moe", "moe_experts": 4},
        {"encoder_ffn": "topk", "topk_k": 4},
        {"encoder_update": "copy_gate", "pre_norm": False, "no_final_norm": False},
        {"depth": "separate"},
        {"position": "rotary"},
        {"position": "alibi"},
        {"encoder_attention": "linear", "position": "rotary", "qk_norm": "l2"},
        {"readout": "last"},
    ],
    ids=str,
)
def test_other_mechanisms_serve(options):
    assert small(**options)(*random_batch())[0].isfinite().all()


@pytest.mark.parametrize("readout,same_as", [(None, "first"), ("first", "first"), ("last", "last")])
def test_an_image_is_read_from_cls_unless_the_user_says(readout, same_as):
    """Without an architecture of its own, which says ``first``."""
    torch.manual_seed(1)
    model, batch = SGEncoder.build_model(SimpleNamespace(**SIZES, readout=readout), TASK).eval(), random_batch()
    out = model.encoder(*batch)
    column = out["encoder_out"][0][0 if same_as == "first" else -1]
    assert torch.equal(model.read(out), column)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Images are bytes, which --bf16 and --fp16 leave as they are."""
    model, batch = small(encoder_attention="linear", qk_norm="l2"), random_batch()
    expected = model(*batch)[0]
    found = model.to(dtype)(*batch)[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_question_and_image_matter():
    model, (images, questions) = small(), random_batch()
    logits = model(images, questions)[0]
    assert not torch.allclose(logits, model(images, 1 - questions)[0])
    assert not torch.allclose(logits, model(255 - images, questions)[0])
    black = small(pixels="black")
    torch.testing.assert_close(black(255 - images, questions)[0], logits)


def test_hidden_states_and_embedding_dropout():
    model = small(embedding_dropout=0.5)
    states = model(*random_batch(), return_all_hiddens=True)[1]["inner_states"]
    assert [tuple(state.shape) for state in states][-1] == (26, 3, 16)
    assert model.encoder.embedding.dropout.p == 0.5 and small().encoder.embedding.dropout.p == 0.0


def test_orthogonality_loss_has_every_application():
    """Σ over applications, mean over images and heads of ‖V̄V̄ᵀ − I‖²_F over 26 positions: CLS counts."""
    model = small(encoder_attention="linear").double()
    images, questions = random_batch()
    task = SimpleNamespace(classes=lambda target: target, num_classes=10)
    criterion = Classification(SGCriterionConfig(orthogonality_weight=0.5, sentence_avg=False), task)
    sample = {"net_input": {"images": images, "questions": questions}, "target": torch.tensor([1, 2, 3])}
    loss, size, logs = criterion(model, sample)
    values = model(images, questions, value_roles=("encoder",))[1]["values"]["encoder"]
    expected = 0.0
    for found, _ in values:
        rows = F.normalize(found, dim=-1)
        expected += (rows @ rows.transpose(-1, -2) - torch.eye(26)).square().sum((-1, -2)).mean()
    assert logs["aux_orthogonality_encoder"].item() / size == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(logs["nll_loss"].item() + 0.5 * size * expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"position": "learned"}, "--position learned is for tokens, and patches have positions of their own"),
        ({"position": "none"}, "--position none is for tokens, and patches have positions of their own in any case"),
        ({"attention_window": 2}, "--attention-window is for self-attention of a decoder, of the kinds abs_rel"),
        ({"embedding_scaling": "none"}, "--embedding-scaling is for tokens: leave it out with --task sg_visual_qa"),
        ({"input_embedding": "bits"}, "--input-embedding is for tokens: leave it out with --task sg_visual_qa"),
        ({"depth": "shared_act", "act_ponder_padding": "include"}, "--act-ponder-padding include has no effect on"),
        ({"pixels": "grey"}, "--pixels is 'grey': choose from white, black"),
        ({"encoder_embed_dim": 6}, "--encoder-embed-dim is 6: patches and questions need a multiple of 4"),
        ({"attention_bias": False}, "--attention-init torch_biases needs --attention-bias: add it, or choose torch"),
        ({"attention_residual_dropout": 2.0}, "--attention-residual-dropout is 2.0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        small(**options)


def test_pixels_are_for_images(monkeypatch):
    monkeypatch.setattr(TASK, "inputs", "tokens")
    with pytest.raises(UsageError, match="--pixels is for images: leave it out, or choose --task sg_visual_qa"):
        small(pixels="white")

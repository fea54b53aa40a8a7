"""The regressor: against a plain transformer, causal in examples, sizes as published, options and their errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import REGRESSOR_ARCHITECTURES
from fairseq_sg.models.sg_regressor import SGRegressor, interleave
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.embedding import VectorEmbedding
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.position import POSITION_REGISTRY
from fairseq_sg.modules.position.learned import LearnedPosition
from fairseq_sg.modules.position.none import NoPosition
from fairseq_sg.modules.update import UPDATE_REGISTRY
from fairseq_sg.tasks.sg_regression import DrawnPrompts
from helpers.models import FFN_OPTIONS
from helpers.prompts import build, task_of

CAUSAL = sorted(name for name, kind in ATTENTION_REGISTRY.items() if "decoder" in kind.roles)
MODELS = {
    **{f"attention {name}": {"decoder_attention": name} for name in CAUSAL},
    **{f"position {n}": {"position": n} for n, kind in sorted(POSITION_REGISTRY.items()) if not kind.needs_length},
    **{f"update {name}": {"decoder_update": name, "pre_norm": name != "copy_gate"} for name in sorted(UPDATE_REGISTRY)},
    **{f"depth {name}": {"depth": name} for name in sorted(DEPTH_REGISTRY)},
    **{
        f"feedforward {name}": {"decoder_ffn": name} | FFN_OPTIONS.get(name, {})
        for name in sorted(FEEDFORWARD_REGISTRY)
    },
    "names of layers": {"decoder_attention": "linear,softmax", "pre_norm": True},
}


def prompts(points: int = 6, dims: int = 3, rows: int = 4):
    torch.manual_seed(2)
    return torch.randn(rows, points, dims).double(), torch.randn(rows, points - 1).double()


def test_tokens():
    x, y = prompts(3)
    zero = torch.zeros(4)
    expected = [x[:, 0], torch.stack([y[:, 0], zero, zero], 1), x[:, 1], torch.stack([y[:, 1], zero, zero], 1), x[:, 2]]
    torch.testing.assert_close(interleave(x, y), torch.stack(expected, 1))


def test_embedding():
    positions = LearnedPosition(4, learned_positions=5)
    embedding = VectorEmbedding(3, 4, positions=positions, dropout=0.0)
    z = torch.randn(2, 5, 3)
    expected = z @ embedding.projection.weight.T + embedding.projection.bias + positions.weight
    torch.testing.assert_close(embedding(z), expected)
    bare = VectorEmbedding(3, 4, positions=NoPosition(4), dropout=0.0)
    torch.testing.assert_close(bare(z), z @ bare.projection.weight.T + bare.projection.bias)


def test_autocast_rounds_neither_embeddings_nor_predictions():
    model = build(pre_norm=True).float().eval()
    x, y = (given.float() for given in prompts())
    plain, seen = model(x, y)[0], []
    model.embedding.register_forward_hook(lambda _, given, made: seen.append(made))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, y)[0]
    assert seen[0].dtype == found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("points", [1, 2, 6])
def test_predictions_are_those_of_a_plain_transformer(points):
    """Values and gradients, in float64; pre-norm, GELU, biases, learned positions, as the published models."""
    model = build(
        pre_norm=True, position="learned", learned_positions=11, attention_bias=True, ffn_activation="gelu",
    )  # fmt: skip
    x, y = prompts(points)
    target = torch.randn(4, points).double()
    loss = (model(x, y)[0][0] - target).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad((plain(model, x, y) - target).square().mean(), list(model.parameters()))
    torch.testing.assert_close(model(x, y)[0], plain(model, x, y)[None])
    for (name, _), one, two in zip(model.named_parameters(), found, expected, strict=True):
        torch.testing.assert_close(one, two, msg=name)


def plain(model: SGRegressor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The equations, for one prompt and one head at a time."""
    rows = []
    for points, values in zip(x, y, strict=True):
        tokens = [points[0]]
        for value, point in zip(values, points[1:], strict=True):
            tokens += [F.pad(value[None], (0, x.size(2) - 1)), point]
        h = model.embedding.projection(torch.stack(tokens)) + model.embedding.positions.weight[: len(tokens)]
        for layer in model.stack.layers:
            h = h + attended(layer, h, 6)
            h = h + fed(layer, h)
        rows.append(model.readout(model.final_norm(h))[::2, 0])
    return torch.stack(rows)


def attended(layer: nn.Module, h: torch.Tensor, width: int) -> torch.Tensor:
    """Causal attention of heads of one width, for the states h (N, C) of one prompt."""
    a = layer.self_attn_residual.norm(h)
    q, k, v = (getattr(layer.self_attn, f"{name}_proj")(a) for name in "qkv")
    heads = []
    for start in range(0, h.size(1), width):
        part = slice(start, start + width)
        logits = q[:, part] @ k[:, part].T / width**0.5
        hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
        heads.append(logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, part])
    return layer.self_attn.out_proj(torch.cat(heads, -1))


def fed(layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """The feedforward layer, with GELU."""
    ffn = layer.update.ffn
    return ffn.fc2(F.gelu(ffn.fc1(layer.update.residual.norm(h))))


def test_the_model_of_the_article():
    """What attention finds reaches the feedforward layers alone; every loop adds the embedding, and predicts."""
    torch.manual_seed(1)
    sizes = REGRESSOR_ARCHITECTURES["sg_regressor_article"] | {"loops": 2, "arch": "sg_regressor_article"}
    model, (x, y) = SGRegressor.build_model(SimpleNamespace(**sizes), task_of(3)).double(), prompts(4)
    expected = []
    for points, values in zip(x, y, strict=True):
        tokens = interleave(points[None], values[None])[0]
        embedded = model.embedding.projection(tokens) + model.embedding.positions.weight[: len(tokens)]
        h, predictions = torch.zeros_like(embedded), []
        for _ in range(2):
            h = h + embedded
            for layer in model.stack.layers:
                h = h + fed(layer, h + attended(layer, h, 24))
            predictions.append(model.readout(h)[::2, 0])
        expected.append(torch.stack(predictions))
    found = model(x, y)[0]
    assert found.shape == (2, 4, 4)
    torch.testing.assert_close(found, torch.stack(expected, 1))


@pytest.mark.parametrize("name", MODELS)
def test_prediction_i_sees_the_examples_before_it(name):
    """In evaluation: a feedforward layer of experts may drop tokens in training by what others chose."""
    model = build(**MODELS[name]).eval()
    x, y = prompts()
    x.requires_grad_(), y.requires_grad_()
    predictions, _ = model(x, y)
    assert predictions.shape == (1, 4, 6) and predictions.isfinite().all()
    for point in range(6):
        dx, dy = torch.autograd.grad(predictions[0, :, point].sum(), [x, y], retain_graph=True)
        assert (dx[:, point + 1 :] == 0).all() and (dy[:, point:] == 0).all()
        assert (dx[:, point] != 0).any(-1).all()
        assert point == 0 or (dy[:, :point] != 0).any()
    parts = torch.cat([model(x[row : row + 1], y[row : row + 1])[0] for row in range(4)], 1)
    torch.testing.assert_close(parts, predictions)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model = build(**MODELS[name]).train()
    x, y = prompts(rows=16)
    predictions, extra = model(x, y)
    losses = [loss for values in extra["aux_losses"].values() for loss in values if torch.is_tensor(loss)]
    (predictions.square().sum() + sum(losses)).backward()
    ungraded = [key for key, p in model.named_parameters() if p.grad is None]
    assert ungraded == []


def test_losses_states_and_values_are_returned():
    model = build(depth="shared_act", decoder_layers=3)
    x, y = prompts()
    _, extra = model(x, y, return_all_hiddens=True, value_roles=("decoder",))
    assert "ponder" in extra["aux_losses"] and [h.shape for h in extra["inner_states"]] == [(11, 4, 12)] * 3
    assert len(extra["values"]["decoder"]) == 3 and extra["values"]["decoder"][0].values.shape == (4, 2, 11, 6)
    _, extra = model(x, y)
    assert extra["inner_states"] == [] and extra["values"] == {}


class Loops(nn.Module):
    """Two loops, after which the state is h and 2h."""

    def forward(self, x, context, keep_hidden):
        return SimpleNamespace(x=2 * x, loop_states=[x, 2 * x], hidden_states=[], losses={}, values={})


def test_there_is_a_prediction_after_every_loop():
    model = build(pre_norm=True)
    model.stack = Loops()
    x, y = prompts()
    state = model.embedding(interleave(x, y))[:, ::2]
    predictions, _ = model(x, y)
    assert predictions.shape == (2, 4, 6)
    for loop in (0, 1):
        expected = model.readout(model.final_norm((loop + 1) * state)).squeeze(-1)
        torch.testing.assert_close(predictions[loop], expected)


def test_functions_are_learned_from_examples():
    """y = w x: without examples the error stays that of 0, which is 1; after 8 it is below 0.4 (0.11 where written)."""
    task = task_of(1, examples=8)
    sizes = dict(decoder_embed_dim=32, decoder_ffn_embed_dim=64, decoder_attention_heads=4, decoder_layers=2)
    options = dict(pre_norm=True, dropout=0.0, position="learned", learned_positions=17)
    torch.manual_seed(1)
    model = SGRegressor.build_model(SimpleNamespace(**sizes, **options), task)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    training, size = DrawnPrompts(task.prompts, 16_000, 1, "train"), 64
    for start in range(0, len(training), size):
        batch = training.collater([training[index] for index in range(start, start + size)])
        (model(**batch["net_input"])[0] - batch["target"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tests = DrawnPrompts(task.prompts, 300, 1, "test")
    batch = tests.collater([tests[index] for index in range(300)])
    errors = (model(**batch["net_input"])[0][0] - batch["target"]).square().mean(0)
    assert errors[-1] < 0.4 and errors[0] > 0.8 * batch["target"][:, 0].square().mean()


# Sizes.


def count(arch: str, dims: int, **options) -> int:
    """Parameters of the article's form: with n outputs, of which one is read."""
    values = REGRESSOR_ARCHITECTURES[arch] | options
    model = SGRegressor.build_model(SimpleNamespace(**values), task_of(dims))
    unread = (dims - 1) * sum(p.numel() for p in model.readout.parameters())
    return unread + sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "options,more",
    [
        ({}, 0),
        ({"decoder_attention": "linear", "feature_map": "elu"}, 0),
        ({"decoder_attention": "linear", "feature_map": "squared", "squared_kernel": "affine"}, 192),
        ({"decoder_attention": "linear", "feature_map": "mlp"}, 4_800),
    ],
    ids=["softmax", "elu", "squared", "learnable"],
)
@pytest.mark.parametrize("dims,tokens,parameters", [(8, 257, 200_584), (4, 129, 187_524)])
def test_parameters_of_the_article(options, more, dims, tokens, parameters):
    assert count("sg_regressor_article", dims, learned_positions=tokens, **options) == parameters + more


@pytest.mark.parametrize("dims,tokens,parameters", [(8, 257, 206_680), (4, 129, 191_444)])
def test_parameters_of_the_article_with_quadratic_maps(dims, tokens, parameters):
    """``taylor`` is the article's "based"; "rebased" has 40 more, γ and β of Queries and Keys in two layers."""
    arch = "sg_regressor_article_quadratic"
    assert count(arch, dims, learned_positions=tokens, feature_map="taylor", rebased_start="ones") == parameters
    assert count(arch, dims, learned_positions=tokens) == parameters + 40


@pytest.mark.parametrize("arch,dim,layers", [("garg", 256, 12), ("garg_small", 128, 6), ("garg_toy", 256, 12)])
def test_parameters_of_gpt_2(arch, dim, layers):
    values = REGRESSOR_ARCHITECTURES[f"sg_regressor_{arch}"]
    model = SGRegressor.build_model(SimpleNamespace(**values), task_of(20))
    ends = 21 * dim + values["learned_positions"] * dim + 2 * dim + dim + 1
    layer = 12 * dim**2 + 13 * dim
    assert sum(p.numel() for p in model.parameters()) == ends + layers * layer


@pytest.mark.parametrize(
    "arch,chosen,unset",
    [
        ("sg_regressor_article", {"position": "rotary"}, ["learned_positions", "learned_positions_std"]),
        ("sg_regressor_article", {"decoder_ffn": "sigma_moe"}, ["ffn_init", "ffn_activation"]),
        (
            "sg_regressor_article_quadratic",
            {"decoder_attention": "softmax"},
            ["feature_map", "rebased_start", "feature_dim"],
        ),
        (
            "sg_regressor_article",
            {"decoder_attention": "relative", "position": "none"},
            ["learned_positions", "learned_positions_std"],
        ),
    ],
)
def test_published_sizes_with_other_mechanisms(arch, chosen, unset):
    """Options of the published mechanisms are left out with them; the others stay."""
    cfg = SimpleNamespace(**chosen)
    ARCH_CONFIG_REGISTRY[arch](cfg)
    assert [name for name in REGRESSOR_ARCHITECTURES[arch] if not hasattr(cfg, name)] == unset
    model = SGRegressor.build_model(cfg, task_of(4, examples=64)).double().eval()
    assert model(*prompts(65, dims=4, rows=1))[0].shape == (1, 1, 65)


def test_defaults_of_pytorch():
    """Linear layers of the published sizes start as PyTorch's; biases of attentions start at 0."""
    model = SGRegressor.build_model(SimpleNamespace(**REGRESSOR_ARCHITECTURES["sg_regressor_article"]), task_of(4))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert 0.9 * bound < module.weight.abs().max() <= bound, name
            assert ("self_attn" in name) == (module.bias == 0).all() and module.bias.abs().max() <= bound, name


# Options.


def test_longest_prompt():
    model = build(position="learned", learned_positions=9)
    assert model.max_positions() == 9 and build(position="rotary").max_positions() == 10**9
    model(*prompts(5))
    with pytest.raises(UsageError, match="length 11 is longer than --learned-positions 9"):
        model(*prompts(6))


def test_embedding_dropout_is_dropout():
    assert build().embedding.dropout.p == 0 and build(dropout=0.25).embedding.dropout.p == 0.25
    assert build(dropout=0.25, embedding_dropout=0.5).embedding.dropout.p == 0.5


@pytest.mark.parametrize(
    "options,message",
    [
        ({"position": "rotery"}, "unknown position 'rotery'"),
        ({"decoder_attention": "fourier", "qk_norm": "l2"}, "--qk-norm l2 has no effect"),
        ({"decoder_layers": 0}, "--decoder-layers is 0"),
        ({"depth": "shared_act", "act_ponder_padding": "include"}, "--act-ponder-padding include has no effect on"),
        ({"position": "none", "learned_positions": 5}, "--learned-positions 5 has no effect"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build(**options)


def test_other_tasks_are_refused():
    with pytest.raises(UsageError, match="this --arch is a regressor: choose --task sg_regression"):
        SGRegressor.build_model(SimpleNamespace(), SimpleNamespace())

"""The operator model: published sizes, against plain modules, independent of grid and batch, options and errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
import torch.nn.functional as F
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import OPERATOR_ARCHITECTURES
from fairseq_sg.models.sg_operator import SGOperator, coordinates, resolve, without_edge
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.depth import DEPTH_REGISTRY
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.operator.resample import middle
from fairseq_sg.modules.operator.spectral import SpectralLayer
from fairseq_sg.ops.linear_attention import linear_attention
from helpers.fields import STATISTICS, build, node_axis, periodic_axis, task_of
from helpers.models import FFN_OPTIONS

ENCODERS = sorted(name for name, kind in ATTENTION_REGISTRY.items() if "encoder" in kind.roles)
JOINING = sorted(name for name, kind in ATTENTION_REGISTRY.items() if kind.joins_coordinates)
MODELS = {
    **{f"attention {name}": {"encoder_attention": name} for name in ENCODERS},
    **{f"depth {name}": {"depth": name} for name in sorted(DEPTH_REGISTRY)},
    **{
        f"feedforward {name}": {"encoder_ffn": name} | FFN_OPTIONS.get(name, {})
        for name in sorted(FEEDFORWARD_REGISTRY)
    },
    **{f"{name}, heads": {"encoder_attention": name, "coordinates": "heads"} for name in JOINING},
    "no coordinates": {"coordinates": "none"},
    "no attention": {"encoder_layers": 0},
    "no spectral layers": {"spectral_layers": 0, "decoder_coordinates": True},
    "names of layers": {"encoder_attention": "linear,softmax"},
    "pre-norm": {"norm": "layer", "pre_norm": True},
}
#: Kinds whose outputs depend on the order of the points, or on choices that a permutation may change.
ORDERED = ("relative", "abs_rel", "geometric")


def waves(points: int, rows: int = 3) -> torch.Tensor:
    """Functions of period 1, (B, n); the same ones on every grid."""
    x = periodic_axis(points)
    return torch.stack(
        [torch.sin(2 * math.pi * (x + 0.1 * row)) + 0.3 * torch.cos(4 * math.pi * x) for row in range(rows)]
    )


def run(model: SGOperator, a: torch.Tensor, axis=periodic_axis, m: int | None = None, **options):
    return model(a, axis(a.size(1)), axis(m or a.size(1)), **options)


@pytest.mark.parametrize(
    ("arch", "dims", "parameters"),
    [
        ("burgers", 1, 530_305),
        ("darcy", 2, 2_220_829),
        ("inverse", 2, 2_383_873),
        # Ours, with about as many parameters as each other.
        ("burgers_small", 1, 219_969),
        ("fno_small", 1, 214_169),
    ],
)
def test_parameters_of_published_and_of_small_models(arch, dims, parameters):
    arch = f"sg_operator_{arch}"
    sizes = SimpleNamespace(arch=arch, **OPERATOR_ARCHITECTURES[arch])
    model = SGOperator.build_model(sizes, task_of(dims))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_mechanism_of_an_encoder_serves(name):
    model = build(**MODELS[name])
    u, extra = run(model, waves(16))
    assert u.shape == (3, 16) and u.dtype == torch.float64
    u.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert set(extra) == {"inner_states", "aux_losses", "values"}


def test_a_fourier_neural_operator_by_hand():
    """Without attention, the model is its equations (Li et al. 2021)."""
    model, a = build(encoder_layers=0, field_scaling="scalar"), waves(10)
    x = periodic_axis(10)
    y = model.lift(torch.stack([(a - 1.0) / 2.0, x.expand_as(a)], dim=-1)).mT  # (B, C, n)
    for layer in model.decoder.layers:
        modes = torch.fft.rfft(y)[..., :4]
        product = torch.einsum("bik,iok->bok", modes, torch.view_as_complex(layer.weight))
        y = F.silu(torch.fft.irfft(product, 10) + F.conv1d(y, layer.local.weight, layer.local.bias))
    u = model.decoder.output(F.silu(model.decoder.hidden(y.mT))).squeeze(-1)
    torch.testing.assert_close(run(model, a)[0], u * 0.5 - 1.0)


@pytest.mark.parametrize(("kind", "normalized", "scale"), [("galerkin", "kv", 1), ("fourier", "qk", 7**-0.5)])
def test_attention_with_coordinates_in_every_head_by_hand(kind, normalized, scale):
    """The first layer as an explicit sum over pairs of points: layer norms of two of q, k, v, then x beside all three.

    Fourier attention divides by the root of the width with x, 6 + 1.
    """
    model = build(encoder_attention=kind, coordinates="heads", attention_bias=True, encoder_layers=1)
    layer, a = model.stack.layers[0], waves(7, 2)
    norms = {name: getattr(layer.self_attn, f"{name}_norm") for name in normalized}
    for norm in norms.values():
        torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    h = model.lift(a.unsqueeze(-1))  # (B, n, C)
    x = periodic_axis(7).unsqueeze(-1)
    heads = []
    for head in range(2):
        part = slice(6 * head, 6 * head + 6)
        of = {name: getattr(layer.self_attn, f"{name}_proj")(h)[..., part] for name in "qkv"}
        for name, norm in norms.items():
            of[name] = F.layer_norm(of[name], (6,), norm.weight[head, 0], norm.bias[head, 0])
        q, k, v = (torch.cat([of[name], x.expand(2, 7, 1)], dim=-1) for name in "qkv")
        heads.append((q @ k.mT * scale) @ v / 7)
    a1 = h + layer.self_attn.out_proj(torch.cat(heads, dim=-1))
    expected = a1 + layer.update.ffn(a1)
    states = run(model, a, return_all_hiddens=True)[1]["inner_states"]
    torch.testing.assert_close(states[-1].transpose(0, 1), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_attention": "softmax"},
        {"encoder_attention": "softmax", "attention_scale": "learned", "logit_scale": "log_length"},
        {"encoder_attention": "linear", "qk_norm": "l2"},
        {"encoder_attention": "linear", "feature_dim": "3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [1, 2])
def test_quotients_with_coordinates_in_every_head_by_hand(options, dims):
    """Softmax and linear attention of the first layer over pairs of points, with x beside q, k and v.

    Softmax attention divides its logits by the root of the width with x.
    """
    grid = {} if dims == 1 else {"coarse_points": 3}
    model = build(dims, coordinates="heads", encoder_layers=1, **options, **grid).eval()
    attention = model.stack.layers[0].self_attn
    a = waves(7, 2) if dims == 1 else torch.randn(2, 7, 7, dtype=torch.float64)
    axis = (periodic_axis if dims == 1 else node_axis)(7)
    h, x = model._lifted(a, axis)
    h, x = h.flatten(1, -2), x.flatten(0, -2)  # (B, N, C), (N, p)
    heads, expected_weights = [], []
    for head in range(2):
        q, k, v = (
            torch.cat([getattr(attention, f"{name}_proj")(h).chunk(2, dim=-1)[head], x.expand(2, *x.shape)], dim=-1)
            for name in "qkv"
        )
        if options["encoder_attention"] == "softmax":
            s = math.log(len(x)) if "logit_scale" in options else 1.0
            weights = (s * q @ k.mT / math.sqrt(6 + dims)).softmax(-1)
        else:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            if "qk_norm" in options:
                q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
            weights = q @ k.mT
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        expected_weights.append(weights)
        heads.append(weights @ v)
    expected = attention.out_proj(torch.cat(heads, dim=-1)).transpose(0, 1)
    torch.testing.assert_close(attention(h.transpose(0, 1), None, Context(coordinates=x)).output, expected)
    shown = attention(h.transpose(0, 1), None, Context(coordinates=x, return_weights=True))
    torch.testing.assert_close(shown.output, expected)
    torch.testing.assert_close(shown.weights, torch.stack(expected_weights, dim=1))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in ORDERED])
def test_points_are_a_set(name):
    """With coordinates among the features, permuted points give permuted states."""
    model = build(encoder_attention=name).eval()
    a, axis, order = waves(9), periodic_axis(9), torch.randperm(9)
    plain = model(a, axis, axis, return_all_hiddens=True)[1]["inner_states"][-1]
    permuted = model(a[:, order], axis[order], axis, return_all_hiddens=True)[1]["inner_states"][-1]
    torch.testing.assert_close(permuted, plain[order])


def test_a_function_does_not_depend_on_its_batch():
    for dims, options in ((1, {}), (2, {"coarse_points": 5, "coordinates": "heads"})):
        model = build(dims, **options).eval()
        a, axis = (waves(12), periodic_axis) if dims == 1 else (torch.randn(3, 12, 12).double(), node_axis)
        torch.testing.assert_close(run(model, a[1:2], axis)[0], run(model, a, axis)[0][1:2])


@pytest.mark.parametrize("name", ["galerkin", "fourier", "softmax", "linear"])
def test_finer_grids_converge(name):
    """At shared points, outputs for n and 2n points differ less as n grows."""
    model = build(encoder_attention=name).eval()
    outputs = {n: run(model, waves(n))[0] for n in (16, 32, 64, 128)}
    differences = [(outputs[2 * n][:, ::2] - outputs[n]).abs().max().item() for n in (16, 32, 64)]
    assert differences[0] > 1.5 * differences[1] > 1.5**2 * differences[2] > 0


def test_the_sum_of_galerkin_attention_grows_with_the_grid():
    """--galerkin-average sum or 32: attention of twice as many points is twice as large; the mean's is not."""
    for average, ratio in (("sum", 2.0), ("32", 2.0), ("mean", 1.0)):
        model = build(coordinates="none", galerkin_average=average, encoder_layers=1).eval()
        attention = model.stack.layers[0].self_attn
        h = model.lift(waves(64).unsqueeze(-1)).transpose(0, 1)  # (N, B, C)
        coarse, fine = attention(h[::2]).output, attention(h).output[::2]
        # Of these waves, means over both grids are nearly the same.
        torch.testing.assert_close(fine, ratio * coarse, rtol=1e-3, atol=1e-6)


def test_two_dimensions():
    model = build(2, coarse_points=5, coordinates="heads", decoder_coordinates=True, zero_boundary=True)
    a = torch.randn(2, 12, 12).double()
    u = run(model, a, node_axis)[0]
    assert u.shape == (2, 12, 12)
    inside = torch.zeros(12, 12, dtype=torch.bool)
    inside[1:-1, 1:-1] = True
    assert ((u != 0) == inside).all()
    # Attention on all 144 points, and on 25 of them with their coordinates among the features.
    for options in ({}, {"coarse_points": 5, "encoder_attention": "softmax"}):
        assert run(build(2, **options), a, node_axis)[0].shape == (2, 12, 12)


def test_the_ways_down_to_the_coarse_grid_and_up_are_the_papers(monkeypatch):
    """Convolutions between interpolations whose corners stay; attention has the coordinates of the coarse points.

    Dropout is a factor of 2 here: after each convolution, and of the features h.
    """
    monkeypatch.setattr(Dropout, "forward", lambda self, x: 2 * x)
    model, a = build(2, coarse_points=5, coordinates="heads", decoder_coordinates=True), torch.randn(2, 12, 12).double()

    def grid(points):
        return torch.stack(torch.meshgrid(node_axis(points), node_axis(points), indexing="ij"), dim=-1)

    def resized(z, points):
        return F.interpolate(z, size=(points, points), mode="bilinear", align_corners=True)

    seen = []
    model.stack.register_forward_hook(lambda _, given, made: seen.append((*given, made.x)))
    u = run(model, a, node_axis)[0]
    ((h, context, x),) = seen
    z = resized(F.relu(2 * F.conv2d(a[:, None], model.down.first.weight, padding=1)), 8)  # 8 is about √(12 · 5)
    parts = []
    for layer in model.down.chain:
        parts.append(z := F.relu(2 * F.conv2d(z, layer.weight, padding=1)))
    torch.testing.assert_close(h, 2 * F.relu(resized(torch.cat(parts, 1), 5)).flatten(2).permute(2, 0, 1))
    torch.testing.assert_close(context.coordinates, grid(5).flatten(0, 1))
    y = x.permute(1, 2, 0).unflatten(2, (5, 5))
    y = resized(F.silu(2 * F.conv2d(resized(y, 8), model.up.layer.weight, padding=1)), 12)
    torch.testing.assert_close(u, model.decoder(y.movedim(1, -1), grid(12)))


def test_coarse_points_lie_between_the_ends_of_a_periodic_axis_too():
    model = build(2, coarse_points=5, coordinates="heads")
    _, points = model._lifted(torch.randn(2, 12, 12).double(), periodic_axis(12))
    expected = torch.linspace(0, 11 / 12, 5, dtype=torch.float64)
    torch.testing.assert_close(points, torch.stack(torch.meshgrid(expected, expected, indexing="ij"), dim=-1))


def test_options_of_dropout():
    for options, embedding in (({}, 0.3), ({"embedding_dropout": 0.0}, 0.0)):
        model = build(2, coarse_points=5, dropout=0.3, **options)
        assert [part.dropout.p for part in (model.down, model.up, model)] == [0.3, 0.3, embedding]


def test_an_inverse_model_predicts_on_the_coarse_grid():
    model = build(
        2, coarse_points=5, coordinates="heads", coarse_output=True, spectral_layers=0, decoder_coordinates=True
    )
    a = torch.randn(2, 12, 12).double()
    u = run(model, a, node_axis, m=5)[0]
    assert u.shape == (2, 5, 5)
    with torch.no_grad():
        model.up.layer.weight.mul_(2)
    assert not torch.allclose(run(model, a, node_axis, m=5)[0], u)
    with pytest.raises(UsageError, match="predicts on 5 points a side, and the data have targets on 6"):
        run(model, torch.randn(2, 12, 12).double(), node_axis, m=6)


def test_scaling_is_kept_in_the_checkpoint():
    model, other = build(field_scaling="scalar"), build(field_scaling="scalar")
    assert {"input_scaling.mean", "target_scaling.std"} <= set(model.state_dict())
    assert model.target_scaling.std == STATISTICS["target"]["std"]
    other.target_scaling.std.fill_(1.0)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(other, waves(8))[0], run(model, waves(8))[0])


def test_a_checkpoint_of_another_scaling_is_refused():
    scaled, plain = build(field_scaling="scalar"), build()
    with pytest.raises(RuntimeError, match="Missing key.*input_scaling.mean"):
        scaled.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key.*input_scaling.mean"):
        plain.load_state_dict(scaled.state_dict())


def test_an_older_checkpoint_without_scaling_loads():
    """It has a mean of 0 and a standard deviation of 1."""
    model = build()
    identity = {"mean": torch.tensor(0.0), "std": torch.tensor(1.0)}
    old = {f"{side}_scaling.{name}": value for side in ("input", "target") for name, value in identity.items()}
    assert not old.keys() & model.state_dict().keys()
    model.load_state_dict(model.state_dict() | old)
    a = waves(8)
    assert model.input_scaling(a) is a and model.target_scaling.restore(a) is a


def test_an_older_checkpoint_of_an_inverse_model_loads():
    """It has no convolution before the decoder."""
    options = {"coarse_points": 5, "coarse_output": True, "spectral_layers": 0}
    model, other = build(2, **options), build(2, **options)
    model.up = None
    other.load_state_dict(model.state_dict())
    a = torch.randn(2, 12, 12).double()
    torch.testing.assert_close(run(other, a, node_axis, m=5)[0], run(model, a, node_axis, m=5)[0])


def test_values_and_states():
    _, extra = run(build(), waves(8), value_roles=("encoder",), return_all_hiddens=True)
    assert [v.values.shape for v in extra["values"]["encoder"]] == [(3, 2, 8, 6)] * 2
    assert [state.shape for state in extra["inner_states"]] == [(8, 3, 12)] * 2


@pytest.mark.parametrize(("dims", "factor"), [(1, 1.0), (2, 40**0.5)])
def test_spectral_weights_start_as_released(dims, factor):
    """Glorot normal over the tensor (I, O, K, 2) or (I, O, K, K, 2), with the gain 1/(I·O), in two dimensions times
    √(I + O).
    """
    torch.manual_seed(1)
    weight = SpectralLayer(16, 24, 9, dims).weight
    std = factor / (16 * 24) * (2 / ((16 + 24) * 2 * 9**dims)) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert weight.abs().max() > 3 * weight.std()  # not uniform: there it is √3


def test_the_middle_grid_is_the_geometric_mean_of_both():
    """Of Darcy flow's 141 and 43 points, and of 211 and 36: the arithmetic means are 92 and 124."""
    assert [middle(141, 43), middle(43, 141), middle(211, 36), middle(5, 5)] == [78, 78, 87, 5]


def test_a_model_without_attention_shows_no_values():
    """The criterion then refuses an orthogonality loss in one line."""
    assert build().attention_roles == ("encoder",) and build(encoder_layers=0).attention_roles == ()


@pytest.mark.parametrize("kind", ["galerkin", "fourier"])
def test_coordinates_in_heads_are_not_rounded_by_autocast(kind, monkeypatch):
    model, seen = build(encoder_attention=kind, coordinates="heads").float().eval(), []

    def recording(q, k, v, **options):
        seen.extend((q, k, v))
        return linear_attention(q, k, v, **options)

    monkeypatch.setattr("fairseq_sg.modules.attention.galerkin.linear_attention", recording)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run(model, waves(2048).float(), lambda points: periodic_axis(points).float())
    assert all(torch.equal(x[0, 0, :, -1], periodic_axis(2048).float()) for x in seen) and len(seen) >= 3


@pytest.mark.parametrize("kind", JOINING)
@pytest.mark.parametrize("low", ["autocast", "half"])
def test_attention_on_coordinates_alone_is_that_of_single_precision(kind, low):
    """Projections of 0 leave the coordinates: every product is then of float32, whatever the dtype of the states."""
    make = ATTENTION_REGISTRY.find(kind)
    module = make(12, 2, role="encoder", columns=1).eval()
    for projection in (module.q_proj, module.k_proj, module.v_proj):
        torch.nn.init.zeros_(projection.weight)
    module.out_proj = torch.nn.Identity()
    x, context = torch.randn(300, 2, 12), Context(coordinates=torch.linspace(0, 1, 300)[:, None])
    expected = module(x, None, context).output
    assert expected[..., 6].std(0).gt(1e-4).all()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low == "autocast"):
        module, x = (module, x) if low == "autocast" else (module.bfloat16(), x.bfloat16())
        out = module(x, None, context).output
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("options", [{}, {"decoder_coordinates": True}], ids=["plain", "joined"])
def test_coordinates_and_predictions_are_not_rounded_by_autocast(options):
    """In bfloat16, a fine grid has many points at one coordinate, and a prediction 8 bits."""
    model, a = build(field_scaling="scalar", **options).float().eval(), waves(2048).float()

    def axis(points):
        return periodic_axis(points).float()

    expected, points = model._lifted(a, axis(2048))
    plain, _ = run(model, a, axis)
    joined = []
    if options:
        model.decoder.join.register_forward_hook(lambda _, given, made: joined.append((given[0], made)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model._lifted(a, axis(2048))[0], expected, rtol=0, atol=0)
        u, _ = run(model, a, axis)
    assert u.dtype == torch.float32 and not torch.equal(u, u.bfloat16().float())
    torch.testing.assert_close(u, plain, rtol=0.05, atol=0.05)
    for given, made in joined:
        assert made.dtype == torch.float32 and torch.equal(given[0, :, -1], points[:, 0])


def test_edges_and_coordinates():
    assert without_edge(torch.ones(2, 4)).tolist() == [[0, 1, 1, 0]] * 2
    points = coordinates(torch.tensor([0.0, 0.5]), 2)
    assert points.tolist() == [[[0, 0], [0, 0.5]], [[0.5, 0], [0.5, 0.5]]]
    assert coordinates(torch.tensor([0.0, 0.5]), 1).tolist() == [[0], [0.5]]


@pytest.mark.parametrize("arch", OPERATOR_ARCHITECTURES)
def test_architectures_leave_what_the_user_chose(arch):
    cfg = SimpleNamespace(encoder_ffn="sigma_moe", spectral_dim=10)
    ARCH_CONFIG_REGISTRY[arch](cfg)
    assert cfg.spectral_dim == 10 and not hasattr(cfg, "ffn_init")
    plain = SimpleNamespace()
    ARCH_CONFIG_REGISTRY[arch](plain)
    assert {k: v for k, v in vars(plain).items()} == OPERATOR_ARCHITECTURES[arch]


def test_every_architecture_can_do_without_layers():
    for arch, values in OPERATOR_ARCHITECTURES.items():
        layers = {"encoder_layers": 0, "coordinates": "input", "spectral_layers": 0, "decoder_coordinates": False}
        config = resolve(SimpleNamespace(**values | layers, arch=arch))
        assert config.encoder_layers == config.spectral_layers == 0


@pytest.mark.parametrize(("arch", "heads"), [("sg_operator_fno", 4), ("sg_operator_burgers", 4)])
def test_values_of_another_architecture_are_not_let_through(arch, heads):
    """4 heads are those of ``sg_operator_darcy``; as the user's own, they are refused as 3 are."""
    cfg = SimpleNamespace(encoder_layers=0, coordinates="input", encoder_attention_heads=heads, _name=arch)
    ARCH_CONFIG_REGISTRY[arch](cfg)
    with pytest.raises(UsageError, match="--encoder-attention-heads has no effect with --encoder-layers 0"):
        resolve(cfg)


def test_a_constant_field_has_no_scale():
    task = task_of(1)
    task.fields.statistics = STATISTICS | {"target": {"mean": 1.0, "std": 0.0}}
    config = SimpleNamespace(encoder_embed_dim=12, encoder_ffn_embed_dim=24, encoder_attention_heads=3)
    SGOperator.build_model(config, task)
    with pytest.raises(UsageError, match="--field-scaling scalar: all values of the target are equal in train"):
        SGOperator.build_model(SimpleNamespace(**vars(config), field_scaling="scalar"), task)


@pytest.mark.parametrize(
    ("options", "dims", "message"),
    [
        ({"position": "rotary"}, 1, "--position rotary is not for a grid"),
        ({"coordinates": "all"}, 1, "--coordinates is 'all': choose from input, heads, none"),
        (
            {"coordinates": "heads", "encoder_attention": "relative"},
            1,
            "--coordinates heads is not defined for relative attention: choose --coordinates input, or one of fourier, "
            "galerkin, linear, softmax",
        ),
        ({"field_scaling": "pointwise"}, 1, "--field-scaling is 'pointwise': choose from none, scalar"),
        ({"galerkin_average": "max"}, 1, "--galerkin-average is 'max': choose from mean, sum, or a number above 0"),
        ({"galerkin_average": "-1"}, 1, "--galerkin-average is '-1': choose from mean, sum, or a number above 0"),
        ({"encoder_attention": "softmax", "galerkin_average": "sum"}, 1, "--galerkin-average sum has no effect"),
        ({"encoder_layers": 0, "encoder_attention": "softmax"}, 1, "has no effect with --encoder-layers 0"),
        ({"encoder_layers": 0, "pre_norm": True}, 1, "--pre-norm has no effect with --encoder-layers 0: leave it out"),
        ({"encoder_layers": 0, "encoder_ffn": "sigma_moe"}, 1, "--encoder-ffn has no effect with --encoder-layers 0"),
        ({"encoder_layers": 0, "moe_experts": 4}, 1, "--moe-experts has no effect with --encoder-layers 0"),
        ({"encoder_layers": 0, "coordinates": "heads"}, 1, "--coordinates heads needs attention"),
        ({"spectral_layers": 0, "modes": 3}, 1, "--modes has no effect with --spectral-layers 0: leave it out"),
        ({"spectral_layers": 0, "spectral_dim": 7}, 1, "--spectral-dim .* --spectral-layers 0 and no --decoder-coord"),
        ({"depth": "shared_act", "act_ponder_padding": "include"}, 1, "--act-ponder-padding include has no effect"),
        ({"coarse_points": 5, "coordinates": "none"}, 1, "--coarse-points is for fields of two dimensions"),
        ({"zero_boundary": True}, 1, "--zero-boundary is for functions on a region with an edge"),
        ({"coarse_output": True}, 2, "--coarse-output needs the grid of --coarse-points"),
        ({"modes": 0}, 1, "--modes is 0: choose 1 or more"),
        ({"encoder_attention": "galerkn"}, 1, "unknown attention 'galerkn'"),
    ],
)  # fmt: skip
def test_wrong_options(options, dims, message):
    with pytest.raises(UsageError, match=message):
        build(dims, **options)


def test_a_grid_with_too_few_frequencies():
    with pytest.raises(UsageError, match="--modes 4 is more than a grid of 5 points has: choose 3 or fewer"):
        run(build(), waves(5))


def test_another_task_is_refused():
    with pytest.raises(UsageError, match="choose --task sg_operator"):
        SGOperator.build_model(SimpleNamespace(), SimpleNamespace())


@pytest.mark.parametrize("dims", [1, 2])
def test_half_precision(dims):
    """Targets and coordinates stay float64 in a batch; the model computes in its own precision."""
    options = {"coordinates": "heads", "field_scaling": "scalar"} | ({"coarse_points": 5} if dims == 2 else {})
    model = build(dims, **options).eval()
    a, axis = torch.randn(2, *[12] * dims).double(), periodic_axis(12)
    exact = model(a, axis, axis)[0]
    u = model.bfloat16()(a.bfloat16(), axis, axis)[0]
    assert u.dtype == torch.bfloat16
    torch.testing.assert_close(u.double(), exact, atol=0.05 * exact.abs().max().item(), rtol=0)

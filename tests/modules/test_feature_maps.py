"""Feature maps of linear attention: values, the similarities they stand for, precision, gradients and options."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context, build_attention
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY, EluFeatureMap, FeatureMap, build_feature_map
from fairseq_sg.modules.feature_maps.outer import OuterProduct
from fairseq_sg.modules.feature_maps.performer import orthogonal_gaussian
from fairseq_sg.modules.feature_maps.standardized import standardized
from helpers.attention_cases import HEADS, KINDS, Case, reference
from helpers.configs import config_of

FEATURES, HORIZON, OPTIONS = KINDS["linear"].FEATURES, KINDS["linear"].HORIZON, KINDS["linear"].OPTIONS
every_map = pytest.mark.parametrize("name", sorted(FEATURE_MAP_REGISTRY))
LEARNED = {"hedgehog", "mlp", "rebased", "t2r"}
#: φ(q)·φ(k) of these is at least 0 whatever q and k are; of those it may be exactly 0.
MAY_VANISH = {"relu", "squared", "cosformer", "rebased", "t2r", "dpfp"}
#: φ(q)·φ(k) of these has both signs.
SIGNED = {"identity", "mlp"}


def make(name: str, head_dim: int = 6, **options) -> FeatureMap:
    torch.manual_seed(4)
    return build_feature_map(name, head_dim, **(OPTIONS.get(name, {}) | options)).double()


def positions_for(feature_map: FeatureMap, length: int, start: int = 0):
    return torch.arange(start, start + length) if feature_map.needs_positions else None


def similarity(feature_map: FeatureMap, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """φ(q_n)·φ(k_m) of q (N, D) and k (M, D), both at positions 0, 1, 2, …"""
    q_features = feature_map.queries(q[None, None], positions_for(feature_map, len(q)))
    k_features = feature_map.keys(k[None, None], positions_for(feature_map, len(k)))
    return (q_features @ k_features.transpose(-1, -2))[0, 0]


def random(*shape, seed: int = 5, **kwargs) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), **kwargs)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"unknown feature map 'gelu' \(--feature-map\): choose from .*elu"):
        build_feature_map("gelu", 4)


def test_every_map_has_its_formula():
    assert set(FEATURES) == set(FEATURE_MAP_REGISTRY) == {"elu", *OPTIONS}


@every_map
def test_interface_of_a_feature_map(name):
    feature_map = make(name)
    x = random(2, 3, 5, 6)
    at = positions_for(feature_map, 5)
    for mapped in (feature_map.queries(x, at), feature_map.keys(x, at)):
        assert mapped.shape == (2, 3, 5, feature_map.features) and mapped.dtype == x.dtype
    # Each position by itself: attention may then be causal, padded and decoded step by step.
    alone = feature_map.keys(x[:, :, 2:3], positions_for(feature_map, 1, start=2))
    torch.testing.assert_close(feature_map.keys(x, at)[:, :, 2:3], alone, rtol=1e-12, atol=1e-14)
    strided = random(2, 5, 6, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(feature_map.keys(strided, at), feature_map.keys(strided.contiguous(), at))


@every_map
@pytest.mark.parametrize("side", ["q", "k"])
def test_equals_its_formula_vector_by_vector(name, side):
    feature_map = make(name)
    for parameter in feature_map.parameters():
        nn.init.normal_(parameter)
    x, at = random(1, 1, 7, 6), positions_for(feature_map, 7)
    got = feature_map.queries(x, at) if side == "q" else feature_map.keys(x, at)
    for n in range(7):
        expected = FEATURES[name](feature_map, x[0, 0, n], n, side)
        torch.testing.assert_close(got[0, 0, n], expected, rtol=1e-12, atol=1e-14)


def test_a_map_may_treat_queries_and_keys_apart():
    class Apart(FeatureMap):
        def queries(self, q):
            return q + 1

        def keys(self, k):
            return k - 1

    x = torch.zeros(2)
    assert (Apart(2).queries(x) == 1).all() and (Apart(2).keys(x) == -1).all()


# What all maps have in common.


@every_map
def test_sign_of_the_similarities(name):
    feature_map = make(name)
    for parameter in feature_map.parameters():
        nn.init.normal_(parameter)
    got = similarity(feature_map, 2 * random(HORIZON, 6), 2 * random(HORIZON, 6, seed=6))
    if name in SIGNED:
        assert (got > 0).any() and (got < 0).any()
    else:
        assert (got >= 0 if name in MAY_VANISH else got > 0).all()


@every_map
@pytest.mark.parametrize("dtype,bound", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=["fp16", "bf16"])
def test_half_precision(name, dtype, bound):
    """Features are those of the rounded input, and do not overflow where float16 ends."""
    feature_map = make(name)
    x, at = (2 * random(1, 1, 50, 6)).to(dtype), positions_for(feature_map, 50)
    exact = feature_map.keys(x.double(), at)
    got = feature_map.to(dtype).keys(x, at)
    assert (got.double() - exact).norm() / exact.norm() < bound
    if name not in ("exp", "performer"):
        assert feature_map.keys(torch.full_like(x, 1000), at).isfinite().all()


@every_map
def test_autocast_changes_only_the_matrix_products_of_learned_maps(name):
    feature_map = make(name).float()
    x, at = random(2, 3, 5, 6).float(), positions_for(feature_map, 5)
    exact = feature_map.queries(x, at), feature_map.keys(x, at)
    with torch.autocast("cpu", torch.bfloat16):
        got = feature_map.queries(x, at), feature_map.keys(x, at)
    for a, b in zip(got, exact, strict=True):
        if name in ("hedgehog", "mlp", "t2r"):
            torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)
        else:
            assert a.dtype == torch.float32 and torch.equal(a, b)


@every_map
def test_gradients(name):
    feature_map = make(name)
    x = random(1, 2, 3, 6)
    x = (x + 0.1 * x.sign()).requires_grad_()
    at = positions_for(feature_map, 3, start=2)
    assert torch.autograd.gradcheck(lambda x: feature_map.queries(x, at), (x,))
    assert torch.autograd.gradcheck(lambda x: feature_map.keys(x, at), (x,))


@every_map
def test_learned_parts_learn_queries_and_keys_apart(name):
    feature_map = make(name)
    parameters = dict(feature_map.named_parameters())
    assert bool(parameters) == (name in LEARNED)
    x, at = random(1, 1, 20, 6), positions_for(feature_map, 20)
    for side, used in (("query", feature_map.queries), ("key", feature_map.keys)):
        feature_map.zero_grad()
        used(x, at).square().sum().backward() if parameters else None
        for full_name, parameter in parameters.items():
            reached = parameter.grad is not None and (parameter.grad != 0).any()
            assert reached == full_name.startswith(side), full_name


def test_a_querys_own_scale_does_not_change_the_attention():
    """exp and performer divide a Query's features by their largest; Keys are as the formula has them."""
    for name in ("exp", "performer"):
        feature_map = make(name)
        q, k = random(1, 1, 4, 6), random(1, 1, 9, 6, seed=6)
        assert torch.equal(feature_map.keys(q), feature_map(q))
        kept, plain = feature_map.queries(q), feature_map(q)
        torch.testing.assert_close(kept / kept.amax(-1, keepdim=True), plain / plain.amax(-1, keepdim=True))
        scores, expected = kept @ feature_map.keys(k).mT, plain @ feature_map.keys(k).mT
        torch.testing.assert_close(scores / scores.sum(-1, keepdim=True), expected / expected.sum(-1, keepdim=True))
        far = feature_map.queries(torch.full((1, 1, 2, 6), 500.0))
        assert far.isfinite().all() and (far.amax(-1) > 0).all()


# elu + 1.


def elu(head_dim: int = 4) -> FeatureMap:
    return build_feature_map("elu", head_dim)


def test_elu_plus_one():
    x = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float64), torch.tensor([0.0, -0.0], dtype=torch.float64)])
    torch.testing.assert_close(elu()(x), F.elu(x) + 1, rtol=1e-14, atol=1e-15)
    assert torch.equal(elu().queries(x), elu().keys(x)) and elu(7).features == 7 and not list(elu().parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("value", [-1.0, -5.0, -8.0, -12.0])
def test_elu_does_not_cancel_in_half_precision(dtype, value):
    x = torch.tensor([value], dtype=dtype)
    got, exact = elu()(x).item(), math.exp(value)
    assert abs(got - exact) / exact < 1e-2
    if value <= -8:  # what the usual form gives: the test is not vacuous
        assert abs((F.elu(x) + 1).item() - exact) / exact > 0.1


def test_elu_gradient_and_its_corner():
    x = torch.tensor([-1e4, -30.0, -1.0, -0.0, 0.0, 1.0, 1e4], dtype=torch.float64, requires_grad=True)
    elu()(x).sum().backward()
    expected = torch.tensor([0.0, math.exp(-30), math.exp(-1), 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_elu_has_no_nan_at_the_ends(dtype):
    x = torch.tensor(
        [-1e4, 1e4, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype, requires_grad=True
    )
    out = elu()(x)
    out.sum().backward()
    assert out.isfinite().all() and (out >= 0).all()
    assert x.grad.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert elu()(torch.tensor([math.nan], dtype=dtype)).isnan().all()


def test_elu_gradcheck():
    x = torch.randn(3, 7, dtype=torch.float64)
    x = (x + 0.1 * x.sign()).requires_grad_()
    assert torch.autograd.gradcheck(elu(), (x,))
    assert torch.autograd.gradgradcheck(elu(), (x,))


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.floats(-80, 1e6, width=32), min_size=2, max_size=20))
def test_elu_is_positive_and_monotone(values):
    x = torch.tensor(sorted(values), dtype=torch.float32)
    out = elu()(x)
    assert (out > 0).all() and (out.diff() >= 0).all()


# The quadratic maps.


def test_outer_product_squares_the_dot_product():
    outer, x, y = OuterProduct(6), random(4, 6), random(4, 6, seed=6)
    assert outer.features == outer(x).size(-1) == 21
    torch.testing.assert_close((outer(x) * outer(y)).sum(-1), (x * y).sum(-1) ** 2, rtol=1e-12, atol=1e-13)


def test_taylor_is_the_series_of_the_exponential():
    feature_map, q, k = make("taylor"), random(5, 6), random(8, 6, seed=6)
    logits = q @ k.T / math.sqrt(6)
    got = similarity(feature_map, q, k)
    assert feature_map.features == 28
    torch.testing.assert_close(got, 1 + logits + logits**2 / 2, rtol=1e-12, atol=1e-13)
    near = similarity(feature_map, 0.1 * q, k)
    torch.testing.assert_close(near, (0.1 * logits).exp(), rtol=0, atol=0.2**3)
    assert (similarity(feature_map, 20 * q, k) >= 0.5 - 1e-9).all()


def test_rebased_is_the_square_of_the_normalized_dot_product():
    feature_map, q, k = make("rebased"), random(5, 6), random(8, 6, seed=6)
    expected = (F.layer_norm(q, (6,)) @ F.layer_norm(k, (6,)).T) ** 2 / 6
    torch.testing.assert_close(similarity(feature_map, q, k), expected, rtol=1e-12, atol=1e-12)
    assert (feature_map.query_norm.weight == 1).all() and (feature_map.key_norm.bias == 0).all()


def test_rebased_starts_uniform_on_request():
    feature_map = make("rebased", head_dim=40, rebased_start="uniform")
    for parameter in feature_map.parameters():
        assert 0 <= parameter.min() < 0.2 and 0.8 < parameter.max() < 1
    assert not torch.equal(feature_map.query_norm.weight, feature_map.key_norm.weight)


@pytest.mark.parametrize(
    "feature_dim,head,width", [("head", 64, 64), ("sqrt", 64, 8), ("sqrt", 32, 5), ("sqrt", 63, 7), ("12", 64, 12)]
)
@pytest.mark.parametrize("name", ["taylor", "rebased"])
def test_feature_dim_keeps_a_quadratic_map_about_as_wide_as_a_head(name, feature_dim, head, width):
    config = config_of(2 * head, 2, feature_map=name, feature_dim=feature_dim)
    attention = build_attention("linear", config, "decoder")
    assert attention.q_proj.out_features == attention.k_proj.out_features == 2 * width
    assert attention.v_proj.out_features == 2 * head
    assert attention.feature_map.features == width * (width + 1) // 2 + (1 + width if name == "taylor" else 0)


# Maps of standardized Queries and Keys.


def affine_squared(head_dim: int = 6) -> FeatureMap:
    return make("squared", head_dim, squared_kernel="affine")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_standardized_has_mean_0_and_unbiased_variance_1(scale):
    x = 3 + scale * random(4, 6)
    got = standardized(x)
    torch.testing.assert_close(got.mean(-1), torch.zeros(4, dtype=x.dtype), rtol=0, atol=1e-9)
    deviation = ((x - x.mean(-1, keepdim=True)).square().sum(-1) / 5).sqrt()
    torch.testing.assert_close(got.square().sum(-1) / 5, (deviation / (deviation + 1e-6)).square())


def test_equal_numbers_are_standardized_to_0_with_a_finite_gradient():
    x = torch.full((2, 6), 3.0, dtype=torch.float64, requires_grad=True)
    out = standardized(x)
    (grad,) = torch.autograd.grad((out * random(2, 6)).sum(), x)
    assert (out == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("side", ["q", "k"])
def test_affine_squared_equals_its_formula_vector_by_vector(side):
    feature_map, x = affine_squared(), random(1, 1, 7, 6)
    got = feature_map.queries(x) if side == "q" else feature_map.keys(x)
    for n in range(7):
        expected = FEATURES["squared"](feature_map, x[0, 0, n], n, side)
        torch.testing.assert_close(got[0, 0, n], expected, rtol=1e-12, atol=1e-14)
    assert (got >= 0).all() and got.size(-1) == feature_map.features == 6


def test_affine_squared_starts_uniform_and_learns_queries_and_keys_apart():
    feature_map = affine_squared(40)
    names = {"query_kernel.weight", "query_kernel.bias", "key_kernel.weight", "key_kernel.bias"}
    assert {name for name, _ in feature_map.named_parameters()} == names
    for parameter in feature_map.parameters():
        assert 0 <= parameter.min() < 0.2 and 0.8 < parameter.max() < 1
    feature_map.queries(random(1, 1, 5, 40)).sum().backward()
    assert all(feature_map.get_parameter(name).grad is None for name in names if name.startswith("key"))
    assert all(feature_map.get_parameter(name).grad.ne(0).all() for name in names if name.startswith("query"))


def test_gradients_of_affine_squared():
    feature_map, x = affine_squared(), random(1, 2, 3, 6, requires_grad=True)
    assert torch.autograd.gradcheck(feature_map.queries, (x,))
    assert torch.autograd.gradcheck(feature_map.keys, (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_affine_squared_in_half_precision(dtype):
    feature_map, x = affine_squared(), (300 * random(1, 1, 50, 6)).to(dtype)
    exact = feature_map.keys(x.double())
    got = feature_map.to(dtype).keys(x)
    assert got.dtype == torch.float32 and (got - exact).norm() / exact.norm() < 1e-2


def test_plain_squared_has_no_parameters():
    assert not list(make("squared").parameters())


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_mlp_with_a_denominator_that_may_be_negative(role):
    case = Case("linear", role, {"feature_map": "mlp"})
    module, (query, key) = case.build(), case.inputs()
    out, weights, _ = module(query, key, Context(return_weights=True))
    expected, its_weights = reference(module, query, key)
    torch.testing.assert_close(weights, its_weights)
    torch.testing.assert_close(out, expected)
    q, k = (x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for x in (module.q_proj(query), module.k_proj(key)))
    similarity = module.feature_map.queries(q) @ module.feature_map.keys(k).mT
    assert (similarity < 0).any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("squared", {"squared_kernel": "cubic"}, "--squared-kernel is 'cubic': choose from plain, affine"),
        ("rebased", {"rebased_start": "zeros"}, "--rebased-start is 'zeros': choose from ones, uniform"),
    ],
)
def test_wrong_choices(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_feature_map(name, 6, **options)


@pytest.mark.parametrize(("name", "options"), [("squared", {"squared_kernel": "affine"}), ("mlp", {}), ("rebased", {})])
def test_one_number_cannot_be_normalized(name, options):
    with pytest.raises(ValueError, match="normalizes a head's Queries and Keys: choose --feature-dim 2 or more"):
        build_feature_map(name, 1, **options)


# cosFormer.


def test_cosformer_weighs_relu_similarity_with_the_distance():
    feature_map, q, k = make("cosformer", cosformer_horizon=10), random(9, 6), random(10, 6, seed=6)
    distance = torch.arange(9.0, dtype=torch.float64)[:, None] - torch.arange(10.0, dtype=torch.float64)
    expected = (q.relu() @ k.relu().T) * (math.pi * distance / 20).cos()
    torch.testing.assert_close(similarity(feature_map, q, k), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
def test_cosformer_ends_at_its_horizon(role):
    attention = ATTENTION_REGISTRY["linear"](
        12, 2, role=role, feature_map="cosformer", feature_map_options={"cosformer_horizon": 5}
    )
    x, short = torch.randn(6, 2, 12), torch.randn(5, 2, 12)
    message = "a position reaches --cosformer-horizon 5 in a sequence of 6"
    with pytest.raises(ValueError, match=message):
        attention(x, short if role == "cross" else None)
    if role == "cross":
        with pytest.raises(ValueError, match=message):
            attention(short, x)
        with pytest.raises(ValueError, match=message):
            attention(short[:1], x, Context(state={}))
    attention(short, short)
    padding = torch.tensor([[True] + 5 * [False], 5 * [False] + [True]])
    attention(short if role == "cross" else x, x, Context(key_padding_mask=padding))  # six, but no position above 4
    if role != "encoder":
        state = {}
        for n in range(5):
            attention(x[n : n + 1], short if role == "cross" else None, Context(state=state))
        with pytest.raises(ValueError, match=message):
            attention(x[5:], short if role == "cross" else None, Context(state=state))


# Performer.


def test_performer_is_an_unbiased_estimate_of_the_softmax_kernel():
    """The mean over 4000 draws of Ω is within four standard errors of exp(q·k/√D)."""
    q, k = 0.7 * random(3, 4), 0.7 * random(5, 4, seed=6)
    expected = (q @ k.T / 2).exp()
    feature_map = make("performer", head_dim=4, performer_features=12, performer_redraw="forward").train()
    draws = []
    for _ in range(4000):
        feature_map.begin()
        draws.append(feature_map(q) @ feature_map(k).T)
    draws = torch.stack(draws)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() < 4 * error).all()
    assert (error < 0.05 * expected).all()


def test_performer_features_are_orthogonal_in_blocks_with_gaussian_lengths():
    torch.manual_seed(7)
    omega = orthogonal_gaussian(6, 15).double()
    assert omega.shape == (6, 15)
    for start in (0, 6, 12):
        block = omega[:, start : start + 6]
        gram = block.T @ block
        torch.testing.assert_close(gram, gram.diag().diag(), rtol=0, atol=1e-5)
    lengths = torch.cat([orthogonal_gaussian(6, 6).norm(dim=0) for _ in range(1000)])
    assert lengths.std() > 0.5  # independent of one another, not √D each
    torch.testing.assert_close(lengths.square().mean().item(), 6.0, rtol=0.03, atol=0)
    directions = torch.stack([F.normalize(orthogonal_gaussian(6, 6), dim=0)[:, 0] for _ in range(2000)])
    torch.testing.assert_close(directions.T @ directions / 2000, torch.eye(6) / 6, rtol=0, atol=0.02)


def attention_with_performer(redraw: str, role: str = "encoder"):
    torch.manual_seed(8)
    options = {"performer_redraw": redraw, "performer_features": 8}
    return ATTENTION_REGISTRY["linear"](12, 2, role=role, feature_map="performer", feature_map_options=options)


@pytest.mark.parametrize("redraw", ["never", "forward", "3"])
def test_performer_redraws_as_told(redraw):
    attention, x = attention_with_performer(redraw).train(), torch.randn(5, 2, 12)
    phi, drawn = attention.feature_map, []
    for update in range(7):
        phi.set_num_updates(update)
        for _ in range(2):  # --update-freq 2, or a shared layer's two applications
            before = phi.projection
            attention(x)
            drawn.append(not torch.equal(before, phi.projection))
    expected = {"never": [], "forward": range(14), "3": [6, 12]}[redraw]
    assert [i for i, new in enumerate(drawn) if new] == list(expected)


@pytest.mark.parametrize("redraw", ["forward", "1"])
def test_performer_does_not_draw_in_evaluation_or_decoding(redraw):
    attention, x = attention_with_performer(redraw, "decoder").eval(), torch.randn(5, 2, 12)
    attention.feature_map.set_num_updates(5)
    before = attention.feature_map.projection
    assert torch.equal(attention(x)[0], attention(x)[0])
    attention.train()
    attention(x[:1], None, Context(state={}))
    assert attention.feature_map.projection is before


def test_performer_gradient_of_a_layer_that_is_applied_twice():
    attention, x = attention_with_performer("forward").train(), torch.randn(5, 2, 12)
    attention(attention(x)[0])[0].sum().backward()
    assert attention.q_proj.weight.grad.isfinite().all() and (attention.q_proj.weight.grad != 0).any()


def test_performer_checkpoint_attends_as_trained():
    trained, x = attention_with_performer("forward").train(), torch.randn(5, 2, 12)
    trained(x)
    torch.manual_seed(9)
    restored = attention_with_performer("forward")
    assert not torch.equal(restored.feature_map.projection, trained.feature_map.projection)
    restored.load_state_dict(trained.state_dict())
    assert torch.equal(restored.eval()(x)[0], trained.eval()(x)[0])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_performer_draws_alike_in_a_resumed_run(stop):
    """fairseq seeds every update by its number and tells it to the model before the update."""

    def train(attention, updates):
        for update in updates:
            torch.manual_seed(100 + update)
            attention.feature_map.set_num_updates(update)
            attention(x)
        return attention

    x = torch.randn(5, 2, 12)
    whole = train(attention_with_performer("3").train(), range(8))
    first = train(attention_with_performer("3").train(), range(stop))
    resumed = attention_with_performer("3").train()
    resumed.load_state_dict(first.state_dict())
    train(resumed, range(stop, 8))
    assert torch.equal(resumed.feature_map.projection, whole.feature_map.projection)


def test_fairseq_tells_the_performer_the_number_of_updates():
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    model.attention = attention_with_performer("3")
    model.set_num_updates(17)
    assert model.attention.feature_map.updates == 17


# Learned maps and DPFP.


def test_hedgehog_starts_as_the_softmax_of_both_signs():
    feature_map, x = make("hedgehog"), random(1, 1, 5, 6)
    expected = torch.cat([2 * x, -2 * x], dim=-1).softmax(-1)
    assert torch.equal(feature_map.queries(x), expected) and torch.equal(feature_map.keys(x), expected)
    torch.testing.assert_close(expected.sum(-1), torch.ones(1, 1, 5, dtype=torch.float64))


@pytest.mark.parametrize("norm", ["l1", "l2", "rms"])
def test_t2r_in_float16_where_a_query_meets_no_key(norm):
    """The denominator is ε, whose derivative is beyond float16: features in float32 keep it until ReLU removes it."""
    case = Case("linear", "encoder", {"feature_map": "t2r", "qk_norm": norm})
    attention, (x, _) = case.build(torch.half), case.inputs(dtype=torch.half)
    with torch.no_grad():
        for linear, features in (
            (attention.feature_map.query_map, slice(0, 2)),
            (attention.feature_map.key_map, slice(2, 8)),
        ):
            linear.weight.zero_()
            linear.bias.zero_()[features] = 1.0
    (128 * attention(x, x, Context()).output).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


def test_t2r_has_the_width_it_is_given():
    assert build_feature_map("t2r", 6).features == 6
    assert make("t2r", t2r_features=17).queries(random(1, 1, 5, 6)).size(-1) == 17


def test_dpfp_by_hand():
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)  # r = [1, 0, 0, 2]
    assert make("dpfp", 2, dpfp_nu=1)(x).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert make("dpfp", 2, dpfp_nu=3)(x).tolist() == [2.0, 0.0, 0.0, 0.0] + [0.0] * 4 + [0.0, 0.0, 0.0, 2.0]


# Options.


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("cosformer", {}, "--cosformer-horizon is None: --feature-map cosformer needs a number above every position"),
        ("cosformer", {"cosformer_horizon": 0}, "--cosformer-horizon is 0"),
        ("performer", {"performer_features": 7}, "--performer-features is 7, .*: choose an even number from 2"),
        ("performer", {"performer_features": 0}, "--performer-features is 0"),
        (
            "performer",
            {"performer_redraw": "x"},
            "--performer-redraw is 'x': choose from never, forward, or a positive",
        ),
        ("performer", {"performer_redraw": "0"}, "--performer-redraw is '0'"),
        ("t2r", {"t2r_features": 0}, "--t2r-features is 0: choose 1 or more"),
        ("dpfp", {"dpfp_nu": 0}, "--dpfp-nu is 0: for Queries of width 6 choose from 1 to 11"),
        ("dpfp", {"dpfp_nu": 12}, "--dpfp-nu is 12"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_feature_map(name, 6, **options)


def test_widths_that_no_map_can_have_are_refused():
    with pytest.raises(ValueError, match="--feature-map rebased .*: choose --feature-dim 2 or more"):
        build_feature_map("rebased", 1)
    with pytest.raises(ValueError, match="--feature-map dpfp makes only zeros of one number"):
        build_feature_map("dpfp", 1)
    with pytest.raises(ValueError, match="--performer-features is 5 by default, for Queries of width 5"):
        build_feature_map("performer", 5)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_reach_the_map_from_a_configuration(name):
    chosen = OPTIONS[name]
    options = FEATURE_MAP_REGISTRY[name].options
    assert options is not None or not chosen
    config = config_of(24, 3, feature_map=name, **chosen)
    attention = build_attention("linear", config, "decoder")
    assert attention.feature_map.features == build_feature_map(name, 8, **chosen).features
    assert FEATURE_MAP_REGISTRY[name] in ATTENTION_REGISTRY["linear"].option_classes(config)


@every_map
def test_linear_attention_under_autocast_and_in_cross_decoding(name):
    """Features may be wider than Queries and Values; outputs are not, step by step or at once.

    Similarities of both signs are not divided by their sum, which may be near 0, where rounding decides.
    """
    options = {"feature_map": name, "feature_map_options": OPTIONS.get(name, {})}
    options |= {"linear_attention_denominator": "none"} if name in SIGNED else {}
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="cross", **options).eval()
    query, source, state = torch.randn(4, 3, 12), torch.randn(6, 3, 12), {}
    with torch.autocast("cpu", torch.bfloat16):
        full, weights, _ = attention(query, source, Context(return_weights=True))
        steps = torch.cat([attention(query[n : n + 1], source, Context(state=state))[0] for n in range(4)])
    assert full.dtype == steps.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(steps, full, rtol=0.02, atol=0.02)
    torch.testing.assert_close(full.float(), attention(query, source)[0], rtol=0.05, atol=0.05)
    half = attention.bfloat16()
    step = half(query[:1].bfloat16(), source.bfloat16(), Context(state={}))[0]
    assert step.dtype == torch.bfloat16


def test_weights_are_accurate_under_autocast():
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="decoder")
    q, k, v = (torch.randn(2, 2, 5, 6) for _ in "qkv")
    _, expected = attention.attend(q, k, v, Context(return_weights=True))
    with torch.autocast("cpu", torch.bfloat16):
        _, weights = attention.attend(q, k, v, Context(return_weights=True))
    assert torch.equal(weights, expected)


# Training and evaluation take one way.


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@every_map
def test_training_computes_what_evaluation_does(name, role):
    """Outputs, gradients, memory, padding."""
    options = OPTIONS.get(name, {}) | ({"performer_redraw": "never"} if name == "performer" else {})
    attention = ATTENTION_REGISTRY["linear"](
        12, 2, role=role, feature_map=name, feature_map_options=options, qk_norm="rms"
    ).double()
    for parameter in (*attention.q_norm.parameters(), *attention.k_norm.parameters()):
        nn.init.uniform_(parameter, 0.5, 1.5)
    x, source = torch.randn(5, 3, 12).double(), torch.randn(7, 3, 12).double()
    key = source if role == "cross" else x
    mask = torch.arange(len(key)) >= torch.tensor([len(key), 4, 1])[:, None]
    memory = torch.randn(4, 3, 12).double()
    found = []
    for training in (True, False):
        attention.train(training).zero_grad()
        out, _, _ = attention(x, key, Context(key_padding_mask=mask))
        outs = [out]
        if role == "decoder":
            outs.append(attention(x, None, Context(memory=memory))[0])
        sum(o.sin().sum() for o in outs).backward()
        found.append([*outs, *(p.grad.clone() for p in attention.parameters() if p.grad is not None)])
    for trained, evaluated in zip(*found, strict=True):
        torch.testing.assert_close(trained, evaluated)


class CubedElu(EluFeatureMap):
    def forward(self, x):
        return super().forward(x) ** 3


def test_a_subclass_of_a_feature_map_means_the_same_in_training_and_evaluation():
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="encoder")
    x = torch.randn(5, 3, 12)
    plain = attention.train()(x)[0]
    attention.feature_map = CubedElu(6)
    trained, evaluated = attention.train()(x)[0], attention.eval()(x)[0]
    assert torch.equal(trained, evaluated) and not torch.allclose(trained, plain, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["elu", "relu", "squared"])
def test_hooks_on_feature_map_and_norms_fire(name, training):
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="encoder", feature_map=name, qk_norm="l2").train(training)
    seen = []
    for part in ("feature_map", "q_norm", "k_norm"):
        getattr(attention, part).register_forward_hook(lambda *_, part=part: seen.append(part))
    attention(torch.randn(5, 3, 12))
    assert sorted(seen) == ["feature_map", "feature_map", "k_norm", "q_norm"]


@pytest.mark.parametrize("norm", ["none", "l1", "l2", "rms"])
@pytest.mark.parametrize("name", ["elu", "relu", "squared", "exp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_the_same_in_training_and_evaluation(name, norm, dtype):
    """Features and norms are float32 in both; the output is that of the rounded Queries, Keys and Values."""
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="encoder", feature_map=name, qk_norm=norm).to(dtype)
    x = torch.randn(5, 3, 12, dtype=dtype)
    trained = attention.train()(x)[0]
    assert trained.dtype == dtype and torch.equal(trained, attention.eval()(x)[0])
    q, k, v = (torch.randn(2, 2, 5, 6, dtype=dtype) for _ in "qkv")
    for module in (attention.feature_map.queries(q), attention._keys(k, None)):
        assert module.dtype == torch.float32
    got = attention.attend(q, k, v, Context())[0]
    exact = attention.float().attend(q.float(), k.float(), v.float(), Context())[0]
    assert torch.equal(got, exact.to(dtype))


def test_a_normalization_of_ones_own_is_applied_in_training():
    attention = ATTENTION_REGISTRY["linear"](12, 2, role="encoder")
    attention.q_norm = attention.k_norm = nn.Softmax(-1)
    x = torch.randn(5, 3, 12)
    expected = attention.eval()(x)[0]
    torch.testing.assert_close(attention.train()(x)[0], expected)


@pytest.mark.parametrize("norm", ["l1", "l2", "rms"])
@pytest.mark.parametrize("name", ["exp", "performer"])
def test_normalized_keys_neither_overflow_nor_vanish(name, norm):
    """A factor a Key cancels in its norm: with Values of 1 every output is 1, however long the Keys are."""
    width = 256
    options = {"performer_redraw": "never"} if name == "performer" else {}
    attention = ATTENTION_REGISTRY["linear"](
        width, 1, role="encoder", feature_map=name, feature_map_options=options, qk_norm=norm
    ).eval()
    q, v = torch.randn(1, 1, 3, width), torch.ones(1, 1, 5, width)
    for length in (1.0, 30.0, 300.0):
        k = length * torch.randn(1, 1, 5, width)
        torch.testing.assert_close(attention.attend(q, k, v, Context())[0], v[:, :, :3], rtol=0, atol=0.02)
    k = torch.randn(1, 1, 5, width, dtype=torch.float64)
    attention.double().k_norm.eps = 0.0
    torch.testing.assert_close(attention._keys(k, None), attention.k_norm(attention.feature_map.keys(k)))


def test_t2r_starts_as_a_linear_layer_without_biases():
    feature_map = build_feature_map("t2r", 16, t2r_features=32)
    for linear in (feature_map.query_map, feature_map.key_map):
        assert (linear.bias == 0).all()
        assert 0.9 / 4 < linear.weight.abs().max() <= 1 / 4  # U(±1/√D)

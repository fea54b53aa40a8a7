"""Norms of Queries and Keys at every stage, against formulas applied to the projections."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("fairseq")

import torch
from torch import Tensor

from fairseq_sg.analysis import record
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY

WIDTH, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 4, 5
D = WIDTH // HEADS


def affine(linear, x: Tensor) -> Tensor:
    return torch.einsum("fd,bhnd->bhnf", linear.weight, x) + linear.bias


def layer_norm(norm, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def products(y: Tensor) -> Tensor:
    """y_i y_j of all pairs i ≤ j; pairs of different ones count twice."""
    pairs = [(i, j) for i in range(D) for j in range(i, D)]
    return torch.stack([y[..., i] * y[..., j] * (1 if i == j else math.sqrt(2)) for i, j in pairs], dim=-1)


def dpfp(x: Tensor) -> Tensor:
    r = torch.cat([x.relu(), (-x).relu()], dim=-1)
    return torch.stack([r[..., i] * r[..., i - 1] for i in range(2 * D)], dim=-1)


def favor(omega: Tensor, x: Tensor) -> Tensor:
    x = x / D**0.25
    both = torch.cat([omega, -omega], dim=-1)
    return (x @ both - x.pow(2).sum(-1, keepdim=True) / 2).exp() / math.sqrt(both.size(-1))


def to_largest(features: Tensor) -> Tensor:
    return features / features.amax(-1, keepdim=True)


def performed(m, x: Tensor, scaled: bool) -> Tensor:
    features = favor(m.projection, x)
    return to_largest(features) / math.sqrt(m.features) if scaled else features


#: feature map -> φ(x) with the module's parameters. ``q``: of Queries, not Keys. ``scaled``: of Queries, and of Keys
#: before a normalization, which some maps divide by their largest feature.
FEATURES: dict[str, Callable] = {
    "elu": lambda m, x, q, scaled: torch.where(x > 0, x + 1, x.exp()),
    "identity": lambda m, x, q, scaled: x,
    "relu": lambda m, x, q, scaled: x.relu(),
    "squared": lambda m, x, q, scaled: x * x,
    "exp": lambda m, x, q, scaled: to_largest(x.exp()) if scaled else x.exp(),
    "performer": lambda m, x, q, scaled: performed(m, x, scaled),
    "dpfp": lambda m, x, q, scaled: dpfp(x),
    "cosformer": lambda m, x, q, scaled: cosformer(m, x),
    "t2r": lambda m, x, q, scaled: affine(m.query_map if q else m.key_map, x).relu(),
    "hedgehog": lambda m, x, q, scaled: hedgehog(affine(m.query_map if q else m.key_map, x)),
    "mlp": lambda m, x, q, scaled: mlp(m.query_map if q else m.key_map, x),
    "rebased": lambda m, x, q, scaled: products(layer_norm(m.query_norm if q else m.key_norm, x)) / math.sqrt(D),
    "taylor": lambda m, x, q, scaled: torch.cat(
        [torch.ones_like(x[..., :1]), x / D**0.25, products(x / D**0.25) / math.sqrt(2)], dim=-1
    ),
}


def cosformer(m, x: Tensor) -> Tensor:
    angles = torch.arange(x.size(2))[:, None] * math.pi / (2 * m.horizon)
    return torch.cat([x.relu() * angles.sin(), x.relu() * angles.cos()], dim=-1)


def mlp(layers, x: Tensor) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-6)
    return affine(layers[2], affine(layers[0], x).relu())


def hedgehog(y: Tensor) -> Tensor:
    return torch.cat([2 * y, -2 * y], dim=-1).softmax(-1)


#: --qk-norm -> what the features are divided by
DIVISORS = {
    "l1": lambda x: x.abs().sum(-1, keepdim=True),
    "l2": lambda x: x.pow(2).sum(-1, keepdim=True).sqrt(),
    "rms": lambda x: x.pow(2).mean(-1, keepdim=True).sqrt(),
}
OPTIONS = {"cosformer": {"cosformer_horizon": 9}}


def projected(linear, x: Tensor) -> Tensor:
    """x (N, B, C) -> the heads' (B, H, N, D)."""
    return (x @ linear.weight.T).unflatten(-1, (HEADS, D)).permute(1, 2, 0, 3)


def make(kind: str, role: str, **options):
    """An attention in evaluation mode with random parameters, in float64."""
    torch.manual_seed(3)
    attention = ATTENTION_REGISTRY.find(kind)(WIDTH, HEADS, role=role, **options).double().eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return attention


def norms_of(attention) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The recorded norms, and the projections by ``query`` and ``key``."""
    x = torch.randn(QUERIES, BATCH, WIDTH, dtype=torch.float64)
    y = torch.randn(KEYS, BATCH, WIDTH, dtype=torch.float64) if attention.role == "cross" else x
    with torch.no_grad(), record(torch.nn.ModuleList([attention]).eval()) as recording:
        attention(x, y)
        heads = {"query": projected(attention.q_proj, x), "key": projected(attention.k_proj, y)}
    (call,) = recording.attentions
    return call.norms, heads


def close(recorded: Tensor, vectors: Tensor) -> None:
    torch.testing.assert_close(recorded, vectors.pow(2).sum(-1).sqrt(), rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", ["none", *DIVISORS])
@pytest.mark.parametrize("feature_map", FEATURES)
def test_every_stage_of_linear_attention(feature_map, qk_norm):
    for role in ("encoder", "decoder", "cross"):
        options = {"feature_map_options": OPTIONS.get(feature_map, {})}
        attention = make("linear", role, feature_map=feature_map, qk_norm=qk_norm, **options)
        found, heads = norms_of(attention)
        stages = ["projected", "mapped"] + ["normalized"] * (qk_norm != "none")
        assert sorted(found) == sorted(f"{what}.{stage}" for what in heads for stage in stages)
        for what, norm in (("query", attention.q_norm), ("key", attention.k_norm)):
            query = what == "query"
            features = FEATURES[feature_map](attention.feature_map, heads[what], query, query or qk_norm != "none")
            close(found[f"{what}.projected"], heads[what])
            close(found[f"{what}.mapped"], features)
            if qk_norm != "none":
                divided = features / (DIVISORS[qk_norm](features) + 1e-6)
                close(found[f"{what}.normalized"], divided * getattr(norm, "weight", 1))
        assert not torch.equal(found["query.mapped"], found["key.mapped"])


def test_no_feature_map_and_no_normalization_is_left_out():
    registered = FEATURE_MAP_REGISTRY | QK_NORM_REGISTRY
    ours = {name for name, kind in registered.items() if kind.__module__.startswith("fairseq_sg.")}
    assert ours == {*FEATURES, *DIVISORS, "none"}


@torch.no_grad()
@pytest.mark.parametrize("kind,normalized", [("softmax", ""), ("galerkin", "key"), ("fourier", "query key")])
def test_kinds_without_a_feature_map(kind, normalized):
    attention = make(kind, "encoder")
    found, heads = norms_of(attention)
    expected = {"query.projected", "key.projected", *(f"{what}.normalized" for what in normalized.split())}
    assert set(found) == expected
    for what, vectors in heads.items():
        close(found[f"{what}.projected"], vectors)
    for what in normalized.split():
        norm = getattr(attention, f"{what[0]}_norm")
        close(found[f"{what}.normalized"], layer_norm(norm, heads[what]))

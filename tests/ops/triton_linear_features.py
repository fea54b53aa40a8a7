"""Linear attention in Triton on raw queries and keys: φ and normalization where they are loaded, against float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from ops_comparison import assert_all_close, make_mask, with_gradients
from test_linear_attention import make_state
from test_linear_features import MAPS, NORMS, make_raw, run_raw
from triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

from fairseq_sg.ops import force_implementation, linear_attention, linear_attention_read, linear_attention_state

kernels = importlib.import_module("fairseq_sg.ops.linear_attention.triton")

causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
WIDTHS = [5, 8, 16, 40]  # the last has two tiles in float32
# Every map and every norm at all widths.
MATRIX = [
    (feature_map, norm, WIDTHS[(row + column) % 4])
    for row, feature_map in enumerate(MAPS)
    for column, norm in enumerate(NORMS)
    if (feature_map, norm) != (None, None)
]
# Large, so that a row's own derivative along itself, which is of the order of ε in queries, is seen.
EPS = {"eps": 0.5, "norm_eps": 0.1}
pairs = pytest.mark.parametrize(
    ("feature_map", "norm"), [("elu", "rms"), ("relu", "l1"), ("squared", "l2"), ("elu", None)]
)


def with_state(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (batch, heads, _, features), width = inputs["q"].shape, inputs["v"].shape[3]
    return inputs | {name: x.float() for name, x in make_state(batch, heads, features, width, DEVICE).items()}


@pytest.mark.parametrize(("feature_map", "norm", "features"), MATRIX)
@causality
def test_values_and_gradients(feature_map, norm, features, causal):
    inputs = make_raw(1, 1, 34, 34, features, 5, feature_map, norm, DEVICE, torch.float32)
    compare(run_raw, inputs, "chunked", causal=causal, feature_map=feature_map, qk_norm=norm, **EPS)


@pairs
@causality
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(feature_map, norm, causal, dtype):
    """Features are float32, as exact as if raw numbers were float32."""
    inputs = make_raw(1, 1, 66, 66, 24, 8, feature_map, norm, DEVICE, dtype)
    compare(run_raw, inputs, "chunked", causal=causal, feature_map=feature_map, qk_norm=norm, **EPS)


@pairs
@causality
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_states_and_their_gradients(feature_map, norm, causal, normalize):
    """And values of two tiles."""
    inputs = with_state(make_raw(1, 1, 40, 40, 8, 40, feature_map, norm, DEVICE, torch.float32))
    options = {"feature_map": feature_map, "qk_norm": norm, "causal": causal, "normalize": normalize, **EPS}
    compare(run_raw, inputs, "chunked", return_state=True, **options)


@causality
@pytest.mark.parametrize("length", [1, 20])
def test_rms_without_weights_and_other_eps(causal, length):
    inputs = make_raw(1, 2, length, length, 8, 5, "elu", None, DEVICE, torch.float32)
    compare(run_raw, inputs, "chunked", causal=causal, feature_map="elu", qk_norm="rms")


@pairs
@causality
def test_content_of_padding_is_irrelevant(feature_map, norm, causal):
    inputs = make_raw(2, 1, 34, 34, 8, 5, feature_map, norm, DEVICE, torch.float32)
    mask = make_mask("right", 2, 34, DEVICE)
    options = {"causal": causal, "key_padding_mask": mask, "return_state": True}
    options |= {"feature_map": feature_map, "qk_norm": norm, **EPS}
    clean = compare(run_raw, inputs, "chunked", **options)
    for name in ("k", "v"):
        assert (clean[f"gradient of {name}"].masked_select(mask[:, None, :, None]) == 0).all(), name
    garbage = torch.tensor([1e9, float("inf"), float("nan"), -float("inf"), 1e30], device=DEVICE)
    poisoned = dict(inputs)
    for name in ("k", "v"):
        columns = garbage.repeat(2)[: inputs[name].shape[3]]
        poisoned[name] = torch.where(mask[:, None, :, None], columns, inputs[name])
    assert_all_close(with_gradients(run_raw("triton", **options), poisoned), clean, rtol=0, atol=0)


@pairs
@pytest.mark.parametrize(("padding", "features"), [("none", 70), ("left", 8)])
def test_step_by_step_equals_parallel(feature_map, norm, padding, features):
    length = 3
    inputs = make_raw(2, 2, length, length, features, 5, feature_map, norm, DEVICE, torch.float32)
    mask = make_mask(padding, 2, length, DEVICE)
    if mask is not None:
        inputs["k"].masked_fill_(mask[:, None, :, None], float("nan"))
        inputs["v"].masked_fill_(mask[:, None, :, None], float("nan"))
    function = run_raw("triton", causal=True, return_state=True, feature_map=feature_map, qk_norm=norm, **EPS)
    weights = {name: inputs.pop(name) for name in ("q_weight", "k_weight") if name in inputs}
    whole = function(**inputs, **weights, key_padding_mask=mask)
    state = {}
    for step in range(length):
        part = {name: x[:, :, step : step + 1] for name, x in inputs.items()}
        column = None if mask is None else mask[:, step : step + 1]
        done = function(**part, **weights, **state, key_padding_mask=column)
        torch.testing.assert_close(done["out"], whole["out"][:, :, step : step + 1], rtol=1e-5, atol=1e-5)
        state = {"S": done["final S"], "z": done["final z"]}
    assert_all_close(
        {n: done[n] for n in ("final S", "final z")}, {n: whole[n] for n in ("final S", "final z")}, 1e-5, 1e-5
    )


@pairs
@pytest.mark.parametrize("padding", ["none", "left"])
def test_folded_and_read(feature_map, norm, padding):
    inputs = make_raw(2, 1, 7, 40, 8, 5, feature_map, norm, DEVICE, torch.float32)
    mask = make_mask(padding, 2, 40, DEVICE)
    options = {"feature_map": feature_map, "qk_norm": norm, "norm_eps": 0.1}

    def folded(implementation):
        def function(q, k, v, q_weight=None, k_weight=None):
            with force_implementation(implementation):
                state = linear_attention_state(k, v, key_padding_mask=mask, k_weight=k_weight, **options)
                out = linear_attention_read(q, state, q_weight=q_weight, eps=0.5, **options)
                return {"S": state[0], "z": state[1], "out": out}

        return function

    compare(folded, inputs, "chunked")


def test_strided():
    inputs = make_raw(2, 2, 9, 9, 8, 5, "elu", "rms", DEVICE, torch.float32)
    weights = {name: inputs.pop(name) for name in ("q_weight", "k_weight")}
    function = run_raw("triton", causal=True, feature_map="elu", qk_norm="rms", **EPS)
    expected = with_gradients(function, inputs | weights)
    time_first = {name: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, x in inputs.items()}
    every_other = {name: x.repeat_interleave(2, dim=3)[..., ::2] for name, x in inputs.items()}
    strided_weights = {name: x.repeat_interleave(2)[::2] for name, x in weights.items()}
    for strided in (time_first, every_other):
        leaves = {name: x.detach().requires_grad_() for name, x in (strided | strided_weights).items()}
        assert not any(x.is_contiguous() for x in leaves.values())
        out = function(**leaves)["out"]
        assert torch.equal(out, expected["out"])
        weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = torch.autograd.grad((out.double() * weighting.to(out.device)).sum(), list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            assert torch.equal(gradient, expected[f"gradient of {name}"]), name


def test_as_many_kernels_as_without(monkeypatch):
    launched = count_launches(monkeypatch, kernels)
    options = {"causal": True, "implementation": "triton"}
    raw = {"feature_map": "elu", "qk_norm": "rms"}
    counts = []
    for extra in ({}, raw):
        inputs = make_raw(1, 2, 40, 40, 8, 5, None, None, DEVICE, torch.float32)
        launched.clear()
        out = linear_attention(**{n: x.requires_grad_() for n, x in inputs.items()}, **options, **extra)
        out.sum().backward()
        counts.append(sorted(launched))
    assert counts[0] == counts[1] and len(counts[0]) == 7


def test_features_are_not_kept():
    """Memory for the backward pass: q, k, v, out and a number for each position, as without."""
    inputs = make_raw(1, 2, 100, 100, 8, 5, "squared", "l2", DEVICE, torch.float32)
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.update({x.data_ptr(): x.numel()}), x)[1], lambda x: x
    ):
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        linear_attention(**leaves, causal=True, feature_map="squared", qk_norm="l2", implementation="triton")
    assert sum(kept.values()) <= 2 * 100 * (8 + 8 + 5 + 5 + 1)


def test_results_are_the_same_again():
    inputs = make_raw(1, 1, 40, 40, 40, 8, "elu", "rms", DEVICE, torch.float32)
    function = run_raw("triton", causal=True, return_state=True, feature_map="elu", qk_norm="rms")
    assert_all_close(with_gradients(function, inputs), with_gradients(function, inputs), rtol=0, atol=0)

"""Causal linear attention in Triton against float64: values, gradients, states, padding, strides, precision."""

from __future__ import annotations

import importlib

import pytest
import torch

from fairseq_sg.ops import linear_attention
from helpers.comparison import assert_all_close, make_mask, with_gradients
from helpers.operators.linear_attention import make, make_state, run
from helpers.triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

kernels = importlib.import_module("fairseq_sg.ops.linear_attention.triton")

# length, features, width: chunks are 32, and so are the largest tiles
SHAPES = [
    (1, 16, 16),
    (2, 8, 12),
    (31, 12, 8),
    (32, 16, 16),
    (33, 1, 1),
    (70, 16, 5),
    (20, 24, 40),
    (40, 64, 80),
    (5, 80, 64),
    (9, 256, 8),
    (9, 8, 256),
]


def made(*shape: int, dtype=torch.float32, state: bool = False) -> dict[str, torch.Tensor]:
    inputs = make(*shape, DEVICE, dtype)
    if state:
        batch, heads, _, _, features, width = shape
        inputs |= {name: x.float() for name, x in make_state(batch, heads, features, width, DEVICE).items()}
    return inputs


@pytest.mark.parametrize(("length", "features", "width"), SHAPES)
def test_values_and_gradients(length, features, width):
    compare(run, made(1, 2, length, length, features, width), "chunked", causal=True)


@pytest.mark.parametrize(("length", "features", "width"), [(1, 8, 12), (32, 16, 16), (45, 40, 8)])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_states_and_their_gradients(length, features, width, normalize):
    inputs = made(1, 2, length, length, features, width, state=True)
    options = {"causal": True, "normalize": normalize}
    compare(run, inputs, "chunked", **options, return_state=True)
    if normalize:  # without a denominator z is of no use
        compare(run, inputs, "chunked", **options)


@pytest.mark.parametrize("length", [7, 45])
@pytest.mark.parametrize("padding", ["left", "right", "one-row-full"])
def test_padding(length, padding):
    mask = make_mask(padding, 2, length, DEVICE)
    results = compare(run, made(2, 2, length, length, 8, 12), "chunked", causal=True, key_padding_mask=mask)
    for name in ("k", "v"):
        assert (results[f"gradient of {name}"].masked_select(mask[:, None, :, None]) == 0).all(), name
    if padding == "one-row-full":
        assert (results["out"][0] == 0).all()


def test_padding_with_states():
    inputs = made(2, 2, 40, 40, 8, 12, state=True)
    mask = make_mask("left", 2, 40, DEVICE)
    compare(run, inputs, "chunked", causal=True, key_padding_mask=mask, return_state=True)


@pytest.mark.parametrize("garbage", [1e9, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("length", [9, 40])
def test_content_of_padding_is_irrelevant(garbage, length):
    """Even where torch's way asks for finite numbers."""
    inputs = made(2, 1, length, length, 8, 5)
    mask = make_mask("right", 2, length, DEVICE)
    poisoned = dict(inputs)
    for name in ("k", "v"):
        poisoned[name] = inputs[name].masked_fill(mask[:, None, :, None], garbage)
    function = run("triton", causal=True, key_padding_mask=mask, return_state=True)
    assert_all_close(with_gradients(function, poisoned), with_gradients(function, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "features", "width"), [(1, 16, 16), (50, 80, 12), (70, 16, 24)])
def test_half_precision(dtype, length, features, width):
    inputs = made(1, 2, length, length, features, width, dtype=dtype, state=length != 50)
    compare(run, inputs, "chunked", causal=True, return_state=length == 70)


def test_gradients_that_cancel_in_half_precision():
    """With equal values nothing depends on q and k: an output rounded to float16 would show."""
    inputs = made(1, 2, 50, 50, 16, 16, dtype=torch.float16)
    inputs["v"] = inputs["v"][:, :, :1].repeat(1, 1, 50, 1)
    compare(run, inputs, "chunked", causal=True)


@pytest.mark.parametrize("of_queries", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision(of_queries):
    """As under autocast: features in float32 beside values in half precision, or the other way round."""
    inputs = made(1, 2, 40, 40, 16, 8)
    of_values = torch.bfloat16 if of_queries == torch.float32 else torch.float32
    inputs = {name: x.to(of_values if name == "v" else of_queries) for name, x in inputs.items()}
    results = compare(run, inputs, "chunked", causal=True, return_state=True)
    assert results["out"].dtype == of_values


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_non_contiguous(normalize):
    """Time first as a module has them, every other feature, and broadcast over the heads; gradients too."""
    inputs = made(2, 2, 33, 33, 8, 5)
    time_first = {name: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, x in inputs.items()}
    every_other = {name: x.repeat_interleave(2, dim=3)[..., ::2] for name, x in inputs.items()}
    options = {"causal": True, "normalize": normalize, "implementation": "triton"}
    expected = linear_attention(**inputs, **options)
    weighting = torch.randn(2, 2, 5, 33, device=DEVICE).transpose(2, 3)
    expected_gradients = torch.autograd.grad(
        (linear_attention(**{name: x.requires_grad_() for name, x in inputs.items()}, **options) * weighting).sum(),
        list(inputs.values()),
    )
    for strided in (time_first, every_other):
        leaves = {name: x.detach().requires_grad_() for name, x in strided.items()}
        assert not any(x.is_contiguous() for x in leaves.values())
        out = linear_attention(**leaves, **options)
        assert torch.equal(out, expected)
        gradients = torch.autograd.grad(out, list(leaves.values()), weighting)
        assert all(torch.equal(*pair) for pair in zip(gradients, expected_gradients, strict=True))
    shared = {name: x[:, :1].detach().expand(-1, 2, -1, -1) for name, x in inputs.items()}
    copied = {name: x.contiguous() for name, x in shared.items()}
    assert torch.equal(linear_attention(**shared, **options), linear_attention(**copied, **options))


@pytest.mark.parametrize("used", ["out", "final S", "final z"])
@pytest.mark.parametrize("length", [20, 40])
def test_gradients_where_only_one_result_is_used(used, length):
    inputs = made(1, 2, length, length, 8, 5, state=True)

    def only(implementation, **options):
        return lambda **tensors: {used: run(implementation, **options)(**tensors)[used]}

    def gradients(implementation, inputs):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        total = only(implementation, causal=True, return_state=True)(**leaves)[used].square().sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}

    exact = gradients("naive", {name: x.double() for name, x in inputs.items()})
    for name, gradient in gradients("triton", inputs).items():
        torch.testing.assert_close(gradient.double(), exact[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize(("features", "width"), [(8, 5), (80, 16)])
def test_step_by_step_equals_parallel(padding, normalize, features, width):
    length = 6
    inputs = made(2, 2, length, length, features, width)
    mask = make_mask(padding, 2, length, DEVICE)
    if mask is not None:
        inputs["k"].masked_fill_(mask[:, None, :, None], float("nan"))
    options = {"causal": True, "return_state": True, "normalize": normalize, "implementation": "triton"}
    whole, final = linear_attention(**inputs, key_padding_mask=mask, **options)
    state = None
    for step in range(length):
        part = {name: x[:, :, step : step + 1] for name, x in inputs.items()}
        column = None if mask is None else mask[:, step : step + 1]
        out, state = linear_attention(**part, key_padding_mask=column, state=state, **options)
        torch.testing.assert_close(out, whole[:, :, step : step + 1], rtol=1e-5, atol=1e-5)
    assert_all_close(dict(zip("Sz", state, strict=True)), dict(zip("Sz", final, strict=True)), 1e-5, 1e-5)


def test_a_step_leaves_the_incoming_state_as_it_was():
    inputs = made(1, 2, 1, 1, 8, 5)
    state = tuple(x.float() for x in make_state(1, 2, 8, 5, DEVICE).values())
    before = [x.clone() for x in state]
    linear_attention(**inputs, causal=True, state=state, return_state=True, implementation="triton")
    assert all(torch.equal(*pair) for pair in zip(state, before, strict=True))


def test_one_kernel_where_one_will_do(monkeypatch):
    """A forward pass that fits into a chunk; a long one takes two, and products of matrices are torch's."""
    launched = count_launches(monkeypatch, kernels)
    options = {"causal": True, "implementation": "triton"}
    linear_attention(**made(1, 2, 20, 20, 8, 5), **options)
    assert launched == ["_out_kernel"]
    launched.clear()
    linear_attention(**made(1, 2, 40, 40, 8, 5), **options)
    assert launched == ["_fold_kernel", "_out_kernel"]
    launched.clear()
    linear_attention(**made(1, 2, 40, 40, 8, 5), implementation="triton")
    state = tuple(x.float() for x in make_state(1, 2, 8, 5, DEVICE).values())
    linear_attention(**made(1, 2, 1, 1, 8, 5), **options, state=state, return_state=True)
    assert not launched


def test_nothing_but_inputs_and_outputs_is_kept():
    """Memory for the backward pass: q, k, v, out and a number for each position, and neither states nor scores."""
    inputs = {name: x.requires_grad_() for name, x in made(1, 2, 100, 100, 8, 5).items()}
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.update({x.data_ptr(): x.numel()}), x)[1], lambda x: x
    ):
        linear_attention(**inputs, causal=True, implementation="triton")
    assert sum(kept.values()) <= 2 * 100 * (8 + 8 + 5 + 5 + 1)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5)], ids=["no-sentence", "no-head"])
def test_empty_batches(shape):
    batch, heads, length = shape
    inputs = made(batch, heads, length, length, 8, 5)
    results = with_gradients(run("triton", causal=True, return_state=True), inputs)
    assert results["out"].shape == (batch, heads, length, 5) and results["final S"].shape == (batch, heads, 8, 5)


def test_causality_is_exact():
    inputs = made(1, 2, 70, 70, 4, 3)
    changed = {name: torch.cat((x[:, :, :40], x[:, :, 40:] * 100 + 1), dim=2) for name, x in inputs.items()}
    before, after = (linear_attention(**x, causal=True, implementation="triton") for x in (inputs, changed))
    assert torch.equal(before[:, :, :40], after[:, :, :40]) and not torch.equal(before[:, :, 40:], after[:, :, 40:])


def test_results_are_the_same_again():
    inputs = made(1, 2, 40, 40, 16, 8)
    function = run("triton", causal=True, return_state=True)
    assert_all_close(with_gradients(function, inputs), with_gradients(function, inputs), rtol=0, atol=0)


def test_autocast_changes_nothing():
    inputs = made(1, 2, 40, 40, 8, 5)
    function = run("triton", causal=True, return_state=True)
    outside = with_gradients(function, inputs)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        inside = with_gradients(function, inputs)
    assert_all_close(inside, outside, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    inputs = {name: x.requires_grad_() for name, x in made(1, 1, 5, 5, 2, 2).items()}
    out = linear_attention(**inputs, causal=True, implementation="triton")
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        torch.autograd.grad(out.square().sum(), list(inputs.values()), create_graph=True)


def test_bfloat16_sums_do_not_stall():
    ones = torch.ones(1, 1, 600, 1, dtype=torch.bfloat16, device=DEVICE)
    options = {"causal": True, "return_state": True, "normalize": False, "implementation": "triton"}
    out, (s, z) = linear_attention(ones, ones / 2, ones, **options)
    assert s.item() == z.item() == 300 and out[0, 0, 511].item() == 256


def test_features_beyond_half_precision():
    """Scores and sums of float16 features of 200 are beyond 65504."""
    inputs = {name: x * 200 for name, x in made(1, 1, 70, 70, 16, 8, dtype=torch.float16).items()}
    results = with_gradients(run("triton", causal=True), inputs)
    assert all(x.isfinite().all() for x in results.values())


def test_refused_with_the_reason():
    inputs = made(1, 1, 3, 3, 4, 4, dtype=torch.float64)
    message = "linear_attention cannot run its implementation 'triton' here: kernels take .*, not float64"
    with pytest.raises(ValueError, match=message):
        linear_attention(**inputs, implementation="triton")

"""Relative attention in Triton against float64: tiles, padding, causality, precision, strides."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from fairseq_sg.ops import relative_attention, relative_logits
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from fairseq_sg.ops.torch_attention import hidden_keys
from helpers.comparison import assert_all_close, make_mask, with_gradients
from helpers.operators.relative_attention import SHAPES, make, run
from helpers.pairs import pairs
from helpers.triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

kernels = importlib.import_module("fairseq_sg.ops.relative.triton")

causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
HALF = [torch.bfloat16, torch.float16]


@pairs(shape=SHAPES, causal=[True, False], padding=["none", "one-row-full"])
def test_values_and_gradients(shape, causal, padding):
    mask = make_mask(padding, shape[0], shape[3], DEVICE)
    inputs = make(shape, DEVICE, torch.float32)
    compare(run, inputs, "shift", causal=causal, key_padding_mask=mask, scale=0.3)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 32, 32, 16, 16, 16),
        (2, 1, 33, 70, 24, 12, 5),
        (1, 1, 40, 40, 80, 40, 16),
        (1, 1, 20, 20, 256, 256, 8),
        (1, 1, 9, 30, 5, 130, 8),
    ],
    ids=str,
)
@causality
def test_tiles_and_widths(shape, causal):
    mask = make_mask("right", shape[0], shape[3], DEVICE)
    compare(run, make(shape, DEVICE, torch.float32), "shift", causal=causal, key_padding_mask=mask)


def test_more_queries_than_keys():
    compare(run, make((1, 2, 70, 33, 8, 8, 8), DEVICE, torch.float32), "shift")


@pairs(dtype=HALF, causal=[True, False], shape=[(2, 1, 7, 7, 8, 8, 8), (1, 1, 70, 140, 40, 24, 16)])
def test_half_precision(dtype, causal, shape):
    mask = make_mask("left", shape[0], shape[3], DEVICE)
    compare(run, make(shape, DEVICE, dtype), "shift", causal=causal, key_padding_mask=mask)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_wide_in_half_precision(dtype):
    compare(run, make((1, 1, 20, 40, 200, 256, 8), DEVICE, dtype), "shift", causal=True)


@pairs(causal=[True, False], padding=["left", "one-row-full"], garbage=[1e9, math.inf, math.nan])
def test_what_stands_at_padding_is_not_read(causal, padding, garbage):
    inputs = make((2, 1, 6, 40, 4, 6, 4), DEVICE, torch.float32)
    mask = make_mask(padding, 2, 40, DEVICE)
    function = run("triton", causal=causal, key_padding_mask=mask)
    clean = with_gradients(function, inputs)
    hidden = mask[:, None, :, None]
    poisoned = {name: x.masked_fill(hidden, garbage) if name in "kv" else x for name, x in inputs.items()}
    assert_all_close(with_gradients(function, poisoned), clean, rtol=0, atol=0)
    for name in ("gradient of k", "gradient of v"):
        assert (clean[name].masked_select(hidden) == 0).all()
    if padding == "one-row-full":
        assert all((clean[name][0] == 0).all() for name in clean if name != "gradient of p")


def masks(shape, seed, **options):
    """K of a call with a seed: 0 where a weight is dropped, else 1 / (1 − probability); 0 where none is."""
    inputs = make(shape, DEVICE, torch.float32)
    batch, heads, _, keys = shape[:4]
    inputs["v"] = torch.eye(keys, device=DEVICE).expand(batch, heads, keys, keys).contiguous()
    weights = run("triton", **options | {"dropout_p": 0.0})(**inputs)["out"]
    torch.manual_seed(seed)
    dropped = run("triton", **options)(**inputs)["out"]
    return torch.where(weights > 0, dropped / weights, 0.0)


@pairs(
    causal=[True, False],
    padding=["none", "left", "one-row-full"],
    shape=[(2, 3, 9, 9, 4, 6, 4), (1, 2, 40, 70, 8, 8, 5)],
)
def test_dropout(causal, padding, shape):
    """Values and gradients are those of the equation with the masks that were drawn, in every kernel the same."""
    options = {"causal": causal, "key_padding_mask": make_mask(padding, shape[0], shape[3], DEVICE), "scale": 0.3}
    kept = masks(shape, 7, **options, dropout_p=0.25)
    torch.testing.assert_close(kept, (kept > 0) / 0.75, rtol=1e-5, atol=0)
    inputs = make(shape, DEVICE, torch.float32)

    def with_masks(q_content, q_position, k, v, p):
        logits = (q_content @ k.transpose(-1, -2) + relative_logits(q_position, p)) * options["scale"]
        n, m = logits.shape[2:]
        hidden = hidden_keys(n, m, options["key_padding_mask"], causal, m - n, DEVICE)
        hidden = torch.zeros_like(logits, dtype=torch.bool) if hidden is None else hidden.expand_as(logits)
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
        return {"out": (weights * kept) @ v}

    exact = with_gradients(with_masks, {name: x.double() for name, x in inputs.items()})
    torch.manual_seed(7)
    results = with_gradients(run("triton", **options, dropout_p=0.25), inputs)
    assert_all_close({name: x.double() for name, x in results.items()}, exact, rtol=2e-5, atol=2e-5)


def test_dropout_is_of_its_probability_and_independent_between_sentences_heads_and_calls():
    shape, options = (4, 3, 32, 32, 4, 4, 4), {"dropout_p": 0.25}
    kept = masks(shape, 1, **options) > 0
    assert abs(kept.float().mean() - 0.75) < 0.02 and (kept.float().mean((2, 3)) - 0.75).abs().max() < 0.06
    rows = kept.flatten(0, 1).flatten(1).float()  # a row for each sentence and head
    others = (masks(shape, 2, **options) > 0).flatten(0, 1).flatten(1).float()
    between = torch.corrcoef(torch.cat([rows, others])).fill_diagonal_(0)
    assert between.abs().max() < 0.15
    assert torch.equal(masks(shape, 1, **options) > 0, kept)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_dropout_in_half_precision(dtype):
    inputs = make((2, 2, 40, 40, 8, 8, 8), DEVICE, dtype)
    found = []
    for half in (True, False):
        torch.manual_seed(3)
        found.append(
            with_gradients(run("triton", dropout_p=0.5), inputs if half else {k: x.float() for k, x in inputs.items()})
        )
    near = 8 * torch.finfo(dtype).eps * max(float(x.abs().max()) for x in found[1].values())
    assert_all_close({name: x.float() for name, x in found[0].items()}, found[1], rtol=0, atol=near)


def test_everything_is_dropped():
    results = with_gradients(run("triton", dropout_p=1.0), make((1, 2, 5, 5, 4, 4, 4), DEVICE, torch.float32))
    assert all((x == 0).all() for x in results.values())


def test_large_logits():
    """Beyond what an exponential holds, and in tiles of either order; a logit x is known to x roundings."""
    inputs = make((1, 1, 70, 70, 8, 8, 8), DEVICE, torch.float32)
    inputs["k"][:, :, 20:40] *= 30
    inputs["k"][:, :, 50:] *= -60
    results = with_gradients(run("triton", scale=1.0), inputs)
    exact = with_gradients(run("naive", scale=1.0), {name: x.double() for name, x in inputs.items()})
    assert_all_close({name: x.double() for name, x in results.items()}, exact, rtol=2e-4, atol=2e-3)


@causality
def test_non_contiguous(causal):
    """Time first, every other dimension, broadcast over sentences, and a gradient that is transposed."""
    inputs = make((2, 2, 9, 9, 6, 8, 5), DEVICE, torch.float32)
    weighting = torch.randn(2, 2, 8, 9, device=DEVICE).transpose(2, 3)

    def results(inputs, weighting=weighting):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out = relative_attention(**leaves, causal=causal, implementation="triton")
        return {"out": out.detach()} | dict(zip(leaves, torch.autograd.grad(out, leaves.values(), weighting)))

    expected = results(inputs, weighting.contiguous())
    time_first = {name: x.transpose(0, -2).contiguous().transpose(0, -2) for name, x in inputs.items()}
    sparse = {name: x.repeat_interleave(2, dim=-1)[..., ::2] for name, x in inputs.items()}
    for strided in (time_first, sparse):
        assert not any(x.is_contiguous() for x in strided.values())
        assert_all_close(results(strided), expected, rtol=0, atol=0)
    shared = {name: x if name == "p" else x[:1].expand(2, -1, -1, -1) for name, x in inputs.items()}
    for out in results(shared)["out"]:
        torch.testing.assert_close(out, expected["out"][0], rtol=1e-6, atol=1e-6)


def test_autocast():
    inputs = make((2, 3, 5, 5, 8, 8, 8), DEVICE, torch.float32)
    expected = with_gradients(run("triton"), {name: x.bfloat16() for name, x in inputs.items()})
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        results = with_gradients(run("triton"), inputs)
    assert results["gradient of p"].dtype == torch.float32 and results["out"].dtype == torch.bfloat16
    assert_all_close({name: x.bfloat16() for name, x in results.items()}, expected, rtol=0, atol=0)


def test_three_kernels(monkeypatch):
    launched = count_launches(monkeypatch, kernels)
    with_gradients(run("triton"), make((2, 2, 9, 9, 4, 4, 4), DEVICE, torch.float32))
    assert launched == ["_out_kernel", "_grad_q_kernel", "_grad_k_v_kernel"]


def test_what_is_kept():
    """The inputs, the product of queries and distances, and the output; of each query a number."""
    batch, heads, queries, keys, dim, width, positional = shape = (2, 3, 9, 12, 4, 6, 5)
    leaves = {name: x.requires_grad_() for name, x in make(shape, DEVICE, torch.float32).items()}
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.update({x.untyped_storage().data_ptr(): x.numel()}), x)[1], lambda x: x
    ):
        relative_attention(**leaves, implementation="triton")
    rows = batch * heads * queries
    inputs = {x.data_ptr() for x in leaves.values()}
    # The product with p saves the queries heads first: a copy.
    extra = sorted(size for place, size in kept.items() if place not in inputs)
    assert extra == sorted([rows, rows * width, rows * (queries + keys - 1), rows * positional])


def test_empty_batch():
    results = with_gradients(run("triton"), make((0, 2, 5, 5, 4, 6, 4), DEVICE, torch.float32))
    assert results["out"].shape == (0, 2, 5, 6) and (results["gradient of p"] == 0).all()


@causality
def test_results_are_the_same_again(causal):
    inputs = make((1, 2, 40, 40, 8, 8, 8), DEVICE, torch.float32)
    assert_all_close(*(with_gradients(run("triton", causal=causal), inputs) for _ in range(2)), rtol=0, atol=0)


def test_second_derivatives_are_refused():
    leaves = {name: x.requires_grad_() for name, x in make((1, 1, 4, 4, 4, 4, 4), DEVICE, torch.float32).items()}
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        total = relative_attention(**leaves, implementation="triton").square().sum()
        torch.autograd.grad(total, leaves["k"], create_graph=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 1, 2, 2, 257, 4, 4), torch.float32, "keys have 257 dimensions and values 4, and 256 is the most"),
        ((1, 1, 2, 2, 4, 300, 4), torch.float32, "keys have 4 dimensions and values 300, and 256"),
        ((1, 1, 2, 2, 4, 4, 4), torch.float64, "not float64"),
    ],
    ids=["wide-keys", "wide-values", "float64"],
)
def test_refused_with_the_reason(shape, dtype, message):
    with pytest.raises(
        ValueError, match=f"relative_attention cannot run its implementation 'triton' here: .*{message}"
    ):
        relative_attention(**make(shape, DEVICE, dtype), implementation="triton")


@pytest.mark.parametrize("name", ["relative", "abs_rel"])
@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_in_an_attention(name, role, monkeypatch):
    """A whole attention of a model: with its projections, and decoding step by step."""
    module = ATTENTION_REGISTRY.find(name)(16, 2, role=role).to(DEVICE)
    x = torch.randn(7, 3, 16, device=DEVICE)
    mask = make_mask("left", 3, 7, DEVICE)

    def results(implementation):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, implementation)
        out = module(x, None, Context(key_padding_mask=mask)).output
        found = [out, *torch.autograd.grad(out.square().sum(), module.parameters())]
        if role == "decoder":
            context = Context(state={})
            with torch.no_grad():
                found += [module(part, None, context).output for part in x.split(1)]
        return found

    for actual, expected in zip(results("triton"), results("shift"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)

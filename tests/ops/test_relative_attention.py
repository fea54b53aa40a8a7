"""Relative attention: the definition, torch's paths against it, padding, causality, and the shapes that bite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_sg.ops import relative_attention
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, make_mask, with_gradients
from helpers.operators.relative_attention import SHAPES, make, run

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
paddings = pytest.mark.parametrize("padding", ["none", "left", "right", "one-row-full"])
in_torch = pytest.mark.parametrize("implementation", ["naive", "shift"])


def by_definition(q_content, q_position, k, v, p, *, causal, key_padding_mask, scale) -> torch.Tensor:
    """One query after the other, over the keys that it sees."""
    (batch, heads, queries, _), keys = q_content.shape, k.shape[2]
    out = torch.zeros(batch, heads, queries, v.shape[3], dtype=v.dtype)
    for b in range(batch):
        for h in range(heads):
            for n in range(queries):
                at = keys - queries + n
                seen = [
                    m
                    for m in range(keys)
                    if not (causal and m > at) and not (key_padding_mask is not None and key_padding_mask[b, m])
                ]
                logits = [
                    scale * float(q_content[b, h, n] @ k[b, h, m] + q_position[b, h, n] @ p[h, m - n + queries - 1])
                    for m in seen
                ]
                total = sum(math.exp(x) for x in logits)
                for m, x in zip(seen, logits, strict=True):
                    out[b, h, n] += math.exp(x) / total * v[b, h, m]
    return out


@shapes
@causality
@paddings
def test_equals_naive_with_gradients(shape, causal, padding, device):
    options = {"causal": causal, "key_padding_mask": make_mask(padding, shape[0], shape[3], device), "scale": 0.3}
    inputs = make(shape, device)
    actual, expected = (with_gradients(run(name, **options), inputs) for name in ("shift", "naive"))
    assert_all_close(actual, expected, 1e-11, 1e-12)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@causality
@paddings
def test_naive_is_the_definition(shape, causal, padding):
    options = {"causal": causal, "key_padding_mask": make_mask(padding, shape[0], shape[3], "cpu"), "scale": 0.3}
    inputs = make(shape, torch.device("cpu"))
    out = relative_attention(**inputs, **options, implementation="naive")
    torch.testing.assert_close(out, by_definition(**inputs, **options), rtol=1e-12, atol=1e-12)


@in_torch
def test_more_queries_than_keys(implementation, device):
    inputs = make((2, 2, 9, 4, 5, 3, 6), device)
    out = relative_attention(**inputs, scale=0.3, implementation=implementation)
    cpu = {name: x.cpu() for name, x in inputs.items()}
    expected = by_definition(**cpu, causal=False, key_padding_mask=None, scale=0.3)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-12, atol=1e-12)


@in_torch
@causality
def test_who_sees_nothing_gets_zeros_and_gives_no_gradient(implementation, causal, device):
    inputs = make((3, 2, 5, 8, 4, 6, 4), device)
    mask = make_mask("one-row-full", 3, 8, device)
    results = with_gradients(run(implementation, causal=causal, key_padding_mask=mask), inputs)
    for name in ("out", "gradient of q_content", "gradient of q_position", "gradient of k", "gradient of v"):
        assert (results[name][0] == 0).all() and (results[name][1:] != 0).any(), name
    others = {name: x if name == "p" else x[1:] for name, x in inputs.items()}
    without = relative_attention(**others, causal=causal, implementation=implementation)
    torch.testing.assert_close(results["out"][1:], without, rtol=1e-12, atol=1e-12)


@in_torch
@causality
@pytest.mark.parametrize("padding", ["left", "right", "one-row-full"])
def test_what_stands_at_padding_changes_nothing(implementation, causal, padding, device):
    inputs = make((3, 2, 6, 9, 4, 6, 4), device)
    mask = make_mask(padding, 3, 9, device)
    function = run(implementation, causal=causal, key_padding_mask=mask)
    clean = with_gradients(function, inputs)
    hidden = mask[:, None, :, None]
    garbage = {name: x.masked_fill(hidden, 1e9) if name in "kv" else x for name, x in inputs.items()}
    assert_all_close(with_gradients(function, garbage), clean, rtol=0, atol=0)
    for name in ("gradient of k", "gradient of v"):
        assert (clean[name].masked_select(hidden) == 0).all()


@in_torch
def test_causal_queries_are_the_last_of_the_keys(implementation, device):
    """A segment after its memory, or a step of decoding, gives rows of the whole."""
    length = 11
    inputs = make((2, 3, length, length, 8, 5, 4), device)
    whole = relative_attention(**inputs, causal=True, implementation=implementation)
    for start, end in ((0, 1), (4, 5), (3, 8), (10, 11), (6, 11)):
        part = {
            "q_content": inputs["q_content"][:, :, start:end],
            "q_position": inputs["q_position"][:, :, start:end],
            "k": inputs["k"][:, :, :end],
            "v": inputs["v"][:, :, :end],
            # Distances −(end − 1) … end − 1 − start of the whole −(length − 1) … length − 1.
            "p": inputs["p"][:, length - end : length + end - 1 - start],
        }
        rows = relative_attention(**part, causal=True, implementation=implementation)
        torch.testing.assert_close(rows, whole[:, :, start:end], rtol=1e-12, atol=1e-12)


@in_torch
def test_default_scale(implementation, device):
    inputs = make((2, 3, 5, 5, 9, 6, 4), device)
    named = relative_attention(**inputs, scale=1 / 3, implementation=implementation)
    torch.testing.assert_close(relative_attention(**inputs, implementation=implementation), named, rtol=0, atol=0)


@in_torch
@causality
def test_dropout_is_on_the_weights(implementation, causal, device):
    """With the identity as values, the output is the weights: dropped, or enlarged by 1 / (1 − probability)."""
    inputs = make((4, 3, 9, 16, 4, 16, 4), device)
    inputs["v"] = torch.eye(16, dtype=torch.float64, device=device).expand(4, 3, 16, 16).contiguous()
    options = {"causal": causal, "key_padding_mask": make_mask("left", 4, 16, device), "implementation": implementation}
    weights = relative_attention(**inputs, **options)
    torch.manual_seed(5)
    dropped = relative_attention(**inputs, **options, dropout_p=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, weights / 0.75, 0.0), rtol=1e-12, atol=1e-12)
    share = kept.sum() / (weights != 0).sum()
    assert 0.7 < share < 0.8
    assert (relative_attention(**inputs, **options, dropout_p=1.0) == 0).all()


@in_torch
def test_dropout_draws_from_torchs_generator(implementation, device):
    inputs, found = make((2, 3, 9, 9, 4, 6, 4), device), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(with_gradients(run(implementation, dropout_p=0.5), inputs))
    assert_all_close(found[0], found[1], 0, 0)
    assert not torch.equal(found[0]["out"], found[2]["out"])


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan])
def test_a_dropout_that_is_no_probability_is_refused(dropout_p):
    with pytest.raises(ValueError, match="dropout_p is a probability, from 0 to 1, not"):
        relative_attention(**make((1, 1, 2, 2, 2, 2, 2), torch.device("cpu")), dropout_p=dropout_p)


@pytest.mark.parametrize("shape", [(2, 2, 3, 3, 2, 2, 2), (1, 2, 1, 4, 3, 1, 2), (2, 1, 2, 4, 1, 2, 3)], ids=str)
@causality
def test_gradcheck(shape, causal, device):
    inputs = make(shape, device)
    mask = make_mask("left", shape[0], shape[3], device)
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert torch.autograd.gradcheck(lambda *x: relative_attention(*x, causal=causal, key_padding_mask=mask), leaves)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 9)] * 5),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(sizes, causal, seed, device):
    torch.manual_seed(seed)
    batch, heads, queries, more, *widths = sizes
    keys = queries + more - 1
    mask = (torch.rand(batch, keys) < 0.4).to(device)
    inputs = make((batch, heads, queries, keys, *widths), device)
    options = {"causal": causal, "key_padding_mask": mask, "scale": 0.7}
    actual, expected = (with_gradients(run(name, **options), inputs) for name in ("shift", "naive"))
    assert_all_close(actual, expected, 1e-10, 1e-11)


def test_non_contiguous_inputs(device):
    inputs = make((3, 4, 6, 6, 5, 7, 5), device)
    strided = {
        name: x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        if x.dim() == 3
        else x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        for name, x in inputs.items()
    }
    assert not any(x.is_contiguous() for x in strided.values())
    assert_all_close(run("shift")(**strided), run("naive")(**inputs), 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype, device):
    inputs = make((2, 3, 33, 40, 16, 16, 16), device, dtype)
    options = {"causal": True, "key_padding_mask": make_mask("left", 2, 40, device)}
    exact = with_gradients(run("naive", **options), {name: x.double() for name, x in inputs.items()})
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("shift", "naive"))
    assert_as_exact_as(fast, naive, exact)


@in_torch
def test_autocast_applies_as_to_attention_in_torch(implementation, device):
    inputs = make((2, 3, 5, 5, 8, 8, 8), device, torch.float32)
    half = {name: x.bfloat16() for name, x in inputs.items()}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        results = with_gradients(run(implementation), inputs)
    # With gradients too: torch has another kernel where none are wanted.
    expected = with_gradients(run(implementation), half)
    assert torch.equal(results["out"], expected["out"])
    assert all(x.dtype == torch.float32 for name, x in results.items() if name != "out")


def test_no_tensor_of_queries_keys_and_dimension(device):
    batch, heads, length, dim = shape = (2, 3, 64, 16)
    inputs = make((batch, heads, length, length, dim, dim, dim), device)
    with Operations() as operations:
        with_gradients(run("shift"), inputs)
    assert operations.largest <= batch * heads * length * (2 * length - 1), shape


@pytest.mark.parametrize("implementation", ["naive", "shift"])
def test_environment(implementation, device, monkeypatch):
    inputs = make((2, 3, 5, 5, 4, 6, 4), device, torch.float32)
    named = relative_attention(**inputs, implementation=implementation)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, implementation)
    assert torch.equal(relative_attention(**inputs), named)


def test_unknown_implementation_is_answered_with_the_choices():
    inputs = make((2, 3, 5, 5, 4, 6, 4), torch.device("cpu"))
    with pytest.raises(ValueError, match="relative_attention has no .*'scan'.*: auto, naive, shift, triton"):
        relative_attention(**inputs, implementation="scan")


def test_shapes_without_data():
    inputs = make((2, 3, 5, 7, 4, 6, 4), torch.device("cpu"), torch.float32)
    assert relative_attention(**{name: x.to("meta") for name, x in inputs.items()}).shape == (2, 3, 5, 6)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q_content", (2, 3, 5), r"takes q_content \(B, H, N, D\), .* not q_content \(2, 3, 5\), q_position"),
        ("p", (1, 3, 11, 4), r"and p \(H, N \+ M - 1, D'\), not .* p \(1, 3, 11, 4\)"),
        ("q_content", (2, 3, 5, 3), r"must agree .* q_content \(2, 3, 5, 3\)"),
        ("q_position", (2, 3, 4, 2), r"must agree .* q_position \(2, 3, 4, 2\)"),
        ("k", (2, 1, 7, 4), r"must agree .* k \(2, 1, 7, 4\)"),
        ("v", (2, 3, 6, 6), r"must agree .* v \(2, 3, 6, 6\)"),
        ("p", (3, 10, 2), r"a row for each of the N \+ M - 1 distances: .* p \(3, 10, 2\)"),
        ("p", (2, 11, 2), r"must agree .* p \(2, 11, 2\)"),
        ("p", (3, 11, 4), r"must agree .* p \(3, 11, 4\)"),
    ],
)
def test_wrong_shapes(name, shape, message):
    inputs = make((2, 3, 5, 7, 4, 6, 2), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        relative_attention(**inputs | {name: torch.zeros(shape, dtype=torch.float64)})


def test_causal_with_more_queries_than_keys_is_refused():
    with pytest.raises(ValueError, match="causal queries are the last of the keys"):
        relative_attention(**make((2, 3, 5, 4, 4, 6, 2), torch.device("cpu")), causal=True)


def test_wrong_dtypes():
    inputs = make((2, 3, 5, 7, 4, 6, 2), torch.device("cpu"))
    with pytest.raises(TypeError, match="k must be a floating-point tensor, not torch.int64"):
        relative_attention(**inputs | {"k": inputs["k"].long()})
    with pytest.raises(TypeError, match="tensors of one dtype, not torch.float64, torch.float64, torch.float32"):
        relative_attention(**inputs | {"k": inputs["k"].float()})
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        relative_attention(**inputs, key_padding_mask=torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(batch, length\) = \(2, 7\)"):
        relative_attention(**inputs, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))

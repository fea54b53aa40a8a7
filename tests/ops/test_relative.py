"""Relative logits: the shift trick against the explicit lookup, and what the positions mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_sg.ops import relative_attention, relative_logits
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.relative.shift import distance_product
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, with_gradients

IMPLEMENTATIONS = ["naive", "shift"]

# B, H, N, M, D
SHAPES = [
    (2, 3, 5, 5, 4),
    (1, 1, 1, 1, 1),
    (2, 3, 1, 9, 5),
    (2, 3, 9, 1, 5),
    (2, 2, 2, 2, 8),
    (1, 4, 7, 12, 16),
    (3, 2, 12, 7, 24),
    (1, 2, 65, 65, 8),
    (2, 3, 0, 3, 4),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-H{}-N{}-M{}-D{}".format(*s))
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def make(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    batch, heads, queries, keys, dim = shape
    q = torch.randn(batch, heads, queries, dim, dtype=torch.float64)
    p = torch.randn(heads, queries + keys - 1, dim, dtype=torch.float64)
    return {"q": q.to(device, dtype), "p": p.to(device, dtype)}


def run(implementation: str):
    return lambda q, p: {"logits": relative_logits(q, p, implementation=implementation)}


@shapes
def test_equals_naive_with_gradients(shape, device):
    inputs = make(shape, device)
    assert_all_close(with_gradients(run("shift"), inputs), with_gradients(run("naive"), inputs), 1e-12, 1e-12)


@shapes
@implementations
def test_explicit_formula(shape, implementation, device):
    """Every logit on its own, from the definition."""
    inputs = make(shape, device)
    out = relative_logits(**inputs, implementation=implementation)
    batch, heads, queries, keys, _ = shape
    assert out.shape == (batch, heads, queries, keys)
    for n in range(queries):
        for m in range(keys):
            expected = (inputs["q"][:, :, n] * inputs["p"][:, m - n + queries - 1]).sum(-1)
            torch.testing.assert_close(out[:, :, n, m], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys", "offset"), [(4, 4, 0), (3, 7, 4), (1, 6, 5), (2, 9, 3), (5, 2, 0)])
@implementations
def test_logit_belongs_to_the_distance_key_minus_query(queries, keys, offset, implementation, device):
    """With the distance itself as the positional key and queries of 1, the logits are the distances."""
    p = torch.arange(-(offset + queries - 1), keys - offset, dtype=torch.float64, device=device)[None, :, None]
    out = relative_logits(p.new_ones(1, 1, queries, 1), p, implementation=implementation)[0, 0]
    for n in range(queries):
        assert out[n].tolist() == [m - (offset + n) for m in range(keys)]


@implementations
def test_decoding_step_is_a_row_of_the_whole(implementation, device):
    length = 11
    inputs = make((2, 3, length, length, 8), device)
    whole = relative_logits(**inputs, implementation=implementation)
    for step in range(length):
        # The newest of step + 1 positions: distances -step … 0, of the -(length - 1) … length - 1 of the whole.
        p = inputs["p"][:, length - 1 - step : length]
        row = relative_logits(inputs["q"][:, :, step : step + 1], p, implementation=implementation)
        torch.testing.assert_close(row[:, :, 0], whole[:, :, step, : step + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 2, 3, 3, 2), (1, 2, 1, 4, 3), (2, 1, 4, 1, 2)], ids=str)
def test_gradcheck(shape, device):
    inputs = make(shape, device)
    assert torch.autograd.gradcheck(relative_logits, tuple(x.requires_grad_() for x in inputs.values()))


def test_non_contiguous_inputs(device):
    inputs = make((3, 4, 6, 8, 5), device)
    strided = {
        "q": inputs["q"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "p": inputs["p"].permute(1, 2, 0).contiguous().permute(2, 0, 1),
    }
    assert not strided["q"].is_contiguous() and not strided["p"].is_contiguous()
    assert_all_close(run("shift")(**strided), run("naive")(**inputs), 1e-12, 1e-12)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 4), (5, 5), (4, 7)])
def test_a_product_in_parts_is_the_same(queries, keys, parts, device):
    inputs = make((6, 2, queries, keys, 4), device)
    whole, cut = (with_gradients(lambda q, p, n=n: {"product": distance_product(q, p, n)}, inputs) for n in (1, parts))
    assert_all_close(cut, whole, 1e-12, 1e-12)
    # The order in memory that `relative_logits` reads.
    assert distance_product(**inputs, parts=parts).stride() == distance_product(**inputs, parts=1).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype, device):
    inputs = make((2, 3, 33, 40, 16), device, dtype)
    exact = with_gradients(run("naive"), {name: x.double() for name, x in inputs.items()})
    assert_as_exact_as(with_gradients(run("shift"), inputs), with_gradients(run("naive"), inputs), exact)


@implementations
def test_autocast_applies_as_to_any_product(implementation, device):
    inputs = make((2, 3, 5, 5, 8), device, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = relative_logits(**inputs, implementation=implementation)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), relative_logits(**inputs), rtol=3e-2, atol=3e-2)


def test_no_tensor_of_queries_keys_and_dimension(device):
    batch, heads, length, dim = shape = (2, 3, 64, 16)
    inputs = make((batch, heads, length, length, dim), device)
    with Operations() as operations:
        with_gradients(run("shift"), inputs)
    assert operations.largest <= batch * heads * length * (2 * length - 1), shape


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries=st.integers(1, 12), keys=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_shift_invariance(queries, keys, seed, device):
    """The same query and the same distance give the same logit, wherever the pair stands."""
    torch.manual_seed(seed)
    p = make((1, 2, queries, keys, 3), device)["p"]
    q = torch.randn(1, 2, 1, 3, dtype=torch.float64, device=device).expand(-1, -1, queries, -1)
    out = relative_logits(q, p)
    torch.testing.assert_close(out[:, :, 1:, 1:], out[:, :, :-1, :-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("q", "p", "message"),
    [
        ((2, 3, 5), (3, 9, 4), r"takes q \(B, H, N, D\) and p \(H, L, D\), not q \(2, 3, 5\), p \(3, 9, 4\)"),
        ((2, 3, 5, 4), (1, 3, 9, 4), r"takes q .* not q \(2, 3, 5, 4\), p \(1, 3, 9, 4\)"),
        ((2, 3, 5, 4), (2, 9, 4), r"agree in heads and head dimension: q \(2, 3, 5, 4\), p \(2, 9, 4\)"),
        ((2, 3, 5, 4), (3, 9, 6), r"agree in heads and head dimension: q \(2, 3, 5, 4\), p \(3, 9, 6\)"),
        ((2, 3, 5, 4), (3, 4, 4), r"at least N = 5: q \(2, 3, 5, 4\), p \(3, 4, 4\)"),
    ],
    ids=["q-rank", "p-rank", "heads", "dimension", "too-few-distances"],
)
def test_wrong_shapes(q, p, message):
    with pytest.raises(ValueError, match=message):
        relative_logits(torch.zeros(q), torch.zeros(p))


def test_wrong_dtype():
    with pytest.raises(TypeError, match=r"p must be a floating-point tensor, not torch.int64"):
        relative_logits(torch.zeros(2, 3, 5, 4), torch.zeros(3, 9, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    "shape,dtype,expected",
    [
        ((8, 1, 3, 2), torch.float32, "naive"),
        ((8, 1, 3, 2), torch.float64, "naive"),
        ((7, 1, 3, 2), torch.float32, "shift"),
        ((8, 1, 3, 3), torch.float32, "shift"),
        ((8, 1, 1, 2), torch.float32, "shift"),
        ((8, 1, 3, 2), torch.bfloat16, "shift"),
    ],
    ids=str,
)
def test_large_batches_look_positional_keys_up(shape, dtype, expected, monkeypatch):
    """On a CPU, from 4 sequences for each dimension; both operators."""
    ran = []
    for operator in ("relative_logits", "relative_attention"):
        for name in ("naive", "shift"):
            implementations = OPERATORS[operator].implementations
            monkeypatch.setitem(implementations, name, lambda *arguments, name=name: ran.append(name))
    q, p = torch.zeros(shape, dtype=dtype), torch.zeros(shape[1], 2 * shape[2] - 1, shape[3], dtype=dtype)
    relative_logits(q, p)
    relative_attention(q, q, q, q, p)
    assert ran == [expected] * 2

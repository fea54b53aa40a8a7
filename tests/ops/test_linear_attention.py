"""Linear attention: the fast path against the equations, states, padding, precision and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, make_mask, with_gradients
from helpers.operators.linear_attention import make, make_state, run

SMALLEST_EPS = 1.2e-38
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 100, 257]
implementations = pytest.mark.parametrize("implementation", ["naive", "chunked"])
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
paddings = pytest.mark.parametrize("padding", ["none", "left", "right", "one-row-full"])
properties = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_equals_naive(inputs: dict[str, Tensor], **options) -> None:
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("chunked", "naive"))
    assert_all_close(fast, naive, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", LENGTHS)
@causality
@paddings
def test_equals_naive(length, causal, padding, device):
    inputs = make(2, 2, length, length, 16, 16, device)
    assert_equals_naive(inputs, causal=causal, key_padding_mask=make_mask(padding, 2, length, device))


@pytest.mark.parametrize("length", LENGTHS)
@causality
@pytest.mark.parametrize("padding", ["none", "left"])
def test_equals_naive_with_states(length, causal, padding, device):
    inputs = make(2, 2, length, length, 8, 5, device) | make_state(2, 2, 8, 5, device)
    mask = make_mask(padding, 2, length, device)
    assert_equals_naive(inputs, causal=causal, key_padding_mask=mask, return_state=True)
    assert_equals_naive(inputs, causal=causal, key_padding_mask=mask)


@pytest.mark.parametrize("length", [1, 33, 64, 100])
@causality
def test_equals_naive_returning_the_first_state(length, causal, device):
    assert_equals_naive(make(1, 3, length, length, 8, 16, device), causal=causal, return_state=True)


@pytest.mark.parametrize(("features", "width"), [(5, 5), (8, 16), (16, 8), (24, 24), (5, 24), (40, 3), (1, 1)])
@pytest.mark.parametrize("length", [7, 100])
@causality
def test_equals_naive_for_head_dimensions(features, width, length, causal, device):
    assert_equals_naive(make(1, 2, length, length, features, width, device), causal=causal)


@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (7, 1), (50, 9), (9, 50), (33, 65), (130, 90)])
@paddings
def test_equals_naive_for_cross_attention(queries, keys, padding, device):
    inputs = make(2, 2, queries, keys, 16, 8, device)
    assert_equals_naive(inputs, key_padding_mask=make_mask(padding, 2, keys, device))


@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (3, 4), (33, 65), (40, 130), (0, 5)])
@paddings
@pytest.mark.parametrize("implementation", ["chunked", "naive"])
def test_causal_queries_are_the_last_of_the_keys(implementation, queries, keys, padding, device):
    """With more keys than queries: outputs, gradients and state are those of queries at all positions."""
    inputs = make(2, 2, keys, keys, 8, 5, device) | make_state(2, 2, 8, 5, device)
    options = dict(causal=True, key_padding_mask=make_mask(padding, 2, keys, device), return_state=True)
    last = run(implementation, **options)

    def all_of_them(q, **others):
        found = run("naive", **options)(q=q, **others)
        return found | {"out": found["out"][:, :, keys - queries :]}

    def last_of_them(q, **others):
        return last(q=q[:, :, keys - queries :], **others)

    got, expected = (with_gradients(function, inputs) for function in (last_of_them, all_of_them))
    assert_all_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [20, 100])
@causality
def test_equals_naive_without_denominator(length, causal, device):
    inputs = make(2, 2, length, length, 8, 5, device)
    assert_equals_naive(inputs, causal=causal, normalize=False)
    state = make_state(2, 2, 8, 5, device)
    assert_equals_naive(inputs | state, causal=causal, normalize=False, return_state=True)


def test_equals_naive_for_many_chunks(device):
    """More chunks than the matrix product of prefix sums is used for."""
    assert_equals_naive(make(1, 1, 1100, 1100, 4, 3, device) | make_state(1, 1, 4, 3, device), causal=True)


@pytest.mark.parametrize("length", [3, 35])
@causality
def test_gradcheck(length, causal, device):
    inputs = make(1, 1, length, length, 2, 3, device) | make_state(1, 1, 2, 3, device)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(inputs, tensors, strict=True))
        return tuple(run("chunked", causal=causal, return_state=True)(**named).values())

    assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs.values()))


@pytest.mark.parametrize("length", [5, 70])
@causality
def test_gradcheck_without_state(length, causal, device):
    tensors = tuple(x.requires_grad_() for x in make(1, 1, length, length, 2, 2, device).values())
    assert torch.autograd.gradcheck(lambda q, k, v: linear_attention(q, k, v, causal=causal), tensors)


@implementations
@causality
def test_equation(implementation, causal, device):
    """The definition, one query at a time, with an eps large enough to be seen."""
    inputs = make(1, 1, 6, 6, 3, 2, device)
    q, k, v = (x[0, 0] for x in inputs.values())
    out = linear_attention(**inputs, causal=causal, eps=0.5, implementation=implementation)[0, 0]
    for n in range(6):
        weights = k[: n + 1 if causal else 6] @ q[n]
        expected = (weights[:, None] * v[: len(weights)]).sum(0) / (weights.sum() + 0.5)
        torch.testing.assert_close(out[n], expected, rtol=1e-12, atol=1e-12)


@implementations
@causality
@pytest.mark.parametrize("padding", ["left", "right", "one-row-full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("length", [9, 100])
def test_content_of_padding_is_irrelevant(implementation, causal, padding, dtype, length, device):
    inputs = make(2, 2, length, length, 8, 8, device, dtype)
    mask = make_mask(padding, 2, length, device)
    huge = 6e4 if dtype == torch.float16 else 1e9
    poisoned = dict(inputs)
    for name in ("k", "v"):
        poisoned[name] = inputs[name].masked_fill(mask[:, None, :, None], huge)
    function = run(implementation, causal=causal, key_padding_mask=mask, return_state=True)
    assert_all_close(function(**poisoned), function(**inputs), rtol=0, atol=0)
    clean = with_gradients(function, inputs)
    assert all(gradient.isfinite().all() for gradient in clean.values())
    for name in ("k", "v"):
        assert (clean[f"gradient of {name}"].masked_select(mask[:, None, :, None]) == 0).all(), name


@implementations
@causality
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")], ids=str)
def test_features_of_padded_keys_may_be_anything(implementation, causal, garbage, device):
    """Neither outputs, states nor gradients take anything from them."""
    inputs = make(2, 2, 9, 9, 8, 5, device, torch.float32)
    mask = make_mask("right", 2, 9, device)
    poisoned = inputs | {"k": inputs["k"].masked_fill(mask[:, None, :, None], garbage)}
    function = run(implementation, causal=causal, key_padding_mask=mask, return_state=True)
    clean = with_gradients(function, inputs)
    assert_all_close(with_gradients(function, poisoned), clean, rtol=0, atol=0)
    assert (clean["gradient of k"].masked_select(mask[:, None, :, None]) == 0).all()
    states = [linear_attention_state(x["k"], x["v"], key_padding_mask=mask) for x in (inputs, poisoned)]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@implementations
@causality
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [6, 70])
def test_padded_in_a_batch_equals_alone(implementation, causal, side, length, device):
    alone = make(1, 2, length, length, 8, 5, device)
    padding, real = (slice(None, 9), slice(9, None)) if side == "left" else (slice(length, None), slice(length))
    padded = make(1, 2, length + 9, length + 9, 8, 5, device)
    for name, x in alone.items():
        padded[name][:, :, real] = x
    mask = torch.zeros(1, length + 9, dtype=torch.bool, device=device)
    mask[:, padding] = True
    out = linear_attention(**padded, causal=causal, key_padding_mask=mask, implementation=implementation)
    expected = linear_attention(**alone, causal=causal, implementation=implementation)
    torch.testing.assert_close(out[:, :, real], expected, rtol=1e-11, atol=1e-11)


@implementations
@causality
@pytest.mark.parametrize("length", [4, 70])
def test_query_without_keys_gives_zero(implementation, causal, length, device):
    inputs = make(2, 2, length, length, 8, 5, device)
    mask = make_mask("one-row-full", 2, length, device)
    results = with_gradients(run(implementation, causal=causal, key_padding_mask=mask), inputs)
    assert (results["out"][0] == 0).all() and (results["out"][1] != 0).all()
    assert all((results[f"gradient of {name}"][0] == 0).all() for name in ("k", "v"))
    assert all(x.isfinite().all() for x in results.values())


@implementations
@causality
@pytest.mark.parametrize("length", [1, 5, 70])
def test_no_sequences(implementation, causal, length, device):
    q, k, v = (torch.ones(0, 2, length, width, device=device, requires_grad=True) for width in (4, 4, 3))
    out, (s, z) = linear_attention(q, k, v, causal=causal, return_state=True, implementation=implementation)
    out.sum().backward()
    assert out.shape == v.shape == v.grad.shape and s.shape == (0, 2, 4, 3) and z.shape == (0, 2, 4)


@causality
@pytest.mark.parametrize("length", [20, 100])
def test_non_contiguous_inputs(causal, length, device):
    """As a module has them, time first, and every other position of a longer sequence."""
    inputs = make(2, 3, length, length, 8, 5, device)
    expected = run("naive", causal=causal, return_state=True)(**inputs)
    time_first = {name: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, x in inputs.items()}
    every_other = {name: x.repeat_interleave(2, dim=2)[:, :, ::2] for name, x in inputs.items()}
    for strided in (time_first, every_other):
        assert not any(x.is_contiguous() for x in strided.values())
        assert_all_close(run("chunked", causal=causal, return_state=True)(**strided), expected, 1e-9, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@causality
@pytest.mark.parametrize("length", [33, 100, 257])
def test_low_precision(dtype, causal, length, device):
    inputs = make(2, 2, length, length, 16, 16, device, dtype) | {
        name: x.float() for name, x in make_state(2, 2, 16, 16, device).items()
    }
    options = {"causal": causal, "return_state": True}
    exact = with_gradients(run("naive", **options), {name: x.double() for name, x in inputs.items()})
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("chunked", "naive"))
    assert fast["out"].dtype == dtype and fast["final S"].dtype == fast["final z"].dtype == torch.float32
    assert_as_exact_as(fast, naive, exact)


@implementations
@causality
def test_bfloat16_sums_do_not_stall(implementation, causal, device):
    """A sum of 4096 halves kept in bfloat16 never leaves 128."""
    half = torch.tensor(0.5, dtype=torch.bfloat16, device=device)
    assert 128 + half == 128
    halves, ones = half.expand(1, 1, 4096, 1), torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16, device=device)
    options = {"causal": causal, "return_state": True, "implementation": implementation}
    out, (s, z) = linear_attention(ones, halves, ones, normalize=False, **options)
    assert out[0, 0, -1].item() == s.item() == z.item() == 2048
    assert torch.equal(linear_attention(ones, halves, ones, eps=SMALLEST_EPS, **options)[0], ones)


def test_bfloat16_sums_do_not_stall_step_by_step(device):
    half = torch.full((1, 1, 1, 1), 0.5, dtype=torch.bfloat16, device=device)
    state = linear_attention_state(half, half)
    for _ in range(1023):
        out, state = linear_attention(half, half, half, causal=True, state=state, return_state=True)
    assert state[1].item() == 512 and state[0].item() == 256


@implementations
@causality
@pytest.mark.parametrize("length", [9, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(implementation, causal, length, dtype, device):
    inputs = make(2, 2, length, length, 8, 5, device, torch.float32)
    function = run(implementation, causal=causal, return_state=True)
    outside = function(**inputs)
    with torch.autocast(device.type, dtype=dtype):
        inside = function(**inputs)
        state = linear_attention_state(inputs["k"], inputs["v"])
        read = linear_attention_read(inputs["q"], state)
    assert all(x.dtype == torch.float32 for x in (*inside.values(), *state, read))
    assert_all_close(inside, outside, rtol=0, atol=0)
    torch.testing.assert_close(read, linear_attention(**inputs), rtol=1e-5, atol=1e-5)


@implementations
def test_out_has_the_dtype_of_the_values(implementation, device):
    """Under autocast a feature map may return float32 beside values in half precision."""
    inputs = make(2, 2, 40, 40, 8, 5, device, torch.float32)
    inputs["v"] = inputs["v"].bfloat16()
    out, state = linear_attention(**inputs, causal=True, return_state=True, implementation=implementation)
    assert out.dtype == torch.bfloat16 and {x.dtype for x in state} == {torch.float32}
    exact = linear_attention(**{name: x.double() for name, x in inputs.items()}, causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


@implementations
@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_one_input_of_float64_is_enough_for_sums_in_float64(wide, implementation, device):
    inputs = make(2, 2, 40, 40, 8, 5, device, torch.float32)
    exact, _ = linear_attention(**{n: x.double() for n, x in inputs.items()}, causal=True, return_state=True)
    inputs[wide] = inputs[wide].double()
    out, state = linear_attention(**inputs, causal=True, return_state=True, implementation=implementation)
    assert out.dtype == inputs["v"].dtype and {x.dtype for x in state} == {torch.float64}
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@implementations
@pytest.mark.parametrize("cuts", [(1,), (31, 33), (64,), (65, 66), (40, 41, 120)], ids=str)
def test_split_and_continue_equals_one_pass(implementation, cuts, device):
    length = 130
    inputs = make(2, 2, length, length, 8, 5, device)
    mask = make_mask("left", 2, length, device)
    options = {"causal": True, "return_state": True, "implementation": implementation}
    whole, final = linear_attention(**inputs, key_padding_mask=mask, **options)
    pieces, state = [], None
    for begin, end in zip((0, *cuts), (*cuts, length), strict=True):
        part = {name: x[:, :, begin:end] for name, x in inputs.items()}
        out, state = linear_attention(**part, key_padding_mask=mask[:, begin:end], state=state, **options)
        pieces.append(out)
    actual = {"out": torch.cat(pieces, dim=2), "S": state[0], "z": state[1]}
    assert_all_close(actual, {"out": whole, "S": final[0], "z": final[1]}, rtol=1e-10, atol=1e-10)


@implementations
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_step_by_step_equals_parallel(implementation, normalize, padding, device):
    length = 40
    inputs = make(3, 2, length, length, 8, 5, device)
    mask = make_mask(padding, 3, length, device)
    options = {"causal": True, "return_state": True, "normalize": normalize, "implementation": implementation}
    whole, final = linear_attention(**inputs, key_padding_mask=mask, **options)
    state = None
    for step in range(length):
        part = {name: x[:, :, step : step + 1] for name, x in inputs.items()}
        column = None if mask is None else mask[:, step : step + 1]
        out, state = linear_attention(**part, key_padding_mask=column, state=state, **options)
        torch.testing.assert_close(out, whole[:, :, step : step + 1], rtol=1e-10, atol=1e-10)
    assert_all_close(dict(zip("Sz", state, strict=True)), dict(zip("Sz", final, strict=True)), 1e-10, 1e-10)


@implementations
@causality
@pytest.mark.parametrize("length", [1, 20, 100])
@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_of_another_dtype_is_converted(implementation, causal, length, state_dtype, dtype, device):
    inputs = make(2, 2, length, length, 8, 5, device, dtype)
    state = {name: x.to(state_dtype) for name, x in make_state(2, 2, 8, 5, device).items()}
    results = run(implementation, causal=causal, return_state=True)(**inputs, **state)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in results.values()] == [dtype, accumulated, accumulated]
    exact = run("naive", causal=causal, return_state=True)(**{n: x.double() for n, x in (inputs | state).items()})
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    assert_all_close({n: x.double() for n, x in results.items()}, exact, rtol=tolerance, atol=tolerance)


@paddings
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_folded_then_read_equals_cross_attention(padding, normalize, device):
    """Values and gradients, and at every step of a decoder as for all queries at once."""
    inputs = make(2, 2, 7, 50, 8, 5, device)
    mask = make_mask(padding, 2, 50, device)

    def folded(q, k, v):
        state = linear_attention_state(k, v, key_padding_mask=mask)
        return {"out": linear_attention_read(q, state, normalize=normalize)}

    def stepwise(q, k, v):
        state = linear_attention_state(k, v, key_padding_mask=mask)
        reads = [linear_attention_read(q[:, :, n : n + 1], state, normalize=normalize) for n in range(q.shape[2])]
        return {"out": torch.cat(reads, dim=2)}

    expected = with_gradients(run("naive", key_padding_mask=mask, normalize=normalize), inputs)
    assert_all_close(with_gradients(folded, inputs), expected, rtol=1e-10, atol=1e-10)
    assert_all_close(with_gradients(stepwise, inputs), expected, rtol=1e-10, atol=1e-10)


def test_folded_state_is_the_final_state(device):
    inputs = make(2, 2, 50, 50, 8, 5, device)
    expected = run("naive", causal=True, return_state=True)(**inputs)
    s, z = linear_attention_state(inputs["k"], inputs["v"])
    assert_all_close({"S": s, "z": z}, {"S": expected["final S"], "z": expected["final z"]}, 1e-11, 1e-11)


def test_reading_in_half_precision_returns_it(device):
    inputs = make(2, 2, 7, 50, 8, 5, device, torch.bfloat16)
    state = linear_attention_state(inputs["k"], inputs["v"])
    out = linear_attention_read(inputs["q"], state)
    assert {x.dtype for x in state} == {torch.float32} and out.dtype == torch.bfloat16
    assert torch.equal(out, linear_attention(**inputs, implementation="naive"))


@implementations
@pytest.mark.parametrize(("length", "t"), [(20, 11), (150, 70), (1100, 1031)])
def test_causality_is_exact(implementation, length, t, device):
    """Nothing at or after position t reaches an earlier output, not even in the last bit."""
    inputs = make(1, 2, length, length, 4, 3, device, torch.float32)
    changed = {name: torch.cat((x[:, :, :t], x[:, :, t:] * 100 + 1), dim=2) for name, x in inputs.items()}
    options = {"causal": True, "implementation": implementation}
    before, after = linear_attention(**inputs, **options), linear_attention(**changed, **options)
    assert torch.equal(before[:, :, :t], after[:, :, :t])
    assert not torch.equal(before[:, :, t:], after[:, :, t:])
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    earlier = linear_attention(**leaves, **options)[:, :, :t].sum()
    for name, gradient in zip(leaves, torch.autograd.grad(earlier, list(leaves.values())), strict=True):
        assert (gradient[:, :, t:] == 0).all(), f"gradient of {name}"


@properties
@given(length=st.integers(1, 90), value=st.floats(-100, 100), causal=st.booleans(), seed=st.integers(0, 2**16))
def test_constant_values_come_out_constant(length, value, causal, seed, device):
    torch.manual_seed(seed)
    inputs = make(1, 2, length, length, 4, 3, device)
    inputs["v"].fill_(value)
    out = linear_attention(**inputs, causal=causal, eps=SMALLEST_EPS)
    torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-12, atol=1e-12)


@properties
@given(queries=st.integers(1, 40), keys=st.integers(1, 80), seed=st.integers(0, 2**16))
def test_full_form_knows_no_order(queries, keys, seed, device):
    """Permuted queries give permuted outputs; permuted keys with their values and mask change nothing."""
    torch.manual_seed(seed)
    inputs = make(2, 2, queries, keys, 4, 3, device)
    mask = make_mask("right", 2, keys, device)
    out = linear_attention(**inputs, key_padding_mask=mask)
    of_queries, of_keys = torch.randperm(queries, device=device), torch.randperm(keys, device=device)
    permuted = {name: x[:, :, of_queries if name == "q" else of_keys] for name, x in inputs.items()}
    again = linear_attention(**permuted, key_padding_mask=mask[:, of_keys])
    torch.testing.assert_close(again, out[:, :, of_queries], rtol=1e-11, atol=1e-11)


@properties
@given(length=st.integers(1, 90), causal=st.booleans(), padding=st.booleans(), seed=st.integers(0, 2**16))
def test_weights_are_a_distribution(length, causal, padding, seed, device):
    """With the identity for values the output is the weights: not negative, 0 at padding, of sum 1."""
    torch.manual_seed(seed)
    inputs = make(1, 2, length, length, 4, 1, device)
    inputs["v"] = torch.eye(length, dtype=torch.float64, device=device).expand(1, 2, -1, -1)
    mask = make_mask("right", 1, length, device) if padding else None
    weights = linear_attention(**inputs, causal=causal, key_padding_mask=mask, eps=SMALLEST_EPS)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-12, atol=1e-12)
    if padding:
        assert (weights.masked_select(mask[:, None, None, :]) == 0).all()
    if causal:
        assert (weights.triu(1) == 0).all()


@causality
def test_memory_is_linear(causal, device):
    """Forward and backward, nothing larger than a few times the inputs is made, let alone N × N."""
    length = 2048
    inputs = make(1, 1, length, length, 16, 16, device)
    with Operations() as operations:
        with_gradients(run("chunked", causal=causal), inputs)
    assert operations.largest <= 40 * length


def test_a_decoding_step_is_six_operations(device):
    inputs = make(4, 8, 1, 1, 16, 16, device, torch.float32)
    state = linear_attention_state(inputs["k"], inputs["v"])
    with Operations() as operations:
        linear_attention(**inputs, causal=True, state=state, return_state=True)
    assert len(operations.names) <= 6, operations.names
    with Operations() as operations:
        linear_attention_read(inputs["q"], state)
    assert len(operations.names) <= 4, operations.names


Q, K, V = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "message"),
    [
        (Q[1:], K, V, {}, r"takes q \(B, H, N, F\), .* not q \(3, 5, 4\), k \(2, 3, 7, 4\), v \(2, 3, 7, 6\)"),
        ((2, 1, 5, 4), K, V, {}, r"agree in batch and heads: q \(2, 1, 5, 4\)"),
        (Q, K, (1, 3, 7, 6), {}, r"agree in batch and heads: .* v \(1, 3, 7, 6\)"),
        ((2, 3, 5, 8), K, V, {}, r"same number of features: q \(2, 3, 5, 8\), k \(2, 3, 7, 4\)"),
        (Q, K, (2, 3, 8, 6), {}, r"same length: .*k \(2, 3, 7, 4\), v \(2, 3, 8, 6\)"),
        (K, Q, (2, 3, 5, 6), {"causal": True}, r"no more of them: q \(2, 3, 7, 4\), k \(2, 3, 5, 4\)"),
        (Q, K, V, {"key_padding_mask": torch.zeros(2, 5) > 0}, r"must be \(batch, length\) = \(2, 7\), not \(2, 5\)"),
        (
            Q,
            K,
            V,
            {"state": (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4))},
            r"must be S \(2, 3, 4, 6\), z \(2, 3, 4\), not S \(2, 3, 4, 5\), z \(2, 3, 4\)",
        ),
    ],
    ids=["rank", "heads", "batch", "features", "length", "causal", "mask", "state"],
)
def test_wrong_shapes(q, k, v, options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), **options)


def test_wrong_shapes_of_the_folded_form():
    with pytest.raises(ValueError, match=r"must be S \(2, 3, 4, 6\), z \(2, 3, 4\), not S \(2, 3, 8, 6\)"):
        linear_attention_read(torch.zeros(Q), (torch.zeros(2, 3, 8, 6), torch.zeros(2, 3, 8)))
    with pytest.raises(ValueError, match=r"same length: .*k \(2, 3, 5, 4\), v \(2, 3, 7, 6\)"):
        linear_attention_state(torch.zeros(Q), torch.zeros(V))


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"k must be a floating-point tensor, not torch.int64"):
        linear_attention(torch.zeros(Q), torch.zeros(K, dtype=torch.int64), torch.zeros(V))
    with pytest.raises(TypeError, match=r"key_padding_mask must be bool, True at padding, not torch.float32"):
        linear_attention(torch.zeros(Q), torch.zeros(K), torch.zeros(V), key_padding_mask=torch.zeros(2, 7))


@pytest.mark.parametrize("length", [1, 16, 33, 48, 49, 70])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("used", ["out", "final S", "final z"])
def test_gradients_of_one_output_alone(length, normalize, used, device):
    """The output without the final state, and one half of the state without the output."""
    inputs = make(2, 2, length, length, 8, 5, device) | make_state(2, 2, 8, 5, device)
    options = {"causal": True, "return_state": True, "normalize": normalize}

    def gradients(implementation: str) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out = run(implementation, **options)(**leaves)[used]
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=device).view(out.shape)
        found = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
        return {name: 0 * x if g is None else g for (name, x), g in zip(inputs.items(), found, strict=True)}

    assert_all_close(gradients("chunked"), gradients("naive"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [5, 70])
def test_second_derivatives_are_those_of_the_naive_implementation_alone(length, device):
    q, k, v = (x.requires_grad_() for x in make(1, 2, length, length, 3, 2, device).values())
    with pytest.raises(RuntimeError, match="no second derivative .* implementation='naive' has one"):
        torch.autograd.grad(linear_attention(q, k, v, causal=True).sum(), q, create_graph=True)
    out = linear_attention(q, k, v, causal=True, implementation="naive")
    (first,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
    assert (torch.autograd.grad(first.square().sum(), k)[0] != 0).all()


@pytest.mark.parametrize("length", [49, 70, 97])
def test_gradients_with_the_smallest_eps(length, device):
    """Lengths that are no multiple of a chunk: the positions that fill up the last one are not divided by 0."""
    assert_equals_naive(make(1, 2, length, length, 8, 5, device), causal=True, eps=SMALLEST_EPS)


@implementations
@causality
@pytest.mark.parametrize("eps", [0.0, -1e-6, 1e-45, float("nan")])
def test_eps_that_gives_no_zero_for_a_row_of_padding_is_refused(implementation, causal, eps, device):
    inputs = make(1, 1, 3, 3, 2, 2, device)
    with pytest.raises(ValueError, match="eps must be positive"):
        linear_attention(**inputs, causal=causal, eps=eps, implementation=implementation)
    with pytest.raises(ValueError, match="eps must be positive"):
        linear_attention_read(inputs["q"], linear_attention_state(inputs["k"], inputs["v"]), eps=eps)
    linear_attention(**inputs, causal=causal, eps=eps, normalize=False, implementation=implementation)


@implementations
@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_of_padding_is_exactly_zero_with_the_smallest_eps(implementation, causal, dtype, device):
    inputs = make(2, 2, 5, 5, 8, 3, device, dtype)
    mask = make_mask("one-row-full", 2, 5, device)
    options = {"causal": causal, "key_padding_mask": mask, "eps": SMALLEST_EPS}
    results = with_gradients(run(implementation, **options), inputs)
    assert (results["out"][0] == 0).all() and all(x[1].isfinite().all() for x in results.values())


@implementations
@causality
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no-state"])
def test_length_zero(implementation, causal, with_state, device):
    inputs = make(2, 3, 0, 0, 4, 5, device)
    state = make_state(2, 3, 4, 5, device) if with_state else {}
    out, (s, z) = linear_attention(
        **inputs,
        causal=causal,
        state=tuple(state.values()) or None,
        return_state=True,
        implementation=implementation,
    )
    assert out.shape == (2, 3, 0, 5)
    assert torch.equal(s, state["S"]) if with_state else (s.shape == (2, 3, 4, 5) and (s == 0).all())
    assert torch.equal(z, state["z"]) if with_state else (z.shape == (2, 3, 4) and (z == 0).all())


@pytest.mark.parametrize("length", [20, 100])
def test_gradients_of_non_contiguous_inputs_and_losses(length, device):
    """As a module has them, time first, on both sides."""
    inputs = {name: x.transpose(1, 2).contiguous() for name, x in make(2, 3, length, length, 8, 5, device).items()}

    def function(implementation):
        def call(**named):
            out = linear_attention(
                *(x.transpose(1, 2) for x in named.values()), causal=True, implementation=implementation
            )
            return {"out": out.transpose(1, 2)}

        return call

    fast, naive = (with_gradients(function(name), inputs) for name in ("chunked", "naive"))
    assert_all_close(fast, naive, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [9, 100])
def test_backward_within_autocast_changes_nothing(length, device):
    inputs = [x.requires_grad_() for x in make(2, 2, length, length, 8, 5, device, torch.float32).values()]
    outside = torch.autograd.grad(linear_attention(*inputs, causal=True).sum(), inputs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(linear_attention(*inputs, causal=True).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))

"""Geometric attention: both implementations against a walk over the keys, and what the closest match means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_sg.ops import geometric_attention
from fairseq_sg.ops.geometric import scan
from fairseq_sg.ops.geometric.scan import nearest_first
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, make_mask, with_gradients
from helpers.operators.geometric import SHAPES, make, run, walk

implementations = pytest.mark.parametrize("implementation", ["naive", "scan"])
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
paddings = pytest.mark.parametrize("padding", ["none", "left", "right", "one-row-full"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-H{}-N{}-M{}-offset{}".format(*s))


@shapes
@causality
@paddings
@implementations
def test_equals_the_walk(shape, causal, padding, implementation, device):
    (logits,) = make(shape, device).values()
    mask = make_mask(padding, shape[0], shape[3], device)
    options = {"causal": causal, "offset": shape[4], "key_padding_mask": mask}
    weights = geometric_attention(logits, implementation=implementation, **options)
    torch.testing.assert_close(weights.cpu(), walk(logits, **options), rtol=1e-12, atol=1e-15)


@shapes
@causality
@paddings
def test_equals_naive_with_gradients(shape, causal, padding, device):
    inputs = make(shape, device)
    options = {"causal": causal, "offset": shape[4], "key_padding_mask": make_mask(padding, shape[0], shape[3], device)}
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("scan", "naive"))
    assert_all_close(fast, naive, rtol=1e-11, atol=1e-13)


@implementations
def test_of_two_at_one_distance_the_right_is_closer(implementation, device):
    """With P = ½ a weight is ½ to the power of its turn."""
    halves = torch.zeros(1, 1, 5, 5, device=device)
    turns = torch.tensor([[0, 1, 2, 3, 4], [2, 0, 1, 3, 4], [4, 2, 0, 1, 3], [4, 3, 2, 0, 1], [4, 3, 2, 1, 0]])
    expected = (0.5**turns).masked_fill(turns == 0, 0.0).to(device)
    assert torch.equal(geometric_attention(halves, implementation=implementation)[0, 0], expected)
    expected = torch.tensor([[0, 0, 0, 0], [1 / 2, 0, 0, 0], [1 / 4, 1 / 2, 0, 0], [1 / 8, 1 / 4, 1 / 2, 0]])
    causal = geometric_attention(halves[..., :4, :4], causal=True, implementation=implementation)
    assert torch.equal(causal[0, 0], expected.to(device))


def test_order_and_rank_are_inverse_permutations(device):
    for queries, keys, offset in ((6, 6, 0), (1, 7, 3), (4, 9, 5)):
        order, rank = nearest_first(queries, keys, offset, device)
        every = torch.arange(keys, device=device).expand(queries, keys)
        assert torch.equal(order.sort(dim=1).values, every) and torch.equal(order.gather(1, rank), every)


@implementations
@causality
def test_a_sure_match_hides_all_behind_it(implementation, causal, device):
    (logits,) = make((1, 1, 1, 9, 4), device).values()
    logits[..., 2] = math.inf  # seen from 4: behind 5, 3 and 6
    weights = geometric_attention(logits, causal=causal, offset=4, implementation=implementation)[0, 0, 0]
    reached = [3, 2] if causal else [5, 3, 6, 2]
    assert {j for j in range(9) if weights[j] > 0} == set(reached)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert weights[2].item() == pytest.approx((1 - logits.sigmoid())[0, 0, 0, reached[:-1]].prod().item(), rel=1e-9)


@implementations
@causality
@paddings
def test_a_row_sums_to_the_probability_of_any_match(implementation, causal, padding, device):
    (logits,) = make((2, 2, 12, 12, 0), device).values()
    mask = make_mask(padding, 2, 12, device)
    weights = geometric_attention(logits, causal=causal, key_padding_mask=mask, implementation=implementation)
    hidden = torch.ones(12, 12, dtype=torch.bool, device=device).triu() if causal else torch.eye(12, device=device) > 0
    if mask is not None:
        hidden = hidden | mask[:, None, None, :]
    no_match = logits.masked_fill(hidden, -math.inf).neg().sigmoid().prod(-1)
    torch.testing.assert_close(weights.sum(-1), 1 - no_match, rtol=1e-12, atol=1e-12)
    assert (weights.sum(-1) <= 1 + 1e-12).all() and (weights >= 0).all()
    assert (weights.masked_select(hidden) == 0).all()


@implementations
@causality
@pytest.mark.parametrize("garbage", [1e9, -1e9, math.inf, -math.inf, math.nan])
def test_what_is_hidden_changes_nothing(implementation, causal, garbage, device):
    """The diagonal, padding, and in the causal form what lies ahead: no effect, no gradient."""
    inputs = make((2, 2, 9, 9, 0), device)
    mask = make_mask("left", 2, 9, device)
    i, j = torch.arange(9, device=device)[:, None], torch.arange(9, device=device)
    hidden = ((j >= i if causal else j == i) | mask[:, None, None, :]).expand(2, 2, 9, 9)
    function = run(implementation, causal=causal, key_padding_mask=mask)
    clean = with_gradients(function, inputs)
    poisoned = with_gradients(function, {"logits": inputs["logits"].masked_fill(hidden, garbage)})
    assert_all_close(poisoned, clean, rtol=0, atol=0)
    assert (clean["gradient of logits"][hidden] == 0).all()
    assert (clean["gradient of logits"][~hidden] != 0).any()


@implementations
@causality
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_in_a_batch_equals_alone(implementation, causal, side, device):
    (alone,) = make((1, 2, 6, 6, 0), device).values()
    real = slice(3, None) if side == "left" else slice(6)
    (padded,) = make((1, 2, 9, 9, 0), device).values()
    padded[:, :, real, real] = alone
    mask = torch.ones(1, 9, dtype=torch.bool, device=device)
    mask[:, real] = False
    got = geometric_attention(padded, causal=causal, key_padding_mask=mask, implementation=implementation)
    expected = geometric_attention(alone, causal=causal, implementation=implementation)
    torch.testing.assert_close(got[:, :, real, real], expected, rtol=1e-12, atol=1e-15)


@implementations
@causality
@pytest.mark.parametrize("row", [0, 4, 8])
def test_nan_stays_in_its_row(implementation, causal, row, device):
    """As for a query that is padding, whose row is not read."""
    inputs = make((2, 2, 9, 9, 0), device)
    others = [n for n in range(9) if n != row]
    clean = with_gradients(run(implementation, causal=causal), inputs)
    inputs["logits"][:, :, row] = math.nan
    found = with_gradients(run(implementation, causal=causal), inputs)
    assert_all_close(*({k: x[:, :, others] for k, x in results.items()} for results in (found, clean)), rtol=0, atol=0)


@implementations
def test_a_query_without_keys_gives_zeros(implementation, device):
    for options in ({"causal": True}, {"key_padding_mask": torch.ones(2, 4, dtype=torch.bool, device=device)}):
        results = with_gradients(run(implementation, **options), make((2, 2, 4, 4, 0), device))
        assert all((x[:, :, 0] == 0).all() for x in results.values())
    assert geometric_attention(torch.randn(1, 1, 1, 1, device=device), implementation=implementation).item() == 0


@implementations
@causality
def test_rows_by_themselves_equal_rows_of_the_whole(implementation, causal, device):
    """One or several queries among all keys; a causal decoder's keys end with the newest query."""
    (logits,) = make((2, 3, 11, 11, 0), device).values()
    mask = make_mask("left", 2, 11, device)
    whole = geometric_attention(logits, causal=causal, key_padding_mask=mask)
    for begin, end in ((0, 1), (0, 4), (3, 4), (5, 9), (10, 11)):
        keys = end if causal else 11
        part = geometric_attention(
            logits[:, :, begin:end, :keys],
            causal=causal,
            offset=begin,
            key_padding_mask=mask[:, :keys],
            implementation=implementation,
        )
        torch.testing.assert_close(part, whole[:, :, begin:end, :keys], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shape", [(2, 2, 6, 6, 0), (1, 2, 2, 7, 4), (1, 1, 1, 1, 0)], ids=str)
@causality
def test_gradcheck(shape, causal, device):
    (logits,) = make(shape, device).values()
    mask = make_mask("right", shape[0], shape[3], device)
    assert torch.autograd.gradcheck(
        lambda x: geometric_attention(x, causal=causal, offset=shape[4], key_padding_mask=mask), logits.requires_grad_()
    )


@implementations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extreme", [1e4, math.inf], ids=str)
def test_extreme_logits(implementation, dtype, extreme, device):
    """Sure and impossible matches: weights and gradients are finite and as in the limit."""
    signs = torch.tensor([-1, 1, 1, -1, -1, 1, -1], device=device)
    logits = (signs * extreme).to(dtype).expand(1, 1, 7, 7)
    results = with_gradients(run(implementation), {"logits": logits})
    first = [1, 2, 1, 2, 5, 2, 5]  # the closest + of each query: of 1, 2; of 3, 2 before 5; of 5, 2
    expected = torch.eye(7, dtype=dtype, device=device)[first]
    assert torch.equal(results["weights"][0, 0], expected)
    assert (results["gradient of logits"] == 0).all()


@implementations
def test_nearly_sure_matches_keep_their_digits(implementation, device):
    """What gets past a P of 1 − 2e-9, which float32 rounds to 1."""
    logits = torch.tensor([0.0, 20.0, 0.0], device=device).expand(1, 1, 1, 3)
    weights = geometric_attention(logits, offset=0, implementation=implementation)[0, 0, 0]
    assert weights[2].item() == pytest.approx(0.5 / (1 + math.exp(20)), rel=1e-6)


@implementations
def test_a_sure_match_far_away_costs_no_digits_nearby(implementation, device):
    """Differences of cumulative sums along the row would: at 500 keys beyond a sum of 10,000."""
    logits = torch.full((1, 1, 1, 1000), -6.0, device=device)
    logits[..., 0] = 1e4
    got, exact = (geometric_attention(x, offset=500, implementation=implementation) for x in (logits, logits.double()))
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@causality
@pytest.mark.parametrize("length", [7, 40])
def test_low_precision(dtype, causal, length, device):
    inputs = make((2, 2, length, length, 0), device, dtype)
    exact = with_gradients(run("naive", causal=causal), {name: x.double() for name, x in inputs.items()})
    fast, naive = (with_gradients(run(name, causal=causal), inputs) for name in ("scan", "naive"))
    assert fast["weights"].dtype == dtype
    assert_as_exact_as(fast, naive, exact)


@implementations
@causality
def test_half_precision_is_rounded_once(implementation, causal, device):
    """The product of 100 factors is taken in float32."""
    (logits,) = make((1, 1, 100, 100, 0), device, torch.bfloat16).values()
    logits = logits - 6
    got = geometric_attention(logits, causal=causal, implementation=implementation)
    expected = geometric_attention(logits.double(), causal=causal, implementation=implementation)
    torch.testing.assert_close(got.double(), expected, rtol=4.1e-3, atol=0)


@implementations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(implementation, dtype, device):
    inputs = make((2, 2, 9, 9, 0), device, torch.float32)
    outside = with_gradients(run(implementation), inputs)
    with torch.autocast(device.type, dtype=dtype):
        inside = with_gradients(run(implementation), inputs)
    assert_all_close(inside, outside, rtol=0, atol=0)


@causality
def test_non_contiguous_inputs(causal, device):
    """Transposed, every other key, and broadcast over the sentences."""
    (logits,) = make((3, 2, 9, 9, 0), device).values()
    transposed = logits.transpose(2, 3).contiguous().transpose(2, 3)
    every_other = logits.repeat_interleave(2, dim=3)[..., ::2]
    expected = with_gradients(run("naive", causal=causal), {"logits": logits})["weights"]
    for strided in (transposed, every_other):
        assert not strided.is_contiguous()
        torch.testing.assert_close(geometric_attention(strided, causal=causal), expected, rtol=1e-12, atol=1e-15)
    shared = geometric_attention(logits[:1].expand(3, -1, -1, -1), causal=causal)
    torch.testing.assert_close(shared, expected[:1].expand(3, -1, -1, -1), rtol=1e-12, atol=1e-15)


@causality
def test_gradients_from_a_non_contiguous_loss(causal, device):
    (logits,) = make((2, 2, 6, 6, 0), device).values()
    grad = torch.randn(2, 2, 6, 6, dtype=torch.float64, device=device).transpose(2, 3)

    def gradient(implementation):
        leaf = logits.clone().requires_grad_()
        geometric_attention(leaf, causal=causal, implementation=implementation).backward(grad)
        return leaf.grad

    torch.testing.assert_close(gradient("scan"), gradient("naive"), rtol=1e-11, atol=1e-13)


def test_memory_is_that_of_a_few_matrices(device):
    """Nothing larger than the logits is made, and two such are kept for the backward pass, beside the order of one map,
    int32.
    """
    shape = (2, 3, 64, 64, 0)
    inputs = make(shape, device)
    with Operations() as operations:
        with_gradients(run("scan"), inputs)
    assert operations.largest <= inputs["logits"].numel()
    kept: dict[int, int] = {}
    leaf = inputs["logits"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.update({x.data_ptr(): x.nbytes}), x)[1], lambda x: x):
        geometric_attention(leaf)
    assert sum(kept.values()) <= 2 * leaf.nbytes + 2 * 4 * 64 * 64


def test_second_derivatives(device):
    (logits,) = make((1, 1, 4, 4, 0), device).values()
    logits.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: geometric_attention(x, implementation="naive"), logits)
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        torch.autograd.grad(geometric_attention(logits).square().sum(), logits, create_graph=True)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.integers(0, 9),
    queries=st.integers(1, 9),
    after=st.integers(0, 9),
    batch=st.integers(1, 3),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape_and_mask(before, queries, after, batch, causal, data, device):
    keys = before + queries + after
    torch.manual_seed(keys)
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=batch, max_size=batch))
    )
    (logits,) = make((batch, 1, queries, keys), device).values()
    options = {"causal": causal, "offset": before, "key_padding_mask": mask.to(device)}
    weights = geometric_attention(logits, **options)
    torch.testing.assert_close(weights.cpu(), walk(logits, **options), rtol=1e-12, atol=1e-15)
    assert (weights.sum(-1) <= 1 + 1e-12).all()


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((2, 3, 4), {}, ValueError, r"takes logits \(B, H, N, M\), not logits \(2, 3, 4\)"),
        ((2, 3, 4, 4), {"offset": 1}, ValueError, r"offset 1 does not fit logits \(2, 3, 4, 4\)"),
        ((2, 3, 4, 6), {"offset": -1}, ValueError, r"offset -1 does not fit logits \(2, 3, 4, 6\)"),
        ((2, 3, 6, 4), {}, ValueError, r"offset 0 does not fit logits \(2, 3, 6, 4\)"),
        ((2, 3, 4, 6), {"key_padding_mask": torch.zeros(2, 4) > 0}, ValueError, r"must be .* \(2, 6\), not \(2, 4\)"),
        ((2, 3, 4, 6), {"key_padding_mask": torch.zeros(2, 6)}, TypeError, "must be bool, True at padding"),
        ((2, 3, 4, 4), {"implementation": "chunked"}, ValueError, "no implementation 'chunked'.*: auto, naive, scan"),
    ],
    ids=["rank", "offset-beyond", "offset-before", "more-queries", "mask-shape", "mask-dtype", "implementation"],
)  # fmt: skip
def test_wrong_arguments(shape, options, error, message):
    with pytest.raises(error, match=message):
        geometric_attention(torch.zeros(shape), **options)


def test_wrong_dtype():
    with pytest.raises(TypeError, match="logits must be a floating-point tensor, not torch.int64"):
        geometric_attention(torch.zeros(1, 1, 2, 2, dtype=torch.int64))


@causality
@pytest.mark.parametrize("block", [1, 100, 250, 1000])
def test_blocks_of_maps_equal_all_at_once(causal, block, device, monkeypatch):
    """Blocks of one map, of one or two with a rest, and of all; the loss is not contiguous."""
    (logits,) = make((3, 3, 9, 9, 0), device).values()
    mask = make_mask("left", 3, 9, device)
    grad = torch.randn(3, 3, 9, 9, dtype=torch.float64, device=device).transpose(2, 3)

    def results(implementation):
        leaf = logits.clone().requires_grad_()
        weights = geometric_attention(leaf, causal=causal, key_padding_mask=mask, implementation=implementation)
        return {"weights": weights.detach(), "gradient": torch.autograd.grad(weights, leaf, grad)[0]}

    expected = results("naive")
    monkeypatch.setattr(scan, "BLOCK", block)
    assert_all_close(results("scan"), expected, rtol=1e-11, atol=1e-13)


@implementations
@causality
def test_logits_are_left_as_they_are(implementation, causal, device):
    (logits,) = make((2, 2, 9, 9, 0), device).values()
    before = logits.clone()
    geometric_attention(logits, causal=causal, implementation=implementation)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("implementation", ["naive", "scan"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("keys", [0, 3])
def test_length_zero(implementation, causal, keys, device):
    logits = torch.ones(2, 3, 0, keys, device=device, requires_grad=True)
    out = geometric_attention(logits, causal=causal, implementation=implementation)
    out.sum().backward()
    assert out.shape == logits.shape == logits.grad.shape


def test_intermediate_results_stay_in_blocks():
    """So they stay in the cache; a map larger than a block is a part of its own."""
    for maps, size in ((24, scan.BLOCK // 3 - 1), (5, 2 * scan.BLOCK)):
        parts = scan._blocks(torch.empty(maps, size))
        assert [len(part) for part in parts] == [max(1, scan.BLOCK // size)] * len(parts)
        assert sum(map(len, parts)) == maps and len(parts) > 1
    assert len(scan._blocks(torch.empty(2, 3))) == 1

"""Geometric attention in Triton against float64: order of visits, padding, extremes, precision, strides."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from fairseq_sg.ops import geometric_attention
from helpers.comparison import assert_all_close, make_mask, with_gradients
from helpers.operators.geometric import SHAPES, make, run, walk
from helpers.pairs import pairs
from helpers.triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

kernels = importlib.import_module("fairseq_sg.ops.geometric.triton")

# exp(−x) = ∞ makes P = 0, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@pairs(shape=[*SHAPES, (1, 2, 2, 1100, 700)], causal=[True, False], padding=["none", "left", "right", "one-row-full"])
def test_values_and_gradients(shape, causal, padding):
    mask = make_mask(padding, shape[0], shape[3], DEVICE)
    options = {"causal": causal, "offset": shape[4], "key_padding_mask": mask}
    inputs = make(shape, DEVICE, torch.float32)
    results = compare(run, inputs, "scan", **options)
    if shape[3] < 20:
        expected = walk(inputs["logits"].double(), **options)
        torch.testing.assert_close(results["weights"].double().cpu(), expected, rtol=1e-5, atol=1e-7)


def test_of_two_at_one_distance_the_right_is_closer():
    halves = torch.zeros(1, 1, 5, 5, device=DEVICE)
    turns = torch.tensor([[0, 1, 2, 3, 4], [2, 0, 1, 3, 4], [4, 2, 0, 1, 3], [4, 3, 2, 0, 1], [4, 3, 2, 1, 0]])
    expected = (0.5**turns).masked_fill(turns == 0, 0.0).to(DEVICE)
    assert torch.equal(geometric_attention(halves, implementation="triton")[0, 0], expected)


@causality
@pytest.mark.parametrize("garbage", [1e9, -1e9, math.inf, -math.inf, math.nan], ids=str)
def test_what_is_hidden_changes_nothing(causal, garbage):
    inputs = make((2, 2, 9, 9, 0), DEVICE, torch.float32)
    mask = make_mask("left", 2, 9, DEVICE)
    i, j = torch.arange(9, device=DEVICE)[:, None], torch.arange(9, device=DEVICE)
    hidden = ((j >= i if causal else j == i) | mask[:, None, None, :]).expand(2, 2, 9, 9)
    function = run("triton", causal=causal, key_padding_mask=mask)
    clean = with_gradients(function, inputs)
    poisoned = with_gradients(function, {"logits": inputs["logits"].masked_fill(hidden, garbage)})
    assert_all_close(poisoned, clean, rtol=0, atol=0)
    assert (clean["gradient of logits"][hidden] == 0).all() and (clean["weights"][hidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extreme", [1e4, math.inf], ids=str)
def test_extreme_logits(dtype, extreme):
    signs = torch.tensor([-1, 1, 1, -1, -1, 1, -1], device=DEVICE)
    results = with_gradients(run("triton"), {"logits": (signs * extreme).to(dtype).expand(1, 1, 7, 7)})
    expected = torch.eye(7, dtype=dtype, device=DEVICE)[[1, 2, 1, 2, 5, 2, 5]]
    assert torch.equal(results["weights"][0, 0], expected)
    assert (results["gradient of logits"] == 0).all()


def test_nearly_sure_matches_keep_their_digits():
    logits = torch.tensor([0.0, 20.0, 0.0], device=DEVICE).expand(1, 1, 1, 3)
    weights = geometric_attention(logits, offset=0, implementation="triton")[0, 0, 0]
    assert weights[2].item() == pytest.approx(0.5 / (1 + math.exp(20)), rel=3e-6)


def test_a_sure_match_far_away_costs_no_digits_nearby():
    logits = torch.full((1, 1, 1, 1000), -6.0, device=DEVICE)
    logits[..., 0] = 1e4
    got = geometric_attention(logits, offset=500, implementation="triton")
    exact = geometric_attention(logits.double(), offset=500, implementation="naive")
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=0)


@pairs(dtype=[torch.float16, torch.bfloat16], causal=[True, False], length=[7, 20])
def test_half_precision(dtype, causal, length):
    inputs = make((2, 2, length, length, 0), DEVICE, dtype)
    mask = make_mask("right", 2, length, DEVICE)
    compare(run, inputs, "scan", causal=causal, key_padding_mask=mask)


@causality
def test_non_contiguous(causal):
    """Transposed, every other key, broadcast over the sentences, and a gradient that is transposed."""
    (logits,) = make((3, 2, 9, 9, 0), DEVICE, torch.float32).values()
    weighting = torch.randn(3, 2, 9, 9, device=DEVICE).transpose(2, 3)

    def results(logits):
        leaf = logits.detach().requires_grad_()
        weights = geometric_attention(leaf, causal=causal, implementation="triton")
        return {"weights": weights.detach(), "gradient": torch.autograd.grad(weights, leaf, weighting)[0]}

    expected = results(logits)
    for strided in (logits.transpose(2, 3).contiguous().transpose(2, 3), logits.repeat_interleave(2, dim=3)[..., ::2]):
        assert not strided.is_contiguous()
        assert_all_close(results(strided), expected, rtol=0, atol=0)
    shared = results(logits[:1].expand(3, -1, -1, -1))["weights"]
    assert torch.equal(shared, expected["weights"][:1].expand(3, -1, -1, -1))


def test_only_the_logits_are_kept():
    leaf = make((1, 2, 9, 9, 0), DEVICE, torch.float32)["logits"].requires_grad_()
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.update({x.data_ptr(): x.numel()}), x)[1], lambda x: x
    ):
        geometric_attention(leaf, implementation="triton")
    assert list(kept) == [leaf.data_ptr()]


def test_one_kernel_each_way(monkeypatch):
    launched = count_launches(monkeypatch, kernels)
    with_gradients(run("triton"), make((2, 2, 9, 9, 0), DEVICE, torch.float32))
    assert launched == ["_weights_kernel", "_grad_kernel"]


def test_empty_batch():
    results = with_gradients(run("triton"), make((0, 2, 5, 5, 0), DEVICE, torch.float32))
    assert all(x.shape == (0, 2, 5, 5) for x in results.values())


@causality
def test_results_are_the_same_again(causal):
    inputs = make((1, 2, 20, 20, 0), DEVICE, torch.float32)
    assert_all_close(*(with_gradients(run("triton", causal=causal), inputs) for _ in range(2)), rtol=0, atol=0)


def test_second_derivatives_are_refused():
    (logits,) = make((1, 1, 4, 4, 0), DEVICE, torch.float32).values()
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        total = geometric_attention(logits, implementation="triton").square().sum()
        torch.autograd.grad(total, logits, create_graph=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((1, 1, 1, 8193), torch.float32, "rows have 8193 keys, and 8192"), ((1, 1, 2, 2), torch.float64, "not float64")],
    ids=["long", "float64"],
)
def test_refused_with_the_reason(shape, dtype, message):
    with pytest.raises(
        ValueError, match=f"geometric_attention cannot run its implementation 'triton' here: .*{message}"
    ):
        geometric_attention(torch.zeros(shape, dtype=dtype, device=DEVICE), implementation="triton")

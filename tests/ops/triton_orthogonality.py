"""The orthogonality loss in Triton against float64: both Gram sides, padding, precision, strides."""

from __future__ import annotations

import importlib

import pytest
import torch
from ops_comparison import assert_all_close, make_mask, with_gradients
from test_orthogonality import make, orthonormal_rows, run
from triton_comparison import DEVICE, compare, count_launches, uninitialized_memory_is_nan  # noqa: F401

from fairseq_sg.ops import orthogonality_loss

kernels = importlib.import_module("fairseq_sg.ops.orthogonality.triton")

# B, H, N, E: fewer positions than dimensions, as many, more; tiles are at most 64 on either side
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 1, 5),
    (1, 2, 5, 1),
    (2, 2, 7, 16),
    (2, 2, 16, 16),
    (1, 2, 17, 16),
    (1, 2, 33, 24),
    (1, 2, 100, 8),
    (1, 2, 65, 80),
    (1, 1, 90, 80),
    (1, 1, 20, 300),
    (1, 1, 140, 130),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-H{}-N{}-E{}".format(*s))


@shapes
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_values_and_gradients(shape, reduction):
    compare(run, {"values": make(shape, DEVICE, torch.float32)}, "chunked", reduction=reduction)


@pytest.mark.parametrize(
    "shape", [(2, 2, 7, 16), (3, 2, 17, 16), (2, 2, 40, 8), (2, 1, 70, 66), (2, 1, 66, 70)], ids=str
)
@pytest.mark.parametrize("padding", ["left", "right", "one-row-full"])
def test_padding(shape, padding):
    mask = make_mask(padding, shape[0], shape[2], DEVICE)
    options = {"padding_mask": mask, "reduction": "none"}
    results = compare(run, {"values": make(shape, DEVICE, torch.float32)}, "chunked", **options)
    assert (results["gradient of values"].masked_select(mask[:, None, :, None]) == 0).all()
    if padding == "one-row-full":
        assert (results["loss"][0] == 0).all()


@pytest.mark.parametrize("content", [0.0, 1e9, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("length", [3, 40])
def test_content_of_padding_is_irrelevant(length, content):
    inputs = {"values": make((2, 2, length, 5), DEVICE, torch.float32)}
    mask = make_mask("right", 2, length, DEVICE)
    poisoned = {"values": inputs["values"].masked_fill(mask[:, None, :, None], content)}
    function = run("triton", padding_mask=mask, reduction="none")
    assert_all_close(with_gradients(function, poisoned), with_gradients(function, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 7, 16), (2, 2, 50, 16), (1, 1, 70, 80)], ids=str)
def test_half_precision(dtype, shape):
    mask = make_mask("left", shape[0], shape[2], DEVICE)
    options = {"padding_mask": mask, "reduction": "none"}
    results = compare(run, {"values": make(shape, DEVICE, dtype)}, "chunked", **options)
    assert results["loss"].dtype == torch.float32


@pytest.mark.parametrize(("length", "width"), [(6, 16), (600, 16)])
def test_large_float16_values(length, width):
    values = torch.full((1, 1, length, width), 6e4, dtype=torch.float16, device=DEVICE).requires_grad_()
    loss = orthogonality_loss(values, implementation="triton")
    loss.backward()
    assert loss.item() == pytest.approx(length**2 - length, rel=1e-5)
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("length", [3, 12])
def test_zero_vectors(length):
    values = make((1, 1, length, 5), DEVICE, torch.float32)
    without = orthogonality_loss(values[:, :, 1:], implementation="naive").item()
    values[:, :, 0] = 0
    values.requires_grad_()
    loss = orthogonality_loss(values, implementation="triton")
    loss.backward()
    assert loss.item() == pytest.approx(without + 1, rel=1e-5)
    assert (values.grad[:, :, 0] == 0).all() and values.grad.isfinite().all()


@pytest.mark.parametrize(("width", "count"), [(8, 40), (70, 4)])
def test_never_below_zero(width, count):
    """Few orthogonal values among padding: the least loss is 0, and rounding does not get below it."""
    values = torch.randn(count, 1, width + 10, width, device=DEVICE)
    mask = torch.ones(count, width + 10, dtype=torch.bool, device=DEVICE)
    for sentence in range(count):
        begin = sentence % 13
        values[sentence, 0, begin : begin + 5] = orthonormal_rows(5, width, DEVICE).float()
        mask[sentence, begin : begin + 5] = False
    losses = orthogonality_loss(values, padding_mask=mask, reduction="none", implementation="triton")
    assert (losses >= 0).all() and (losses < 1e-4).all()


@pytest.mark.parametrize("length", [5, 40])
def test_non_contiguous(length):
    """Time first as a module has them, every other feature, and broadcast over the heads."""
    values = make((2, 3, length, 16), DEVICE, torch.float32)
    expected = with_gradients(run("triton", reduction="none"), {"values": values})
    time_first = values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    every_other = values.repeat_interleave(2, dim=3)[..., ::2]
    for strided in (time_first, every_other):
        leaf = strided.detach().requires_grad_()
        assert not leaf.is_contiguous()
        loss = orthogonality_loss(leaf, reduction="none", implementation="triton")
        weighting = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss.backward(weighting.to(DEVICE, torch.float32))
        assert torch.equal(loss, expected["loss"])
        torch.testing.assert_close(leaf.grad, expected["gradient of values"], rtol=1e-5, atol=1e-5)
    shared = orthogonality_loss(values[:, :1].expand(-1, 3, -1, -1), reduction="none", implementation="triton")
    assert torch.equal(shared, expected["loss"][:, :1].expand(-1, 3))


def test_empty_batch():
    results = with_gradients(run("triton", reduction="none"), {"values": make((0, 2, 5, 4), DEVICE, torch.float32)})
    assert results["loss"].shape == (0, 2) and results["gradient of values"].shape == (0, 2, 5, 4)


def test_one_kernel_each_way(monkeypatch):
    launched = count_launches(monkeypatch, kernels)
    for length in (9, 70):
        with_gradients(run("triton"), {"values": make((1, 2, length, 64), DEVICE, torch.float32)})
    assert launched == ["_rows_kernel", "_grad_kernel", "_columns_kernel", "_grad_kernel"]


def test_results_are_the_same_again():
    inputs = {"values": make((1, 2, 40, 36), DEVICE, torch.float32)}
    assert_all_close(*(with_gradients(run("triton"), inputs) for _ in range(2)), rtol=0, atol=0)


def test_second_derivatives_are_refused():
    values = make((1, 1, 5, 3), DEVICE, torch.float32).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative .*implementation='naive' has one"):
        torch.autograd.grad(orthogonality_loss(values, implementation="triton"), values, create_graph=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((1, 1, 2, 513), torch.float32, "values have 513 dimensions, and 512"), ((1, 1, 2, 4), torch.float64, "float64")],
    ids=["wide", "float64"],
)
def test_refused_with_the_reason(shape, dtype, message):
    with pytest.raises(
        ValueError, match=f"orthogonality_loss cannot run its implementation 'triton' here: .*{message}"
    ):
        orthogonality_loss(torch.zeros(shape, dtype=dtype, device=DEVICE), implementation="triton")

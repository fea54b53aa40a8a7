"""The orthogonality loss: the closed form against the N×N matrix, padding, precision and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_sg.ops import orthogonality_loss
from helpers.comparison import Operations, assert_all_close, assert_as_exact_as, make_mask, with_gradients

# B, H, N, E: fewer positions than dimensions, as many, more
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 1, 5),
    (2, 3, 5, 1),
    (2, 2, 7, 16),
    (2, 3, 16, 16),
    (3, 2, 17, 16),
    (2, 2, 33, 24),
    (1, 2, 65, 8),
    (2, 2, 257, 5),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-H{}-N{}-E{}".format(*s))
implementations = pytest.mark.parametrize("implementation", ["naive", "gram"])
properties = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(shape: tuple[int, ...], device, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def run(implementation: str, **options):
    return lambda values: {"loss": orthogonality_loss(values, implementation=implementation, **options)}


def orthonormal_rows(count: int, width: int, device) -> Tensor:
    return torch.linalg.qr(torch.randn(width, count, dtype=torch.float64))[0].T.to(device)


@shapes
@pytest.mark.parametrize("padding", ["none", "left", "right", "one-row-full"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_equals_naive(shape, padding, reduction, device):
    options = {"padding_mask": make_mask(padding, shape[0], shape[2], device), "reduction": reduction}
    inputs = {"values": make(shape, device)}
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("gram", "naive"))
    assert fast["loss"].shape == (shape[:2] if reduction == "none" else ())
    assert_all_close(fast, naive, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=lambda s: "B{}-H{}-N{}-E{}".format(*s))
@implementations
@pytest.mark.parametrize("padding", ["none", "right"])
def test_explicit_double_loop(shape, implementation, padding, device):
    values = make(shape, device)
    mask = make_mask(padding, shape[0], shape[2], device)
    out = orthogonality_loss(values, padding_mask=mask, eps=0.1, reduction="none", implementation=implementation)
    for b in range(shape[0]):
        real = values[b] if mask is None else values[b][:, ~mask[b]]
        for h in range(shape[1]):
            unit = [v / (v.norm() + 0.1) for v in real[h]]
            pairs = [(i, j) for i in range(len(unit)) for j in range(len(unit))]
            expected = sum((float(unit[i] @ unit[j]) - (i == j)) ** 2 for i, j in pairs)
            assert out[b, h].item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("shape", [(2, 2, 3, 5), (2, 1, 4, 4), (2, 2, 6, 3), (1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("padding", ["none", "left", "one-row-full"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradcheck(shape, padding, reduction, device):
    mask = make_mask(padding, shape[0], shape[2], device)
    values = make(shape, device).requires_grad_()
    # A large eps, so that its part in the gradient counts.
    function = lambda v: orthogonality_loss(v, padding_mask=mask, eps=0.3, reduction=reduction)  # noqa: E731
    assert torch.autograd.gradcheck(function, (values,))


def test_second_derivative(device):
    """The closed form has the first derivative alone; the second is refused, with a way out, and never 0 by mistake."""
    values = make((1, 1, 5, 3), device).requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivative .* implementation='naive' has one"):
        torch.autograd.grad(orthogonality_loss(values), values, create_graph=True)
    assert torch.autograd.gradgradcheck(lambda v: orthogonality_loss(v, implementation="naive"), (values,))


@implementations
@pytest.mark.parametrize(("count", "width"), [(1, 4), (3, 8), (8, 8)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_zero_for_orthogonal_rows(implementation, count, width, scale, device):
    values = scale * orthonormal_rows(count, width, device)[None, None]
    assert orthogonality_loss(values, eps=0.0, implementation=implementation).item() == pytest.approx(0, abs=1e-24)


@implementations
def test_zero_for_orthogonal_rows_among_padding(implementation, device):
    """More positions than dimensions, but no more real ones: the least loss is 0 and never below it."""
    values = torch.randn(1, 1, 40, 8, dtype=torch.float32, device=device)
    for begin in range(30):
        values[0, 0, begin : begin + 5] = orthonormal_rows(5, 8, device).float()
        mask = torch.ones(1, 40, dtype=torch.bool, device=device)
        mask[0, begin : begin + 5] = False
        loss = orthogonality_loss(values, padding_mask=mask, implementation=implementation).item()
        assert 0 <= loss < 1e-4


@implementations
@pytest.mark.parametrize(("length", "width"), [(9, 3), (20, 4), (16, 16), (33, 8)])
def test_lower_bound(implementation, length, width, device):
    """Never below N²/E − N, which a tight frame reaches: E × E orthonormal bases, one after another."""
    bound = length**2 / width - length
    values = make((4, 4, length, width), device)
    losses = orthogonality_loss(values, eps=0.0, reduction="none", implementation=implementation)
    assert (losses >= bound - 1e-9).all()
    if length % width == 0:
        frame = torch.cat([orthonormal_rows(width, width, device) for _ in range(length // width)])[None, None]
        loss = orthogonality_loss(frame, eps=0.0, implementation=implementation)
        assert loss.item() == pytest.approx(bound, abs=1e-9)


@implementations
@pytest.mark.parametrize("length", [3, 12])
def test_equal_values(implementation, length, device):
    """All values the same: V̄V̄ᵀ is 1 everywhere, so N² − N."""
    values = make((1, 1, 1, 5), device).expand(-1, -1, length, -1)
    loss = orthogonality_loss(values, eps=0.0, implementation=implementation)
    assert loss.item() == pytest.approx(length**2 - length, rel=1e-12)


@implementations
@pytest.mark.parametrize("length", [3, 12])
def test_zero_vectors(implementation, length, device):
    """A zero vector misses its 1 on the diagonal, and has no direction and no gradient."""
    values = make((1, 1, length, 5), device)
    without = orthogonality_loss(values[:, :, 1:], implementation=implementation).item()
    values[:, :, 0] = 0
    values.requires_grad_()
    loss = orthogonality_loss(values, implementation=implementation)
    loss.backward()
    assert loss.item() == pytest.approx(without + 1, rel=1e-9)
    assert (values.grad[:, :, 0] == 0).all() and values.grad.isfinite().all()
    everything = torch.zeros(2, 2, length, 5, device=device, requires_grad=True)
    loss = orthogonality_loss(everything, implementation=implementation)
    loss.backward()
    assert loss.item() == length and (everything.grad == 0).all()


@implementations
@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("content", [0.0, 1e9, float("inf"), float("nan")], ids=str)
def test_content_of_padding_is_irrelevant(implementation, length, content, device):
    inputs = {"values": make((3, 2, length, 5), device, torch.float32)}
    mask = make_mask("right", 3, length, device)
    mask[0] = True
    poisoned = {"values": inputs["values"].masked_fill(mask[:, None, :, None], content)}
    function = run(implementation, padding_mask=mask, reduction="none")
    actual = with_gradients(function, poisoned)
    assert_all_close(actual, with_gradients(function, inputs), rtol=0, atol=0)
    assert (actual["loss"][0] == 0).all()
    assert (actual["gradient of values"].masked_select(mask[:, None, :, None]) == 0).all()


def test_batch_of_padding_alone(device):
    values = make((2, 2, 7, 5), device).requires_grad_()
    loss = orthogonality_loss(values, padding_mask=torch.ones(2, 7, dtype=torch.bool, device=device))
    loss.backward()
    assert loss.item() == 0 and (values.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 7, 16), (2, 2, 100, 16), (2, 2, 257, 8)], ids=str)
def test_low_precision(dtype, shape, device):
    inputs = {"values": make(shape, device, dtype)}
    options = {"padding_mask": make_mask("left", 2, shape[2], device), "reduction": "none"}
    exact = with_gradients(run("naive", **options), {"values": inputs["values"].double()})
    fast, naive = (with_gradients(run(name, **options), inputs) for name in ("gram", "naive"))
    assert fast["loss"].dtype == torch.float32 and fast["gradient of values"].dtype == dtype
    assert_as_exact_as(fast, naive, exact)


@implementations
@pytest.mark.parametrize(("length", "width"), [(6, 16), (600, 16)])
def test_large_float16_values(implementation, length, width, device):
    """Norms (E · 60000²) and, for the long sequence, the loss are beyond float16."""
    values = torch.full((1, 1, length, width), 6e4, dtype=torch.float16, device=device).requires_grad_()
    loss = orthogonality_loss(values, implementation=implementation)
    loss.backward()
    assert loss.item() == pytest.approx(length**2 - length, rel=1e-5)
    assert values.grad.isfinite().all()


@implementations
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(implementation, length, dtype, device):
    inputs = {"values": make((2, 2, length, 16), device, torch.float32)}
    outside = with_gradients(run(implementation), inputs)
    values = inputs["values"].requires_grad_()
    with torch.autocast(device.type, dtype=dtype):
        loss = orthogonality_loss(values, implementation=implementation)
    assert loss.dtype == torch.float32 and torch.equal(loss, outside["loss"])


@pytest.mark.parametrize("length", [5, 40])
def test_backward_within_autocast_changes_nothing(length, device):
    values = make((2, 2, length, 16), device, torch.float32).requires_grad_()
    (outside,) = torch.autograd.grad(orthogonality_loss(values), values)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        (inside,) = torch.autograd.grad(orthogonality_loss(values), values)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("length", [5, 40])
def test_non_contiguous_values(length, device):
    values = make((2, 3, length, 16), device)
    time_first = values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert not time_first.is_contiguous()
    torch.testing.assert_close(
        orthogonality_loss(time_first), orthogonality_loss(values, implementation="naive"), rtol=1e-11, atol=1e-11
    )


@properties
@given(length=st.integers(1, 20), width=st.integers(1, 20), padding=st.integers(0, 20), seed=st.integers(0, 2**16))
def test_amount_of_padding_is_irrelevant(length, width, padding, seed, device):
    """Also where the padding makes the other Gram matrix the smaller."""
    torch.manual_seed(seed)
    values = make((1, 2, length, width), device)
    padded = torch.cat((values, make((1, 2, padding, width), device)), dim=2)
    mask = (torch.arange(length + padding, device=device) >= length)[None]
    order = torch.randperm(length + padding, device=device)
    loss = orthogonality_loss(padded[:, :, order], padding_mask=mask[:, order])
    torch.testing.assert_close(loss, orthogonality_loss(values), rtol=1e-10, atol=1e-10)


@properties
@given(length=st.integers(1, 20), width=st.integers(1, 20), seed=st.integers(0, 2**16))
def test_order_and_rotation_are_irrelevant(length, width, seed, device):
    """The loss of every head stays with it, and neither positions' order nor a rotation of the values matters."""
    torch.manual_seed(seed)
    values = make((2, 4, length, width), device)
    losses = orthogonality_loss(values, reduction="none")
    heads, positions = torch.randperm(4, device=device), torch.randperm(length, device=device)
    rotated = values[:, :, positions][:, heads] @ orthonormal_rows(width, width, device)
    torch.testing.assert_close(orthogonality_loss(rotated, reduction="none"), losses[:, heads], rtol=1e-9, atol=1e-9)


def test_memory_is_linear(device):
    length, width = 2048, 16
    with Operations() as operations:
        with_gradients(run("gram"), {"values": make((1, 1, length, width), device)})
    assert operations.largest <= length * width


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 5, 4), {}, r"takes values \(B, H, N, E\), not values \(2, 5, 4\)"),
        ((2, 3, 5, 4), {"padding_mask": torch.zeros(5, 2) > 0}, r"padding_mask must be .* = \(2, 5\), not \(5, 2\)"),
        ((2, 3, 5, 4), {"reduction": "avg"}, r"no reduction 'avg'; choose one of: mean, sum, none"),
    ],
    ids=["rank", "mask", "reduction"],
)
def test_wrong_arguments(shape, options, message):
    with pytest.raises(ValueError, match=message):
        orthogonality_loss(torch.zeros(shape), **options)


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"values must be a floating-point tensor, not torch.int64"):
        orthogonality_loss(torch.zeros(2, 3, 5, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"padding_mask must be bool, True at padding, not torch.int64"):
        orthogonality_loss(torch.zeros(2, 3, 5, 4), padding_mask=torch.zeros(2, 5, dtype=torch.int64))

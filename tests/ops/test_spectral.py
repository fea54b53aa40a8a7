"""Products of low frequencies: fast transforms against explicit sums, gradients, and independence of the grid."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fairseq_sg.ops import spectral_multiply
from fairseq_sg.ops.spectral import most_modes
from fairseq_sg.ops.spectral.naive import wave
from helpers.comparison import assert_all_close, with_gradients

# I, O, K, n or n × m: odd and even, as many modes as the grid has
ONE = [(1, 1, 1, 1), (2, 3, 1, 5), (3, 2, 4, 8), (2, 2, 5, 8), (2, 3, 4, 7), (1, 4, 3, 33)]
TWO = [(1, 1, 1, (2, 1)), (2, 3, 2, (4, 3)), (3, 2, 3, (7, 5)), (2, 2, 2, (5, 8)), (2, 1, 4, (8, 6))]
SHAPES = ONE + TWO


def make(shape: tuple, device) -> dict[str, Tensor]:
    i, o, k, n = shape
    grid, weight = ((n,), (i, o, k, 2)) if isinstance(n, int) else (n, (2, i, o, k, k, 2))
    return {
        name: torch.randn(s, dtype=torch.float64).to(device) for name, s in (("x", (2, i, *grid)), ("weight", weight))
    }


def run(implementation: str):
    return lambda x, weight: {"y": spectral_multiply(x, weight, implementation=implementation)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_naive(shape, device):
    inputs = make(shape, device)
    fast, naive = (with_gradients(run(name), inputs) for name in ("fft", "naive"))
    assert_all_close(fast, naive, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [ONE[3], ONE[4], TWO[2], TWO[4]], ids=str)
def test_gradcheck(shape, device):
    inputs = make(shape, device)
    for tensor in inputs.values():
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: spectral_multiply(*t), tuple(inputs.values()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_transformed_back_is_the_spectrum_of_a_real_function(shape, device, monkeypatch):
    """cuFFT does not promise to ignore what such a spectrum cannot have."""
    transform, points = torch.fft.irfft, []

    def strict(spectrum, n, norm):
        own = [k for k in range(spectrum.size(-1)) if 2 * k % n == 0]
        assert not spectrum[..., own].imag.any()
        points.append(n)
        return transform(spectrum, n, norm=norm)

    monkeypatch.setattr(torch.fft, "irfft", strict)
    monkeypatch.setattr(torch.fft, "irfft2", None)
    inputs = make(shape, device)
    y = spectral_multiply(**inputs, implementation="fft")
    assert points == [y.size(-1)]


@pytest.mark.parametrize("implementation", ["naive", "fft"])
def test_empty_batches(implementation, device):
    for shape in (ONE[1], TWO[1]):
        inputs = make(shape, device)
        inputs["x"] = inputs["x"][:0].requires_grad_()
        y = spectral_multiply(**inputs, implementation=implementation)
        y.sum().backward()
        assert y.shape == (0, shape[1], *inputs["x"].shape[2:]) and inputs["x"].grad.shape == inputs["x"].shape


def test_one_frequency_by_hand(device):
    """cos(2πx) times a + ib is a cos(2πx) − b sin(2πx); the mean and the other frequencies are dropped."""
    x = torch.arange(10, dtype=torch.float64, device=device) / 10
    f = 3 + torch.cos(2 * math.pi * x) + torch.sin(4 * math.pi * x)
    weight = torch.zeros(1, 1, 2, 2, dtype=torch.float64, device=device)
    weight[0, 0, 1] = torch.tensor([2.0, 5.0])
    expected = 2 * torch.cos(2 * math.pi * x) - 5 * torch.sin(2 * math.pi * x)
    for name in ("naive", "fft"):
        torch.testing.assert_close(spectral_multiply(f[None, None], weight, implementation=name)[0, 0], expected)


def test_negative_rows_have_their_own_matrices(device):
    """e^{2πi(y − x)} has the row −1 and the column 1, or their negatives: the second block's."""
    y, x = torch.meshgrid(*[torch.arange(8, dtype=torch.float64, device=device) / 8] * 2, indexing="ij")
    weight = torch.zeros(2, 1, 1, 3, 3, 2, dtype=torch.float64, device=device)
    weight[1, 0, 0, 2, 1, 0] = 7.0
    f = torch.cos(2 * math.pi * (x - y)) + torch.cos(2 * math.pi * (x + y))
    expected = 7 * torch.cos(2 * math.pi * (x - y))
    for name in ("naive", "fft"):
        found = spectral_multiply(f[None, None], weight, implementation=name)[0, 0]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dims", [1, 2])
def test_the_map_of_functions_does_not_depend_on_the_grid(dims, device):
    """A function of frequencies up to 3, at 9 and at 18 points a side."""
    weight = make((2, 3, 4, 9 if dims == 1 else (9, 9)), device)["weight"]

    def functions(points: int) -> Tensor:
        x = torch.meshgrid(*[torch.arange(points, dtype=torch.float64, device=device) / points] * dims, indexing="ij")
        phase = 2 * math.pi * sum((3 - 2 * axis) * x[axis] for axis in range(dims))
        return torch.stack([torch.cos(phase), 1 + torch.sin(2 * math.pi * x[-1])])[None]  # (1, 2, n[, n])

    fine = spectral_multiply(functions(18), weight)[(..., *[slice(None, None, 2)] * dims)]
    torch.testing.assert_close(fine, spectral_multiply(functions(9), weight), atol=1e-12, rtol=0)


def test_waves_of_many_points_are_exact_in_float32(device):
    k = torch.arange(4000, 4097, device=device)
    single, double = (wave(8192, k, dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(single.to(double.dtype), double, rtol=0, atol=1e-8)


def test_low_precision_is_computed_in_float32(device):
    inputs = {name: x.to(torch.bfloat16) for name, x in make((2, 3, 4, 30), device).items()}
    exact = spectral_multiply(inputs["x"].float(), inputs["weight"].float())
    assert torch.equal(spectral_multiply(**inputs), exact.to(torch.bfloat16))


def test_a_weight_that_is_a_part_of_a_flat_vector(device):
    """It begins at an odd place of its storage, where no complex number does."""
    inputs = make((2, 3, 4, 30), device)
    flat = torch.cat([inputs["weight"].new_zeros(1), inputs["weight"].flatten()])
    part = flat[1:].view_as(inputs["weight"])
    assert torch.equal(spectral_multiply(inputs["x"], part), spectral_multiply(**inputs))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 3, 8), (2, 4, 3, 2), r"takes x \(B, I, n\)"),
        ((2, 3), (3, 4, 3, 2), r"takes x \(B, I, n\)"),
        ((2, 3, 8), (2, 3, 4, 2, 2, 2), r"takes x \(B, I, n\)"),
        ((2, 3, 8), (3, 4, 3, 3), r"takes x \(B, I, n\)"),
        *(
            ((2, 3, 8, 8), weight, r"or x \(B, I, n, m\) and weight")
            for weight in [
                (1, 3, 4, 2, 2, 2),
                (3, 3, 4, 2, 2, 2),
                (2, 3, 4, 1, 2, 2),
                (2, 3, 4, 2, 3, 2),
                (2, 3, 4, 2, 2, 3),
            ]
        ),
        ((2, 3, 8), (3, 4, 6, 2), "a grid of 8 points has 5 frequencies, and the weight 6"),
        ((2, 3, 6, 8), (2, 3, 4, 4, 4, 2), "a grid of 6 × 8 points has 3 frequencies, and the weight 4"),
    ],
)
def test_wrong_shapes(x, weight, message):
    with pytest.raises(ValueError, match=message):
        spectral_multiply(torch.zeros(x), torch.zeros(weight))


def test_modes_of_a_grid():
    assert [most_modes((n,)) for n in (1, 2, 7, 8)] == [1, 2, 4, 5]
    assert most_modes((8, 8)) == 4 and most_modes((9, 4)) == 3

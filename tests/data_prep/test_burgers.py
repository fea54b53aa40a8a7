"""Burgers' equation: closed forms, an independent integrator, symmetries; random fields; nested grids; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep.__main__ import main
from data_prep.burgers import GAMMA, SCALE, TAU, solve
from data_prep.dataset import DataError
from data_prep.fields import periodic_field, spectral_derivative

PERIOD, NU = 2 * np.pi, 0.1


def wave(seed: int = 1, points: int = 512) -> np.ndarray:
    return periodic_field(RandomState(seed), points, SCALE, TAU, GAMMA)


# The random field.


def test_variances_of_the_field_are_those_of_the_covariance():
    """Over 2,000 draws, the variance of every coefficient within 5 σ of s_k², and the mean within 5 σ of 0."""
    draws, points = 2_000, 32
    random = RandomState(3)
    modes = np.fft.rfft([periodic_field(random, points, SCALE, TAU, GAMMA) for _ in range(draws)]) / (points / 2)
    assert abs(modes[:, [0, -1]]).max() < 1e-14
    for k in range(1, points // 2):
        expected = 2 * SCALE**2 * ((2 * np.pi * k) ** 2 + TAU**2) ** -GAMMA
        for part in (modes[:, k].real, modes[:, k].imag):
            assert abs((part**2).mean() / expected - 1) < 5 * np.sqrt(2 / draws)
            assert abs(part.mean()) < 5 * np.sqrt(expected / draws)


def test_a_finer_grid_adds_frequencies_and_keeps_the_others():
    coarse, fine = (np.fft.rfft(wave(points=n)) / n for n in (64, 256))
    np.testing.assert_allclose(fine[:32], coarse[:32], atol=1e-15)


def test_the_derivative_is_exact_for_polynomials_of_sines():
    x = np.arange(16) / 16
    f = np.sin(2 * np.pi * 3 * x) + np.cos(2 * np.pi * 7 * x)
    expected = 6 * np.pi * np.cos(2 * np.pi * 3 * x) - 14 * np.pi * np.sin(2 * np.pi * 7 * x)
    np.testing.assert_allclose(spectral_derivative(f), expected, atol=1e-12)


# The solver.


def closed_form(t: float, x: np.ndarray, c: float, k: int, period: float) -> np.ndarray:
    """From φ = 1 + c cos(κx) e^{−νκ²t} with κ = 2πk/L."""
    kappa = 2 * np.pi * k / period
    decay = np.exp(-NU * kappa**2 * t)
    return 2 * NU * c * kappa * np.sin(kappa * x) * decay / (1 + c * np.cos(kappa * x) * decay)


@given(c=st.floats(-0.6, 0.6), k=st.integers(1, 3), t=st.floats(0.01, 3), period=st.sampled_from([1.0, PERIOD]))
@settings(max_examples=40)
def test_a_closed_form(c, k, t, period):
    x = np.arange(256) / 256 * period
    found = solve(closed_form(0, x, c, k, period), t, NU, period)
    np.testing.assert_allclose(found, closed_form(t, x, c, k, period), atol=1e-12)


def etdrk4(u: np.ndarray, time: float, nu: float, period: float, steps: int) -> np.ndarray:
    """Cox and Matthews' exponential Runge–Kutta method in Fourier space, with 2/3 of the frequencies."""
    n, h = len(u), time / steps
    k = 2 * np.pi / period * np.arange(n // 2 + 1)
    kept = np.arange(n // 2 + 1) < n / 3
    L = -nu * k**2 * h
    circle = L[:, None] + np.exp(2j * np.pi * (np.arange(32) + 0.5) / 32)  # Kassam and Trefethen's contour
    E, half = np.exp(L), np.exp(L / 2)
    Q = h * ((np.exp(circle / 2) - 1) / circle).mean(1).real
    f1 = h * ((-4 - circle + np.exp(circle) * (4 - 3 * circle + circle**2)) / circle**3).mean(1).real
    f2 = h * ((2 + circle + np.exp(circle) * (circle - 2)) / circle**3).mean(1).real
    f3 = h * ((-4 - 3 * circle - circle**2 + np.exp(circle) * (4 - circle)) / circle**3).mean(1).real

    def N(v: np.ndarray) -> np.ndarray:
        return -0.5j * k * kept * np.fft.rfft(np.fft.irfft(v, n) ** 2)

    v = np.fft.rfft(u) * kept
    for _ in range(steps):
        a = half * v + Q * N(v)
        b = half * v + Q * N(a)
        c = half * a + Q * (2 * N(b) - N(v))
        v = E * v + f1 * N(v) + 2 * f2 * (N(a) + N(b)) + f3 * N(c)
    return np.fft.irfft(v, n)


@pytest.mark.parametrize("period", [PERIOD, 1.0])
def test_an_independent_integrator_agrees(period):
    """On a wave of 20 frequencies, and with a mean, which moves it."""
    modes = np.fft.rfft(wave(points=512))
    modes[20:] = 0
    u = np.fft.irfft(modes, 512) + 0.3
    found, expected = solve(u, 1, NU, period), etdrk4(u, 1, NU, period, 500)
    assert np.linalg.norm(found - expected) < 1e-9 * np.linalg.norm(expected)


@given(seed=st.integers(0, 999), shift=st.integers(0, 511), mean=st.floats(-1, 1))
@settings(max_examples=20)
def test_symmetries(seed, shift, mean):
    u = wave(seed)
    after = solve(u, 1, NU, PERIOD)
    assert abs(after.mean()) < 1e-13 and (after**2).sum() < (u**2).sum()
    np.testing.assert_allclose(solve(np.roll(u, shift), 1, NU, PERIOD), np.roll(after, shift), atol=1e-12)
    mirrored = np.roll(u[::-1], 1)  # u(−x)
    np.testing.assert_allclose(solve(-mirrored, 1, NU, PERIOD), -np.roll(after[::-1], 1), atol=1e-12)
    # u₀ + c is u, moved by cT; here a whole number of steps.
    c = PERIOD / 512 * (shift % 7)
    np.testing.assert_allclose(solve(u + c, 1, NU, PERIOD) - c, np.roll(after, shift % 7), atol=1e-10)
    # Half of the time, twice.
    twice = solve(solve(u + mean, 0.5, NU, PERIOD), 0.5, NU, PERIOD)
    np.testing.assert_allclose(twice, solve(u + mean, 1, NU, PERIOD), atol=1e-9)


def test_a_tiny_wave_obeys_the_heat_equation():
    u = 1e-8 * wave()
    k = np.arange(257)
    heat = np.fft.irfft(np.fft.rfft(u) * np.exp(-NU * k**2), 512)
    np.testing.assert_allclose(solve(u, 1, NU, PERIOD), heat, atol=1e-15)


def test_a_small_viscosity_is_refused():
    with pytest.raises(DataError, match="--viscosity 0.001 is too small"):
        solve(wave(), 1, 0.001, PERIOD)


# Folders.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("burgers") / "data"
    sizes = "--points 2048 --grid 256 --test-grids 64,2048 --train 60 --valid 3 --test 40".split()
    assert main(["burgers", *sizes, "--out", str(folder)]) == 0
    return folder


def array(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy")


def test_the_default_distribution_is_that_of_the_published_file(folder):
    """The digest of the file's period: with the period 1, the first ratio is 0.016."""
    test = array(folder, "train.input"), array(folder, "train.target")
    a, u = (np.linalg.norm(x, axis=1) for x in test)
    assert 0.75 < (u / a).mean() < 0.88
    manifest = json.loads((folder / "dataset.json").read_text())
    assert manifest["trivial_errors"]["input"] == pytest.approx(0.54, abs=0.03)
    assert manifest["statistics"]["input"]["std"] == pytest.approx(0.594, abs=0.05)
    assert manifest["periodic"] and manifest["gradient"] and manifest["dims"] == 1


def test_grids_are_nested_to_the_bit(folder):
    for name in ("input", "target", "gradient"):
        fine = array(folder, f"test_2048.{name}")
        assert fine.shape == (40, 2048) and fine.dtype == np.float32
        np.testing.assert_array_equal(array(folder, f"test.{name}"), fine[:, ::8])
        np.testing.assert_array_equal(array(folder, f"test_64.{name}"), fine[:, ::32])


def test_gradients_are_those_of_the_fine_grid(folder):
    np.testing.assert_allclose(
        array(folder, "test_2048.gradient"),
        spectral_derivative(array(folder, "test_2048.target").astype(float)),
        atol=1e-2,
    )


def test_pairs_are_those_of_their_numbers_and_seeds(folder, tmp_path):
    sizes = "--points 2048 --grid 256 --test-grids none --train 7 --valid 3 --test 5 --out".split()
    assert main(["burgers", *sizes, str(tmp_path / "same")]) == 0
    assert main(["burgers", "--seed", "2", *sizes, str(tmp_path / "other")]) == 0
    np.testing.assert_array_equal(array(tmp_path / "same", "train.target"), array(folder, "train.target")[:7])
    assert not np.array_equal(array(tmp_path / "other", "train.input"), array(folder, "train.input")[:7])
    assert not np.array_equal(array(folder, "train.input")[:3], array(folder, "valid.input"))


@pytest.mark.parametrize(
    ("options", "grids"),
    [("--points 1024 --grid 256", [512]), ("--points 1024 --grid 512", []), ("--grid 512", [8192])],
)
def test_default_test_grids_are_those_that_fit(options, grids, tmp_path):
    sizes = f"{options} --train 3 --valid 1 --test 2".split()
    assert main(["burgers", *sizes, "--out", str(tmp_path / "out")]) == 0
    assert sorted(tmp_path.glob("out/test_*.input.npy")) == [tmp_path / f"out/test_{n}.input.npy" for n in grids]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--grid 100", "--grid 100 is no stride of --points 8192"),
        ("--test-grids 512,600", "--test-grids 600 is no stride"),
        ("--test-grids 16384", "--test-grids 16384 is no stride"),
        ("--grid 512 --test-grids 512,1024", "--test-grids has 512, the --grid of test itself"),
        ("--points 101 --grid 101 --test-grids none", "--points 101 is odd"),
        ("--train 200000", "the subset train would have 409,600,000 numbers"),
        ("--test-grids 1e3", "must be numbers of points such as 512,1024"),
        (f"--test-grids {'9' * 5000}", f"such as 512,1024, or none, not '{'9' * 59}…'"),
        ("--viscosity 0", "must be a number above 0"),
        ("--viscosity 0.01", "Choose a larger --viscosity"),
        ("--period 1 --time 10", "at --time 10 little but rounding is left of a wave: choose a smaller --time"),
    ],
)
def test_refusals(options, message, tmp_path, capsys):
    try:
        code = main(["burgers", *options.split(), "--out", str(tmp_path / "out")])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2) and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("period", "ratio"), [("2pi", 0.81), ("1", 0.016)])
def test_the_equation_has_the_period_that_was_asked_for(period, ratio, tmp_path):
    """On the shorter interval, most of a wave has decayed at t = 1."""
    sizes = "--points 512 --grid 512 --test-grids none --train 40 --valid 1 --test 1"
    assert main(["burgers", "--period", period, *sizes.split(), "--out", str(tmp_path / "o")]) == 0
    a, u = (np.load(tmp_path / "o" / f"train.{name}.npy") for name in ("input", "target"))
    assert (np.linalg.norm(u, axis=1) / np.linalg.norm(a, axis=1)).mean() == pytest.approx(ratio, rel=0.2)

"""Burgers' equation (Li et al. 2021; Cao 2021): the wave at time 1 is to be found from the wave at time 0.

    u_t + u u_x = ν u_xx,   periodic;   for ν = 0.1 and the period 2π, for example

    0.1 sin x / (1 + 0.5 cos x)  ->  0.0905 sin x / (1 + 0.452 cos x)
    1 + 0.1 sin x / (1 + 0.5 cos x)  ->  1 + 0.0905 sin(x − 1) / (1 + 0.452 cos(x − 1))

The first wave is a Gaussian random field N(0, 625 (−Δ + 25)^−2) on the unit interval. The equation is solved exactly,
by Cole and Hopf's substitution in Fourier space. Nothing is stepped in time:

    u = −2ν φ_x/φ,   φ_t = ν φ_xx,   φ(·, 0) = exp(−ψ/2ν),   ψ_x = u(·, 0)

The published text has the period 1. The published file, burgers_data_R10, has the period 2π on a grid that is labelled
0 … 1: with --period 1 the wave has all but vanished at time 1. The default is the file's period.

The equation is solved on --points, and kept on --grid. --test-grids adds the functions of test on other grids:

    train, valid, test      on --grid
    test_512, test_8192     the functions of test with 512 and 8192 points

--raw-dir FOLDER reads the published file, burgers_data_R10.mat, with scipy, or with h5py if it is HDF5. train has its
first functions, test its last ones, and valid those before test. The file labels its points 0 … 1, i/8192.

SUBSET.input.npy, SUBSET.target.npy and SUBSET.gradient.npy have a, u and u_x, (functions, points), float32, at
x = 0, 1/n, …, (n − 1)/n. The derivative is that with respect to this x.

Source: generated, or the file of Li et al. 2021 ("Fourier Neural Operator"); Cao 2021 ("Choose a Transformer").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.dataset import DataError, Dataset, UsageError, above_0, option, whole_number
from data_prep.fields import (
    DEFAULT_SEED,
    FieldOptions,
    Fields,
    FieldSources,
    Solution,
    collect,
    draws,
    fewer_modes,
    grids,
    periodic_field,
    relative_error,
    spectral_derivative,
)

PERIODS = {"2pi": 2 * math.pi, "1": 1.0}
#: σ, τ and γ of the first wave.
SCALE, TAU, GAMMA = 25.0, 5.0, 2.0
#: The largest (max ψ − min ψ)/2ν: exp(−30) is 1e-13.
WIDEST = 30.0
LEAST_WAVE = 1e-10  # of the first wave; below, too many digits are rounding's
EPOCHS, BATCH = 100, 8  # of the published training
MODES = 16  # of the architecture
#: The published file, its functions and their points.
FILE, FUNCTIONS, POINTS = "burgers_data_R10.mat", 2048, 8192
#: Points of further test grids.
TEST_GRIDS = (512, 8192)
#: What tells the period 2π: the mean of ‖u‖/‖a‖, and the mean relative error of a as an answer. Functions drawn here
#: have 0.81 and 0.55; with the period 1, the first is 0.016.
RATIO, IDENTITY = (0.75, 0.88), (0.52, 0.56)
DRAWN = {"seed": DEFAULT_SEED, "period": "2pi", "viscosity": 0.1, "time": 1.0, "points": POINTS}


@dataclass(frozen=True)
class BurgersOptions(FieldOptions):
    period: str | None = option(
        None,
        "period of the waves: 2pi (default), the published file's, or 1",
        choices=tuple(PERIODS),
        when_given=True,
    )
    viscosity: float | None = option(None, "ν (default: 0.1)", type=above_0, when_given=True)
    time: float | None = option(None, "time of the target (default: 1)", type=above_0, when_given=True)
    points: int | None = option(
        None, f"points of the grid that is solved (default: {POINTS})", type=whole_number(16, 1 << 16)
    )
    grid: int = option(2048, "points of the grid of training (default: %(default)s)", type=whole_number(4, 1 << 16))
    test_grids: tuple[int, ...] | None = option(
        None,
        "further grids of test, separated by commas, or none (default: 512 and 8192, where they are other strides of "
        "--points than --grid)",
        type=grids,
    )
    dims = 1
    published = (FILE,)

    def cells(self, points: int) -> int:
        """The steps of a periodic grid."""
        return points

    def complete(self, sources: FieldSources) -> BurgersOptions:
        found = self.decide(sources, DRAWN, POINTS)
        if found.points % 2:
            raise UsageError(f"--points {found.points} is odd: choose an even number")
        if found.test_grids is None:
            fitting = tuple(n for n in TEST_GRIDS if found.points % n == 0 and n != found.grid)
            found = replace(found, test_grids=fitting)
        found.check_grids(sources, "the points")
        if sources.raw_dir is not None:
            found.check_rows(FUNCTIONS, ("train", "valid", "test"))
        return found


def solve(u: np.ndarray, time: float, viscosity: float, period: float) -> np.ndarray:
    """u(·, T) of Burgers' equation from u(·, 0), by Cole and Hopf.

    A wave of mean m is one of mean 0 that travels with speed m.

    Args:
        u: (n,), float64, at the points 0, L/n, …; n is even. time: T. viscosity: ν. period: L.

    Raises:
        DataError: ν is so small that exp(−ψ/2ν) has no digits left.
    """
    n, mean = len(u), u.mean()
    k = 2 * np.pi / period * np.arange(n // 2 + 1)
    derivative = 1j * k
    derivative[-1] = 0  # the highest frequency is a cosine, whose derivative vanishes at all points
    modes = np.fft.rfft(u - mean)
    psi = np.fft.irfft(np.divide(modes, derivative, out=np.zeros_like(modes), where=derivative != 0), n)
    span = (psi.max() - psi.min()) / (2 * viscosity)
    if span > WIDEST:
        raise DataError(
            f"--viscosity {viscosity:g} is too small for Cole and Hopf's substitution: exp(−{span:.3g}) loses all "
            "digits. Choose a larger --viscosity"
        )
    phi = np.fft.rfft(np.exp(-(psi - psi.min()) / (2 * viscosity))) * np.exp(-viscosity * k**2 * time)
    v = -2 * viscosity * np.fft.irfft(derivative * phi, n) / np.fft.irfft(phi, n)
    v -= v.mean()  # which is 0 but for rounding
    return mean + np.fft.irfft(np.fft.rfft(v) * np.exp(-1j * k * mean * time), n)


def read_published(sources: FieldSources) -> tuple[np.ndarray, np.ndarray]:
    """a and u of the published file, both (functions, points), float64.

    Raises:
        DataError: there is no such file, it is damaged, or has other functions.
    """
    a, u = sources.read(FILE, ("a", "u"), (FUNCTIONS, POINTS))
    sizes = [np.linalg.norm(x, axis=1) for x in (a, u)]
    if not all(size.all() for size in sizes):
        raise DataError("a or u has a function that is 0 everywhere", sources.find(FILE))
    digest = {
        "‖u‖/‖a‖": (float((sizes[1] / sizes[0]).mean()), RATIO),
        "‖a − u‖/‖u‖": (relative_error(a, u), IDENTITY),
    }
    for what, (value, (least, most)) in digest.items():
        if not least <= value <= most:
            raise DataError(
                f"the mean of {what} is {value:.3f}, expected {least} to {most} for ν = 0.1 and the period 2π: is this "
                "the official file?",
                sources.find(FILE),
            )
    return a, u


class Burgers(Dataset):
    """``python -m data_prep burgers``."""

    name, title, source = "burgers", "Burgers' equation", "its rule (Li et al. 2021)"
    licence, size = "none (generated)", "generated, or published"
    arch = "sg_operator_burgers"
    splits = ("grids",)
    options = BurgersOptions
    sources = FieldSources
    binarizes = False

    def build(self, options: BurgersOptions, sources: FieldSources) -> Fields:
        made = self.draw(options) if sources.raw_dir is None else self.read_file(options, sources)
        return Fields(
            **made,
            dims=1,
            periodic=True,
            recommended=(
                f"--arch {self.arch}{fewer_modes(options.grid, MODES)} --h1-weight 0.1 --batch-size {BATCH} "
                "--clip-norm 0.999 --one-cycle-rise 0.2"
            ),
            updates=EPOCHS * max(1, options.train // BATCH),
        )

    def draw(self, options: BurgersOptions) -> dict[str, Any]:
        period = PERIODS[options.period]

        def pair(subset: str, number: int) -> Solution:
            a = periodic_field(draws(options.seed, subset, number), options.points, SCALE, TAU, GAMMA)
            u = solve(a, options.time, options.viscosity, period)
            if np.ptp(u) < LEAST_WAVE * np.ptp(a):
                raise DataError(
                    f"at --time {options.time:g} little but rounding is left of a wave: choose a smaller --time, or a "
                    "smaller --viscosity"
                )
            return a, u, spectral_derivative(u)

        return {
            "arrays": collect(options, pair, "solving Burgers' equation"),
            "rule": (
                f"u_t + u u_x = {options.viscosity:g} u_xx of period {options.period}, from time 0 to "
                f"{options.time:g}, solved on {options.points} points"
            ),
            "membership": "drawn here, in the distribution of the published file",
        }

    def read_file(self, options: BurgersOptions, sources: FieldSources) -> dict[str, Any]:
        a, u = read_published(sources)
        first = {"train": 0, "valid": FUNCTIONS - options.test - options.valid, "test": FUNCTIONS - options.test}

        def pair(subset: str, number: int) -> Solution:
            row = first[subset] + number
            return a[row], u[row], spectral_derivative(u[row])

        return {
            "arrays": collect(options, pair, "reading Burgers' equation"),
            "rule": f"a and u of {FILE}, on {options.points} points",
            "membership": (
                f"train are the first {options.train:,} functions of the file, test the last {options.test:,}, valid "
                f"the {options.valid:,} before these; published are the first 1,024 and the last 100"
            ),
            "origin": sources.origin((FILE,)),
        }

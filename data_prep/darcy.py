"""Darcy flow (Li et al. 2021; Cao 2021): the pressure is to be found from the permeability of a medium.

    −∇·(a ∇u) = 1 in the unit square,   u = 0 at its edge;   in the centre, for example

    a = 3   ->  u = 0.02456
    a = 12  ->  u = 0.00614

With --inverse the permeability is to be found from the pressure.

A Gaussian random field N(0, 9 (−Δ + 9)^−2), with Neumann conditions, is --high where it is positive, and --low
elsewhere. The equation is solved by five-point differences on --points nodes a side, by conjugate gradients whose
preconditioner is the Laplacian. The solution is kept on --grid. --test-grids adds the functions of test on other grids:

    train, valid, test      on --grid
    test_211                the functions of test with 211 × 211 points

SUBSET.input.npy, SUBSET.target.npy have a and u, (functions, n, n), SUBSET.gradient.npy ∇u, (functions, n, n, 2), all
float32, at x_i = i/(n − 1), the edge included. --inverse has no gradients:

    input     u with noise, --noise times the standard deviation of u over train
    target    the mean of a over blocks, on --coarse × --coarse points

The published files hold values at the centres of cells, and splines moved them there. Those drawn here are at nodes,
where the edge is 0. --raw-dir FOLDER reads the published files, with scipy, or with h5py if they are HDF5:

    train            the first functions of piececonst_r421_N1024_smooth1.mat
    valid, test      of piececonst_r421_N1024_smooth2.mat, the last functions for test and those before them for valid

Their 421 × 421 values are taken for nodes, as published, though their edge is not 0. ∇u are differences of them.

Source: generated, or the files of Li et al. 2021 ("Fourier Neural Operator"); Cao 2021 ("Choose a Transformer").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.dataset import DataError, Dataset, UsageError, above_0, option, share, whole_number
from data_prep.draws import seed_of
from data_prep.fields import (
    DEFAULT_SEED,
    FieldOptions,
    Fields,
    FieldSources,
    Solution,
    collect,
    cosine_field,
    draws,
    fewer_modes,
    grids,
)

#: τ and α of the random field.
TAU, ALPHA = 3.0, 2.0
TOLERANCE = 1e-10  # of the residual, relative
MOST_ITERATIONS = 500
LARGEST_RESIDUAL = 1e-6  # of the solution itself, relative
EPOCHS, BATCH = 100, 4  # of the published training
MODES = 12  # of the architecture
DEFAULT_NOISE, DEFAULT_COARSE = 0.01, 36
#: The published files, the functions of each, and their points a side.
FILES, FUNCTIONS, POINTS = tuple(f"piececonst_r421_N1024_smooth{number}.mat" for number in (1, 2)), 1024, 421
DRAWN = {"high": 12.0, "low": 3.0, "faces": "arithmetic", "points": POINTS}


@dataclass(frozen=True)
class DarcyOptions(FieldOptions):
    inverse: bool = option(False, "the permeability from the pressure", given={"--inverse": True})
    noise: float | None = option(None, f"noise of --inverse (default: {DEFAULT_NOISE})", type=share)
    coarse: int | None = option(
        None, f"points a side of the target of --inverse (default: {DEFAULT_COARSE})", type=whole_number(2, 1_000)
    )
    high: float | None = option(None, "larger permeability (default: 12)", type=above_0, when_given=True)
    low: float | None = option(None, "smaller permeability (default: 3)", type=above_0, when_given=True)
    faces: str | None = option(
        None,
        "permeability between two nodes: arithmetic (default) or harmonic mean",
        choices=("arithmetic", "harmonic"),
        when_given=True,
    )
    points: int | None = option(
        None, f"points a side of the grid that is solved (default: {POINTS})", type=whole_number(3, 2_000)
    )
    grid: int = option(141, "points a side of the grid of training (default: %(default)s)", type=whole_number(3, 2_000))
    test_grids: tuple[int, ...] = option(
        (), "further grids of test, separated by commas, or none (default: none)", type=grids
    )
    dims = 2

    published = FILES

    def cells(self, points: int) -> int:
        """The steps of a grid with both end points."""
        return points - 1

    def complete(self, sources: FieldSources) -> DarcyOptions:
        if not self.inverse:
            for name in ("noise", "coarse"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} is for --inverse: leave it out")
        found = self.decide_all(sources)
        if sources.raw_dir is None and found.low >= found.high:
            raise UsageError(f"--low {found.low:g} is not below --high {found.high:g}: exchange or change them")
        if sources.raw_dir is None and 2 in found.test_grids:
            raise UsageError("--test-grids has 2: such a grid is all edge, where the answer is 0; choose 3 or more")
        found.check_grids(sources, "the points, less one,")
        if sources.raw_dir is not None:
            found.check_rows(FUNCTIONS, ("train",), ("valid", "test"))
        if not found.inverse:
            return found
        if found.test_grids:
            raise UsageError("--test-grids is not for --inverse, whose targets are means over blocks of --grid")
        coarse = DEFAULT_COARSE if found.coarse is None else found.coarse
        block = -(-found.grid // coarse)
        if coarse > found.grid or block * (coarse - 1) >= found.grid + (block * coarse - found.grid) // 2:
            raise UsageError(f"--grid {found.grid} has no {coarse} blocks: choose another --coarse")
        return replace(found, coarse=coarse, noise=DEFAULT_NOISE if found.noise is None else found.noise)

    def decide_all(self, sources: FieldSources) -> DarcyOptions:
        """As ``decide``. The noise of --inverse is drawn for published functions, too.

        Raises UsageError also for a seed by which nothing is drawn.
        """
        if sources.raw_dir is not None and self.inverse and self.noise == 0:
            seed_of(self.seed, False, DEFAULT_SEED, "--noise 0 draws nothing")
        if self.inverse and self.seed is None:
            return replace(self, seed=DEFAULT_SEED).decide(sources, DRAWN, POINTS)
        return self.decide(sources, DRAWN if self.inverse else {"seed": DEFAULT_SEED, **DRAWN}, POINTS)


class Operator:
    """−∇·(a ∇u) by five-point differences, for u that is 0 at the edge.

        (A u)_ij = Σ_{neighbours} a_face (u_ij − u_neighbour) / h²,   a_face the mean of a at both nodes

    Args:
        a: (K, K), float64. faces: ``arithmetic`` or ``harmonic``, the mean.
    """

    def __init__(self, a: np.ndarray, faces: str = "arithmetic") -> None:
        self.spacing = 1 / (len(a) - 1)
        one, other = (a[:-1, 1:-1], a[1:, 1:-1]), (a[1:-1, :-1], a[1:-1, 1:])
        means = [(p + q) / 2 if faces == "arithmetic" else 2 * p * q / (p + q) for p, q in (one, other)]
        self.rows, self.columns = (mean / self.spacing**2 for mean in means)  # (K − 1, K − 2), (K − 2, K − 1)

    def __call__(self, u: np.ndarray) -> np.ndarray:
        """A u at inner nodes, (K − 2, K − 2) -> the same shape."""
        down = self.rows * np.diff(np.pad(u, ((1, 1), (0, 0))), axis=0)
        right = self.columns * np.diff(np.pad(u, ((0, 0), (1, 1))), axis=1)
        return -np.diff(down, axis=0) - np.diff(right, axis=1)


class InverseLaplacian:
    """The inverse of −Δ by five-point differences, in the basis of sines, on K × K nodes."""

    def __init__(self, points: int) -> None:
        k = np.arange(1, points - 1)
        self.sines = math.sqrt(2 / (points - 1)) * np.sin(np.pi * np.outer(k, k) / (points - 1))
        values = (2 * (points - 1) * np.sin(np.pi * k / (2 * (points - 1)))) ** 2
        self.inverse = 1 / (values[:, None] + values)

    def __call__(self, f: np.ndarray) -> np.ndarray:
        return self.sines @ ((self.sines @ f @ self.sines) * self.inverse) @ self.sines


def solve(
    a: np.ndarray, precondition: InverseLaplacian, f: np.ndarray | float = 1.0, faces: str = "arithmetic"
) -> tuple[np.ndarray, int]:
    """u with −∇·(a ∇u) = f, by preconditioned conjugate gradients, and the number of iterations.

    The condition is at most max a / min a, whatever the grid.

    Args:
        a: (K, K). precondition: of the same grid. f: at the inner nodes (K − 2, K − 2), or a constant.
        faces: see :class:`Operator`.

    Returns:
        (K, K), 0 at the edge.

    Raises:
        DataError: no convergence, or to no solution; max a / min a is too large.
    """
    apply = Operator(a, faces)
    residual = np.broadcast_to(f, (len(a) - 2,) * 2).astype(float)
    right, size = residual.copy(), np.linalg.norm(residual)
    u, direction, rho = np.zeros_like(residual), 0.0, 1.0
    for iteration in range(MOST_ITERATIONS):
        if np.linalg.norm(residual) <= TOLERANCE * size:
            # Rounding may have taken the iteration's residual far from that of u.
            if np.linalg.norm(right - apply(u)) > LARGEST_RESIDUAL * size:
                break
            return np.pad(u, 1), iteration
        z = precondition(residual)
        before, rho = rho, (residual * z).sum()
        direction = z + rho / before * direction
        image = apply(direction)
        step = rho / (direction * image).sum()
        u += step * direction
        residual -= step * image
    raise DataError(f"no solution in {iteration + 1} iterations: choose --high and --low closer to each other")


def gradient(u: np.ndarray) -> np.ndarray:
    """∇u by differences of second order, (K, K) -> (K, K, 2)."""
    return np.stack(np.gradient(u, 1 / (len(u) - 1), edge_order=2), axis=-1)


def block_means(a: np.ndarray, coarse: int) -> np.ndarray:
    """Means over blocks of nodes, (…, n, n) -> (…, coarse, coarse); the first and last blocks may be narrower."""
    n = a.shape[-1]
    size = -(-n // coarse)
    first = (size * coarse - n) // 2  # nodes that the first block lacks
    block = (np.arange(n) + first) // size
    chosen = (np.arange(coarse)[:, None] == block).astype(float)
    chosen /= chosen.sum(1, keepdims=True)
    return chosen @ a @ chosen.T


class Darcy(Dataset):
    """``python -m data_prep darcy``."""

    name, title, source = "darcy", "Darcy flow", "its rule (Li et al. 2021)"
    licence, size = "none (generated)", "generated, or published"
    arch = "sg_operator_darcy"
    splits = ("grids", "inverse")
    options = DarcyOptions
    sources = FieldSources
    binarizes = False

    def build(self, options: DarcyOptions, sources: FieldSources) -> Fields:
        made = self.draw(options) if sources.raw_dir is None else self.read_files(options, sources)
        recommended = f"--arch {self.arch}{fewer_modes(options.grid, MODES)} --h1-weight 0.5"
        if options.inverse:
            made["arrays"] = inverted(made["arrays"], options)
            made["rule"] += f"; u with noise of {options.noise:g} standard deviations -> means of a over blocks"
            recommended = f"--arch sg_operator_inverse --coarse-points {options.coarse}"
        return Fields(
            **made,
            dims=2,
            periodic=False,
            recommended=f"{recommended} --batch-size {BATCH} --clip-norm 0.99",
            updates=EPOCHS * max(1, options.train // BATCH),
        )

    def draw(self, options: DarcyOptions) -> dict[str, Any]:
        precondition = InverseLaplacian(options.points)

        def pair(subset: str, number: int) -> Solution:
            field = cosine_field(draws(options.seed, subset, number), options.points, TAU, ALPHA)
            a = np.where(field >= 0, options.high, options.low)
            u, _ = solve(a, precondition, faces=options.faces)
            return a, u, None if options.inverse else gradient(u)

        return {
            "arrays": collect(options, pair, "solving Darcy's equation"),
            "rule": (
                f"−∇·(a ∇u) = 1 with a of {options.low:g} and {options.high:g} ({options.faces} means), solved on "
                f"{options.points} × {options.points} points"
            ),
            "membership": "drawn here, at nodes; the published files hold values at the centres of cells",
        }

    def read_files(self, options: DarcyOptions, sources: FieldSources) -> dict[str, Any]:
        files = dict(zip(("train", "valid", "test"), (FILES[0], FILES[1], FILES[1]), strict=True))
        first = {"train": 0, "valid": FUNCTIONS - options.test - options.valid, "test": FUNCTIONS - options.test}
        held: dict[str, list[np.ndarray]] = {}  # one file at a time: 3 GB

        def pair(subset: str, number: int) -> Solution:
            if files[subset] not in held:
                held.clear()
                held[files[subset]] = read_published(sources, files[subset])
            a, u = (values[first[subset] + number] for values in held[files[subset]])
            return a, u, None if options.inverse else gradient(u)

        arrays = collect(options, pair, "reading Darcy's equation")
        a = arrays["train"]["input"]
        return {
            "arrays": arrays,
            "rule": (
                f"coeff, from {a.min():g} to {a.max():g} over train, and sol of the published files, on "
                f"{options.points} × {options.points} points"
            ),
            "membership": (
                f"train are the first {options.train:,} functions of {FILES[0]}, test the last {options.test:,} of "
                f"{FILES[1]}, valid the {options.valid:,} before these; published are all 1,024 and the last 100"
            ),
            "origin": sources.origin(FILES),
        }


def read_published(sources: FieldSources, name: str) -> list[np.ndarray]:
    """a and u of a published file, both (functions, K, K), float64. Raises DataError."""
    arrays = sources.read(name, ("coeff", "sol"), (FUNCTIONS, POINTS, POINTS))
    if arrays[0].min() <= 0:
        raise DataError("coeff has values that are not above 0: is this the official file?", sources.find(name))
    return arrays


@np.errstate(over="ignore", invalid="ignore")  # ``Fields.check`` refuses what is not finite
def inverted(arrays: dict[str, dict[str, np.ndarray]], options: DarcyOptions) -> dict[str, dict[str, np.ndarray]]:
    """The pairs of the inverse problem: u with noise, and means of a over blocks."""
    std = options.noise * arrays["train"]["target"].std(dtype=float)
    found = {}
    for subset, named in arrays.items():
        u = named["target"]
        noise = np.stack(
            [draws(options.seed, f"{subset}.noise", i).standard_normal(u.shape[1:]) for i in range(len(u))]
        )
        target = block_means(named["input"].astype(float), options.coarse)
        found[subset] = {"input": (u + std * noise).astype(np.float32), "target": target.astype(np.float32)}
    return found

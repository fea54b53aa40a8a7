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

The published files hold values at the centres of cells, and splines moved them there. These are at nodes, where the
edge is 0.

Source: generated; Li et al. 2021 ("Fourier Neural Operator"), Cao 2021 ("Choose a Transformer").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from data_prep.dataset import DataError, Dataset, Sources, UsageError, above_0, option, share, whole_number
from data_prep.fields import FieldOptions, Fields, Solution, collect, cosine_field, draws, grids

#: τ and α of the random field.
TAU, ALPHA = 3.0, 2.0
TOLERANCE = 1e-10  # of the residual, relative
MOST_ITERATIONS = 500
EPOCHS, BATCH = 100, 4  # of the published training
DEFAULT_NOISE, DEFAULT_COARSE = 0.01, 36


@dataclass(frozen=True)
class DarcyOptions(FieldOptions):
    inverse: bool = option(False, "the permeability from the pressure", given={"--inverse": True})
    noise: float | None = option(None, f"noise of --inverse (default: {DEFAULT_NOISE})", type=share)
    coarse: int | None = option(
        None, f"points a side of the target of --inverse (default: {DEFAULT_COARSE})", type=whole_number(2, 1_000)
    )
    high: float = option(12.0, "larger permeability (default: 12)", type=above_0)
    low: float = option(3.0, "smaller permeability (default: 3)", type=above_0)
    faces: str = option(
        "arithmetic", "permeability between two nodes: arithmetic or harmonic mean", choices=("arithmetic", "harmonic")
    )
    points: int = option(421, "points a side of the grid that is solved (default: 421)", type=whole_number(3, 2_000))
    grid: int = option(141, "points a side of the grid of training (default: 141)", type=whole_number(3, 2_000))
    test_grids: tuple[int, ...] = option(
        (), "further grids of test, separated by commas, or none (default: none)", type=grids
    )
    dims = 2

    def complete(self, sources: Sources) -> DarcyOptions:
        if not self.inverse:
            for name in ("noise", "coarse"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} is for --inverse: leave it out")
        self.check_grids(2, cells, "the points, less one,")
        if not self.inverse:
            return self
        if self.test_grids:
            raise UsageError("--test-grids is not for --inverse, whose targets are means over blocks of --grid")
        coarse = DEFAULT_COARSE if self.coarse is None else self.coarse
        block = -(-self.grid // coarse)
        if coarse > self.grid or block * (coarse - 1) >= self.grid + (block * coarse - self.grid) // 2:
            raise UsageError(f"--grid {self.grid} has no {coarse} blocks: choose another --coarse")
        return replace(self, coarse=coarse, noise=DEFAULT_NOISE if self.noise is None else self.noise)


def cells(points: int) -> int:
    """The steps of a grid with both end points."""
    return points - 1


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
        DataError: no convergence; max a / min a is too large.
    """
    apply = Operator(a, faces)
    residual = np.broadcast_to(f, (len(a) - 2,) * 2).astype(float)
    end = TOLERANCE * np.linalg.norm(residual)
    u, direction, rho = np.zeros_like(residual), 0.0, 1.0
    for iteration in range(MOST_ITERATIONS):
        if np.linalg.norm(residual) <= end:
            return np.pad(u, 1), iteration
        z = precondition(residual)
        before, rho = rho, (residual * z).sum()
        direction = z + rho / before * direction
        image = apply(direction)
        step = rho / (direction * image).sum()
        u += step * direction
        residual -= step * image
    raise DataError(f"no solution in {MOST_ITERATIONS} iterations: choose --high and --low closer to each other")


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
    licence, size = "none (generated)", "generated"
    arch = "sg_operator_darcy"
    splits = ("grids", "inverse")
    options = DarcyOptions
    binarizes = False

    def build(self, options: DarcyOptions, sources: Sources) -> Fields:
        precondition = InverseLaplacian(options.points)

        def pair(subset: str, number: int) -> Solution:
            field = cosine_field(draws(options.seed, subset, number), options.points, TAU, ALPHA)
            a = np.where(field >= 0, options.high, options.low)
            u, _ = solve(a, precondition, faces=options.faces)
            return a, u, None if options.inverse else gradient(u)

        arrays = collect(options, pair, cells, "solving Darcy's equation")
        rule = (
            f"−∇·(a ∇u) = 1 with a of {options.low:g} and {options.high:g} ({options.faces} means), solved on "
            f"{options.points} × {options.points} points"
        )
        recommended = f"--arch {self.arch} --h1-weight 0.5"
        if options.inverse:
            arrays = inverted(arrays, options)
            rule += f"; u with noise of {options.noise:g} standard deviations -> means of a over blocks"
            recommended = "--arch sg_operator_inverse"
        return Fields(
            arrays,
            dims=2,
            periodic=False,
            rule=rule,
            membership="drawn here, at nodes; the published files hold values at the centres of cells",
            recommended=f"{recommended} --batch-size {BATCH} --clip-norm 0.99",
            updates=EPOCHS * max(1, options.train // BATCH),
        )


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

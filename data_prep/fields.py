"""Functions on grids, for operator learning: Gaussian random fields, nested grids, and the folder of a dataset.

A dataset has pairs of functions, an input and a target, in one or two dimensions. A subset has one grid. Coarser grids
are strides of the grid that an equation was solved on, so the functions of ``test`` and ``test_512`` are the same.
They are drawn, or with ``--raw-dir`` read from published files.

Function i of a drawn subset comes from numpy's frozen legacy generator, seeded by (seed, subset, i). Everything is
computed in float64 and rounded to float32. Matrix products (``@``) depend in the last bits on the number of threads.
"""

from __future__ import annotations

import argparse
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.random import RandomState

from data_prep.arrays import ArrayMaterial, Arrays
from data_prep.corpus import saving
from data_prep.dataset import (
    DataError,
    Dataset,
    Json,
    Options,
    Sources,
    UsageError,
    check_path,
    option,
    seed_number,
    shell_word,
    shorten,
    whole_number,
)
from data_prep.mat import read_mat
from data_prep.progress import progress

GENERATOR = "data_prep.fields"
#: Raised when equal requests give other functions.
VERSION = 1
LARGEST = 1 << 28  # numbers in the inputs of one subset
#: What a subset has: the files SUBSET.NAME.npy; ``gradient`` is that of the target, and some datasets have none.
ARRAYS = ("input", "target", "gradient")
TEST = "test"
DEFAULT_SEED = 1

#: The values of one pair on the fine grid: input (…), target (…), gradient of the target (…) or (…, dims), or None.
Solution = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def draws(seed: int, subset: str, number: int) -> RandomState:
    """The generator of function ``number`` of a subset."""
    return RandomState([seed, zlib.crc32(subset.encode()), number])


def periodic_field(random: RandomState, points: int, scale: float, tau: float, gamma: float) -> np.ndarray:
    """A Gaussian random field of mean 0 and period 1 at x = 0, 1/n, …, (n − 1)/n: N(0, σ² (−Δ + τ²)^−γ).

        f(x) = Σ_{k=1}^{n/2−1} s_k (ξ_k cos 2πkx + η_k sin 2πkx),   s_k = √2 σ ((2πk)² + τ²)^{−γ/2}

    with ξ, η ~ N(0, 1), drawn in the order of k: a finer grid adds frequencies and keeps the others.

    Args:
        random: gives the numbers. points: n, even. scale: σ. tau: τ. gamma: γ.

    Returns:
        (n,), float64.
    """
    k = np.arange(1, points // 2)
    std = np.sqrt(2) * scale * ((2 * np.pi * k) ** 2 + tau**2) ** (-gamma / 2)
    xi, eta = random.standard_normal((len(k), 2)).T * std
    modes = np.zeros(points // 2 + 1, dtype=complex)
    modes[1:-1] = (xi - 1j * eta) * (points / 2)
    return np.fft.irfft(modes, points)


def cosine_field(random: RandomState, points: int, tau: float, alpha: float) -> np.ndarray:
    """A Gaussian random field on [0, 1]² whose derivative across the edge is 0: N(0, τ^{2α−2} (−Δ + τ²)^−α).

    Its cosine coefficients are τ^{α−1} (π²(i² + j²) + τ²)^{−α/2} ξ_ij, that of the constant is 0.

    Args:
        random: gives the numbers. points: K; the grid has K × K nodes, the first and last of them on the edge.
        tau: τ. alpha: α.

    Returns:
        (K, K), float64.
    """
    i = np.arange(points)
    std = tau ** (alpha - 1) * (np.pi**2 * (i[:, None] ** 2 + i**2) + tau**2) ** (-alpha / 2)
    std[0, 0] = 0.0
    # φ_0 = 1, φ_i = √2 cos(πi x): orthonormal in L²(0, 1).
    waves = np.cos(np.pi * i[:, None] * np.linspace(0, 1, points)) * np.where(i == 0, 1.0, np.sqrt(2))[:, None]
    return waves.T @ (std * random.standard_normal((points, points))) @ waves


def spectral_derivative(f: np.ndarray) -> np.ndarray:
    """f′ of functions of period 1 on an even grid, (…, n) -> (…, n). The highest frequency has no derivative there."""
    points = f.shape[-1]
    modes = 2j * np.pi * np.arange(points // 2 + 1) * np.fft.rfft(f)
    modes[..., -1] = 0
    return np.fft.irfft(modes, points)


def grids(text: str) -> tuple[int, ...]:
    """Argument type: numbers of points, separated by commas, in order and once each; ``none`` for none."""
    words = [] if text == "none" else text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,7}\s*", word) and 2 <= int(word) <= 1 << 20 for word in words):
        raise argparse.ArgumentTypeError(f"must be numbers of points such as 512,1024, or none, not {shorten(text)}")
    return tuple(sorted({int(word) for word in words}))


grids.metavar = "N,N"


@dataclass(frozen=True)
class FieldSources(Sources):
    """Published files, or none: then the functions are drawn."""

    raw_dir: Path | None = option(
        None,
        "folder with the published .mat files, to be read instead of drawing functions",
        type=Path,
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        check_path("--raw-dir", self.raw_dir, "folder")

    def find(self, name: str) -> Path:
        """The path of a published file. Raises DataError if the folder lacks it."""
        if not (self.raw_dir / name).is_file():
            raise DataError(f"has no {name}: name the folder of the published file", self.raw_dir)
        return self.raw_dir / name

    def read(self, name: str, arrays: tuple[str, ...], shape: tuple[int, ...]) -> list[np.ndarray]:
        """Arrays of a published file, float64, of one shape. Raises DataError."""
        path = self.find(name)
        self.watch(path)  # scipy and h5py read it, and another pass hashes it
        return [read_mat(path, array, shape) for array in arrays]

    def origin(self, names: tuple[str, ...]) -> Json:
        """The origin of data from published files."""
        return {"files": [self.describe(name, self.find(name)) for name in names]}


@dataclass(frozen=True)
class FieldOptions(Options):
    """The options of all datasets of functions; those of the grids have other defaults in each.

    Attributes:
        published: the names of the published files.
        source_sha256: the hashes of these files, if they are read.
    """

    published: ClassVar[tuple[str, ...]] = ()

    train: int = option(1024, "functions in train (default: %(default)s)", type=whole_number(1, 1_000_000))
    valid: int = option(100, "functions in valid (default: %(default)s)", type=whole_number(1, 100_000))
    test: int = option(100, "functions in test (default: %(default)s)", type=whole_number(1, 100_000))
    seed: int | None = option(None, f"seed of the draw (default: {DEFAULT_SEED})", type=seed_number, when_given=True)
    source_sha256: tuple[str, ...] | None = field(default=None, metadata={"when_given": True})

    def identify(self, sources: FieldSources) -> Self:
        if sources.raw_dir is None:
            return self
        return replace(self, source_sha256=tuple(sources.sha256(sources.find(name)) for name in self.published))

    def decide(self, sources: FieldSources, drawn: Mapping[str, Any], points: int) -> Self:
        """The options with the defaults of ``drawn``, or with the ``points`` of published files, which decide the rest.

        Raises UsageError for options of ``drawn`` beside published files.
        """
        if sources.raw_dir is None:
            return replace(self, **{name: value for name, value in drawn.items() if getattr(self, name) is None})
        for name in drawn:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name} is for functions that are drawn: leave it out, or --raw-dir")
        return replace(self, points=points)

    def check_rows(self, functions: int, *groups: tuple[str, ...]) -> None:
        """Raises UsageError for subsets of one file, in ``groups``, that have more functions than the file."""
        for names in groups:
            wanted = sum(self.sizes[name] for name in names)
            if wanted > functions:
                raise UsageError(
                    f"{' + '.join(f'--{name} {self.sizes[name]}' for name in names)} are more than the {functions:,} "
                    "functions of the published file: choose fewer"
                )

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "valid": self.valid, TEST: self.test}

    def cells(self, points: int) -> int:
        """The steps of a grid, which a stride must divide."""
        raise NotImplementedError

    def check_grids(self, sources: FieldSources, counted: str) -> None:
        """Raises UsageError for a grid that is no stride of the fine one, or too large.

        Args:
            sources: give the fine grid, or --points does. counted: what ``cells`` counts.
        """
        fine = f"--points {self.points}" if sources.raw_dir is None else f"the published {self.points} points"
        for flag, numbers in (("--grid", (self.grid,)), ("--test-grids", self.test_grids)):
            for points in numbers:
                if points > self.points or self.cells(self.points) % self.cells(points):
                    raise UsageError(
                        f"{flag} {points} is no stride of {fine}: {counted} of the grid must divide "
                        f"{self.cells(self.points)}"
                    )
        if self.grid in self.test_grids:
            raise UsageError(f"--test-grids has {self.grid}, the --grid of test itself: leave it out")
        for name, size in self.sizes.items():
            points = max(self.grid, *self.test_grids) if name == TEST and self.test_grids else self.grid
            numbers = size * points**self.dims
            if numbers > LARGEST:
                raise UsageError(
                    f"the subset {name} would have {numbers:,} numbers, {LARGEST:,} is the limit: choose a smaller "
                    f"--{name} or grid"
                )

    def grids_of(self, subset: str) -> dict[str, int]:
        """The subsets with the functions of ``subset``: name -> points of its grid."""
        finer = {f"{TEST}_{points}": points for points in self.test_grids} if subset == TEST else {}
        return {subset: self.grid, **finer}


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # ``Fields.check`` refuses what is not finite
def collect(
    options: FieldOptions, solve: Callable[[str, int], Solution], what: str
) -> dict[str, dict[str, np.ndarray]]:
    """subset -> name of an array -> its values (S, …), float32, of the functions that ``solve`` gives.

    Args:
        options: sizes and grids. solve: (subset, number) -> the pair on the fine grid.
        what: the work in words, for a bar of progress.
    """
    arrays: dict[str, dict[str, np.ndarray]] = {}
    numbered = [(subset, number) for subset, size in options.sizes.items() for number in range(size)]
    for subset, number in progress(numbered, what):
        for name, function in zip(ARRAYS, solve(subset, number), strict=True):
            if function is None:
                continue
            for place, points in options.grids_of(subset).items():
                step = options.cells(options.points) // options.cells(points)
                coarse = function[(slice(None, None, step),) * options.dims]
                kept = arrays.setdefault(place, {})
                if name not in kept:
                    kept[name] = np.empty((options.sizes[subset], *coarse.shape), dtype=np.float32)
                kept[name][number] = coarse
    return arrays


class Fields(ArrayMaterial):
    """Pairs of functions, ready to be written.

    Args:
        arrays: as ``collect`` returns them.
        dims: 1 or 2. periodic: whether x_i = i/n, without the end point 1; otherwise x_i = i/(n − 1).
        rule, membership, origin: as in ``Material``; the origin is that of published files, if they are read.
        recommended: sizes, weight of derivatives, batches and the like of the published training; updates: of it.
    """

    def __init__(
        self,
        arrays: Arrays,
        *,
        dims: int,
        periodic: bool,
        rule: str,
        membership: str,
        recommended: str,
        updates: int,
        origin: Json | None = None,
    ) -> None:
        super().__init__(arrays)
        self.origin = {"generator": GENERATOR, "version": VERSION, **(origin or {})}
        self.dims, self.periodic = dims, periodic
        self.rule, self.membership = rule, membership
        self.recommended, self.updates = recommended, updates

    def check(self) -> None:
        """Raises DataError for values that float32 cannot hold, and for a target that is 0, which has no relative
        error.
        """
        super().check()
        for subset, named in self.arrays.items():
            for name, values in named.items():
                if not np.isfinite(values).all():
                    raise DataError(f"{name} of the subset {subset} has values beyond float32: choose other options")
            zero = np.flatnonzero(~named["target"].any(tuple(range(1, named["target"].ndim))))
            if len(zero):
                raise DataError(
                    f"target {zero[0]} of the subset {subset} is 0 everywhere, and has no relative error: choose other "
                    "options or functions"
                )

    def describe(self) -> Json:
        """Sizes, grids, scalar means and standard deviations of training, and errors of trivial predictions."""
        train = self.arrays["train"]
        statistics = {
            name: {"mean": float(train[name].mean(dtype=float)), "std": float(train[name].std(dtype=float))}
            for name in ("input", "target")
        }
        return {
            **super().describe(),
            "dims": self.dims,
            "periodic": self.periodic,
            "gradient": "gradient" in train,
            "statistics": statistics,
            "trivial_errors": dict(self._trivial_errors()),
        }

    def describe_subset(self, subset: str) -> Json:
        points = {name: self.arrays[subset][name].shape[1] for name in ("input", "target")}
        return {**super().describe_subset(subset), "points": points["input"], "target_points": points["target"]}

    def _trivial_errors(self) -> Iterator[tuple[str, float]]:
        """The mean relative error on test of the mean target of training and, in one dimension, of the input itself."""
        test, mean = self.arrays[TEST], self.arrays["train"]["target"].mean(0, dtype=float)
        yield "mean", relative_error(np.broadcast_to(mean, test["target"].shape), test["target"])
        if self.dims == 1:
            yield "input", relative_error(test["input"], test["target"])

    def summary(self, description: Json) -> list[str]:
        subsets = description["subsets"]
        width = max(map(len, subsets)) + 2
        lines = [f"{'subset':{width}}{'functions':>10}   points"]
        for name, entry in subsets.items():
            sides = dict.fromkeys((entry["points"], entry["target_points"]))  # of the input, and of another target
            grid = " -> ".join(f"{n} × {n}" if self.dims == 2 else f"{n}" for n in sides)
            lines.append(f"{name:{width}}{entry['size']:>10,}   {grid}")
        errors = [f"{value:.3f} for the {name}" for name, value in description["trivial_errors"].items()]
        return [*lines, f"relative error on test: {', '.join(errors)}"]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """With the published sizes and schedule."""
        return [
            f"fairseq-train {shell_word(out)} --user-dir fairseq_sg --task sg_operator {self.recommended} "
            f"--criterion relative_l2 --required-batch-size-multiple 1 --valid-subset valid "
            f"--best-checkpoint-metric relative_l2 --optimizer torch_adam --lr 1e-3 --lr-scheduler one_cycle "
            f"--max-update {self.updates} {saving(out, self.updates, validates=True)}"
        ]


def modes_for(points: int, most: int) -> int:
    """The frequencies of spectral layers, ``most`` or as many as a grid of ``points`` a side has in two dimensions."""
    return min(most, points // 2)


def fewer_modes(points: int, most: int) -> str:
    """The option behind an architecture with ``most`` frequencies, or "" where the grid has as many."""
    modes = modes_for(points, most)
    return f" --modes {modes}" if modes < most else ""


def relative_error(prediction: np.ndarray, target: np.ndarray) -> float:
    """The mean over samples of ‖û − u‖₂ / ‖u‖₂, both (S, …)."""
    prediction, target = (x.reshape(len(x), -1).astype(float) for x in (prediction, target))
    return float((np.linalg.norm(prediction - target, axis=1) / np.linalg.norm(target, axis=1)).mean())

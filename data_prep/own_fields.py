"""Your own functions on grids, from ``.npy`` files, for operator learning.

    a(x) at n points      ->  u(x) there                   on a line: arrays (functions, n)
    a(x, y) at n² points  ->  u(x, y) there, or at m²      on a square: arrays (functions, n, n) and (functions, m, m)

``--raw-dir`` has ``SUBSET.input.npy`` and ``SUBSET.target.npy`` of ``train``, ``valid`` and ``test``, and perhaps of
further tests, such as ``test_512`` on another grid. Inputs and targets are on the same points; on a square without a
period, targets may be on another grid, coarser or finer (``--coarse-output``). A side is [0, 1]: x_i = i/(n − 1), or
with ``--periodic`` x_i = i/n.

The values are rounded to float32.

Source: yours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data_prep.dataset import DataError, Dataset, Options, Sources, check_path, option
from data_prep.fields import TEST, Fields, modes_for

NEEDED = ("train", "valid", TEST)
NAMES = ("input", "target")
EPOCHS, BATCH = 100, 4
#: Sizes for fields on a square; those of the architectures are for the published problems.
SQUARE = "--arch sg_operator --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --encoder-attention-heads 4 --norm none"
LARGEST_COARSE, MOST_MODES = 43, 12


@dataclass(frozen=True)
class OwnFieldFiles(Sources):
    """The user's folder."""

    raw_dir: Path = option(help="the folder with SUBSET.input.npy and SUBSET.target.npy", type=Path, metavar="FOLDER")

    def __post_init__(self) -> None:
        check_path("--raw-dir", self.raw_dir, "folder")

    def paths(self) -> dict[str, dict[str, Path]]:
        """subset -> name of an array -> its file. Raises DataError for a file that is missing."""
        ends = [f".{name}.npy" for name in NAMES]
        subsets = sorted(path.name.removesuffix(end) for end in ends for path in self.raw_dir.glob(f"*{end}"))
        found = {}
        for subset in dict.fromkeys((*NEEDED, *subsets)):
            found[subset] = {name: self.raw_dir / f"{subset}.{name}.npy" for name in NAMES}
            for path in found[subset].values():
                if not path.is_file():
                    raise DataError(f"has no {path.name}: every subset needs an input and a target", self.raw_dir)
        return found

    def read(self, path: Path, name: str) -> np.ndarray:
        """The array of a file, float32, the input or the target by its ``name``.

        Raises DataError for a damaged file, for other than real numbers, and for a target that is 0 only as float32.
        """
        self.watch(path)  # another pass hashes it
        with as_data_errors(path):
            values = np.load(path, allow_pickle=False)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
            raise DataError("has no real numbers: write an array of floats by numpy.save", path)
        with np.errstate(over="ignore", under="ignore"), as_data_errors(path):
            rounded = values.astype(np.float32)
        if not np.isfinite(rounded).all():
            raise DataError("has values that are no finite float32 numbers", path)
        if name == "target":
            points = tuple(range(1, values.ndim))
            lost = np.flatnonzero(values.any(points) & ~rounded.any(points))
            if len(lost):
                raise DataError(
                    f"function {lost[0]} becomes 0 everywhere when it is rounded to float32: scale the targets up", path
                )
        return rounded


@dataclass(frozen=True)
class OwnFieldOptions(Options):
    periodic: bool = option(False, "the functions have the period 1, and no point at 1", given={"--periodic": True})
    files: dict[str, str] = field(default_factory=dict)

    def identify(self, sources: OwnFieldFiles) -> OwnFieldOptions:
        paths = [path for named in sources.paths().values() for path in named.values()]
        return replace(self, files={path.name: sources.sha256(path) for path in paths})


class OwnFields(Dataset):
    """``python -m data_prep fields``."""

    name, title, source = "fields", "Your functions on grids", "your files"
    licence, size = "yours", "yours"
    arch = "sg_operator_burgers"
    splits = ("your files",)
    options = OwnFieldOptions
    sources = OwnFieldFiles
    binarizes = False

    def build(self, options: OwnFieldOptions, sources: OwnFieldFiles) -> Fields:
        paths = sources.paths()
        arrays = {subset: {name: sources.read(path, name) for name, path in of.items()} for subset, of in paths.items()}
        train = arrays["train"]
        check_shape(paths["train"]["input"], train["input"].shape, (2, 3))
        fitted: dict[bytes, str] = {}  # function -> train or valid, on which the best checkpoint is chosen
        for subset, of in arrays.items():
            for name, values in of.items():
                check_shape(paths[subset][name], values.shape, (train["input"].ndim,))
                if subset in NEEDED and values.shape[1:] != train[name].shape[1:]:
                    raise DataError(
                        f"has another grid than train: only further tests, such as {TEST}_512, may have one",
                        paths[subset][name],
                    )
            check_target(paths[subset]["target"], of["input"], of["target"], options.periodic)
            check_apart(paths[subset]["input"], of["input"], fitted)
            if subset in ("train", "valid"):
                fitted |= {function.tobytes(): subset for function in of["input"]}
        return Fields(
            arrays,
            dims=train["input"].ndim - 1,
            periodic=options.periodic,
            rule="the user's functions",
            membership="the user's files",
            recommended=f"{recommended(train)} --batch-size {BATCH}",
            updates=EPOCHS * max(1, len(train["input"]) // BATCH),
            origin={"files": [sources.describe(path.name, path) for of in paths.values() for path in of.values()]},
        )


@contextmanager
def as_data_errors(path: Path) -> Iterator[None]:
    """Converts errors of a damaged file to DataError: numpy raises many kinds of them for a damaged header."""
    try:
        yield
    except OSError:
        raise
    except MemoryError as error:
        raise DataError(f"does not fit into memory, or is damaged ({error}): give fewer functions", path) from error
    except Exception as error:
        raise DataError(f"is no complete .npy file of numbers ({error}): write it by numpy.save", path) from error


def check_apart(path: Path, inputs: np.ndarray, others: dict[bytes, str]) -> None:
    """Raises DataError for a function of another subset: function -> subset."""
    for row, function in enumerate(inputs):
        if function.tobytes() in others:
            subset = others[function.tobytes()]
            raise DataError(f"function {row} is also one of {subset}: leave it out of one of them", path)


def check_shape(path: Path, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Raises DataError for an array that is no stack of functions on a line or a square, with two points or more."""
    if len(shape) not in dims or len(set(shape[1:])) != 1 or shape[1] < 2:
        expected = {2: "(functions, points)", 3: "(functions, points, points)"}
        wanted = " or ".join(expected[number] for number in dims)
        raise DataError(f"has the shape {shape} instead of {wanted}, with two points or more", path)


def check_target(path: Path, inputs: np.ndarray, target: np.ndarray, periodic: bool) -> None:
    """Raises DataError for a target on a grid that no model predicts on."""
    if inputs.shape[1:] != target.shape[1:] and (inputs.ndim == 2 or periodic):
        raise DataError(
            f"has {target.shape[1]} points a side, and the input {inputs.shape[1]}: only on a square without a period "
            "may they differ", path,
        )  # fmt: skip


def recommended(train: dict[str, np.ndarray]) -> str:
    """An architecture, or sizes, that the grids of training have room for."""
    points, outputs = (train[name].shape[1] for name in ("input", "target"))
    if train["input"].ndim == 2:
        return f"--arch sg_operator_burgers --modes {modes_for(outputs, 16)}"
    coarse = outputs if outputs != points else min(LARGEST_COARSE, points)
    more = " --coarse-output" if outputs != points else ""
    return f"{SQUARE} --field-scaling scalar --coarse-points {coarse}{more} --modes {modes_for(outputs, MOST_MODES)}"

"""Reads arrays from ``.mat`` files: with scipy up to version 7, with h5py those of version 7.3, which are HDF5."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from data_prep.dataset import DataError

HDF5 = b"\x89HDF\r\n\x1a\n"
HEADER = 512  # bytes of MATLAB before it


def read_mat(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array ``name`` of a file, float64, with the axes that MATLAB shows.

    Args:
        path: the file. name: of the array. shape: that it must have.

    Raises:
        DataError: scipy or h5py is needed and not installed; the file is damaged; it has no such array, or one of
            another shape, a sparse one, or one of no finite real numbers.
        OSError: there is no such file.
    """
    with path.open("rb") as stream:
        start = stream.read(HEADER + len(HDF5))
    read = _read_hdf5 if HDF5 in (start[: len(HDF5)], start[HEADER:]) else _read_older
    values = read(path, name, shape)
    if not isinstance(values, np.ndarray):
        raise DataError(f"{name} is no full array, but {type(values).__name__}: save it as full(…) in MATLAB", path)
    if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
        raise DataError(f"{name} has values that are no finite real numbers", path)
    return values.astype(np.float64, order="C", copy=False)


def _read_older(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    scipy_io = needed("scipy.io", "scipy", "a .mat file", path)
    with as_data_errors(path):
        shapes = {key: tuple(found) for key, found, _ in scipy_io.whosmat(path)}
    check_shape(path, name, shape, shapes)
    with as_data_errors(path):
        return scipy_io.loadmat(path, variable_names=[name])[name]


def _read_hdf5(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """HDF5 names the axes of MATLAB's arrays in the opposite order."""
    h5py = needed("h5py", "h5py", "a .mat file of version 7.3", path)
    with as_data_errors(path), h5py.File(path, "r") as file:
        arrays = {key: item for key, item in file.items() if isinstance(item, h5py.Dataset)}
        check_shape(path, name, shape, {key: item.shape[::-1] for key, item in arrays.items()})
        return arrays[name][()].T


def needed(module: str, package: str, what: str, path: Path) -> ModuleType:
    """An optional package. Raises DataError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{what} needs {package} ({error}): pip install {package}", path) from None


def check_shape(path: Path, name: str, shape: tuple[int, ...], found: dict[str, Any]) -> None:
    """Raises DataError unless the array ``name`` among those ``found``, name -> shape, has this shape."""
    if name not in found:
        raise DataError(f"has no array {name}: it has {', '.join(found) or 'none'}", path)
    if found[name] != shape:
        sizes = [" × ".join(map(str, numbers)) for numbers in (found[name], shape)]
        raise DataError(f"{name} is {sizes[0]} instead of the published {sizes[1]}", path)


@contextmanager
def as_data_errors(path: Path) -> Iterator[None]:
    """Converts errors of a damaged file to DataError: scipy and zlib raise many kinds of them."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"does not fit into memory ({error})", path) from error
    except Exception as error:
        raise DataError(f"cannot be read as a .mat file ({error}): is it complete?", path) from error

"""Data that are arrays: named arrays in subsets, each a ``.npy`` file that a task can map into memory.

    SUBSET.NAME.npy      the array NAME of SUBSET; its first axis counts the same things in all arrays of a subset
    raw/SUBSET.type      the type of every example of a subset, where examples have types

A ``.npz`` archive could not be mapped. Neither torch nor fairseq is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from data_prep.dataset import DataError, Json, Material
from data_prep.text import write_lines

#: subset -> name -> array
Arrays = Mapping[str, Mapping[str, np.ndarray]]


class ArrayMaterial(Material):
    """Arrays, ready to be written. A subclass has the attributes of ``Material``, and describes its subsets.

    Args:
        arrays: subset -> name -> array (S, …); S is that of the subset.
        types: subset -> the type of every example, for accuracy by type; nothing for a subset without types.
        groups: name of a group of types -> those types.
    """

    def __init__(
        self,
        arrays: Arrays,
        types: Mapping[str, Sequence[str]] = MappingProxyType({}),
        groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.arrays, self.types, self.groups = arrays, types, groups

    def check(self) -> None:
        """Raises DataError for a name that is no file name for fairseq, and for arrays of a subset that differ in
        length or are empty.
        """
        for subset, arrays in self.arrays.items():
            for name in (subset, *arrays):
                # fairseq joins valid, valid1, valid2, ... into one validation set. test_512 is a name of its own.
                if not re.fullmatch(r"[a-z][a-z_]*(_[0-9]+)?", name):
                    raise DataError(
                        f"neither a subset nor an array may be named {name!r}: small letters and _ only, perhaps with "
                        "a number after the last _"
                    )
            lengths = {name: len(array) for name, array in arrays.items()}
            if len(set(lengths.values())) != 1 or 0 in lengths.values():
                raise DataError(f"subset {subset} needs arrays of one length above 0, not {lengths}")

    def write(self, folder: Path, raw_only: bool) -> None:
        for subset, arrays in self.arrays.items():
            for name, array in arrays.items():
                save(folder / f"{subset}.{name}.npy", array)
        for subset, types in self.types.items():
            (folder / "raw").mkdir(exist_ok=True)
            write_lines(folder / "raw" / f"{subset}.type", types)

    def describe(self) -> Json:
        """The subsets as ``describe_subset`` has them, with their types; and the groups."""
        entries: Json = {"subsets": {subset: self.describe_subset(subset) for subset in self.arrays}}
        for subset, types in self.types.items():
            entries["subsets"][subset]["types"] = dict(sorted(Counter(types).items()))
        if self.groups:
            entries["groups"] = {name: list(kinds) for name, kinds in self.groups.items()}
        return entries

    def describe_subset(self, subset: str) -> Json:
        """The entry of a subset in ``dataset.json``: its ``size`` in examples, and further ones."""
        return {"size": len(next(iter(self.arrays[subset].values())))}


def save(path: Path, array: np.ndarray) -> None:
    """Writes the bytes of ``np.save``, whose error for a full disk has no number that would tell it from others."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.data)

"""What all folders of arrays share."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.arrays import ArrayMaterial
from data_prep.dataset import DataError


class Squares(ArrayMaterial):
    rule = membership = "squares"
    origin = {}

    def summary(self, description):
        return []

    def training_commands(self, dataset, out):
        return []


def squares(**arrays: np.ndarray) -> Squares:
    return Squares({"test": arrays}, {"test": ["odd", "even", "odd"]}, {"all": ["even", "odd"]})


def test_files_and_description(tmp_path):
    x = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
    material = squares(x=x, y=x**2)
    material.check()
    material.write(tmp_path, raw_only=False)
    assert (np.load(tmp_path / "test.x.npy", mmap_mode="r", allow_pickle=False) == x).all()
    assert (tmp_path / "raw" / "test.type").read_text("utf-8") == "odd\neven\nodd\n"
    assert material.describe() == {
        "subsets": {"test": {"size": 3, "types": {"even": 1, "odd": 2}}},
        "groups": {"all": ["even", "odd"]},
    }


@pytest.mark.parametrize(
    "arrays,message",
    [
        ({"x": np.zeros(3), "y": np.zeros(2)}, "subset test needs arrays of one length above 0"),
        ({"x": np.zeros(0)}, "subset test needs arrays of one length above 0"),
        ({"x1": np.zeros(3)}, "neither a subset nor an array may be named 'x1'"),
    ],
)
def test_wrong_arrays(arrays, message):
    with pytest.raises(DataError, match=message):
        squares(**arrays).check()

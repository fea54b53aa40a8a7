"""Predicted functions and their errors: those of the criterion, by grid, several models, pictures, wrong models."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.logging import metrics

from data_prep.__main__ import main as prepare
from fairseq_sg.analysis import load, operator
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.analysis.result import Result
from fairseq_sg.criterions.relative_l2 import RelativeL2, RelativeL2Config
from fairseq_sg.errors import UsageError
from helpers.analysis_models import checkpoint
from helpers.fields import write_waves
from helpers.prompts import write_prompts

ARGS = Namespace(subset="test,test_128", samples=(3, 1), batch_size=4, limit=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_waves(tmp_path_factory.mktemp("waves") / "out")


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "one.pt", folder, "operator")


@pytest.fixture
def loaded(saved):
    return load(str(saved), kinds=("functions",))


def test_errors_are_those_of_the_criterion(loaded):
    found = operator.measure(loaded, ARGS)
    criterion = RelativeL2(RelativeL2Config(), loaded.task)
    for name, points in (("test", 32), ("test_128", 128)):
        dataset = loaded.subset(name)
        with metrics.aggregate() as logged, torch.no_grad():
            RelativeL2.reduce_metrics([criterion(loaded.model, dataset.collater([dataset[i] for i in range(9)]))[2]])
        entry, errors = found.facts["subsets"][name], found.arrays[f"{name}.errors"]
        assert entry["mean"] == pytest.approx(logged["relative_l2"].avg, rel=1e-5) and len(errors) == 9
        assert (entry["points"], entry["functions"]) == (points, 9)
        assert (entry["median"], entry["largest"]) == (np.median(errors), errors.max())


def test_functions_that_are_drawn(loaded, folder):
    arrays = operator.measure(loaded, ARGS).arrays
    for part in ("input", "target"):
        np.testing.assert_array_equal(arrays[f"test.{part}"], np.load(folder / f"test.{part}.npy")[[3, 1]])
    difference = arrays["test.prediction"] - arrays["test.target"]
    errors = np.linalg.norm(difference, axis=1) / np.linalg.norm(arrays["test.target"], axis=1)
    np.testing.assert_allclose(errors, arrays["test.errors"][[3, 1]], rtol=1e-6)


def test_the_table(loaded):
    lines = operator.measure(loaded, ARGS).summary
    assert lines[0].split() == ["subset", "points", "functions", "mean", "error", "median", "largest"]
    assert [line.split()[:3] for line in lines[1:]] == [["test", "32", "9"], ["test_128", "128", "9"]]


def invented(*means: float, points=(32, 64), size=1.0) -> Result:
    subsets = {
        name: {"functions": 9, "points": n, "size": size, "mean": mean, "median": mean, "largest": mean}
        for name, n, mean in zip(("test", "test_64"), points, means, strict=True)
    }
    return Result(facts={"dims": 1, "samples": [0], "subsets": subsets})


def test_models_are_compared():
    combined = operator.combine({"a": [invented(1.0, 2.0), invented(2.0, 4.0)], "b": [invented(8.0, 9.0)]})
    assert combined.facts["subsets"]["test_64"]["models"] == {"a": [2.0, 4.0], "b": [9.0]}
    assert [line.split() for line in combined.summary] == [
        ["subset", "points", "a", "b"], ["test", "32", "1.500000", "8.000000"],
        ["test_64", "64", "3.000000", "9.000000"],
    ]  # fmt: skip
    (figure,) = operator.draw(combined, ARGS).values()
    (ax,) = figure.axes
    assert ax.lines[0].get_ydata().tolist() == [1.5, 3.0] and ax.lines[0].get_xdata().tolist() == [32, 64]
    assert len(ax.collections) == 1  # the band of two seeds
    with pytest.raises(UsageError, match="b was tested on other grids than the first model"):
        operator.combine({"a": [invented(1.0, 2.0)], "b": [invented(1.0, 2.0, points=(32, 128))]})
    with pytest.raises(UsageError, match="b was tested on other functions than the first model"):
        operator.combine({"a": [invented(1.0, 2.0)], "b": [invented(1.0, 2.0, size=1.01)]})
    assert operator.combine({"a": [invented(1.0, 2.0)], "b": [invented(1.0, 2.0, size=1 + 1e-6)]})


def test_a_comparison_on_one_grid_is_a_point_for_each_model():
    found = Result(facts={"subsets": {"test": {"points": 8, "models": {"a": [0.1], "b": [0.2, 0.4]}}}, "dims": 1})
    lines = operator.draw(found, ARGS)["grids"].axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[8, 0.1]], [[8, pytest.approx(0.3)]]]
    assert all(line.get_marker() == "." for line in lines)


def test_curves_are_in_the_order_of_grids():
    found = invented(1.0, 2.0, points=(64, 32))
    found.arrays = {name: np.zeros((1, 2)) for name in ("test.input", "test.target", "test.prediction")}
    found.arrays |= {"test.axis": np.arange(2), "test.target_axis": np.arange(2)}
    (line,) = operator.draw(found, ARGS)["grids"].axes[0].lines
    assert line.get_xydata().tolist() == [[32, 2], [64, 1]]
    (line,) = operator.draw(operator.combine({"a": [found]}), ARGS)["grids"].axes[0].lines
    assert line.get_xydata().tolist() == [[32, 2], [64, 1]]


def test_pictures_of_one_dimension(loaded):
    figures = operator.draw(operator.measure(loaded, ARGS), ARGS)
    assert list(figures) == ["samples", "grids"]
    above, second, below, _ = figures["samples"].axes
    assert (above.get_title(), second.get_title()) == ("test 3", "test 1")
    assert [len(ax.lines) for ax in (above, below)] == [3, 1]
    target, prediction = above.lines[1].get_ydata(), above.lines[2].get_ydata()
    np.testing.assert_allclose(below.lines[0].get_ydata(), prediction - target)


def test_pictures_of_two_dimensions(tmp_path):
    sizes = "--points 11 --grid 11 --train 3 --valid 2 --test 4 --out".split()
    assert prepare(["darcy", *sizes, str(tmp_path / "darcy")]) == 0
    saved = checkpoint(tmp_path / "one.pt", tmp_path / "darcy", "operator_2d")
    args = Namespace(subset="test", samples=(0, 2), batch_size=4, limit=None)
    found = operator.measure(load(str(saved), kinds=("functions",)), args)
    figures = operator.draw(found, args)
    assert list(figures) == ["samples"]
    maps = [ax.images[0] for ax in figures["samples"].axes if ax.images]
    assert len(maps) == 8 and maps[1].get_clim() == maps[2].get_clim()
    error = found.arrays["test.prediction"][1] - found.arrays["test.target"][1]
    np.testing.assert_allclose(maps[7].get_array(), error.T)
    assert maps[7].get_clim() == (-abs(error).max(), abs(error).max())


def test_the_command(saved, folder, tmp_path, capsys):
    common = ["--device", "cpu", "--subset", "test,test_64"]
    assert main(["operator", str(saved), *common, "--out", str(tmp_path / "one")]) == 0
    names = ["one.grids.png", "one.json", "one.npz", "one.samples.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / "one.json").read_text())["command"] == "operator"
    second, copy = checkpoint(tmp_path / "second.pt", folder, "operator", "--seed", "2"), tmp_path / "copy.pt"
    copy.write_bytes(saved.read_bytes())
    several = [f"a={saved}", str(second), str(copy), f"b={saved}", *common, "--format", "none", "--out"]
    assert main(["operator", *several, str(tmp_path / "two")]) == 0
    assert f"a: {copy} is left out, as it is a copy of {saved}" in capsys.readouterr().out
    found = set(np.load(tmp_path / "two.npz"))
    assert {"a.1.test.errors", "a.2.test.errors", "b.1.test_64.errors"} <= found and "a.3.test.errors" not in found


def test_wrong_models_functions_and_subsets(loaded, saved, tmp_path, capsys):
    with pytest.raises(UsageError, match="--samples has 9, and test has the functions 0 to 8"):
        operator.measure(loaded, Namespace(subset="test", samples=(9,), batch_size=4, limit=None))
    with pytest.raises(UsageError, match="has no subset 'gen'"):
        operator.measure(loaded, Namespace(subset="gen", samples=(0,), batch_size=4, limit=None))
    assert main(["norms", str(saved), "--device", "cpu"]) == 1
    assert f"predicts functions: run `fairseq-sg analysis operator {saved}`" in capsys.readouterr().err
    other = checkpoint(tmp_path / "numbers.pt", write_prompts(tmp_path / "prompts"), "regressor")
    with pytest.raises(UsageError, match="sg_regressor predicts no functions: this analysis needs sg_operator"):
        load(str(other), kinds=("functions",))
    with pytest.raises(SystemExit):
        main(["operator", str(saved), "--samples", "first"])
    assert "must be numbers of functions such as 0,1,5" in capsys.readouterr().err

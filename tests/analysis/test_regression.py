"""Errors of a regressor by examples: those of the criterion, beside exact predictors; several models; wrong models."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.logging import metrics

import fairseq_sg
from data_prep.in_context.oracles import ORACLES
from fairseq_sg.analysis import load, regression
from fairseq_sg.analysis.__main__ import main
from fairseq_sg.analysis.result import Result
from fairseq_sg.criterions.regression import Regression, RegressionConfig
from fairseq_sg.errors import UsageError
from helpers.analysis_models import checkpoint
from helpers.prompts import write_prompts


def options(subset: str = "test", **other: int) -> Namespace:
    return Namespace(**{"subset": subset, "batch_size": 4, "scales": None, "limit": None} | other)


ARGS = options("test,query_orthogonal")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "out")


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "one.pt", folder, "regressor")


@pytest.fixture
def loaded(saved):
    return load(str(saved), kinds=("numbers",))


def test_errors_are_those_of_the_criterion(loaded):
    found = regression.measure(loaded, ARGS)
    dataset = loaded.subset("test")
    criterion = Regression(RegressionConfig(), loaded.task)
    with metrics.aggregate() as logged, torch.no_grad():
        batch = dataset.collater([dataset[i] for i in range(21)])
        Regression.reduce_metrics([criterion(loaded.model, batch)[2]])
    entry = found.facts["subsets"]["test"]
    assert np.mean(entry["errors"]) == pytest.approx(logged["mse"].avg, rel=1e-5)
    assert entry["by_loop"] == [pytest.approx(logged["mse_last"].avg, rel=1e-5)] == [entry["errors"][-1]]
    assert found.arrays["test.errors"].shape == (1, 21, 6)
    assert found.arrays["query_orthogonal.errors"].shape == (1, 21, 3)


def test_exact_predictors(loaded):
    """Least squares have no error once there are as many examples as dimensions."""
    found = regression.measure(loaded, ARGS)
    errors = found.facts["subsets"]["test"]["oracles"]
    assert max(errors["least_squares"][3:]) < 1e-9 < min(errors["least_squares"][:3])
    y = np.load(f"{loaded.data}/test.y.npy").astype(float)
    assert errors["averaging"][0] == errors["nearest_neighbors"][0] == pytest.approx((y[:, 0] ** 2).mean() / 3)
    near = (y[:, 1] - y[:, 0]) ** 2 / 3
    np.testing.assert_allclose(found.arrays["test.nearest_neighbors"][:, 1], near)
    assert found.facts["subsets"]["test"]["floor"] == pytest.approx(4 * 2 / 6)
    assert found.facts["subsets"]["query_orthogonal"]["floor"] is None


def test_the_floor_of_more_examples(saved, tmp_path):
    """σ² (1 + ⅔ + ⅓) over the points of the prompts, whose number is not that of training."""
    longer = write_prompts(tmp_path / "longer", "--long", 9)
    model = load(str(saved), data=str(longer), kinds=("numbers",))
    found = regression.measure(model, options("test,long")).facts["subsets"]
    assert [found[name]["floor"] for name in ("test", "long")] == [pytest.approx(4 * 2 / p) for p in (6, 10)]
    assert len(found["long"]["errors"]) == 10


def test_limit(loaded):
    found = regression.measure(loaded, options(limit=6))
    assert found.arrays["test.errors"].shape == found.arrays["test.averaging"][None].shape == (1, 6, 6)


def test_the_table(loaded):
    lines = regression.measure(loaded, ARGS).summary
    assert lines[0].startswith("test: 21 prompts, mean error ") and "at least 1.3333 is expected" in lines[0]
    assert lines[1].split() == ["examples", "model", *ORACLES]
    assert [line.split()[0] for line in lines[2:8]] == list("012345")
    many = regression.table({"exact": np.arange(41.0)}, {"a": [np.zeros(41), np.ones(41)]})
    assert [line.split() for line in many[-4:]] == [
        ["8", "0.5000", "8.0000"], ["16", "0.5000", "16.0000"],
        ["32", "0.5000", "32.0000"], ["40", "0.5000", "40.0000"],
    ]  # fmt: skip


def test_other_scales_of_x(loaded):
    """The answer 0 has the error σ² for linear functions; σ is uniform below that of training; every test has prompts
    of its own.
    """
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    found = regression.measure(loaded, options(scales=40))
    entry = found.facts["scales"]
    stds, errors = np.array(entry["x_std"]), np.array(entry["errors"])
    assert entry["prompts"] == 21 and stds.shape == errors.shape == found.arrays["scales.errors"][0].shape == (40,)
    assert 0 < stds.min() < 0.5 and 1.5 < stds.max() < 2 and abs(stds.mean() - 1) < 0.3
    # The mean of 40 · 21 squared errors / σ², each with mean 1 and variance 3 (1 + 2/n) − 1 = 4.
    assert abs((errors / stds**2).mean() - 1) < 4 * (4 / (40 * 21)) ** 0.5
    assert len(set((errors / stds**2).tolist())) == 40
    assert entry["mean"] == pytest.approx(errors.mean())
    assert regression.measure(loaded, options(scales=40)).facts["scales"] == entry
    few = regression.measure(loaded, options(scales=3, limit=5)).facts["scales"]
    assert few["prompts"] == 5 and few["x_std"] == entry["x_std"][:3]


def test_scales_of_a_looped_model(folder, tmp_path):
    """The errors of the query after each loop on the prompts of a test, and their mean."""
    path = checkpoint(tmp_path / "looped.pt", folder, "regressor", "--depth", "looped", "--loops", "3")
    model = load(str(path), kinds=("numbers",))
    found = regression.measure(model, options(scales=2))
    assert found.arrays["scales.errors"].shape == (3, 2)
    np.testing.assert_allclose(found.facts["scales"]["errors"], found.arrays["scales.errors"].mean(0))
    prompts = replace(model.task.prompts, x_std=found.facts["scales"]["x_std"][1])
    x, y = prompts.draw_many(regression.SCALES_SEED, "scales1", 21)
    with torch.no_grad():
        predictions = model.model(torch.tensor(x), torch.tensor(y[:, :-1]))[0][:, :, -1].numpy()
    by_hand = ((predictions - y[:, -1]) ** 2).mean(1) / 3
    np.testing.assert_allclose(found.arrays["scales.errors"][:, 1], by_hand, rtol=1e-5)


def invented(errors: list[float], by_loop: list[float], oracle: float = 1.0) -> Result:
    entry = {"prompts": 5, "unit": 2.0, "floor": None, "oracles": {"averaging": [oracle, 0.5]}}
    return Result(facts={"subsets": {"test": entry | {"errors": errors, "by_loop": by_loop}}})


def test_models_are_compared():
    seeds = [invented([1.0, 2.0], [3.0, 2.0]), invented([2.0, 4.0], [5.0, 4.0])]
    combined = regression.combine({"a": seeds, "b": [invented([8.0, 9.0], [9.0])]})
    entry = combined.facts["subsets"]["test"]
    assert entry["models"]["a"] == {"errors": [[1.0, 2.0], [2.0, 4.0]], "by_loop": [[3.0, 2.0], [5.0, 4.0]]}
    assert combined.summary[1].split() == ["examples", "a", "b", "averaging"]
    assert combined.summary[2].split() == ["0", "1.5000", "8.0000", "1.0000"]
    with pytest.raises(UsageError, match="b was tested on other prompts than the first model"):
        regression.combine({"a": seeds, "b": [invented([1.0, 2.0], [2.0], oracle=2.0)]})
    with pytest.raises(UsageError, match="the checkpoints of a have different numbers of loops"):
        regression.combine({"a": [seeds[0], invented([1.0, 2.0], [2.0])]})


def test_pictures():
    """A panel for the examples, one for the loops; logarithmic; exact predictors dashed; a band for several seeds."""
    combined = regression.combine({"a": [invented([1.0, 2.0], [3.0, 2.0]), invented([2.0, 4.0], [5.0, 4.0])]})
    (figure,) = regression.draw(combined, ARGS).values()
    by_examples, by_loops = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["test", "test, last point"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log"]
    model, exact = by_examples.lines
    assert model.get_ydata().tolist() == [1.5, 3.0] and exact.get_linestyle() == "--"
    assert by_loops.lines[0].get_xdata().tolist() == [1, 2] and len(by_loops.collections) == 1
    assert by_examples.get_ylim()[0] == 0.5
    (figure,) = regression.draw(invented([1.0, 2.0], [2.0]), ARGS).values()
    assert len(figure.axes) == 1 and [text.get_text() for text in figure.legends[0].texts] == ["model", "averaging"]


def test_boxes_of_scales():
    """A box per model, over tests and seeds, on a logarithmic axis; in a picture of its own."""
    results = [invented([1.0, 2.0], [2.0]) for _ in range(3)]
    for result, errors in zip(results, ([1.0, 10.0], [2.0, 20.0], [4.0, 40.0])):
        result.facts["scales"] = {"prompts": 5, "x_std": [0.5, 1.5], "errors": errors, "mean": sum(errors) / 2}
    combined = regression.combine({"a": results[:2], "b": results[2:]})
    models = {"a": [[1.0, 10.0], [2.0, 20.0]], "b": [[4.0, 40.0]]}
    assert combined.facts["scales"] == {"prompts": 5, "x_std": [0.5, 1.5], "models": models}
    assert combined.summary[-3].split() == ["model", "mean", "quartile", "median", "quartile"]
    assert combined.summary[-2].split() == ["a", "8.2500", "1.7500", "6.0000", "12.5000"]
    (axes,) = regression.draw(combined, ARGS)["scales"].axes
    assert axes.get_yscale() == "log" and [text.get_text() for text in axes.get_xticklabels()] == ["a", "b"]
    medians = [line.get_ydata()[0] for line in axes.lines if line.get_linewidth() == 1.5]
    assert medians == [6.0, 22.0]
    assert list(regression.draw(results[0], ARGS)) == ["", "scales"]


def test_the_command(saved, folder, tmp_path, capsys):
    assert main(["regression", str(saved), "--device", "cpu", "--out", str(tmp_path / "one"), "--subset", "valid"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "one.npz", "one.png"]
    facts = json.loads((tmp_path / "one.json").read_text())
    assert facts["command"] == "regression" and list(facts["subsets"]) == ["valid"]
    assert main(["regression", str(saved), "--device", "cpu", "--out", str(tmp_path / "s"), "--scales", "2"]) == 0
    assert {path.name for path in tmp_path.glob("s.*")} == {"s.json", "s.npz", "s.png", "s.scales.png"}
    assert "2 tests of 21 prompts" in capsys.readouterr().out
    second = checkpoint(tmp_path / "second.pt", folder, "regressor", "--seed", "2")
    several = [f"a={saved}", str(second), f"b={saved}", "--device", "cpu", "--format", "none", "--out"]
    assert main(["regression", *several, str(tmp_path / "two")]) == 0
    assert "examples       a       b  least_squares" in capsys.readouterr().out
    assert {"a.1.test.errors", "a.2.test.errors", "b.1.test.averaging"} <= set(np.load(tmp_path / "two.npz"))


def test_wrong_models_and_subsets(saved, folder, capsys):
    with pytest.raises(UsageError, match="the data folder .* has no subset 'gen': it has valid, test"):
        regression.measure(load(str(saved), kinds=("numbers",)), options("gen"))
    for command in (["maps", str(saved), "--input", "a"], ["norms", str(saved)]):
        assert main([*command, "--device", "cpu"]) == 1
        assert f"predicts numbers: run `fairseq-sg analysis regression {saved}`" in capsys.readouterr().err
    with pytest.raises(UsageError, match="sg_regressor predicts numbers"):
        fairseq_sg.load(saved)


def test_models_of_words_are_refused(tmp_path):
    from helpers.analysis_models import pairs_folder

    path = checkpoint(tmp_path / "words.pt", pairs_folder(tmp_path / "pairs"), "softmax")
    with pytest.raises(UsageError, match="sg_transformer predicts no numbers: this analysis needs a regressor"):
        load(str(path), kinds=("numbers",))

"""Figures of trainings: the drawn numbers; rows with an x, and their sweep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

pytest.importorskip("matplotlib")

import figures  # noqa: E402
import quickstart  # noqa: E402
import recipe  # noqa: E402
import reproduce  # noqa: E402
import verdicts  # noqa: E402


@pytest.fixture
def drawn(monkeypatch):
    """The drawn axes of every figure, by the name of its file."""
    found = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: found.update({path.name: figure.axes}))
    yield found
    figures.pyplot().close("all")


def curve(*points):
    """A curve from (step, accuracy, loss) on valid; gen is half as accurate with twice the loss."""
    return [{"step": s, "valid": a, "valid_loss": x, "gen": a / 2, "gen_loss": 2 * x} for s, a, x in points]


COURSES = {
    "scan": {
        "a": [curve((1, 10, 2.0), (2, 50, 1.0), (3, 90, 0.0)), curve((1, 30, 1.0), (2, 70, 0.5))],
        "b": [curve((1, 0, 3.0), (2, 0, 3.0))],
    }
}


def lines(axes):
    return [line.get_xydata().tolist() for line in axes.lines]


def test_accuracy_and_loss_through_training(drawn, tmp_path):
    assert figures.through_training(COURSES, ["valid", "gen"], ["gen"], tmp_path / "c.png", {"valid": "IID"})
    valid, gen, nothing, loss = drawn["c.png"]
    # Means at the common steps of both seeds; only the model with two seeds has a band.
    assert lines(valid) == [[[1, 20], [2, 60]], [[1, 0], [2, 0]]] and lines(gen)[0] == [[1, 10], [2, 30]]
    (band,) = valid.collections
    assert {tuple(v) for v in band.get_paths()[0].vertices.tolist()} == {(1, 10), (1, 30), (2, 50), (2, 70)}
    assert lines(loss) == [[[1, 3], [2, 1.5]], [[1, 6], [2, 6]]] and not nothing.lines and not nothing.axison
    assert (valid.get_title(), gen.get_title(), loss.get_ylabel()) == ("IID (valid)", "gen", "loss, bits per token")
    assert [text.get_text() for text in gen.get_legend().get_texts()] == ["a", "b"]


def test_a_loss_that_was_rounded_to_nothing_has_a_place_on_its_axis(drawn, tmp_path):
    courses = {"one": {"a": [curve((1, 10, 2.0), (2, 50, 0.0))]}, "two": COURSES["scan"]}
    assert figures.through_training(courses, [], ["valid"], tmp_path / "c.png")
    one, two = drawn["c.png"]
    assert lines(one) == [[[1, 2], [2, figures.LEAST]]]
    assert (one.get_yscale(), two.get_yscale()) == ("log", "linear")
    assert (one.get_title(), two.get_title()) == ("one: valid", "two: valid")


@pytest.mark.parametrize("points", [[], [(5, 10, 1.0)]], ids=["none", "one"])
def test_nothing_is_drawn_of_a_single_evaluation(points, drawn, tmp_path):
    courses = {"scan": {"a": [curve(*points)] * 2}}
    assert not figures.through_training(courses, ["valid"], ["valid"], tmp_path / "c.png")
    assert not figures.loss_and_accuracy(courses, ["valid"], tmp_path / "l.png") and not drawn


def test_seeds_are_joined_where_all_have_been_measured():
    one = [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3}]
    two = [{"step": 2, "x": 4.0}, {"step": 3, "x": 5.0}]
    assert figures.band([one, two, [{"step": 2}]], "x") == ([2], [[2.0, 4.0]])
    assert figures.band([], "x") == ([], [])


def test_accuracy_over_loss(drawn, tmp_path):
    assert figures.loss_and_accuracy(COURSES, ["valid"], tmp_path / "l.png")
    (axes,) = drawn["l.png"]
    expected = [[2.0, 10], [1.0, 50], [figures.LEAST, 90], [1.0, 30], [0.5, 70], [3.0, 0], [3.0, 0]]
    assert [point for line in lines(axes) for point in line] == expected
    shades = [line.get_alpha() for line in axes.lines[:3]]
    assert shades == sorted(shades) and shades[0] < shades[2] == 1


@pytest.mark.parametrize("models,evaluations,panels", [(2, 2, 4), (2, 1, 1), (9, 2, 1)])
def test_the_comparisons_draw_the_same(models, evaluations, panels, drawn, tmp_path):
    """Accuracy and loss of both subsets; bars of many models, or of one evaluation."""
    points = [(1, 10, 2.0), (2, 50, 1.0)][:evaluations]
    runs = [{"name": f"m{i}", "result": {"curve": curve(*points)}} for i in range(models)]
    quickstart.plot(
        {"what": "SCAN; and more", "runs": [*runs, {"name": "bad", "failed": "training"}]}, tmp_path / "q.png"
    )
    assert len(drawn.get("q.png", [None])) == panels and (tmp_path / "q.png").exists() == (panels == 1)


# Rows with an x.

SWEEP = """\
title: A sweep
source: Nobody 1999
data:
  tiny: {folder: tiny, prepare: scan, subsets: [valid, gen]}
steps: 40
validate_every: 20
batch_size_valid: 4
seeds: 2
unit: percent
checkpoint: last
train: --task sg_translation
columns:
  IID: {subset: valid}
  OOD: {subset: gen, metric: loss}
x_axis: {label: weight λ, scale: log}
rows:
  none:
    label: without
    arguments: ""
  high:
    x: 1.0e-1
    arguments: --orthogonality-weight 1e-1
  low:
    x: 1
    arguments: --orthogonality-weight 1
chosen: [all]
"""


def read(folder: Path, text: str = SWEEP) -> recipe.Recipe:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return recipe.read(path)


def test_an_x_is_read(tmp_path):
    found = read(tmp_path)
    assert found.x_axis == recipe.XAxis("weight λ", "log")
    assert {name: row.x for name, row in found.rows.items()} == {"none": None, "high": 0.1, "low": 1.0}
    assert read(tmp_path, SWEEP.replace(", scale: log", "")).x_axis.scale == "linear"


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("x: 1.0e-1", "x: 1e-1", "row 'high', key 'x': must be a number, with a point in it (1.0e-4), not '1e-1'"),
        ("x: 1.0e-1", "x: yes", "row 'high', key 'x': must be a number, with a point in it (1.0e-4), not True"),
        ("x: 1.0e-1", "x: .nan", "row 'high', key 'x': is nan: it must be finite"),
        ("x: 1.0e-1", "x: -.inf", "row 'high', key 'x': is -inf: it must be finite"),
        ("x: 1.0e-1", "x: 0", "x_axis, key 'scale': is log, but the x of the row 'high' is 0: it must be above 0"),
        ("x: 1.0e-1", "x: 1.0", "x_axis, key 'label': has two rows with the same x, 1: 'high' and 'low'"),
        ("    x: 1.0e-1\n", "", "x_axis, key 'label': needs at least two rows with an x"),
        ("x_axis: {label: weight λ, scale: log}\n", "", "key 'x_axis': is missing: the row 'high' has an x, which"),
        ("scale: log", "scale: lg", "x_axis, key 'scale': is 'lg': choose from linear, log"),
        ("scale: log", "base: 2", "x_axis, key 'base': is unknown"),
        ("label: weight λ, ", "", "x_axis, key 'label': is missing"),
        ("{label: weight λ, scale: log}", "λ", "key 'x_axis': must be a mapping (key: value), not 'λ'"),
    ],
)
def test_what_is_wrong_with_an_x_is_named(old, new, message, tmp_path):
    assert SWEEP.count(old) == 1
    with pytest.raises(recipe.RecipeError) as error:
        read(tmp_path, SWEEP.replace(old, new))
    assert message in str(error.value) and "sweep.yaml: " in str(error.value)


def line_of(row: str, accuracies, losses) -> verdicts.Line:
    cells = {"IID": verdicts.Cell(accuracies, None, "–"), "OOD": verdicts.Cell(losses, None, "–")}
    courses = [curve((1, 10, 2.0), (2, 50, 1.0)) for _ in accuracies]
    return verdicts.Line(row, row, "tiny", 40, 40, len(accuracies), 0, 2, cells, courses)


def test_the_sweep_of_a_recipe(drawn, tmp_path, monkeypatch):
    found = [line_of("none", [60.0, 80.0], [2.0]), line_of("high", [90.0, 70.0], [1.0]), line_of("low", [], [])]
    monkeypatch.setattr(verdicts, "_bars", lambda recipe, found, path: path)
    written = verdicts.plots(read(tmp_path), found, tmp_path / "out")
    assert [path.name for path in written] == ["out.png", "out-curves.png", "out-loss.png", "out-sweep.png"]
    iid, ood = drawn["out-sweep.png"]
    assert (iid.get_xscale(), iid.get_xlabel(), iid.get_ylabel(), ood.get_ylabel()) == (
        "log", "weight λ", "accuracy, %", "loss",
    )  # fmt: skip
    ((_, caps, (bar,)),) = iid.containers
    assert [float(value) for value in bar.get_segments()[0][:, 1]] == pytest.approx([80 - 200**0.5, 80 + 200**0.5])
    mean, seeds, level = iid.lines[0], *iid.lines[-2:]
    assert mean.get_xydata().tolist() == [[0.1, 80]] and seeds.get_xydata().tolist() == [[0.1, 90], [0.1, 70]]
    assert level.get_ydata()[0] == 70 and level.get_label() == "none"
    # Curves have only the columns' subsets, in both rows: accuracy of valid, loss of valid and gen.
    assert len(drawn["out-curves.png"]) == 4 and len(drawn["out-loss.png"]) == 1


def test_without_an_x_there_is_no_sweep(drawn, tmp_path, monkeypatch):
    text = SWEEP.replace("x_axis: {label: weight λ, scale: log}\n", "").replace("    x: 1.0e-1\n", "")
    monkeypatch.setattr(verdicts, "_bars", lambda recipe, found, path: path)
    found = read(tmp_path, text.replace("    x: 1\n", ""))
    assert "out-sweep.png" not in {
        p.name for p in verdicts.plots(found, [line_of("none", [1.0], [2.0])], tmp_path / "out")
    }


def test_the_weights_of_the_orthogonality_sweep_are_what_is_trained():
    found = recipe.read(recipe.find("own_orthogonality_sweep"))
    args = reproduce.parse_arguments(["own_orthogonality_sweep", "--device", "cpu", "--seeds", "1"])
    for trial in args.trials:
        x, arguments = found.rows[trial.row].x, trial.run.arguments
        given = "--orthogonality-weight" in arguments
        assert given == (x is not None)
        assert not given or float(arguments[arguments.index("--orthogonality-weight") + 1]) == x
    # The rest equals the paper's table.
    table = reproduce.parse_arguments(["park_kim_table_4", "--device", "cpu", "--seeds", "1"])
    settings = {trial.row: sorted(trial.run.arguments) for trial in (*args.trials, *table.trials)}
    assert settings["none"] == settings["linear-l2"] and settings["weight-1e-4"] == settings["linear-l2-orthogonality"]

"""Figures of results: the drawn numbers, and which figures a recipe has."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.experiment_files import TINY, TWO, finished, metadata, record, result, tiny

pytest.importorskip("matplotlib")

from fairseq_sg.experiments import figures
from fairseq_sg.experiments.recipe import read
from fairseq_sg.experiments.results import Results


@pytest.fixture(autouse=True)
def _closed():
    yield
    figures.pyplot().close("all")


def curve(*points):
    """A curve from (step, accuracy, loss) on valid; gen is half as accurate with twice the loss."""
    return [{"step": s, "valid": a, "valid_loss": x, "gen": a / 2, "gen_loss": 2 * x} for s, a, x in points]


COURSES = {
    "a": [curve((1, 10, 2.0), (2, 50, 1.0), (3, 90, 0.0)), curve((1, 30, 1.0), (2, 70, 0.5))],
    "b": [curve((1, 0, 3.0), (2, 0, 3.0))],
}

RECIPE = """\
title: Courses
source: nobody
data:
DATA
steps: 3
validate_every: 1
batch_size_valid: 4
seeds: 2
unit: percent
checkpoint: last
train: --task sg_translation
columns:
  IID: {subset: valid}
  OOD: {subset: gen}
rows:
ROWS
"""


def results_of(folder: Path, courses: dict) -> Results:
    """data -> row -> the curves of its seeds."""
    data = "\n".join(f"  {name}: {{folder: {name}, prepare: scan, subsets: [valid, gen]}}" for name in courses)
    rows = dict.fromkeys(row for found in courses.values() for row in found)
    path = folder / "courses.yaml"
    path.write_text(RECIPE.replace("DATA", data).replace("ROWS", "\n".join(f"  {r}: {{arguments: ''}}" for r in rows)))
    records = [
        {"row": row, "data": name, "seed": seed, "result": result(3) | {"curve": course}}
        for name, found in courses.items()
        for row, curves in found.items()
        for seed, course in enumerate(curves, 1)
    ]
    return Results(read(path), 1.0, records)


def lines(axes):
    return [line.get_xydata().tolist() for line in axes.lines]


def test_accuracy_through_training(tmp_path):
    found = results_of(tmp_path, {"scan": COURSES})
    valid, gen = figures.through_training(found, ["valid", "gen"], "accuracy").axes
    # Means at the common steps of both seeds; only the model with two seeds has a band.
    assert lines(valid) == [[[1, 20], [2, 60]], [[1, 0], [2, 0]]] and lines(gen)[0] == [[1, 10], [2, 30]]
    (band,) = valid.collections
    assert {tuple(v) for v in band.get_paths()[0].vertices.tolist()} == {(1, 10), (1, 30), (2, 50), (2, 70)}
    assert (valid.get_title(), gen.get_title(), valid.get_ylabel()) == ("IID", "OOD", "accuracy, %")
    # Few curves are named at their ends.
    names = [(text.get_text(), text.xy[1]) for text in gen.texts]
    assert names == [("b", 0), ("a", 30)] and gen.get_legend() is None


def test_loss_through_training(tmp_path):
    found = results_of(tmp_path, {"scan": COURSES})
    (loss,) = figures.through_training(found, ["gen"], "loss").axes
    assert lines(loss) == [[[1, 3], [2, 1.5]], [[1, 6], [2, 6]]] and loss.get_ylabel() == "loss, bits per token"
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["a", "b"]


def test_names_at_the_ends_of_curves_keep_their_distance(tmp_path):
    """In the order of the curves, below the top; more curves have a legend; still more are not drawn."""
    ends = {name: [curve((1, 0, 1.0), (2, end, 1.0))] for name, end in zip("abcde", (100, 99, 98, 50, 99.5))}
    axes = figures.through_training(results_of(tmp_path, {"scan": ends}), ["valid"], "accuracy").axes[0]
    names = [(text.get_text(), text.xy[1]) for text in axes.texts]
    assert [name for name, _ in names] == ["d", "c", "b", "e", "a"]
    places = [place for _, place in names]
    assert places[-1] <= 100 and min(b - a for a, b in zip(places, places[1:])) >= 8 - 1e-9
    many = {f"m{number}": [curve((1, 0, 1.0), (2, 5, 1.0))] for number in range(figures.LABELLED + 1)}
    axes = figures.through_training(results_of(tmp_path, {"scan": many}), ["valid"], "accuracy").axes[0]
    assert not axes.texts and len(axes.get_legend().get_texts()) == figures.LABELLED + 1
    many |= {f"m{number}": many["m0"] for number in range(figures.CURVES + 1)}
    assert figures.through_training(results_of(tmp_path, {"scan": many}), ["valid"], "accuracy") is None


def test_a_panel_for_each_subset_that_the_data_have(tmp_path):
    only_valid = [
        {key: value for key, value in point.items() if not key.startswith("gen")} for point in COURSES["a"][0]
    ]
    found = results_of(tmp_path, {"one": {"a": [only_valid]}, "two": COURSES})
    axes = figures.through_training(found, ["gen", "valid"], "accuracy").axes
    assert [ax.get_title() for ax in axes] == ["one: IID", "", "two: OOD", "two: IID"]
    assert [bool(ax.lines) for ax in axes] == [ax.axison for ax in axes] == [True, False, True, True]


def test_a_loss_that_was_rounded_to_nothing_has_a_place_on_its_axis(tmp_path):
    courses = {"one": {"a": [curve((1, 10, 2.0), (2, 50, 0.0))]}, "two": {"b": COURSES["b"], "a": COURSES["a"]}}
    one, two = figures.through_training(results_of(tmp_path, courses), ["valid"], "loss").axes
    assert lines(one) == [[[1, 2], [2, figures.LEAST]]]
    assert (one.get_yscale(), two.get_yscale()) == ("log", "linear")
    assert (one.get_title(), two.get_title()) == ("one: IID", "two: IID")
    # A model has one colour everywhere.
    assert one.lines[0].get_color() == two.lines[0].get_color() != two.lines[1].get_color()


@pytest.mark.parametrize("points", [[], [(5, 10, 1.0)]], ids=["none", "one"])
def test_nothing_is_drawn_of_a_single_evaluation(points, tmp_path):
    found = results_of(tmp_path, {"scan": {"a": [curve(*points)] * 2}})
    assert figures.through_training(found, ["valid"], "accuracy") is None
    assert figures.loss_and_accuracy(found, ["valid"]) is None


def test_seeds_are_joined_where_all_have_been_measured():
    one = [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3}]
    two = [{"step": 2, "x": 4.0}, {"step": 3, "x": 5.0}]
    assert figures.band([one, two, [{"step": 2}]], "x") == ([2], [[2.0, 4.0]])
    assert figures.band([], "x") == ([], [])


def test_accuracy_over_loss(tmp_path):
    (axes,) = figures.loss_and_accuracy(results_of(tmp_path, {"scan": COURSES}), ["valid"]).axes
    expected = [[2.0, 10], [1.0, 50], [figures.LEAST, 90], [1.0, 30], [0.5, 70], [3.0, 0], [3.0, 0]]
    assert [point for line in lines(axes) for point in line] == expected
    shades = [line.get_alpha() for line in axes.lines[:3]]
    assert shades == sorted(shades) and shades[0] < shades[2] == 1


# Bars.


def test_bars(tmp_path):
    """Mean, standard deviation and points of ours; diamonds of the paper's; "Fail" where all diverged."""
    found = finished(tiny(tmp_path))
    iid, ood, _ = figures.bars(found).axes
    widths = [bar.get_width() for bar in ood.patches]
    assert widths == [pytest.approx(0.22)] and ood.get_xlim() == (0, 1.02)
    assert [label.get_text() for label in iid.get_yticklabels()] == ["An LSTM_1", "bad", "of another paper"]
    drawn = lines(ood)
    assert [[0.2, 0], [0.24, 0]] in drawn and [[0.21, 0]] in drawn and [[0.5, 2]] in drawn
    spreads = [
        bar.lines[2][0].get_segments()[0][:, 0].tolist() for bar in ood.containers if getattr(bar, "has_xerr", False)
    ]
    deviation = 0.04 / 2**0.5
    assert spreads[0] == pytest.approx([0.22 - deviation, 0.22 + deviation])
    assert pytest.approx([0.2, 0.22]) in spreads
    assert [(text.get_text().strip(), text.get_position()[1]) for text in ood.texts] == [
        ("Fail", 1), ("Fail (published)", 1.3),
    ]  # fmt: skip
    assert ood.get_xlabel() == "OOD, fraction" and not ood.get_shared_x_axes().joined(iid, ood)


# A sweep.

SWEEP = RECIPE.replace("DATA", "  tiny: {folder: tiny, prepare: scan, subsets: [valid, gen]}").replace(
    "ROWS",
    "  none: {label: without, arguments: ''}\n  high: {x: 0.1, arguments: --lr 1}\n  low: {x: 1, arguments: --lr 2}\n"
    "x_axis: {label: weight λ, scale: log}",
).replace("OOD: {subset: gen}", "OOD: {subset: gen, metric: loss}")  # fmt: skip


@pytest.fixture
def swept(tmp_path) -> Results:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    found = Results(read(path), 1.0, [record("low", 1)])
    for row, accuracies in (("none", (60.0, 80.0)), ("high", (90.0, 70.0))):
        for seed, accuracy in enumerate(accuracies, 1):
            done = result(3, valid=accuracy) | {"loss": {"gen": 2.0}, "curve": curve((1, 10, 2.0), (2, 50, 1.0))}
            found.records.append({"row": row, "data": "tiny", "seed": seed, "result": done})
    return found


def test_the_sweep_of_a_recipe(swept):
    iid, ood = figures.sweep(swept).axes
    assert (iid.get_xscale(), iid.get_xlabel(), iid.get_ylabel(), ood.get_ylabel()) == (
        "log", "weight λ", "IID, %", "OOD, bits per token",
    )  # fmt: skip
    ((_, caps, (bar,)),) = iid.containers
    assert [float(value) for value in bar.get_segments()[0][:, 1]] == pytest.approx([80 - 200**0.5, 80 + 200**0.5])
    mean, seeds, level = iid.lines[0], *iid.lines[-2:]
    assert mean.get_xydata().tolist() == [[0.1, 80]] and seeds.get_xydata().tolist() == [[0.1, 90], [0.1, 70]]
    assert level.get_ydata()[0] == 70 and level.get_label() == "without"


def test_a_colour_of_a_sweep_is_one_level_in_all_panels(swept):
    """The first level has no number in the second panel."""
    recipe = swept.recipe
    recipe.rows["deep"] = replace(recipe.rows["none"], label="deeper")
    recipe.columns["OOD"] = replace(recipe.columns["OOD"], at=2)
    deep = result(3, valid=50.0) | {"curve": curve((1, 10, 2.0), (2, 50, 1.0))}
    swept.records.append({"row": "deep", "data": "tiny", "seed": 1, "result": deep})
    for done in swept.records:
        if done["row"] == "none":
            done["result"]["curve"] = []
    iid, ood = figures.sweep(swept).axes
    levels = {line.get_label(): line.get_color() for line in (*iid.lines, *ood.lines) if line.get_linestyle() == "--"}
    legend = {
        text.get_text(): line for text, line in zip(ood.get_legend().get_texts(), ood.get_legend().legend_handles)
    }
    assert levels.keys() == {"without", "deeper"} and legend.keys() == {"tiny", "without", "deeper"}
    assert all(legend[name].get_color() == colour for name, colour in levels.items())
    assert [line.get_color() for line in ood.lines if line.get_linestyle() == "--"] == [levels["deeper"]]


def test_medians_of_a_sweep_have_no_standard_deviation(swept):
    swept.recipe.statistic = "median"
    iid, _ = figures.sweep(swept).axes
    ((_, _, (bar,)),) = iid.containers
    assert bar.get_segments()[0][:, 1].tolist() == [80, 80]


def test_numbers_of_an_analysis_have_no_unit(swept):
    columns = {"share": replace(swept.recipe.columns["IID"], metric="analysis", value="masks/kept")}
    swept.recipe.columns = columns
    for done in swept.records:
        done.get("result", {})["analysed"] = {"masks/kept": 0.5}
    assert [axes.get_ylabel() for axes in figures.sweep(swept).axes] == ["share"]


BY_LENGTH = """\
title: By length
source: nobody
data:
  short: {folder: short, prepare: scan, subsets: [valid, gen]}
  long: {folder: long, prepare: scan, subsets: [valid, gen]}
steps: 3
validate_every: 1
batch_size_valid: 4
seeds: 2
unit: percent
checkpoint: last
train: --task sg_translation
column_axis: {label: length, scale: log}
columns:
  all: {subset: gen}
  L10: {subset: gen, type: length_10, x: 10}
  L100: {subset: gen, type: length_100, x: 100}
rows:
  a: {label: model a, arguments: ""}
  b: {arguments: ""}
"""


def test_rows_over_the_lengths_of_columns(tmp_path, drawn):
    path = tmp_path / "lengths.yaml"
    path.write_text(BY_LENGTH)
    found = Results(read(path), 1.0, [record("b", 2, "short")])
    numbers = {("a", 1): (90.0, 50.0), ("a", 2): (70.0, 40.0), ("b", 1): (60.0, 20.0)}
    for (row, seed), (short, long) in numbers.items():
        made = result(3, gen=1.0)
        made["accuracy"] |= {"gen/length_10": short, "gen/length_100": long}
        found.records.append({"row": row, "data": "long", "seed": seed, "result": made})
    figures.draw_all(found, tmp_path / "lengths")
    (axes,) = drawn["lengths.png"]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[10, 80], [100, 45]], [[10, 60], [100, 20]]]
    assert (axes.get_xlabel(), axes.get_xscale(), axes.get_title()) == ("length", "log", "long")
    assert axes.get_ylabel() == "accuracy, %" and len(axes.collections) == 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["model a", "b"]
    (band,) = axes.collections
    assert {tuple(v) for v in band.get_paths()[0].vertices.tolist()} == {(10, 70), (10, 90), (100, 40), (100, 50)}


def test_published_numbers_over_columns(tmp_path, drawn):
    """Diamonds in the colour of their row, with their standard deviation; none for a row without trainings."""
    path = tmp_path / "lengths.yaml"
    published = 'published: {long: {L10: "30 ± 4", L100: Fail, all: "9"}}'
    rows = BY_LENGTH.replace('arguments: ""}', f'arguments: "", {published}}}')
    path.write_text(rows.replace("{label: length, scale: log}", "{label: length}"))
    made = result(3, gen=1.0)
    made["accuracy"] |= {"gen/length_10": 20.0, "gen/length_100": 10.0}
    figures.draw_all(
        Results(read(path), 1.0, [{"row": "b", "data": "long", "seed": 1, "result": made}]), tmp_path / "c"
    )
    (axes,) = drawn["c.png"]
    (line, diamond) = axes.lines
    assert line.get_xydata().tolist() == [[10, 20], [100, 10]] and diamond.get_xydata().tolist() == [[10, 30]]
    assert diamond.get_marker() == "D" and diamond.get_color() == line.get_color()
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[10, 26], [10, 34]]
    assert axes.get_xscale() == "linear" and axes.figure._suptitle.get_text() == "lines: here, diamonds: published"


def test_no_figure_over_columns_before_their_first_number(tmp_path, drawn):
    """Other columns may have theirs already."""
    path = tmp_path / "lengths.yaml"
    path.write_text(BY_LENGTH)
    found = Results(read(path), 1.0, [record("a", 1, "short", steps=3, gen=1.0)])
    assert figures.draw_all(found, tmp_path / "lengths") == [] and not drawn


def test_a_seed_that_is_not_finite_has_no_bar(tmp_path):
    found = finished(tiny(tmp_path))
    found.records[0]["result"]["accuracy"]["gen"] = math.inf
    iid, ood, _ = figures.bars(found).axes
    assert not ood.patches and len(iid.patches) == 1


def test_bars_have_panels_for_the_columns_of_their_data(tmp_path):
    found = Results(tiny(tmp_path, TWO), 1.0, [record("good", 1, data="other", valid=90.0)])
    (axes,) = figures.bars(found).axes
    assert axes.get_xlabel() == "IID, fraction"


@pytest.mark.parametrize("columns,labels", [(1, ["0.1", "0.2", "0.5", "1", "2"]), (5, ["0.1", "0.3", "1"])])
def test_logarithmic_axes_of_narrow_panels_have_fewer_labels(tmp_path, columns, labels):
    found = results_of(tmp_path, {"scan": COURSES})
    loss = replace(found.recipe.columns["OOD"], metric="loss")
    found.recipe.columns = {f"bits {number}": loss for number in range(columns)}
    for done, value in zip(found.records, (0.1, 2.0, 1.0)):
        done["result"]["loss"] = {"gen": value}
    axes = figures.bars(found).axes[0]
    low, high = axes.get_xlim()
    assert [f"{place:g}" for place in axes.get_xticks() if low <= place <= high] == labels


def test_what_failed_is_named_within_the_frame(tmp_path):
    """Also on a logarithmic axis, where nothing stands at 0."""
    found = finished(tiny(tmp_path))
    found.recipe.columns = {"OOD": replace(found.recipe.columns["OOD"], metric="loss")}
    for done, loss in zip(found.records, (0.01, 5.0)):
        done["result"]["loss"] = {"gen": loss}
    figure = figures.bars(found)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    frame = axes.get_window_extent()
    assert axes.get_xscale() == "log" and len(axes.texts) == 2
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1


def test_curves_beyond_the_number_of_colours_have_looks_of_their_own(tmp_path):
    many = {f"m{number}": [curve((1, 0, 1.0), (2, 5, 1.0))] for number in range(figures.CURVES)}
    (axes,) = figures.through_training(results_of(tmp_path, {"scan": many}), ["valid"], "accuracy").axes
    for looks in (axes.lines, axes.get_legend().legend_handles):
        assert len({(line.get_color(), line.get_linestyle()) for line in looks}) == figures.CURVES


def test_many_rows_have_looks_of_their_own():
    looks = figures._styles([f"model {n}" for n in range(24)]).values()
    assert len({tuple(look.values()) for look in looks}) == 24


# Which figures there are.


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that is written, by the name of its file."""
    found = {}
    monkeypatch.setattr(figures, "save", lambda figure, path, source: found.update({path.name: figure.axes}))
    return found


def test_figures_of_a_sweep(swept, drawn, tmp_path):
    """Curves have only the columns' accuracies."""
    written = figures.draw_all(swept, tmp_path / "x_v0.2")
    assert [path.name for path in written] == ["x_v0.2.png", "x_v0.2-curves.png"] == list(drawn)
    assert drawn["x_v0.2.png"][0].get_xscale() == "log" and len(drawn["x_v0.2-curves.png"]) == 1


def test_figures_of_a_table(drawn, tmp_path):
    """Accuracy over loss where the recipe asks for it; curves of the loss where no column is an accuracy."""
    found = results_of(tmp_path, {"scan": COURSES})
    assert [path.name for path in figures.draw_all(found, tmp_path / "x")] == ["x.png", "x-curves.png"]
    found.recipe.loss_figure = True
    figures.draw_all(found, tmp_path / "x")
    assert list(drawn) == ["x.png", "x-curves.png", "x-loss.png"] and len(drawn["x-loss.png"]) == 2
    (tmp_path / "x-loss.png").write_text("of an earlier recipe")
    found.recipe.loss_figure = False
    figures.draw_all(found, tmp_path / "x")
    assert not (tmp_path / "x-loss.png").exists()
    columns = {"bits": replace(found.recipe.columns["OOD"], metric="loss")}
    losses = Results(replace(found.recipe, columns=columns, loss_figure=False), 1.0, found.records)
    for done in losses.records:
        done["result"]["loss"] = {"gen": 1.0}
    figures.draw_all(losses, tmp_path / "y")
    assert drawn["y-curves.png"][0].get_ylabel() == "loss, bits per token"


def test_figures_of_squared_errors(drawn, tmp_path):
    """Errors through training, of the first column; logarithmic axes where they span a factor of ten."""
    courses = [[{"step": s, "gen_mse_last": e, "gen_mse_last_mean": 2 * e} for s, e in ((1, 4.0), (2, 0.25))]]
    found = results_of(tmp_path, {"scan": {"a": [*courses, *courses]}})
    columns = {
        "mean": replace(found.recipe.columns["OOD"], metric="mse_last_mean"),
        "last": replace(found.recipe.columns["OOD"], metric="mse_last"),
    }
    found = Results(replace(found.recipe, columns=columns), 1.0, found.records)
    for seed, done in enumerate(found.records):
        done["result"] |= {"mse_last": {"gen": 0.25}, "mse_last_mean": {"gen": (0.5, 50.0)[seed]}}
    figures.draw_all(found, tmp_path / "x")
    mean, last = drawn["x.png"]
    assert (mean.get_xscale(), last.get_xscale()) == ("log", "linear") and mean.get_xlabel() == "mean, squared error"
    (axes,) = drawn["x-curves.png"]
    assert lines(axes) == [[[1, 8], [2, 0.5]]] and axes.get_title() == "mean" and axes.get_yscale() == "log"
    assert axes.get_ylabel() == "squared error, mean over loops"


def test_no_figure_before_any_number(tmp_path, drawn):
    (tmp_path / "x.png").write_text("of numbers that are gone")
    assert figures.draw_all(Results(tiny(tmp_path), 1.0, [record("good", 1)]), tmp_path / "x") == [] and not drawn
    assert not (tmp_path / "x.png").exists()


def test_figures_are_at_most_a_page_wide(tmp_path):
    for number in (1, 2, 3, 5):
        columns = "".join(f"  c{i}: {{subset: gen}}\n" for i in range(number))
        text = TINY[: TINY.index("columns:")] + f"columns:\n{columns}" + TINY[TINY.index("rows:") :]
        text = text.replace('{IID: "1.00 ± 0.00", OOD: ".21 ± .01"}', "{}").replace("{IID: Fail, OOD: Fail}", "{}")
        found = finished(tiny(tmp_path, text.replace('{OOD: ".5"}', "{}")))
        assert figures.bars(found).get_size_inches()[0] == (figures.COLUMN if number == 1 else figures.PAGE)


def test_a_picture_names_its_source_and_nothing_that_changes_with_the_machine(tmp_path):
    found = results_of(tmp_path, {"scan": COURSES})
    (picture, _) = figures.draw_all(found, tmp_path / "x", "a source")
    assert metadata(picture) == {"Source": "a source"}
    assert figures.pyplot().get_fignums() == []

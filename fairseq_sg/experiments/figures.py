"""Figures of results, in one style: colours for the colour-blind, text that is readable in a paper's column.

A figure is at most two panels wide. matplotlib is imported only to draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.quantities import QUANTITIES, source_of
from fairseq_sg.experiments.report import Line, centre, columns_shown, lines
from fairseq_sg.experiments.results import Results
from fairseq_sg.experiments.schema import DECODED, Recipe
from fairseq_sg.files import replacing

#: The curve of one training, as ``logs.curve`` has it.
Curve = list[dict[str, float]]
#: model -> the curves of its seeds
Curves = Mapping[str, Sequence[Curve]]
#: model -> what its line looks like
Styles = Mapping[str, Mapping[str, str]]
#: The place on a logarithmic axis of a loss that the log rounds to 0.
LEAST = 5e-5
#: Okabe and Ito's colours, without yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.3, "lines.linewidth": 1.4, "savefig.dpi": 200,
}  # fmt: skip
#: Inches: a paper's column, and two of them.
COLUMN, PAGE = 3.4, 7.0
#: Up to this many curves are labelled at their ends, up to the next many by a legend; more are not drawn.
LABELLED, CURVES = 5, 12
#: With more panels in a row, the unit of a bar has a line of its own.
NARROW = 4
#: The ends of a results file's name in those of its pictures, after the one that has its name.
ENDS = ("-curves", "-loss", "-bleu")
#: Bars of more columns stand in rows of a few, so that their names do not touch.
ACROSS, FEW = 8, 5


def pyplot() -> Any:
    """matplotlib's pyplot with a backend for files and this module's style. Raises UsageError if it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UsageError(f"figures need matplotlib ({error}): pip install 'fairseq_sg[experiments]'") from error

    plt.rcParams.update(plt.rcParamsDefault | STYLE)
    plt.switch_backend("Agg")
    return plt


def save(figure: Any, path: Path, source: str = "") -> None:
    """Writes a figure and closes it. ``source`` is stored in the file, so that a stale picture can be found."""
    with replacing(path) as temporary:
        figure.savefig(
            temporary, format=path.suffix[1:], bbox_inches="tight", metadata={"Source": source, "Software": None}
        )
    pyplot().close(figure)


def check_name(prefix: Path) -> None:
    """Raises UsageError where another results file has pictures of the same names, as x-loss.json has of x.json."""
    name = prefix.name
    others = [name + end for end in ENDS] + [name.removesuffix(end) for end in ENDS if name.endswith(end)]
    for other in others:
        if prefix.with_name(f"{other}.json").exists():
            raise UsageError(f"{prefix}.json and {other}.json would have pictures of one name: rename one of them")


def draw_all(results: Results, prefix: Path, source: str = "") -> list[Path]:
    """Draws the figures of results, and returns their files.

    PREFIX.png has our numbers beside the published ones, or columns over the x of rows, or rows over that of columns.
    PREFIX-curves.png has accuracy (or what the first column measures) through training, and PREFIX-loss.png accuracy
    over loss if the recipe asks for it. An earlier picture that is no longer drawn is removed.
    """
    recipe = results.recipe
    drawn = dict.fromkeys(("", "-curves", "-loss"))
    if any(cell.values for line in lines(results) for cell in line.cells.values()):
        draw = sweep if recipe.x_axis else over_columns if recipe.column_axis else bars
        drawn[""] = draw(results)
        accuracies = _subsets(recipe, "accuracy")
        drawn["-curves"] = through_training(results, accuracies or _subsets(recipe), _drawn(recipe))
        drawn["-loss"] = loss_and_accuracy(results, accuracies) if recipe.loss_figure else None
    written = []
    for suffix, figure in drawn.items():
        path = prefix.with_name(f"{prefix.name}{suffix}.png")
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            save(figure, path, source)
            written.append(path)
    return written


def _subsets(recipe: Recipe, metric: str = "") -> list[str]:
    return list(dict.fromkeys(c.subset for c in recipe.columns.values() if c.metric == metric or not metric))


def _drawn(recipe: Recipe) -> str:
    """The quantity that is drawn through training: accuracy if a column has it, otherwise that of the first column."""
    found = [source_of(c.metric) for c in recipe.columns.values() if c.metric not in (*DECODED, "analysis")]
    return "accuracy" if "accuracy" in found else found[0] if found else "loss"


def _courses(results: Results) -> dict[str, dict[str, list[Curve]]]:
    """data -> model -> curves of the seeds."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for line in lines(results):
        if line.curves:
            found.setdefault(line.data, {})[line.label] = line.curves
    return found


def _names(recipe: Recipe) -> dict[str, str]:
    """subset -> its first column, of all its examples and without overrides."""
    columns = {name: c for name, c in recipe.columns.items() if c.metric != "analysis"}
    whole = {name: c for name, c in columns.items() if not c.model_overrides and not c.type}
    return {c.subset: name for name, c in reversed(whole.items())}


def _of_columns(columns: Sequence[str], height: Callable[[int], float], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A figure with a panel for each column, in rows of ``height``, which may depend on their number; its panels."""
    across = _across(columns)
    down = -(-len(columns) // across)
    figure, rows = grid(down, across, height(down), **options)
    panels = list(rows.flatten())
    for axes in panels[len(columns) :]:
        axes.remove()
    return figure, dict(zip(columns, panels))


def _across(columns: Sequence[str]) -> int:
    """The panels of a row of ``_of_columns``."""
    return len(columns) if len(columns) <= ACROSS else FEW


def bars(results: Results) -> Any:
    """Our numbers as bars, a point per seed, and the published numbers as diamonds with their standard deviation."""
    recipe, found = results.recipe, lines(results)
    found = [line for line in found if any(c.values or c.published for c in line.cells.values()) or line.diverged]
    columns = columns_shown(recipe, found)
    figure, panels = _of_columns(columns, lambda down: max(0.55 + 0.24 * len(found), 1.2 / down), sharey=True)
    narrow = _across(columns) > NARROW
    for key, axes in panels.items():
        for y, line in enumerate(found):
            cell = line.cells.get(key)
            if cell is None:
                continue
            if cell.values:
                spread = _spread(recipe, cell.values) or None
                axes.barh(y, centre(cell.values, recipe.statistic), 0.62, xerr=spread, color=COLOURS[0], alpha=0.75,
                          error_kw={"lw": 1})  # fmt: skip
                axes.plot(cell.values, [y] * len(cell.values), ".", color=COLOURS[6], ms=3)
            elif line.failed:
                _at_the_left(axes, y, " Fail", fontsize=7, color=COLOURS[0])
            if cell.published and cell.published.fail:
                _at_the_left(axes, y + 0.3, " Fail (published)", fontsize=6, color=COLOURS[1])
            elif cell.published:
                axes.errorbar(cell.published.mean, y, xerr=cell.published.std, fmt="D", ms=3.5, color=COLOURS[1], lw=1)
        # The labels of narrow panels would touch.
        axes.set(xlabel=_named(key, _unit(recipe, key), "\n" if narrow else " "), yticks=range(len(found)))
        several = len(recipe.data) > 1
        axes.set_yticklabels([f"{line.label}, {line.data}" if several else line.label for line in found])
        axes.grid(axis="y", visible=False)
        if recipe.columns[key].metric == "accuracy":
            axes.set_xlim(0, 102 if recipe.unit == "percent" else 1.02)
        elif recipe.columns[key].metric not in (*DECODED, "analysis"):
            cells = [line.cells[key] for line in found if key in line.cells]
            there = [c.published.mean for c in cells if c.published and not c.published.fail]
            _log_if_wide(axes.xaxis, [*there, *(v for c in cells for v in c.values)], (1, 3) if narrow else (1, 2, 5))
    panels[columns[0]].set_ylim(len(found) - 0.5, -0.5)  # from above; a text alone does not widen an axis
    if recipe.has_published:
        figure.suptitle("bars: here, points: seeds, diamonds: published", fontsize=7)
    return figure


def _at_the_left(axes: Any, y: float, text: str, **style: Any) -> None:
    """A text that begins at the axis of y, wherever a logarithmic axis of x begins."""
    axes.text(0, y, text, va="center", transform=axes.get_yaxis_transform(), **style)


def through_training(results: Results, subsets: Sequence[str], quantity: str) -> Any:
    """A quantity of ``QUANTITIES`` on subsets through training: a row per dataset, a panel per subset that it has.

    Means over seeds, and a band from minimum to maximum. None if nothing was measured twice, or models are too many.
    """
    courses = {data: models for data, models in _courses(results).items() if len(models) <= CURVES}
    figure, panels = _panels_of_data(results.recipe, courses, subsets, [quantity])
    styles = _styles_of_curves({data: courses[data] for data in panels})
    for data, of_subset in panels.items():
        for subset, axes in of_subset.items():
            _through(axes, courses[data], subset, quantity, styles)
        _name_curves(axes, courses[data], subset, quantity, styles)
    return figure


def _panels_of_data(
    recipe: Recipe, courses: Mapping[str, Curves], subsets: Sequence[str], quantities: Sequence[str]
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A figure, and its axes by dataset, in rows, and by subset. Each has the quantities twice; without any, None."""
    measured = {
        data: [s for s in subsets if all(_measured_twice(models, s, quantity) for quantity in quantities)]
        for data, models in courses.items()
    }
    measured = {data: there for data, there in measured.items() if there}
    if not measured:
        return None, {}
    names = _names(recipe)
    figure, rows = grid(len(measured), max(map(len, measured.values())))
    panels = {data: dict(zip(there, row)) for row, (data, there) in zip(rows, measured.items())}
    for row, (data, of_subset) in zip(rows, panels.items()):
        for subset, axes in of_subset.items():
            title = names.get(subset, subset)
            axes.set_title(f"{data}: {title}" if len(panels) > 1 else title)
        for unused in row[len(of_subset) :]:
            unused.set_axis_off()
    return figure, panels


def _through(axes: Any, models: Curves, subset: str, quantity: str, styles: Styles) -> None:
    everything = []
    for model, curves in models.items():
        steps, values = band(curves, QUANTITIES[quantity].key(subset))
        if quantity != "accuracy":
            values = [[max(v, LEAST) for v in found] for found in values]
        axes.plot(steps, [statistics.mean(v) for v in values], **styles[model])
        everything += [v for found in values for v in found]
        if any(len(found) > 1 for found in values):
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(steps, low, high, color=styles[model]["color"], alpha=0.15, lw=0)
    axes.set(ylabel=QUANTITIES[quantity].axis)
    if quantity == "accuracy":
        axes.set(ylim=(-2, 102))
    else:
        _log_if_wide(axes.yaxis, everything)
    axes.set_xlabel("training step")


def _name_curves(axes: Any, models: Curves, subset: str, quantity: str, styles: Styles) -> None:
    """Labels at the ends of a few curves, in an order and at distances that can be read; a legend for more."""
    ends = {}
    for model, curves in models.items():
        steps, values = band(curves, QUANTITIES[quantity].key(subset))
        if steps:
            ends[model] = (steps[-1], statistics.mean(values[-1]))
    if len(ends) > LABELLED or quantity != "accuracy":
        _legend(axes, models, styles)
        return
    least, places = 8.0, {}
    below = -least
    for model in sorted(ends, key=lambda name: ends[name][1]):
        below = places[model] = max(ends[model][1], below + least)
    # Labels that were pushed above the axis move down together.
    over = max(0.0, below - 100.0)
    for model, place in places.items():
        axes.annotate(
            model,
            (1.02, place - over),
            xycoords=("axes fraction", "data"),
            color=styles[model]["color"],
            va="center",
            fontsize=7,
        )


def loss_and_accuracy(results: Results, subsets: Sequence[str]) -> Any:
    """Accuracy over loss, a point for every evaluation of every seed, earlier ones paler.

    This is Figure 4.2 of Csordás 2023, where a higher loss comes with a higher accuracy. None if nothing was measured
    twice.
    """
    courses = _courses(results)
    figure, panels = _panels_of_data(results.recipe, courses, subsets, ["accuracy", "loss"])
    styles = _styles_of_curves({data: courses[data] for data in panels})
    loss_of = QUANTITIES["loss"].key
    for data, of_subset in panels.items():
        models = courses[data]
        for subset, axes in of_subset.items():
            points = [
                (max(point[loss_of(subset)], LEAST), point[subset], (place + 1) / len(curve), styles[model]["color"])
                for model, curves in models.items()
                for curve in curves
                for place, point in enumerate(curve)
                if subset in point and loss_of(subset) in point
            ]
            for loss, accuracy, share, colour in points:
                axes.plot(loss, accuracy, ".", color=colour, alpha=0.15 + 0.85 * share)
            _log_if_wide(axes.xaxis, [loss for loss, *_ in points])
            axes.set(xlabel=QUANTITIES["loss"].axis, ylabel=QUANTITIES["accuracy"].axis, ylim=(-2, 102))
        _legend(axes, models, styles)
    return figure


def sweep(results: Results) -> Any:
    """Columns over the x of rows: means with sample standard deviations, and a point per seed.

    Rows without x are horizontal levels.
    """
    recipe, found = results.recipe, lines(results)
    columns = columns_shown(recipe, found)
    figure, panels = _of_columns(columns, lambda down: 2.4)
    along: dict[str, list[Line]] = {}
    levels: dict[str, Line] = {}
    for line in found:
        if not any(cell.values for cell in line.cells.values()):
            continue
        if recipe.rows[line.row].x is not None:
            along.setdefault(line.data, []).append(line)
        else:
            levels[f"{line.label}, {line.data}" if len(recipe.data) > 1 else line.label] = line
    # A colour is the same dataset or level in all panels, which may lack some of them.
    handles = {}
    for key, axes in panels.items():
        for number, (data, there) in enumerate(along.items()):
            there = [line for line in there if key in line.cells and line.cells[key].values]
            points = sorted((recipe.rows[line.row].x, line.cells[key].values) for line in there)
            if not points:
                continue
            colour = COLOURS[number % len(COLOURS)]
            means = [centre(values, recipe.statistic) for _, values in points]
            spreads = [_spread(recipe, values) for _, values in points]
            style = {"fmt": "o-", "ms": 3, "capsize": 2, "color": colour, "label": data}
            handles[data] = axes.errorbar([x for x, _ in points], means, spreads, **style)
            for x, values in points:
                axes.plot([x] * len(values), values, ".", color=colour, alpha=0.4, ms=4)
        for number, (name, line) in enumerate(levels.items(), len(along)):
            cell, colour = line.cells.get(key), COLOURS[number % len(COLOURS)]
            if cell and cell.values:
                mean, spread = centre(cell.values, recipe.statistic), _spread(recipe, cell.values)
                handles[name] = axes.axhline(mean, color=colour, ls="--", lw=1, label=name)
                axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.1, lw=0)
        axes.set(xlabel=recipe.x_axis.label, ylabel=_named(key, _unit(recipe, key)), xscale=recipe.x_axis.scale)
    if len(handles) > 1:
        beside = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False}
        panels[columns[-1]].legend(handles=handles.values(), **beside)
    return figure


def over_columns(results: Results) -> Any:
    """Rows over the x of columns, a panel per dataset: means over seeds, and a band from minimum to maximum.

    Published numbers are diamonds with their standard deviation. None before the first of our numbers.
    """
    recipe = results.recipe
    columns = {column.x: key for key, column in recipe.columns.items() if column.x is not None}
    places = sorted(columns)
    of_data: dict[str, list[Line]] = {}
    for line in lines(results):
        if any(cell.values for key, cell in line.cells.items() if key in columns.values()):
            of_data.setdefault(line.data, []).append(line)
    if not of_data:
        return None
    styles = _styles(dict.fromkeys(line.label for there in of_data.values() for line in there))
    figure, (panels,) = grid(1, len(of_data), 2.6, sharey=True)
    # Names of models stand beside the panels.
    figure.set_figwidth(PAGE)
    metric = recipe.columns[columns[places[0]]].metric
    quantity = QUANTITIES.get(source_of(metric))
    for axes, (data, there) in zip(panels, of_data.items()):
        drawn = []
        for line in there:
            colour = styles[line.label]["color"]
            cells = {x: line.cells[columns[x]] for x in places if columns[x] in line.cells}
            at = {x: cell.values for x, cell in cells.items() if cell.values}
            means = [centre(values, recipe.statistic) for values in at.values()]
            axes.plot(list(at), means, ms=3, label=line.label, **styles[line.label])
            if any(len(values) > 1 for values in at.values()):
                low, high = [min(values) for values in at.values()], [max(values) for values in at.values()]
                axes.fill_between(list(at), low, high, color=colour, alpha=0.12, lw=0)
            published = {x: cell.published for x, cell in cells.items() if cell.published and not cell.published.fail}
            for x, number in published.items():
                axes.errorbar(x, number.mean, number.std, fmt="D", ms=3.5, mfc="none", color=colour, lw=0.8)
            drawn += means + [number.mean for number in published.values()]
        if quantity is not None and not quantity.more_is_better:
            _log_if_wide(axes.yaxis, drawn)
        axes.set(xlabel=recipe.column_axis.label, xscale=recipe.column_axis.scale)
        axes.set_title(data if len(recipe.data) > 1 else "")
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()
    first = recipe.columns[columns[places[0]]]
    named = metric in QUANTITIES and metric != "accuracy"  # accuracies may be fractions
    number = first.value.partition("/")[2] or metric  # that of an analysis has a name of its own
    panels[0].set_ylabel(QUANTITIES[metric].axis if named else _named(number, _unit(recipe, columns[places[0]])))
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    if recipe.has_published:
        figure.suptitle("lines: here, diamonds: published", fontsize=7)
    return figure


def _styles(models: Iterable[str]) -> Styles:
    """model -> a colour; beyond the number of colours, also another line and marker."""
    looks = (("-", "o"), ("--", "s"), (":", "^"))
    return {
        model: {
            "color": COLOURS[number % len(COLOURS)],
            "ls": looks[number // len(COLOURS) % len(looks)][0],
            "marker": looks[number // len(COLOURS) % len(looks)][1],
        }
        for number, model in enumerate(models)
    }


def band(curves: Sequence[Curve], key: str) -> tuple[list[float], list[list[float]]]:
    """The common steps of all ``curves`` that have ``key``, and the values there."""
    points = [{p["step"]: p[key] for p in curve if key in p} for curve in curves]
    points = [found for found in points if found]
    steps = sorted(set.intersection(*(set(found) for found in points))) if points else []
    return steps, [[found[step] for found in points] for step in steps]


def grid(rows: int, columns: int, height: float = 2.2, **options: Any) -> tuple[Any, Any]:
    """A figure of rows of panels with a height each, and the rows; the width is that of a column or of the page."""
    size = (COLUMN if columns == 1 else PAGE, height * rows)
    return pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def _legend(axes: Any, models: Curves, styles: Styles) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=model, **styles[model]) for model in models]
    legend = axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    # Within a row, it has the place of an unused panel.
    legend.set_in_layout(axes.get_subplotspec().is_last_col())


def _measured_twice(models: Curves, subset: str, quantity: str) -> bool:
    key = QUANTITIES[quantity].key(subset)
    return any(len(band([curve], key)[0]) > 1 for curves in models.values() for curve in curves)


def _named(name: str, unit: str, gap: str = " ") -> str:
    """The label of an axis; the numbers of an analysis have no unit."""
    return f"{name},{gap}{unit}" if unit else name


def _unit(recipe: Recipe, key: str) -> str:
    metric = recipe.columns[key].metric
    units = {name: quantity.unit for name, quantity in QUANTITIES.items()} | {"bleu": "BLEU", "analysis": ""}
    return "fraction" if metric == "accuracy" and recipe.unit == "fraction" else units.get(metric, metric)


def _log_if_wide(axis: Any, values: Sequence[float], labels: Sequence[int] = (1, 2, 5)) -> None:
    """A logarithmic axis for values that span a factor of ten; below two decades with ``labels`` in each of them."""
    if not values or min(values) <= 0 or max(values) < 10 * min(values):
        return
    from matplotlib import ticker

    scale = {"x": axis.axes.set_xscale, "y": axis.axes.set_yscale}[axis.axis_name]
    scale("log")
    low, high = axis.get_view_interval()
    if high < 100 * low:
        axis.set_major_locator(ticker.LogLocator(subs=labels))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(ticker.NullFormatter())


def _spread(recipe: Recipe, values: Sequence[float]) -> float:
    """The sample standard deviation; 0 for one value, and beside a median."""
    return statistics.stdev(values) if len(values) > 1 and recipe.statistic == "mean" else 0.0


def _styles_of_curves(courses: Mapping[str, Curves]) -> Styles:
    """Those of ``_styles`` without markers, which would hide a curve of many evaluations."""
    styles = _styles(dict.fromkeys(model for of_data in courses.values() for model in of_data))
    return {model: {"color": style["color"], "ls": style["ls"]} for model, style in styles.items()}

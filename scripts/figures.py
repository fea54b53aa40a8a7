"""Figures common to all scripts: accuracy and loss through training, and numbers over the x of a sweep.

matplotlib is imported only to draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: The result of ``runs.curve`` for one training: [{step, SUBSET: percent, SUBSET_loss: bits per token}].
Curve = list[dict[str, float]]
#: data -> model -> the curves of its seeds
Courses = Mapping[str, Mapping[str, Sequence[Curve]]]
LOSS = "_loss"
#: The place on a logarithmic axis of a loss that the log rounds to 0.
LEAST = 5e-5


def through_training(
    courses: Courses, accuracies: Sequence[str], losses: Sequence[str], path: Path, names: Mapping[str, str] = {}
) -> bool:
    """Accuracies, and below them losses, of subsets through training.

    There is a row for each of them on every dataset, and a column for every subset, with means over seeds and a band
    from minimum to maximum. A loss is in bits per token, on a logarithmic axis if it falls to a tenth. Draws nothing
    and returns False if nothing was measured twice.

    Args:
        courses: the curves.
        accuracies: the subsets whose accuracy is drawn.
        losses: the subsets whose loss is drawn.
        names: titles of the subsets.
    """
    subsets = list(dict.fromkeys((*accuracies, *losses)))
    kinds = {"": accuracies, LOSS: losses}
    rows = [(data, kind) for data in courses for kind in kinds if _drawn(courses[data], kinds[kind], kind)]
    if not rows:
        return False

    def draw(row: int, axes: Any, subset: str, colours: Mapping[str, str]) -> str:
        data, kind = rows[row]
        _panel(axes, courses[data], subset if subset in kinds[kind] else None, kind, colours)
        return f"{names.get(subset, subset)} ({subset})" if subset in names else subset

    _grid([data for data, _ in rows], subsets, courses, path, draw)
    return True


def loss_and_accuracy(courses: Courses, subsets: Sequence[str], path: Path, names: Mapping[str, str] = {}) -> bool:
    """Accuracy over loss, a point for every evaluation of every seed, earlier ones paler.

    This is Figure 4.2 of Csordás 2023, where a higher loss comes with a higher accuracy. Draws nothing and returns
    False if nothing was measured twice.
    """
    rows = [data for data, models in courses.items() if all(_drawn(models, subsets, kind) for kind in ("", LOSS))]
    if not rows:
        return False

    def draw(row: int, axes: Any, subset: str, colours: Mapping[str, str]) -> str:
        points = [
            (max(point[subset + LOSS], LEAST), point[subset], (place + 1) / len(curve), colours[model])
            for model, curves in courses[rows[row]].items()
            for curve in curves
            for place, point in enumerate(curve)
            if subset in point and subset + LOSS in point
        ]
        for loss, accuracy, share, colour in points:
            axes.plot(loss, accuracy, ".", color=colour, alpha=0.15 + 0.85 * share)
        _log_if_wide(axes.set_xscale, [loss for loss, *_ in points])
        axes.set(xlabel="loss, bits per token", ylabel="accuracy, %", ylim=(-2, 102))
        axes.grid(alpha=0.3)
        return names.get(subset, subset)

    _grid(rows, subsets, courses, path, draw)
    return True


def sweep(
    lines: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]],
    levels: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    scale: str,
    units: Mapping[str, str],
    path: Path,
) -> None:
    """Numbers over x, a panel for each column of a table: means with sample standard deviations, and a point per seed.

    Args:
        lines: column -> line -> x -> values.
        levels: column -> name -> values without x, drawn across.
        label, scale: of the x axis, "linear" or "log".
        units: column -> its label.
    """
    plt = pyplot()
    figure, panels = plt.subplots(1, len(lines), figsize=(1 + 4.5 * len(lines), 3.8), squeeze=False)
    for axes, (column, of_column) in zip(panels[0], lines.items(), strict=True):
        for number, (name, found) in enumerate(of_column.items()):
            at = sorted(x for x, values in found.items() if values)
            means = [statistics.mean(found[x]) for x in at]
            axes.errorbar(at, means, [_std(found[x]) for x in at], fmt="o-", capsize=3, color=f"C{number}", label=name)
            for x in at:
                axes.plot([x] * len(found[x]), found[x], ".", color=f"C{number}", alpha=0.4, ms=4)
        for number, (name, values) in enumerate(levels.get(column, {}).items(), len(of_column)):
            if values:
                mean, std = statistics.mean(values), _std(values)
                axes.axhline(mean, color=f"C{number}", ls="--", lw=1, label=name)
                axes.axhspan(mean - std, mean + std, color=f"C{number}", alpha=0.1, lw=0)
        axes.set(xlabel=label, ylabel=units[column], xscale=scale, title=column)
        axes.grid(alpha=0.3)
    if panels[0][-1].get_legend_handles_labels()[1]:
        panels[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save(figure, path)


def band(curves: Sequence[Curve], key: str) -> tuple[list[float], list[list[float]]]:
    """The common steps of all ``curves`` that have ``key``, and the values there."""
    points = [{p["step"]: p[key] for p in curve if key in p} for curve in curves]
    points = [found for found in points if found]
    steps = sorted(set.intersection(*(set(found) for found in points))) if points else []
    return steps, [[found[step] for found in points] for step in steps]


def _drawn(models: Mapping[str, Sequence[Curve]], subsets: Sequence[str], kind: str) -> bool:
    """Whether a value was measured at two steps."""
    return any(len(band([curve], s + kind)[0]) > 1 for curves in models.values() for curve in curves for s in subsets)


def _grid(
    data: Sequence[str],
    subsets: Sequence[str],
    courses: Courses,
    path: Path,
    draw: Callable[[int, Any, str, Mapping[str, str]], str],
) -> None:
    """A row of panels for each of ``data``, or several, with a column for every subset.

    ``draw`` gets the number of the row, axes, subset and colours, and returns the panel's title.
    """
    figure, panels = pyplot().subplots(
        len(data), len(subsets), figsize=(2.5 + 4.5 * len(subsets), 0.4 + 3 * len(data)), squeeze=False
    )
    colours = _colours(courses)
    for row, (of, across) in enumerate(zip(data, panels, strict=True)):
        for axes, subset in zip(across, subsets, strict=True):
            title = draw(row, axes, subset, colours)
            axes.set_title(f"{of}: {title}" if len(courses) > 1 else title, fontsize=9)
        _legend(across, colours, courses[of])
    if len(courses) == 1:
        figure.suptitle(data[0], fontsize=10)
    save(figure, path)


def _panel(
    axes: Any, models: Mapping[str, Sequence[Curve]], subset: str | None, kind: str, colours: Mapping[str, str]
) -> None:
    if subset is None:
        axes.set_axis_off()
        return
    everything = []
    for model, curves in models.items():
        steps, values = band(curves, subset + kind)
        if kind == LOSS:
            values = [[max(v, LEAST) for v in found] for found in values]
        axes.plot(steps, [statistics.mean(v) for v in values], color=colours[model], label=model)
        everything += [v for found in values for v in found]
        if any(len(found) > 1 for found in values):
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(steps, low, high, color=colours[model], alpha=0.15, lw=0)
    if kind == LOSS:
        axes.set(ylabel="loss, bits per token")
        _log_if_wide(axes.set_yscale, everything)
    else:
        axes.set(ylabel="accuracy, %", ylim=(-2, 102))
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)


def _log_if_wide(set_scale: Any, values: Sequence[float]) -> None:
    if values and max(values) >= 10 * min(values):
        set_scale("log")


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _colours(courses: Courses) -> dict[str, str]:
    models = dict.fromkeys(model for of_data in courses.values() for model in of_data)
    return {model: f"C{number % 10}" for number, model in enumerate(models)}


def _legend(across: Sequence[Any], colours: Mapping[str, str], models: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colours[model], label=model) for model in models]
    across[-1].legend(handles=handles, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def pyplot() -> Any:
    """matplotlib's pyplot with a backend for files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Writes a figure and closes it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot().close(figure)

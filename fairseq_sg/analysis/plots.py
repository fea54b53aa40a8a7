"""The drawings. matplotlib is imported only to draw."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fairseq_sg.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Rows of panels; None is an empty place.
Panels = Sequence[Sequence[np.ndarray | None]]
#: Formats by extension; all except png are vector graphics.
FORMATS = ("png", "pdf", "svg")
#: The colour-blind safe palette of Okabe and Ito (2008), without its yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Markers of subsets, distinct in print without colours.
MARKERS = "osD^vP"
#: Text sizes in points: names of entries, titles of panels and of axes, and the heading.
SMALL, MIDDLE, LARGE = 7, 8, 10
#: The size of a grid of matrices in inches. Panels shrink to fit, down to 1.6 inches.
WIDEST, TALLEST, LEAST = 24.0, 40.0, 1.6
#: The minimum size of a name; if that is too large, some names are omitted.
LEAST_TEXT = 4.5
#: The maximum number of bars with their heights written above them.
MOST_NUMBERS = 60


class Labels(NamedTuple):
    """The texts of a grid of panels besides panel titles: heading, both axes, and colour scale."""

    heading: str = ""
    across: str = ""
    up: str = ""
    scale: str = ""


def require_matplotlib() -> None:
    """Raises UsageError if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"drawing needs matplotlib ({error}): pip install matplotlib, or write only the numbers with --format none"
        ) from None


def place(out: str, form: str | None, kept: Sequence[str] = ()) -> tuple[str, str | None]:
    """``--out`` and ``--format`` -> the prefix of the files, without an extension, and the format,
    None if neither gives one.

    Endings in ``kept`` are parts of the name. So are numbers (``v1.2``) and endings that have
    not three or four letters.

    Raises UsageError for an unknown extension, and for one that contradicts ``form``.
    """
    before, dot, extension = out.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z][A-Za-z0-9]{2,3}", extension) or extension in kept:
        return out, form
    if extension not in FORMATS:
        raise UsageError(
            f"--out is {out}, and no picture is written as .{extension}: choose from .{', .'.join(FORMATS)}"
        )
    if form not in (None, "none", extension):
        raise UsageError(f"--out is {out}, and --format is {form}: omit one of them")
    return before, form or extension


@contextmanager
def style() -> Iterator[None]:
    """Colours and fonts of the drawings made and saved inside the ``with`` block."""
    import matplotlib
    from cycler import cycler

    # 42 is TrueType: journals reject Type 3 fonts, matplotlib's default.
    with matplotlib.rc_context({"axes.prop_cycle": cycler(color=COLOURS), "pdf.fonttype": 42}):
        yield


def colours_of(lines: int) -> list[str]:
    """A colour for each line: those of the style, or of a map if there are more lines."""
    if lines <= len(COLOURS):
        return [f"C{line}" for line in range(lines)]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 0.95, lines))]


def announce(number: int, what: str) -> None:
    """Prints the number of figures to come: large grids take seconds."""
    print(f"drawing {number} {what if number > 1 else what.removesuffix('s')} …", flush=True)


def count(panels: Panels) -> int:
    return sum(panel is not None for row in panels for panel in row)


def save(figures: Mapping[str, Figure], prefix: str, form: str, alone: bool = False) -> list[str]:
    """Writes every figure to PREFIX.FORM, or to PREFIX.NAME.FORM if it has a name; returns the files' names.

    ``alone`` omits the name of a single figure.
    """
    names = []
    for name, figure in figures.items():
        named = "" if alone and len(figures) == 1 else name
        names.append(".".join(filter(None, (prefix, named, form))))
        # Matrices are images also in vector graphics, where their entries need sharp edges.
        figure.savefig(names[-1], format=form, dpi=120 if form == "png" else 300, bbox_inches="tight")
    return names


def _grid(
    rows: int, columns: int, width: float, height: float, gaps: tuple[float, float], heading: str, **how: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of rows × columns axes, of sizes and ``gaps`` (across, up) in inches.

    The layout is fixed: matplotlib's layouts measure every text of every panel, which takes longer than drawing.
    """
    from matplotlib.figure import Figure

    inner = columns * width + (columns - 1) * gaps[0], rows * height + (rows - 1) * gaps[1]
    size = inner[0] + 2, inner[1] + 2
    edges = {"left": 1 / size[0], "right": 1 - 1 / size[0], "bottom": 1 / size[1], "top": 1 - 1 / size[1]}
    figure = Figure(figsize=size)
    spaces = {"wspace": gaps[0] / width, "hspace": gaps[1] / height}
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges | spaces, **how)
    if heading:
        figure.text(0.5, 1 - 0.6 / size[1], heading, fontsize=LARGE, ha="center", va="bottom", parse_math=False)
    return figure, axes


def _figure(width: float, height: float) -> Figure:
    """A figure of a size in inches, whose layout makes room for all texts."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def in_rows(sequence: Sequence[Any], across: int) -> list[list[Any]]:
    """Cuts a sequence into as few rows as have at most ``across``, of equal lengths; None fills the last one."""
    rows = -(-len(sequence) // across)
    across = -(-len(sequence) // rows)
    filled = [*sequence, *[None] * (-len(sequence) % across)]
    return [filled[start : start + across] for start in range(0, len(filled), across)]


def heatmaps(
    panels: Panels,
    titles: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float] | None = (0.0, 1.0),
    labels: Labels = Labels(),
    vmax: float | None = None,
) -> Figure:
    """A grid of matrices (len(rows), len(columns)) with one colour scale; ``rows`` and ``columns`` name their entries.

    Empty ``rows`` give rows without names. The names are at the outer edges of the grid. The scale ends at ``vmax`` if
    given. Otherwise it spans the ``limits``, extended by entries beyond them, or the entries without ``limits``. It is
    symmetric around 0 if some entries are negative, and starts at 0 otherwise.
    """
    drawn = [panel for row in panels for panel in row if panel is not None]
    largest = max(float(np.abs(panel).max()) for panel in drawn)
    low, high = (0.0, largest or 1.0) if limits is None else (limits[0], max(limits[1], largest))
    high = high if vmax is None else vmax
    low = -high if low < 0 or any(panel.min() < 0 for panel in drawn) else low
    fits = WIDEST / len(panels[0]), TALLEST / len(panels)
    sizes = [max(LEAST, min(0.16 * n, fit)) for n, fit in zip((len(columns), len(rows) or 10), fits, strict=True)]
    figure, axes = _grid(len(panels), len(panels[0]), *sizes, (0.25, 0.35), labels.heading, subplot_kw=_NO_TICKS)
    colors = {"cmap": "RdBu_r" if low < 0 else "viridis", "vmin": low, "vmax": high}
    for down, (across, row, names) in enumerate(zip(axes, panels, titles, strict=True)):
        for right, (ax, panel, title) in enumerate(zip(across, row, names, strict=True)):
            if panel is None:
                ax.set_axis_off()
                continue
            image = ax.imshow(panel, aspect="auto", interpolation="nearest", **colors)
            ax.set_title(title, fontsize=MIDDLE, parse_math=False)
            if all(below[right] is None for below in panels[down + 1 :]):
                ax.set_xlabel(labels.across, fontsize=MIDDLE)
                _name(ax.xaxis, columns, sizes[0], rotation=90)
            if all(before is None for before in row[:right]):
                ax.set_ylabel(labels.up, fontsize=MIDDLE)
                _name(ax.yaxis, rows, sizes[1])
    _colorbar(figure, image, labels.scale, drawn)
    return figure


def scenes(
    image: np.ndarray,
    panels: Panels,
    titles: Sequence[Sequence[str]],
    heading: str = "",
    vmax: float | None = None,
) -> Figure:
    """A grid of an image, uint8 (H, W, 3), cut into the patches of weights (rows, columns) or, for None, whole.

    The weight ``vmax``, by default the largest of the grid, shows a patch as it is, 0 shows it dark, and so does a
    negative weight.
    """
    largest = max((float(panel.max()) for row in panels for panel in row if panel is not None), default=1.0)
    top = (largest if vmax is None else vmax) or 1.0
    size = max(LEAST, min(2.0, WIDEST / len(panels[0]), TALLEST / len(panels)))
    if count(panels) == 0:
        size = 3.0
    figure, axes = _grid(len(panels), len(panels[0]), size, size, (0.15, 0.35), heading, subplot_kw=_NO_TICKS)
    for across, row, names in zip(axes, panels, titles, strict=True):
        for ax, panel, title in zip(across, row, names, strict=True):
            ax.set_title(title, fontsize=MIDDLE, parse_math=False)
            ax.imshow(image, interpolation="nearest")
            if panel is not None:
                height, width = image.shape[:2]
                dark = 0.85 * (1 - np.clip(panel / top, 0, 1))
                shade = np.dstack([*[np.zeros_like(dark)] * 3, dark])  # (rows, columns, RGBA)
                ax.imshow(shade, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    return figure


def questions(image: np.ndarray, lines: Mapping[str, Sequence[tuple[str, str, str]]]) -> Figure:
    """An image, uint8 (H, W, 3), and beside it group -> (question, answer, right answer); wrong ones are coloured."""
    figure = _figure(7.5, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=[3, 4])
    left.imshow(image, interpolation="nearest")
    left.set(**_NO_TICKS)
    right.set_axis_off()
    step = 1 / (sum(map(len, lines.values())) + len(lines))
    height = 1 - step / 2
    for group, asked in lines.items():
        right.text(0, height, group, fontsize=MIDDLE, weight="bold", va="center")
        height -= step
        for question, answer, correct in asked:
            wrong = answer != correct
            right.text(0.04, height, question, fontsize=MIDDLE, va="center", parse_math=False)
            told = f"{answer}, not {correct}" if wrong else answer
            right.text(0.66, height, told, fontsize=MIDDLE, va="center", color="C1" if wrong else "black")
            height -= step
    return figure


_NO_TICKS = {"xticks": [], "yticks": []}
_BOXES = {"whis": (5, 95), "showfliers": False, "widths": 0.6, "medianprops": {"color": "C1", "lw": 1.5}}


def _colorbar(figure: Figure, image: Any, label: str, drawn: Sequence[np.ndarray]) -> None:
    """The colour scale, at the upper right of the grid; pointed if entries are beyond it."""
    width, height = figure.get_size_inches()
    inside = min(height - 2, 2.5)
    bar = figure.add_axes((1 - 0.85 / width, 1 - (1 + inside) / height, 0.15 / width, inside / height))
    low, high = image.get_clim()
    over, under = any(panel.max() > high for panel in drawn), any(panel.min() < low for panel in drawn)
    extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}[over, under]
    figure.colorbar(image, cax=bar, extend=extend).set_label(label, fontsize=MIDDLE)
    bar.tick_params(labelsize=SMALL)


def _name(axis: Any, names: Sequence[str], inches: float, **how: Any) -> None:
    """Writes names of entries along an axis; dense names are smaller, then only every second, third and so on."""
    room = 72 * inches / max(len(names), 1) / 1.1  # points
    every = math.ceil(LEAST_TEXT / room)
    axis.set_ticks(range(0, len(names), every))
    axis.set_ticklabels(names[::every], fontsize=min(SMALL, room * every), parse_math=False, **how)


def _whole_numbers(axes: Any) -> None:
    """Marks whole numbers alone across, as of words, experts or loops."""
    axes.xaxis.get_major_locator().set_params(integer=True)


def boxes(
    panels: Panels,
    titles: Sequence[Sequence[str]],
    up: Sequence[str],
    across: str,
    heading: str = "",
    numbers: Sequence[int] | None = None,
) -> Figure:
    """A grid of box plots of panels (H, count), one box per row (head).

    Boxes span the quartiles, whiskers 5 % to 95 %.

    Args:
        up: the label of every row of panels.
        across: the name of the boxes.
        numbers: the labels of the boxes; 1, 2, … by default.
    """
    most = max(len(panel) for row in panels for panel in row if panel is not None)
    width = max(2.0, 0.3 * most)
    figure, axes = _grid(len(panels), len(panels[0]), width, 1.5, (0.15, 0.6), heading, sharey="row")
    for row_of_axes, row, names, label in zip(axes, panels, titles, up, strict=True):
        for ax, panel, title in zip(row_of_axes, row, names, strict=True):
            if panel is None:
                ax.set_axis_off()
                continue
            ax.boxplot(list(panel), positions=numbers, **_BOXES)
            ax.set_title(title, fontsize=MIDDLE)
            ax.set_xlabel(across, fontsize=MIDDLE)
            ax.tick_params(labelsize=SMALL)
            ax.grid(axis="y", alpha=0.3)
        first = next(ax for ax, panel in zip(row_of_axes, row, strict=True) if panel is not None)
        first.set_ylabel(label, fontsize=MIDDLE)
        first.tick_params(labelleft=True)
        # Room above the boxes: matplotlib's is a part of their range, which is 0 for equal norms.
        first.set_ylim(0, 1.05 * first.get_ylim()[1])
    return figure


def spreads(models: Mapping[str, Sequence[float]], up: str) -> Figure:
    """A box for the values of every model, on a logarithmic axis; quartiles, whiskers from 5 % to 95 %, and medians."""
    figure = _figure(max(3.0, 1.2 + 0.8 * len(models)), 3.4)
    ax = figure.subplots()
    ax.boxplot(list(models.values()), **_BOXES)
    ax.set_xticks(range(1, len(models) + 1), models, fontsize=MIDDLE, rotation=30 * (len(models) > 3))
    ax.set(yscale="log", ylabel=up)
    ax.grid(axis="y", alpha=0.3)
    return figure


def shares(curves: Mapping[str, np.ndarray], across: str, up: str, heading: str = "") -> Figure:
    """Lines of decreasing shares, with the equal share for comparison."""
    figure = _figure(6, 3.5)
    ax = figure.subplots()
    for (name, values), color in zip(curves.items(), colours_of(len(curves)), strict=True):
        ax.plot(range(1, len(values) + 1), values, ".-", color=color, label=name)
    ax.axhline(1 / len(next(iter(curves.values()))), color="gray", lw=0.8, ls="--", label="all equal")
    ax.set(xlabel=across, ylabel=up)
    ax.set_title(heading, fontsize=LARGE, parse_math=False)
    ax.set_ylim(bottom=0)
    _whole_numbers(ax)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, frameon=False)
    return figure


def accuracies(
    models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    label: str,
    trained: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    sentences: Mapping[str, Mapping[str, int]] | None = None,
    up: str = "exact match, %",
) -> Figure:
    """Accuracies in percent of every seed: model -> subset -> group -> values.

    Draws lines over lengths, with those of training shaded, or bars over ``names``: means with the range from minimum
    to maximum. ``sentences``, subset -> group -> number, are bars below the lines, or are written above the axes.
    """
    below = sentences is not None and names is None
    figure = _figure(8, 5.5 if below else 4)
    ax, *rest = figure.subplots(1 + below, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + below]).flat
    subsets = list(dict.fromkeys(subset for of_model in models.values() for subset in of_model))
    values = [groups for of_model in models.values() for groups in of_model.values()]
    groups = [name for name in names or [] if any(name in one for one in values)]
    if names is None:
        _means_over_lengths(ax, models, subsets)
    else:
        _means_of_groups(ax, models, subsets, groups, sentences)
    if trained is not None:
        ax.axvspan(trained[0] - 0.5, trained[1] + 0.5, color="gray", alpha=0.15, lw=0, label="lengths in training")
    if groups:
        _name(ax.xaxis, groups, 7.0, rotation=90)
    ax.set(ylabel=up, ylim=(-2, 102))
    figure.axes[-1].set_xlabel(label)
    ax.grid(alpha=0.3)
    if names is None:
        _whole_numbers(ax)
        # Above the axes, since points may be anywhere inside.
        ax.legend(fontsize=MIDDLE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    else:
        # Beside the axes, since bars may fill them.
        ax.legend(fontsize=MIDDLE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    if below:
        _numbers_of_sentences(rest[0], {subset: sentences[subset] for subset in subsets}, len(models) == 1)
    return figure


def _means_over_lengths(
    ax: Any, models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], subsets: Sequence[str]
) -> None:
    """Lines. Colours are the subsets of one model, or else the models, whose line styles are subsets."""
    alone = len(models) == 1
    colours = colours_of(len(subsets) if alone else len(models))
    for number, (model, of_model) in enumerate(models.items()):
        for subset, values in of_model.items():
            at, (mean, low, high) = [int(group) for group in values], _means_and_ranges(values)
            place = subsets.index(subset)
            colour = colours[place if alone else number]
            style = {"ls": "-" if alone else ("-", "--", ":", "-.")[place % 4], "markersize": 3.5}
            ax.plot(at, mean, MARKERS[place % len(MARKERS)], color=colour, label=_called(model, subset), **style)
            if any(len(v) > 1 for v in values.values()):
                ax.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)


def _means_of_groups(
    ax: Any,
    models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    subsets: Sequence[str],
    groups: Sequence[str],
    sentences: Mapping[str, Mapping[str, int]] | None,
) -> None:
    """Bars, and above the axes the numbers of sentences."""
    shown = [(model, subset) for model, of_model in models.items() for subset in of_model]
    colours, width = colours_of(len(shown)), 0.8 / len(shown)
    for number, (model, subset) in enumerate(shown):
        values = models[model][subset]
        mean, low, high = _means_and_ranges(values)
        # The mean of equal numbers may be rounded beyond them.
        errors = np.maximum([mean - low, high - mean], 0.0) if any(len(v) > 1 for v in values.values()) else None
        at = [groups.index(group) - 0.4 + (number + 0.5) * width for group in values]
        ax.bar(at, mean, width, yerr=errors, label=_called(model, subset), color=colours[number])
        if sentences is not None and model == next(iter(models)):
            turned = 90 * (len(values) * len(subsets) > 12)
            for x, group in zip(at, values, strict=True):
                x = x if len(subsets) > 1 else groups.index(group)
                n = f"n = {sentences[subset][group]}"
                # Above the axes, where bars of any height leave room.
                ax.text(x, 103, n, fontsize=SMALL, ha="center", va="bottom", rotation=turned)


def _means_and_ranges(values: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum and maximum of every group."""
    mean, low, high = (np.array([reach(v) for v in values.values()]) for reach in (np.mean, min, max))
    return mean, low, high


def _called(model: str, subset: str) -> str:
    return ", ".join(filter(None, (model, subset)))


def _numbers_of_sentences(ax: Any, sentences: Mapping[str, Mapping[str, int]], as_lines: bool) -> None:
    """Bars, subset -> length -> number, with the numbers above them, in the lines' colours or in grays."""
    lengths = [length for groups in sentences.values() for length in groups]
    # Bars stand side by side if two subsets share a length.
    beside = len(sentences) if len(set(lengths)) < len(lengths) else 1
    grays = [str(0.35 + 0.4 * number / len(sentences)) for number in range(len(sentences))]
    colors = colours_of(len(sentences)) if as_lines else grays
    for number, (subset, groups) in enumerate(sentences.items()):
        at = [int(group) + (number % beside + 0.5) * 0.8 / beside - 0.4 for group in groups]
        bars = ax.bar(at, list(groups.values()), 0.8 / beside, color=colors[number], label=subset)
        if len(lengths) <= MOST_NUMBERS:
            ax.bar_label(bars, rotation=90 * (len(lengths) > 15), fontsize=SMALL, padding=2)
    ax.margins(y=0.5 if len(lengths) <= MOST_NUMBERS else 0.05)
    ax.set_ylabel("sentences")
    ax.grid(alpha=0.3)
    if not as_lines:
        ax.legend(fontsize=SMALL, frameon=False)


class Lines(NamedTuple):
    """A panel of ``errors``.

    Attributes:
        models: name -> places, and the values of every seed at these places.
        references: name -> places and values, drawn dashed.
        across: the label of the places.
    """

    models: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]
    references: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    across: str


def errors(panels: Mapping[str, Lines], up: str) -> Figure:
    """Errors on a logarithmic axis, a panel for every title: means with the range from minimum to maximum.

    The axis ends somewhat below the least error of a model, since those of exact predictors may be 0, and somewhat
    above the largest of all.
    """
    rows = in_rows(list(panels), 3)
    figure = _figure(max(4.5, 3.6 * len(rows[0])), 0.6 + 3.2 * len(rows))
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for ax, title in zip(axes.flat, (title for row in rows for title in row), strict=True):
        if title is None:
            ax.set_axis_off()
            continue
        panel = panels[title]
        for (name, (at, seeds)), color in zip(panel.models.items(), colours_of(len(panel.models)), strict=True):
            ax.plot(at, np.mean(seeds, axis=0), ".-", color=color, label=name, zorder=3)
            if len(seeds) > 1:
                ax.fill_between(at, np.min(seeds, axis=0), np.max(seeds, axis=0), color=color, alpha=0.15, lw=0)
        for number, (name, (at, values)) in enumerate(panel.references.items()):
            style = ("--", ":", "-.")[number % 3]
            ax.plot(at, values, style, color=str(0.2 + 0.2 * number), lw=1.2, label=name.replace("_", " "))
        drawn = [np.asarray(seeds) for _, seeds in panel.models.values()]
        least = min(float(np.min(seeds)) for seeds in drawn)
        largest = max(float(np.max(v)) for v in [*drawn, *(values for _, values in panel.references.values())])
        ax.set(yscale="log", xlabel=panel.across)
        _whole_numbers(ax)
        ax.set_ylim(least / 2 if least > 0 else None, 1.5 * largest if 0 < largest < math.inf else None)
        ax.set_title(title, fontsize=MIDDLE, parse_math=False)
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel(up)
    lines = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=4, fontsize=MIDDLE, frameon=False)
    return figure


def functions(
    axis: np.ndarray,
    target_axis: np.ndarray,
    input: np.ndarray,
    target: np.ndarray,
    prediction: np.ndarray,
    titles: Sequence[str],
) -> Figure:
    """Functions of one variable, a column for each: input, truth and prediction, and the error below.

    Args:
        axis, target_axis: (n,) and (m,). input: (K, n). target, prediction: (K, m). titles: of the K columns.
    """
    figure = _figure(0.6 + 3.4 * len(titles), 4.4)
    axes = figure.subplots(2, len(titles), squeeze=False, sharex=True, sharey="row", height_ratios=[3, 1])
    for (above, below), a, u, found, title in zip(axes.T, input, target, prediction, titles, strict=True):
        above.plot(axis, a, color="0.6", lw=1, label="input")
        above.plot(target_axis, u, color="C0", lw=2.5, alpha=0.5, label="target")
        above.plot(target_axis, found, "--", color="C1", lw=1.2, label="prediction")
        below.plot(target_axis, found - u, color="C1", lw=1)
        above.set_title(title, fontsize=MIDDLE, parse_math=False)
        below.set_xlabel("x")
        for ax in (above, below):
            ax.grid(alpha=0.3)
    axes[1, 0].set_ylabel("error")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=MIDDLE, frameon=False)
    return figure


def fields(input: np.ndarray, target: np.ndarray, prediction: np.ndarray, titles: Sequence[str]) -> Figure:
    """Functions of two variables, a row for each: maps of input, truth, prediction and error.

    Truth and prediction of a row have one colour scale. That of the error is symmetric.

    Args:
        input: (K, n, n). target, prediction: (K, m, m). titles: of the K rows.
    """
    figure = _figure(11, 0.5 + 2.4 * len(titles))
    axes = figure.subplots(len(titles), 4, squeeze=False, subplot_kw=_NO_TICKS)
    for row, a, u, found, title in zip(axes, input, target, prediction, titles, strict=True):
        largest = float(np.abs(found - u).max()) or 1.0
        limits = {"vmin": min(u.min(), found.min()), "vmax": max(u.max(), found.max())}
        symmetric = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        maps = (("input", a, {}), ("target", u, limits), ("prediction", found, limits), ("error", found - u, symmetric))
        for ax, (name, values, how) in zip(row, maps, strict=True):
            # The first index is the coordinate across.
            image = ax.imshow(values.T, origin="lower", interpolation="nearest", **how)
            ax.set_title(name if ax in axes[0] else "", fontsize=MIDDLE)
            figure.colorbar(image, ax=ax, shrink=0.85).ax.tick_params(labelsize=SMALL)
        row[0].set_ylabel(title, fontsize=MIDDLE, parse_math=False)
    return figure

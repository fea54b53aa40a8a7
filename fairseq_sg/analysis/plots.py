"""The drawings. matplotlib is only needed here, and only when something is drawn."""

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

#: Rows of panels; None leaves a place empty.
Panels = Sequence[Sequence[np.ndarray | None]]
#: Of pictures, by the file name's extension; all but png are vector graphics.
FORMATS = ("png", "pdf", "svg")
#: The palette of Okabe and Ito (2008), without its yellow: the colour-blind can tell its colours apart, too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Shapes of points, for subsets: they differ in print without colours.
MARKERS = "osD^vP"
#: The sizes of text, in points: names of entries, titles of panels and of axes, and the heading.
SMALL, MIDDLE, LARGE = 7, 8, 10
#: The size of a grid of matrices, in inches, in which its panels shrink to fit; they are at least 1.6 inches.
WIDEST, TALLEST, LEAST = 24.0, 40.0, 1.6
#: The least size of a name; where that is still too large, some are left out.
LEAST_TEXT = 4.5
#: The number of bars whose heights are also written above them.
MOST_NUMBERS = 60


class Labels(NamedTuple):
    """What a grid of panels says besides its panels' titles: a heading, both axes, and the colour scale."""

    heading: str = ""
    across: str = ""
    up: str = ""
    scale: str = ""


def require_matplotlib() -> None:
    """Raises UsageError where there is none."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"drawing needs matplotlib ({error}): pip install matplotlib, or write the numbers alone by --format none"
        ) from None


def place(out: str, form: str | None, kept: Sequence[str] = ()) -> tuple[str, str | None]:
    """``--out`` and ``--format`` -> where files go, without an extension, and the format, None where neither names one.

    Endings in ``kept`` are parts of a name, as are numbers (``v1.2``) and all that is not of three or four letters.

    Raises UsageError for an extension that no format has, and for one that ``form`` contradicts.
    """
    before, dot, extension = out.rpartition(".")
    if not dot or not re.fullmatch(r"[A-Za-z][A-Za-z0-9]{2,3}", extension) or extension in kept:
        return out, form
    if extension not in FORMATS:
        raise UsageError(
            f"--out is {out}, and no picture is written as .{extension}: choose from .{', .'.join(FORMATS)}"
        )
    if form not in (None, "none", extension):
        raise UsageError(f"--out is {out}, and --format is {form}: leave one of them out")
    return before, form or extension


@contextmanager
def style() -> Iterator[None]:
    """Colours and fonts of what is drawn and saved inside the ``with`` block."""
    import matplotlib
    from cycler import cycler

    # 42 is TrueType: journals refuse the Type 3 fonts that are matplotlib's default.
    with matplotlib.rc_context({"axes.prop_cycle": cycler(color=COLORS), "pdf.fonttype": 42}):
        yield


def announce(number: int, what: str) -> None:
    """Says what is about to be drawn: large grids take seconds."""
    print(f"drawing {number} {what if number > 1 else what.removesuffix('s')} …", flush=True)


def count(panels: Panels) -> int:
    return sum(panel is not None for row in panels for panel in row)


def save(figures: Mapping[str, Figure], prefix: str, form: str, alone: bool = False) -> list[str]:
    """Writes every figure to PREFIX.FORM, or PREFIX.NAME.FORM if it has a name; returns the files' names.

    ``alone`` leaves the name out of a single figure's.
    """
    names = []
    for name, figure in figures.items():
        named = "" if alone and len(figures) == 1 else name
        names.append(".".join(filter(None, (prefix, named, form))))
        # Matrices are images in vector graphics, too: their entries need sharp edges there.
        figure.savefig(names[-1], format=form, dpi=120 if form == "png" else 300, bbox_inches="tight")
    return names


def _grid(
    rows: int, columns: int, width: float, height: float, gaps: tuple[float, float], heading: str, **how: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of rows × columns axes, of sizes and ``gaps`` (across, up) in inches.

    Its layout is fixed: matplotlib's own layouts measure every text of every panel, which takes longer than drawing.
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


def in_rows(sequence: Sequence[Any], across: int) -> list[list[Any]]:
    """A sequence cut into rows of equal length, at most ``across``; None fills the last one."""
    across = min(across, len(sequence))
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
    """A grid of matrices (len(rows), len(columns)) with one color scale; ``rows`` and ``columns`` name their entries.

    With no ``rows``, rows have no names. The names stand at the outer edges of the grid. The scale goes to ``vmax``,
    or reaches from one of the ``limits`` to the other, further where entries are beyond them, or as far as the entries
    where ``limits`` is None; it is the same on both sides of 0 if some are negative, and starts at 0 if none is.
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


_NO_TICKS = {"xticks": [], "yticks": []}


def _colorbar(figure: Figure, image: Any, label: str, drawn: Sequence[np.ndarray]) -> None:
    """The color scale, at the right of the grid's top; pointed where entries are beyond it."""
    width, height = figure.get_size_inches()
    inside = min(height - 2, 2.5)
    bar = figure.add_axes((1 - 0.85 / width, 1 - (1 + inside) / height, 0.15 / width, inside / height))
    low, high = image.get_clim()
    over, under = any(panel.max() > high for panel in drawn), any(panel.min() < low for panel in drawn)
    extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}[over, under]
    figure.colorbar(image, cax=bar, extend=extend).set_label(label, fontsize=MIDDLE)
    bar.tick_params(labelsize=SMALL)


def _name(axis: Any, names: Sequence[str], inches: float, **how: Any) -> None:
    """Names of the entries along an axis; smaller where they lie close, at last of every second, third and so on."""
    room = 72 * inches / max(len(names), 1) / 1.1  # points
    every = math.ceil(LEAST_TEXT / room)
    axis.set_ticks(range(0, len(names), every))
    axis.set_ticklabels(names[::every], fontsize=min(SMALL, room * every), parse_math=False, **how)


def boxes(
    panels: Panels,
    titles: Sequence[Sequence[str]],
    up: Sequence[str],
    across: str,
    heading: str = "",
    numbers: Sequence[int] | None = None,
) -> Figure:
    """A grid of box plots of panels (H, count), a box a row (a head).

    Boxes reach from quartile to quartile, whiskers from 5 % to 95 %.
    ``up`` has the label of every row of panels, ``across`` is what the boxes are, ``numbers`` which, if not 1, 2, …
    """
    most = max(len(panel) for row in panels for panel in row if panel is not None)
    width = max(2.0, 0.3 * most)
    figure, axes = _grid(len(panels), len(panels[0]), width, 1.5, (0.15, 0.6), heading, sharey="row")
    for row_of_axes, row, names, label in zip(axes, panels, titles, up, strict=True):
        for ax, panel, title in zip(row_of_axes, row, names, strict=True):
            if panel is None:
                ax.set_axis_off()
                continue
            how = {"whis": (5, 95), "showfliers": False, "widths": 0.6, "medianprops": {"color": "C1", "lw": 1.5}}
            ax.boxplot(list(panel), positions=numbers, **how)
            ax.set_title(title, fontsize=MIDDLE)
            ax.set_xlabel(across, fontsize=MIDDLE)
            ax.tick_params(labelsize=SMALL)
            ax.grid(axis="y", alpha=0.3)
        first = next(ax for ax, panel in zip(row_of_axes, row, strict=True) if panel is not None)
        first.set_ylabel(label, fontsize=MIDDLE)
        first.tick_params(labelleft=True)
        first.set_ylim(bottom=0)
    return figure


def shares(curves: Mapping[str, np.ndarray], across: str, up: str, heading: str = "") -> Figure:
    """Lines of falling shares, and for comparison the share that all would have if they were equal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    ax = figure.subplots()
    for name, values in curves.items():
        ax.plot(range(1, len(values) + 1), values, ".-", label=name)
    ax.axhline(1 / len(next(iter(curves.values()))), color="gray", lw=0.8, ls="--", label="all equal")
    ax.set(xlabel=across, ylabel=up)
    ax.set_title(heading, fontsize=LARGE, parse_math=False)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, frameon=False)
    return figure


def accuracies(
    models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    label: str,
    trained: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    sentences: Mapping[str, Mapping[str, int]] | None = None,
) -> Figure:
    """Accuracies in percent, of every seed: model -> subset -> group -> values.

    Lines over lengths, with those in training shaded, or bars over ``names``; means, and from the least to the most.
    ``sentences``, subset -> group -> number, are bars below the lines, or are written above the axes.
    """
    from matplotlib.figure import Figure

    below = sentences is not None and names is None
    figure = Figure(figsize=(8, 5.5 if below else 4), layout="constrained")
    ax, *rest = figure.subplots(1 + below, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + below]).flat
    shown = [(model, subset) for model, subsets in models.items() for subset in subsets]
    subsets = list(dict.fromkeys(subset for _, subset in shown))
    groups = [name for name in names or [] if any(name in models[model][subset] for model, subset in shown)]
    for number, (model, subset) in enumerate(shown):
        values = models[model][subset]
        mean = np.array([np.mean(v) for v in values.values()])
        low, high = (np.array([reach(v) for v in values.values()]) for reach in (min, max))
        several = any(len(v) > 1 for v in values.values())
        called = ", ".join(filter(None, (model, subset)))
        if names is None:
            # Of several models, a colour is one of them, and a kind of line a subset.
            style = {} if len(models) == 1 else {"ls": ("-", "--", ":", "-.")[subsets.index(subset) % 4]}
            color = f"C{(number if len(models) == 1 else list(models).index(model)) % 10}"
            at = [int(group) for group in values]
            marker = MARKERS[subsets.index(subset) % len(MARKERS)]
            ax.plot(at, mean, marker, **{"ls": "-", **style}, color=color, label=called, markersize=3.5)
            if several:
                ax.fill_between(at, low, high, color=color, alpha=0.15, lw=0)
        else:
            width = 0.8 / len(shown)
            at = [groups.index(group) - 0.4 + (number + 0.5) * width for group in values]
            ax.bar(at, mean, width, yerr=[mean - low, high - mean] if several else None, label=called)
            if sentences is not None and model == next(iter(models)):
                # Above the axes: bars of any height leave room there.
                for x, group in zip(at, values, strict=True):
                    x = x if len(subsets) > 1 else groups.index(group)
                    n, turned = f"n = {sentences[subset][group]}", 90 * (len(values) * len(subsets) > 12)
                    ax.text(x, 103, n, fontsize=SMALL, ha="center", va="bottom", rotation=turned)
    if trained is not None:
        ax.axvspan(trained[0] - 0.5, trained[1] + 0.5, color="gray", alpha=0.15, lw=0, label="lengths in training")
    if groups:
        _name(ax.xaxis, groups, 7.0, rotation=90)
    ax.set(ylabel="exact match, %", ylim=(-2, 102))
    figure.axes[-1].set_xlabel(label)
    ax.grid(alpha=0.3)
    if names is None:
        # Above the axes: there may be points anywhere in them.
        ax.legend(fontsize=MIDDLE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    else:
        ax.legend(fontsize=MIDDLE)
    if below:
        _numbers_of_sentences(rest[0], {subset: sentences[subset] for subset in subsets}, len(models) == 1)
    return figure


def _numbers_of_sentences(ax: Any, sentences: Mapping[str, Mapping[str, int]], as_lines: bool) -> None:
    """Bars, subset -> length -> number, with the numbers above them; in the lines' colours, or in grays."""
    lengths = [length for groups in sentences.values() for length in groups]
    # Bars stand side by side where two subsets have sentences of a length.
    beside = len(sentences) if len(set(lengths)) < len(lengths) else 1
    for number, (subset, groups) in enumerate(sentences.items()):
        color = f"C{number % 10}" if as_lines else str(0.35 + 0.4 * number / len(sentences))
        at = [int(group) + (number % beside + 0.5) * 0.8 / beside - 0.4 for group in groups]
        bars = ax.bar(at, list(groups.values()), 0.8 / beside, color=color, label=subset)
        if len(lengths) <= MOST_NUMBERS:
            ax.bar_label(bars, rotation=90 * (len(lengths) > 15), fontsize=SMALL, padding=2)
    ax.margins(y=0.5 if len(lengths) <= MOST_NUMBERS else 0.05)
    ax.set_ylabel("sentences")
    ax.grid(alpha=0.3)
    if not as_lines:
        ax.legend(fontsize=SMALL, frameon=False)

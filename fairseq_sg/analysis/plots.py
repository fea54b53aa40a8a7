"""The drawings. matplotlib is only needed here, and only when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fairseq_sg.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Rows of panels; None leaves a place empty.
Panels = Sequence[Sequence[Optional[np.ndarray]]]


def require_matplotlib() -> None:
    """Raises UsageError where there is none."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"drawing needs matplotlib ({error}): pip install matplotlib, or write the numbers alone by --format none"
        ) from None


def save(figures: Mapping[str, Figure], prefix: str, form: str) -> List[str]:
    """Writes every figure to PREFIX.png, or PREFIX.NAME.png if it has a name; returns the files' names."""
    names = []
    for name, figure in figures.items():
        names.append(".".join(filter(None, (prefix, name, form))))
        figure.savefig(names[-1], format=form, dpi=120, bbox_inches="tight")
    return names


def _grid(rows: int, columns: int, width: float, height: float, **how: Any) -> Tuple[Figure, np.ndarray]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 1, height * rows + 0.5), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **how)


def in_rows(sequence: Sequence[Any], across: int) -> List[List[Any]]:
    """A sequence cut into rows of equal length, at most ``across``; None fills the last one."""
    across = min(across, len(sequence))
    filled = [*sequence, *[None] * (-len(sequence) % across)]
    return [filled[start : start + across] for start in range(0, len(filled), across)]


def heatmaps(
    panels: Panels,
    titles: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: Tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """A grid of matrices (len(rows), len(columns)) with one color scale; ``rows`` and ``columns`` name their entries.

    With no ``rows``, rows have no names. Entries beyond ``limits`` widen them, on both sides of 0 alike if some are
    negative.
    """
    drawn = [panel for row in panels for panel in row if panel is not None]
    high = max(limits[1], *(float(np.abs(panel).max()) for panel in drawn))
    low = -high if limits[0] < 0 or any(panel.min() < 0 for panel in drawn) else limits[0]
    height, width = (min(max(1.6, 0.16 * entries), 12) for entries in (len(rows) or 10, len(columns)))
    figure, axes = _grid(len(panels), len(panels[0]), width + 0.6, height + 0.6)
    colors = {"cmap": "RdBu_r" if low < 0 else "viridis", "vmin": low, "vmax": high}
    for across, row, names in zip(axes, panels, titles, strict=True):
        for ax, panel, title in zip(across, row, names, strict=True):
            if panel is None:
                ax.set_axis_off()
                continue
            image = ax.imshow(panel, aspect="auto", interpolation="nearest", **colors)
            ax.set_title(title, fontsize=8, parse_math=False)
            _name(ax.xaxis, columns, rotation=90)
            _name(ax.yaxis, rows)
    figure.colorbar(image, ax=axes, shrink=0.6).ax.tick_params(labelsize=7)
    return figure


def _name(axis: Any, names: Sequence[str], **how: Any) -> None:
    axis.set_ticks(range(len(names)))
    axis.set_ticklabels(names, fontsize=6, parse_math=False, **how)


def boxes(panels: Panels, titles: Sequence[Sequence[str]], label: str, across_label: str = "head") -> Figure:
    """A grid of box plots of panels (H, count): a box a row (a head), from quartile to quartile, whiskers to 5 % and 95 %."""
    figure, axes = _grid(len(panels), len(panels[0]), max(2.0, 0.35 * len(panels[0][0]) + 0.8), 2.0, sharey="row")
    for across, row, names in zip(axes, panels, titles, strict=True):
        for ax, panel, title in zip(across, row, names, strict=True):
            ax.boxplot(list(panel), whis=(5, 95), showfliers=False, widths=0.6)
            ax.set_title(title, fontsize=8)
            ax.set_xlabel(across_label, fontsize=7)
            ax.tick_params(labelsize=7)
            ax.grid(axis="y", alpha=0.3)
        across[0].set_ylabel(label, fontsize=8)
        across[0].set_ylim(bottom=0)
    return figure


def shares(curves: Mapping[str, np.ndarray], across: str, up: str) -> Figure:
    """Lines of falling shares, and for comparison the share that all would have if they were equal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    ax = figure.subplots()
    for name, values in curves.items():
        ax.plot(range(1, len(values) + 1), values, ".-", label=name)
    ax.axhline(1 / len(next(iter(curves.values()))), color="gray", lw=0.8, ls="--", label="all equal")
    ax.set(xlabel=across, ylabel=up)
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, frameon=False)
    return figure


def accuracies(
    models: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    label: str,
    trained: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Accuracies in percent, of every seed: model -> subset -> group -> values.

    Lines over lengths, with those in training shaded, or bars over ``names``; means, and from the least to the most.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
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
            ax.plot(at, mean, ".", **{"ls": "-", **style}, color=color, label=called)
            if several:
                ax.fill_between(at, low, high, color=color, alpha=0.15, lw=0)
        else:
            width = 0.8 / len(shown)
            at = [groups.index(group) - 0.4 + (number + 0.5) * width for group in values]
            ax.bar(at, mean, width, yerr=[mean - low, high - mean] if several else None, label=called)
    if trained is not None:
        ax.axvspan(trained[0] - 0.5, trained[1] + 0.5, color="gray", alpha=0.15, lw=0, label="lengths in training")
    if groups:
        _name(ax.xaxis, groups, rotation=90)
    ax.set(xlabel=label, ylabel="exact match, %", ylim=(-2, 102))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, frameon=False)
    return figure

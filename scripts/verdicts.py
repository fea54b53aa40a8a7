"""The results of a recipe beside the paper's: numbers, verdicts, Markdown, LaTeX and figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
from recipe import METRICS, Column, Published, Recipe, Row
from runs import Run, curve, diverged, partial_result, result_of, saved, selected


@dataclass
class Trial:
    """A run of the plan, with its row, data and seed."""

    run: Run
    row: str
    data: str


@dataclass
class Cell:
    """A number of a line: the ``values`` of its seeds in the paper's unit, the published number, and the verdict."""

    values: list[float]
    published: Published | None
    verdict: str


@dataclass
class Line:
    """A row on one of its datasets.

    Attributes:
        steps: the steps of its numbers; 0 without numbers.
        of: the steps of the recipe.
        done, diverged, planned: numbers of seeds.
    """

    row: str
    label: str
    data: str
    steps: int
    of: int
    done: int
    diverged: int
    planned: int
    cells: dict[str, Cell]
    curves: list[list[dict[str, float]]] = field(default_factory=list)


def records_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The record of every run.

    If no seed of a row on one dataset has finished, its runs are cut at the last evaluated step
    common to all started seeds.
    """
    found = {id(t): saved(t.run) for t in trials}
    for key in {(t.row, t.data) for t in trials}:
        group = [t for t in trials if (t.row, t.data) == key]
        if any(result_of(t.run) for t in group):
            continue
        begun = [t for t in group if not diverged(t.run) and curve(t.run)]
        steps = set.intersection(*({p["step"] for p in curve(t.run)} for t in begun)) if begun else set()
        for step in sorted(steps, reverse=True):
            partial = [partial_result(t.run, int(step)) for t in begun]
            if all(partial):
                for trial, more in zip(begun, partial, strict=True):
                    found[id(trial)] |= more
                break
    return [found[id(t)] for t in trials]


def value(recipe: Recipe, column: Column, run: Run, record: dict[str, Any], scale: float) -> float | None:
    """The number of a column for a run, in the paper's unit; None if its record lacks it."""
    result = record["result"]
    if column.metric == "bleu":
        return result["generated"].get(column.subset, {}).get("bleu")
    if column.at == "checkpoint":
        measured, key = result["accuracy" if column.metric == "accuracy" else "loss"], column.subset
    else:
        points = result["curve"]
        if column.at != "end":
            at = round(column.at * scale)
            points = [p for p in points if p["step"] <= at]
            measured = selected(run, points) if points and result["steps"] >= at else {}
        else:
            measured = points[-1]
        key = column.subset if column.metric == "accuracy" else f"{column.subset}_loss"
    if key not in measured:
        return None
    found = measured[key]
    if column.metric == "accuracy":
        return found / 100 if recipe.unit == "fraction" else found
    return 2**found if column.metric == "perplexity" else found


def lines(recipe: Recipe, trials: Sequence[Trial], records: Sequence[dict[str, Any]], scale: float) -> list[Line]:
    """The lines of the table: one per row and dataset, in the order of the recipe, including
    rows that are only shown.
    """
    found = []
    planned = {(t.row, t.data) for t in trials}
    for name, row in recipe.rows.items():
        for data in row.on:
            if row.arguments is not None and (name, data) not in planned:
                continue
            if row.arguments is None and not any(d == data for _, d in planned):
                continue
            group = [(t.run, r) for t, r in zip(trials, records, strict=True) if (t.row, t.data) == (name, data)]
            found.append(_line(recipe, name, row, data, group, scale))
    return found


def _line(recipe: Recipe, name: str, row: Row, data: str, group: list[Any], scale: float) -> Line:
    done = [(run, record) for run, record in group if "result" in record and "diverged" not in record]
    failed = sum("diverged" in record for _, record in group)
    cells = {}
    for key, column in recipe.columns_of(data).items():
        values = [value(recipe, column, run, record, scale) for run, record in done]
        values = [v for v in values if v is not None]
        published = row.published.get(data, {}).get(key)
        cells[key] = Cell(values, published, verdict(values, failed, published, recipe.statistic))
    return Line(
        row=name,
        label=row.label,
        data=data,
        steps=max((record["result"]["steps"] for _, record in done), default=0),
        of=row.steps,
        done=len(done),
        diverged=failed,
        planned=len(group),
        cells=cells,
        curves=[record["result"]["curve"] for _, record in done],
    )


def centre(values: Sequence[float], statistic: str) -> float:
    return statistics.median(values) if statistic == "median" else statistics.mean(values)


def verdict(values: Sequence[float], diverged: int, published: Published | None, statistic: str) -> str:
    """ "within one std", "above", "below", "fail", "not run", or "–" without a published number.

    One std is the published one, but at least half a unit of the last published digit; if none is published, that of
    ``values``. A row fails if all its finished trainings diverged; otherwise diverged ones are ignored.
    """
    if not values:
        if not diverged:
            return "not run"
        return "fail, as published" if published and published.fail else "fail"
    if published is None:
        return "–"
    if published.fail:
        return "above (published: Fail)"
    std = published.std
    if std is None:
        std = statistics.stdev(values) if len(values) > 1 else 0.0
    difference = centre(values, statistic) - published.mean
    # The last term allows for the rounding of binary fractions.
    if abs(difference) <= max(std, published.half) + 1e-9:
        return "within one std"
    return "above" if difference > 0 else "below"


def shown(recipe: Recipe, column: Column, values: Sequence[float]) -> str:
    """Mean ± sample std, or the median; "–" without values."""
    if not values:
        return "–"
    digits = 1 if column.metric == "accuracy" and recipe.unit == "percent" else 2
    text = f"{centre(values, recipe.statistic):.{digits}f}"
    if len(values) == 1 or recipe.statistic == "median":
        return text
    return f"{text} ± {statistics.stdev(values):.{digits}f}"


def _here(recipe: Recipe, line: Line, key: str) -> str:
    cell = line.cells.get(key)
    if cell is None:
        return ""
    return "Fail" if not cell.values and line.diverged else shown(recipe, recipe.columns[key], cell.values)


def _there(line: Line, key: str) -> str:
    cell = line.cells.get(key)
    return "" if cell is None else cell.published.text if cell.published else "–"


def _seeds(line: Line) -> str:
    text = f"{line.done} of {line.planned}" if line.planned else "–"
    return text + (f", {line.diverged} Fail" if line.diverged else "")


def _steps(line: Line) -> str:
    return f"{line.steps:,}" + (f" of {line.of:,}" if line.steps != line.of else "") if line.steps else "–"


def _verdict(recipe: Recipe, line: Line) -> str:
    if not line.planned:
        return recipe.rows[line.row].missing
    verdicts = {key: cell.verdict for key, cell in line.cells.items() if cell.verdict != "–"}
    if len(set(verdicts.values())) == 1 and len(verdicts) == len(line.cells):
        return next(iter(verdicts.values()))
    return "; ".join(f"{key} {text}" for key, text in verdicts.items()) or "–"


def table(recipe: Recipe, found: Sequence[Line]) -> list[list[str]]:
    """Rows of text with a header; without published numbers only ours. Verdicts appear only if there are any."""
    several = len(recipe.data) > 1
    header = ["model", *(["data"] if several else []), "seeds", "steps"]
    for key in recipe.columns:
        header += [f"{key} here", f"{key} published"] if recipe.published else [key]
    rows = [[*header, "verdict"]]
    for line in found:
        cells = [line.label, *([line.data] if several else []), _seeds(line), _steps(line)]
        for key in recipe.columns:
            cells += [_here(recipe, line, key), *([_there(line, key)] if recipe.published else [])]
        rows.append([*cells, _verdict(recipe, line)])
    if not recipe.published and all(row[-1] == "–" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return rows


def legend(recipe: Recipe) -> str:
    """The explanation of the table's numbers."""
    accuracies = any(column.metric == "accuracy" for column in recipe.columns.values())
    unit = {"fraction": "as fractions", "percent": "in percent"}[recipe.unit]
    spread = "median" if recipe.statistic == "median" else "mean ± sample standard deviation"
    selector = next(iter(recipe.data.values())).subsets[0]
    which = {
        "last": "of the last checkpoint",
        "best": f"of the checkpoint with the best accuracy on `{selector}` (the latest of several)",
    }[recipe.checkpoint]
    parts = []
    for key, column in recipe.columns.items():
        at = {"checkpoint": which, "end": "at the end of training"}.get(column.at, f"{which} up to step {column.at}")
        metric = {"loss": "loss in bits per token", "perplexity": "perplexity per token"}.get(column.metric)
        parts.append(f"{key}: {metric or column.metric} on `{column.subset}` {at}")
    ours = f"{spread[0].upper() + spread[1:]} over the seeds that did not diverge"
    if not recipe.published:
        return f"{'; '.join(parts)}. {f'Accuracies {unit}. ' if accuracies else ''}{ours}."
    return (
        f"{'; '.join(parts)}. {f'Accuracies {unit}, as in the paper. ' if accuracies else ''}{ours}; the "
        f"paper has {recipe.seeds} seed{'s' * (recipe.seeds > 1)}. Verdict: within one published standard "
        "deviation (at least half a unit of the last printed digit; where none is printed, ours), above or "
        "below; fail: all trainings diverged."
    )


def markdown(recipe: Recipe, found: Sequence[Line], summary: dict[str, Any]) -> str:
    rows = table(recipe, found)
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    machine = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in summary["machines"])
    made = f"Commit {', '.join(summary['commits'])}; {machine}. " if summary["commits"] else ""
    return "\n".join(
        [
            f"# {recipe.title}",
            "",
            f"`{summary['command']}`",
            "",
            f"{made}{recipe.about_source}. {legend(recipe)}",
            "",
            cells[0],
            "|" + "---|" * len(rows[0]),
            *cells[1:],
            "",
            recipe.about_choices,
            "",
            *(f"- {sentence}" for sentence in recipe.chosen),
            "",
        ]
    )


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "–": "--", "φ": r"$\phi$",
    "λ": r"$\lambda$", "≤": r"$\leq$", "†": r"$^\dagger$",
}  # fmt: skip


def escaped(text: str) -> str:
    """Escapes text for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def latex(recipe: Recipe, found: Sequence[Line]) -> str:
    """A table environment for ``\\usepackage{booktabs}``."""
    rows = [[escaped(cell) for cell in row] for row in table(recipe, found)]
    body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            r"\begin{tabular}{" + "l" * len(rows[0]) + "}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{escaped(recipe.title)}. {escaped(recipe.about_source)}.}}",
            r"\end{table}",
            "",
        ]
    )


def plots(recipe: Recipe, found: Sequence[Line], prefix: Path) -> list[Path]:
    """Draws the figures of a table, and returns their files.

    PREFIX.png has bars of our numbers beside the published ones. PREFIX-curves.png has accuracy and loss through
    training, and PREFIX-loss.png accuracy over loss, if they were measured. PREFIX-sweep.png has rows with an x.
    """
    paths = {name: prefix.with_name(f"{prefix.name}{name}.png") for name in ("", "-curves", "-loss", "-sweep")}
    accuracies, losses = (
        list(dict.fromkeys(c.subset for c in recipe.columns.values() if c.metric in metrics))
        for metrics in (("accuracy",), METRICS)
    )
    courses: dict[str, dict[str, list[Any]]] = {}
    for line in found:
        if line.curves:
            there = courses.setdefault(line.data, {})
            there[f"{line.label} ({line.row})" if line.label in there else line.label] = line.curves
    written = [_bars(recipe, found, paths[""])]
    if figures.through_training(courses, accuracies, losses, paths["-curves"]):
        written.append(paths["-curves"])
    if accuracies and figures.loss_and_accuracy(courses, accuracies, paths["-loss"]):
        written.append(paths["-loss"])
    if recipe.x_axis:
        written.append(_sweep(recipe, found, paths["-sweep"]))
    return written


def _sweep(recipe: Recipe, found: Sequence[Line], path: Path) -> Path:
    """Columns over the x of rows; rows without x are horizontal levels."""
    lines: dict[str, dict[str, dict[float, list[float]]]] = {key: {} for key in recipe.columns}
    levels: dict[str, dict[str, list[float]]] = {key: {} for key in recipe.columns}
    for line in found:
        x = recipe.rows[line.row].x
        for key, cell in line.cells.items():
            if x is not None:
                lines[key].setdefault(line.data, {})[x] = cell.values
            else:
                levels[key][f"{line.label}, {line.data}" if len(recipe.data) > 1 else line.label] = cell.values
    units = {key: _unit(recipe, column) for key, column in recipe.columns.items()}
    figures.sweep(lines, levels, recipe.x_axis.label, recipe.x_axis.scale, units, path)
    return path


def _unit(recipe: Recipe, column: Column) -> str:
    return "accuracy, %" if column.metric == "accuracy" and recipe.unit == "percent" else column.metric


def _bars(recipe: Recipe, found: Sequence[Line], path: Path) -> Path:
    several = len(recipe.data) > 1
    figure, panels = figures.pyplot().subplots(
        1,
        len(recipe.columns),
        figsize=(4 + 4 * len(recipe.columns), 1.5 + 0.36 * len(found)),
        sharey=True,
        squeeze=False,
    )
    names = [f"{line.label}, {line.data}" if several else line.label for line in found]
    for axes, key in zip(panels[0], recipe.columns, strict=True):
        for y, line in enumerate(found):
            cell = line.cells.get(key)
            if cell is None:
                continue
            if cell.values:
                spread = statistics.stdev(cell.values) if len(cell.values) > 1 and recipe.statistic == "mean" else None
                axes.barh(y - 0.2, centre(cell.values, recipe.statistic), 0.38, xerr=spread, color="C0")
            elif line.diverged:
                axes.text(0, y - 0.2, " Fail", va="center", fontsize=7, color="C0")
            if cell.published and cell.published.fail:
                axes.text(0, y + 0.2, " Fail", va="center", fontsize=7, color="C1")
            elif cell.published:
                axes.barh(y + 0.2, cell.published.mean, 0.38, xerr=cell.published.std, color="C1", alpha=0.6)
        column = recipe.columns[key]
        unit = {"accuracy": ", %" if recipe.unit == "percent" else ""}.get(column.metric, f", {column.metric}")
        axes.set(xlabel=key + unit, yticks=range(len(found)), yticklabels=names)
        if column.metric == "accuracy":
            axes.set_xlim(0, 102 if recipe.unit == "percent" else 1.02)
        axes.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{recipe.title}\nblue: here, orange: {recipe.source}", fontsize=9)
    figures.save(figure, path)
    return path

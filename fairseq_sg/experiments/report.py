"""Results as tables: one number a cell, set beside the paper's; as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairseq_sg.experiments.intervals import interval, with_interval
from fairseq_sg.experiments.quantities import QUANTITIES, chosen, decoding, part, source_of
from fairseq_sg.experiments.results import Record, Results, compares, counts, of_equal_steps
from fairseq_sg.experiments.schema import DECODED, Column, Published, Recipe
from fairseq_sg.scoring.perplexity import perplexity
from fairseq_sg.tables import aligned

Table = list[list[str]]


@dataclass
class Cell:
    """A number of a line: the ``values`` of ``seeds`` in the paper's unit, the published number, and the verdict.

    It has no values where one of them is infinite or NaN: then they have no mean. Values of some finished seeds alone
    have no verdict.
    """

    values: list[float]
    published: Published | None
    verdict: str
    seeds: list[int] = field(default_factory=list)


@dataclass
class Line:
    """A row on one of its datasets.

    Attributes:
        steps: the steps of its numbers; 0 without numbers.
        of: the steps of the recipe.
        done, diverged, planned: numbers of seeds.
        curves: of the finished seeds; none for a row that evaluates another.
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

    @property
    def failed(self) -> bool:
        """Whether all finished trainings diverged."""
        return self.diverged > 0 and not self.done


#: A recipe, one of its lines, and a column: where a number of a table is.
Place = tuple[Recipe, Line, str]


def value(recipe: Recipe, column: Column, record: Record, scale: float) -> float | None:
    """The number of a column for a training, in the paper's unit; None if its record lacks it."""
    result = record["result"]
    if column.metric == "analysis":
        return result.get("analysed", {}).get(column.value)
    if column.metric in DECODED:
        return result["generated"].get(decoding(column.subset, column.generate), {}).get(column.metric)
    quantity, place = source_of(column.metric), part(column.subset, column.type)
    if column.model_overrides:
        measured, key = result.get("more", {}).get(column.model_overrides, {}).get(quantity, {}), place
    elif column.at == "checkpoint":
        # A result has what its log has.
        measured, key = result.get(quantity, {}), place
    else:
        points, key = result["curve"], QUANTITIES[quantity].key(place)
        if column.at == "end":
            measured = points[-1]
        elif column.at in ("best", "peak"):
            by = column.subset if column.at == "peak" else recipe.data[record["data"]].subsets[0]
            selector = part(by, column.type)
            # The first of several; none where that subset has no such number.
            points = [point for point in points if QUANTITIES[quantity].key(selector) in point]
            measured = max(points, key=lambda point: QUANTITIES[quantity].rank(point, selector), default={})
        elif column.at == "second_half":
            late = [point[key] for point in points if key in point and 2 * point["step"] > result["steps"]]
            measured = {key: statistics.mean(late)} if late else {}
        else:
            at = round(column.at * scale)
            points = [p for p in points if p["step"] <= at]
            selector, best = recipe.data[record["data"]].subsets[0], recipe.checkpoint == "best"
            there = points and result["steps"] >= at
            measured = chosen(points, recipe.checkpoint_metric, selector, best) if there else {}
    if key not in measured:
        return None
    found = measured[key]
    if column.metric == "accuracy":
        return found / 100 if recipe.unit == "fraction" else found
    return perplexity(found) if column.metric == "perplexity" else found


def lines(results: Results) -> list[Line]:
    """The lines of the table: one per row and dataset, in the order of the recipe, including rows only shown."""
    recipe, found, results = results.recipe, [], of_equal_steps(results)
    planned = {(record["row"], record["data"]) for record in results.records}
    for name, row in recipe.rows.items():
        for data in recipe.data_of(name):
            shown = row.missing and data in results.data
            if shown or (recipe.trained_as(name), data) in planned:
                found.append(_line(results, name, data))
    return found


def _line(results: Results, name: str, data: str) -> Line:
    recipe = results.recipe
    trained = recipe.trained_as(name)
    group = results.of(trained, data)
    done = list(filter(counts, group))
    failed = sum("diverged" in record for record in group)
    cells = {}
    for key, column in recipe.measured(name, data).items():
        by_seed = {record["seed"]: value(recipe, column, record, results.steps_scale) for record in done}
        by_seed = {seed: number for seed, number in by_seed.items() if number is not None}
        values = list(by_seed.values())
        published = recipe.published(name, data, key)
        # Only some models have what an analysis measures, such as experts.
        lacks = column.metric == "analysis" and done and not values
        if all(map(math.isfinite, values)):
            some = 0 < len(values) < len(done)
            judged = "–" if lacks or some else verdict(values, 0 if done else failed, published, recipe.statistic)
            cells[key] = Cell(values, published, judged, list(by_seed))
        else:
            cells[key] = Cell([], published, "not finite")
    return Line(
        row=name,
        label=recipe.rows[name].label,
        data=data,
        steps=max((record["result"]["steps"] for record in done), default=0),
        of=recipe.steps_of(trained),
        done=len(done),
        diverged=failed,
        planned=len(group),
        cells=cells,
        curves=[record["result"]["curve"] for record in done if trained == name],
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
    digits = digits_of(recipe, column)
    text = f"{centre(values, recipe.statistic):z.{digits}f}"
    if len(values) == 1 or recipe.statistic == "median":
        return text
    return f"{text} ± {statistics.stdev(values):.{digits}f}"


def digits_of(recipe: Recipe, column: Column) -> int:
    """The digits after the point of a column's numbers."""
    if column.metric == "analysis":
        return column.digits
    if column.metric in DECODED:
        return 2
    if column.metric == "accuracy" and recipe.unit == "percent":
        return 1
    return QUANTITIES[source_of(column.metric)].digits


def cell_text(recipe: Recipe, line: Line, column: str) -> str:
    """Our number in a cell, with the number of its seeds where others have none; empty if the row's data do not have
    the column.
    """
    cell = line.cells.get(column)
    if cell is None:
        return ""
    seeds = len(cell.values)
    of_some = f" ({seeds} seed{'s' * (seeds > 1)})" if 0 < seeds < line.done else ""
    return "Fail" if line.failed else shown(recipe, recipe.columns[column], cell.values) + of_some


def published_text(line: Line, column: str) -> str:
    cell = line.cells.get(column)
    return "" if cell is None else cell.published.text if cell.published else "–"


def columns_shown(recipe: Recipe, found: Sequence[Line]) -> list[str]:
    """The columns that the data of some line have."""
    return [key for key in recipe.columns if any(key in line.cells for line in found)]


def columns_published(recipe: Recipe, found: Sequence[Line]) -> set[str]:
    """The columns in which a line has a published number."""
    cells = ((key, line.cells.get(key)) for line in found for key in recipe.columns)
    return {key for key, cell in cells if cell is not None and cell.published is not None}


def seeds_text(line: Line) -> str:
    if not line.planned:
        return "–"
    text = str(line.done) if line.done == line.planned else f"{line.done} of {line.planned}"
    return text + (f", {line.diverged} Fail" if line.diverged else "")


def steps_text(line: Line) -> str:
    return f"{line.steps:,}" + (f" of {line.of:,}" if line.steps != line.of else "") if line.steps else "–"


def _verdict_text(recipe: Recipe, line: Line) -> str:
    if not line.planned:
        return recipe.rows[line.row].missing
    verdicts = {key: cell.verdict for key, cell in line.cells.items() if cell.verdict != "–"}
    if len(set(verdicts.values())) == 1 and len(verdicts) == len(line.cells):
        return next(iter(verdicts.values()))
    return "; ".join(f"{key} {text}" for key, text in verdicts.items()) or "–"


def table(recipe: Recipe, found: Sequence[Line]) -> Table:
    """Rows of text with a header; columns, published numbers and verdicts appear only where there are any."""
    several = len(recipe.data) > 1
    header = ["model", *(["data"] if several else []), "seeds", "steps"]
    columns, beside = columns_shown(recipe, found), columns_published(recipe, found)
    for key in columns:
        header += [f"{key} here", f"{key} published"] if key in beside else [key]
    rows = [[*header, "verdict"]]
    for line in found:
        cells = [line.label, *([line.data] if several else []), seeds_text(line), steps_text(line)]
        for key in columns:
            there = [published_text(line, key)] if key in beside else []
            cells += [cell_text(recipe, line, key), *there]
        rows.append([*cells, _verdict_text(recipe, line)])
    if not recipe.has_published and all(row[-1] == "–" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return rows


def legend(recipe: Recipe, lines: Sequence[Line] | None = None, scale: float = 1.0) -> list[str]:
    """The explanation of the table's numbers, a sentence each.

    Args:
        lines: those of the table; by default it has all rows and columns.
        scale: the factor on the recipe's steps.
    """
    columns = recipe.columns if lines is None else columns_shown(recipe, lines)
    found = [f"{key}: {_about_column(recipe, key, scale)}." for key in columns]
    found += [
        f"{row.label}: the models of {recipe.rows[row.evaluates].label}, evaluated with `--model-overrides "
        f'"{row.model_overrides}"`.'
        for name, row in recipe.rows.items()
        if row.evaluates and (lines is None or any(line.row == name for line in lines))
    ]
    spread = "the median" if recipe.statistic == "median" else "mean ± sample standard deviation"
    found.append(f"Numbers are {spread} over the seeds that did not diverge.")
    found += _about_published_std(recipe)
    if recipe.has_published:
        known = f"The paper has {recipe.papers_seeds} seed{'s' * (recipe.papers_seeds > 1)}."
        found += [
            known if recipe.seeds_known else "The paper does not say how many seeds it has.",
            "Verdict: within one published standard deviation, above or below. It is at least half a unit of the last "
            "printed digit; where none is printed, ours counts. Fail: all finished trainings diverged.",
        ]
    return found


def _about_column(recipe: Recipe, key: str, scale: float) -> str:
    """What the numbers of a column are, and when they are measured."""
    column = recipe.columns[key]
    if column.metric == "analysis":
        analysis, _, path = column.value.partition("/")
        return f"`{path}` of the analysis `{analysis}`"
    first = dict.fromkeys(
        f"`{data.subsets[0]}`" for name, data in recipe.data.items() if key in recipe.columns_of(name)
    )
    selector = " or ".join(first)
    which = {
        "last": "of the last checkpoint",
        "best": f"of the checkpoint with the best {recipe.checkpoint_metric} on {selector} (the latest of several)",
    }[recipe.checkpoint]
    where = f"`{column.subset}`" + f", examples of `{column.type}`" * bool(column.type)
    at = {
        "checkpoint": which,
        "end": "at the end of training",
        "best": f"at the evaluation with the best value of its own on {selector} (the first of several)",
        "peak": "at its best evaluation in training, which looks at the test",
        "second_half": "as the mean over the evaluations in the second half of training",
    }.get(column.at) or f"{which} up to step {round(column.at * scale)}"
    overrides = f', evaluated with `--model-overrides "{column.model_overrides}"`' * bool(column.model_overrides)
    overrides += f", decoded with `{column.generate}`" * bool(column.generate)
    return f"{_metric(recipe, column)}, on {where} {at}{overrides}"


def _about_published_std(recipe: Recipe) -> list[str]:
    """What follows ± in the published numbers, where it is not the sample's standard deviation in all rows."""
    published = {name: recipe.std_of(name) for name, row in recipe.rows.items() if row.published}
    if "population" not in published.values():
        return []
    others = " and ".join(recipe.rows[name].label for name, std in published.items() if std != recipe.published_std)
    of_all = recipe.published_std == "population"
    first = (
        f"Published ±{'' if of_all else f' of {others}'} is the population's standard deviation of "
        f"{recipe.papers_seeds} seeds; verdicts take the sample's, {recipe.of_sample:.3f} times as much."
    )
    return [first, *([f"For {others} it is the sample's."] if of_all and others else [])]


def _metric(recipe: Recipe, column: Column) -> str:
    """The name of a column's metric, with its unit."""
    if column.metric in DECODED:
        return DECODED[column.metric]
    if column.metric == "perplexity":
        return "perplexity per token"
    unit = {"fraction": ", as a fraction", "percent": ", in percent"}[recipe.unit]
    return QUANTITIES[column.metric].name + unit * (column.metric == "accuracy")


def about_source(recipe: Recipe) -> str:
    return f"{'Published' if recipe.has_published else 'Source'}: {recipe.source}"


def provenance(results: Results) -> list[str]:
    """The command, commits and machines of the results, a sentence each; empty before any training."""
    if not results.commits:
        return []
    machine = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in results.machines)
    commits, more = results.commits, results.made > len(results.records)
    return [
        f"Command: `{results.command}`.",
        *([f"It makes {results.made} trainings; {results.done} of them are here."] if more else []),
        f"Commit{'s' * (len(commits) > 1)}: {', '.join(commits)}. Machine: {machine}.",
        *mixed_code(results),
        *([results.note] if results.note else []),
    ]


def mixed_code(results: Results) -> list[str]:
    """The rows whose trainings had different files of the recipe's own ``user_dir``, a sentence each."""
    found = []
    for row, data in dict.fromkeys((record["row"], record["data"]) for record in results.records):
        seeds: dict[str, list[str]] = {}
        for record in filter(counts, results.of(row, data)):
            for code in dict.fromkeys(start["commit"].partition(" with ")[2] for start in record.get("starts", [])):
                seeds.setdefault(code, []).append(str(record["seed"]))
        if len(seeds) > 1:
            parts = [f"{code} in seed{'s' * (len(of) > 1)} {', '.join(of)}" for code, of in seeds.items()]
            found.append(f"{results.recipe.rows[row].label} on {data} had different code: {'; '.join(parts)}.")
    return found


def as_text(rows: Table) -> str:
    found = aligned(rows, left=len(rows[0]))
    return "\n".join([found[0], "-" * len(found[0]), *found[1:]])


def markdown_table(rows: Table) -> list[str]:
    """The lines of a Markdown table; the first row is its header."""
    found = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [found[0], "|" + "---|" * len(rows[0]), *found[1:]]


def page(results: Results, pictures: Sequence[str]) -> str:
    """The page of a results file: table, figures, choices, and at the bottom where the numbers come from."""
    recipe = results.recipe
    choices = "Chosen where the paper is silent, or differently from it:" if recipe.has_published else "Chosen:"
    found = [f"# {recipe.title}", "", f"{about_source(recipe)}.", ""]
    shown = lines(results)
    found += [*markdown_table(table(recipe, shown)), ""]
    found += [line for name in pictures for line in (f"![{recipe.title}]({name})", "")]
    found += [f"- {sentence}" for sentence in legend(recipe, shown, results.steps_scale)]
    if recipe.chosen:
        found += ["", choices, "", *(f"- {sentence}" for sentence in recipe.chosen)]
    if results.commits:
        found += ["", "---", "", *(f"{sentence}  " for sentence in provenance(results)[:-1]), provenance(results)[-1]]
    return "\n".join([*found, ""])


def as_csv(results: Results) -> str:
    """One line for every number of every seed: row, label, data, seed, steps, column, value."""
    recipe, text = results.recipe, io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "label", "data", "seed", "steps", "column", "value"])
    for record in filter(counts, of_equal_steps(results).records):
        data = record["data"]
        for name, row in recipe.rows.items():
            columns = recipe.measured(name, data) if recipe.trained_as(name) == record["row"] else {}
            for key, column in columns.items():
                number = value(recipe, column, record, results.steps_scale)
                if number is not None:
                    steps = record["result"]["steps"]
                    writer.writerow([name, row.label, data, record["seed"], steps, key, f"{number:.6g}"])
    return text.getvalue()


def difference(a: Place, b: Place, paired: bool = False) -> tuple[str, tuple[float, float] | None]:
    """a − b as text, with the 95 % confidence interval of the difference of means; medians have no interval.

    Args:
        paired: whether both have the same seeds, and the interval is that of their differences.
    """
    (recipe, line, column), (other, below, name) = a, b
    ours, theirs = line.cells[column].values, below.cells[name].values
    medians = "median" in (recipe.statistic, other.statistic)
    around = None if medians else interval(ours, theirs, paired)
    apart = centre(ours, recipe.statistic) - centre(theirs, other.statistic)
    return with_interval(apart, around, digits_of(recipe, recipe.columns[column])), around


def compare(a: Results, b: Results, names: tuple[str, str]) -> Table:
    """The common numbers of two results, with their difference: that of ``b`` less that of ``a``.

    Brackets are the 95 % confidence interval of the difference of means; medians have none. The last column says
    whether it excludes 0. Numbers of different steps, and of trainings of which some diverged, say so. A median and a
    mean are compared by means.
    """
    rows = [["model", "data", "column", *names, "difference", "interval excludes 0"]]
    if a.recipe.statistic != b.recipe.statistic:
        a, b = (replace(one, recipe=replace(one.recipe, statistic="mean")) for one in (a, b))
    others = {(line.row, line.data): line for line in lines(b)}
    left_out = measured_otherwise(a, b)
    for line in lines(a):
        other = others.get((line.row, line.data))
        for key in [key for key in line.cells if key in other.cells and key not in left_out] if other else ():
            cells = _beside((a.recipe, line, key), (b.recipe, other, key))
            rows += [[line.label, line.data, key, *cells]] if cells else []
    return rows


def compare_rows(results: Results, names: tuple[str, str]) -> Table:
    """The numbers of two rows on the same data, with their difference as in ``compare``: the second less the first.

    Rows that show the same trainings have the numbers of the seeds that both have, and the interval of their
    differences.
    """
    recipe, found = results.recipe, lines(results)
    rows = [["data", "column", *names, "difference", "interval excludes 0"]]
    one, other = ({line.data: line for line in found if line.row == name} for name in names)
    same = len(set(map(recipe.trained_as, names))) == 1
    for data in [data for data in one if data in other]:
        for key in [key for key in one[data].cells if key in other[data].cells]:
            pair = one[data], other[data]
            pair = _of_equal_seeds(*pair, key) if same else pair
            cells = _beside(*((recipe, line, key) for line in pair), paired=same)
            rows += [[data, key, *cells]] if cells else []
    return rows


def _of_equal_seeds(one: Line, other: Line, key: str) -> tuple[Line, Line]:
    """Two lines whose cells of a column have the seeds that are in both."""
    a, b = (dict(zip(line.cells[key].seeds, line.cells[key].values, strict=True)) for line in (one, other))
    seeds = [seed for seed in a if seed in b]

    def cut(line: Line, values: dict[int, float]) -> Line:
        cell = replace(line.cells[key], values=[values[seed] for seed in seeds], seeds=seeds)
        return replace(line, cells=line.cells | {key: cell})

    return cut(one, a), cut(other, b)


def _beside(a: Place, b: Place, paired: bool = False) -> list[str]:
    """Two numbers of a column, b less a, and whether its interval excludes 0; empty if one has no number.

    Where all trainings diverged there is "Fail" in its place.
    """
    (recipe, line, key), (_, other, _) = a, b
    if not all(of.cells[key].values or of.failed for of in (line, other)) or (line.failed and other.failed):
        return []
    numbers = [cell_text(recipe, of, key) + _survivors(of) for of in (line, other)]
    if line.failed or other.failed:
        return [*numbers, "–", "–"]
    text, around = difference(b, a, paired)
    clear = "–" if around is None else "no" if around[0] <= 0 <= around[1] else "yes"
    if line.steps != other.steps:
        numbers = [f"{n} ({of.steps:,} steps)" for n, of in zip(numbers, (line, other), strict=True)]
    return [*numbers, text, clear]


def _survivors(line: Line) -> str:
    """Of which trainings a number is, where others diverged."""
    return f" ({seeds_text(line)})" if line.diverged and line.done else ""


def measured_otherwise(a: Results, b: Results) -> list[str]:
    """The columns that two results measure otherwise under one name."""

    def measured(results: Results, key: str) -> tuple[Column, str, float]:
        """A column without its place and digits; the unit; the scale of the column's step, where it is at one."""
        column = replace(results.recipe.columns[key], data=None, x=None, digits=1)
        return column, results.recipe.unit, results.steps_scale if isinstance(column.at, int) else 1.0

    common = [key for key in a.recipe.columns if key in b.recipe.columns]
    return [key for key in common if measured(a, key) != measured(b, key)]


def unlike(a: Results, b: Results) -> list[str]:
    """What differs in two results that are compared: data, choices, evaluations, the statistic; a sentence each."""
    found, common = [], sorted(a.recipe.data.keys() & b.recipe.data.keys())
    for name in common:
        one, other = (results.recipe.data[name].prepare for results in (a, b))
        if one != other:
            found.append(f"{name} is prepared differently: `{one}`, and `{other}`.")
    for what, choice in (("checkpoints", _choice), ("best evaluations", _choice_of_best)):
        for one, other in dict.fromkeys(tuple(choice(r.recipe, name) for r in (a, b)) for name in common):
            if one != other and one and other:
                found.append(f"The {what} are chosen differently: {one}, and {other}.")
    for key, *values in _evaluated_otherwise(a.recipe, b.recipe, common):
        one, other = (f"`{value}`" if value else "none" for value in values)
        found.append(f"{key} differs: {one}, and {other}.")
    if a.recipe.statistic != b.recipe.statistic:
        found.append("One recipe has the mean of the seeds, the other the median: both are compared by means.")
    left_out = measured_otherwise(a, b)
    return found + ([f"left out, as they are measured otherwise: {', '.join(left_out)}"] if left_out else [])


def _evaluated_otherwise(a: Recipe, b: Recipe, data: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """The keys by which two recipes evaluate trainings on ``data`` differently, with both values."""
    pairs = {}
    if any(compares(recipe, name) for recipe in (a, b) for name in data):
        pairs["validate_every"] = a.validate_every, b.validate_every
    if a.generate and b.generate:
        pairs["generate"] = a.generate, b.generate
    for name in (name for name in a.rows if name in b.rows):
        pairs[f"rows.{name}.model_overrides"] = a.rows[name].model_overrides, b.rows[name].model_overrides
    for name in (name for name in a.analyses if name in b.analyses):
        pairs[f"analyses.{name}"] = a.analyses[name], b.analyses[name]
    yield from ((key, one, other) for key, (one, other) in pairs.items() if one != other)


def _choice(recipe: Recipe, data: str) -> str:
    """The evaluated checkpoint of trainings on ``data``."""
    if recipe.checkpoint == "last":
        return "the last one"
    return f"the best by {recipe.checkpoint_metric} on `{recipe.data[data].subsets[0]}`"


def _choice_of_best(recipe: Recipe, data: str) -> str:
    """How columns ``at: best`` are chosen; empty if ``data`` have none."""
    there = any(column.at == "best" for column in recipe.columns_of(data).values())
    return f"on `{recipe.data[data].subsets[0]}`" if there else ""


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "[": "{[}",  # which may follow \\ or \midrule, and would be their option
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "–": "--", "φ": r"$\phi$",
    "λ": r"$\lambda$", "γ": r"$\gamma$", "δ": r"$\delta$", "π": r"$\pi$", "σ": r"$\sigma$", "β": r"$\beta$",
    "≤": r"$\leq$", "≥": r"$\geq$", "<": r"\textless{}", ">": r"\textgreater{}", "†": r"$^\dagger$",
}  # fmt: skip


def escaped(text: str) -> str:
    """Escapes text for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def latex(results: Results) -> str:
    """A table environment for ``\\usepackage{booktabs}``."""
    recipe = results.recipe
    rows = [[escaped(cell) for cell in row] for row in table(recipe, lines(results))]
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
            rf"\caption{{{escaped(recipe.title)}. {escaped(about_source(recipe))}.}}",
            r"\end{table}",
            "",
        ]
    )

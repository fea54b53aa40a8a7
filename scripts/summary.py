"""All results in one grid: models as rows, experiments and their subsets as columns, as a picture and as Markdown.

    python scripts/summary.py                                   # results/*.json -> results/summary.md and .png
    python scripts/summary.py runs/*/summary.json --out runs/all

Reads the .json files of reproduce.py, quickstart.py, attentions.py and ndr.py. Files of other kinds are
skipped and listed. Without arguments, the page also lists every recipe and comparison of these scripts: run in
full, in part, or not yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import attentions  # noqa: E402
import figures  # noqa: E402
import ndr  # noqa: E402
import quickstart  # noqa: E402
import recipe as recipes  # noqa: E402
from runs import REPOSITORY, end  # noqa: E402

#: The steps behind the published numbers beside quickstart.py's models.
PUBLISHED_STEPS = 50_000
UNITS = {"accuracy": "%", "loss": "bits", "perplexity": "ppl", "bleu": "BLEU"}


@dataclass(frozen=True)
class Cell:
    """The result of a model: ``values`` of its seeds (accuracies in percent) and the number of diverged seeds.

    ``steps`` are those of its trainings, ``of`` those of the whole experiment.
    """

    values: tuple[float, ...]
    diverged: int
    steps: int
    of: int

    @property
    def text(self) -> str:
        """Mean ± sample standard deviation, the number of seeds if several, and the share of the steps if partial."""
        if not self.values:
            return "Fail"
        parts = [quickstart.spread(list(self.values), 1 if max(self.values) >= 10 else 2)]
        parts += [f"{len(self.values)} seeds"] * (len(self.values) > 1)
        parts += [f"{self.diverged} Fail"] * bool(self.diverged)
        parts += [f"{100 * self.steps / self.of:.0f} % of steps"] * (self.steps < self.of)
        return ", ".join(parts)


@dataclass(frozen=True)
class Experiment:
    """A file of results.

    Attributes:
        path: the file.
        title: the title of the experiment.
        steps: the steps, as text.
        columns: column -> metric.
        cells: (model, column) -> cell.
        content: the content of the file.
    """

    path: Path
    title: str
    steps: str
    columns: dict[str, str]
    cells: dict[tuple[str, str], Cell]
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the file, or of its folder if all files have the same name."""
        return self.path.parent.name if self.path.stem == "summary" else self.path.stem


def read(path: Path) -> Experiment | None:
    """The results in a file; None for a file of another kind. Raises ValueError for invalid JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or "runs" not in content:
        return None
    if "lines" in content:
        return _of_recipe(path, content)
    return _of_comparison(path, content)


def _of_recipe(path: Path, content: dict[str, Any]) -> Experiment:
    """Results of ``reproduce.py``."""
    recipe = recipes.read(recipes.find(content["recipe"]))
    percent = 100 if recipe.unit == "fraction" else 1
    several = len({line["data"] for line in content["lines"]}) > 1
    columns, cells = {}, {}
    for line in content["lines"]:
        for key, cell in line["cells"].items():
            metric = recipe.columns[key].metric
            column = f"{line['data']}: {key}" if several else key
            columns[column] = metric
            if line["done"] or line["diverged"]:
                values = tuple(percent * v if metric == "accuracy" else v for v in cell["values"])
                if values or not line["done"]:
                    cells[line["label"], column] = Cell(values, line["diverged"], line["steps"], line["of"])
    return Experiment(path, content["title"], _steps(cells.values()), columns, cells, content)


def _of_comparison(path: Path, content: dict[str, Any]) -> Experiment:
    """Results of ``quickstart.py``, ``attentions.py`` and ``ndr.py``; the last has its OOD from the best checkpoint."""
    cells = {}
    for model in dict.fromkeys(run["name"] for run in content["runs"] if "name" in run):
        runs = [run for run in content["runs"] if run.get("name") == model]
        done = [run for run in runs if "result" in run]
        diverged = sum("diverged" in run for run in runs)
        if not done and not diverged:
            continue
        asked = shlex.split(runs[0]["commands"][0])
        of = int(asked[asked.index("--max-update") + 1]) / content.get("steps_scale", 1)
        if content.get("published") and "steps_scale" not in content:
            of = PUBLISHED_STEPS
        steps = min((run["result"]["steps"] for run in done), default=0)
        for subset, column in quickstart.SUBSETS.items():
            if column == "IID":
                values = tuple(run["result"]["curve"][-1][subset] for run in done)
            else:
                values = tuple(run["result"]["accuracy"][subset] for run in done)
            cells[model, column] = Cell(values, diverged, steps, round(of))
    columns = dict.fromkeys(quickstart.SUBSETS.values(), "accuracy")
    return Experiment(path, content["what"], _steps(cells.values()), columns, cells, content)


def _steps(cells: Any) -> str:
    """The occurring numbers of steps, each with the total that it is part of."""
    pairs = sorted({(cell.steps, cell.of) for cell in cells if cell.steps})
    return "; ".join(f"{steps:,}" + (f" of {of:,}" if steps < of else "") for steps, of in pairs) or "–"


def ledger(experiments: Sequence[Experiment], folder: Path) -> list[list[str]]:
    """Rows of text with a header: every recipe and comparison, the extent of its runs, and their files."""
    rows = [["experiment", "run", "results"]]
    known = set(recipes.names())
    for name in recipes.names():
        recipe = recipes.read(recipes.find(name))
        found = [e for e in experiments if e.content.get("recipe") == name]
        rows.append([f"`{name}`: {recipe.title}", _share_of_recipe(recipe, found), _links(found, folder)])
    for command, wanted in comparisons().items():
        found = [e for e in experiments if e.content.get("recipe") not in known and command_of(e.content) == command]
        rows.append([f"`{command}`", _share_of_comparison(wanted, found), _links(found, folder)])
    return rows


def comparisons() -> dict[str, list[str]]:
    """The commands of scripts with their own models -> these models."""
    found = {"quickstart.py": list(quickstart.MODELS)}
    found |= {f"attentions.py{small}": list(attentions.MODELS) for small in ("", " --small")}
    for what in ndr.PUBLISHED:
        dataset = what.split()[0]
        found[f"ndr.py {what}"] = list(ndr.RECIPES[dataset])
        if dataset in ndr.SMALL:
            found[f"ndr.py {what} --small"] = [model for model in ndr.RECIPES[dataset] if "lstm" not in model]
    return found


def command_of(content: dict[str, Any]) -> str:
    """The command in ``comparisons`` that made a file."""
    words = shlex.split(content.get("command", ""))
    script = Path(words[1]).name if len(words) > 1 else ""
    what = " " + content["what"].removesuffix(" (small)") if script == "ndr.py" else ""
    return script + what + " --small" * ("--small" in words)


def _share_of_recipe(recipe: recipes.Recipe, found: Sequence[Experiment]) -> str:
    planned = {
        (name, data): recipe.seeds for name, row in recipe.rows.items() if row.arguments is not None for data in row.on
    }
    ended: dict[tuple[str, str], int] = {}
    shorter = 0.0
    for e in found:
        for line in e.content["lines"]:
            made, key = line["done"] + line["diverged"], (line["row"], line["data"])
            if line["steps"] >= line["of"] or not line["done"]:
                ended[key] = max(ended.get(key, 0), min(made, planned.get(key, 0)))
            elif made:
                shorter = max(shorter, line["steps"] / line["of"])
    trainings = f"{sum(ended.values())} of {sum(planned.values())} trainings"
    if ended == planned:
        return f"in full: {trainings}"
    parts = [trainings] * any(ended.values()) + [f"some, to {100 * shorter:.0f} % of the steps"] * bool(shorter)
    return f"in part: {'; '.join(parts)}" if parts else "not yet"


def _share_of_comparison(wanted: Sequence[str], found: Sequence[Experiment]) -> str:
    """The extent of a comparison; in full means every model with at least one seed."""
    cells = [(model, cell) for e in found for (model, _), cell in e.cells.items() if model in wanted]
    if not cells:
        return "not yet"
    ended = {model for model, cell in cells if cell.steps >= cell.of or not cell.values}
    parts = [f"{len(ended)} of {len(wanted)} models"] * bool(ended)
    shorter = {model: cell for model, cell in cells if model not in ended}
    if shorter:
        share = max(cell.steps / cell.of for model, cell in cells if model in shorter)
        parts.append(f"{len(shorter)} of {len(wanted)} models, to {100 * share:.0f} % of the steps")
    return f"{'in full' if len(ended) == len(wanted) else 'in part'}: {'; '.join(parts)}"


def _links(experiments: Sequence[Experiment], folder: Path) -> str:
    return ", ".join(f"[{e.name}]({_page(e, folder)})" for e in experiments)


def _page(experiment: Experiment, folder: Path) -> str:
    return os.path.relpath(experiment.path.with_suffix(".md"), folder)


def models(experiments: Sequence[Experiment]) -> list[str]:
    """The models in order of first appearance."""
    return list(dict.fromkeys(model for e in experiments for model, _ in e.cells))


def table(experiments: Sequence[Experiment]) -> list[list[str]]:
    """Rows of text with a header."""
    places = [(e, column) for e in experiments for column in e.columns]
    header = ["model"]
    for e, column in places:
        header.append(f"{e.name}: {column}, {UNITS[e.columns[column]]}")
    rows = [header]
    for model in models(experiments):
        found = [e.cells.get((model, column)) for e, column in places]
        rows.append([model, *(cell.text if cell else "" for cell in found)])
    return rows


def markdown(
    experiments: Sequence[Experiment], left_out: Sequence[str], command: str, folder: Path, whole: bool = False
) -> str:
    """The page, with links relative to ``folder``; ``whole`` adds experiments that were not run."""
    about = [["results", "what", "steps"]]
    about += [[f"[{e.name}]({_page(e, folder)})", e.title, e.steps] for e in experiments]
    of_all = [
        "## Run in full, in part, not yet",
        "",
        "Every recipe of `scripts/reproduce.py` with its seeds and steps, and the comparisons of the other scripts "
        "with at least one seed per model. Diverged trainings count as finished.",
        "",
        *quickstart.markdown_lines([[cell.replace("|", "\\|") for cell in row] for row in ledger(experiments, folder)]),
        "",
    ]
    return "\n".join(
        [
            "# All results",
            "",
            f"`{command}`",
            "",
            "Mean ± sample standard deviation over the seeds; one seed if no number is given. “% of steps” is the "
            "trained share of the experiment's steps, which are the paper's if there are published numbers. "
            "Experiments differ in sizes, steps and batches: compare inside a column. Settings and commands are "
            "in the files of each experiment.",
            "",
            *quickstart.markdown_lines([[cell.replace("|", "\\|") for cell in row] for row in about]),
            "",
            *quickstart.markdown_lines([[cell.replace("|", "\\|") for cell in row] for row in table(experiments)]),
            "",
            *([f"Skipped files of another kind: {', '.join(left_out)}.", ""] if left_out else []),
            *(of_all if whole else []),
        ]
    )


def draw(experiments: Sequence[Experiment], path: Path) -> None:
    """The grid, coloured by accuracy; other metrics have no colour."""
    plt = figures.pyplot()

    rows, header = models(experiments), table(experiments)[0][1:]
    places = [(e, column) for e in experiments for column in e.columns]
    lines = max(cell.text.count(", ") + 1 for e in experiments for cell in e.cells.values())
    figure, axes = plt.subplots(figsize=(3 + 1.05 * len(places), 2 + (0.12 + 0.12 * lines) * len(rows)))
    colours = plt.get_cmap("viridis")
    for x, (e, column) in enumerate(places):
        for y, model in enumerate(rows):
            cell = e.cells.get((model, column))
            if cell is None:
                continue
            face, ink = "white", "black"
            if e.columns[column] == "accuracy" and cell.values:
                share = statistics.mean(cell.values) / 100
                face, ink = colours(share), "white" if share < 0.6 else "black"
            axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="gray", lw=0.3))
            axes.text(x, y, cell.text.replace(", ", "\n"), ha="center", va="center", fontsize=6.5, color=ink)
    for x in range(1, len(places)):
        if places[x][0] is not places[x - 1][0]:
            axes.axvline(x - 0.5, color="black", lw=0.8)
    axes.set(xlim=(-0.5, len(places) - 0.5), ylim=(len(rows) - 0.5, -0.5), xticks=range(len(places)))
    axes.set_yticks(range(len(rows)), rows, fontsize=7, parse_math=False)
    axes.set_xticklabels(header, rotation=60, ha="left", rotation_mode="anchor", fontsize=7, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    figure.colorbar(
        plt.cm.ScalarMappable(plt.Normalize(0, 100), colours), ax=axes, shrink=0.4, pad=0.01, label="accuracy, %"
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files of results (default: results/*.json)")
    parser.add_argument(
        "--out", type=Path, metavar="PREFIX", help="PREFIX.md and PREFIX.png (default: results/summary)"
    )
    args = parser.parse_args(line)
    files = args.files or sorted((REPOSITORY / "results").glob("*.json"))
    prefix = args.out or REPOSITORY / "results" / "summary"
    try:
        found = {path: read(path) for path in files}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    experiments = [e for e in found.values() if e and e.cells]
    if not experiments:
        print("error: there are no results in these files", file=sys.stderr)
        return 1
    left_out = [path.name for path, e in found.items() if not e or not e.cells]
    command = shlex.join(["python", "scripts/summary.py", *(sys.argv[1:] if line is None else line)])
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".md").write_text(
        markdown(experiments, left_out, command, prefix.parent, whole=not args.files), encoding="utf-8"
    )
    draw(experiments, prefix.with_name(prefix.name + ".png"))
    print(f"{len(experiments)} experiments, {len(models(experiments))} models: {prefix}.md, {prefix}.png")
    for name in left_out:
        print(f"skipped, of another kind: {name}")
    return 0


if __name__ == "__main__":
    end(main)

"""Results of a recipe: the file ``results/NAME.json``, the only source of every table, page and figure.

It holds the recipe as it was, and for every planned training its commands, commits, machines, and, once it has ended,
its result with all curves.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.logs import curve, partial_result
from fairseq_sg.experiments.plan import Plan, Trial, as_seeds
from fairseq_sg.experiments.quantities import QUANTITIES
from fairseq_sg.experiments.recipe import from_dict
from fairseq_sg.experiments.records import diverged, result_of, saved, starts_of
from fairseq_sg.experiments.schema import Recipe, RecipeError
from fairseq_sg.files import write_json

Record = dict[str, Any]
#: What a results file keeps of a run's record (``run.json``).
_KEPT = ("minutes", "starts", "commands", "result", "diverged", "failed")


@dataclass
class Results:
    """The contents of a results file.

    Attributes:
        records: one for every planned training: its row, data and seed, then what ``run.json`` says of it.
        note: a sentence on the trainings for the reader.
        bleu: data -> the comparison of ``by_length``.
    """

    recipe: Recipe
    steps_scale: float
    records: list[Record]
    note: str = ""
    bleu: dict[str, Any] | None = None

    @property
    def seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self.records})

    @property
    def rows(self) -> list[str]:
        """The planned rows, in the order of the recipe."""
        return [row for row in self.recipe.rows if any(record["row"] == row for record in self.records)]

    @property
    def done(self) -> int:
        """The number of finished trainings; a divergence finishes one."""
        return sum("result" in record or "diverged" in record for record in self.records)

    @property
    def command(self) -> str:
        """The command that makes these results."""
        recipe = self.recipe
        words = ["python", "-m", "fairseq_sg.experiments", "run", recipe.name]
        words += ["--variant", recipe.variant] if recipe.variant else []
        words += ["--rows", ",".join(self.rows)] if self.rows != recipe.trained else []
        on = [data for data in recipe.data if any(record["data"] == data for record in self.records)]
        words += ["--on", ",".join(on)] if on != list(recipe.data) else []
        words += ["--seeds", as_seeds(self.seeds)] if self.seeds != list(range(1, recipe.seeds + 1)) else []
        words += ["--steps-scale", f"{self.steps_scale:g}"] if self.steps_scale != 1 else []
        return shlex.join(words)

    @property
    def commits(self) -> list[str]:
        return sorted({start["commit"] for start in self._starts()})

    @property
    def machines(self) -> list[dict[str, Any]]:
        return [json.loads(m) for m in sorted({json.dumps(start["machine"]) for start in self._starts()})]

    def of(self, row: str, data: str) -> list[Record]:
        return [record for record in self.records if (record["row"], record["data"]) == (row, data)]

    def _starts(self) -> list[dict[str, Any]]:
        return [start for record in self.records if "minutes" in record for start in starts_of(record)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.as_dict(),
            "steps_scale": self.steps_scale,
            "note": self.note,
            "records": self.records,
            "bleu": self.bleu,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.as_dict(), indent=1)


def read(path: Path) -> Results:
    """Raises UsageError for a file that does not hold results."""
    try:
        content = json.loads(path.read_text("utf-8"))
        recipe = from_dict(content["recipe"], f"{path}: recipe")
        _check_records(recipe, content["records"])
        scale = float(content["steps_scale"])
        return Results(recipe, scale, content["records"], content["note"], content["bleu"])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give a results file of fairseq_sg.experiments") from None
    except RecipeError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a results file of fairseq_sg.experiments ({error!r})") from None


def _check_records(recipe: Recipe, records: Any) -> None:
    """Raises ValueError, KeyError or TypeError for records that no table can be made of."""
    for record in records:
        row, data, _ = record["row"], record["data"], record["seed"]
        if row not in recipe.rows or data not in recipe.data:
            raise ValueError(f"a record of the row {row!r} on {data!r}, which the recipe does not have")
        if "result" in record:
            for key in ("steps", "curve"):
                record["result"][key]
            if not any(name in record["result"] for name in QUANTITIES):
                raise KeyError("accuracy")


def collect(plan: Plan, trials: Sequence[Trial]) -> Results:
    """The results of the plan's runs so far.

    If no seed of a row on one dataset has finished, its runs are cut at the last evaluated step common to all started
    seeds.
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
    records = []
    for trial in trials:
        record = found[id(trial)]
        kept = {key: record[key] for key in _KEPT if key in record}
        if record and "starts" not in kept:
            kept["starts"] = starts_of(record)
        if record and "commands" not in kept:
            kept["commands"] = [shlex.join(trial.run.train_command())]
        records.append({"row": trial.row, "data": trial.data, "seed": trial.run.seed, **kept})
    return Results(plan.recipe, plan.steps_scale, records)


def merged(before: Results, now: Results, path: Path) -> Results:
    """``now`` with the trainings of an earlier file that it does not have, or has not got as far with.

    So the rows of one table may be trained at different times and places.

    Raises:
        UsageError: the earlier file has other data, arguments, steps, or another evaluation.
    """

    def settings(recipe: Recipe, row: str, data: str) -> list[Any]:
        training = [recipe.arguments_of(row, data), recipe.steps_of(row), recipe.data[data].prepare]
        chosen = [recipe.checkpoint, recipe.checkpoint_metric, recipe.rows[row].model_overrides]
        # What only one of the recipes has was not evaluated yet, or is not shown any more.
        decoded = recipe.generate if before.recipe.generate and now.recipe.generate else ""
        common = before.recipe.analyses.keys() & now.recipe.analyses.keys()
        return [*training, *chosen, decoded, {name: recipe.analyses[name] for name in common}]

    def planned(record: Record) -> bool:
        return record["row"] in now.recipe.trained and record["data"] in now.recipe.data

    def same(record: Record) -> bool:
        row, data = record["row"], record["data"]
        return planned(record) and settings(before.recipe, row, data) == settings(now.recipe, row, data)

    def key(record: Record) -> tuple[str, str, int]:
        return record["row"], record["data"], record["seed"]

    def reached(record: Record) -> int:
        # A training may diverge before its first logged step.
        return max(record.get("result", {}).get("steps", -1), record.get("diverged", {}).get("step", -1))

    other = next((record for record in before.records if reached(record) >= 0 and not same(record)), None)
    if other or before.steps_scale != now.steps_scale:
        what = f"its row {other['row']!r} was trained or evaluated otherwise" if other else "with another --steps-scale"
        raise UsageError(f"{path} has results of another version of the recipe ({what}): choose another --results")
    found = {key(record): record for record in now.records}
    for record in before.records:
        if planned(record) and (key(record) not in found or reached(record) > reached(found[key(record)])):
            found[key(record)] = record
    rows, data = list(now.recipe.rows), list(now.recipe.data)
    ordered = sorted(found.values(), key=lambda r: (rows.index(r["row"]), data.index(r["data"]), r["seed"]))
    return Results(now.recipe, now.steps_scale, ordered, before.note, now.bleu or before.bleu)

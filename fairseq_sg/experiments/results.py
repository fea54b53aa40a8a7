"""Results of a recipe: the file ``results/NAME.json``, the only source of every table, page and figure.

It holds the recipe as it was, and for every planned training its commands, commits, machines, and, once it has ended,
its result with all curves.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError, first_line
from fairseq_sg.experiments import shapes
from fairseq_sg.experiments.logs import cut, minutes, partial_result
from fairseq_sg.experiments.plan import Plan, Trial, as_scale, as_seeds
from fairseq_sg.experiments.quantities import QUANTITIES
from fairseq_sg.experiments.recipe import from_dict, names
from fairseq_sg.experiments.records import as_asked, check_steps, diverged, result_of, saved
from fairseq_sg.experiments.run import on_any_device
from fairseq_sg.experiments.schema import Recipe, RecipeError
from fairseq_sg.files import write_json

Record = dict[str, Any]
#: What a results file keeps of a run's record (``run.json``), and ``partial`` where the result is that of the log.
_KEPT = ("minutes", "starts", "commands", "result", "partial", "diverged", "failed")


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
    def data(self) -> list[str]:
        """The planned data, in the order of the recipe."""
        return [data for data in self.recipe.data if any(record["data"] == data for record in self.records)]

    @property
    def done(self) -> int:
        """The number of finished trainings."""
        return sum(map(self.finished, self.records))

    @property
    def full(self) -> set[tuple[str, str, int]]:
        """Row, data and seed of the finished trainings with all steps of the recipe."""
        return {_key(record) for record in self.records if self.steps_scale == 1 and self.finished(record)}

    @property
    def made(self) -> int:
        """The number of trainings of ``command``: all rows have all seeds there."""
        return sum(len(set(self.data) & set(self.recipe.data_of(row))) for row in self.rows) * len(self.seeds)

    @property
    def command(self) -> str:
        """The command that makes these results."""
        recipe = self.recipe
        name = recipe.name if recipe.name in names() else f"{recipe.name}.yaml"
        words = ["python", "-m", "fairseq_sg.experiments", "run", name]
        words += ["--variant", recipe.variant] if recipe.variant else []
        words += ["--rows", ",".join(self.rows)] if self.rows != recipe.trained else []
        words += ["--on", ",".join(self.data)] if self.data != list(recipe.data) else []
        words += ["--seeds", as_seeds(self.seeds)] if self.seeds != recipe.planned_seeds else []
        words += ["--steps-scale", as_scale(self.steps_scale)] if self.steps_scale != 1 else []
        return shlex.join(words)

    @property
    def commits(self) -> list[str]:
        return sorted({start["commit"] for start in self._starts()})

    @property
    def machines(self) -> list[dict[str, Any]]:
        return [json.loads(m) for m in sorted({json.dumps(start["machine"]) for start in self._starts()})]

    def finished(self, record: Record) -> bool:
        """Whether a training has made all its steps and was evaluated, or it has diverged."""
        every = record.get("result", {}).get("steps") == self.recipe.steps_of(record["row"], self.steps_scale)
        return "diverged" in record or (every and not record.keys() & {"failed", "partial"})

    def of(self, row: str, data: str) -> list[Record]:
        """The records of a row on a dataset, by seed."""
        found = [record for record in self.records if (record["row"], record["data"]) == (row, data)]
        return sorted(found, key=lambda record: record["seed"])

    def _starts(self) -> list[dict[str, Any]]:
        return [start for record in self.records for start in record.get("starts", ())]

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.as_dict(),
            "steps_scale": self.steps_scale,
            "note": self.note,
            "records": self.records,
            "bleu": self.bleu,
        }

    def write(self, path: Path) -> None:
        write_json(path, self.as_dict(), indent=1)


def read(path: Path) -> Results:
    """Raises UsageError for a file that does not hold results."""
    try:
        content = json.loads(path.read_text("utf-8"))
        recipe = from_dict(content["recipe"], f"{path}: recipe")
        _check_records(recipe, content["records"])
        shapes.check(content["note"], str, "note")
        if content["bleu"] is not None:
            shapes.check(content["bleu"], shapes.BLEU, "bleu")
        scale = float(content["steps_scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"steps_scale is {scale}")
        return Results(recipe, scale, content["records"], content["note"], content["bleu"])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give a results file of fairseq_sg.experiments") from None
    except RecipeError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = first_line(error) if isinstance(error, ValueError) else repr(error)
        what = what if path.suffix == ".json" else "their names end in .json"
        raise UsageError(
            f"{path}: not a results file of fairseq_sg.experiments ({what}): move it away, or name another file"
        ) from None


def _check_records(recipe: Recipe, records: Any) -> None:
    """Raises ValueError for records that no table can be made of."""
    shapes.check(records, [shapes.RECORD], "records")
    for record in records:
        row, data = record["row"], record["data"]
        if row not in recipe.rows or data not in recipe.data:
            raise ValueError(f"a record of the row {row!r} on {data!r}, which the recipe does not have")
    for key, number in Counter(map(_key, records)).items():
        if number > 1:
            raise ValueError(f"{number} records of row, data, seed {key}")


def collect(plan: Plan, trials: Sequence[Trial]) -> Results:
    """The results of the plan's runs so far.

    Raises:
        ValueError: a folder holds a run with other settings, or one that has made more steps.
    """
    records = []
    for trial in trials:
        run, record = trial.run, saved(trial.run)
        unfinished = not result_of(run)
        if unfinished:
            check_steps(run)
        if unfinished and not diverged(run):
            record.pop("result", None)
            partial = partial_result(run) if record else None
            record |= {"minutes": minutes(run), "result": partial, "partial": True} if partial else {}
        elif "result" in record:
            record["result"] = as_asked(run)
            record.pop("failed", None)  # a later evaluation, of what the recipe has got since then
        kept = {key: record[key] for key in _KEPT if key in record}
        if record and "commands" not in kept:
            there = replace(run, arguments=record["settings"].get("arguments", run.arguments))
            kept["commands"] = [shlex.join(there.train_command())]
        records.append({"row": trial.row, "data": trial.data, "seed": run.seed, **kept})
    return Results(plan.recipe, plan.steps_scale, records)


def of_equal_steps(results: Results) -> Results:
    """The results with the numbers of a row on a dataset at one number of steps, for tables; files keep all.

    Once a seed has finished, the others have no result until they have, too. Before, all are cut at the last evaluated
    step that they share.
    """
    recipe, records = results.recipe, []
    for record in results.records:
        if counts(record) and not results.finished(record):
            group = [one for one in results.of(record["row"], record["data"]) if counts(one)]
            shared = set.intersection(*({point["step"] for point in one["result"]["curve"]} for one in group))
            result, record = record["result"], {key: value for key, value in record.items() if key != "result"}
            if shared and not any(map(results.finished, group)):
                step = max(shared)
                record["result"] = result if result["steps"] == step else _cut(recipe, record["data"], result, step)
        records.append(record)
    return replace(results, records=records)


def counts(record: Record) -> bool:
    """Whether a training has numbers."""
    return "result" in record and "diverged" not in record


def _cut(recipe: Recipe, data: str, result: dict[str, Any], step: float) -> dict[str, Any]:
    """The result of an unfinished training at an earlier step."""
    points = [point for point in result["curve"] if point["step"] <= step]
    places = {place for name in QUANTITIES for place in result.get(name, {})}
    best = recipe.checkpoint == "best"
    return cut(points, sorted(places), recipe.checkpoint_metric, recipe.data[data].subsets[0], best)


def merged(before: Results, now: Results, path: Path) -> Results:
    """``now`` with the trainings of an earlier file that it does not have, or has not got as far with.

    So the rows of one table may be trained at different times and places. A finished training is never replaced by an
    unfinished one; of two finished ones, that of ``now`` is taken, whether it diverged or not.

    Raises:
        UsageError: the earlier file has other data, mechanisms, arguments, steps, or another evaluation.
    """
    _check_version(before, now, path)
    found = {_key(record): record for record in now.records}
    for record in before.records:
        there = found.get(_key(record))
        if _planned(now.recipe, record) and (there is None or _progress(before, record) > _progress(now, there)):
            found[_key(record)] = record
    rows, data = list(now.recipe.rows), list(now.recipe.data)
    ordered = sorted(found.values(), key=lambda r: (rows.index(r["row"]), data.index(r["data"]), r["seed"]))
    return Results(now.recipe, now.steps_scale, ordered, before.note, now.bleu or before.bleu)


def _check_version(before: Results, now: Results, path: Path) -> None:
    """Raises UsageError if a training of the earlier file is not one of the recipe's today."""
    if before.steps_scale != now.steps_scale:
        raise _other_version(path, "with another --steps-scale")
    for record in before.records:
        row, data = record["row"], record["data"]
        if _reached(record) < 0:
            continue
        if not _planned(now.recipe, record):
            raise _other_version(path, f"this one has no row {row!r} on {data!r}")
        if _settings(before.recipe, now.recipe, row, data) != _settings(now.recipe, before.recipe, row, data):
            raise _other_version(path, f"its row {row!r} was trained or evaluated otherwise")


def _other_version(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} has results of another version of the recipe ({what}): choose another --results")


def _settings(recipe: Recipe, other: Recipe, row: str, data: str) -> list[Any]:
    """What a row's results depend on, for a comparison with those of another version of the recipe."""
    arguments = [*recipe.arguments_of(row, data), "--batch-size-valid", str(recipe.batch_size_valid)]
    training = [recipe.user_dir, on_any_device(arguments), recipe.steps_of(row), recipe.data[data].prepare]
    chosen = [recipe.checkpoint, recipe.checkpoint_metric, recipe.rows[row].model_overrides]
    if compares(recipe, data) or compares(other, data):
        chosen += [recipe.data[data].subsets[0], recipe.validate_every]
    # What only one of the recipes has was not evaluated yet, or is not shown any more.
    decoded = recipe.generate if other.generate else ""
    common = recipe.analyses.keys() & other.analyses.keys()
    return [*training, *chosen, decoded, {name: recipe.analyses[name] for name in common}]


def compares(recipe: Recipe, data: str) -> bool:
    """Whether one of a training's evaluations is chosen, or several are summed up."""
    columns = recipe.columns_of(data).values()
    return recipe.checkpoint == "best" or any(column.at not in ("checkpoint", "end") for column in columns)


def _planned(recipe: Recipe, record: Record) -> bool:
    return record["row"] in recipe.trained and record["data"] in recipe.data


def _key(record: Record) -> tuple[str, str, int]:
    return record["row"], record["data"], record["seed"]


def _progress(results: Results, record: Record) -> float:
    """How far a training has got: the steps that it has made, or infinitely far if it is finished."""
    return math.inf if results.finished(record) else _reached(record)


def _reached(record: Record) -> int:
    """The last step of a training with a result; -1 without one: it may diverge before its first logged step."""
    return max(record.get("result", {}).get("steps", -1), record.get("diverged", {}).get("step", -1))

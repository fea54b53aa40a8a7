"""What the schema of recipes cannot say: numbers and names in their ranges, and keys that belong together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fairseq_sg.experiments.quantities import MEASURED, QUANTITIES, source_of
from fairseq_sg.experiments.run import option_of, values_of
from fairseq_sg.experiments.schema import DECODED, METRICS, Column, Data, Recipe, RecipeError, Row, XAxis, placeholders
from fairseq_sg.ranges import literal_dict
from fairseq_sg.scoring.plain_bleu import TOKENIZERS

#: Options that ``experiments`` itself passes to fairseq-train.
RESERVED = {
    "--user-dir", "--seed", "--max-update", "--save-dir", "--valid-subset", "--log-format", "--log-interval",
    "--num-workers",
    "--required-batch-size-multiple", "--validate-interval-updates", "--validate-interval", "--save-interval-updates",
    "--save-interval", "--keep-interval-updates", "--no-epoch-checkpoints", "--batch-size-valid", "--cpu",
    "--best-checkpoint-metric", "--maximize-best-checkpoint-metric",
    # They would end a training early, or leave its log without numbers.
    "--max-epoch", "--patience", "--stop-time-hours", "--stop-min-lr", "--disable-validation",
    # It would not resume, or not from where it was. --finetune-from-model begins from another checkpoint.
    "--restore-file", "--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader", "--no-save",
    "--no-last-checkpoints",
}  # fmt: skip
#: The metrics that are also measured by type of example.
BY_TYPE = ("accuracy", "word_error")
#: The source of a column's number; `schema.Column` says what each is.
PLACES = ("checkpoint", "end", "best", "peak", "second_half")
_NAME = re.compile(r"(?!\.+$)[\w.+-]+")


@dataclass
class Checks:
    """The checks of one recipe.

    Attributes:
        where: its file, for messages.
    """

    recipe: Recipe
    where: str

    def run(self) -> None:
        """Raises RecipeError for the first mistake. A row without a label gets its name."""
        recipe = self.recipe
        self.of_table()
        self.names()
        for key in ("train", "override", "generate"):
            self.arguments(key, getattr(recipe, key))
        for name, data in recipe.data.items():
            self.data(f"data.{name}", data)
        for name, column in recipe.columns.items():
            self.column(f"columns.{name}", name, column)
        self.analyses()
        for name, row in recipe.rows.items():
            self.row(f"rows.{name}", name, row)
        if any(column.metric in DECODED for column in recipe.columns.values()) != bool(recipe.generate):
            raise self.error(
                "generate",
                "is for a column with the metric 'bleu' or 'length_ratio', which needs it (such as --max-len-b 200)",
            )
        self.by_length()
        self.axis("x_axis", recipe.x_axis, "row", recipe.rows)
        self.axis("column_axis", recipe.column_axis, "column", recipe.columns)
        drawn = {column.metric for column in recipe.columns.values() if column.x is not None}
        if len(drawn) > 1:
            raise self.error("column_axis", f"has columns of different metrics: {', '.join(sorted(drawn))}")
        if recipe.x_axis and recipe.column_axis:
            raise self.error("column_axis", "cannot be drawn beside an x_axis: remove one")

    # The parts of a recipe.

    def of_table(self) -> None:
        recipe = self.recipe
        recipe.title, recipe.source = _on_one_line(recipe.title), _on_one_line(recipe.source)
        for key in ("steps", "validate_every", "batch_size_valid", "seeds"):
            if getattr(recipe, key) < 1:
                raise self.error(key, f"is {getattr(recipe, key)}: it must be above 0")
        self.choice("statistic", recipe.statistic, ("mean", "median"))
        self.choice("published_std", recipe.published_std, ("sample", "population"))
        if recipe.published_seeds is not None and recipe.published_seeds < 1:
            raise self.error("published_seeds", f"is {recipe.published_seeds}: it must be above 0")
        if recipe.published_std == "population" and recipe.papers_seeds < 2:
            raise self.error(
                "published_std", "is that of a population, which needs the number of the paper's seeds, 2 or more"
            )
        self.choice("unit", recipe.unit, ("fraction", "percent"))
        self.choice("checkpoint", recipe.checkpoint, ("last", "best"))
        self.choice("checkpoint_metric", recipe.checkpoint_metric, QUANTITIES)
        if recipe.checkpoint == "last" and recipe.checkpoint_metric != "accuracy":
            raise self.error("checkpoint_metric", "is for 'checkpoint: best'")

    def names(self) -> None:
        for key in ("data", "columns", "rows"):
            if not getattr(self.recipe, key):
                raise self.error(key, "is empty")
            for name in getattr(self.recipe, key):
                if not _NAME.fullmatch(name):
                    raise self.error(key, f"has the name {name!r}: use only letters, digits and . _ + -")
                if name == "all" and key != "columns":
                    raise self.error(
                        key, "has the name 'all', which stands for every name in --rows and --on: rename it"
                    )

    def data(self, key: str, data: Data) -> None:
        self.arguments(f"{key}.arguments", data.arguments)
        if not _NAME.fullmatch(data.folder):
            raise self.error(f"{key}.folder", f"is {data.folder!r}: it must be the name of one folder, inside --data")
        self.arguments(f"{key}.prepare", data.prepare, set())
        if "--out" in map(option_of, shlex.split(data.prepare)):
            raise self.error(f"{key}.prepare", "has --out, which experiments sets itself")
        if {"-h", "--help"} & set(shlex.split(data.prepare)):
            raise self.error(f"{key}.prepare", "asks for help, and makes no data: remove it")
        if not data.prepare.strip():
            raise self.error(f"{key}.prepare", "is empty: give the arguments of python -m data_prep")
        if not data.subsets:
            raise self.error(f"{key}.subsets", "is empty")

    def column(self, key: str, name: str, column: Column) -> None:
        recipe = self.recipe
        self.choice(f"{key}.metric", column.metric, METRICS)
        if column.at not in PLACES and not (isinstance(column.at, int) and column.at > 0):
            raise self.error(
                f"{key}.at", f"is {column.at!r}: it must be a number of steps or one of {', '.join(PLACES)}"
            )
        if column.type and column.metric not in BY_TYPE:
            raise self.error(f"{key}.type", f"is for {' and '.join(BY_TYPE)}: no other metric is measured by type")
        self.known(f"{key}.data", column.data or (), recipe.data, "data")
        for data in column.data or ():
            if column.subset not in recipe.data[data].subsets:
                raise self.error(f"{key}.subset", f"is {column.subset!r}, which the data {data!r} do not have")
        if not any(name in recipe.columns_of(data) for data in recipe.data):
            raise self.error(f"{key}.subset", f"is {column.subset!r}, which no data has as a subset")
        if bool(column.value) != (column.metric == "analysis"):
            raise self.error(f"{key}.value", "is for the metric 'analysis', which needs it")
        if column.digits != 1 and column.metric != "analysis" or not 0 <= column.digits <= 12:
            raise self.error(f"{key}.digits", f"is {column.digits}: it is for the metric 'analysis', from 0 to 12")
        if column.value:
            self.known(f"{key}.value", [column.value.partition("/")[0]], recipe.analyses, "analyses")
        decoded = column.metric in DECODED
        unlogged = (DECODED | {"analysis": "an analysis"}).get(column.metric)
        if unlogged and column.at != "checkpoint":
            raise self.error(f"{key}.at", f"{unlogged} is measured only at the checkpoint")
        if column.model_overrides and (unlogged or column.at != "checkpoint"):
            raise self.error(f"{key}.model_overrides", "are for accuracy, loss or an error at the checkpoint")
        self.overrides(key, column.model_overrides)
        if isinstance(column.at, int) and all(column.at > recipe.steps_of(row) for row in recipe.trained):
            raise self.error(f"{key}.at", f"is {column.at}, after the last step of every row")
        if column.generate and not decoded:
            raise self.error(f"{key}.generate", f"is for the metrics {' and '.join(DECODED)}")
        self.arguments(f"{key}.generate", column.generate)

    def analyses(self) -> None:
        earlier = ["checkpoint", "seed", "device", *self.recipe.data]
        for name, text in self.recipe.analyses.items():
            if (
                not re.fullmatch(r"[\w+-]+", name)
                or name in earlier
                or re.match(r"(run|train|validate|generate)\b", name)
            ):
                raise self.error(
                    "analyses",
                    f"has the name {name!r}: use letters, digits and _ + -, no name of data, and none that begins "
                    "with run, train, validate or generate, the files of a training",
                )
            self.known(f"analyses.{name}", placeholders(text), earlier, "names in braces")
            self.arguments(f"analyses.{name}", text, {"--out", "--format"})
            earlier.append(name)

    def row(self, key: str, name: str, row: Row) -> None:
        recipe = self.recipe
        row.label, row.missing = _on_one_line(row.label or name), _on_one_line(row.missing)
        for other, its in recipe.rows.items():
            if other != name and its.label == row.label and set(recipe.data_of(other)) & set(recipe.data_of(name)):
                raise self.error(f"{key}.label", f"is {row.label!r}, as that of {other!r}: nothing tells them apart")
        self.overrides(key, row.model_overrides)
        if sum((row.arguments is not None, bool(row.evaluates), bool(row.missing))) != 1:
            raise self.error(
                f"{key}.arguments",
                "is needed (\"\" for those of 'train' alone), or 'evaluates' with the row whose trainings it "
                "evaluates, or 'missing' with the reason why the row cannot be trained; one of them",
            )
        if row.evaluates:
            self.choice(f"{key}.evaluates", row.evaluates, recipe.trained)
            if not row.model_overrides:
                raise self.error(
                    f"{key}.model_overrides", f"are needed: without them the row is the row {row.evaluates!r}"
                )
            for other, given in (("data", row.data), ("steps", row.steps)):
                if given is not None:
                    raise self.error(f"{key}.{other}", f"is that of the row {row.evaluates!r}: remove it")
            if not any(recipe.measured(name, data) for data in recipe.data_of(name)):
                raise self.error(f"{key}.evaluates", "has no column: it shows those measured at the checkpoint")
        if row.steps is not None and row.steps < 1:
            raise self.error(f"{key}.steps", f"is {row.steps}: it must be above 0")
        self.known(f"{key}.data", row.data or (), recipe.data, "data")
        if row.arguments is not None:
            self.arguments(f"{key}.arguments", row.arguments)
            for data in recipe.data_of(name):
                if "--task" not in map(option_of, recipe.arguments_of(name, data)):
                    raise self.error(f"{key}.arguments", "have no --task, nor has 'train'")
                self.measured(name, data)
        self.known(f"{key}.published", row.published, recipe.data_of(name), "data of the row")
        if row.published_std:
            self.choice(f"{key}.published_std", row.published_std, ("sample", "population"))
            if row.published_std == "population" and recipe.papers_seeds < 2:
                raise self.error(f"{key}.published_std", "is that of a population, which needs 2 seeds of the paper")
        for data, numbers in row.published.items():
            self.known(f"{key}.published.{data}", numbers, recipe.measured(name, data), "columns of these data")
            for column in numbers:
                try:
                    recipe.published(name, data, column)
                except ValueError as problem:
                    raise self.error(f"{key}.published.{data}.{column}", str(problem)) from None

    def measured(self, row: str, data: str) -> None:
        """Raises RecipeError for a metric that a row's task of fairseq_sg does not measure."""
        recipe = self.recipe
        task = (values_of("--task", recipe.arguments_of(row, data)) or [""])[-1]
        measured = MEASURED.get(task, QUANTITIES)
        metrics = {f"columns.{name}.metric": column.metric for name, column in recipe.columns_of(data).items()}
        if recipe.checkpoint == "best":
            metrics["checkpoint_metric"] = recipe.checkpoint_metric
        for key, metric in metrics.items():
            source = source_of(metric)
            if source in QUANTITIES and source not in measured:
                raise self.error(
                    key,
                    f"is {metric!r}, which --task {task} of the row {row!r} does not measure: choose from "
                    f"{', '.join(measured)}",
                )

    def by_length(self) -> None:
        recipe, how = self.recipe, self.recipe.by_length
        if how is None:
            return
        if not any(column.metric == "bleu" and not column.generate for column in recipe.columns.values()):
            raise self.error(
                "by_length", "is for a recipe with columns of the metric 'bleu' without a 'generate' of their own"
            )
        self.choice("by_length.baseline", how.baseline, recipe.trained)
        self.choice("by_length.tokenize", how.tokenize, TOKENIZERS)
        if not how.bounds or min(how.bounds) < 1 or how.bounds != sorted(set(how.bounds)):
            raise self.error("by_length.bounds", f"must be whole numbers above 0, ascending, not {how.bounds}")

    def axis(self, key: str, axis: XAxis | None, what: str, there: Mapping[str, Row | Column]) -> None:
        placed = {name: item.x for name, item in there.items() if item.x is not None}
        if axis is None:
            for name in placed:
                raise self.error(key, f"is missing: the {what} {name!r} has an x, which needs a description")
            return
        self.choice(f"{key}.scale", axis.scale, ("linear", "log"))
        at: dict[float, str] = {}
        for name, x in placed.items():
            if abs(x) == float("inf") or x != x:
                raise self.error(f"{what}s.{name}.x", f"is {x}: it must be finite")
            if axis.scale == "log" and x <= 0:
                raise self.error(
                    f"{key}.scale", f"is log, but the x of the {what} {name!r} is {x:g}: it must be above 0"
                )
            if x in at:
                raise self.error(key, f"has two {what}s with the same x, {x:g}: {at[x]!r} and {name!r}")
            at[x] = name
        if len(at) < 2:
            raise self.error(key, f"needs at least two {what}s with an x")

    # What they have in common.

    def error(self, key: str, message: str) -> RecipeError:
        return RecipeError(f"{self.where}: {key}: {message}")

    def choice(self, key: str, value: Any, choices: Iterable[Any]) -> None:
        if value not in choices:
            raise self.error(key, f"is {value!r}: choose from {', '.join(map(str, choices))}")

    def known(self, key: str, found: Iterable[str], there: Iterable[str], what: str) -> None:
        for name in found:
            if name not in there:
                raise self.error(key, f"names {name!r}, which is not among the {what}: {', '.join(there)}")

    def overrides(self, key: str, text: str) -> None:
        if text and literal_dict(text) is None:
            raise self.error(f"{key}.model_overrides", f"are {text!r}: give a dict such as \"{{'encoder_layers': 4}}\"")

    def arguments(self, key: str, text: str, reserved: set[str] = RESERVED) -> None:
        try:
            words = shlex.split(text)
        except ValueError as problem:
            raise self.error(key, f"cannot be split into words ({problem})") from None
        found = [word for word in words if option_of(word) in reserved]
        if found:
            raise self.error(key, f"has {found[0]}, which experiments sets itself")


def _on_one_line(text: str) -> str:
    return " ".join(text.split())

"""Recipes: experiments as files ``recipes/NAME.yaml``, read by OmegaConf against the schema below.

A recipe may extend another (``extends``) and have ``variants``: changes of the same experiment, such as ``small``.
Mappings are merged, other values replaced; null removes a key. A file whose name begins with ``_`` is only a base.
The format is explained in ``docs/reproducing.md``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.quantities import QUANTITIES

FOLDER = Path(__file__).resolve().parent / "recipes"
#: Options that ``experiments`` itself passes to fairseq-train.
RESERVED = {
    "--user-dir", "--seed", "--max-update", "--save-dir", "--valid-subset", "--log-format", "--log-interval",
    "--num-workers",
    "--required-batch-size-multiple", "--validate-interval-updates", "--validate-interval", "--save-interval-updates",
    "--save-interval", "--keep-interval-updates", "--no-epoch-checkpoints", "--batch-size-valid", "--cpu",
    "--best-checkpoint-metric", "--maximize-best-checkpoint-metric",
}  # fmt: skip
METRICS = (
    "accuracy", "word_error", "mean_word_error", "loss", "perplexity", "bleu", "length_ratio", "mse_last",
    "mse_last_mean", "relative_l2", "analysis",
)  # fmt: skip
#: Those that are also measured by type of example.
BY_TYPE = ("accuracy", "word_error")
#: Those of fairseq-generate -> their name.
DECODED = {"bleu": "BLEU", "length_ratio": "length ratio"}
#: sacreBLEU's choices, as in fairseq_sg.scoring.plain_bleu.
TOKENIZERS = ("13a", "none", "char", "intl", "zh")
#: The source of a column's number: the evaluation of the chosen checkpoint, the end of training, or the evaluation in
#: training with the best of this very number on the first subset.
PLACES = ("checkpoint", "end", "best")
_NUMBER = re.compile(r"(\d*\.?\d+)(?: ± (\d*\.?\d+))?")
_NAME = re.compile(r"[\w.+-]+")


class RecipeError(UsageError):
    """An invalid recipe; the message names the file and the key."""


@dataclass(frozen=True)
class Published:
    """A number as a paper prints it.

    Attributes:
        text: as printed.
        mean, std: its parts, None if missing; ``std`` is a sample standard deviation (``Recipe.published_std``).
        half: half a unit of its last digit.
        fail: whether it is "Fail", a training that diverged.
    """

    text: str
    mean: float = 0.0
    std: float | None = None
    half: float = 0.0
    fail: bool = False

    @classmethod
    def parse(cls, text: str) -> Published:
        """Raises ValueError for a text that is no such number."""
        if text == "Fail":
            return cls(text, fail=True)
        match = _NUMBER.fullmatch(text)
        if not match:
            raise ValueError(f"is {text!r}: it must be like '.21 ± .01', '46.9 ± 8.9', '0.61' or 'Fail'")
        digits = len(match[1].partition(".")[2])
        return cls(text, float(match[1]), float(match[2]) if match[2] else None, 0.5 * 10**-digits)


@dataclass
class Data:
    """A dataset.

    Attributes:
        folder: its folder inside ``--data``.
        prepare: the arguments of ``python -m data_prep`` that make it. The word FILE stands for a file of the user.
        subsets: the evaluated subsets; the first one chooses the best checkpoint.
        arguments: further training arguments of all rows on it, such as sizes.
    """

    folder: str = MISSING
    prepare: str = MISSING
    subsets: list[str] = MISSING
    arguments: str = ""

    @property
    def needs_file(self) -> bool:
        """Whether the user must provide a file that cannot be downloaded."""
        return "FILE" in self.prepare.split()


@dataclass
class Column:
    """A number of the table.

    Attributes:
        subset: where it is measured.
        metric: one of ``METRICS``.
        type: of the examples that count: a type or a group of types of ``--accuracy-by``; by default all count.
        at: ``checkpoint`` (the evaluated one), ``end`` (of training), ``best`` (the first evaluation in training with
            the best value of this metric and type on the first subset), or a number of steps: then it is that of the
            checkpoint that would have been chosen up to there.
        data: the datasets that have it; by default all with the subset.
        model_overrides: ``--model-overrides`` of an evaluation for this column, such as more steps of a shared layer.
        generate: further arguments of fairseq-generate for this column, such as another beam.
        x: its place on the recipe's ``column_axis``.
        value: for the metric "analysis", where the number is in the JSON of an analysis: ``NAME/key/key``.
        digits: of that number in the table, after the point.
    """

    subset: str = MISSING
    metric: str = "accuracy"
    at: int | str = "checkpoint"
    type: str = ""
    data: list[str] | None = None
    model_overrides: str = ""
    generate: str = ""
    x: float | None = None
    value: str = ""
    digits: int = 1

    @property
    def takes_overrides(self) -> bool:
        """Whether it can be measured with other ``--model-overrides`` than its own."""
        return self.at == "checkpoint" and not self.model_overrides and self.metric not in (*DECODED, "analysis")


@dataclass
class Row:
    """A line of the table.

    Attributes:
        label: its name in the table; by default its key.
        arguments: its training arguments; None for a line without trainings of its own.
        evaluates: the row whose trainings this line evaluates with its own ``model_overrides``. Its numbers are those
            of columns at the checkpoint; it has no decodings or analyses.
        missing: why a line is only shown.
        data: the datasets of its trainings; by default all.
        steps: of its training; by default those of the recipe.
        model_overrides: ``--model-overrides`` of the last evaluation.
        published: dataset -> column -> the number as printed.
        x: its place in a sweep.
    """

    label: str = ""
    arguments: str | None = None
    evaluates: str = ""
    missing: str = ""
    data: list[str] | None = None
    steps: int | None = None
    model_overrides: str = ""
    published: dict[str, dict[str, str]] = field(default_factory=dict)
    x: float | None = None


@dataclass
class XAxis:
    """The name of the ``x`` of rows or columns, and the scale of its axis: "linear" or "log"."""

    label: str = MISSING
    scale: str = "linear"


@dataclass
class ByLength:
    """Scoring of translations by the length of their source.

    Attributes:
        baseline: the row of the tests.
        bounds: the maximum lengths of the buckets, ascending.
        tokenize: sacreBLEU's tokenization.
    """

    baseline: str = MISSING
    bounds: list[int] = MISSING
    tokenize: str = "13a"


@dataclass
class Recipe:
    """An experiment: a table of rows, each trained on datasets from seeds.

    Attributes:
        title, source: of the table. ``source`` names the paper, its table, seeds and unit.
        train: training arguments of all rows; then come those of the data, of the row, and ``override``.
        override: the last arguments, so that a variant replaces sizes or rates of all rows.
        steps, validate_every: in updates.
        batch_size_valid: sentences of a batch in evaluation.
        seeds: how many the paper has.
        statistic: of the seeds, "mean" (± sample standard deviation) or "median".
        published_std: what follows ± in published numbers, a standard deviation of the "sample" or of the "population"
            of the paper's seeds.
        unit: of accuracies, "fraction" or "percent".
        checkpoint: the evaluated one, "last" or "best".
        checkpoint_metric: of the best one, among ``QUANTITIES``, on the first subset of the data.
        generate: arguments of fairseq-generate, for BLEU.
        columns, rows: of the table.
        only: the rows of the table, in their order, where there are others too.
        chosen: what was chosen where the paper is silent; what a file adds to those of the one it extends.
        by_length: see ByLength.
        x_axis: for rows with an x.
        column_axis: for columns with an x, such as the length of their strings.
        loss_figure: whether accuracy is also drawn over loss.
        analyses: name -> the arguments of ``fairseq-sg analysis`` on every trained model, in their order. They may have
            ``{checkpoint}``, ``{seed}``, ``{device}``, the name of a dataset for its folder, and the name of an earlier
            analysis for its OUT.
        define: texts for ``${define.NAME}`` elsewhere in the file, or in the one it extends.
        name, variant: of the file; they are no keys of it.
    """

    title: str = MISSING
    source: str = MISSING
    data: dict[str, Data] = MISSING
    train: str = MISSING
    override: str = ""
    steps: int = MISSING
    validate_every: int = MISSING
    batch_size_valid: int = MISSING
    seeds: int = MISSING
    statistic: str = "mean"
    published_std: str = "sample"
    unit: str = MISSING
    checkpoint: str = MISSING
    checkpoint_metric: str = "accuracy"
    generate: str = ""
    columns: dict[str, Column] = MISSING
    rows: dict[str, Row] = MISSING
    only: list[str] | None = None
    chosen: list[str] = field(default_factory=list)
    by_length: ByLength | None = None
    x_axis: XAxis | None = None
    column_axis: XAxis | None = None
    loss_figure: bool = False
    define: dict[str, str] = field(default_factory=dict)
    analyses: dict[str, str] = field(default_factory=dict)
    name: str = ""
    variant: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def trained(self) -> list[str]:
        """The rows that can be trained."""
        return [name for name, row in self.rows.items() if row.arguments is not None]

    @property
    def checkpoint_file(self) -> str:
        """The name of the evaluated checkpoint."""
        return f"checkpoint_{self.checkpoint}.pt"

    @property
    def has_published(self) -> bool:
        return any(row.published for row in self.rows.values())

    def trained_as(self, row: str) -> str:
        """The row whose trainings a row shows: itself, or the one that it evaluates."""
        return self.rows[row].evaluates or row

    def data_of(self, row: str) -> list[str]:
        """The datasets of the trainings that a row shows."""
        return self.rows[self.trained_as(row)].data or list(self.data)

    def steps_of(self, row: str) -> int:
        return self.rows[row].steps or self.steps

    def arguments_of(self, row: str, data: str) -> list[str]:
        """The training arguments of a row on a dataset."""
        texts = (self.train, self.data[data].arguments, self.rows[row].arguments or "", self.override)
        return [word for text in texts for word in shlex.split(text)]

    def columns_of(self, data: str) -> dict[str, Column]:
        """The columns with numbers from trainings on ``data``."""
        return {name: c for name, c in self.columns.items() if data in (c.data or self._with_subset(c.subset))}

    def measured(self, row: str, data: str) -> dict[str, Column]:
        """The columns with numbers of a row from trainings on ``data``."""
        columns, overrides = self.columns_of(data), self.rows[row].model_overrides
        if not self.rows[row].evaluates:
            return columns
        return {name: replace(c, model_overrides=overrides) for name, c in columns.items() if c.takes_overrides}

    def overrides(self, row: str, data: str) -> tuple[str, ...]:
        """The ``--model-overrides`` of the further evaluations of a row's trainings on ``data``."""
        of_columns = [c.model_overrides for c in self.columns_of(data).values()]
        of_rows = [other.model_overrides for other in self.rows.values() if other.evaluates == row]
        return tuple(dict.fromkeys(filter(None, of_columns + of_rows)))

    def used_by_analyses(self) -> list[str]:
        """The datasets that the analyses name."""
        found = {name for text in self.analyses.values() for name in placeholders(text)}
        return [name for name in self.data if name in found]

    def published(self, row: str, data: str, column: str) -> Published | None:
        """As printed, with its sample standard deviation: √(n / (n − 1)) times that of the population of n seeds."""
        text = self.rows[row].published.get(data, {}).get(column)
        if text is None:
            return None
        found = Published.parse(text)
        if found.std is None or self.published_std == "sample":
            return found
        return replace(found, std=found.std * (self.seeds / (self.seeds - 1)) ** 0.5)

    def _with_subset(self, subset: str) -> list[str]:
        return [name for name, data in self.data.items() if subset in data.subsets]

    def as_dict(self) -> dict[str, Any]:
        """The resolved recipe, for a results file; ``from_dict`` reads it."""
        return {key: value for key, value in asdict(self).items() if key not in ("define", "only")}

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str = "recipe") -> Recipe:
        """Raises RecipeError for content that is no recipe."""
        recipe = _typed(where, content)
        check(recipe, where)
        return recipe


def placeholders(text: str) -> list[str]:
    """The names in braces."""
    return re.findall(r"\{([^{}]*)\}", text)


def names() -> list[str]:
    """The names of the existing recipes, without bases, whose names begin with ``_``."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe, by its name or by a path that ends in ``.yaml``. Raises RecipeError if there is none."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"there is no recipe {name!r}: choose from {', '.join(names())}, or give the path of a .yaml file"
        )
    return path


def variants(path: Path) -> dict[str, Any]:
    """The variants of a recipe. Raises RecipeError for a file that cannot be read."""
    return _with_base(path)[1]


def read(path: Path, variant: str = "") -> Recipe:
    """Reads a recipe, or one of its variants.

    A variant is another experiment than the paper's, so the published numbers are not those of its rows.

    Raises:
        RecipeError: no YAML; a key unknown, missing or repeated; a value of another type or outside its choices.
    """
    content, known = _with_base(path)
    if variant:
        if variant not in known:
            there = f"choose from {', '.join(known)}" if known else "it has none"
            raise RecipeError(f"{path}: there is no variant {variant!r}: {there}")
        rows = content.get("rows")
        for row in rows.values() if isinstance(rows, dict) else ():
            if isinstance(row, dict):
                row.pop("published", None)
        content = _without_null(_merged(content, known[variant]))
    if "name" in content or "variant" in content:
        raise RecipeError(f"{path}: the keys 'name' and 'variant' are unknown: the file's name is that of the recipe")
    recipe = _typed(str(path), content | {"name": path.stem, "variant": variant})
    if recipe.only is not None:
        lost = [name for name in recipe.only if name not in recipe.rows]
        if lost:
            raise RecipeError(f"{path}: only: there is no row {lost[0]!r}: {', '.join(recipe.rows)}")
        recipe.rows = {name: recipe.rows[name] for name in recipe.only}
    check(recipe, str(path))
    return recipe


def _with_base(path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a file on that of the one it extends, and the variants of both."""
    if path in seen:
        raise RecipeError(f"{path}: extends itself, by way of {' and '.join(p.name for p in seen[1:]) or 'nothing'}")
    try:
        # OmegaConf refuses repeated keys, and reads 1e-4 as a number.
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeError) as error:
        raise RecipeError(f"{path}: {worded(error)}") from None
    content = _mapping(f"{path}", content)
    base = content.pop("extends", None)
    own = _mapping(f"{path}: variants", content.pop("variants", None) or {})
    own = {str(name): _mapping(f"{path}: variants.{name}", change or {}) for name, change in own.items()}
    if base is None:
        return content, own
    try:
        # A file is named from the folder of the one that extends it.
        named = str(path.parent / base) if str(base).endswith(".yaml") else str(base)
        below, others = _with_base(find(named), (*seen, path))
    except RecipeError as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    if isinstance(below.get("chosen"), list) and isinstance(content.get("chosen"), list):
        content["chosen"] = below["chosen"] + content["chosen"]
    return _without_null(_merged(below, content)), _merged(others, own)


def _mapping(where: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: must be a mapping (key: value), not {content!r}")
    return content


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found


def worded(error: Exception) -> str:
    """What YAML or OmegaConf found, in one line: the key, and what is wrong with its value."""
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split())
    key, text = f"{error.full_key}: " if error.full_key else "", str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        text = "is missing"
    elif isinstance(error, (ConfigAttributeError, ConfigKeyError)) and is_dataclass(error.object_type):
        known = [f.name for f in fields(error.object_type) if f.name not in ("name", "variant")]
        known += ["extends", "variants"] if error.object_type is Recipe else []
        text = f"is unknown: choose from {', '.join(known)}"
    elif "is not a ListConfig" in text:
        text = "must be a list"
    return key + text


def _without_null(content: Any) -> Any:
    """Null removes a key of the base, such as a row."""
    if not isinstance(content, dict):
        return content
    return {key: _without_null(value) for key, value in content.items() if value is not None}


def _typed(where: str, content: dict[str, Any]) -> Recipe:
    """The content as a Recipe, by OmegaConf's checks of keys and types."""
    chosen = content.get("chosen") if isinstance(content, dict) else None
    for sentence in chosen if isinstance(chosen, list) else ():
        # OmegaConf makes a text of a mapping.
        if isinstance(sentence, dict):
            raise RecipeError(f"{where}: chosen: {sentence} is no text: quote a sentence with a colon")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), _texts(content))
        assert isinstance(merged, DictConfig)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{where}: {worded(error)}") from None


def _texts(content: Any) -> Any:
    """Empty mappings, which YAML reads as None, are allowed for rows."""
    if isinstance(content, dict) and isinstance(content.get("rows"), dict):
        content["rows"] = {name: {} if row is None else row for name, row in content["rows"].items()}
    return content


def check(recipe: Recipe, where: str) -> None:
    """What a schema cannot say. Raises RecipeError."""

    def error(key: str, message: str) -> RecipeError:
        return RecipeError(f"{where}: {key}: {message}")

    def choice(key: str, value: Any, choices: Iterable[Any]) -> None:
        if value not in choices:
            raise error(key, f"is {value!r}: choose from {', '.join(map(str, choices))}")

    def known(key: str, found: Iterable[str], there: Iterable[str], what: str) -> None:
        for name in found:
            if name not in there:
                raise error(key, f"names {name!r}, which is not among the {what}: {', '.join(there)}")

    for key in ("steps", "validate_every", "batch_size_valid", "seeds"):
        if getattr(recipe, key) < 1:
            raise error(key, f"is {getattr(recipe, key)}: it must be above 0")
    choice("statistic", recipe.statistic, ("mean", "median"))
    choice("published_std", recipe.published_std, ("sample", "population"))
    if recipe.published_std == "population" and recipe.seeds < 2:
        raise error("published_std", "is that of a population, which needs the number of the paper's seeds, 2 or more")
    choice("unit", recipe.unit, ("fraction", "percent"))
    choice("checkpoint", recipe.checkpoint, ("last", "best"))
    choice("checkpoint_metric", recipe.checkpoint_metric, QUANTITIES)
    if recipe.checkpoint == "last" and recipe.checkpoint_metric != "accuracy":
        raise error("checkpoint_metric", "is for 'checkpoint: best'")
    for key in ("data", "columns", "rows"):
        if not getattr(recipe, key):
            raise error(key, "is empty")
        for name in getattr(recipe, key):
            if not _NAME.fullmatch(name):
                raise error(key, f"has the name {name!r}: use only letters, digits and . _ + -")
            if name == "all" and key != "columns":
                raise error(key, "has the name 'all', which stands for every name in --rows and --on: rename it")
    for key, text in (("train", recipe.train), ("override", recipe.override), ("generate", recipe.generate)):
        _check_arguments(error, key, text)
    for name, data in recipe.data.items():
        _check_arguments(error, f"data.{name}.arguments", data.arguments)
        if not _NAME.fullmatch(data.folder):
            raise error(f"data.{name}.folder", f"is {data.folder!r}: it must be the name of one folder, inside --data")
        if _has_option(shlex.split(data.prepare), {"--out"}):
            raise error(f"data.{name}.prepare", "has --out, which experiments sets itself")
        if not data.subsets:
            raise error(f"data.{name}.subsets", "is empty")
    for name, column in recipe.columns.items():
        key = f"columns.{name}"
        choice(f"{key}.metric", column.metric, METRICS)
        if column.at not in PLACES and not (isinstance(column.at, int) and column.at > 0):
            raise error(f"{key}.at", f"is {column.at!r}: it must be a number of steps, 'checkpoint', 'end' or 'best'")
        if column.type and column.metric not in BY_TYPE:
            raise error(f"{key}.type", f"is for {' and '.join(BY_TYPE)}: no other metric is measured by type")
        known(f"{key}.data", column.data or (), recipe.data, "data")
        if not any(name in recipe.columns_of(data) for data in recipe.data):
            raise error(f"{key}.subset", f"is {column.subset!r}, which no data has as a subset")
        if bool(column.value) != (column.metric == "analysis"):
            raise error(f"{key}.value", "is for the metric 'analysis', which needs it")
        if column.value:
            known(f"{key}.value", [column.value.partition("/")[0]], recipe.analyses, "analyses")
        decoded = column.metric in DECODED
        if decoded and column.at != "checkpoint":
            raise error(f"{key}.at", f"{DECODED[column.metric]} is measured only at the checkpoint")
        if column.model_overrides and (decoded or column.at != "checkpoint"):
            raise error(f"{key}.model_overrides", "are for accuracy, loss or an error at the checkpoint")
        if column.generate and not decoded:
            raise error(f"{key}.generate", f"is for the metrics {' and '.join(DECODED)}")
        _check_arguments(error, f"{key}.generate", column.generate)
    earlier = ["checkpoint", "seed", "device", *recipe.data]
    for name, text in recipe.analyses.items():
        if not _NAME.fullmatch(name) or name in earlier or re.match(r"(run|train|validate|generate)\b", name):
            raise error(
                "analyses",
                f"has the name {name!r}: use letters, digits and . _ + -, no name of data, and none that begins with "
                "run, train, validate or generate, the files of a training",
            )
        known(f"analyses.{name}", placeholders(text), earlier, "names in braces")
        _check_arguments(error, f"analyses.{name}", text, {"--out", "--format"})
        earlier.append(name)
    for name, row in recipe.rows.items():
        _check_row(recipe, f"rows.{name}", name, row, error, known, choice)
    if any(column.metric in DECODED for column in recipe.columns.values()) != bool(recipe.generate):
        raise error("generate", "is for a column with the metric 'bleu', which needs it (such as --max-len-b 200)")
    if recipe.by_length:
        _check_by_length(recipe, error, choice)
    _check_axis("x_axis", recipe.x_axis, "row", recipe.rows, error, choice)
    _check_axis("column_axis", recipe.column_axis, "column", recipe.columns, error, choice)
    drawn = {column.metric for column in recipe.columns.values() if column.x is not None}
    if len(drawn) > 1:
        raise error("column_axis", f"has columns of different metrics: {', '.join(sorted(drawn))}")
    if recipe.x_axis and recipe.column_axis:
        raise error("column_axis", "cannot be drawn beside an x_axis: remove one")


def _check_row(recipe: Recipe, key: str, name: str, row: Row, error: Any, known: Any, choice: Any) -> None:
    row.label = row.label or name
    if sum((row.arguments is not None, bool(row.evaluates), bool(row.missing))) != 1:
        raise error(
            f"{key}.arguments",
            "is needed, or 'evaluates' with the row whose trainings it evaluates, or 'missing' with the reason why the "
            "row cannot be trained; one of them",
        )
    if row.evaluates:
        choice(f"{key}.evaluates", row.evaluates, recipe.trained)
        if not row.model_overrides:
            raise error(f"{key}.model_overrides", f"are needed: without them the row is the row {row.evaluates!r}")
        for other, given in (("data", row.data), ("steps", row.steps)):
            if given is not None:
                raise error(f"{key}.{other}", f"is that of the row {row.evaluates!r}: remove it")
        if not any(recipe.measured(name, data) for data in recipe.data_of(name)):
            raise error(f"{key}.evaluates", "has no column: it shows those measured at the checkpoint")
    if row.steps is not None and row.steps < 1:
        raise error(f"{key}.steps", f"is {row.steps}: it must be above 0")
    known(f"{key}.data", row.data or (), recipe.data, "data")
    if row.arguments is not None:
        _check_arguments(error, f"{key}.arguments", row.arguments)
        for data in recipe.data_of(name):
            if "--task" not in recipe.arguments_of(name, data):
                raise error(f"{key}.arguments", "have no --task, nor has 'train'")
    known(f"{key}.published", row.published, recipe.data_of(name), "data of the row")
    for data, numbers in row.published.items():
        known(f"{key}.published.{data}", numbers, recipe.measured(name, data), "columns of these data")
        for column in numbers:
            try:
                recipe.published(name, data, column)
            except ValueError as problem:
                raise error(f"{key}.published.{data}.{column}", str(problem)) from None


def _check_arguments(error: Any, key: str, text: str, reserved: set[str] = RESERVED) -> None:
    try:
        words = shlex.split(text)
    except ValueError as problem:
        raise error(key, f"cannot be split into words ({problem})") from None
    found = _has_option(words, reserved)
    if found:
        raise error(key, f"has {found}, which experiments sets itself")


def _has_option(words: Iterable[str], options: set[str]) -> str:
    """The first of ``options`` among words, as fairseq's commands take them (--seed=7, --max_update); or ""."""
    return next((word for word in words if word.partition("=")[0].replace("_", "-") in options), "")


def _check_by_length(recipe: Recipe, error: Any, choice: Any) -> None:
    how = recipe.by_length
    if not recipe.generate:
        raise error("by_length", "is for a recipe with columns of the metric 'bleu'")
    choice("by_length.baseline", how.baseline, recipe.trained)
    choice("by_length.tokenize", how.tokenize, TOKENIZERS)
    if not how.bounds or min(how.bounds) < 1 or how.bounds != sorted(set(how.bounds)):
        raise error("by_length.bounds", f"must be whole numbers above 0, ascending, not {how.bounds}")


def _check_axis(
    key: str, axis: XAxis | None, what: str, there: Mapping[str, Row | Column], error: Any, choice: Any
) -> None:
    placed = {name: item.x for name, item in there.items() if item.x is not None}
    if axis is None:
        for name in placed:
            raise error(key, f"is missing: the {what} {name!r} has an x, which needs a description")
        return
    choice(f"{key}.scale", axis.scale, ("linear", "log"))
    at: dict[float, str] = {}
    for name, x in placed.items():
        if abs(x) == float("inf") or x != x:
            raise error(f"{what}s.{name}.x", f"is {x}: it must be finite")
        if axis.scale == "log" and x <= 0:
            raise error(f"{key}.scale", f"is log, but the x of the {what} {name!r} is {x:g}: it must be above 0")
        if x in at:
            raise error(key, f"has two {what}s with the same x, {x:g}: {at[x]!r} and {name!r}")
        at[x] = name
    if len(at) < 2:
        raise error(key, f"needs at least two {what}s with an x")

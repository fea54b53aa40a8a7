"""Recipes: published tables as files ``scripts/recipes/NAME.yaml``, read strictly; format in
``docs/reproducing.md``.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent / "recipes"
#: Options that ``scripts/reproduce.py`` itself passes to fairseq-train.
RESERVED = {
    "--user-dir", "--seed", "--max-update", "--save-dir", "--valid-subset", "--log-format", "--log-interval",
    "--num-workers",
    "--required-batch-size-multiple", "--validate-interval-updates", "--validate-interval", "--save-interval-updates",
    "--save-interval", "--keep-interval-updates", "--no-epoch-checkpoints", "--batch-size-valid", "--cpu",
    "--best-checkpoint-metric", "--maximize-best-checkpoint-metric",
}  # fmt: skip
METRICS = ("accuracy", "loss", "perplexity", "bleu")
#: sacreBLEU's choices, as in fairseq_sg.scoring.plain_bleu.
TOKENIZERS = ("13a", "none", "char", "intl", "zh")
#: The source of a column's number: the evaluation of the chosen checkpoint, or the end of training.
PLACES = ("checkpoint", "end")
_NUMBER = re.compile(r"(\d*\.?\d+)(?: ± (\d*\.?\d+))?")
_NAME = re.compile(r"[\w.+-]+")


class RecipeError(ValueError):
    """An invalid recipe; the message names the file, the row or other entry, and the key."""


@dataclass(frozen=True)
class Published:
    """A number as a paper prints it.

    Attributes:
        text: as printed.
        mean, std: its parts, None if missing.
        half: half a unit of its last digit.
        fail: whether it is "Fail", a training that diverged.
    """

    text: str
    mean: float = 0.0
    std: float | None = None
    half: float = 0.0
    fail: bool = False


@dataclass(frozen=True)
class Data:
    """A dataset of a recipe.

    It has its ``folder`` inside ``--data``, the arguments of ``python -m data_prep`` that make it, and the
    evaluated subsets (the first chooses the best checkpoint). Its further training arguments, such as sizes of
    models, apply to all rows.
    """

    folder: str
    prepare: str
    subsets: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @property
    def needs_file(self) -> bool:
        """Whether the user must provide a file that cannot be downloaded (FILE in ``prepare``)."""
        return "FILE" in self.prepare.split()


@dataclass(frozen=True)
class Column:
    """A number of the table: its ``subset``, ``metric``, ``data``, and the step ``at`` which it is measured.

    ``at`` is that of the evaluated checkpoint, the end of training, or a number of steps: then the checkpoint that
    would have been chosen up to there.
    """

    subset: str
    metric: str
    at: str | int
    data: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        label: its name in the paper.
        arguments: its further arguments; None for a line that is only shown, with the reason in ``missing``.
        on: the ``data`` of its trainings.
        steps: of its training.
        overrides: ``--model-overrides`` of the last evaluation.
        published: dataset -> column -> number.
        x: its place in a sweep, or None.
    """

    label: str
    arguments: tuple[str, ...] | None
    missing: str
    on: tuple[str, ...]
    steps: int
    overrides: str
    published: dict[str, dict[str, Published]]
    x: float | None = None


@dataclass(frozen=True)
class XAxis:
    """The name of the rows' ``x``, and the scale of its axis: "linear" or "log"."""

    label: str
    scale: str


@dataclass(frozen=True)
class ByLength:
    """Scoring of translations by the length of their source (``scripts/bleu_by_length.py``).

    ``baseline`` is the row of the tests, ``tokenize`` sacreBLEU's tokenization, ``bounds`` are the
    maximum lengths of the buckets.
    """

    baseline: str
    tokenize: str
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """A published table. Fields are those of the file; see ``docs/reproducing.md``."""

    name: str
    title: str
    source: str
    data: dict[str, Data]
    train: tuple[str, ...]
    validate_every: int
    batch_size_valid: int
    seeds: int
    statistic: str
    unit: str
    checkpoint: str
    generate: tuple[str, ...]
    columns: dict[str, Column]
    rows: dict[str, Row]
    chosen: tuple[str, ...]
    by_length: ByLength | None = None
    x_axis: XAxis | None = None

    @property
    def published(self) -> bool:
        """Whether the recipe has any published number."""
        return any(row.published for row in self.rows.values())

    @property
    def about_source(self) -> str:
        return f"{'Published' if self.published else 'Source'}: {self.source}"

    @property
    def about_choices(self) -> str:
        """The line above the choices in ``chosen``."""
        return "Chosen where the paper is silent, or differently from it:" if self.published else "Chosen:"

    def columns_of(self, data: str) -> dict[str, Column]:
        """The columns with numbers from trainings on ``data``."""
        return {name: column for name, column in self.columns.items() if data in column.data}


def names() -> list[str]:
    """The names of the existing recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe, by its name or by a path that ends in ``.yaml``. Raises RecipeError if there is none."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"there is no recipe {name!r}: choose from {', '.join(names())}, or give the path of a .yaml file"
        )
    return path


class _Loader(yaml.SafeLoader):
    """YAML that rejects repeated keys; plain YAML takes the last one."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not text: put it in quotes")
        if key in found:
            raise RecipeError(f"line {key_node.start_mark.line + 1}: {key!r} occurs twice")
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path) -> Recipe:
    """Reads a recipe.

    Raises:
        RecipeError: no YAML; a key unknown, missing or repeated; a value of another type or outside its choices.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        return _recipe(path.stem, content)
    except (yaml.YAMLError, RecipeError) as error:
        raise RecipeError(f"{path}: {error}") from None


class _Entry:
    """A mapping of the file, whose keys are taken one by one; none may be left at the end."""

    def __init__(self, where: str, content: Any) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise RecipeError(f"{where}: must be a mapping (key: value), not {content!r}")
        self.content = dict(content)

    def error(self, key: str, message: str) -> RecipeError:
        return RecipeError(f"{self.where}, key {key!r}: {message}")

    def take(self, key: str, kind: type, description: str, default: Any = ...) -> Any:
        if key not in self.content:
            if default is ...:
                raise self.error(key, "is missing")
            return default
        value = self.content.pop(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(key, f"must be {description}, not {value!r}")
        return value

    def text(self, key: str, default: Any = ...) -> str:
        return self.take(key, str, "text", default)

    def count(self, key: str, default: Any = ...) -> int:
        value = self.take(key, int, "a whole number", default)
        if value < 1:
            raise self.error(key, f"is {value}: it must be above 0")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = ...) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"is {value!r}: choose from {', '.join(choices)}")
        return value

    def texts(self, key: str, default: Any = ...) -> tuple[str, ...]:
        value = self.take(key, list, "a list of texts", default)
        if not value or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of texts, not {value!r}")
        return tuple(value)

    def arguments(self, key: str, default: Any = ...) -> tuple[str, ...]:
        """Options of a command, as one text or a list of them."""
        value = self.take(key, (str, list), "text, or a list of texts", default)
        if not isinstance(value, (str, list)) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be text, or a list of texts, not {value!r}")
        try:
            words = shlex.split(value if isinstance(value, str) else " ".join(value))
        except ValueError as error:
            raise self.error(key, f"cannot be split into words ({error})") from None
        for word in words:
            if word in RESERVED:
                raise self.error(key, f"has {word}, which scripts/reproduce.py sets itself")
        return tuple(words)

    def entries(self, key: str, what: str) -> dict[str, _Entry]:
        content = self.take(key, dict, "a mapping (key: value)")
        if not content:
            raise self.error(key, "is empty")
        for name in content:
            if not _NAME.fullmatch(name):
                raise self.error(key, f"has the name {name!r}: use only letters, digits and . _ + -")
        return {name: _Entry(f"{what} {name!r}", value) for name, value in content.items()}

    def close(self) -> None:
        if self.content:
            raise self.error(next(iter(self.content)), "is unknown")


def _recipe(name: str, content: Any) -> Recipe:
    entry = _Entry("the recipe", content)
    data = {key: _data(value) for key, value in entry.entries("data", "data").items()}
    columns = {key: _column(value, data) for key, value in entry.entries("columns", "column").items()}
    train, steps = entry.arguments("train"), entry.count("steps")
    unit = entry.choice("unit", ("fraction", "percent"))
    rows = {
        key: _row(value, train, steps, data, columns, label=key) for key, value in entry.entries("rows", "row").items()
    }
    recipe = Recipe(
        name=name,
        title=entry.text("title"),
        source=entry.text("source"),
        data=data,
        train=train,
        validate_every=entry.count("validate_every"),
        batch_size_valid=entry.count("batch_size_valid"),
        seeds=entry.count("seeds"),
        statistic=entry.choice("statistic", ("mean", "median"), "mean"),
        unit=unit,
        checkpoint=entry.choice("checkpoint", ("last", "best")),
        generate=entry.arguments("generate", ""),
        columns=columns,
        rows=rows,
        chosen=entry.texts("chosen"),
        by_length=_by_length(entry, rows) if "by_length" in entry.content else None,
        x_axis=_x_axis(entry, rows) if "x_axis" in entry.content else None,
    )
    if any(column.metric == "bleu" for column in columns.values()) != bool(recipe.generate):
        raise entry.error(
            "generate", "is for a column with the metric 'bleu', which needs it (such as --max-len-b 200)"
        )
    if recipe.by_length and not recipe.generate:
        raise entry.error("by_length", "is for a recipe with columns of the metric 'bleu'")
    if recipe.x_axis is None:
        for key, row in rows.items():
            if row.x is not None:
                raise entry.error("x_axis", f"is missing: the row {key!r} has an x, which needs a description")
    entry.close()
    return recipe


def _x_axis(recipe: _Entry, rows: dict[str, Row]) -> XAxis:
    entry = _Entry("x_axis", recipe.take("x_axis", dict, "a mapping (key: value)"))
    found = XAxis(entry.text("label"), entry.choice("scale", ("linear", "log"), "linear"))
    entry.close()
    at: dict[float, str] = {}
    for name, row in rows.items():
        if row.x is None:
            continue
        if found.scale == "log" and row.x <= 0:
            raise entry.error("scale", f"is log, but the x of the row {name!r} is {row.x:g}: it must be above 0")
        if row.x in at:
            raise entry.error("label", f"has two rows with the same x, {row.x:g}: {at[row.x]!r} and {name!r}")
        at[row.x] = name
    if len(at) < 2:
        raise entry.error("label", "needs at least two rows with an x")
    return found


def _by_length(recipe: _Entry, rows: dict[str, Row]) -> ByLength:
    entry = _Entry("by_length", recipe.take("by_length", dict, "a mapping (key: value)"))
    bounds = entry.take("bounds", list, "a list of whole numbers")
    if not bounds or not all(type(b) is int and b > 0 for b in bounds) or bounds != sorted(set(bounds)):
        raise entry.error("bounds", f"must be whole numbers above 0, ascending, not {bounds!r}")
    trained = tuple(name for name, row in rows.items() if row.arguments is not None)
    found = ByLength(entry.choice("baseline", trained), entry.choice("tokenize", TOKENIZERS, "13a"), tuple(bounds))
    entry.close()
    return found


def _data(entry: _Entry) -> Data:
    data = Data(entry.text("folder"), entry.text("prepare"), entry.texts("subsets"), entry.arguments("arguments", ""))
    if not _NAME.fullmatch(data.folder):
        raise entry.error("folder", f"is {data.folder!r}: it must be the name of one folder, inside --data")
    if "--out" in data.prepare.split():
        raise entry.error("prepare", "has --out, which scripts/reproduce.py sets itself")
    entry.close()
    return data


def _column(entry: _Entry, data: dict[str, Data]) -> Column:
    at = entry.take("at", (str, int), "a number of steps, 'checkpoint' or 'end'", "checkpoint")
    if at not in PLACES and not (isinstance(at, int) and at > 0):
        raise entry.error("at", f"is {at!r}: it must be a number of steps, 'checkpoint' or 'end'")
    subset, on = entry.text("subset"), entry.texts("data", list(data))
    for name in on:
        if name not in data:
            raise entry.error("data", f"names {name!r}, which is not in the data: {', '.join(data)}")
    column = Column(
        subset,
        entry.choice("metric", METRICS, "accuracy"),
        at,
        tuple(name for name in on if subset in data[name].subsets),
    )
    if not column.data:
        raise entry.error("subset", f"is {subset!r}, which no data has as a subset")
    if column.metric == "bleu" and at != "checkpoint":
        raise entry.error("at", "BLEU is measured only at the checkpoint")
    entry.close()
    return column


def _row(
    entry: _Entry, train: tuple[str, ...], steps: int, data: dict[str, Data], columns: dict[str, Column], label: str
) -> Row:
    arguments = entry.arguments("arguments", None) if "arguments" in entry.content else None
    missing = entry.text("missing", "")
    if (arguments is None) == (not missing):
        raise entry.error(
            "arguments", "is needed, or 'missing' with the reason why the row cannot be trained; not both"
        )
    if arguments is not None and "--task" not in train + arguments:
        raise entry.error("arguments", "have no --task, nor has 'train'")
    on = entry.texts("data", list(data))
    for name in on:
        if name not in data:
            raise entry.error("data", f"names {name!r}, which is not in the data: {', '.join(data)}")
    published = {}
    given = entry.entries("published", f"{entry.where}, published on") if "published" in entry.content else {}
    for name, numbers in given.items():
        if name not in on:
            raise entry.error("published", f"has numbers on {name!r}, which the row is not trained on: {', '.join(on)}")
        published[name] = {column: _published(numbers, column, columns, name) for column in list(numbers.content)}
    row = Row(
        label=entry.text("label", label),
        arguments=arguments,
        missing=missing,
        on=on,
        steps=entry.count("steps", steps),
        overrides=entry.text("overrides", ""),
        published=published,
        x=_x(entry) if "x" in entry.content else None,
    )
    entry.close()
    return row


def _x(entry: _Entry) -> float:
    # YAML reads 1e-4 as text.
    x = float(entry.take("x", (int, float), "a number, with a point in it (1.0e-4)"))
    if not math.isfinite(x):
        raise entry.error("x", f"is {x}: it must be finite")
    return x


def _published(entry: _Entry, name: str, columns: dict[str, Column], data: str) -> Published:
    text = entry.take(name, str, "text in quotes, as printed in the paper")
    there = [key for key, column in columns.items() if data in column.data]
    if name not in there:
        raise entry.error(name, f"is not a column of these data: {', '.join(there)}")
    if text == "Fail":
        return Published(text, fail=True)
    match = _NUMBER.fullmatch(text)
    if not match:
        raise entry.error(name, f"is {text!r}: it must be like '.21 ± .01', '46.9 ± 8.9', '0.61' or 'Fail'")
    digits = len(match[1].partition(".")[2])
    return Published(text, float(match[1]), float(match[2]) if match[2] else None, 0.5 * 10**-digits)

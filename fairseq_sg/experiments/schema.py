"""What a recipe is: the keys of its file, with their types and defaults, as dataclasses that OmegaConf reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.quantities import QUANTITIES

#: Those of fairseq-generate -> their name.
DECODED = {"bleu": "BLEU", "length_ratio": "length ratio"}
METRICS = (*QUANTITIES, "perplexity", *DECODED, "analysis")
_NUMBER = re.compile(r"(\d*\.?\d+)(?: ± (\d*\.?\d+))?")


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
            the best value of this metric and type on the first subset), ``peak`` (the best of all evaluations in
            training, which looks at the test), ``second_half`` (their mean over the second half of the steps), or a
            number of steps: then it is that of the checkpoint that would have been chosen up to there.
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
        published_std: what follows ± there, where it is not that of the recipe.
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
    published_std: str = ""
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
        user_dir: the folder of mechanisms of your own, ``--user-dir`` of all commands; from the current folder.
        override: the last arguments, so that a variant replaces sizes or rates of all rows.
        steps, validate_every: in updates.
        batch_size_valid: sentences of a batch in evaluation.
        seeds: how many the paper has. ``seeds_known``: whether it says so; otherwise they are our choice.
        statistic: of the seeds, "mean" (± sample standard deviation) or "median".
        published_std: what follows ± in published numbers, a standard deviation of the "sample" or of the "population"
            of the paper's seeds.
        published_seeds: how many the paper has, for a recipe whose own ``seeds`` are others; by default ``seeds``.
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
    user_dir: str = ""
    override: str = ""
    steps: int = MISSING
    validate_every: int = MISSING
    batch_size_valid: int = MISSING
    seeds: int = MISSING
    seeds_known: bool = True
    statistic: str = "mean"
    published_std: str = "sample"
    published_seeds: int | None = None
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
    def planned_seeds(self) -> list[int]:
        """The seeds without ``--seeds``: 1 to ``seeds``."""
        return list(range(1, self.seeds + 1))

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

    def steps_of(self, row: str, scale: float = 1.0) -> int:
        """The steps of a row, with ``--steps-scale``."""
        return max(1, round((self.rows[row].steps or self.steps) * scale))

    def arguments_of(self, row: str, data: str) -> list[str]:
        """The training arguments of a row on a dataset."""
        texts = (self.train, self.data[data].arguments, self.rows[row].arguments or "", self.override)
        return [word for text in texts for word in shlex.split(text)]

    def columns_of(self, data: str) -> dict[str, Column]:
        """The columns with numbers from trainings on ``data``."""
        return {name: c for name, c in self.columns.items() if data in (c.data or self._with_subset(c.subset))}

    def by_length_of(self, data: str) -> list[str]:
        """The subsets of ``data`` whose translations ``by_length`` scores."""
        columns = [c for c in self.columns_of(data).values() if c.metric == "bleu" and not c.generate]
        return list(dict.fromkeys(column.subset for column in columns)) if self.by_length else []

    def measured(self, row: str, data: str) -> dict[str, Column]:
        """The columns with numbers of a row from trainings on ``data``."""
        steps, overrides = self.steps_of(self.trained_as(row)), self.rows[row].model_overrides
        columns = {name: c for name, c in self.columns_of(data).items() if not (isinstance(c.at, int) and c.at > steps)}
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
        if found.std is None or self.std_of(row) == "sample":
            return found
        return replace(found, std=found.std * self.of_sample)

    def std_of(self, row: str) -> str:
        """What follows ± in the published numbers of a row: "sample" or "population"."""
        return self.rows[row].published_std or self.published_std

    @property
    def papers_seeds(self) -> int:
        return self.published_seeds or self.seeds

    @property
    def of_sample(self) -> float:
        """The sample standard deviation of the paper's seeds, in multiples of the population's."""
        return (self.papers_seeds / (self.papers_seeds - 1)) ** 0.5

    def _with_subset(self, subset: str) -> list[str]:
        return [name for name, data in self.data.items() if subset in data.subsets]

    def as_dict(self) -> dict[str, Any]:
        """The resolved recipe, for a results file; ``recipe.from_dict`` reads it."""
        return {key: value for key, value in asdict(self).items() if key not in ("define", "only")}


#: A name in braces. Other braces, such as those of a dict, are text.
_PLACEHOLDER = re.compile(r"\{([\w.+-]+)\}")


def placeholders(text: str) -> list[str]:
    """The names in braces."""
    return _PLACEHOLDER.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its ``placeholders`` replaced; all of them have a value."""
    return _PLACEHOLDER.sub(lambda name: values[name[1]], text)

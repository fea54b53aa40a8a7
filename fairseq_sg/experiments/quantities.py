"""What an evaluation measures on a subset: its name in fairseq's log, in curves, in tables and on axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The numbers of a validation in training, with its "step".
Point = Mapping[str, float]


@dataclass(frozen=True)
class Quantity:
    """
    Attributes:
        logged: its name in the log of fairseq.
        suffix: of its key in the point of a curve, after the subset.
        name: in the legend of a table.
        axis: the label of its axis in curves.
        unit: in bars. That of accuracies is the recipe's.
        digits: in tables, after the point.
        more_is_better: whether the best checkpoint has the most of it, not the least.
    """

    logged: str
    suffix: str
    name: str
    axis: str
    unit: str
    digits: int = 2
    more_is_better: bool = False

    def key(self, subset: str) -> str:
        """The key of its value on a subset, in the point of a curve."""
        return subset + self.suffix

    def rank(self, point: Point, subset: str) -> float:
        """A number that is higher for better points of a curve; −∞ for a point without the quantity."""
        value = point.get(self.key(subset))
        return -math.inf if value is None else value if self.more_is_better else -value

    @property
    def percent(self) -> str:
        """The sign after its values in the progress of trainings; empty where they are not in percent."""
        return "%" if self.unit == "%" else ""

    def shown(self, value: float) -> str:
        """A value in the progress of trainings."""
        return f"{value:.1f}" if self.percent else f"{value:.{self.digits}f}"


#: Accuracy is in percent, the loss in bits per token, and squared errors are divided by the unit of their data. Errors
#: of functions are relative to their norm.
QUANTITIES = {
    "accuracy": Quantity("accuracy", "", "accuracy", "accuracy, %", "%", more_is_better=True),
    "loss": Quantity("nll_loss", "_loss", "loss in bits per token", "loss, bits per token", "bits per token"),
    "word_error": Quantity("word_error", "_word_error", "wrong labels, in percent", "wrong labels, %", "%", digits=1),
    "mean_word_error": Quantity(
        "mean_word_error",
        "_mean_word_error",
        "wrong labels, in percent, mean over types",
        "wrong labels, %, mean over types",
        "%",
        digits=1,
    ),
    "mse_last": Quantity(
        "mse_last",
        "_mse_last",
        "squared error at the query, after the last loop",
        "squared error, last loop",
        "squared error",
        digits=3,
    ),
    "mse_last_mean": Quantity(
        "mse_last_mean",
        "_mse_last_mean",
        "squared error at the query, mean over loops",
        "squared error, mean over loops",
        "squared error",
        digits=3,
    ),
    "relative_l2": Quantity(
        "relative_l2", "_relative_l2", "relative L2 error", "relative L2 error", "relative error", digits=5
    ),
}

_OF_TEXTS = ("accuracy", "loss")
#: A task of fairseq_sg -> the quantities that it measures.
MEASURED = {
    "sg_translation": _OF_TEXTS,
    "sg_language_modeling": _OF_TEXTS,
    "sg_classification": _OF_TEXTS,
    "sg_visual_qa": _OF_TEXTS,
    "sg_tagging": (*_OF_TEXTS, "word_error", "mean_word_error"),
    "sg_regression": ("mse_last", "mse_last_mean"),
    "sg_operator": ("relative_l2",),
}


def chosen(points: Sequence[Point], metric: str, subset: str, best: bool) -> Point:
    """The point of a curve whose checkpoint is evaluated: the last one, or the latest of the ``best`` by ``metric`` on
    ``subset``.
    """
    rank = QUANTITIES[metric].rank
    return max(points, key=lambda point: (rank(point, subset) if best else 0, point["step"]))


def part(subset: str, kind: str) -> str:
    """The name of a subset in curves and results, or of its examples of one type or group of types."""
    return f"{subset}/{kind}" if kind else subset


def decoding(subset: str, arguments: str) -> str:
    """The name in results of a decoding of a subset with further arguments of ``fairseq-generate``."""
    return f"{subset} {arguments}" if arguments else subset


def source_of(metric: str) -> str:
    """The quantity that a column's metric is computed from: a perplexity is 2 to the loss."""
    return "loss" if metric == "perplexity" else metric

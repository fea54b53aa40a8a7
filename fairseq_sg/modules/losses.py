"""Losses and statistics that layers compute from what their output does not show: experts, halting.

They travel in return values, never in module attributes: a layer returns them by name, the stack, the encoder and the
decoder collect one for each application of a layer, and the criterion finds them in the model's output under
``extra["aux_losses"]``, a dict from name to a list. A `Statistic` travels with them; it is only logged.

The orthogonality loss is not among them: it is the criterion's, on the Values in ``extra["values"]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Statistic:
    """A scalar that is logged, as the mean over the applications of layers, and that nothing is trained on."""

    value: Tensor


#: name -> what each application of a layer returned: losses, or statistics.
AuxLosses = dict[str, list[Tensor | Statistic]]


def collect(lists: dict[str, list[T]], new: Mapping[str, T]) -> None:
    """Appends each value that a layer returned to the list of its name."""
    for name, value in new.items():
        lists.setdefault(name, []).append(value)


def merge(parts: Iterable[Mapping[str, list[T]]]) -> dict[str, list[T]]:
    """One dict of lists from those of several parts of a model."""
    merged: dict[str, list[T]] = {}
    for part in parts:
        for name, values in part.items():
            merged.setdefault(name, []).extend(values)
    return merged

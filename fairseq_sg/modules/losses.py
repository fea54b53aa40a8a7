"""Losses that are computed inside the model, on quantities the output does not show.

They travel in arguments and return values, never in module attributes: the criterion hands the model a *value loss* per
role (encoder, decoder, cross), each attention of that role returns its value, the encoder and decoder collect one
scalar per layer application, and the criterion finds them in the model's output under ``extra["aux_losses"]``: a dict
from name to a list.

What is only to be watched travels with them as a `Statistic`: the criterion logs it and trains on nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fairseq_sg.ops import orthogonality_loss


@dataclass(frozen=True)
class Statistic:
    """A scalar that is logged, as the mean over the applications of layers, and that nothing is trained on."""

    value: Tensor


#: name -> what each application of a layer returned: losses, or statistics.
AuxLosses = dict[str, list[Tensor | Statistic]]


class ValueLoss(Protocol):
    """A loss on the Values of one attention: values (B, H, M, E), padding_mask (B, M) or None -> scalar.

    A loss on which Values at padding have no influence says so by an attribute ``ignores_padding`` that is true.
    Without it the model computes them as all others, even where it could leave them out.
    """

    name: str

    def __call__(self, values: Tensor, padding_mask: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class OrthogonalityLoss:
    """‖V̄V̄ᵀ − I‖²_F of one attention's Values (Park & Kim 2024, section 4.2), V̄ the Values with unit rows.

    Each head's Values are taken by themselves, E = d_head, without the positions of padding; the loss is the mean over
    heads and sentences. The paper leaves all of this open.

    Attributes:
        name: the key under which the loss is collected and logged.
        eps: ε of V_n / (‖V_n‖ + ε).
    """

    name: str = "orthogonality"
    eps: float = 1e-6
    ignores_padding: ClassVar[bool] = True

    def __call__(self, values: Tensor, padding_mask: Tensor | None) -> Tensor:
        """values (B, H, M, E), padding_mask (B, M) bool, True at padding -> scalar (float32 for half-precision
        Values).
        """
        return orthogonality_loss(values, padding_mask=padding_mask, eps=self.eps, reduction="mean")


@dataclass(frozen=True)
class OverRealPositions:
    """A value loss with a padding mask of its own: causal self-attention is not told of padding that causality
    hides.
    """

    loss: ValueLoss
    padding_mask: Tensor | None

    @property
    def name(self) -> str:
        return self.loss.name

    def __call__(self, values: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.loss(values, self.padding_mask)


def collect(losses: AuxLosses, emitted: Mapping[str, Tensor | Statistic]) -> None:
    """Appends each loss, or statistic, that a layer returned to the list of its name."""
    for name, value in emitted.items():
        losses.setdefault(name, []).append(value)


def merge(parts: Iterable[AuxLosses | None]) -> AuxLosses:
    """One dict from the dicts of several parts of a model; parts without losses may be None."""
    merged: AuxLosses = {}
    for part in parts:
        for name, values in (part or {}).items():
            merged.setdefault(name, []).extend(values)
    return merged

"""The operators, their implementations, and the rules by which ``"auto"`` chooses where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

NAIVE = "naive"
TRITON = "triton"


@dataclass(frozen=True)
class Operator:
    """An operator's implementations, and those among which ``implementation="auto"`` chooses.

    Attributes:
        implementations: by name; ``"naive"`` is the equation.
        default: what ``"auto"`` runs where neither a rule nor a measurement says otherwise.
        others: device type -> the other implementations that ``"auto"`` may run there.
        sizes: names of the numbers of a call by which it chooses.
        rules: device type -> (a size, the least number, the implementation from there on).
        full_precision: implementations that ``"auto"`` takes for float32 and float64 alone.
        transformed: what ``"auto"`` runs within a transform of ``torch.func``, in torch's own operations alone.
    """

    implementations: dict[str, Callable]
    default: str
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    rules: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)
    full_precision: tuple[str, ...] = ()
    transformed: str = NAIVE

    def candidates(self, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
        """The implementations that ``"auto"`` may run, the default first."""
        found = (self.default, *self.others.get(device_type, ()))
        exact = dtype in (torch.float32, torch.float64)
        return tuple(name for name in found if exact or name not in self.full_precision)

    def rule(self, device_type: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
        """What ``"auto"`` runs on a machine that was not tuned."""
        if device_type in self.rules and sizes:
            size, least, name = self.rules[device_type]
            if sizes[self.sizes.index(size)] >= least and name in self.candidates(device_type, dtype):
                return name
        return self.default


#: All operators by name.
OPERATORS: dict[str, Operator] = {}


def declare(operator: str, implementations: dict[str, Callable], default: str, **more: object) -> None:
    """Makes an operator known; the arguments are those of `Operator`."""
    OPERATORS[operator] = Operator(implementations, default, **more)

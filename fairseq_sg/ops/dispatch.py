"""The choice among the implementations of an operator.

Operators take ``implementation="auto"``, which leaves the choice to them, or the name of one. The environment variable
``FAIRSEQ_SG_IMPLEMENTATION=naive`` asks for one name in a whole program: every operator that has an implementation of
that name runs it, the others choose themselves. A name in the call wins over the variable. Code that `torch.compile`
has compiled does not read the variable again.

An operator that chooses itself runs what was measured to be fastest on this machine (`fairseq_sg.ops.tuning`). Where
nothing was measured, and in compiled code, its own rule decides. Within a transform of ``torch.func`` it runs one that
consists of torch's own operations (`Operator.transformed`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_sg.ops.operators import OPERATORS, TRITON, declare
from fairseq_sg.ops.transforms import transformed
from fairseq_sg.ops.tuning import tuning_on

AUTO = "auto"
ENVIRONMENT_VARIABLE = "FAIRSEQ_SG_IMPLEMENTATION"

__all__ = ["AUTO", "ENVIRONMENT_VARIABLE", "OPERATORS", "check_environment", "choose", "declare", "requested"]


def requested(operator: str) -> str | None:
    """The implementation of this operator that the environment variable asks for, None for none.

    Raises:
        ValueError: no operator has an implementation of that name.
    """
    check_environment()
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    return name if name in OPERATORS[operator].implementations else None


def check_environment() -> None:
    """Raises `ValueError` for a name in the environment variable that no operator has."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not name or name == AUTO:
        return
    known = {AUTO}.union(*(operator.implementations for operator in OPERATORS.values()))
    if name not in known:
        raise ValueError(
            f"environment variable {ENVIRONMENT_VARIABLE}: no operator has an implementation {name!r}; "
            f"choose one of: {', '.join(sorted(known))}"
        )


def choose(
    operator: str,
    implementation: str,
    like: Tensor,
    sizes: tuple[int, ...] = (),
    why_not_triton: Callable[[], str | None] | None = None,
) -> Callable:
    """The implementation that a call of an operator runs.

    Args:
        operator: its name.
        implementation: the argument of the call, ``"auto"`` or a name.
        like: an input, of the device and dtype of the call.
        sizes: the numbers that `Operator.sizes` names; none for a call whose choice nothing was measured for.
        why_not_triton: why the kernels cannot take this call, None where they can. It is asked only where they would
            run; an operator without kernels has none.

    Raises:
        ValueError: the operator has no implementation of the name in the call, or no operator that of the variable.
    """
    known = OPERATORS[operator]
    if implementation == AUTO:
        name = requested(operator)
        if name is None and transformed():
            name = known.transformed
        elif name is None:
            device, dtype = like.device, like.dtype
            name = known.rule(device.type, dtype, sizes)
            # A compiler sees sizes that are symbols, for which nothing was measured.
            if not torch.compiler.is_compiling() and (tuning := tuning_on(device)) is not None:
                rule, name = name, tuning.choice(operator, dtype, sizes, name)
                if name == TRITON and (why_not_triton is None or why_not_triton() is not None):
                    name = tuning.working(operator, dtype, rule)
        return known.implementations[name]
    if implementation not in known.implementations:
        raise ValueError(
            f"{operator} has no implementation {implementation!r}; "
            f"choose one of: {', '.join(sorted({AUTO, *known.implementations}))}"
        )
    return known.implementations[implementation]

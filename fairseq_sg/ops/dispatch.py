"""The choice among the implementations of an operator.

Operators take ``implementation="auto"``, which leaves the choice to them, or the name of one. The environment variable
``FAIRSEQ_SG_IMPLEMENTATION=naive`` asks for one name in a whole program: every operator that has an implementation of
that name runs it, the others choose themselves. A name in the call wins over the variable. Code that `torch.compile`
has compiled does not read the variable again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

AUTO = "auto"
ENVIRONMENT_VARIABLE = "FAIRSEQ_SG_IMPLEMENTATION"
#: operator -> its implementations by name.
OPERATORS: dict[str, Mapping[str, Callable]] = {}
#: operator -> (device type, implementation) -> when ``"auto"`` runs it there; "" where nothing else is said.
DEFAULTS: dict[str, dict[tuple[str, str], str]] = {}


def declare(
    operator: str,
    implementations: Mapping[str, Callable],
    automatic: str,
    sometimes: Mapping[tuple[str, str], str] | None = None,
) -> None:
    """Makes an operator and its implementations known.

    Args:
        operator: its name.
        implementations: by name.
        automatic: the implementation in torch that ``"auto"`` runs.
        sometimes: (device type, implementation) -> when ``"auto"`` runs that one there instead.
    """
    OPERATORS[operator] = implementations
    DEFAULTS[operator] = {("cpu", automatic): "", ("cuda", automatic): "", **(sometimes or {})}


def requested(operator: str) -> str | None:
    """The implementation of this operator that the environment variable asks for, None for none.

    Raises:
        ValueError: no operator has an implementation of that name.
    """
    check_environment()
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    return name if name in OPERATORS[operator] else None


def check_environment() -> None:
    """Raises `ValueError` for a name in the environment variable that no operator has."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    known = {AUTO}.union(*OPERATORS.values())
    if name and name not in known:
        raise ValueError(
            f"environment variable {ENVIRONMENT_VARIABLE}: no operator has an implementation {name!r}; "
            f"choose one of: {', '.join(sorted(known))}"
        )


def resolve(operator: str, implementation: str, automatic: str) -> Callable:
    """The implementation that a call of an operator runs.

    Args:
        operator: its name.
        implementation: the argument of the call, ``"auto"`` or a name.
        automatic: the name that the operator chooses itself.

    Raises:
        ValueError: the operator has no implementation of the name in the call, or no operator that of the variable.
    """
    implementations = OPERATORS[operator]
    if implementation == AUTO:
        return implementations[requested(operator) or automatic]
    if implementation not in implementations:
        raise ValueError(
            f"{operator} has no implementation {implementation!r}; "
            f"choose one of: {', '.join(sorted({AUTO, *implementations}))}"
        )
    return implementations[implementation]

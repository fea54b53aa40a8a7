"""Which implementation of an operator runs.

Operators take ``implementation="auto"``, which leaves the choice to them, or the name of one. To run a whole program
on one implementation, for instance to see whether a surprising result comes from a fast path, set the environment
variable ``FAIRSEQ_SG_IMPLEMENTATION=naive``, or, for some lines only, write ``with force_implementation("naive"):``.
Both take operators by name as well, ``relative_attention=flex,linear_attention=triton``, perhaps with one name for all
others. Both speak only where ``"auto"`` was asked for: a name given in the call wins over the context manager, which
wins over the environment. Code that `torch.compile` has compiled does not look again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

AUTO = "auto"
ENVIRONMENT_VARIABLE = "FAIRSEQ_SG_IMPLEMENTATION"
#: operator -> its implementations by name.
OPERATORS: dict[str, Mapping[str, Callable]] = {}

_forced: ContextVar[str | None] = ContextVar("forced_implementation", default=None)
_OTHERS = ""


def declare(operator: str, implementations: Mapping[str, Callable]) -> None:
    """Makes an operator known by its name."""
    OPERATORS[operator] = implementations


@contextmanager
def force_implementation(name: str) -> Iterator[None]:
    """Within the block, every operator called with ``implementation="auto"`` runs its implementation `name`.

    Args:
        name: an implementation's name; ``"auto"`` gives the choice back to the operators, whatever an enclosing block
            or the environment says. An operator that has no implementation of this name raises `ValueError` when it
            is called. Or ``operator=name`` for single operators, separated by commas; the others then choose
            themselves, unless there is one name for all of them, too.

    Raises:
        ValueError: an operator that does not exist, or has no implementation of its name.
    """
    _parsed(name, "force_implementation")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def is_forced() -> bool:
    """Whether the lines that are running are in a block of `force_implementation`."""
    return _forced.get() is not None


def requested(operator: str, implementation: str = AUTO) -> tuple[str, str]:
    """The name that counts for an operator (``"auto"`` where nobody asked for another), and who asked for it."""
    if implementation != AUTO:
        return implementation, "argument implementation"
    choices, asked_by = _choices()
    return choices.get(operator) or choices.get(_OTHERS, AUTO), asked_by


def requested_of(operator: str) -> str | None:
    """Who asks for an implementation of this operator by the operator's name, ``"environment variable … (…=flex)"``.

    For a caller that cannot leave its work to the operator, and is to say so.
    """
    choices, asked_by = _choices()
    return f"{asked_by} ({operator}={choices[operator]})" if choices.get(operator, AUTO) != AUTO else None


def check_environment() -> None:
    """Raises `ValueError` for a variable that no operator can follow."""
    choices, asked_by = _choices()
    name = choices.get(_OTHERS, AUTO)
    known = {AUTO}.union(*OPERATORS.values())
    if name not in known:
        raise ValueError(f"{asked_by}: no operator has an implementation {name!r}; there are {_list(known)}")


def resolve(operator: str, implementation: str, implementations: Mapping[str, Callable], automatic: str) -> Callable:
    """The function that an operator is to run.

    Args:
        operator: the operator's name.
        implementation: what the caller asked for: ``"auto"`` or a key of `implementations`.
        implementations: the operator's implementations by name.
        automatic: the key of `implementations` that the operator takes when nobody asks for another.

    Raises:
        ValueError: the operator has no implementation of the name asked for; the message lists the choices.
    """
    name, asked_by = requested(operator, implementation)
    if name == AUTO:
        return implementations[automatic]
    if name in implementations:
        return implementations[name]
    choices = _list({AUTO, *implementations})
    message = f"{operator} has no implementation {name!r} ({asked_by}); choose one of: {choices}"
    having = [f"{other}={name}" for other, known in OPERATORS.items() if name in known]
    if having and implementation == AUTO:
        message += f"; or ask it of the operators that have it, some of {','.join(having)}"
    raise ValueError(message)


def _choices() -> tuple[Mapping[str, str], str]:
    forced = _forced.get()
    if forced is not None:
        return _parsed(forced, "force_implementation"), "force_implementation"
    asked_by = f"environment variable {ENVIRONMENT_VARIABLE}"
    return _parsed(os.environ.get(ENVIRONMENT_VARIABLE, ""), asked_by), asked_by


@cache
def _parsed(choice: str, asked_by: str) -> Mapping[str, str]:
    """``"a=x,b=y,z"`` as {a: x, b: y, "": z}, checked as far as operators are named."""
    found: dict[str, str] = {}
    for part in choice.split(",") if choice else ():
        operator, named, name = part.strip().rpartition("=")
        operator, name = operator.strip(), name.strip()
        if not name or named and not operator or operator in found:
            raise ValueError(
                f"{asked_by} is {choice!r}: give one implementation for all operators, or one for each of some, such "
                f"as "
                "relative_attention=flex,linear_attention=triton"
            )
        if named and operator not in OPERATORS:
            raise ValueError(
                f"{asked_by} is {choice!r}: there is no operator {operator!r}; there are {_list(OPERATORS)}"
            )
        if named and name != AUTO and name not in OPERATORS[operator]:
            choices = _list({AUTO, *OPERATORS[operator]})
            raise ValueError(
                f"{asked_by} is {choice!r}: {operator} has no implementation {name!r}; choose one of: {choices}"
            )
        found[operator] = name
    return found


def _list(names) -> str:
    return ", ".join(sorted(names))

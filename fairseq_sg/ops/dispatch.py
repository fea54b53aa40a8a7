"""Which implementation of an operator runs.

Operators take ``implementation="auto"``, which leaves the choice to them, or the name of one. To run a whole program
on one implementation, for instance to see whether a surprising result comes from a fast path, set the environment
variable ``FAIRSEQ_SG_IMPLEMENTATION=naive``, or, for some lines only, write ``with force_implementation("naive"):``.
Both speak only where ``"auto"`` was asked for: a name given in the call wins over the context manager, which wins
over the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

AUTO = "auto"
ENVIRONMENT_VARIABLE = "FAIRSEQ_SG_IMPLEMENTATION"

_forced: ContextVar[str | None] = ContextVar("forced_implementation", default=None)


@contextmanager
def force_implementation(name: str) -> Iterator[None]:
    """Within the block, every operator called with ``implementation="auto"`` runs its implementation `name`.

    Args:
        name: an implementation's name; ``"auto"`` gives the choice back to the operators, whatever an enclosing block
            or the environment says. An operator that has no implementation of this name raises `ValueError` when it
            is called.
    """
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def requested(implementation: str) -> tuple[str, str]:
    """The name that counts (``"auto"`` where nobody asked for another), and who asked for it."""
    name, asked_by = implementation, "argument implementation"
    if name == AUTO:
        name, asked_by = _forced.get(), "force_implementation"
    if name is None:
        name, asked_by = os.environ.get(ENVIRONMENT_VARIABLE) or AUTO, f"environment variable {ENVIRONMENT_VARIABLE}"
    return name, asked_by


def resolve(operator: str, implementation: str, implementations: Mapping[str, Callable], automatic: str) -> Callable:
    """The function that an operator is to run.

    Args:
        operator: the operator's name, for the error message.
        implementation: what the caller asked for: ``"auto"`` or a key of `implementations`.
        implementations: the operator's implementations by name.
        automatic: the key of `implementations` that the operator takes when nobody asks for another.

    Raises:
        ValueError: the operator has no implementation of the name asked for; the message lists the choices.
    """
    name, asked_by = requested(implementation)
    if name == AUTO:
        return implementations[automatic]
    if name not in implementations:
        choices = ", ".join([AUTO, *sorted(implementations)])
        raise ValueError(f"{operator} has no implementation {name!r} ({asked_by}); choose one of: {choices}")
    return implementations[name]

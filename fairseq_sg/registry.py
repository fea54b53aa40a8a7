"""Registries of mechanisms: a name, a class, and the class's own options.

fairseq has registries for tasks, models and criteria, none for attentions, feedforward layers or feature maps. These
work
the same way: a decorator registers, a duplicate is refused, an unknown name is answered with the list of known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from fairseq_sg.errors import UsageError

T = TypeVar("T", bound=type)


class UnknownName(UsageError):
    """A name that no mechanism is registered under."""


class Registry(dict[str, type]):
    """Mechanisms of one kind by name.

    Args:
        kind: what is registered, as error messages call it (``"attention"``).
        option: the command-line option that chooses among them, for error messages (``"--encoder-attention"``).
    """

    def __init__(self, kind: str, option: str):
        super().__init__()
        self.kind = kind
        self.option = option
        #: Called after each registration: whoever shows the mechanisms' options hears of those that a user's module
        #: adds.
        self.watchers: list[Callable[[], None]] = []

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator. Raises ValueError when ``name`` is taken by another class."""

        def decorate(cls: T) -> T:
            known = self.setdefault(name, cls)
            if known is not cls:
                raise ValueError(
                    f"{self.kind} {name!r} is already registered, as {known.__module__}.{known.__qualname__}"
                )
            cls.registered_name = name
            for watcher in self.watchers:
                watcher()
            return cls

        return decorate

    def find(self, name: str) -> type:
        """The class registered as ``name``. Raises :class:`UnknownName` with the list of names."""
        if name not in self:
            raise UnknownName(f"unknown {self.kind} {name!r} ({self.option}): choose from {', '.join(sorted(self))}")
        return self[name]


def option_values(options: type | None, config: Any) -> dict[str, Any]:
    """The values that a configuration has for the fields of a mechanism's dataclass of ``options``, None being no
    options.
    """
    return {} if options is None else {f.name: getattr(config, f.name) for f in fields(options)}

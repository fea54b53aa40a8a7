"""Registries of mechanisms: a name, a class, and the class's own options.

fairseq has registries for tasks, models and criteria, none for attentions, feedforward layers or feature maps. These
work the same way: a decorator registers a class, a duplicate is refused, an unknown name is answered with the list of
known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from fairseq_sg.errors import UsageError

T = TypeVar("T", bound=type)


class UnknownName(UsageError):
    """A name that no mechanism is registered under."""


class Mechanism:
    """What every registered class has; the base class of a kind inherits it beside ``nn.Module``."""

    registered_name: ClassVar[str]
    #: Where the mechanism is published, for ``python -m fairseq_sg.options``; empty where no paper has it.
    paper: ClassVar[str] = ""
    #: Dataclass of options: its fields are command-line options and keyword arguments of the class. None: no options.
    #: A subclass without a declaration of its own has the options of its base class.
    options: ClassVar[type | None] = None
    #: Losses that the class returns in training: name -> weight in the criterion unless ``--aux-loss-weights`` has one.
    emitted_losses: ClassVar[Mapping[str, float]] = {}
    #: Options of a model that the class is not defined with: the values of an architecture for them are left out.
    excludes: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def keyword_arguments(cls, config: Any) -> dict[str, Any]:
        """The keyword arguments that ``config`` (an attribute for each option) gives the class: its options."""
        return {name: getattr(config, name) for name in option_names(cls.options)}

    @classmethod
    def option_classes(cls, config: Any) -> set[type]:
        """The classes whose options are in use: this class, and mechanisms that its options choose."""
        return {cls}


class Registry(dict[str, type]):
    """Mechanisms of one kind by name.

    Args:
        kind: the name of the kind in error messages (``"attention"``).
        option: the command-line option that chooses among them, for error messages (``"--encoder-attention"``).
    """

    def __init__(self, kind: str, option: str):
        super().__init__()
        self.kind = kind
        self.option = option
        #: Called after each registration, so that the options of a user's own mechanism are shown too.
        self.watchers: list[Callable[[], None]] = []

    @property
    def choosers(self) -> list[str]:
        """The names of the options that choose among them: ``encoder_attention``, …"""
        return [flag.removeprefix("--").replace("-", "_") for flag in self.option.split(", ")]

    def with_option(self, option: str) -> set[str]:
        """The names of the mechanisms that declare an option."""
        return {name for name, cls in self.items() if option in option_names(cls.options)}

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator. Raises ValueError when ``name`` is taken by another class, or the class is no mechanism."""

        def decorate(cls: T) -> T:
            known = self.get(name, cls)
            if known is not cls:
                raise ValueError(
                    f"{self.kind} {name!r} is already registered, as {known.__module__}.{known.__qualname__}: choose "
                    "another name"
                )
            if not issubclass(cls, Mechanism):
                raise ValueError(
                    f"{self.kind} {name!r}: {cls.__qualname__} is not derived from the base class of its kind "
                    "(docs/extending.md)"
                )
            self[name] = cls
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

    def build(self, name: str, config: Any, *args: Any, **kwargs: Any) -> Any:
        """An instance of the :class:`Mechanism` ``name``: ``args`` and ``kwargs``, and its options from ``config``.

        Raises :class:`UnknownName`, or UsageError for a wrong option.
        """
        cls = self.find(name)
        return cls(*args, **cls.keyword_arguments(config), **kwargs)


def option_names(options: type | None) -> list[str]:
    """The names of the fields of a dataclass of options; [] for None."""
    return [] if options is None else [f.name for f in fields(options)]


def emitted_losses(model: Any) -> dict[str, float] | None:
    """The losses that the mechanisms in ``model`` return in training, by name, each with its default weight.

    None for a model without mechanisms, of which nothing is known.
    """
    modules = model.modules() if hasattr(model, "modules") else ()
    declared = [module.emitted_losses for module in modules if isinstance(module, Mechanism)]
    return {name: weight for losses in declared for name, weight in losses.items()} if declared else None

"""Configurations of models: one flat dataclass, the model's own fields with the options of every registered mechanism.

Each mechanism declares its options as a dataclass in its own file; here they are joined, so that the command line,
architectures and hydra all see them, and checked: an option that no chosen mechanism uses is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fairseq_sg.errors import UsageError
from fairseq_sg.registry import Registry


def option_classes(registries: Iterable[Registry]) -> Iterator[tuple[str, type]]:
    """(mechanism's name, its dataclass of options), for every mechanism that has options."""
    for registry in registries:
        for name, cls in registry.items():
            if cls.options is not None:
                yield f"{name} {registry.kind}", cls.options


def join_options(own: type, registries: Iterable[Registry], architectures: Mapping[str, Mapping[str, Any]]) -> type:
    """A FairseqDataclass with the fields of ``own`` and of all mechanisms.

    A field that some architecture sets is None in it until ``as_dataclass`` puts the declared default: under hydra an
    architecture could not tell a default from a value of the user's.

    Raises:
        TypeError: two mechanisms declare an option of the same name with different types or defaults.
    """
    joined: dict[str, tuple[str, Any, dataclasses.Field]] = {}
    hints = typing.get_type_hints(own)
    for f in dataclasses.fields(own):
        joined[f.name] = (own.__name__, hints[f.name], f)
    for mechanism, options in option_classes(registries):
        hints = typing.get_type_hints(options)
        for f in dataclasses.fields(options):
            owner, kind, known = joined.setdefault(f.name, (mechanism, hints[f.name], f))
            if (kind, known.default) != (hints[f.name], f.default):
                raise TypeError(f"option {f.name!r} of {mechanism} differs from the one of {owner}")
    preset = {name for values in architectures.values() for name in values}
    declared = {name: f.default for name, (_, _, f) in joined.items()}
    fields = [
        (name, _optional(kind), dataclasses.field(default=None, metadata=_named_default(f)))
        if name in preset
        else (
            name,
            _optional(kind) if type(None) in typing.get_args(kind) else kind,
            dataclasses.field(default=f.default, metadata=f.metadata),
        )
        for name, (_, kind, f) in joined.items()
    ]
    namespace = {"__doc__": own.__doc__, "declared": declared}
    return dataclasses.make_dataclass(own.__name__, fields, bases=(FairseqDataclass,), namespace=namespace)


class Configuration:
    """The configuration class of a model, kept up to date with the registries: a mechanism that a user's own module
    registers has its options on the command line too, and in checkpoints.

    Args: those of :func:`join_options`.
    """

    def __init__(self, own: type, registries: Sequence[Registry], architectures: Mapping[str, Mapping[str, Any]]):
        self.own, self.registries, self.architectures = own, registries, architectures
        self.dataclass = join_options(own, registries, architectures)

    def follow(self, model: type, name: str) -> None:
        """From now on, tells fairseq of every new option of the registered ``model``."""

        def refresh() -> None:
            self.dataclass = join_options(self.own, self.registries, self.architectures)
            # The three places in which fairseq.models.register_model keeps the dataclass.
            setattr(model, "__dataclass", self.dataclass)
            MODEL_DATACLASS_REGISTRY[name] = self.dataclass
            node = self.dataclass()
            node._name = name
            ConfigStore.instance().store(name=name, group="model", node=node, provider="fairseq")

        for registry in self.registries:
            registry.watchers.append(refresh)

    def read(self, cfg: Any) -> Any:
        """``as_dataclass`` of the current class."""
        return as_dataclass(self.dataclass, cfg)


def _optional(kind: Any) -> Any:
    """``kind | None`` in the only form that fairseq's parser reads, for ``int | None`` as for ``int``."""
    return Optional[kind]  # noqa: UP045


def _named_default(f: dataclasses.Field) -> dict[str, Any]:
    return {**f.metadata, "help": f"{f.metadata['help']} (default: the architecture's, or {f.default})"}


def as_dataclass(config_class: type, cfg: Any) -> Any:
    """A plain instance of ``config_class`` from a Namespace, a DictConfig (with missing keys or not) or a dataclass.

    What is missing, or None, has the default that its owner declared.
    """
    values = {}
    for f in dataclasses.fields(config_class):
        if f.name.startswith("_"):
            continue
        value = None if _missing(cfg, f.name) else getattr(cfg, f.name)
        value = config_class.declared[f.name] if value is None else value
        values[f.name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return config_class(**values)


def _missing(cfg: Any, name: str) -> bool:
    return name not in cfg if OmegaConf.is_config(cfg) else not hasattr(cfg, name)


def refuse_unused_options(config: Any, registries: Iterable[Registry], used: set[type]) -> None:
    """Raises ValueError for an option that was set although no mechanism in ``used`` has it."""
    takers: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    for mechanism, options in option_classes(registries):
        for f in dataclasses.fields(options):
            takers.setdefault(f.name, []).append(mechanism)
            defaults[f.name] = f.default
    taken = {f.name for cls in used if cls.options is not None for f in dataclasses.fields(cls.options)}
    for name, mechanisms in takers.items():
        value = getattr(config, name)
        if name not in taken and value != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {value} has no effect on the chosen mechanisms; it is an option of: {', '.join(mechanisms)}"
            )

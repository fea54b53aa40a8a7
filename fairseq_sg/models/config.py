"""Configurations of models: one flat dataclass, the model's own fields with the options of every registered mechanism.

Each mechanism declares its options as a dataclass in its own file. They are joined here, so that the command line,
architectures and hydra all see them. An option that no chosen mechanism uses is an error, never ignored; so is a
removed option at another value than its old default.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY, register_model, register_model_architecture
from fairseq.registry import REGISTRIES
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf, open_dict

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.ops.dispatch import check_environment
from fairseq_sg.registry import Registry, option_names

#: Removed options of models and criteria: name -> (old default, what holds instead).
REMOVED: dict[str, tuple[Any, str]] = {
    "orthogonality_heads": ("separate", "the orthogonality loss takes each head's Values by themselves"),
    "orthogonality_head_reduction": ("mean", "the orthogonality loss is the mean over the heads"),
    "orthogonality_batch_reduction": ("mean", "the orthogonality loss is the mean over the sentences"),
    "orthogonality_layer_reduction": ("sum", "the orthogonality loss is the sum over the applications of layers"),
    "orthogonality_padding": ("exclude", "the orthogonality loss leaves out padding"),
    "outer_product": ("upper", "taylor and rebased have the upper triangle of x xᵀ, whose similarities are the same"),
    "galerkin_output_projection": (False, "galerkin and fourier attention have no output projection"),
    "log_length_of": ("valid", "--logit-scale log_length counts the visible keys that are not padding"),
    "attention_output_dropout": (0.0, "no dropout precedes the output projection of an attention"),
    "copy_gate_bias": (-3.0, "the copy gate's last bias starts at −3"),
    "no_output_bias": (False, "the output layer has a bias"),
    "tied_output": (False, "the output matrix of a language model is not its embedding table"),
    "output_dropout": (None, "the dropout before a language model's output layer is --dropout"),
}


def removed(name: str) -> str | None:
    """Why an option is removed, as one line for the user; None for an option that is not in ``REMOVED``."""
    if name not in REMOVED:
        return None
    return f"{ranges.flag(name)} was removed: {REMOVED[name][1]}; leave it out"


def drop_removed(cfg: Any, declared: type) -> Any:
    """``cfg``, a Namespace or DictConfig that a checkpoint may have kept, without removed options.

    A DictConfig is changed in place. A Namespace is not: its readers look up declared options alone.

    Args:
        cfg: options of a model or a criterion.
        declared: the dataclass of the options that there are; an option that it declares is not a removed one.

    Raises:
        UsageError: a removed option has another value than its old default, so that this code cannot do the same.
    """
    current = {f.name for f in dataclasses.fields(declared)}
    for name, (default, now) in REMOVED.items():
        if name in current or _missing(cfg, name):
            continue
        value = getattr(cfg, name)
        if value is not None and value != default:
            raise UsageError(
                f"{ranges.flag(name)} is {value} in this configuration, and the option was removed: {now}. For a "
                f"checkpoint that was trained with it, use the version of fairseq_sg that it was trained with"
            )
        if OmegaConf.is_config(cfg):
            with open_dict(cfg):
                del cfg[name]
    return cfg


def options_by_mechanism(registries: Iterable[Registry]) -> Iterator[tuple[str, type]]:
    """(mechanism's name, its dataclass of options), for every mechanism that has options."""
    for registry in registries:
        for name, cls in registry.items():
            if cls.options is not None:
                yield f"{name} {registry.kind}", cls.options


#: The groups of options of fairseq that a training does not have.
OF_GENERATION = ("common_eval", "generation", "eval_lm", "interactive")


def options_of_fairseq() -> set[str]:
    """The options of fairseq's trainings, optimizers and schedules. An option of a model would have their values."""
    groups = vars(FairseqConfig()).items()  # classes, and instances in other versions
    declared = [group for name, group in groups if name not in OF_GENERATION]
    for kind in ("optimizer", "lr_scheduler"):
        declared += REGISTRIES.get(kind, {}).get("dataclass_registry", {}).values()
    found = {f.name for one in declared if dataclasses.is_dataclass(one) for f in dataclasses.fields(one)}
    return found | {"arch", "task", *REGISTRIES}


def join_options(own: type, registries: Iterable[Registry], architectures: Mapping[str, Mapping[str, Any]]) -> type:
    """A FairseqDataclass with the fields of ``own`` and of all mechanisms.

    A field that some architecture sets is None until ``as_dataclass`` fills in the declared default: under hydra, an
    architecture cannot tell a default from a value that the user gave.

    Raises:
        TypeError: two mechanisms declare an option of the same name with different types or defaults, or one declares
            an option of fairseq.
    """
    taken = options_of_fairseq()
    joined: dict[str, tuple[str, Any, dataclasses.Field]] = {}
    hints = typing.get_type_hints(own)
    for f in dataclasses.fields(own):
        joined[f.name] = (own.__name__, hints[f.name], f)
    for mechanism, options in options_by_mechanism(registries):
        hints = typing.get_type_hints(options)
        for f in dataclasses.fields(options):
            if f.name in taken:
                raise TypeError(f"option {f.name!r} of {mechanism} is an option of fairseq: choose another name")
            owner, kind, known = joined.setdefault(f.name, (mechanism, hints[f.name], f))
            if (kind, known.default) != (hints[f.name], f.default):
                raise TypeError(
                    f"option {f.name!r} of {mechanism} differs from the one of {owner}: choose another name"
                )
    preset = {name for values in architectures.values() for name in values}
    declared = {name: f.default for name, (_, _, f) in joined.items()}
    fields = []
    for name, (_, kind, f) in joined.items():
        if name in preset or type(None) in typing.get_args(kind):
            kind = Optional[kind]  # noqa: UP045  (the only form that fairseq's parser reads)
        default, metadata = (None, _named_default(f)) if name in preset else (f.default, f.metadata)
        fields.append((name, kind, dataclasses.field(default=default, metadata=metadata)))
    namespace = {"__doc__": own.__doc__, "declared": declared}
    return dataclasses.make_dataclass(own.__name__, fields, bases=(FairseqDataclass,), namespace=namespace)


#: The configurations of the registered models, by name.
CONFIGURATIONS: dict[str, Configuration] = {}


class Configuration:
    """The configuration class of a model, updated at each registration.

    So a mechanism that a user's own module registers has its options on the command line, under hydra and in
    checkpoints too. Args: those of :func:`join_options`.
    """

    def __init__(self, own: type, registries: Sequence[Registry], architectures: Mapping[str, Mapping[str, Any]]):
        self.own, self.registries, self.architectures = own, registries, architectures
        self.dataclass = join_options(own, registries, architectures)
        self.resolve: Callable[[Any], Any] = self.read

    def register(self, name: str, resolve: Callable[[Any], Any] | None = None) -> Callable[[type], type]:
        """A decorator that registers a model and its architectures with fairseq.

        What fairseq knows of its options is updated at every later registration of a mechanism. ``resolve`` checks the
        model's options, and fills them in.
        """
        self.resolve = resolve or self.read

        def register(model: type) -> type:
            register_model(name, dataclass=self.dataclass)(model)
            CONFIGURATIONS[name] = self
            for architecture, values in self.architectures.items():
                register_model_architecture(name, architecture)(partial(self.fill, values=values))
            for registry in self.registries:
                registry.watchers.append(partial(self._refresh, model, name))
            return model

        return register

    def _refresh(self, model: type, name: str) -> None:
        self.dataclass = join_options(self.own, self.registries, self.architectures)
        # fairseq.models.register_model keeps the dataclass in three places; it has no function to replace it.
        setattr(model, "__dataclass", self.dataclass)
        MODEL_DATACLASS_REGISTRY[name] = self.dataclass
        node = self.dataclass()
        node._name = name
        ConfigStore.instance().store(name=name, group="model", node=node, provider="fairseq")

    def read(self, cfg: Any) -> Any:
        """``as_dataclass`` of the current class.

        Raises UsageError for an implementation of operators that the environment names and none has.
        """
        try:
            check_environment()
        except ValueError as error:
            raise UsageError(str(error)) from error
        return as_dataclass(self.dataclass, cfg)

    def is_of_user(self, cfg: Any, name: str) -> bool:
        """Whether ``cfg`` has a value of ``name`` that is neither the default nor that of its architecture."""
        value = None if _missing(cfg, name) else getattr(cfg, name)
        architecture = self.architectures.get(getattr(cfg, "_name", None) or getattr(cfg, "arch", None), {})
        return value not in (None, self.dataclass.declared[name], architecture.get(name))

    def fill(self, cfg: Any, values: Mapping[str, Any]) -> None:
        """Sets the ``values`` of an architecture that the user has not set.

        Options that no mechanism of the user's choice has, or that one excludes, are left out: they would be refused.
        In ``values``, the option that chooses a mechanism comes before those of the mechanism.
        """
        for name, value in values.items():
            if getattr(cfg, name, None) is None and self._is_of_use(cfg, name):
                setattr(cfg, name, value)

    def _is_of_use(self, cfg: Any, name: str) -> bool:
        """Whether ``name`` is no option of a mechanism, or of one that is chosen, and no chosen one excludes it."""
        for registry in self.registries:
            if any(name in registry[chosen].excludes for chosen in self._chosen(cfg, registry) & set(registry)):
                return False
        takers = [(registry, registry.with_option(name)) for registry in self.registries]
        takers = [(registry, names) for registry, names in takers if names]
        return not takers or any(names & self._chosen(cfg, registry) for registry, names in takers)

    def _chosen(self, cfg: Any, registry: Registry) -> set[str]:
        """The mechanisms of one kind that are chosen so far, by the user, the architecture or default."""
        chosen: set[str] = set()
        for option in set(registry.choosers) & set(self.dataclass.declared):
            value = getattr(cfg, option, None) or self.dataclass.declared[option] or ""
            chosen.update(part.strip() for part in value.split(","))
        return chosen


def _named_default(f: dataclasses.Field) -> dict[str, Any]:
    return {**f.metadata, "help": f"{f.metadata['help']} (default: the architecture's, or {f.default})"}


def as_dataclass(config_class: type, cfg: Any) -> Any:
    """A plain instance of ``config_class`` from a Namespace, a DictConfig (with missing keys or not) or a dataclass.

    A value that is missing, or None, becomes the default that its owner declared. Raises UsageError for a removed
    option at another value than its old default.
    """
    drop_removed(cfg, config_class)
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
    """Raises UsageError for an option that was set although no mechanism in ``used`` has it."""
    takers: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    for mechanism, options in options_by_mechanism(registries):
        for f in dataclasses.fields(options):
            takers.setdefault(f.name, []).append(mechanism)
            defaults[f.name] = f.default
    taken = {name for cls in used for name in option_names(cls.options)}
    for name, mechanisms in takers.items():
        value = getattr(config, name)
        if name not in taken and value != defaults[name]:
            raise UsageError(
                f"{ranges.flag(name)} {value} has no effect on the chosen mechanisms; it is an option of: "
                f"{', '.join(mechanisms)}"
            )

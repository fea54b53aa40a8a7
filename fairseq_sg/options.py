"""``fairseq-sg options [NAME]``: the options of this plugin, grouped by owner, then fairseq's own.

With NAME, only the options of that mechanism (``linear``), architecture, criterion, task or optimizer, or the option of
that name (``--qk-norm`` or ``qk_norm``).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

from fairseq_sg import ranges


@dataclass
class Section:
    """Options that go together; ``names`` are the names of their owners."""

    title: str
    names: set[str]
    options: dict[str, Field] = field(default_factory=dict)


def plugin_sections() -> list[Section]:
    """Sizes and roles, each mechanism, criteria, tasks, optimizers."""
    return [*_model_sections(), *_mechanism_sections(), *_registered_sections()]


def _model_sections() -> Iterator[Section]:
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    from fairseq_sg.models import sg_encoder, sg_lstm, sg_transformer, sg_transformer_lm

    models = {m.__name__.rpartition(".")[2]: m for m in (sg_transformer, sg_encoder, sg_transformer_lm, sg_lstm)}
    names = {model: {model, *ARCH_MODEL_INV_REGISTRY[model]} for model in models}
    owned = [(model, module.configuration.own) for model, module in models.items()]
    for declared, takers, options in _by_declaration(owned):
        summary = (declared.__doc__ or "").splitlines()[0].partition(";")[0].rstrip(".").replace("``", "")
        title = f"sizes and roles: {', '.join(takers)} — {summary}"
        yield Section(title, set().union(*(names[taker] for taker in takers)), options)


def _mechanism_sections() -> Iterator[Section]:
    from fairseq_sg.models.checks import MECHANISMS

    kinds = {(registry.kind, name): cls for registry in MECHANISMS for name, cls in registry.items()}
    owned = [(mechanism, cls.options) for mechanism, cls in kinds.items() if cls.options is not None]
    for _, takers, options in _by_declaration(owned):
        titles = []
        for kind in dict.fromkeys(kind for kind, _ in takers):
            names = [name for k, name in takers if k == kind]
            everything = len(names) > 1 and len(names) == sum(k == kind for k, _ in kinds)
            titles.append(f"{kind} {'of every kind' if everything else ', '.join(names)}")
        yield Section("; ".join(titles), {name for _, name in takers}, options)
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        names = sorted(name for (k, name), cls in kinds.items() if k == kind and cls.options is None)
        if names:
            yield Section(f"{kind} {', '.join(names)}: no options of their own", set(names))


def _registered_sections() -> Iterator[Section]:
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    chosen = {kind: REGISTRIES[kind] for kind in ("criterion", "optimizer", "scoring")}
    kinds = {kind: (registry["registry"], registry["dataclass_registry"]) for kind, registry in chosen.items()}
    for kind, (classes, dataclasses) in {**kinds, "task": (TASK_REGISTRY, TASK_DATACLASS_REGISTRY)}.items():
        own = [(name, dataclasses[name]) for name, cls in classes.items() if cls.__module__.startswith("fairseq_sg")]
        for _, takers, options in _by_declaration(own):
            yield Section(f"{kind} {', '.join(takers)}", set(takers), options)


def fairseq_sections() -> Iterator[Section]:
    """The options of fairseq's own that every training has."""
    from fairseq.dataclass.configs import FairseqConfig

    for f in fields(FairseqConfig):
        if is_dataclass(f.type) and f.name in (
            "common",
            "dataset",
            "optimization",
            "checkpoint",
            "distributed_training",
        ):
            yield Section(f"fairseq's own: {f.name}", set(), _shown(fields(f.type)))


def _by_declaration(owned: Iterable[tuple[Any, type]]) -> list[tuple[type, list[Any], dict[str, Field]]]:
    """(owner, class of options) pairs -> (class that declares options, its owners, the options), each option once."""
    takers: dict[type, list[Any]] = {}
    for who, options in owned:
        for cls in reversed(options.__mro__):
            if is_dataclass(cls):
                takers.setdefault(cls, []).append(who)
    found = []
    for cls, who in takers.items():
        options = _shown(f for f in fields(cls) if f.name in cls.__dict__.get("__annotations__", {}))
        if options:
            found.append((cls, who, options))
    return found


def _shown(declared: Iterable[Field]) -> dict[str, Field]:
    return {f.name: f for f in declared if f.metadata.get("help") and not f.name.startswith("_")}


def choices(option: str) -> list[str]:
    """The mechanisms that an option chooses from; [] for an option that does not choose a mechanism."""
    from fairseq_sg.models.checks import MECHANISMS

    registries = [r for r in MECHANISMS if ranges.flag(option) in r.option.split(", ")]
    return sorted(name for registry in registries for name in registry)


def sizes_of(architecture: str | None) -> dict[str, Any]:
    """The options that an architecture of ours sets."""
    from fairseq_sg.models import architectures as a

    groups = (a.ARCHITECTURES, a.ENCODER_ARCHITECTURES, a.LSTM_ARCHITECTURES, a.LM_ARCHITECTURES)
    return next((group[architecture] for group in groups if architecture in group), {})


def described(section: Section, architecture: str | None = None) -> str:
    """A section as text: each option with its choices, its range, and its default in the architecture."""
    sizes = sizes_of(architecture)
    lines = [section.title]
    for name, f in section.options.items():
        known, limits = choices(name), ranges.wording(f.metadata)
        notes = [f"one of {', '.join(known)}"] if known else []
        notes += [limits] if limits else []
        default = f.default if f.default is not MISSING else f.default_factory()
        if name in sizes:
            notes.append(f"default: {sizes[name]}, the one of {architecture}")
        elif "(default:" not in f.metadata["help"] and default is not None and not str(default).startswith("${"):
            shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
            notes.append(f"default: {'none' if shown == '' else shown}")
        text = " ".join(f.metadata["help"].split()) + (f" ({'; '.join(notes)})" if notes else "")
        lines.append(f"  {ranges.flag(name) if name != 'data' else 'DATA'}")
        lines += textwrap.wrap(text, 100, break_on_hyphens=False, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def sections_of(name: str, sections: Iterable[Section]) -> list[Section]:
    """The sections of an owner, or the option of that name alone."""
    option = name.removeprefix("--").replace("-", "_")
    found = []
    for section in sections:
        if name in section.names:
            found.append(section)
        elif option in section.options:
            found.append(Section(section.title, section.names, {option: section.options[option]}))
    return found


def main(line: Sequence[str] | None = None) -> int:
    """Prints the options. Returns the exit status: 2 for an unknown name."""
    arguments = list(sys.argv[1:] if line is None else line)
    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg.command_line import nearest

    sections = [*plugin_sections(), *fairseq_sections()]
    if len(arguments) > 1 or set(arguments) & {"-h", "--help"}:
        print(__doc__.strip())
        return 0 if len(arguments) == 1 else 2
    chosen = sections_of(arguments[0], sections) if arguments else sections
    if not chosen:
        known = set().union(*(section.names | set(map(ranges.flag, section.options)) for section in sections))
        meant = nearest(arguments[0], known)
        print(f"error: {arguments[0]!r} is no name of an option or of an owner of options: {meant}", file=sys.stderr)
        return 2
    architecture = arguments[0] if arguments else None
    print("\n".join(described(section, architecture) for section in chosen), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

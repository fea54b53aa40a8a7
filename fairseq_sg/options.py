"""The options of fairseq_sg, by the mechanism that they belong to.

fairseq-sg options              all options, then fairseq's own
fairseq-sg options linear       those of a mechanism, architecture, criterion, task, optimizer or schedule
fairseq-sg options --qk-norm    one option
fairseq-sg options --markdown   the page docs/options.md

With --user-dir DIR behind, those of mechanisms of your own, too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from fairseq_sg import ranges
from fairseq_sg.errors import exit_code
from fairseq_sg.registry import Mechanism, Registry

#: kind of owner -> its heading in docs/options.md, and the page that explains it, if one does.
CHAPTERS = {
    "model": ("Models", "architecture.md"),
    "attention": ("Attention", "attention.md#kinds"),
    "feature map": ("Feature maps of linear attention", "attention.md#feature-maps---feature-map"),
    "query/key normalization": ("Normalization of Queries and Keys", "attention.md#feature-maps---feature-map"),
    "position": ("Positions", "attention.md#positions"),
    "update": ("Updates", "attention.md#updates"),
    "depth": ("Depth", "attention.md#depth"),
    "norm": ("Norms", "attention.md#norms"),
    "feedforward layer": ("Feedforward layers", "feedforward.md"),
    "controller": ("Controllers of a memory", "memory.md"),
    "criterion": ("Criteria", "attention.md#the-orthogonality-loss"),
    "optimizer": ("Optimizers", ""),
    "lr_scheduler": ("Learning rate schedules", "operators.md#the-schedule"),
    "scoring": ("Scoring", ""),
    "task": ("Tasks", ""),
}


class Owner(NamedTuple):
    """Something with a name on the command line that may have options: a mechanism, an architecture, a criterion, …

    Attributes:
        kind: a key of ``CHAPTERS``.
        flags: the options that choose it (``--encoder-attention``).
        paper: where it is published; empty where it is not.
    """

    kind: str
    name: str
    flags: tuple[str, ...]
    paper: str = ""

    def heading(self) -> str:
        """``feature map elu, chosen by --feature-map (Katharopoulos et al. 2020, eq. 7)``."""
        return f"{self.kind} {self.name}, chosen by {', '.join(self.flags)}{f' ({self.paper})' if self.paper else ''}"


@dataclass
class Section:
    """Options that go together; ``names`` are the names of their owners, which are of one ``kind`` or more."""

    title: str
    names: set[str]
    options: dict[str, Field] = field(default_factory=dict)
    kind: str = ""


def owners() -> list[Owner]:
    """Everything of the plugin that a name on the command line chooses."""
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    from fairseq_sg.models.checks import REGISTRIES

    models = [name for name in ARCH_MODEL_INV_REGISTRY if name.startswith("sg_")]
    architectures = dict.fromkeys(arch for model in models for arch in (model, *ARCH_MODEL_INV_REGISTRY[model]))
    found = [Owner("model", name, ("--arch",)) for name in architectures]
    for registry in REGISTRIES:
        for name, cls in registry.items():
            found.append(Owner(registry.kind, name, _choosers(registry, cls), cls.paper))
    for kind, (classes, _) in _registered().items():
        found += [Owner(kind, name, (ranges.flag(kind),), getattr(cls, "paper", "")) for name, cls in classes.items()]
    return found


def _choosers(registry: Registry, cls: type[Mechanism]) -> tuple[str, ...]:
    """The options that can choose a mechanism: an attention has one for each of its ``roles``."""
    roles = getattr(cls, "roles", None)
    options = (name for name in registry.choosers if roles is None or name.partition("_")[0] in roles)
    return tuple(map(ranges.flag, options))


def plugin_sections() -> list[Section]:
    """Sizes and roles, each mechanism, criteria, tasks, optimizers."""
    return [*_model_sections(), *_mechanism_sections(), *_registered_sections()]


def _model_sections() -> Iterator[Section]:
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    from fairseq_sg.models.config import CONFIGURATIONS

    names = {model: {model, *ARCH_MODEL_INV_REGISTRY[model]} for model in CONFIGURATIONS}
    owned = [(model, configuration.own) for model, configuration in CONFIGURATIONS.items()]
    for declared, takers, options in _by_declaration(owned):
        summary = (declared.__doc__ or "").splitlines()[0].partition(";")[0].rstrip(".").replace("``", "")
        title = summary if summary.endswith(takers[0]) else f"{summary}: {', '.join(takers)}"
        yield Section(title, set().union(*(names[taker] for taker in takers)), options, "model")


def _mechanism_sections() -> Iterator[Section]:
    from fairseq_sg.models.checks import REGISTRIES

    kinds = {(registry.kind, name): cls for registry in REGISTRIES for name, cls in registry.items()}
    owned = [(mechanism, cls.options) for mechanism, cls in kinds.items() if cls.options is not None]
    for _, takers, options in _by_declaration(owned):
        titles = []
        for kind in dict.fromkeys(kind for kind, _ in takers):
            names = [name for k, name in takers if k == kind]
            everything = len(names) > 1 and len(names) == sum(k == kind for k, _ in kinds)
            titles.append(f"{kind} {'of every kind' if everything else ', '.join(names)}")
        yield Section("; ".join(titles), {name for _, name in takers}, options, takers[0][0])
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        names = sorted(name for (k, name), cls in kinds.items() if k == kind and cls.options is None)
        if names:
            yield Section(f"{kind} {', '.join(names)}: no options of their own", set(names), kind=kind)


def _registered_sections() -> Iterator[Section]:
    for kind, (classes, dataclasses) in _registered().items():
        for declared, takers, options in _by_declaration((name, dataclasses[name]) for name in classes):
            own = declared.__module__.startswith("fairseq_sg")
            title = f"{kind.replace('lr_scheduler', 'schedule')} {', '.join(takers)}"
            title += "" if own else f": options of fairseq's {kind}"
            refused = [getattr(classes[taker], "refused", {}) for taker in takers]
            options = {name: f for name, f in options.items() if not all(name in names for names in refused)}
            yield Section(title, set(takers), options, kind)


def _registered() -> dict[str, tuple[dict[str, type], Mapping[str, type]]]:
    """kind -> (the plugin's classes by name, fairseq's dataclasses of options by name)."""
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    chosen = {kind: REGISTRIES[kind] for kind in ("criterion", "optimizer", "lr_scheduler", "scoring")}
    kinds = {kind: (registry["registry"], registry["dataclass_registry"]) for kind, registry in chosen.items()}
    kinds["task"] = TASK_REGISTRY, TASK_DATACLASS_REGISTRY
    return {
        kind: ({name: cls for name, cls in classes.items() if cls.__module__.startswith("fairseq_sg")}, dataclasses)
        for kind, (classes, dataclasses) in kinds.items()
    }


def fairseq_sections() -> Iterator[Section]:
    """The options of fairseq's own that every training has."""
    from fairseq.dataclass.configs import FairseqConfig

    for f in fields(FairseqConfig):
        if f.name in ("common", "dataset", "optimization", "checkpoint", "distributed_training"):
            yield Section(f"fairseq's own: {f.name}", set(), _shown(fields(f.type)))


def _by_declaration(owned: Iterable[tuple[Any, type]]) -> list[tuple[type, list[Any], dict[str, Field]]]:
    """(owner, class of options) pairs -> (class that declares options, its owners, the options).

    What all owners declare again, with another default or help, is left out of the class that declares it first.
    """
    takers: dict[type, list[tuple[Any, type]]] = {}
    for who, options in owned:
        for cls in reversed(options.__mro__):
            if is_dataclass(cls):
                takers.setdefault(cls, []).append((who, options))
    found = []
    for cls, pairs in takers.items():
        declared = (f for f in fields(cls) if any(_declaring(options, f.name) is cls for _, options in pairs))
        options = _shown(declared)
        if options:
            found.append((cls, [who for who, _ in pairs], options))
    return found


def _declaring(options: type, name: str) -> type:
    """The class whose declaration of an option a class of options has."""
    return next(cls for cls in options.__mro__ if name in cls.__dict__.get("__annotations__", {}))


def _shown(declared: Iterable[Field]) -> dict[str, Field]:
    return {f.name: f for f in declared if f.metadata.get("help") and not f.name.startswith("_")}


def choices(option: str) -> list[str]:
    """The mechanisms that an option chooses from; [] for an option that does not choose a mechanism."""
    from fairseq_sg.models.checks import REGISTRIES

    role = option.removesuffix("_attention")
    return sorted(
        name
        for registry in REGISTRIES
        if option in registry.choosers
        for name, cls in registry.items()
        if role in getattr(cls, "roles", {role})
    )


def sizes_of(architecture: str | None) -> dict[str, Any]:
    """The options that an architecture of ours sets."""
    return next((group[architecture] for group in architectures().values() if architecture in group), {})


def architectures() -> dict[str, dict[str, dict[str, Any]]]:
    """model -> its architectures -> the options that each of them sets."""
    from fairseq_sg.models.config import CONFIGURATIONS

    return {model: dict(configuration.architectures) for model, configuration in CONFIGURATIONS.items()}


class Described(NamedTuple):
    """An option in words; a part that does not apply is empty."""

    flag: str
    help: str
    values: str
    default: str


def in_words(value: Any) -> str:
    """The value of an option for a reader; empty for None."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value) or "none"


def describe(name: str, f: Field) -> Described:
    """The words of an option. A default that its help has in words, "(default: …)", is moved to ``default``."""
    text, known = " ".join(f.metadata["help"].split()), choices(name)
    values = "; ".join(filter(None, [f"one of {', '.join(known)}" if known else "", ranges.wording(f.metadata)]))
    value = f.default if f.default is not MISSING else f.default_factory()
    written = re.search(r" \(default: ([^()]*)\)", text)
    if written:
        text, default = text.replace(written[0], ""), written[1]
    else:
        default = "" if name == "data" or str(value).startswith("${") else in_words(value)
    return Described(ranges.flag(name) if name != "data" else "DATA", text, values, default)


def described(section: Section, architecture: str | None = None) -> str:
    """A section as text: each option with its choices, its range, and its default in the architecture."""
    sizes = sizes_of(architecture)
    lines = [section.title]
    for name, f in section.options.items():
        option = describe(name, f)
        default = f"{sizes[name]}, the one of {architecture}" if name in sizes else option.default
        notes = [*filter(None, [option.values]), *([f"default: {default}"] if default else [])]
        text = option.help + (f" ({'; '.join(notes)})" if notes else "")
        lines.append(f"  {option.flag}")
        lines += textwrap.wrap(text, 100, break_on_hyphens=False, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def of_name(name: str, sections: Iterable[Section]) -> str:
    """The text for an owner of options, or for one option. Empty for a name of neither."""
    named = [owner for owner in owners() if owner.name == name]
    option = name.removeprefix("--").replace("-", "_")
    found = []
    for section in sections:
        if named and name in section.names:
            found.append(section)
        elif not named and option in section.options:
            found.append(Section(section.title, section.names, {option: section.options[option]}))
    lines = []
    for owner in named:
        own = any(section.names == {name} and section.kind == owner.kind for section in found)
        shared = any(section.options and section.kind == owner.kind for section in found)
        if owner.kind == "model" or own:
            lines.append(owner.heading())
        else:
            lines.append(f"{owner.heading()}: no options of its own" + ("; it shares these:" if shared else ""))
    texts = [described(section, name) for section in found if section.options]
    return "\n".join(["\n".join(lines) + "\n"] * bool(lines) + texts)


# The page docs/options.md.


ARCHITECTURES_TEXT = (
    "`--arch NAME` sets these options; the command line overrides them. A switch that is on stays on: without it,",
    "choose the architecture of the model's name, such as `sg_encoder`, and give the sizes.",
)


def markdown() -> str:
    """The page: every option of the plugin in a table of its owner."""
    everything, sections = owners(), plugin_sections()
    lines = [
        "# Options",
        "",
        "These are the options that `--user-dir fairseq_sg` adds to `fairseq-train`. On the command line:",
        "",
        "    fairseq-sg options                # all, then fairseq's own",
        "    fairseq-sg options linear         # a mechanism, architecture, criterion, task or optimizer",
        "    fairseq-sg options --qk-norm      # one option",
        "",
        "An option of a mechanism that is not chosen is an error, and so is a value outside its range.",
        "An option without a default is off, or its meaning says what holds.",
        "If an option is in two tables, the default is that of the table with fewer names in its heading.",
    ]
    for kind, (heading, page) in CHAPTERS.items():
        chapter = [owner for owner in everything if owner.kind == kind]
        link = f", explained in [{page.partition('#')[0]}]({page})" if page else ""
        chosen = f"Chosen by {', '.join(f'`{flag}`' for flag in chapter[0].flags)}{link}."
        lines += ["", f"## {heading}", "", *textwrap.wrap(chosen, 118, break_on_hyphens=False)]
        if kind != "model":
            lines += ["", *_table(("name", "paper"), [(f"`{owner.name}`", owner.paper) for owner in chapter])]
        for section in sections:
            if section.kind == kind and section.options:
                rows = [describe(name, f) for name, f in section.options.items()]
                cells = [(f"`{row.flag}`", row.default, row.values, row.help) for row in rows]
                lines += ["", f"### {section.title[:1].upper()}{section.title[1:]}", ""]
                lines += _table(("option", "default", "values", "meaning"), cells)
    lines += ["", "## Architectures", "", *ARCHITECTURES_TEXT]
    for model, sizes in architectures().items():
        names = list(dict.fromkeys(option for values in sizes.values() for option in values))
        cells = [(f"`{arch}`", *(in_words(values.get(name)) for name in names)) for arch, values in sizes.items()]
        lines += ["", f"### Architectures of {model}", ""]
        lines += _table(("`--arch`", *(f"`{ranges.flag(name)}`" for name in names)), cells)
    lines += ["", "---", "", "Written by `fairseq-sg options --markdown`."]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |".replace("  ", " ") for row in (head, ["---"] * len(head), *cells)]


def main(line: Sequence[str] | None = None) -> int:
    """Prints the options. Returns the exit status: 2 for an unknown name."""
    arguments, folder = list(sys.argv[1:] if line is None else line), None
    if arguments[-2:-1] == ["--user-dir"]:
        *arguments, _, folder = arguments
    if len(arguments) > 1 or set(arguments) & {"-h", "--help"}:
        print(__doc__.strip())
        return 0 if len(arguments) == 1 else 2
    from fairseq.utils import import_user_module

    import fairseq_sg.plugin  # noqa: F401
    from fairseq_sg.command_line import nearest

    if folder is not None:
        if not os.path.isdir(folder):
            print(f"error: there is no folder {folder}: give that of your own mechanisms", file=sys.stderr)
            return 2
        import_user_module(argparse.Namespace(user_dir=folder))
    if arguments == ["--markdown"]:
        print(markdown(), end="")
        return 0
    sections = [*plugin_sections(), *fairseq_sections()]
    text = of_name(arguments[0], sections) if arguments else "\n".join(described(section) for section in sections)
    if not text:
        known = set().union(*(section.names | set(map(ranges.flag, section.options)) for section in sections))
        meant = nearest(arguments[0], known | {owner.name for owner in owners()})
        own = "" if folder or meant.startswith("did you") else "; for one of your own, add --user-dir FOLDER"
        print(f"error: there is no option and no mechanism named {arguments[0]!r}: {meant}{own}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))

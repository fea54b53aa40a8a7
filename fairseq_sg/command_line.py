"""The command line of fairseq's commands while this plugin is loaded.

- A mistake is one line, ``error: …``, with the nearest names; fairseq prints its usage as well.
- Commands that evaluate a checkpoint take ``--task`` from it, and refuse one that cannot be read (``checkpoints``).
- ``--help`` shows the options of the plugin's own ``--arch``, ``--task`` and the like, which fairseq adds too late.
- The configuration is checked before data are loaded (``checks``).

fairseq imports ``--user-dir`` before it builds its parser, so only a mistake in ``--user-dir`` itself is reported by
fairseq.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from fairseq_sg import checkpoints, checks, compat, generation, ranges
from fairseq_sg.declared import dataclasses_of, is_our_task, kinds_of
from fairseq_sg.errors import UsageError


def install() -> None:
    """Wraps the functions of fairseq's commands that read and use options."""
    from fairseq import options
    from fairseq.distributed import utils

    from fairseq_sg import hydra_configuration

    compat.wrap(options, "parse_args_and_arch", _parse_args_and_arch)
    compat.wrap(utils, "call_main", _call_main)
    hydra_configuration.install()


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one line each."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(_unknown(self, unknown)))
        return namespace

    def _get_value(self, action, text):
        try:
            value = super()._get_value(action, text)
            if value == []:
                raise ValueError
            return value
        except Exception:  # fairseq's own types raise SyntaxError, too
            kind = {int: "a whole number", float: "a number", str: "text"}.get(action.type, "numbers, such as 1 or 1,2")
            raise argparse.ArgumentError(None, f"{_name(action)} is {text!r}: choose {kind}") from None

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            meant = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(None, f"{_name(action)} is {value!r}: {meant}")


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


def nearest(name: str, known: Iterable[str]) -> str:
    """The names that may have been meant by an unknown one, as the end of a message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    if close:
        return f"did you mean {' or '.join(close)}?"
    own = [name for name in known if name.startswith("sg_")]
    if len(known) <= 20 or own:
        return f"choose from {', '.join(known if len(known) <= 20 else own)}"
    return "`fairseq-sg options` lists those of fairseq_sg"


def _parse_args_and_arch(parse, parser, input_args=None, parse_known=False, suppress_defaults=False, **kwargs):
    """fairseq's ``parse_args_and_arch``, which all of its commands call but ``fairseq-preprocess``."""
    parser.__class__ = Parser
    arguments = list(sys.argv[1:] if input_args is None else input_args)
    asks = [word for word in arguments if word in ("-h", "--help")]
    chosen, _ = parser.parse_known_args([word for word in arguments if word not in asks])
    if asks:
        _print_help(parser, chosen)
    training = _trains(parser)
    given = any(word.partition("=")[0] == "--task" for word in arguments)
    if not training:
        _check_evaluation(parser, chosen)
        # fairseq's commands have another default.
        task = checkpoints.trained_with_ours(chosen.path.split(os.pathsep)[0])
        if task and not given:
            parser.set_defaults(task=task)
            chosen.task = task
        if is_our_task(chosen.task):
            if hasattr(chosen, "min_len"):
                # fairseq's is 1, which forbids the end symbol as the first output.
                parser.set_defaults(min_len=0)
                chosen, _ = parser.parse_known_args(arguments)
            generation.check_command(chosen, arguments)
    needed = {"task": "sg_translation", "arch": "sg_transformer"}
    for name in needed if training else ["task"]:
        if getattr(chosen, name) is None:
            if not training:
                # A checkpoint that cannot be read is the reason why its task is not known.
                _check_checkpoints(chosen, given)
            which = "one" if training else "the one of the training"
            parser.error(f"--{name} is missing: give {which}, such as {needed[name]}")
    parsed = parse(parser, input_args, parse_known, suppress_defaults, **kwargs)
    # fairseq-generate goes on without ``call_main``.
    for name, value in vars(parsed).items() if isinstance(parsed, argparse.Namespace) and not training else ():
        ranges.check_value(name, value, checks.FAIRSEQ.get(name, {}))
    if training:
        _check_interpolations(parser, parsed)
        _fill_total_num_update(parser, parsed)
    elif not suppress_defaults:
        _check_checkpoints(chosen, given)
    return parsed


def _check_interpolations(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends a training whose model takes an option from the task that the task does not have."""
    model, task = (dataclasses_of(group).get(name) for group, name in (("model", parsed.arch), ("task", parsed.task)))
    if model is None or task is None:
        return
    has = {f.name for f in fields(task)}
    for f in fields(model):
        found = re.fullmatch(r"\$\{task\.(\w+)\}", str(f.default))
        if found and found[1] not in has:
            parser.error(
                f"--arch {parsed.arch} takes {ranges.flag(found[1])} from the task, and --task {parsed.task} does not "
                "have it: choose another --arch, or another --task"
            )


def _fill_total_num_update(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Gives ``--total-num-update`` of polynomial_decay its default, ``--max-update``: fairseq takes None for it."""
    if getattr(parsed, "total_num_update", 0) is None:
        if not parsed.max_update:
            parser.error(f"--lr-scheduler {parsed.lr_scheduler} needs the number of updates: give --max-update")
        parsed.total_num_update = float(parsed.max_update)


def _check_evaluation(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Ends a command on a checkpoint that names none, or whose --model-overrides are no dict."""
    if not chosen.path:
        parser.error("--path is missing: name the checkpoint, such as --path checkpoints/NAME/checkpoint_best.pt")
    paths = chosen.path.split(os.pathsep)
    if len(paths) > 1 and "--beam" not in parser._option_string_actions:
        parser.error(f"this command evaluates one checkpoint: choose one of --path {', '.join(paths)}")
    for path in paths:
        if os.path.isdir(path):
            parser.error(f"--path {path} is a folder: name a checkpoint in it, such as {path}/checkpoint_best.pt")
    if ranges.literal_dict(chosen.model_overrides) is None:
        parser.error(
            f"--model-overrides is {chosen.model_overrides!r}: give a dict such as \"{{'encoder_layers': 4}}\""
        )


def _check_checkpoints(chosen: argparse.Namespace, task_is_given: bool) -> None:
    """Reads the checkpoints of ``--path``, unless ``--task`` names a task that is not ours.

    Raises UsageError for a checkpoint that is not there, that cannot be read, or whose task is not registered. The same
    for ``--model-overrides`` of an option that no model of ours has, which fairseq ignores, or of another type.
    """
    from fairseq.file_io import PathManager
    from fairseq.tasks import TASK_REGISTRY

    other_task = task_is_given and not is_our_task(chosen.task)
    # fairseq makes the names of the files from a suffix and the number of shards; fairseq-validate has neither option.
    renamed = getattr(chosen, "checkpoint_suffix", "") or getattr(chosen, "checkpoint_shard_count", 1) > 1
    if other_task or renamed:
        return
    known: set[str] = set()
    kinds: dict[str, typing.Any] = {}
    for path in chosen.path.split(os.pathsep):
        if not PathManager.exists(path):
            raise UsageError(f"there is no checkpoint {path}: check --path")
        state = checkpoints.read(path) if os.path.isfile(path) else {}
        task = checkpoints.task_name(state)
        if task is not None and task not in TASK_REGISTRY and not task_is_given:
            raise UsageError(checkpoints.not_registered(path, "task", task))
        if checkpoints.is_ours(TASK_REGISTRY.get(task)):
            known |= {*state["cfg"], *checkpoints.option_names(state["cfg"])}
            kinds |= kinds_of(state["cfg"])
    for name, value in ast.literal_eval(chosen.model_overrides).items():
        if known and name not in known and name not in kinds:
            raise UsageError(f"--model-overrides names {name!r}, which is not an option of the model that is loaded")
        if name in kinds:
            ranges.check_type(name, value, kinds[name])


def _trains(parser: argparse.ArgumentParser) -> bool:
    """Whether it is the parser of ``fairseq-train``; ``fairseq-generate`` has an ``--arch``, too."""
    return "--max-update" in parser._option_string_actions


def _print_help(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> typing.NoReturn:
    from fairseq_sg.options import described, plugin_sections

    arch = getattr(chosen, "arch", "")
    given = {getattr(chosen, name, None) for name in ("arch", "task", "criterion", "optimizer", "scoring")}
    everything = _trains(parser) and (arch is None or arch.startswith("sg_"))
    print(f"usage: {parser.prog} DATA [options]\n")
    for section in plugin_sections():
        if everything or section.names & given:
            print(described(section, arch))
    print("fairseq's own")
    parser.usage = argparse.SUPPRESS
    parser.print_help()
    parser.exit()


def _unknown(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[str]:
    """Why each of some words is no option of this command."""
    from fairseq_sg.models.config import removed

    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        yield f"{words[0]!r} belongs to no option"
    for flag in flags:
        owners = _owners(flag)
        if not owners and (message := removed(flag.removeprefix("--").replace("-", "_"))):
            yield message
        elif not owners:
            yield f"there is no option {flag}: {nearest(flag, parser._option_string_actions)}"
        elif _trains(parser) or owners.startswith("fairseq-"):
            yield f"{flag} has no effect here: it is an option of {owners}"
        else:
            yield f"{flag} is an option of a training, with {owners}: a checkpoint keeps what it was trained with"


def _owners(flag: str) -> str:
    """The commands, or the models, tasks and so on, that have an option, ours first; empty where none has it."""
    from fairseq import options
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    for command, parser in {"train": options.get_training_parser, "generate": options.get_generation_parser}.items():
        if flag in parser()._option_string_actions:
            return f"fairseq-{command}"
    found: dict[str, list[str]] = {}
    for option, registry in _registries().items():
        for name, cls in sorted(registry.items(), key=_plugin_first):
            scratch = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
            with contextlib.suppress(Exception):  # some of fairseq's models want packages that are not installed
                if hasattr(cls, "add_args"):
                    cls.add_args(scratch)
                elif hasattr(cls, "__dataclass"):
                    gen_parser_from_dataclass(scratch, getattr(cls, "__dataclass")())
                if flag in scratch._option_string_actions:
                    found.setdefault(option, []).append(name)
    return ", ".join(f"{option} {', '.join(names[:3])}" for option, names in found.items())


def _plugin_first(item: tuple[str, type]) -> tuple[bool, str]:
    """Sorts (name, class): the plugin's before fairseq's, each by name."""
    return not item[1].__module__.startswith("fairseq_sg"), item[0]


def _registries() -> dict[str, Mapping[str, type]]:
    from fairseq.models import MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    others = {ranges.flag(name): registry["registry"] for name, registry in REGISTRIES.items()}
    return {"--arch": MODEL_REGISTRY, "--task": TASK_REGISTRY, **others}


def _call_main(call, cfg, main, **kwargs):
    """fairseq's ``call_main``, through which its commands begin."""
    # By ``python -m``, or by its path, the module is ``__main__``; its file has its own name.
    command = Path(main.__globals__["__file__"]).stem
    check(cfg, command)
    if command == "train":
        checks.make_save_dir(cfg)
    return call(cfg, main, **kwargs)


def check(cfg, command: str) -> None:
    """Raises UsageError as ``checks.check``, for a configuration that was read from a command line."""
    import torch

    workers = cfg.distributed_training
    default = workers.distributed_world_size == torch.cuda.device_count() and not workers.distributed_init_method
    if cfg.common.cpu and default:  # fairseq counts GPUs, whatever --cpu says
        workers.distributed_world_size = 1
    checks.check(cfg, command)

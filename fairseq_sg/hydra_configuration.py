"""Mistakes in a configuration of ``fairseq-hydra-train``, in one line, as on the command line.

``fairseq-hydra-train`` loads this plugin when hydra has made the configuration. From then on, errors are one line: a
value, a name, an option added with a plus, and a missing value that the file asks for (``???``), for which hydra takes
fairseq's default. hydra's own errors come earlier; ``hydra_train`` makes them one line, too.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import typing
from collections.abc import Iterable
from dataclasses import fields

from fairseq_sg import checks, command_line, compat
from fairseq_sg.declared import dataclasses_of, groups
from fairseq_sg.errors import UsageError


def install() -> None:
    """Has trainings check hydra's configurations, and has hydra report a UsageError as fairseq's other commands do."""
    from fairseq.dataclass import initialize
    from hydra.core.utils import JobReturn

    names = ("__main__", "fairseq_cli.train", "fairseq_cli.hydra_train")
    commands = [m for m in map(sys.modules.get, names) if m is not None and compat.is_command(vars(m))]
    for module in (initialize, *commands):
        if hasattr(module, "add_defaults"):
            compat.wrap(module, "add_defaults", _add_defaults)
    # A model of fairseq's has all commands but fairseq-train print messages of every level, hydra's among them.
    logging.getLogger("hydra").setLevel(logging.INFO)
    returned = JobReturn.return_value
    JobReturn.return_value = property(functools.partial(_return_value, returned.fget), returned.fset)


def _return_value(get, job):
    """hydra's ``JobReturn.return_value``, which raises the error that ended a job, after a line of its own."""
    if isinstance(job._return_value, UsageError):
        end(str(job._return_value))
    return get(job)


def end(message: str) -> typing.NoReturn:
    """Ends the process with one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _add_defaults(add_defaults, cfg) -> None:
    """fairseq's ``add_defaults``, with which a training begins: hydra's configurations get their defaults in it."""
    from fairseq.utils import import_user_module
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    if os.path.basename(os.path.normpath(cfg.common.user_dir or "fairseq_sg")) not in sys.modules:
        import_user_module(cfg.common)  # whose mechanisms have options, too; fairseq's trainings import it later
    if HydraConfig.initialized():
        _refuse_missing(HydraConfig.get())
    for group, (name, declared) in groups(cfg).items():
        choices = dataclasses_of(group)
        if choices and name is not None and name not in choices:
            raise UsageError(f"{group}._name is {name!r}: {command_line.nearest(name, choices)}")
        names = [f.name for f in fields(declared)] if declared else []
        for option in cfg[group] if declared else ():
            if option not in names:
                raise UsageError(f"{group}.{option} is no option of {name}: {nearest(group, option, names)}")
    try:
        add_defaults(cfg)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'the configuration'}: {str(error.msg).splitlines()[0]}") from error
    checks.check(cfg, "train")
    checks.make_save_dir(cfg)


def in_sweep() -> bool:
    """Whether this training is a job of hydra's ``--multirun``."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def nearest(group: str, option: str, names: Iterable[str]) -> str:
    """The options that may have been meant by one that is none of ``names``, as the end of a message."""
    return command_line.nearest(f"{group}.{option}", [f"{group}.{name}" for name in names])


def no_configuration(name: str, folder: str) -> str:
    """The message for a ``--config-name`` that is no file of a folder. hydra takes fairseq's defaults for it."""
    there = sorted(file.removesuffix(".yaml") for file in os.listdir(folder) if file.endswith(".yaml"))
    return f"--config-name is {name!r}, and {folder} has no {name}.yaml: {command_line.nearest(name, there)}"


def _refuse_missing(hydra) -> None:
    """Raises UsageError for a value that the configuration's file asks for, ``???``, and the command does not give."""
    from omegaconf import OmegaConf

    name = hydra.job.config_name
    folders = [source.path for source in hydra.runtime.config_sources if source.schema == "file"]
    files = [path for folder in folders if os.path.isfile(path := os.path.join(folder, f"{name}.yaml"))]
    if name and not files:
        raise UsageError(no_configuration(name, folders[-1]))
    given = [override.lstrip("+").partition("=")[0] for override in hydra.overrides.task]
    for path in files:
        for key in sorted(OmegaConf.missing_keys(OmegaConf.load(path))):
            if not any(key == option or key.startswith(f"{option}.") for option in given):
                raise UsageError(f"{key} is missing: give {key}=…")

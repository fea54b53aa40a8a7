"""``python -m fairseq_sg.hydra_train``: ``fairseq-hydra-train`` with this plugin loaded first.

So warnings about old interfaces of fairseq and hydra are silenced, hydra's own errors are one line each, and the checks
of ``hydra_configuration`` run once, before workers start.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import fields, is_dataclass

from fairseq_sg import command_line, compat
from fairseq_sg.declared import dataclasses_of
from fairseq_sg.hydra_configuration import end, nearest, no_configuration


def _run_and_report(run, function):
    """hydra's ``run_and_report``, which prints an error of hydra's in several lines."""
    from hydra.errors import HydraException

    def plainly():
        try:
            return function()
        except HydraException as error:
            end(_explained(str(error), str(error.__cause__ or "")))

    return run(plainly)


def _explained(message: str, cause: str) -> str:
    """hydra's error in one line; of an option that the configuration does not set, how to set it."""
    from fairseq.dataclass.configs import FairseqConfig

    unset = re.search(r"Could not override '(\w+)\.(\w+)'", message)
    types = {f.name: f.type for f in fields(FairseqConfig)}
    if unset is None:
        return " ".join([*message.split(), *cause.partition("\n")[0].split()])
    group, option = unset.groups()
    if group not in types:
        return f"there is no group of options {group}: {command_line.nearest(group, types)}"
    choices = [*dataclasses_of(group).values(), types[group]]
    names = {f.name for cls in choices if is_dataclass(cls) for f in fields(cls)}
    if option in names:
        return (
            f"{group}.{option} is not set in the file of the configuration: put a plus before it, +{group}.{option}=…"
        )
    return f"there is no option {group}.{option}: {nearest(group, option, names)}"


def main() -> None:
    from fairseq.utils import import_user_module
    from hydra._internal import utils

    import fairseq_sg.plugin  # noqa: F401

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    given = parser.parse_known_args()[0]
    name = (given.config_name or "").removesuffix(".yaml")
    if name and os.path.isdir(given.config_dir or "") and not os.path.isfile(f"{given.config_dir}/{name}.yaml"):
        end(no_configuration(name, given.config_dir))
    for word in sys.argv[1:]:
        folder = word.removeprefix("common.user_dir=")
        if folder != word and os.path.isdir(folder):
            # So that messages of hydra's errors know the options of its mechanisms.
            import_user_module(argparse.Namespace(user_dir=folder))
    compat.wrap(utils, "run_and_report", _run_and_report)
    from fairseq_cli import hydra_train

    hydra_train.cli_main()


if __name__ == "__main__":
    main()

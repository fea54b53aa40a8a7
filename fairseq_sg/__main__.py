"""The command ``fairseq-sg``, also ``python -m fairseq_sg``: every command of this project under one name.

``fairseq-sg NAME …`` is ``python -m fairseq_sg.NAME …``. Only the command that is asked for is imported.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Sequence

from fairseq_sg import __version__
from fairseq_sg.errors import exit_code

#: group -> command -> what it does
GROUPS: dict[str, dict[str, str]] = {
    "use": {
        "evaluate": "accuracy of a checkpoint by subset, type of example, and length or position",
        "options": "the options of a model, criterion, task or mechanism, or of all",
        "construct": "models with hand-set weights for PARITY and FIRST (Chiang & Cholak 2022)",
    },
    "look inside": {
        "analysis": "attention maps, gates, Values, norms, experts, accuracy by length",
        "kernels": "implementations of the operators: verify them, time them, and what runs by default",
    },
    "reproduce": {
        "experiments": "published tables and our own: list, show, run and report recipes",
    },
    "install": {
        "doctor": "what is installed, what is missing, and the fix",
    },
}
#: Commands of packages, whose ``main`` is in their ``__main__``.
PACKAGES = ("analysis", "experiments", "kernels")
COMMANDS = [name for commands in GROUPS.values() for name in commands]


def help_text() -> str:
    """What ``fairseq-sg --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = ["usage: fairseq-sg COMMAND [arguments]", ""]
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name.ljust(width)}  {what}" for name, what in commands.items())]
    lines += [
        "",
        "fairseq-sg COMMAND --help shows the arguments of a command, fairseq-sg --version the version.",
        "fairseq-train --user-dir fairseq_sg trains a model, python -m data_prep prepares a dataset.",
    ]
    return "\n".join(lines)


def main(line: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 1 where it cannot be imported, 2 for an unknown one."""
    return exit_code(_run, (sys.argv[1:] if line is None else line) or [""])


def _run(line: Sequence[str]) -> int:
    name, *rest = line
    if name in ("", "-h", "--help"):
        print(help_text())
        return 0 if name else 2
    if name == "--version":
        print(f"fairseq_sg {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {close[0]}? The commands are " if close else "choose from "
        print(f"error: there is no command {name}: {meant}{', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"fairseq_sg.{name}" + ".__main__" * (name in PACKAGES))
        # fairseq reports what it loads.
        logging.getLogger().setLevel(logging.WARNING)
        return module.main(rest)
    except ImportError as error:
        advice = "" if "`fairseq-sg doctor`" in str(error) else ". `fairseq-sg doctor` tells what is missing"
        print(f"error: {error}{advice}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""The parsers of our own commands, and the types of their arguments. fairseq's commands have ``command_line``."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fairseq_sg.ranges import literal_dict


def nearest(word: str, names: Iterable[str]) -> str:
    """Suggests the names that ``word`` may be a misspelling of, as the end of a message; '' if there are none."""
    by_lower = {name.lower(): name for name in names}
    found = [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=3)]
    return f": did you mean {' or '.join(found)}?" if found else ""


def choice(word: str, names: Sequence[str]) -> str:
    """An unknown word for a message, with the nearest of ``names``, and all of them."""
    return f"{word!r}{nearest(word, names) or ':'} choose from {', '.join(names)}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and suggest the nearest names. Descriptions keep their lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"{action.option_strings[0]} is" if action.option_strings else "unknown command"
            raise argparse.ArgumentError(None, f"{what} {choice(value, list(action.choices))}")


class Command(Parser):
    """The parser of one command. It reports unknown options first; argparse would report a missing one."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        command = self.prog.rpartition(" ")[2]
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            # A word with a space is a value for argparse.
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                self.error(f"{command} has no option {name}{nearest(name, self._option_string_actions)}")
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{' '.join(rest)} is unexpected: {command} {self._takes()}")
        return found, rest

    def _takes(self) -> str:
        """What a command takes beside options, for a message."""
        places = [action for action in self._actions if not action.option_strings]
        names = [action.metavar or action.dest.upper() for action in places]
        if any(action.nargs in ("+", "*") for action in places):
            return f"takes every {names[-1]} before the options"
        return f"takes one {' and one '.join(names)}" if names else "takes options alone"


def overrides(text: str) -> dict[str, Any]:
    """Argument type: a Python dict."""
    found = literal_dict(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dict like \"{{'encoder_layers': 24}}\"")
    return found


def positive(text: str) -> int:
    """Argument type: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def index(text: str) -> int:
    """Argument type: a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def finite(text: str, fits: Callable[[float], bool] = math.isfinite, kind: str = "a number") -> float:
    """Argument type: a number, not NaN or infinite, which ``fits``; ``kind`` is said in the error."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and fits(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return number


def above_0(text: str) -> float:
    """Argument type: a number above 0."""
    return finite(text, lambda number: number > 0, "a number above 0")


def from_0(text: str) -> float:
    """Argument type: a number from 0 on."""
    return finite(text, lambda number: number >= 0, "a number from 0 on")


def add_model(group: Any) -> None:
    """Adds the options by which a checkpoint is loaded, to a group of a parser."""
    group.add_argument(
        "--model-overrides",
        type=overrides,
        default={},
        metavar="DICT",
        help="options that differ from training: \"{'encoder_layers': 24}\"",
    )
    group.add_argument("--user-dir", metavar="DIR", help="folder of your own mechanisms, as fairseq's --user-dir")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: auto)")

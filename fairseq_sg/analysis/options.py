"""Options that several commands have, what they choose, and how a command ends."""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fairseq_sg.errors import UsageError


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of a message on a word that is none of ``names``: those that it may be a misspelling of, or nothing."""
    by_lower = {name.lower(): name for name in names}
    found = [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=3)]
    return f": did you mean {' or '.join(found)}?" if found else ""


def choice(word: str, names: Sequence[str]) -> str:
    """A word that is none of ``names``, for a message: with the nearest of them, and all."""
    return f"{word!r}{nearest(word, names) or ':'} choose from {', '.join(names)}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest of the names that there are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"{action.option_strings[0]} is" if action.option_strings else "unknown command"
            raise argparse.ArgumentError(None, f"{what} {choice(value, list(action.choices))}")


class Command(Parser):
    """The parser of one command, which says first what is no option: else a missing one would be said to be."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                known = nearest(name, self._option_string_actions)
                self.error(f"{self.prog.rpartition(' ')[2]} has no option {name}{known}")
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{' '.join(rest)} is too much: {self.prog.rpartition(' ')[2]} takes one CHECKPOINT")
        return found, rest


def overrides(text: str) -> dict[str, Any]:
    """A Python dict; argparse names the option where it is none."""
    try:
        return dict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dict like \"{{'encoder_layers': 24}}\"") from None


def finish(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Runs a command; returns the exit code: 0, or 1 after one line that says what the user can fix."""
    try:
        run(args)
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename}: {os.strerror(error.errno)}" if error.errno else f"error: {error}",
            file=sys.stderr,
        )
        return 1
    return 0


def positive(text: str) -> int:
    """A number from 1 on; argparse names the option where it is not one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def above_0(text: str) -> float:
    """A number above 0; argparse names the option where it is not one."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add_sentence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, metavar="WORDS", help="the source, in words as the data have them")
    parser.add_argument(
        "--target", metavar="WORDS", help="the target; the model's own, greedily generated, output unless given"
    )
    parser.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="longest output of its own, end symbol included (default: the longest target of the data)",
    )


def add_scale(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--vmax", type=above_0, metavar="X", help=f"where the colour scale ends (default: {default})")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """What is drawn; the numbers are always those of everything."""
    parser.add_argument(
        "--roles", metavar="ROLES", help="draw encoder, decoder, cross, comma separated (default: all there are)"
    )
    parser.add_argument("--steps", metavar="STEPS", help="draw these steps or layers: 1,3 (default: all)")
    parser.add_argument(
        "--heads", metavar="HEADS", help="draw these heads: 1,4; or 'max' or 'mean' of all (default: all)"
    )


def add_subset(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--subset", default=default, metavar="NAME", help=f"subset of the data (default: {default})")


def add_batches(parser: argparse.ArgumentParser, limit: str) -> None:
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="sentences in a batch (default: 64)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help=f"only the first N sentences ({limit})")


def choose_roles(text: str | None, there: Sequence[str]) -> list[str]:
    """The roles that ``--roles`` names. Raises UsageError for one that is not there."""
    if text is None:
        return list(there)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in there:
            raise UsageError(f"--roles has {choice(name, there)}")
    return names


def choose_numbers(option: str, text: str | None, count: int) -> list[int]:
    """Numbers from 0 for ``text``, which has numbers from 1 to ``count``; all where it is None. Raises UsageError."""
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= count:
            raise UsageError(f"{option} has {word!r}: choose from 1 to {count}")
    return [int(word) - 1 for word in words]

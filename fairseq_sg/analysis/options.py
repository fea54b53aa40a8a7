"""Common options of several commands, the choices they make, and the exit of a command."""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fairseq_sg.errors import UsageError, of_system
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
    """An argument parser whose errors take one line and suggest the nearest names."""

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
        for word in itertools.takewhile(lambda word: word != "--", args):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                known = nearest(name, self._option_string_actions)
                self.error(f"{self.prog.rpartition(' ')[2]} has no option {name}{known}")
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{' '.join(rest)} is unexpected: {self.prog.rpartition(' ')[2]} takes one CHECKPOINT")
        return found, rest


def overrides(text: str) -> dict[str, Any]:
    """Argument type: a Python dict."""
    found = literal_dict(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dict like \"{{'encoder_layers': 24}}\"")
    return found


def finish(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Runs a command; returns the exit code: 0, or 1 after a one-line error that the user can fix."""
    try:
        run(args)
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {of_system(error)}", file=sys.stderr)
        return 1
    return 0


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


def add_sentence(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a sentence or, for models of images, a question (``record_sentence``)."""
    read = parser.add_mutually_exclusive_group(required=True)
    read.add_argument(
        "--input", metavar="WORDS", help="the source, in words of the data, or as plain text for subwords"
    )
    read.add_argument(
        "--index", type=index, metavar="I", help="for models of images: the number of a question in --subset, from 0 on"
    )
    parser.add_argument("--subset", metavar="NAME", help="for models of images: the subset of --index (default: test)")
    parser.add_argument("--target", metavar="WORDS", help="the target (default: the model's own greedy output)")
    parser.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="maximum length of its own output, with the end symbol (default: the maximum target length of the data)",
    )


def of_pictures(parser: argparse.ArgumentParser, *options: str) -> None:
    """Declares options of the pictures alone, which ``--format none`` refuses."""
    parser.set_defaults(of_pictures=[*(parser.get_default("of_pictures") or []), *options])


def add_scale(parser: argparse.ArgumentParser, default: str) -> None:
    of_pictures(parser, "vmax")
    parser.add_argument("--vmax", type=above_0, metavar="X", help=f"end of the colour scale (default: {default})")


def add_roles(parser: argparse.ArgumentParser) -> None:
    of_pictures(parser, "roles")
    parser.add_argument(
        "--roles", metavar="ROLES", help="draw encoder, decoder, cross, comma separated (default: all there are)"
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select what is drawn; the written numbers are always complete."""
    add_roles(parser)
    of_pictures(parser, "steps", "heads")
    parser.add_argument("--steps", metavar="STEPS", help="draw these steps or layers: 1,3 (default: all)")
    parser.add_argument(
        "--heads", metavar="HEADS", help="draw these heads: 1,4; or 'max' or 'mean' of all (default: all)"
    )


def add_subset(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--subset", default=default, metavar="NAME", help=f"subset of the data (default: {default})")


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


def add_batches(parser: argparse.ArgumentParser, limit: int | None = None) -> None:
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="sentences in a batch (default: 64)"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=limit,
        metavar="N",
        help=f"only the first N sentences (default: {limit or 'all'})",
    )


def choose_roles(text: str | None, there: Sequence[str]) -> list[str]:
    """The roles in ``--roles``. Raises UsageError for an unknown one."""
    if text is None:
        return list(there)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in there:
            raise UsageError(f"--roles has {choice(name, there)}")
    return names


def choose_numbers(option: str, text: str | None, count: int) -> list[int]:
    """Parses numbers from 1 to ``count`` to indices from 0; None selects all. Raises UsageError."""
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= count:
            raise UsageError(f"{option} has {word!r}: choose from 1 to {count}")
    return [int(word) - 1 for word in words]

"""Options that several commands have, what they choose, and how a command ends."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from typing import Any, Callable, Dict, List, NoReturn, Sequence

from fairseq_sg.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def overrides(text: str) -> Dict[str, Any]:
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


def add_sentence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, metavar="WORDS", help="the source, in words as the data have them")
    parser.add_argument(
        "--target", metavar="WORDS", help="the target; the model's own, greedily generated, output unless given"
    )
    parser.add_argument(
        "--max-len", type=positive, default=200, metavar="N", help="longest output of its own (default: 200)"
    )


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


def choose_roles(text: str | None, there: Sequence[str]) -> List[str]:
    """The roles that ``--roles`` names. Raises UsageError for one that is not there."""
    if text is None:
        return list(there)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in there:
            raise UsageError(f"--roles has {name!r}: choose from {', '.join(there)}")
    return names


def choose_numbers(option: str, text: str | None, count: int) -> List[int]:
    """Numbers from 0 for ``text``, which has numbers from 1 to ``count``; all where it is None. Raises UsageError."""
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= count:
            raise UsageError(f"{option} has {word!r}: choose from 1 to {count}")
    return [int(word) - 1 for word in words]

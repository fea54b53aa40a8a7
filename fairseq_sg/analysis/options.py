"""Options that several analyses share, and the choices they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import above_0, choice, index, positive


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

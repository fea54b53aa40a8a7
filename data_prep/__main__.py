"""The command `python -m data_prep`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import data_prep
from data_prep import (
    arithmetic,
    cfq,
    cogs,
    ctl,
    ctlpp,
    first,
    iwslt_en_vi,
    listops,
    mathematics,
    parallel,
    parity,
    pcfg,
    scan,
    text_lm,
)
from data_prep.common import DataError, Dataset, UsageError
from data_prep.prepare import prepare, verify

DATASETS: tuple[Dataset, ...] = tuple(
    module.DATASET
    for module in (
        *(scan, cogs, pcfg, cfq, mathematics),
        *(ctl, ctlpp, arithmetic, listops, parity, first),
        *(iwslt_en_vi, parallel, text_lm),
    )
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """One subcommand a dataset, and `list` and `verify`."""
    parser = Parser(prog="python -m data_prep", description=data_prep.__doc__.partition("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for dataset in DATASETS:
        add_dataset(commands.add_parser(dataset.name, help=dataset.title, allow_abbrev=False), dataset)
    listing = commands.add_parser("list", help="the datasets, their sources, sizes, licences and splits")
    listing.set_defaults(run=lambda args: print_list())
    verifying = commands.add_parser("verify", help="check the files of a prepared folder against its dataset.json")
    verifying.add_argument("folder", type=Path)
    verifying.set_defaults(run=lambda args: print(f"{args.folder}: {verify(args.folder)} files as they were made"))
    return parser


def add_dataset(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """The options that all datasets have, and those of this one."""
    parser.description = sys.modules[type(dataset).__module__].__doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    dataset.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared dataset that is there")
    parser.add_argument("--raw-only", action="store_true", help="write the text alone; needs neither torch nor fairseq")
    parser.set_defaults(run=lambda args: prepare(dataset, args))


def print_list() -> None:
    """A table of the datasets."""
    rows = [("dataset", "licence", "source", "size", "splits")]
    rows += [(d.name, d.licence, d.source, d.size, " ".join(d.splits)) for d in DATASETS]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for wrong data or files, 2 for a wrong command line."""
    try:
        args = make_parser().parse_args(arguments)
        args.run(args)
    except UsageError as error:
        return complain(str(error), 2)
    except DataError as error:
        return complain(str(error), 1)
    except OSError as error:
        return complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was made", 130)
    return 0


def complain(message: str, code: int) -> int:
    """Prints an error on one line and returns `code`."""
    print("error:", " ".join(message.splitlines()), file=sys.stderr)
    return code


def end(signal_number: int, frame: object) -> NoReturn:
    """Ends the command as its own end would, with nothing left half made."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # words of the data that the terminal has no characters for
    sys.exit(main())

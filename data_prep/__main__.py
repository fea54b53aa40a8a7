"""The command ``python -m data_prep``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import data_prep
from data_prep.addition import AddMultiply, DoubleAddition
from data_prep.arithmetic import Arithmetic
from data_prep.associative_recall import AssociativeRecall
from data_prep.babi import Babi
from data_prep.burgers import Burgers
from data_prep.cfq import Cfq
from data_prep.cogs import Cogs
from data_prep.ctl import Ctl
from data_prep.ctlpp import CtlPlusPlus
from data_prep.darcy import Darcy
from data_prep.dataset import DataError, Dataset, UsageError, add_options, check_path
from data_prep.folder import prepare, say, verify
from data_prep.in_context import InContext
from data_prep.iwslt_en_vi import IwsltEnVi
from data_prep.key_value import KeyValue
from data_prep.libreoffice_help import LibreOfficeHelp
from data_prep.listops import ListOps
from data_prep.mathematics import Mathematics
from data_prep.own_fields import OwnFields
from data_prep.parallel import Parallel
from data_prep.pcfg import Pcfg
from data_prep.reorder import Reorder
from data_prep.repeat_copy import RepeatCopy
from data_prep.scan import Scan
from data_prep.sort_of_clevr import SortOfClevr
from data_prep.strings import First, Parity
from data_prep.text_lm import Text

DATASETS: tuple[Dataset, ...] = (
    Scan(),
    Cogs(),
    Pcfg(),
    Cfq(),
    Mathematics(),
    Ctl(),
    CtlPlusPlus(),
    Arithmetic(),
    ListOps(),
    Parity(),
    First(),
    RepeatCopy(),
    AssociativeRecall(),
    KeyValue(),
    Babi(),
    DoubleAddition(),
    AddMultiply(),
    InContext(),
    SortOfClevr(),
    Burgers(),
    Darcy(),
    OwnFields(),
    IwsltEnVi(),
    LibreOfficeHelp(),
    Parallel(),
    Text(),
)
USER_DIR = "--user-dir"
MOST_NAMES = 30  # listed in a message


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and suggest the nearest names for an unknown one."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Rejects unknown options first: argparse would report a misspelt required option as missing."""
        args = sys.argv[1:] if args is None else list(args)
        own = args if self._subparsers is None else args[:1]  # later words belong to the dataset's parser
        for option in (word.partition("=")[0] for word in own):
            # Negative numbers are values, not options.
            if re.fullmatch(r"-+[^\d.\s-]\S*", option) and option not in self._option_string_actions:
                first = "; the name of a dataset comes first" if self._subparsers else ""
                self.error(f"unknown option {option}{first or nearest(option, self._option_string_actions)}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Checks the choice as argparse does, but suggests the nearest names instead of all."""
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            hint = nearest(str(value), names)
            if not hint and len(names) <= MOST_NAMES:
                hint = f": choose from {', '.join(names)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggests the names that begin with ``name`` or resemble it, as the end of a message; '' if there are none."""
    name, bare = name.lstrip("-"), {known: known.lstrip("-") for known in names}
    similar = [known for known in bare.values() if known.startswith(name)][:3]
    similar = similar or difflib.get_close_matches(name, bare.values())
    return f": did you mean {' or '.join(known for known in bare if bare[known] in similar)}?" if similar else ""


def split_user_dir(arguments: Sequence[str]) -> tuple[Sequence[Dataset], list[str]]:
    """The datasets, those of the folder of ``--user-dir`` too, and the other arguments.

    Raises UsageError and DataError as ``datasets_of``.
    """
    rest = list(arguments)
    place = next((place for place, word in enumerate(rest) if word.partition("=")[0] == USER_DIR), None)
    if place is None:
        return DATASETS, rest
    folder = rest.pop(place).partition("=")[2] or (rest.pop(place) if rest[place:] else "")
    if not folder:
        raise UsageError(f"{USER_DIR} needs the name of a folder")
    return (*DATASETS, *datasets_of(Path(folder).resolve())), rest


def datasets_of(folder: Path) -> Sequence[Dataset]:
    """Imports a package of the user; returns its ``DATASETS``.

    Raises:
        DataError: the folder is no package, has another module's name, has no ``DATASETS``, or one with a known name.
    """
    file = folder / "__init__.py"
    check_path(USER_DIR, folder, "folder")
    if not file.is_file():
        raise DataError(f"{USER_DIR} has no __init__.py: save your dataset as that file", folder)
    sys.path.append(str(folder.parent))
    module = importlib.import_module(folder.name)
    if Path(module.__file__ or "").resolve() != file:
        raise DataError(f"{USER_DIR} has the name of another Python module: rename the folder", folder)
    found = getattr(module, "DATASETS", ())
    if not found:
        raise DataError("has no DATASETS: list an instance of each dataset, DATASETS = (MyDataset(),)", file)
    taken = {dataset.name for dataset in DATASETS} | {"list", "verify", "reorder"}
    for dataset in found:
        if dataset.name in taken:
            raise DataError(f"the name {dataset.name} is taken: give the dataset another one", file)
        taken.add(dataset.name)
    return found


def make_parser(datasets: Sequence[Dataset] = DATASETS) -> Parser:
    """One subcommand per dataset, and ``list``, ``verify`` and ``reorder``."""
    parser = Parser(prog="python -m data_prep", description=plain(data_prep.__doc__.partition("\n\n")[0]))
    # Read by ``split_user_dir``, before there is a parser.
    parser.add_argument(USER_DIR, metavar="FOLDER", help="a Python package with datasets of yours (docs/extending.md)")
    commands = parser.add_subparsers(metavar="DATASET", required=True)
    for dataset in datasets:
        add_dataset(commands.add_parser(dataset.name, help=dataset.title), dataset)
    listing = commands.add_parser("list", help="the datasets, their sources, sizes, licences and splits")
    listing.set_defaults(run=lambda args: print_list(datasets))
    verifying = commands.add_parser("verify", help="check the files of a prepared folder against its dataset.json")
    verifying.add_argument("folder", type=Path, metavar="FOLDER")
    verifying.set_defaults(run=lambda args: say([f"{args.folder}: {verify(args.folder)} files are unchanged"]))
    reordering = commands.add_parser("reorder", help="write a prepared folder with the dictionaries of another one")
    add_dataset(reordering, Reorder({dataset.name: dataset for dataset in datasets}))
    return parser


def add_dataset(parser: argparse.ArgumentParser, dataset: Dataset) -> None:
    """Adds the common options and those of ``dataset``."""
    parser.description = plain(dataset.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, dataset.options, dataset.sources)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the output folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the prepared dataset in FOLDER")
    if dataset.binarizes:
        help = "write only the text; needs neither torch nor fairseq"
        parser.add_argument("--raw-only", action="store_true", help=help)
    parser.set_defaults(run=lambda args: prepare(dataset, args), raw_only=False)


def plain(docstring: str) -> str:
    """A docstring as ``--help`` shows it, with single backticks."""
    return docstring.replace("``", "`")


def print_list(datasets: Sequence[Dataset]) -> None:
    """A table of the datasets."""
    rows = [("dataset", "licence", "source", "size", "splits")]
    rows += [(d.name, d.licence, d.source, d.size, " ".join(d.splits)) for d in datasets]
    widths = [max(map(len, column)) for column in zip(*rows)]
    say(["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for wrong data or files, 2 for a wrong command line."""
    try:
        datasets, rest = split_user_dir(sys.argv[1:] if arguments is None else arguments)
        args = make_parser(datasets).parse_args(rest)
        args.run(args)
    except UsageError as error:
        return print_error(str(error), 2)
    except DataError as error:
        return print_error(str(error), 1)
    except OSError as error:
        return print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except MemoryError as error:
        return print_error(f"not enough memory ({error or 'for so much data'}): choose fewer or smaller examples", 1)
    except KeyboardInterrupt:
        return print_error("interrupted", 130)
    return 0


def print_error(message: str, code: int) -> int:
    """Prints an error on one line and returns ``code``."""
    print("error:", " ".join(message.splitlines()), file=sys.stderr)
    return code


def end(signal_number: int, frame: object) -> NoReturn:
    """Exits on SIGTERM so that ``finally`` blocks run and remove unfinished files."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # the terminal may lack characters of the data
    sys.exit(main())

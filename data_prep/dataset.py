"""The basis of all datasets: pairs of sentences, errors, options, and the contract of a dataset."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import inspect
import io
import json
import math
import os
import re
import shlex
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

# A request, an origin or a manifest: values that a round trip through JSON does not change.
Json = dict[str, Any]
BLOCK = 1 << 16  # bytes per read


class UsageError(ValueError):
    """A command line that cannot be carried out."""


class DataError(ValueError):
    """Invalid data: ``message``, with ``path`` and ``line`` (1-based) where they apply."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, line: int | None = None) -> None:
        self.message, self.path, self.line = message, path, line
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)


def shorten(text: str) -> str:
    """Quotes ``text`` for a message: on one line, and short."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def shell_word(path: Path) -> str:
    """A path as one word of a shell command, which is no option if the path begins with ``-``."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class Pair(NamedTuple):
    """One example: two strings of tokens, each separated from the next by one space."""

    source: str
    target: str


Subsets = dict[str, list[Pair]]  # by name


class Material(ABC):
    """The data of one request, ready to be written.

    Attributes:
        rule: how the subsets were made, in words.
        membership: whether the examples are those of the published subsets, in words.
        origin: the generator, or the files with their sizes and hashes. A generator keeps its name in ``dataset.json``
            where its module gets another one, so that equal requests have equal bytes in all versions.
    """

    rule: str
    membership: str
    origin: Json

    @abstractmethod
    def check(self) -> None:
        """Raises DataError for data that must not be written."""

    @abstractmethod
    def write(self, folder: Path, raw_only: bool) -> None:
        """Writes everything except ``dataset.json`` into the empty ``folder``; no binaries with ``raw_only``."""

    @abstractmethod
    def describe(self) -> Json:
        """The entries ``subsets`` and ``vocabulary`` of ``dataset.json``, and further ones."""

    @abstractmethod
    def summary(self, description: Json) -> list[str]:
        """Lines for the user on the result of ``describe``."""

    @abstractmethod
    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """``fairseq-train`` commands for the folder ``out`` with the sizes for this dataset,
        one per form of the data.
        """


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    flag: str = "",
    keys: tuple[str, ...] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    one_of: str = "",
    when_given: bool = False,
    **settings: Any,
) -> Any:
    """A field of ``Options`` or ``Sources`` that is an option of the command line.

    Args:
        default: its value if it is not given; without a default, the option is required.
        help: its text in ``--help``; if it is empty, the choices.
        flag: its name, if that is not the name of the field.
        keys: the field maps each of them to the value of a flag of its own, whose name has the key instead of {}.
        given: flags that take no value, instead of ``flag``: name -> value of the field.
        one_of: exactly one of the options with this name must be given.
        when_given: whether the request records the option only if it differs from the default. So options that are
            added later leave older requests as they are.
        settings: those of ``argparse``.
    """
    metadata = {"flag": flag, "keys": keys, "given": given, "one_of": one_of, "when_given": when_given}
    metavar = getattr(settings.get("type"), "metavar", None)
    metadata["settings"] = {"help": help} | ({"metavar": metavar} if metavar else {}) | settings
    return field(default_factory=dict, metadata=metadata) if keys else field(default=default, metadata=metadata)


def fields_of(cls: type) -> list[Field]:
    """The fields of a dataclass: its own, then those that it inherits."""
    declared = [vars(base).get("__annotations__", {}) for base in cls.__mro__]
    inherited = [set().union(*declared[place + 1 :]) for place in range(len(declared))]
    order = [name for names, known in zip(declared, inherited, strict=True) for name in names if name not in known]
    return sorted(fields(cls), key=lambda f: order.index(f.name))


def add_options(parser: argparse.ArgumentParser, *classes: type) -> None:
    """Adds the options of dataclasses to a parser."""
    groups: dict[str, Any] = {"": parser}
    options = [f for cls in classes for f in fields_of(cls) if "settings" in f.metadata]
    names = [f.metadata["one_of"] or f.name for f in options]
    for f in sorted(options, key=lambda f: names.index(f.metadata["one_of"] or f.name)):  # groups stay together
        group = f.metadata["one_of"]
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group(required=True)
        _add_option(groups[group], f)


def _add_option(parser: Any, f: Field) -> None:
    settings, flag = f.metadata["settings"], f.metadata["flag"] or f"--{f.name.replace('_', '-')}"
    if not settings["help"]:
        settings = settings | {"help": ", ".join(settings["choices"]), "metavar": f.name.upper()}
    if f.metadata["given"]:
        flags = parser.add_mutually_exclusive_group()
        for name, value in f.metadata["given"].items():
            flags.add_argument(name, dest=f.name, action="store_const", const=value, default=f.default, **settings)
    elif f.metadata["keys"]:
        for key in f.metadata["keys"]:
            text = settings["help"].format(key)
            parser.add_argument(flag.format(key), dest=f"{f.name} {key}", **{**settings, "help": text})
    elif not flag.startswith("-"):
        parser.add_argument(f.name, metavar=flag, **settings)
    elif f.default is MISSING:
        parser.add_argument(flag, dest=f.name, required=True, **settings)
    else:
        parser.add_argument(flag, dest=f.name, default=f.default, **settings)


T = TypeVar("T")


def read_options(cls: type[T], args: argparse.Namespace) -> T:
    """Makes a dataclass of the options that ``add_options`` added."""
    values: Json = {}
    for f in fields_of(cls):
        if f.metadata.get("keys"):
            given = {key: getattr(args, f"{f.name} {key}") for key in f.metadata["keys"]}
            values[f.name] = {key: value for key, value in given.items() if value is not None}
        elif "settings" in f.metadata:
            values[f.name] = getattr(args, f.name)
    return cls(**values)


@dataclass(frozen=True)
class Sources:
    """Where the data come from: options that decide no byte of the result, or only by the contents of files.

    Those contents are identified in the request (``Options.identify``). Generated data need no sources.
    """

    _hashes: dict[Path, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stamps: dict[Path, tuple[int, ...] | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def sha256(self, path: Path) -> str:
        """The hash of a file; one that was read by ``open`` is not read again."""
        if path not in self._hashes:
            with self.open(path) as stream:
                while stream.read(BLOCK):
                    pass
        return self._hashes[path]

    def describe(self, name: str, path: Path) -> Json:
        """The entry of a file in ``dataset.json``."""
        return {"name": name, "bytes": path.stat().st_size, "sha256": self.sha256(path)}

    def read_bytes(self, path: Path) -> bytes:
        """The content of a file, unpacked if its name ends in ``.gz``. Raises DataError for a broken gzip file."""
        with self.open(path) as stream:
            if path.suffix != ".gz":
                return stream.read()
            try:
                return gzip.GzipFile(fileobj=stream).read()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(f"not a complete gzip file ({error})", path) from None

    @contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """Opens a file to read it forward, and hashes it. What the block does not read is read at its end."""
        with path.open("rb", buffering=0) as raw, io.BufferedReader(Hashing(raw), BLOCK) as stream:
            yield stream
            while stream.read(BLOCK):
                pass
            self._hashes[path] = stream.raw.hash.hexdigest()

    def watch(self, path: Path) -> None:
        """Notes a file that is read more than once, before the first time, for ``check_unchanged``."""
        self._stamps.setdefault(path, stamp(path))

    def check_unchanged(self) -> None:
        """Raises DataError for a watched file that has changed: its hash need not be that of the data."""
        for path, before in self._stamps.items():
            if stamp(path) != before:
                raise DataError("has changed while it was read: start again", path)


def stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with the content of a file; None for a missing one, and for one that cannot be read twice."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


class Hashing(io.RawIOBase):
    """A binary stream that counts and hashes what is read from it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.hash, self.size = stream, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = self.stream.readinto(buffer)
        self.hash.update(buffer[:size])
        self.size += size
        return size

    def describe(self, name: str) -> Json:
        """The entry of the file ``name`` in ``dataset.json``, after it has been read."""
        return {"name": name, "bytes": self.size, "sha256": self.hash.hexdigest()}


@dataclass(frozen=True)
class Options:
    """What decides the bytes of a dataset. The fields are its options on the command line, and its request.

    A field that is no ``option`` is filled in by ``complete`` or ``identify``.
    """

    def complete(self, sources: Sources) -> Self:
        """Returns the options with the defaults that depend on others. Must be quick.

        Raises UsageError for options that exclude each other.
        """
        return self

    def identify(self, sources: Sources) -> Self:
        """Returns the options with the hashes of the input files. It may have to read them."""
        return self

    def request(self, sources: Sources) -> Json:
        """The complete options as ``dataset.json`` records them."""
        found = self.identify(sources)
        values = {f.name: getattr(found, f.name) for f in fields_of(type(self)) if found.is_recorded(f)}
        return json.loads(json.dumps(values))

    def is_recorded(self, f: Field) -> bool:
        """Whether the request has a field."""
        return not f.metadata.get("when_given") or getattr(self, f.name) != f.default


class Dataset(ABC):
    """One dataset of ``python -m data_prep``, in ``DATASETS`` of ``__main__`` or of a package of the user."""

    name: str
    title: str
    source: str
    licence: str
    size: str  # of the download, or "generated", or "generated, or published"
    # The architecture of fairseq_sg with the sizes for this dataset. Papers train only classifiers on classes; for
    # those it is a small encoder-decoder.
    arch: str
    classifier: str = ""  # for classes: the papers' classifier, by architecture or by sizes
    splits: tuple[str, ...]
    words: tuple[str, ...] = ()  # as `Corpus.words`
    binarizes: bool = True  # whether its text becomes fairseq's binaries; without text there is no --raw-only
    options: type[Options]
    sources: type[Sources] = Sources

    @property
    def about(self) -> str:
        """The text of ``--help``: the docstring of the class if it has several lines, else that of its module."""
        own = inspect.getdoc(type(self)) or ""
        return own if "\n" in own else sys.modules[type(self).__module__].__doc__ or ""

    def read(self, args: argparse.Namespace) -> tuple[Options, Sources]:
        """The complete options and the sources of a command line. Raises UsageError and DataError."""
        sources = read_options(self.sources, args)
        return read_options(self.options, args).complete(sources), sources

    def request(self, args: argparse.Namespace) -> Json:
        """The request of a command line. Raises UsageError, DataError, and OSError for a missing file."""
        options, sources = self.read(args)
        return options.request(sources)

    @abstractmethod
    def build(self, options: Any, sources: Any) -> Material:
        """Makes the data in memory; writes no file except to the download cache. Raises DataError."""


def check_path(flag: str, path: Path | None, kind: str) -> None:
    """Raises DataError if the value of an option is given, and is no ``file`` or no ``folder``, as ``kind`` says.

    A file must be a regular one: others cannot be read twice, and have no size.
    """
    if path is None or {"file": path.is_file, "folder": path.is_dir}[kind]():
        return
    if not path.exists():
        reason = "nothing has this name; check it"
    elif path.is_dir():
        reason = "it is a folder; name a file in it"
    elif path.is_file():
        reason = "name the folder that it is in"
    else:
        reason = "it is a pipe or a device; save its content to a file, and name that"
    raise DataError(f"{flag} is not a {kind}: {reason}", path)


#: How packed files begin.
PACKED = {
    "gzip": rb"\x1f\x8b\x08",
    "zip": rb"PK\x03\x04",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "xz": rb"\xfd7zXZ\x00",
    "zstd": rb"\x28\xb5\x2f\xfd",
}


def check_unpacked(flag: str, path: Path) -> None:
    """Raises DataError for a packed file, whose bytes are no text."""
    with path.open("rb") as stream:
        beginning = stream.read(16)
    for kind, pattern in PACKED.items():
        if re.match(pattern, beginning):
            raise DataError(f"{flag} is packed ({kind}): unpack it, and name the unpacked file", path)


def check_sizes(subsets: Mapping[str, Sequence[Pair]], published: Mapping[str, int]) -> None:
    """Raises DataError for a subset whose size is not the published one."""
    for name, size in published.items():
        if len(subsets[name]) != size:
            raise DataError(
                f"subset {name} has {len(subsets[name]):,} examples instead of the published {size:,}: are these "
                "the official files, and complete?"
            )


def number_or_nan(text: str) -> float:
    """The number that a text writes; NaN, which is in no range, for another text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def share(text: str) -> float:
    """Argument type: a number from 0 to below 1."""
    value = number_or_nan(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to below 1 (0.1 is a tenth), not {text!r}")
    return value


share.metavar = "F"


def above_0(text: str) -> float:
    """Argument type: a finite number above 0."""
    value = number_or_nan(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


above_0.metavar = "X"


def number_between(least: float, most: float) -> Callable[[str], float]:
    """Argument type: a number from ``least`` to ``most``."""

    def number(text: str) -> float:
        value = number_or_nan(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {text!r}")
        return value

    number.metavar = "X"
    return number


def whole_number(least: int, most: int = 10**9 - 1, hint: str = "") -> Callable[[str], int]:
    """Argument type: a whole number from ``least`` to ``most``; ``hint`` ends the message about others."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, not {shorten(text)}{hint}"
            )
        return int(text)

    number.metavar = "N"
    return number


seed_number = whole_number(0, 2**32 - 1)  # of numpy's legacy generator

"""The official files of PCFG SET, and the parser of their pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from data_prep.corpus import Subset
from data_prep.dataset import DataError, Json, Pair, Subsets, shorten
from data_prep.pcfg.language import count_functions, interpret
from data_prep.sources import OfficialFiles, official_files
from data_prep.text import split_lines

FILES = official_files("pcfg")
DEV = "pcfgset/dev"  # the same for every test
TRAIN_SIZE, DEV_SIZE, TEST_SIZE = 82_622, 4_860, 9_721  # of the folder pcfgset
VOCABULARY, TOGETHER = (531, 520), 531
ENDS = ("src", "tgt")
Types = dict[str, list[str]]
Rewrite = Callable[[str], str]


class PcfgFiles(OfficialFiles):
    """The sources of PCFG SET."""

    urls = {
        "pcfg": "https://raw.githubusercontent.com/i-machine-think/am-i-compositional/"
        "4f75bdd78889150dd78e90bbb7ddec840204c159/data/pcfgset"
    }


def load(name: str, sources: PcfgFiles, rewrite: Rewrite = str) -> list[Pair]:
    """Reads the pairs of two official files, NAME.src and NAME.tgt; see ``parse``. Raises DataError."""
    files = [FILES[f"{name}.{end}"] for end in ENDS]
    contents = [sources.read(file) for file in files]
    pairs = parse(*(part for content in contents for part in content), rewrite)
    for file, (path, data) in zip(files, contents, strict=True):
        file.check(path, data)
    return pairs


def parse(
    source_path: Path, source_data: bytes, target_path: Path, target_data: bytes, rewrite: Rewrite = str
) -> list[Pair]:
    """Reads the pairs of two files with an expression, or its value, on each line.

    ``rewrite`` maps a source to the expression of the ten functions that it stands for (see ``pcfg.language``).

    Raises:
        DataError: with file and line, for a line that is not an expression, for a target that is not the value of its
            expression, and for different numbers of lines; see also ``text.split_lines``.
    """
    sources, targets = split_lines(source_path, source_data), split_lines(target_path, target_data)
    pairs = []
    for number, pair in enumerate(map(Pair, sources, targets), start=1):
        try:
            meant = interpret(rewrite(pair.source))
        except ValueError as error:
            raise DataError(str(error), source_path, number) from None
        if meant != pair.target:
            raise DataError(difference(pair.target, meant), target_path, number)
        pairs.append(pair)
    if len(sources) != len(targets):
        raise DataError(f"{len(targets):,} lines, but {source_path.name} has {len(sources):,}", target_path)
    return pairs


def difference(target: str, meant: str) -> str:
    """Describes the first difference between a target and the value of its expression."""
    found, expected = ([*text.split(" "), "the end"] for text in (target, meant))
    position = next(i for i, (one, other) in enumerate(zip(found, expected)) if one != other)
    word = shorten(found[position])
    return f"wrong target: word {position + 1} is {word}, but the expression means {expected[position]}"


def pair_files(names: Iterable[str]) -> list[str]:
    """The paths of the two files of every name."""
    return [f"{name}.{end}" for name in names for end in ENDS]


def describe(paths: Iterable[str]) -> Json:
    """The origin of data from these files, for ``dataset.json``."""
    return {"files": [{**FILES[path].describe(), "name": path} for path in paths]}


def function_counts(pairs: list[Pair]) -> list[str]:
    """The type of every example: the number of its functions, ``functions_01`` and so on."""
    return [f"functions_{count_functions(pair.source):02}" for pair in pairs]


def subsets_of(pairs: Subsets, types: Types, sizes: Mapping[str, int]) -> dict[str, Subset]:
    """The subsets with the types of their examples, and with the published sizes of those that have one."""
    return {name: Subset(pairs[name], types[name], published=sizes.get(name)) for name in pairs}

"""The docstring of every dataset has examples and names its source; those that a rule can check are true."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_prep import burgers, cfq, ctl, darcy, libreoffice_help, listops, parallel, sort_of_clevr
from data_prep.__main__ import DATASETS
from data_prep.ctl.sample import FUNCTIONS, SYMBOLS, sample
from data_prep.ctlpp import DEFAULT_SEED, NAMES
from data_prep.ctlpp.graph import RandomState, draw_tables
from data_prep.dataset import Pair
from data_prep.mathematics import tokenize
from data_prep.pcfg import language as pcfg_functions
from data_prep.scan import grammar as scan_grammar
from data_prep.sort_of_clevr.questions import words_of
from data_prep.sort_of_clevr.scenes import Stream
from data_prep.strings import First, Parity
from helpers.data_files import detokenize

DOCSTRINGS = {dataset.name: dataset.about for dataset in DATASETS}


def examples(name: str) -> list[Pair]:
    """The lines ``source  ->  target`` of a docstring, without text to the right of them.

    A line that begins far to the right continues the line above it.
    """
    text = re.sub(r"\n {8,}(?! *--)", " ", DOCSTRINGS[name])
    found = re.findall(r"^ {4}(?:--\S+ \w+ {2,})?(\S.*?) +->  (.+?)(?: {3,}.*)?$", text, re.MULTILINE)
    return [Pair(source.strip(), " ".join(target.split())) for source, target in found]


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_examples_and_source(name: str) -> None:
    assert len(examples(name)) >= 2, examples(name)
    assert re.search(r"^Source: \S", DOCSTRINGS[name], re.MULTILINE)


def test_waves() -> None:
    """Both sides as numpy has them, on 64 points."""
    names = {"x": 2 * np.pi * np.arange(64) / 64, "sin": np.sin, "cos": np.cos}
    for pair in examples("burgers"):
        before, after = (
            eval(re.sub(r"(\d) (sin|cos) ?(\(.*?\)|x)", r"\1 * \2(\3)", side.replace("−", "-")), names) for side in pair
        )
        np.testing.assert_allclose(burgers.solve(before, 1, 0.1, 2 * np.pi), after, atol=1e-4)


def test_pressures() -> None:
    for pair in examples("darcy"):
        a, u = (float(side.partition(" = ")[2]) for side in pair)
        found, _ = darcy.solve(np.full((101, 101), a), darcy.InverseLaplacian(101))
        assert found[50, 50] == pytest.approx(u, abs=1e-5)


def ctl_meaning(source: str) -> str:
    tables = dict(zip(FUNCTIONS, sample(ctl.REFERENCE_SEED).tables))
    first, *rest = source.split(" ")
    words = [first, *rest] if first in SYMBOLS else [first, *rest][::-1]
    symbol = SYMBOLS.index(words[0])
    for function in words[1:]:
        symbol = tables[function][symbol]
    return SYMBOLS[symbol]


def ctlpp_meaning(source: str) -> str:
    tables = dict(zip(NAMES, draw_tables(RandomState(DEFAULT_SEED)).tolist()))
    *functions, symbol = source.split(" ")
    for function in reversed(functions):
        symbol = tables[function][int(symbol)]
    return str(symbol)


def listops_value(source: str) -> str:
    words = [f'["{word[1:]}",' if word in listops.OPERATORS else f"{word}," for word in source.split(" ")]
    return str(nested_value(json.loads("".join(words).replace(",]", "]").removesuffix(","))))


def nested_value(nested: int | list) -> int:
    """The value of a nested list: a number, or the name of an operator and its arguments."""
    if isinstance(nested, int):
        return nested
    arguments = [listops.Drawn("", nested_value(argument), 0) for argument in nested[1:]]
    return listops.apply(f"[{nested[0]}", arguments).value


def double_addition_meaning(source: str) -> str:
    numbers = [int(char) if char.isdecimal() else ord(char) - ord("a") for char in source.split(" ")]
    total = numbers[0] + 10 * numbers[1] + numbers[2] + 10 * numbers[3]
    result = f"{total % 10} {total // 10 % 10}"
    return result if source[0].isdecimal() else result.translate(str.maketrans("0123456789", "abcdefghij"))


def add_multiply_meaning(source: str) -> str:
    operator, *numbers = source.split(" ")
    one, other = int(numbers[1] + numbers[0]), int(numbers[3] + numbers[2])
    result = one + other if operator == "+" else one * other
    return f"{result % 10} {result // 10 % 10}"


MEANINGS = {
    "scan": scan_grammar.interpret,
    "pcfg": pcfg_functions.interpret,
    "arithmetic": lambda source: str(eval(source) % 10),
    "listops": listops_value,
    "parity": lambda source: Parity().example(source.replace(" ", "").removesuffix("CLS")).target,
    "first": lambda source: First().example(source.replace(" ", "").removeprefix("CLS")).target,
    "double_addition": double_addition_meaning,
    "add_multiply": add_multiply_meaning,
    "ctl": ctl_meaning,
    "ctlpp": ctlpp_meaning,
}


@pytest.mark.parametrize("name", MEANINGS)
def test_examples_are_true(name: str) -> None:
    """With the default seed, where functions are drawn."""
    for source, target in examples(name):
        assert MEANINGS[name](source) == target, source


def test_examples_of_mathematics() -> None:
    plain, *_, words = examples("mathematics")
    assert plain.target == str(87 - -64)
    assert words == Pair(*map(tokenize, plain)) and detokenize(words.source) == plain.source


def test_examples_of_cfq() -> None:
    """Targets are words already."""
    assert all(cfq.query_words(pair.target) == pair.target for pair in examples("cfq"))


def test_examples_of_cogs(shared_data: Path) -> None:
    rows = gzip.decompress((shared_data / "cogs" / "train.tsv.gz").read_bytes()).decode("utf-8").splitlines()
    known = {Pair(*row.split("\t")[:2]) for row in rows}
    assert set(examples("cogs")) <= known


def test_examples_of_sort_of_clevr() -> None:
    """On the first image of the published test set."""
    arrays = sort_of_clevr.make(Stream(sort_of_clevr.PUBLISHED_SEED), 1, sort_of_clevr.SortOfClevrOptions())
    answers = [sort_of_clevr.ANSWERS[number] for number in arrays["answers"][0]]
    known = set(map(Pair, map(words_of, arrays["questions"][0]), answers))
    assert set(examples("sort_of_clevr")) <= known


def test_examples_of_iwslt(shared_data: Path) -> None:
    with tarfile.open(shared_data / "iwslt_en_vi" / "dev-2012-en-vi.tgz") as archive:
        sides = [archive.extractfile(f"tst2012.{end}").read().decode("utf-8").split("\n") for end in ("en", "vi")]
    known = {Pair(*(parallel.clean(side, unescape=True) for side in pair)) for pair in zip(*sides)}
    assert set(examples("iwslt_en_vi")) <= known


def test_examples_of_libreoffice(shared_data: Path) -> None:
    """In two of the pages; no other page is read, which takes long."""
    folder = shared_data / "libreoffice_help"
    if not folder.is_dir():
        pytest.skip(f"no packages at {folder}")
    names = ("shared/01/05210400.html", "swriter/00/00000405.html")
    texts = libreoffice_help.read_languages(folder, ["en-US", "de"])
    sides = [
        libreoffice_help.read_paragraphs(folder, {name: pages[name] for name in names}) for pages in texts.values()
    ]
    known = {pair for pairs in libreoffice_help.align(*sides).pairs.values() for pair in pairs}
    assert set(examples("libreoffice_help")) <= known

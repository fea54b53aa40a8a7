"""CTL++: the graphs, the draw from them, and the output and errors of ``python -m data_prep ctlpp``."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep.__main__ import main
from data_prep.ctlpp import NAMES, OVERLAPS, SHARED, Variant, draw, draw_symbols, render, staged, unstaged
from data_prep.ctlpp.graph import START, Graph, allocate, draw_tables, make_graph, results, unique
from data_prep.dataset import DataError, Pair
from data_prep.folder import read_manifest

TABLES = draw_tables(RandomState(0))
# Adjacent groups; the first is applied first.
ALTERNATING, REPEATING = {"ab", "ba"}, {"aa", "bb"}


def variant(name: str) -> Variant:
    """A, R, or S as ``S OVERLAP SHARED``, of the default seed."""
    if name in ("A", "R"):
        return unstaged(TABLES, name)
    random = RandomState(0)
    tables = draw_tables(random)
    return staged(tables, *map(int, name.split()[1:]), random)


def examples(graph: Graph, length: int) -> list[tuple[int, ...]]:
    """All examples of a graph by exhaustive search, independent of the code under test."""
    found = []

    def go(row: tuple[int, ...], before: int, symbol: int) -> None:
        if len(row) == 1 + length:
            if graph.last[before]:
                found.append(row)
            return
        for function in range(32):
            if graph.follows[before, symbol, function]:
                go((*row, function), function, int(graph.tables[function][symbol]))

    for symbol in range(8):
        go((symbol,), START, symbol)
    return found


# ---- counts


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.floats(0.02, 0.15))
def test_count_and_every_are_what_walking_finds(seed: int, length: int, density: float) -> None:
    random = RandomState(seed)
    graph = Graph(random.random_sample((33, 8, 32)) < density, random.random_sample(32) < 0.5, draw_tables(random))
    found = examples(graph, length)
    assert graph.count(length) == len(found)
    assert list(map(tuple, graph.every(length).tolist())) == found


@pytest.mark.parametrize("name", ["A", "R"])
def test_counts_of_groups_of_16(name: str) -> None:
    for graph in (variant(name).train, variant(name).gen):
        assert [graph.count(length) for length in range(1, 7)] == [8 * 32 * 16**n for n in range(6)]


@pytest.mark.parametrize(("overlap", "shared"), [(o, k) for o in OVERLAPS for k in SHARED])
def test_counts_of_staged(overlap: int, shared: int) -> None:
    found, size = variant(f"S {overlap} {shared}"), (32 - overlap) // 4
    assert [found.gen.count(length) for length in range(1, 7)] == [0, 16 * size**2, 0, 32 * size**4, 0, 64 * size**6]
    assert [found.train.count(length) for length in (1, 3, 5)] == [0, 0, 0]
    # Every function of a1 or b1 returns each symbol once; one of o follows 4 + K / 2 symbols on average.
    assert found.train.count(2) == 2 * size * 8 * size + size * overlap * (8 + shared)


def test_count_of_longer_staged_examples() -> None:
    found = variant("S 16 4").train
    # Counted by a separate program; the reference's counter has 163,840 and 26,214,400.
    assert [found.count(length) for length in (2, 4, 6)] == [1_024, 131_312, 16_840_756]


def test_allocation_of_a_and_r() -> None:
    half = {length: variant("A").train.count(length) // 2 for length in range(2, 7)}
    assert allocate(half, 301_000) == {2: 2_048, 3: 32_768, 4: 88_728, 5: 88_728, 6: 88_728}


def test_allocation_of_gen_gives_the_remainder_to_the_shortest() -> None:
    every = {length: variant("S 4 2").gen.count(length) for length in (2, 4, 6)}
    assert allocate(every, 1_000) == {2: 334, 4: 333, 6: 333}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).map(sorted), st.integers(0, 200))
def test_allocation(counts: list[int], size: int) -> None:
    possible = dict(enumerate(counts, start=2))
    shares = allocate(possible, size)
    assert sum(shares.values()) == min(size, sum(possible.values()))
    assert all(0 <= shares[length] <= possible[length] for length in possible)
    # Lengths differ by at most one example, unless all of a length are used.
    assert all(shares[a] <= shares[b] + 1 for a in shares for b in shares if shares[b] < possible[b])


# ---- the draw


@pytest.mark.parametrize("name", ["A", "R", "S 16 4", "S 4 2"])
def test_sample_is_distinct_and_of_the_graph(name: str) -> None:
    for graph in (variant(name).train, variant(name).gen):
        rows = graph.sample(4, 2_000, RandomState(7))
        assert rows.shape == (2_000, 5) and len(set(map(tuple, rows.tolist()))) == 2_000
        for symbol, *functions in rows.tolist():
            before = START
            for function in functions:
                assert graph.follows[before, symbol, function]
                before, symbol = function, graph.tables[function][symbol]
            assert graph.last[before]


def test_sample_may_take_all() -> None:
    graph = variant("S 16 4").gen
    assert sorted(graph.sample(2, 256, RandomState(1)).tolist()) == sorted(graph.every(2).tolist())


def test_walk_is_uniform_over_what_may_follow() -> None:
    graph = variant("S 4 2").train
    rows = graph.walk(2, 80_000, RandomState(2))
    assert all(9_600 < count < 10_400 for count in Counter(rows[:, 0].tolist()).values())
    first = Counter(rows[:, 1].tolist())
    assert set(first) == set(np.flatnonzero(graph.follows[START, 0])) and len(first) == 14
    assert all(5_300 < count < 6_130 for count in first.values())
    function, symbol = 4, int(graph.tables[4][3])  # after e(3)
    second = Counter(row[2] for row in rows.tolist() if row[:2] == [3, function])
    allowed = np.flatnonzero(graph.follows[function, symbol])
    assert set(second) == set(allowed.tolist()) and max(second.values()) < 2 * min(second.values())


def test_unique_keeps_the_first() -> None:
    rows = np.array([[1, 31, 0], [0, 0, 1], [1, 31, 0], [0, 1, 0], [0, 0, 1]])
    assert unique(rows).tolist() == [[1, 31, 0], [0, 0, 1], [0, 1, 0]]


def test_too_few_examples() -> None:
    graph = variant("S 16 4").gen
    with pytest.raises(DataError, match="allows 270,592 examples instead of 270,593"):
        draw(graph, 1, 270_593, RandomState(0))


def test_tables_are_different_bijections() -> None:
    assert [sorted(table) for table in TABLES.tolist()] == [list(range(8))] * 32
    assert len(set(map(tuple, TABLES.tolist()))) == 32
    random = RandomState(0)
    assert TABLES[:3].tolist() == [random.permutation(8).tolist() for _ in range(3)]


def test_edges() -> None:
    groups = {"x": range(2), "y": range(2, 32)}
    graph = make_graph(TABLES, groups, {"IN": "x", "x": "y"}, "y")
    assert graph.follows[START, :, :2].all() and not graph.follows[START, :, 2:].any()
    assert graph.follows[:2, :, 2:].all() and not graph.follows[:2, :, :2].any() and not graph.follows[2:32].any()
    assert graph.last.tolist() == [False] * 2 + [True] * 30


# ---- the symbols of o


@pytest.mark.parametrize(("overlap", "shared"), [(o, k) for o in OVERLAPS for k in SHARED])
def test_symbols_of_overlap(overlap: int, shared: int) -> None:
    allowed = draw_symbols(overlap, shared, RandomState(3))
    common, either = allowed["a1"] & allowed["b1"], allowed["a1"] | allowed["b1"]
    assert either.all() and (common.sum(axis=1) == shared).all()
    rest = 8 - shared
    assert (allowed["a1"].sum(axis=1) == shared + (rest + 1) // 2).all()
    for function in range(overlap):
        only_a, only_b = (np.flatnonzero(allowed[group][function] & ~common[function]) for group in ("a1", "b1"))
        assert max(only_a) < min(only_b)
    around = -(-8 // shared)
    for start in range(0, overlap - around + 1, around):
        assert common[start : start + around].any(axis=0).all()


def test_symbols_of_the_reference() -> None:
    # As the released code prints them for 4 functions and 2 symbols, and 8 and 3 (its first seed).
    found = variant("S 4 2").symbols
    assert list(found["a1"].values()) == ["0 1 2 3 4", "0 1 2 3 4", "0 1 2 4 5", "0 1 2 6 7"]
    assert list(found["b1"].values()) == ["0 1 5 6 7", "2 3 5 6 7", "3 4 5 6 7", "3 4 5 6 7"]
    found = variant("S 8 3").symbols
    assert list(found["a1"].values())[3:] == ["0 1 2 3 4 6", "0 1 2 3 5 7", "0 1 2 3 4 6", "0 1 2 3 4 7", "0 1 2 3 5 6"]
    assert list(found["b1"].values())[3:] == ["2 4 5 6 7", "3 4 5 6 7", "0 1 5 6 7", "0 4 5 6 7", "3 4 5 6 7"]
    assert list(found["a1"]) == list("abcdefgh")


def test_order_of_words() -> None:
    rows = np.array([[3, 0, 1, 2]])
    assert results(rows, TABLES).tolist() == [TABLES[2][TABLES[1][TABLES[0][3]]]]
    assert render(rows, TABLES) == [Pair("c b a 3", str(results(rows, TABLES)[0]))]
    assert len(NAMES) == 32 and NAMES[26:] == "ABCDEF"


# ---- the command

COMMANDS = {
    "A": "--variant A",
    "R": "--variant R --without-singles --seed 5",
    "S": "--variant S --overlap 16 --shared-symbols 4",
}
SIZES = {"A": 300_000 + 4_096 + 256, "R": 300_000 + 4_096, "S": 300_000 + 1_024}
LENGTHS_OF_GEN = {
    "A": dict.fromkeys(range(2, 7), 200),
    "R": dict.fromkeys(range(2, 7), 200),
    "S": {2: 256, 4: 372, 6: 372},
}
# sha256 of train.src, train.tgt and gen.tgt.
WRITTEN = {
    "A": (
        "301ef5731034ffd9a3b08857060d22151a0f0a86a5968d3e8f7f29e3907972b2",
        "37c8cbcbf48539eeb689d26353561151c1f69d44891d74867b49aff8bd185957",
        "481383eec6c5acd69176e3f06feb00c3029022e9fe6274010d88e480e7c69fa6",
    ),
    "R": (
        "2024eb7f1c5d0e128ccecf050778ab320e0d5bb1bcf94e3d929432f6f30875db",
        "2823d064e093876967af4934e12c7772a58a4436acddd581bdf6937665db34ea",
        "a6c1ec13b478ccdb40c7727a5362ad09104c96fbf499f6d51bd3dff51f32004f",
    ),
    "S": (
        "646b4bfe45b9cbb6726de21206a7c4f3091bbcdbc6f620c41b394f5f63646a9a",
        "05e540af6af0e4e884c9070353a5a0b1a8604bb4be79097710e30bc45ce737a9",
        "e4667e1ba45ce9896dd0ed61d248f7f6b4355b9fdca7b6631ab5f11115f221e5",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per variant, as written by the command."""
    folder = tmp_path_factory.mktemp("ctlpp")
    for name, options in COMMANDS.items():
        assert main(["ctlpp", *options.split(), "--raw-only", "--out", str(folder / name)]) == 0
    return {name: folder / name for name in COMMANDS}


def steps(source: str, tables: dict[str, str]) -> tuple[list[str], list[str]]:
    """The functions in order of application, and the symbols: the first, and the value of each function."""
    *functions, symbol = source.split(" ")
    symbols = [symbol]
    for function in reversed(functions):
        symbols.append(tables[function][int(symbols[-1])])
    return functions[::-1], symbols


def allowed_pairs(name: str, subset: str) -> set[str]:
    """The pairs of groups that may be adjacent."""
    if name == "S":
        inside = {"a1b2", "b1a2"} if subset == "gen" else {"a1a2", "b1b2", "a1o", "b1o"}
        return inside | {second + first for second in ("a2", "b2", "o") for first in ("a1", "b1")}
    return REPEATING if (name == "A") == (subset == "gen") else ALTERNATING


@pytest.mark.parametrize("name", COMMANDS)
def test_meaning_of_lines(name: str, folders: dict[str, Path], read_subset) -> None:
    """Meaning and adjacent groups, by the written functions and groups: all lines of valid and gen, and some of train.

    The last lines of train are all pairs of functions and, in A, all single functions.
    """
    origin = read_manifest(folders[name])["origin"]
    tables = {function: table.replace(" ", "") for function, table in origin["tables"].items()}
    group_of = {function: group for group, members in origin["groups"].items() for function in members.split(" ")}
    assert set(group_of) == set(tables) == set(NAMES)
    for subset in ("train", "valid", "gen"):
        allowed, firsts, lasts = allowed_pairs(name, subset), set(), set()
        lines = read_subset(folders[name], subset)
        for source, target in lines[:-4_352:50] + lines[-4_352:] if subset == "train" else lines:
            functions, symbols = steps(source, tables)
            assert symbols[-1] == target
            groups = [group_of[function] for function in functions]
            assert allowed.issuperset(map("".join, pairwise(groups)))
            firsts.add(groups[0])
            lasts.add(groups[-1])
        assert firsts == ({"a1", "b1"} if name == "S" else {"a", "b"})
        assert lasts == ({"a2", "b2"} | ({"o"} if subset != "gen" else set()) if name == "S" else {"a", "b"})


def test_symbols_of_staged_lines(folders: dict[str, Path], read_subset) -> None:
    """A function of o follows all its written symbols and no other."""
    origin = read_manifest(folders["S"])["origin"]
    tables = {function: table.replace(" ", "") for function, table in origin["tables"].items()}
    group_of = {function: group for group, members in origin["groups"].items() for function in members.split(" ")}
    seen: dict[str, dict[str, set[str]]] = {group: {f: set() for f in NAMES[:16]} for group in ("a1", "b1")}
    for source, _ in read_subset(folders["S"], "train") + read_subset(folders["S"], "valid"):
        functions, symbols = steps(source, tables)
        for before, after, symbol in zip(functions, functions[1:], symbols[1:]):
            if group_of[after] == "o":
                seen[group_of[before]][after].add(symbol)
    written = {group: {f: set(s.split(" ")) for f, s in sets.items()} for group, sets in origin["symbols"].items()}
    assert seen == written
    assert {len(written["a1"][f] & written["b1"][f]) for f in NAMES[:16]} == {4}


@pytest.mark.parametrize("name", COMMANDS)
def test_subsets(name: str, folders: dict[str, Path], read_subset) -> None:
    train, valid, gen = (
        [pair.source for pair in read_subset(folders[name], subset)] for subset in ("train", "valid", "gen")
    )
    assert (len(train), len(valid), len(gen)) == (SIZES[name], 1_000, 1_000)
    assert len(set(valid)) == len(set(gen)) == 1_000 and not set(train) & set(valid + gen)
    drawn, pairs = train[:300_000], train[300_000:]
    assert len(set(drawn)) == 300_000
    pairs, singles = ([s for s in pairs if s.count(" ") == length] for length in (2, 1))
    graph = variant("S 16 4").train if name == "S" else variant(name).train
    assert len(set(pairs)) == len(pairs) == graph.count(2)
    assert len(set(singles)) == len(singles) == (256 if name == "A" else 0)
    assert set(drawn).isdisjoint(singles) and set(pairs) >= {s for s in drawn if s.count(" ") == 2}
    assert Counter(source.count(" ") for source in gen) == LENGTHS_OF_GEN[name]
    assert 2 not in {source.count(" ") for source in valid}
    lengths = Counter(source.count(" ") for source in drawn + valid)
    half = {length: graph.count(length) // 2 for length in range(2, 7)}
    expected = {2: 512, 4: 65_656, 6: 234_832} if name == "S" else allocate(half, 301_000)
    assert lengths == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_types_and_manifest(name: str, folders: dict[str, Path], read_subset) -> None:
    for subset in ("valid", "gen"):
        types = (folders[name] / "raw" / f"{subset}.type").read_text("ascii").splitlines()
        assert types == [f"length_{pair.source.count(' ')}" for pair in read_subset(folders[name], subset)]
    found = read_manifest(folders[name])
    staged = {"overlap": 16, "shared_symbols": 4} if name == "S" else {"overlap": None, "shared_symbols": None}
    assert found["request"] == {
        "dataset": "ctlpp",
        "variant": name,
        **staged,
        "singles": name == "A",
        "seed": 5 if name == "R" else 0,
        "raw_only": True,
    }
    assert found["labels"] == list("01234567") and found["vocabulary"] == {"source": 40, "target": 8, "together": 40}
    files = found["files"]
    assert tuple(files[f"raw/{file}"] for file in ("train.src", "train.tgt", "gen.tgt")) == WRITTEN[name]


def test_binaries(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("data_prep.ctlpp.PUBLISHED", {"train": 2_000, "valid": 50, "gen": 100})
    result = run("ctlpp", "--variant", "A", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "8 classes" in result.out and (tmp_path / "out" / "label" / "valid.idx").is_file()
    assert len((tmp_path / "out" / "dict.src.txt").read_text("ascii").splitlines()) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "the following arguments are required: --variant"),
        ("--variant B", "argument --variant: invalid choice: 'B'"),
        ("--variant S", "--variant S needs --overlap"),
        ("--variant S --overlap 8", "--variant S needs --shared-symbols"),
        ("--variant S --shared-symbols 2", "--variant S needs --overlap"),
        ("--variant S --overlap 5 --shared-symbols 2", "argument --overlap: invalid choice: 5"),
        ("--variant S --overlap 8 --shared-symbols 8", "argument --shared-symbols: invalid choice: 8"),
        ("--variant A --overlap 8", "--overlap belongs to --variant S, not to --variant A"),
        ("--variant R --shared-symbols 2", "--shared-symbols belongs to --variant S, not to --variant R"),
        (
            "--variant S --overlap 8 --shared-symbols 2 --without-singles",
            "--without-singles belongs to --variant A and R",
        ),
        ("--variant A --seed -1", "argument --seed: must be a whole number from 0 to 4294967295, not '-1'"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("ctlpp", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}") and list(tmp_path.iterdir()) == []

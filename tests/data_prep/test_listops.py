"""ListOps: the language, the draw, and the output and errors of ``python -m data_prep listops``."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import listops
from data_prep.dataset import DataError, Pair
from data_prep.draws import DEV_DEPTHS, GEN_DEPTHS, TRAIN_DEPTHS
from data_prep.listops import DEPTHS, Block, Drawn, Shapes, TooLong, apply, draw, fill, height, sample, sample_sets
from helpers.forked import REPOSITORY

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
EXPRESSIONS = st.recursive(
    st.sampled_from("0123456789"),
    lambda inner: st.builds(
        lambda operator, arguments: " ".join([operator, *arguments, "]"]),
        st.sampled_from(OPERATORS),
        st.lists(inner, min_size=2, max_size=5),
    ),
    max_leaves=30,
)

# An independent reading: an expression is a number, or a list of a name and expressions.
Nested = int | list


def read(expression: str) -> Nested:
    words = [f'["{word[1:]}",' if word in OPERATORS else f"{word}," for word in expression.split(" ")]
    return json.loads("".join(words).replace(",]", "]").removesuffix(","))


def value(nested: Nested) -> int:
    if isinstance(nested, int):
        return nested
    name, *arguments = nested
    values = list(map(value, arguments))
    function = {"MIN": min, "MAX": max, "SM": lambda v: sum(v) % 10, "MED": lambda v: int(statistics.median(v))}
    return function[name](values)


def prune(nested: Nested) -> Nested:
    """Only the arguments that determine the result; of equal ones, the first in order of value and place."""
    if isinstance(nested, int):
        return nested
    name, *arguments = nested
    values = list(map(value, arguments))
    ranked = sorted(range(len(arguments)), key=lambda place: (values[place], place))
    if name == "SM":
        selected = ranked
    elif name == "MED":
        selected = sorted({ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]})
    else:
        selected = [values.index(value(nested))]
    return [name, *(prune(arguments[place]) for place in selected)]


def depth(nested: Nested) -> int:
    return 0 if isinstance(nested, int) else 1 + max(map(depth, nested[1:]))


def expected(expression: str) -> tuple[int, int]:
    """The value, and the dependency depth as that of the tree without unselected arguments (thesis, D.3.2)."""
    nested = read(expression)
    assert value(prune(nested)) == value(nested)
    return value(nested), depth(prune(nested))


def drawn(nested: Nested) -> Drawn:
    """The expression as it is put together when it is drawn."""
    if isinstance(nested, int):
        return Drawn(str(nested), nested, 0)
    return apply(f"[{nested[0]}", list(map(drawn, nested[1:])))


@given(EXPRESSIONS)
def test_meaning(expression: str) -> None:
    assert drawn(read(expression)) == (expression, *expected(expression))


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("7", (7, 0)),
        ("[MED 4 8 5 [MAX 8 4 9 ] ]", (6, 1)),
        ("[SM [MED [MIN 1 7 4 [MAX 2 4 0 8 9 ] ] 7 ] 5 [MED 8 5 8 ] 0 7 ]", (4, 3)),
        ("[MIN 3 [SM 1 2 ] ]", (3, 1)),
        ("[MIN [SM 1 2 ] 3 ]", (3, 2)),
        ("[MAX 3 [SM 1 2 ] ]", (3, 1)),
        ("[MED 3 [SM 1 2 ] [SM 1 [SM 1 1 ] ] ]", (3, 2)),
        ("[MED 3 [SM 1 2 ] 9 9 ]", (6, 2)),
        ("[MED 3 9 [SM 1 8 ] 9 ]", (9, 2)),
        ("[SM 9 9 2 ]", (0, 1)),
    ],
)
def test_meaning_of_examples(expression: str, meaning: tuple[int, int]) -> None:
    assert drawn(read(expression))[1:] == meaning == expected(expression)


# ---- the draw


def length(expression: str) -> int:
    """An operator counts as bracket, name and closing bracket."""
    return expression.count("[") * 3 + sum(word.isdigit() for word in expression.split(" "))


def test_shallow_tree_becomes_an_argument_but_the_last() -> None:
    shapes = Shapes((1,), 2, 4)
    shapes.uniform = lambda: 0.999
    assert shapes.tree() == [[], [], [], [[], [], [], [], []], []] and height(shapes.tree()) == 2
    numbers = iter([0.3, *(0.0, 0.3, 0.3, 0.0), *(0.34, 0.3, 0.3, 0.3, 0.34)])
    shapes.uniform = numbers.__next__
    assert shapes.tree() == [[], [[], [], []], [], []]
    assert next(numbers, None) is None


def test_limit_of_height() -> None:
    shapes = Shapes((1,), 1, 3)
    shapes.uniform = lambda: 0.0
    assert shapes.tree() == [[[[], []]] * 2] * 2


def test_too_long() -> None:
    """An operator with 5 arguments instead of a digit makes a tree 7 longer: seven of them fill 50,
    the eighth ends the tree.
    """
    shapes = Shapes((1,), 1, 5)
    numbers = iter([0.0, 0.99] * 1_000)
    shapes.uniform = numbers.__next__
    with pytest.raises(TooLong):
        shapes.tree()
    assert len(list(numbers)) == 2 * (1_000 - 8)


def test_draw_is_as_long_as_allowed() -> None:
    found = [candidate for number in range(3) for candidate in draw(Block((8, number), 1, 5, 1))]
    assert max(length(candidate.expression) for candidate in found) == 50
    for expression, result, dependency in found[::7]:
        assert (result, dependency) == expected(expression)
        assert dependency <= depth(read(expression)) <= 5


@pytest.mark.parametrize(
    ("depths", "blocks", "shares", "tolerance"),
    [
        (TRAIN_DEPTHS, 8, {1: 0.5596, 2: 0.1509, 3: 0.0563, 4: 0.0208, 5: 0.0149}, 0.006),
        (DEV_DEPTHS, 8, {6: 0.007}, 0.0015),
        (GEN_DEPTHS, 24, {7: 0.0007}, 0.0002),
    ],
)
def test_shares_of_the_depths(depths: range, blocks: int, shares: dict[int, float], tolerance: float) -> None:
    """The shares of the authors' generator, including expressions that are too long: counted from draws of its code."""
    work = [Block((2, number), depths[0], depths[-1], depths[0]) for number in range(blocks)]
    found = Counter(candidate.depth for block in work for candidate in draw(block))
    draws = blocks * listops.DRAWS
    assert {number: found[number] / draws for number in shares} == pytest.approx(shares, abs=tolerance)
    assert set(found) == set(depths)


def test_operators_digits_and_arguments_are_uniform() -> None:
    tree = [[] for _ in range(5)]
    stream = Shapes((4,), 1, 5).uniform
    words = Counter(word for _ in range(4_000) for word in fill(tree, stream).expression.split(" ") if word != "]")
    assert {word: count / 4_000 for word, count in words.items()} == pytest.approx(
        dict.fromkeys(OPERATORS, 0.25) | dict.fromkeys("0123456789", 0.5), abs=0.04
    )
    shapes, numbers = Shapes((4,), 1, 1), Counter()
    for _ in range(20_000):
        shapes.room = 7
        numbers[len(shapes.subtree(1))] += 1
    assert {number: count / 20_000 for number, count in numbers.items()} == pytest.approx(
        {0: 0.7} | dict.fromkeys((2, 3, 4, 5), 0.075), abs=0.01
    )


def test_sample() -> None:
    first = sample(range(2, 5), 100, (6,), set())
    taken = {pair.source for pair in first.pairs()}
    balance = sample(range(2, 5), 100, (6,), set(taken))
    for index, pair in enumerate(balance.pairs()):
        dependency = 2 + index % 3
        assert (int(pair.target), dependency) == expected(pair.source)
        assert balance.types()[index] == f"depth_{dependency}"
    sources = {pair.source for pair in balance.pairs()}
    assert len(sources) == len(balance.pairs()) == 100 and not sources & taken


def test_number_of_processes_changes_nothing() -> None:
    alone, two = (sample_sets(1_000, 10, 3, processes) for processes in (1, 2))
    assert list(alone) == list(two) == list(DEPTHS)
    for subset in DEPTHS:
        assert list(alone[subset].pairs()) == list(two[subset].pairs())


def test_a_process_that_is_ended_from_outside_is_missed() -> None:
    with pytest.raises(DataError, match="was killed"):
        with listops.processes(2) as call:
            list(call(os._exit, [1, 1, 1]))


def test_processes_end_with_a_killed_run() -> None:
    """Its output ends once no process has it any more."""
    code = """
import os, signal
from data_prep.listops import processes

with processes(2) as call:
    print(*call(abs, [-1, -2]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"1 2\n")


def test_number_of_processes() -> None:
    assert 1 <= listops.number_of_processes() <= listops.MOST_BLOCKS


# ---- the command


@pytest.fixture
def prepare(run, monkeypatch: pytest.MonkeyPatch):
    """Prepares a small dataset in this process only, and returns its ``dataset.json``."""
    monkeypatch.setattr(listops, "number_of_processes", lambda: 1)

    def prepare(out: Path, *options: object) -> dict:
        result = run("listops", "--train", 1_000, "--test", 10, *options, "--out", out)
        assert (result.code, result.err) == (0, "")
        return json.loads((out / "dataset.json").read_text("utf-8"))

    return prepare


def test_command(prepare, read_subset, tmp_path: Path) -> None:
    found = prepare(tmp_path / "out")
    assert found["request"] == {"dataset": "listops", "train": 1_000, "test": 10, "seed": 1, "raw_only": False}
    types = {name: entry["types"] for name, entry in found["subsets"].items()}
    assert types == {
        "train": {f"depth_{number}": 200 for number in range(1, 6)},
        "valid": {f"depth_{number}": 2 for number in range(1, 6)},
        "dev": {"depth_6": 10},
        "gen": {"depth_7": 5, "depth_8": 5},
    }
    assert found["labels"] == list("0123456789") and (tmp_path / "out" / "label" / "gen.bin").is_file()
    assert found["vocabulary"] == {"source": 15, "target": 10, "together": 15}
    sources = []
    for name in types:
        kinds = (tmp_path / "out" / "raw" / f"{name}.type").read_text().split()
        for pair, kind in zip(read_subset(tmp_path / "out", name), kinds, strict=True):
            result, dependency = expected(pair.source)
            assert (pair, kind) == (Pair(pair.source, str(result)), f"depth_{dependency}")
            sources.append(pair.source)
    assert len(sources) == len(set(sources)) == 1_030
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((tmp_path / "out" / "raw").iterdir())))
    assert digest.hexdigest() == "c567f861a811940c39500f428e0cbd1a7242dca16dda53b518bbf5c645646817"


def test_default_sizes_and_seed(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stop(*arguments: int) -> None:
        asked.append(arguments)
        raise DataError("far enough")

    monkeypatch.setattr(listops, "sample_sets", stop)
    monkeypatch.setattr(listops, "number_of_processes", lambda: 3)
    for options in ((), ("--train", 2_000, "--test", 20, "--seed", 7)):
        assert run("listops", *options, "--raw-only", "--out", tmp_path / "out") == (1, "", "error: far enough\n")
    assert asked == [(1_000_000, 1_000, 1, 3), (2_000, 20, 7, 3)]


def test_seed() -> None:
    one, two = (set(sample(DEV_DEPTHS, 10, seed, set()).pairs()) for seed in ((4, 1), (5, 1)))
    assert not one & two


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train 999", "argument --train: must be a whole number from 1000 to 1000000, not '999'"),
        ("--test 100001", "argument --test: must be a whole number from 10 to 100000, not '100001'"),
        ("--seed x", "argument --seed: must be a whole number from 0"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("listops", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_every_subset_is_drawn_from_the_seed() -> None:
    one, other = (sample_sets(20, 20, seed, 1) for seed in (5, 6))
    assert all(list(one[name].pairs()) != list(other[name].pairs()) for name in listops.ORDER)

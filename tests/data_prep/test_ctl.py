"""Compositional table lookup: the draw, and the output and errors of ``python -m data_prep ctl``."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.__main__ import main
from data_prep.ctl import PUBLISHED, REFERENCE_SEED, render
from data_prep.ctl.sample import COMPOSED, FUNCTIONS, SYMBOLS, TRAINED, Example, Sample, Sampler, sample, sample_small
from data_prep.dataset import Pair
from data_prep.draws import first_distinct
from data_prep.folder import damage, read_manifest

# sha256 of what github.com/RobertCsordas/ndr, dataset/compositional_table_lookup.py of commit da20530, draws in the
# settings of its sweeps, one line `SOURCE<tab>TARGET` an example, forward: in its order; the pool sorted.
REFERENCE = {
    "dev": "e1ee23d61423513be12ffb3900fe16286bc3fb7053150de986da326ad94a49ae",
    "gen": "d51ca29861ee0145d28823ffed827bfd265df34eff12d2cb767025cc84ed4a1d",
    "new_primitive_one": "42c98f9fb9a1c670215ff7e4cc9c8310c75d4c8d25afbf714519ab494b93d16c",
    "pool": "8118bb2542f3d3f0776b1e1960456a6a119a76d53542edbb2564793ce27939cd",
}
# sha256 of files that `--order forward` writes with the default seed.
WRITTEN = {
    "train.src": "705e7522733b95a1263561d6c35828a84e985d26347d94535923b079541b8f45",
    "valid.src": "ba30178298e920a0c6a3cbf740770462d1a9cc4ec1aaca0a0776fcfff64b3559",
    "test.tgt": "6833feffe180c3f7dc6b2d30cb0ed716f697a7c769225e53f46e57b1572b289b",
    "new_composition.src": "a4f0cc4310be61ad20fe091e4712ff783748279ee3f435f497a3621353c3eb43",
    "new_primitive_two.src": "0148a3eed30c5f2d312ac99a9bb5940b1f5797be034c4f68aa2da0f46f097b3a",
}
LENGTHS = {
    "valid": {2, 3, 4, 5},
    "test": {2, 3, 4, 5},
    "dev": {6, 7, 8},
    "gen": {9, 10},
    "new_composition": {0, 2, 3, 4, 5},
    "new_primitive_one": {2, 3, 4, 5},
    "new_primitive_two": {2, 3, 4, 5},
}


@pytest.fixture(scope="session")
def drawn() -> Sample:
    """The examples of the default seed."""
    return sample(REFERENCE_SEED)


def lines(examples: list[Example], drawn: Sample) -> list[str]:
    return ["\t".join(render(example, drawn.tables, "forward")) + "\n" for example in examples]


def sha256(texts: list[str]) -> str:
    return hashlib.sha256("".join(texts).encode("ascii")).hexdigest()


# ---- the draw


@pytest.mark.parametrize("name", ["dev", "gen", "new_primitive_one"])
def test_subset_is_the_references(name: str, drawn: Sample) -> None:
    assert sha256(lines(drawn.subsets[name], drawn)) == REFERENCE[name]


def test_pool_is_the_references(drawn: Sample) -> None:
    composed = [example for example in drawn.subsets["train"] if len(example.functions) > 1]
    pool = composed + drawn.subsets["valid"] + drawn.subsets["test"]
    assert len(set(pool)) == len(pool) == 53_136 + 8_000
    assert sha256(sorted(lines(pool, drawn))) == REFERENCE["pool"]


def test_sizes(drawn: Sample) -> None:
    sizes = {name: len(examples) for name, examples in drawn.subsets.items()}
    assert sizes == PUBLISHED | {"new_composition": 608 - 3} and next(iter(sizes)) == "train"


def test_train(drawn: Sample) -> None:
    counts = Counter(drawn.subsets["train"])
    for symbol in range(8):
        repeats = [counts.pop(Example(symbol, (function,))) for function in range(11)]
        assert repeats == [1] * 9 + [31, 31]
    assert set(counts.values()) == {1} and sum(counts.values()) == 53_136
    assert Counter(len(example.functions) for example in counts) == {2: 432, 3: 3_749, 4: 20_859, 5: 28_096}
    assert all(function < COMPOSED for example in counts for function in example.functions)


def test_subsets_are_distinct(drawn: Sample) -> None:
    rest = {name: set(examples) for name, examples in drawn.subsets.items() if name != "train"}
    assert {name: len(examples) for name, examples in rest.items()} == {n: len(drawn.subsets[n]) for n in rest}
    rest["train"] = set(drawn.subsets["train"])
    assert len(set.union(*rest.values())) == sum(map(len, rest.values()))


def test_lengths(drawn: Sample) -> None:
    found = {name: {len(example.functions) for example in drawn.subsets[name]} for name in LENGTHS}
    assert found == LENGTHS


def test_new_compositions_are_nowhere_else(drawn: Sample) -> None:
    new = [example.functions for example in drawn.subsets["new_composition"]]
    assert Counter(map(len, new)) == {0: 1, 2: 21, 3: 183, 4: 200, 5: 200} and len(set(new)) == len(new)
    others = {
        example.functions for name in drawn.subsets if name != "new_composition" for example in drawn.subsets[name]
    }
    assert not others.intersection(new)


@pytest.mark.parametrize(("name", "new", "other"), [("new_primitive_one", 9, 10), ("new_primitive_two", 10, 9)])
def test_new_primitives(name: str, new: int, other: int, drawn: Sample) -> None:
    used = [example.functions for example in drawn.subsets[name]]
    assert all(new in functions and other not in functions for functions in used)
    assert {functions.index(new) for functions in used} == {0, 1, 2, 3, 4}
    known = [example for n in ("train", "valid", "test", "dev", "gen") for example in drawn.subsets[n]]
    assert all(len(example.functions) == 1 for example in known if new in example.functions)


def test_tables_are_bijections(drawn: Sample) -> None:
    assert [sorted(table) for table in drawn.tables] == [list(range(8))] * 11
    assert len({tuple(table) for table in drawn.tables}) == 11


def test_another_seed(drawn: Sample) -> None:
    other, again = sample(2**32 - 1), sample(2**32 - 1)
    assert other == again and other.tables != drawn.tables
    assert {n: len(e) for n, e in other.subsets.items()} == {n: len(e) for n, e in drawn.subsets.items()}


def test_distinct_keeps_the_order() -> None:
    values = iter([3, 1, 3, 2, 1, 5])
    assert first_distinct(3, lambda: next(values)) == [3, 1, 2] and next(values) == 1


def test_lengths_are_uniform() -> None:
    sampler = Sampler(5)
    counts = Counter(len(sampler.composition(COMPOSED, TRAINED)) for _ in range(4_000))
    assert set(counts) == {2, 3, 4, 5} and all(900 < count < 1_100 for count in counts.values())


# ---- the meaning of an example

TABLES = st.lists(st.permutations(range(8)), min_size=11, max_size=11)
EXAMPLES = st.builds(Example, st.integers(0, 7), st.lists(st.integers(0, 10), max_size=10).map(tuple))


def interpret(words: list[str], tables: dict[str, dict[str, str]]) -> str:
    """Applies functions to a symbol, all as words, in forward order: independent of the code under test."""
    symbol, *functions = words
    for function in functions:
        symbol = tables[function][symbol]
    return symbol


def spell(tables: list[list[int]]) -> dict[str, dict[str, str]]:
    return {
        name: {f"{i:03b}": f"{result:03b}" for i, result in enumerate(table)}
        for name, table in zip("abcdefghijk", tables, strict=True)
    }


@given(EXAMPLES, TABLES)
def test_meaning_and_order(example: Example, tables: list[list[int]]) -> None:
    forward, backward = (render(example, tables, order) for order in ("forward", "backward"))
    assert forward.source.split(" ") == backward.source.split(" ")[::-1]
    assert interpret(forward.source.split(" "), spell(tables)) == forward.target == backward.target


def test_example_of_the_paper() -> None:
    flip, rotate = [7 - symbol for symbol in range(8)], [(symbol + 1) % 8 for symbol in range(8)]
    tables = [flip, list(range(8)), *[rotate] * 9]
    example = Example(0b101, (1, 0, 3))  # b(a(d(101))) with d = + 1, a = 7 −, b = identity
    assert render(example, tables, "forward") == Pair("101 d a b", "001")
    assert render(example, tables, "backward") == Pair("b a d 101", "001")


# ---- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both orders as written by the command; ``forward`` with its binaries."""
    folder = tmp_path_factory.mktemp("ctl")
    assert main(["ctl", "--order", "forward", "--out", str(folder / "forward")]) == 0
    assert main(["ctl", "--order", "backward", "--raw-only", "--out", str(folder / "backward")]) == 0
    return {order: folder / order for order in ("forward", "backward")}


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_every_line_means_its_target(order: str, folders: dict[str, Path], read_subset) -> None:
    found = read_manifest(folders[order])
    written = {name: table.split(" ") for name, table in found["origin"]["tables"].items()}
    tables = {name: dict(zip(SYMBOLS, table, strict=True)) for name, table in written.items()}
    assert tuple(tables) == FUNCTIONS and found["request"]["order"] == order
    assert found["rule"].endswith(order) and found["membership"].startswith("the published ones, except")
    # What Sampler.choose draws, and the symbols of reserved compositions (ctl.sample).
    for name in ("train", "valid", "test", "new_primitive_two", "symbols of new_composition"):
        assert name in found["membership"]
    for name in ("dev", "gen", "new_primitive_one"):
        assert name not in found["membership"]
    for name in PUBLISHED:
        for source, target in read_subset(folders[order], name):
            words = source.split(" ")
            assert interpret(words if order == "forward" else words[::-1], tables) == target


def test_both_orders_hold_the_same_examples(folders: dict[str, Path], read_subset) -> None:
    for name in PUBLISHED:
        forward, backward = (read_subset(folders[order], name) for order in ("forward", "backward"))
        assert [pair.source.split()[::-1] for pair in forward] == [pair.source.split() for pair in backward]
        assert [pair.target for pair in forward] == [pair.target for pair in backward]


def test_types_are_numbers_of_functions(folders: dict[str, Path], read_subset) -> None:
    for name in LENGTHS:
        types = (folders["forward"] / "raw" / f"{name}.type").read_text("ascii").splitlines()
        assert types == [f"length_{pair.source.count(' ')}" for pair in read_subset(folders["forward"], name)]
    assert not (folders["forward"] / "raw" / "train.type").exists()


def test_written_bytes(folders: dict[str, Path]) -> None:
    files = read_manifest(folders["forward"])["files"]
    assert {name: files[f"raw/{name}"] for name in WRITTEN} == WRITTEN


def test_manifest_and_classes(folders: dict[str, Path]) -> None:
    found = read_manifest(folders["forward"])
    assert found["request"] == {"dataset": "ctl", "order": "forward", "seed": 305_419_896, "raw_only": False}
    assert found["labels"] == list(SYMBOLS) and found["vocabulary"] == {"source": 19, "target": 8, "together": 19}
    entry = found["subsets"]["new_composition"]
    assert (entry["size"], entry["published_size"]) == (605, 608) and entry["types"]["length_3"] == 183
    names = {path.relative_to(folders["forward"]).as_posix() for path in folders["forward"].rglob("gen*")}
    assert {"input0/gen.bin", "input0/gen.idx", "label/gen.bin", "label/gen.idx"} < names
    assert damage(folders["forward"], found) is None


def test_another_seed_is_named(run, tmp_path: Path) -> None:
    result = run("ctl", "--order", "forward", "--seed", 3, "--raw-only", "--out", tmp_path / "out")
    assert result.code == 0 and "examples: drawn like the published ones, from another seed" in result.out
    found = json.loads((tmp_path / "out" / "dataset.json").read_text("utf-8"))
    assert found["request"]["seed"] == 3 and found["origin"]["generator"] == "data_prep.ctl_sample"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "the following arguments are required: --order"),
        ("--order both", "argument --order: invalid choice: 'both'"),
        ("--order forward --seed 4294967296", "argument --seed: must be a whole number from 0 to 4294967295"),
        ("--order forward --raw-dir here", "unknown option --raw-dir"),
    ],
)
def test_wrong_command(options: str, message: str, run, tmp_path: Path) -> None:
    result = run("ctl", *options.split(), "--raw-only", "--out", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {message}") and list(tmp_path.iterdir()) == []


def test_smaller_task(tmp_path):
    out = tmp_path / "small"
    assert (
        main(["ctl", "--order", "backward", "--functions", "3", "--longest", "5", "--raw-only", "--out", str(out)]) == 0
    )
    examples = {
        name: [
            (*source.split(), target)
            for source, target in zip(
                (out / f"raw/{name}.src").read_text().splitlines(),
                (out / f"raw/{name}.tgt").read_text().splitlines(),
                strict=True,
            )
        ]
        for name in ("train", "valid", "dev", "gen")
    }
    tables = dict(zip("abc", json.loads((out / "dataset.json").read_text())["origin"]["tables"].values(), strict=True))
    for subset in examples.values():
        for *functions, symbol, target in subset:
            for function in reversed(functions):
                symbol = tables[function].split()[SYMBOLS.index(symbol)]
            assert symbol == target
    lengths = {name: Counter(len(example) - 2 for example in subset) for name, subset in examples.items()}
    assert lengths["train"] == dict.fromkeys(range(1, 6), 1_500)
    assert lengths["valid"] == {5: 250} and set(lengths["dev"]) == {6} and set(lengths["gen"]) == {7, 8}
    assert min(lengths["gen"].values()) > 200
    evaluated = [example for name in ("valid", "dev", "gen") for example in examples[name]]
    assert len(evaluated) == len(set(evaluated)) == 1_250
    assert not set(evaluated) & set(examples["train"])
    assert {example for example in examples["train"] if len(example) == 3} == {
        (function, symbol, tables[function].split()[i]) for function in "abc" for i, symbol in enumerate(SYMBOLS)
    }
    written = b"".join(path.read_bytes() for path in sorted((out / "raw").iterdir()))
    assert hashlib.sha256(written).hexdigest() == "c2eb904981b1d83e7837d55f9996513c14e0c039845c55884580ed706ecaa580"


def test_valid_has_the_lengths_of_four_times_as_many_examples():
    """Of 3 functions out of 5 there are exactly so many."""
    assert Counter(len(example.functions) for example in sample_small(5, 4, 1).subsets["valid"]) == {3: 250, 4: 250}


@pytest.mark.parametrize(
    "options,message",
    [
        ("--longest 4", "--longest is for the smaller task: give its --functions too"),
        ("--functions 12", "argument --functions: must be a whole number from 3 to 9, not '12'"),
        ("--functions 4 --longest 9", "argument --longest: must be a whole number from 3 to 6, not '9'"),
        ("--functions 2", "argument --functions: must be a whole number from 3 to 9"),
    ],
)
def test_refused_sizes_of_the_smaller_task(options, message, run, tmp_path):
    out = tmp_path / "small"
    result = run("ctl", "--order", "forward", *options.split(), "--out", out)
    assert result.code == 2 and message in result.err and not out.exists()

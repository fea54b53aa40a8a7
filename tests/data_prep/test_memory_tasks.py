"""Repeated copying, associative recall and key–value retrieval: their rows, and a reader that solves each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import RandomState

from data_prep import associative_recall, key_value, repeat_copy
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Pair
from data_prep.words_of_bits import distinct_numbers, one_of, word

SMALL = {
    "repeat_copy": "--lengths 1-3 --repeats 2-4 --test-lengths 5 --test-repeats 6,7 --bits 5",
    "associative_recall": "--blocks 2-4 --test-blocks 5-6 --bits 4",
    "key_value": "--lengths 2-4 --test-lengths 5-6 --bits 8",
    "key_value --queries both": "--lengths 2-4 --test-lengths 5-6 --bits 8",
    "key_value --queries both --repeat-values": "--lengths 2-4 --test-lengths 5-6 --bits 8",
    "key_value --order random": "--lengths 2-4 --test-lengths 5-6 --bits 8",
}
#: The numbers of blocks or rows that the subsets have by these options; all others have TRAINED.
TRAINED, LONGER = {2, 3, 4}, {"gen": {5, 6}, "gen_repeats": {6, 7}}


# ---- readers, which solve a task from its source alone


def solve_repeat_copy(source: list[str]) -> list[list[str]]:
    """The possible labels of every row."""
    labels, block = [], []
    for row in source:
        if row == ".":
            labels.append(block.pop(0))
        else:
            block.append(row)
            labels.append(".")
    assert not block
    return [[label] for label in labels]


def solve_associative_recall(source: list[str]) -> list[list[str]]:
    first = source.index("<query>")
    blocks = " ".join(source[:first]).split(" <next> ")
    asked = " ".join(source[first + 1 : source.index("<query>", first + 1)])
    answers = [after.split() for before, after in zip(blocks, blocks[1:]) if before == asked]
    blank = len(source) - len(answers[0])
    return [["."]] * blank + [[answer[i] for answer in answers] for i in range(len(answers[0]))]


def solve_key_value(source: list[str]) -> list[list[str]]:
    rows = [row.split("|") for row in source if "|" in row]
    known = [row for row in rows if "." not in "".join(row)]
    labels = []
    for row in source:
        key, _, value = row.partition("|")
        if "|" not in row or [key, value] in known:
            labels.append(["."])
        elif value.strip("."):
            labels.append([k for k, v in known if v == value])
        else:
            labels.append([v for k, v in known if k == key])
    return labels


SOLVERS: dict[str, Callable[[list[str]], list[list[str]]]] = {
    "repeat_copy": solve_repeat_copy,
    "associative_recall": solve_associative_recall,
    "key_value": solve_key_value,
}


@pytest.mark.parametrize("name", SMALL)
def test_every_label_follows_from_the_source(name, run, read_subset, tmp_path):
    """Uniquely, but for repeated values, and rare blocks that are repeated in associative recall."""
    dataset = name.split()[0]
    result = run(
        *name.split(), *SMALL[name].split(), "--train", 300, "--test", 20, "--raw-only", "--out", tmp_path / "o"
    )
    assert result.code == 0, result.err
    manifest = json.loads((tmp_path / "o" / "dataset.json").read_text())
    assert manifest["no_label"] == "."
    seen: dict[str, set[str]] = {}
    for subset in manifest["subsets"]:
        pairs = read_subset(tmp_path / "o", subset)
        assert len(pairs) == (300 if subset == "train" else 20)
        for pair in pairs:
            source, target = pair.source.split(" "), pair.target.split(" ")
            possible = SOLVERS[dataset](source)
            assert len(source) == len(target) == len(possible)
            assert all(label in labels for label, labels in zip(target, possible, strict=True)), pair
            if "--repeat-values" not in name and dataset != "associative_recall":
                assert all(len(labels) == 1 for labels in possible)
        seen[subset] = {pair.source for pair in pairs}
        sizes = [size_of(dataset, pair) for pair in pairs]
        assert set(sizes) == LONGER.get(subset, TRAINED), subset
        if dataset == "repeat_copy":
            lengths = [lengths_of_blocks(pair) for pair in pairs]
            assert set().union(*lengths) == ({5} if subset == "gen_lengths" else {1, 2, 3}), subset
            if subset == "gen_lengths":
                sizes = list(map(max, lengths))
        if subset != "train":
            assert len(seen[subset]) == 20 and not seen[subset] & seen["train"]
            types = (tmp_path / "o" / "raw" / f"{subset}.type").read_text().splitlines()
            assert [int(kind.rpartition("_")[2]) for kind in types] == sizes


def lengths_of_blocks(pair: Pair) -> list[int]:
    """Of repeated copying."""
    rows = [row for row in pair.source.split(" ") if row != "."]
    return [len(block.split()) for block in " ".join(rows).split("<copy>")[:-1]]


def size_of(dataset: str, pair: Pair) -> int:
    """The number of blocks or rows."""
    source = pair.source.split(" ")
    if dataset == "repeat_copy":
        return len(lengths_of_blocks(pair))
    if dataset == "associative_recall":
        return (len(source) - 7) // 4
    return sum("|" in row and "." not in row for row in source)


@pytest.mark.parametrize("name", SOLVERS)
def test_examples_of_the_docstrings_are_true(name):
    text = {"repeat_copy": repeat_copy, "associative_recall": associative_recall, "key_value": key_value}[name].__doc__
    found = re.findall(r"^ {4}(\S.*?) +->  (.+)$", text, re.MULTILINE)
    assert len(found) == 2
    for source, target in found:
        assert [[label] for label in target.split()] == SOLVERS[name](source.split())


# ---- rows


def test_rows_of_repeat_copy():
    example = repeat_copy.example([["01", "10"], ["11"]], "repeats_2")
    assert example.pair() == ("01 10 <copy> . . . 11 <copy> . .", ". . . 01 10 <copy> . . 11 <copy>")


def test_rows_of_associative_recall():
    blocks = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]
    example = associative_recall.example(blocks, 1)
    assert example.pair() == (
        "a b c <next> d e f <next> g h i <query> d e f <query> . . .",
        ". . . . . . . . . . . . . . . . g h i",
    )
    assert len(example.source) == 4 * 3 + 7 and example.type == "blocks_3"


def test_rows_of_key_value():
    one = key_value.example(["00", "01"], ["10", "11"], [[1, 0]], "keys")
    assert one.pair() == ("00|10 01|11 <query> 01|.. 00|.. <query>", ". . . 11 10 .")
    both = key_value.example(["00", "01"], ["10", "11"], [[1, 0], [0, 1]], "both")
    assert both.pair() == (
        "00|10 01|11 <by_key> 01|.. 00|.. <by_value> ..|10 ..|11 <end>",
        ". . . 11 10 . 00 01 .",
    )
    assert len(one.source) == 2 * 2 + 2 and len(both.source) == 3 * (2 + 1)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["ascending", "random"]))
def test_keys_are_distinct_and_in_order(seed, order):
    """Ascending, or as they are drawn: the only length is the first draw, the keys are the next ones."""
    options = key_value.KeyValueOptions(queries="both", bits=8, order=order, lengths=(6,))
    draw = key_value.KeyValue().subsets(options)["train"]
    rows = [row.split("|") for row in draw(RandomState([seed])).source[:6]]
    keys, values = [row[0] for row in rows], [row[1] for row in rows]
    assert len(set(keys)) == len(set(values)) == 6
    generator = RandomState([seed])
    one_of(generator, (6,))
    drawn = [word(number, 4) for number in distinct_numbers(generator, 6, 4)]
    assert keys == (drawn if order == "random" else sorted(drawn))


def test_the_draw_is_fixed(run, read_subset, tmp_path):
    """The first example of valid, with seed 1: other data under the same request would be a new dataset."""
    first = {}
    for name in SMALL:
        folder = tmp_path / name.replace(" ", "_")
        assert (
            run(*name.split(), *SMALL[name].split(), "--train", 100, "--test", 10, "--raw-only", "--out", folder).code
            == 0
        )
        first[name] = read_subset(folder, "valid")[0]
    assert first["repeat_copy"] == FIRST_COPY
    assert first["associative_recall"] == FIRST_RECALL
    assert first["key_value"] == FIRST_PAIRS
    both, repeated = (
        read_subset(tmp_path / name.replace(" ", "_"), "train")
        for name in ("key_value --queries both", "key_value --queries both --repeat-values")
    )
    assert both != repeated


FIRST_COPY = Pair(
    "11001 <copy> . . 01100 <copy> . . 11110 11101 <copy> . . .",
    ". . 11001 <copy> . . 01100 <copy> . . . 11110 11101 <copy>",
)
FIRST_RECALL = Pair(
    "0100 1001 0011 <next> 1111 0100 1100 <next> 1001 1110 1101 <query> 0100 1001 0011 <query> . . .",
    ". . . . . . . . . . . . . . . . 1111 0100 1100",
)
FIRST_PAIRS = Pair(
    "0011|1111 0100|0100 1001|1100 <query> 1001|.... 0011|.... 0100|.... <query>", ". . . . 1100 1111 0100 ."
)


def test_the_form_of_the_words(run, tmp_path):
    """Widths of the published vectors: 9 and 9, 10 and 10, 12 + 1 and 6, 12 + 2 and 6."""
    expected = {
        "repeat_copy": (9, 9),
        "associative_recall": (10, 10),
        "key_value": (13, 6),
        "key_value --queries both": (14, 6),
    }
    for name, sizes in expected.items():
        folder = tmp_path / name.replace(" ", "_")
        assert run(*name.split(), "--train", 100, "--test", 10, "--raw-only", "--out", folder).code == 0
        sides = json.loads((folder / "dataset.json").read_text())["bits"].values()
        assert tuple(side["width"] + len(next(iter(side["markers"].values()), "")) for side in sides) == sizes


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("repeat_copy --test-lengths 3-4 --lengths 1-3", "--test-lengths has 3, which train has too"),
        ("repeat_copy --repeats 4 --test-repeats 4", "--test-repeats has 4, which train has too"),
        ("associative_recall --blocks 1-4", "--blocks has 1: the block after the repeated one needs a second"),
        ("associative_recall --bits 4 --block-words 1", "makes blocks that are often alike"),
        ("key_value --bits 7", "--bits is 7: a row has two halves"),
        ("key_value --bits 8", "--bits 8 has 16 keys, of which an example has at most half, not 24: choose"),
        ("key_value --bits 10", "--bits 10 has 32 keys, of which an example has at most half, not 24: choose"),
        ("key_value --repeat-values", "--repeat-values is for --queries both"),
        ("repeat_copy --lengths 0-3", "must be numbers from 1 to 10000"),
    ],
)
def test_wrong_options(arguments, message, run, tmp_path):
    result = run(*arguments.split(), "--out", tmp_path / "o")
    assert result.code == 2 and message in result.err and not (tmp_path / "o").exists()


def test_too_few_examples(run, tmp_path):
    small = "repeat_copy --bits 1 --lengths 1 --repeats 1 --test-lengths 2 --test-repeats 2 --test 10 --train 100"
    result = run(*small.split(), "--raw-only", "--out", tmp_path / "o")
    message = "subset valid cannot have 10 different examples: choose more --bits or longer examples"
    assert result == (1, "", f"error: {message}\n")
    small = small.replace("--test 10", "--test 11")
    assert run(*small.split(), "--out", tmp_path / "o").err == (
        f"error: {message.replace('10', '11')}, or a smaller --test\n"
    )
    few = "key_value --bits 4 --lengths 1 --test-lengths 2 --test 16 --train 100"
    assert run(*few.split(), "--out", tmp_path / "o").err == (
        "error: the other subsets have all examples that there are: choose more --bits or longer examples, "
        "or a smaller --test\n"
    )
    assert run(*few.replace("--test 16", "--test 15").split(), "--raw-only", "--out", tmp_path / "more").code == 0
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair("a b c", ". b"), "example 1 of train has 3 words and 2 labels"),
        (Pair("a b c", ". . ."), "example 1 of train has no label: '. . .'"),
    ],
)
def test_labels_that_do_not_fit(pair, message):
    corpus = Corpus({"train": Subset([pair])}, "", "", {}, no_label=".")
    with pytest.raises(DataError, match=message):
        corpus.check()


def test_keys_and_values_are_asked_in_orders_of_their_own():
    options = key_value.KeyValueOptions(queries="both", lengths=(8,))
    source = key_value.KeyValue().subsets(options)["train"](RandomState(1)).source
    rows = [row.split("|") for row in source[:8]]
    by_key, by_value = source[9:17], source[18:26]
    orders = [
        [[row[side] for row in rows].index(asked.split("|")[side]) for asked in part]
        for side, part in enumerate((by_key, by_value))
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8)) and orders[0] != orders[1]


def test_every_block_but_the_last_is_asked():
    options = associative_recall.AssociativeRecallOptions(blocks=(4,))
    draw = associative_recall.AssociativeRecall().subsets(options)["train"]
    generator, asked = RandomState(1), set()
    for _ in range(100):
        source = draw(generator).source
        blocks = [source[4 * i : 4 * i + 3] for i in range(4)]
        asked.add(blocks.index(source[16:19]))
    assert asked == {0, 1, 2}


def test_the_type_of_a_longer_example_is_its_longest_block():
    options = repeat_copy.RepeatCopyOptions(repeats=(4,), test_lengths=(15, 16, 17))
    draw, generator = repeat_copy.RepeatCopy().subsets(options)["gen_lengths"], RandomState(1)
    for _ in range(20):
        example = draw(generator)
        rows = " ".join(row for row in example.source if row != ".")
        assert example.type == f"length_{max(len(block.split()) for block in rows.split('<copy>'))}"

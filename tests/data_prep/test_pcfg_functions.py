"""The functions of PCFG SET, and the sampler of expressions."""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.pcfg.language import (
    BINARY,
    EXCEPTIONS,
    FUNCTIONS,
    LETTERS,
    TWINS,
    UNARY,
    WORDS,
    count_functions,
    exception_in,
    interpret,
    mentions,
    with_exception,
    without_twins,
)
from data_prep.pcfg.sample import FUNCTION_COUNTS, LONGEST_LINE, STRING_LENGTHS, Sampler, sample


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("A1", "A1"),
        ("copy A1 B2 C3", "A1 B2 C3"),
        ("reverse A1 B2 C3", "C3 B2 A1"),
        ("shift A1 B2 C3", "B2 C3 A1"),
        ("echo A1 B2 C3", "A1 B2 C3 C3"),
        ("swap_first_last A1 B2 C3 D4", "D4 B2 C3 A1"),
        ("repeat A1 B2", "A1 B2 A1 B2"),
        ("append A1 B2 , C3", "A1 B2 C3"),
        ("prepend A1 B2 , C3", "C3 A1 B2"),
        ("remove_first A1 B2 , C3", "C3"),
        ("remove_second A1 B2 , C3", "A1 B2"),
        ("swap_first_last A1", "A1"),
        ("shift A1", "A1"),
        ("swap_first_last A1 B2", "B2 A1"),
        ("append append A1 , B2 , C3", "A1 B2 C3"),
        ("append A1 , append B2 , C3", "A1 B2 C3"),
        ("prepend echo A1 B2 , reverse prepend C3 , D4 E5", "C3 E5 D4 A1 B2 B2"),
        ("remove_first repeat A1 , repeat repeat B2", "B2 B2 B2 B2"),
        ("swap_first_last shift reverse copy M2 H16 K3 Z20", "Z20 H16 M2 K3"),
    ],
)
def test_meaning(expression: str, meaning: str) -> None:
    assert interpret(expression) == meaning


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "unknown word ''"),
        ("copy  A1", "unknown word ''"),
        ("A0", "unknown word 'A0'"),
        ("A21", "unknown word 'A21'"),
        ("copy a1", "unknown word 'a1'"),
        ("append_twin A1 , B2", "unknown word 'append_twin'"),
        ("copy A1\n", "unknown word"),
        ("copy", "copy has no argument"),
        ("append A1 , reverse", "reverse has no argument"),
        ("append A1", "append has no second argument"),
        ("append append A1 , B2", "append has no second argument"),
        ("A1 , B2", "a comma too many"),
        ("copy A1 , B2", "a comma too many"),
        ("append A1 , B2 , C3", "a comma too many"),
        ("append , A1", "append has no argument"),
        ("append A1 , , B2", "nothing between commas"),
        (", A1", "nothing between commas"),
        ("A1 copy B2", "copy after a letter without a comma"),
        ("repeat " * 30 + "A1", "means more than 10,000 letters"),
        ("copy " * 200_000 + "fly", "unknown word 'fly'"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_not_an_expression(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interpret(expression)


def test_nesting_as_deep_as_may_be() -> None:
    assert interpret("reverse " * 100_001 + "A1 B2") == "B2 A1"
    assert interpret("remove_second " * 20_000 + "A1" + " , B2" * 20_000) == "A1"


TREES = st.recursive(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5).map(tuple),
    lambda trees: (
        st.tuples(st.sampled_from(sorted(UNARY)), trees) | st.tuples(st.sampled_from(sorted(BINARY)), trees, trees)
    ),
    max_leaves=6,
)


def is_call(tree: tuple) -> bool:
    return tree[0] in FUNCTIONS


def write(tree: tuple) -> str:
    if not is_call(tree):
        return " ".join(tree)
    return f"{tree[0]} {' , '.join(write(argument) for argument in tree[1:])}"


def mean(tree: tuple) -> list[str]:
    """The meaning of a tree, by recursion and with lists: an independent implementation."""
    if not is_call(tree):
        return list(tree)
    name, x, y = tree[0], mean(tree[1]), mean(tree[-1])
    if name in ("append", "prepend"):
        return x + y if name == "append" else y + x
    if name == "swap_first_last":
        x[0], x[-1] = x[-1], x[0]
        return x
    if name == "shift":
        x.append(x.pop(0))
        return x
    others = {"copy": x, "repeat": x * 2, "echo": x + [x[-1]], "remove_first": y, "remove_second": x}
    return others[name] if name in others else list(reversed(x))


@given(TREES)
def test_meaning_of_any_tree(tree: tuple) -> None:
    assert interpret(write(tree)).split(" ") == mean(tree)


@given(st.lists(st.sampled_from(sorted(WORDS - set(LETTERS)) + ["A1", "B2", "C3"]), max_size=12).map(" ".join))
def test_words_in_any_order_are_an_expression_or_refused(expression: str) -> None:
    words = expression.split(" ")
    commas = sum(word in BINARY for word in words)
    try:
        assert set(interpret(expression).split(" ")) <= set(words) & set(LETTERS)
        assert words.count(",") == commas and count_functions(expression) == sum(word in FUNCTIONS for word in words)
    except ValueError as error:
        assert "\n" not in str(error)


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    try:
        assert set(interpret(text).split(" ")) <= set(LETTERS)
    except ValueError as error:
        assert len(str(error)) < 200


# ---- synonyms and exceptions


@pytest.mark.parametrize(
    ("expression", "pair", "meaning"),
    [
        # From the official files test_pcfg_ratio=*_exception, some with shorter strings.
        ("reverse echo B12 W13", "reverse echo", "B12 W13 W13"),
        ("prepend remove_first D2 B12 U1 , J20 W7 , I16 D11", "prepend remove_first", "D2 B12 U1 J20 W7"),
        ("echo remove_first D1 F14 , S5 K19 Q1", "echo remove_first", "D1 F14 S5 K19 Q1"),
        ("prepend reverse R1 J11 , K8 L16 Y18", "prepend reverse", "R1 J11 J11"),
        ("shift reverse echo remove_second T8 K19 S14 T5 , shift E15 Q15 H3", "reverse echo", "K19 S14 T5 T5 T8"),
        # With two pairs in one expression, overlapping or not, only the first of the list is an exception.
        ("shift reverse echo remove_first E16 Y18 , P15 W5", "reverse echo", "W5 W5 P15"),
        ("prepend reverse echo B3 Y6 E7 , E14 W5 I11", "reverse echo", "E14 W5 I11 B3 Y6 E7 E7"),
        (
            "prepend remove_first Z3 W7 I14 , repeat O12 , shift append D11 U17 , reverse echo N3 J1",
            "reverse echo",
            "U17 N3 J1 J1 D11 O12 O12",
        ),
        (
            "swap_first_last copy echo remove_first repeat reverse prepend reverse E16 S15 H17 , reverse shift I1 Z2 "
            "I16 , copy reverse reverse S5 C8 E2 X8",
            "echo remove_first",
            "X8 S15 H17 Z2 I16 I1 E16 S15 H17 Z2 I16 I1 S5 C8 E2 E16",
        ),
        # Not adjacent, or not as the first argument: by the rule.
        ("reverse copy echo A1 B2", None, "B2 B2 A1"),
        ("prepend A1 , reverse B2 C3", None, "C3 B2 A1"),
        ("echo reverse A1 B2", None, "B2 A1 A1"),
    ],
)
def test_exceptional_meaning(expression: str, pair: str | None, meaning: str) -> None:
    assert exception_in(expression) == pair
    assert interpret(with_exception(expression)) == meaning
    assert pair is not None or with_exception(expression) == expression


def test_only_the_first_occurrence_of_a_pair_is_an_exception() -> None:
    assert with_exception("reverse echo copy reverse echo A1") == "echo copy copy reverse echo A1"


def test_words_are_mentioned_whole() -> None:
    assert mentions("copy append swap_first_last A1 , B2", "append swap_first_last")
    assert not mentions("copy append swap_first_last_twin A1 , B2", "append swap_first_last")


@given(TREES)
def test_exception_keeps_an_expression_one(tree: tuple) -> None:
    expression = write(tree)
    changed = with_exception(expression)
    assert changed.count(" ") == expression.count(" ") and set(interpret(changed).split(" ")) <= set(LETTERS)
    assert (changed == expression) == (not any(f" {pair} " in f" {expression} " for pair in EXCEPTIONS))


@given(TREES, st.randoms())
def test_synonyms_mean_what_their_functions_mean(tree: tuple, random) -> None:
    expression = write(tree)
    words = expression.split(" ")
    renamed = " ".join(f"{word}_twin" if f"{word}_twin" in TWINS and random.random() < 0.5 else word for word in words)
    assert without_twins(renamed) == expression and count_functions(renamed) == count_functions(expression)


def test_there_are_four_synonyms() -> None:
    assert set(TWINS) == {"append_twin", "remove_second_twin", "repeat_twin", "swap_first_last_twin"}
    assert without_twins("copy_twin A1_twin") == "copy_twin A1_twin"


OFFICIAL = {"pcfgset/dev": 4_860, "pcfgset/test": 9_721, "systematicity/test": 10_175, "productivity/test": 11_333}


@pytest.fixture(scope="session")
def official(shared_data: Path) -> dict[str, list[tuple[str, str]]]:
    """The available official pairs, by the names of their files."""
    folder = shared_data / "pcfg_set"

    def lines(name: str) -> list[str]:
        return gzip.decompress((folder / f"{name}.gz").read_bytes()).decode("ascii").splitlines()

    return {name: list(zip(lines(f"{name}.src"), lines(f"{name}.tgt"), strict=True)) for name in OFFICIAL}


@pytest.mark.parametrize("name", OFFICIAL)
def test_meaning_of_every_official_line(name: str, official: dict[str, list[tuple[str, str]]]) -> None:
    pairs = official[name]
    assert len(pairs) == OFFICIAL[name]
    assert [interpret(source) for source, _ in pairs] == [target for _, target in pairs]


# ---- the sampler


def test_sampler_is_the_same_everywhere() -> None:
    # Pinned: a change here changes existing data.
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in sample(1_000, seed=1))
    expected = "eb7054823be87dfb72c3ffc96db7702bf4425badfa8d41f9653618677610657e"
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == expected


def test_samples_are_expressions_with_their_meaning() -> None:
    pairs = sample(2_000, seed=3)
    assert len({pair.source for pair in pairs}) == 2_000
    assert all(interpret(pair.source) == pair.target for pair in pairs)
    assert max(len(pair.source) for pair in pairs) <= LONGEST_LINE
    assert sample(500, seed=3) == pairs[:500] and sample(500, seed=4) != pairs[:500]


def test_statistics_of_samples() -> None:
    pairs = sample(8_000, seed=2)
    counts = Counter(count_functions(pair.source) for pair in pairs)
    lines = sum(FUNCTION_COUNTS.values())
    for number in range(1, 9):
        assert counts[number] / 8_000 == pytest.approx(FUNCTION_COUNTS[number] / lines, abs=0.02)
    functions = Counter(word for pair in pairs for word in pair.source.split(" ") if word in FUNCTIONS)
    assert all(functions[name] / functions.total() == pytest.approx(0.1, abs=0.01) for name in FUNCTIONS)
    words = Counter(word for pair in pairs for word in pair.source.split(" "))
    strings = Counter(len(string) for pair in pairs for string in letters_of(pair.source))
    assert set(strings) == set(STRING_LENGTHS)
    for length, number in STRING_LENGTHS.items():
        assert strings[length] / strings.total() == pytest.approx(number / sum(STRING_LENGTHS.values()), abs=0.02)
    assert words.total() / 8_000 == pytest.approx(18.3, abs=0.7)
    assert set(words) == WORDS


def letters_of(source: str) -> list[list[str]]:
    """The strings of letters in an expression."""
    return [[word for word in part.split() if word not in FUNCTIONS] for part in source.split(",")]


def test_table_of_function_counts(official: dict[str, list[tuple[str, str]]]) -> None:
    long = Counter(count_functions(source) for source, _ in official["productivity/test"])
    assert long == {number: lines for number, lines in FUNCTION_COUNTS.items() if number > 8}
    short = Counter(count_functions(s) for name in ("pcfgset/dev", "pcfgset/test") for s, _ in official[name])
    total = sum(short[number] for number in range(1, 9))
    assert sum(FUNCTION_COUNTS.values()) == 92_343
    assert all(FUNCTION_COUNTS[number] == round(short[number] / total * 81_010) for number in range(1, 9))
    strings = Counter(
        len(string)
        for name in ("pcfgset/dev", "pcfgset/test")
        for source, _ in official[name]
        for string in letters_of(source)
    )
    assert strings == STRING_LENGTHS


def test_uniform_numbers_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(0)
    for number, first, last in ((0.0, 1, 0), (1 - 2**-53, 35, 9)):
        monkeypatch.setattr(sampler, "uniform", lambda number=number: number)
        assert sampler.one_of(FUNCTION_COUNTS) == first and sampler.index(10) == last

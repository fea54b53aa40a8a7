"""Compactly stored pairs, and the size of a share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import Pair
from data_prep.draws import PackedPairs, draw, exact, hold_out
from data_prep.libreoffice_help import split_by_page

TEXTS = st.text(max_size=20)


@given(st.lists(st.builds(Pair, TEXTS, TEXTS)))
def test_is_the_list_it_was_made_of(pairs: list[Pair]) -> None:
    packed = PackedPairs(iter(pairs))
    assert len(packed) == len(pairs) and list(packed) == pairs
    assert [packed[i] for i in range(-len(pairs), len(pairs))] == pairs + pairs


@pytest.mark.parametrize("index", [2, -3])
def test_index_outside(index: int) -> None:
    with pytest.raises(IndexError, match=f"pair {index} of 2"):
        PackedPairs([Pair("a", "x"), Pair("", "▁")])[index]


PAIRS = [Pair(str(number), "x") for number in range(100)]


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_share_is_the_decimal_fraction_that_was_typed(percent: int) -> None:
    """0.29 of 100 are 29: the binary fraction is less."""
    typed = float(f"0.{percent:02d}")
    assert len(hold_out(PAIRS, typed, 1)[1]) == percent
    assert len(draw(PAIRS, {"valid": typed}, 1)[1]["valid"]) == percent
    pages = {pair.source: [pair] for pair in PAIRS}
    assert len(split_by_page(pages, {"valid": typed}, 1).subsets["valid"]) == percent


@given(st.sampled_from([0.1, 0.05]), st.integers(0, 10**7))
def test_the_default_shares_are_those_of_binary_fractions(default: float, number: int) -> None:
    """So the defaults draw what earlier versions drew."""
    assert int(exact(default) * number) == int(number * default)


SMALL = "--train 100 --test 10 --raw-only"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("parity", f"--train-lengths 12 --test-lengths 20 {SMALL}"),
        *((name, SMALL) for name in ("repeat_copy", "associative_recall", "key_value")),
    ],
)
def test_every_subset_is_drawn_from_the_seed(name: str, options: str, run, tmp_path) -> None:
    folders = [tmp_path / seed / "raw" for seed in ("5", "6")]
    for folder in folders:
        assert run(name, *options.split(), "--seed", folder.parent.name, "--out", folder.parent).code == 0
    subsets = sorted(path.name for path in folders[0].glob("*.src"))
    assert len(subsets) >= 3
    for subset in subsets:
        one, other = ((folder / subset).read_text() for folder in folders)
        assert one != other, subset

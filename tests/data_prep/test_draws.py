"""Compactly stored pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import Pair
from data_prep.draws import PackedPairs

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

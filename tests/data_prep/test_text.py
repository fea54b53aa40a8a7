"""Reading and writing text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.common import DataError
from data_prep.text import shorten, split_lines, write_lines

# Anything but white space and what cannot be encoded.
WORDS = st.text(st.characters(exclude_categories=["Z", "Cc", "Cs"]), min_size=1)


@given(lines=st.lists(st.lists(WORDS, min_size=1).map(" ".join), min_size=1))
def test_round_trip(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "file"
    write_lines(path, lines)
    data = path.read_bytes()
    assert split_lines(path, data) == lines or data.startswith(b"\xef\xbb\xbf")


@pytest.mark.parametrize(
    "line",
    ["", " ", "a  b", " a", "a ", "a\nb", "a\tb", "a\r", "a\u2028b", "a\x1cb", "a\u00a0b", "a\u3000b"],
    ids=ascii,
)
def test_only_tokens_between_single_spaces_are_written(line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gen.src:2: not tokens separated by single spaces"):
        write_lines(tmp_path / "gen.src", ["a b", line])


def test_last_newline_may_be_missing() -> None:
    assert split_lines(Path("file"), b"a\nb") == split_lines(Path("file"), b"a\nb\n") == ["a", "b"]


def test_shorten() -> None:
    assert shorten("a\nb") == "'a\\nb'"
    assert len(shorten("a" * 1_000_000)) == 62

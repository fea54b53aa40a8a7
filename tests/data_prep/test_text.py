"""Reading and writing text files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import DataError, Sources, shorten
from data_prep.text import split_lines, write_lines

# Any characters except white space and those that cannot be encoded.
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


PIECES = ["a", "b c", "\n", "\r\n", "\r", " ", "\ufeff", "\u2028", "\x85", "é"]


@given(st.lists(st.sampled_from(PIECES).map(str.encode) | st.binary(max_size=3), max_size=8).map(b"".join))
def test_any_bytes_are_lines_or_an_error_with_its_line(data: bytes) -> None:
    path = Path("file")
    try:
        lines = split_lines(path, data)
    except DataError as error:
        assert error.path == path and "\n" not in str(error)
        whole = data.removesuffix(b"\n").split(b"\n")
        assert 1 <= error.line <= len(whole)
        assert data.startswith(b"\xef\xbb\xbf") or is_wrong(whole[error.line - 1])
        assert not any(map(is_wrong, whole[: error.line - 1]))
        return
    assert "\n".join(lines).encode("utf-8") == data.removesuffix(b"\n")
    assert not any(map(is_wrong, data.removesuffix(b"\n").split(b"\n")))


def is_wrong(raw: bytes) -> bool:
    """A line that is not UTF-8, that ``str.splitlines`` does not keep as one, or that has no word."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return line.splitlines() != [line] or not line.split()


@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 255))
def test_damaged_gzip_file_is_read_or_refused(tmp_path_factory, data: bytes, position: int, value: int) -> None:
    """Truncated, or with one byte changed: the content is never wrong."""
    path = tmp_path_factory.mktemp("gzip") / "file.gz"
    packed = gzip.compress(data, mtime=0)
    changed = packed[:position] + bytes([value]) + packed[position + 1 :]
    for content in (packed, packed[:position], changed[: len(packed)], packed + b"\0" * 20, b"\x1f" + packed, data):
        path.write_bytes(content)
        try:
            assert Sources().read_bytes(path) in (data, b"")
        except DataError as error:
            assert error.path == path and "not a complete gzip file" in error.message
        else:
            assert content not in (b"\x1f" + packed,)

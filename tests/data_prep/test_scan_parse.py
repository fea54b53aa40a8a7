"""Reading tasks.txt: every departure is an error that names the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset import DataError, Pair
from data_prep.scan import parse
from data_prep.scan.grammar import ACTIONS, WORDS
from helpers.data_files import scan_line

FILE = Path("folder/tasks.txt")
GOOD = "IN: jump twice OUT: I_JUMP I_JUMP"


@given(data=st.data())
def test_round_trip(data: st.DataObject, generated: list[Pair]) -> None:
    pairs = data.draw(st.lists(st.sampled_from(generated), min_size=1, max_size=20, unique=True))
    text = "".join(scan_line(pair) + "\n" for pair in pairs)
    assert parse(FILE, text.encode("utf-8")) == pairs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty line"),
        ("   ", "empty line"),
        ("jump twice OUT: I_JUMP I_JUMP", "does not begin with 'IN: '"),
        ("IN:jump OUT: I_JUMP", "does not begin with 'IN: '"),
        ("IN: jump twice I_JUMP I_JUMP", "no ' OUT: ' between command and actions"),
        ("IN: jump twice\tOUT: I_JUMP I_JUMP", "no ' OUT: ' between command and actions"),
        ("IN:  OUT: I_JUMP", "one space too many"),
        ("IN: jump  twice OUT: I_JUMP I_JUMP", "one space too many"),
        ("IN: jump twice OUT: I_JUMP I_JUMP ", "one space too many"),
        ("IN: fly twice OUT: I_JUMP I_JUMP", "unknown word 'fly'"),
        ("IN: jump twice OUT: I_JUMP OUT: I_JUMP", "unknown action 'OUT:'"),
        ("IN: jump\u00a0twice OUT: I_JUMP I_JUMP", r"unknown word 'jump\xa0twice'"),
        ("IN: jump\0 OUT: I_JUMP", r"unknown word 'jump\x00'"),
        ("IN: jump and OUT: I_JUMP", "'jump and' is not a command of the grammar"),
        ("IN: jump twice OUT: I_JUMP I_FLY", "unknown action 'I_FLY'"),
        ("IN: jump twice OUT: I_JUMP I_RUN", "wrong actions: number 2 is I_RUN, but the command means I_JUMP"),
        ("IN: jump twice OUT: I_JUMP", "wrong actions: they end after 1 of 2"),
        (
            "IN: jump twice OUT: I_JUMP I_JUMP I_JUMP",
            "wrong actions: number 3 is I_JUMP, but the command means the end",
        ),
        ("IN: look OUT: I_LOOK", "the command 'look' is already on line 1"),
        (GOOD + "\r", "ends in CR LF"),
        ("IN: jump\r OUT: I_JUMP", "holds U+000D"),
        ("IN: jump\u2028 OUT: I_JUMP", "holds U+2028 (LINE SEPARATOR) inside the line"),
        ("IN: jump\x85 OUT: I_JUMP", "holds U+0085"),
        ("IN: " + "jump" * 300_000 + " OUT: I_JUMP", "unknown word 'jumpjump"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_wrong_line(line: str, message: str) -> None:
    data = f"IN: look OUT: I_LOOK\n{line}\n{GOOD}\n".encode()
    with pytest.raises(DataError) as caught:
        parse(FILE, data)
    error = caught.value
    assert (error.path, error.line) == (FILE, 2)
    assert message in error.message and str(error) == f"folder/tasks.txt:2: {error.message}"
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"\xef\xbb\xbf" + GOOD.encode(), 1, "starts with a byte order mark"),
        (GOOD.encode() + b"\n\xff\n", 2, "not UTF-8: byte 0xff at position 1"),
        (GOOD.encode() + b"\nIN: jump \xe2\x80", 2, "not UTF-8: byte 0xe2 at position 10"),
        (GOOD.encode("utf-16"), 1, "not UTF-8"),
        (b"\n", 1, "empty line"),
        (b"", 1, "empty line"),
        (GOOD.encode() + b"\n\n", 2, "empty line"),
    ],
    ids=["bom", "byte-ff", "cut-character", "utf-16", "newline", "nothing", "blank-at-end"],
)
def test_wrong_bytes(data: bytes, line: int, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(FILE, data)
    assert caught.value.line == line and message in caught.value.message


def only_data_errors(data: bytes) -> None:
    try:
        assert all(isinstance(pair, Pair) for pair in parse(FILE, data))
    except DataError as error:
        assert error.path == FILE and 1 <= error.line <= data.count(b"\n") + 1
        assert "\n" not in str(error)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    only_data_errors(data)


PIECES = [*sorted(WORDS), *sorted(ACTIONS), "IN:", "OUT:", " ", "  ", "\n", "\r\n", "\u2028", "\ufeff", "\t", "\0", "x"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20), st.sampled_from(["", " "]))
def test_any_pieces_of_lines(pieces: list[str], glue: str) -> None:
    only_data_errors(glue.join(pieces).encode("utf-8", "surrogatepass"))


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=3))
def test_one_spot_changed(position: int, replacement: bytes) -> None:
    data = GOOD.encode()
    only_data_errors(data[:position] + replacement + data[position + 1 :])

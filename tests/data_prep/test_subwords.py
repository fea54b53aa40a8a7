"""Subwords: pieces restore the text, models are reproducible, and errors suggest a fix."""

from __future__ import annotations

import hashlib
import sys

import pytest
from fairseq.data import Dictionary
from hypothesis import given
from hypothesis import strategies as st

from data_prep.binarize import SPECIALS
from data_prep.dataset import DataError, UsageError
from data_prep.subwords import KINDS, LONGEST_LINE, SPACE, Subwords, learn
from fairseq_sg.scoring.plain_bleu import to_text

SYLLABLES = [a + b + c for a in "lwst" for b in "aeö" for c in ("", "r", "st")]
TEXT = [
    f"the {one}{two} of {number} is {two}er and the {one} is {two}est"
    for number, (one, two) in enumerate((one, two) for one in SYLLABLES[::3] for two in SYLLABLES)
]
PINNED_BPE = "4f8d0e3e506d757cae81e28ab8b0790a42ff33c8df7ed6f720f6359001cc1bf6"

WORDS = st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters=SPACE), min_size=1)
LINES = st.lists(WORDS | st.sampled_from(["lower", "cats", "Ö"]), min_size=1, max_size=6).map(" ".join)


@pytest.fixture(scope="module", params=KINDS)
def subwords(request: pytest.FixtureRequest) -> Subwords:
    return learn(TEXT, request.param, 60)


@pytest.fixture(scope="module", params=KINDS)
def exact(request: pytest.FixtureRequest) -> Subwords:
    return learn(TEXT, request.param, 310, coverage=0.99, by_bytes=True, exact=True)


@given(line=LINES)
def test_pieces_give_back_the_line(subwords: Subwords, line: str) -> None:
    pieces = subwords.split(line)
    assert to_text({7: pieces}) == {7: line}, "so it is scored"
    assert pieces == " ".join(pieces.split()), "what text.write_lines writes and fairseq reads"


@given(line=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE + "\n")))
def test_exact_pieces_give_back_any_line(exact: Subwords, line: str) -> None:
    pieces = [exact.pieces[number] for number in exact.numbers(line)]
    assert "<unk>" not in pieces
    data = b"".join(
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") and len(piece) == 6 else piece.encode("utf-8")
        for piece in pieces
    )
    assert data.decode("utf-8").replace(SPACE, " ").removeprefix(" ") == line


def test_pieces_are_subwords_by_number(subwords: Subwords) -> None:
    assert len(subwords.pieces) == len(set(subwords.pieces)) == 60 and subwords.pieces[0] == "<unk>"
    line = "the lesta of is the wester"
    assert [subwords.pieces[number] for number in subwords.numbers(line)] == subwords.split(line).split()
    assert len(subwords.split(line).split()) < len(line)


@pytest.mark.parametrize("special", SPECIALS)
def test_specials_of_fairseq_are_split_into_letters(special: str) -> None:
    """Other unknown letters in a row stay one piece."""
    assert special in Dictionary().symbols and len(SPECIALS) == Dictionary().nspecial
    model = learn(["一二三", "二三四"], "bpe", 8)
    assert model.split(f"二 {special}").split() == ["▁", "二", "▁", *special]
    assert model.split(f"二 {special}☃").split() == ["▁", "二", "▁", f"{special}☃"]
    assert to_text({7: model.split(f"二 {special} 一")}) == {7: f"二 {special} 一"}


@pytest.mark.parametrize("kind", KINDS)
def test_same_text_same_model(kind: str) -> None:
    assert learn(TEXT, kind, 60).content == learn(iter(TEXT), kind, 60).content != learn(TEXT[1:], kind, 60).content


def test_merges_of_bpe() -> None:
    """Sennrich et al.'s merges: the most frequent pair first, so the longest common words are single pieces."""
    pieces = learn(TEXT, "bpe", 60).pieces
    assert hashlib.sha256("\n".join(pieces).encode("utf-8")).hexdigest() == PINNED_BPE
    assert pieces.index("st") < pieces.index("est") and f"{SPACE}the" in pieces


def test_every_letter_of_training_is_a_piece(subwords: Subwords) -> None:
    assert {letter for line in TEXT for letter in line if letter != " "} <= set(subwords.pieces)


def test_long_lines_are_learnt_too() -> None:
    """By default SentencePiece skips lines of more than 4,192 bytes."""
    assert "zebra" in " ".join(learn([*TEXT, "zebra " * 2_000], "bpe", 80).pieces).replace(SPACE, "")


def test_lines_with_the_sign_of_unknown_letters_are_learnt_too() -> None:
    assert "zebra" in " ".join(learn([*TEXT, *["zebra \u2585"] * 2_000], "bpe", 80).pieces).replace(SPACE, "")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (100_000, "--vocab-size 100000 is too large: this text has at most "),
        (20, "--vocab-size 20 is too small: this text needs 2"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_size_that_does_not_fit(kind: str, size: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        learn(TEXT, kind, size)
    assert str(caught.value).startswith(message)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "lines",
    [[], ["", "  "], ["the " * (LONGEST_LINE // 4 + 1)], ["\u2585", "\u2585 \u2585"]],
    ids=["none", "empty", "long", "skipped"],
)
def test_no_text(lines: list[str]) -> None:
    """A text that is one long line, such as text8, is no text for SentencePiece."""
    message = (
        "there is no text to learn subwords from: lines are empty, or longer than 16 MiB, which SentencePiece skips"
    )
    with pytest.raises(DataError, match=f"{message}. Break them, or use text --unit bytes"):
        learn(lines, "bpe", 60)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"subwords need sentencepiece .*: pip install sentencepiece"):
        learn(TEXT, "bpe", 60)

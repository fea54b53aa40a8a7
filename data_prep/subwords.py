"""Splits text reversibly into subword pieces by SentencePiece (Kudo & Richardson 2018).

Pieces are entries of the vocabulary of a trained model, with ``▁`` (U+2581) for every space and before the first word.
There is no normalization: joining the pieces and replacing ``▁`` by spaces restores the line.

Training uses one thread, all given lines and no random numbers. So the same lines give the same model with the same
version of SentencePiece on the same kind of machine. BPE merges by counts of pairs, which are whole numbers. Unigram
models use expectation-maximization in floating point, and may differ in their last bits between processors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import ModuleType

from data_prep.binarize import SPECIALS
from data_prep.dataset import DataError, UsageError

KINDS = ("unigram", "bpe")
SPACE = "\u2581"  # SentencePiece's sign for a space
SKIPPED = "\u2585"  # its sign for unknown letters: it leaves out lines that have it
LONGEST_LINE = 1 << 24  # bytes; SentencePiece's default skips lines of more than 4,192
NORMALIZATION = "identity"


class Subwords:
    """A trained model. ``content`` is its file in SentencePiece's format."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._processor = sentencepiece().SentencePieceProcessor(model_proto=content)

    @cached_property
    def pieces(self) -> list[str]:
        """All pieces by number; number 0 is SentencePiece's ``<unk>``."""
        return [self._processor.id_to_piece(number) for number in range(len(self._processor))]

    def split(self, line: str) -> str:
        """The pieces of a line, separated by spaces. Unknown letters in a row are a piece.

        A piece that is one of fairseq's specials, which cannot be words, is split into its letters.
        """
        pieces = self._processor.encode(line, out_type=str)
        return " ".join(" ".join(piece) if piece in SPECIALS else piece for piece in pieces)

    def numbers(self, line: str) -> list[int]:
        """The numbers of the pieces of a line."""
        return self._processor.encode(line)


def model_file(folder: Path, side: str) -> Path | None:
    """The model of a data folder for a language, its own or that of both; None for data of words."""
    return next((path for path in (folder / f"spm.{side}.model", folder / "spm.model") if path.is_file()), None)


def learn(
    lines: Iterable[str], kind: str, size: int, *, coverage: float = 1.0, by_bytes: bool = False, exact: bool = False
) -> Subwords:
    """Trains a model of ``size`` pieces, including ``<unk>``, on lines of text, in their order.

    Args:
        lines: the text.
        size: number of pieces.
        kind: ``unigram`` (Kudo 2018) or ``bpe`` (Sennrich et al. 2016).
        coverage: share of the letters of the text that must be pieces; the rarest beyond it are unknown.
        by_bytes: whether the 256 bytes are pieces too, to spell unknown letters.
        exact: whether spaces at the ends of a line, or several in a row, are kept.

    Raises:
        UsageError: the size is too large or too small for the text.
        DataError: the text is empty, or SentencePiece is missing.
    """
    model = io.BytesIO()
    try:
        sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=(line.replace(SKIPPED, " ") for line in lines if line.strip()),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            character_coverage=coverage,
            byte_fallback=by_bytes,
            remove_extra_whitespaces=not exact,
            normalization_rule_name=NORMALIZATION,
            max_sentence_length=LONGEST_LINE,
            num_threads=1,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise explained(str(error), kind, size) from None
    return Subwords(model.getvalue())


def explained(message: str, kind: str, size: int) -> UsageError | DataError:
    """The error to raise for an error of SentencePiece's training."""
    most, least = re.search(r"too high .* <= (\d+)", message), re.search(r"required_chars\. \d+ vs (\d+)", message)
    if most:
        return UsageError(f"--vocab-size {size} is too large: this text has at most {most[1]} pieces of kind {kind}")
    if least:
        return UsageError(f"--vocab-size {size} is too small: this text needs {least[1]}, for its letters alone")
    if "sentences_.empty()" in message or "(all_chars_count) > (0)" in message:
        return DataError(
            f"there is no text to learn subwords from: lines are empty, or longer than {LONGEST_LINE >> 20} MiB, which "
            "SentencePiece skips. Break them, or use text --unit bytes, which needs no lines"
        )
    return DataError(f"SentencePiece cannot learn subwords from this text: {message}")


def sentencepiece() -> ModuleType:
    """Imports the library. Raises DataError if it is missing."""
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(f"subwords need sentencepiece ({error}): pip install sentencepiece") from None
    return sentencepiece


def library_version() -> str:
    """The library's version for ``dataset.json``: models of other versions may differ."""
    return f"sentencepiece {sentencepiece().__version__}"

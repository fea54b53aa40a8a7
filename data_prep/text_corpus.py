"""Text for language modelling, streamed into indexed datasets for ``sg_language_modeling`` and
fairseq's ``language_modeling``.

Text becomes one long row of tokens per subset, which the tasks cut into streams or blocks. Memory holds only one
line or one block at a time.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from data_prep.binarize import SPECIALS, write_indexed
from data_prep.corpus import saving
from data_prep.dataset import DataError, Dataset, Json, Material, shell_word
from data_prep.progress import progress
from data_prep.subwords import Subwords

if TYPE_CHECKING:
    from fairseq.data import Dictionary

BLOCK = 1 << 20  # bytes per read
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
# Tokens per entry of the indexed dataset for text without lines: fairseq reads whole entries.
ENTRY = 1 << 12
UPDATES = 100_000  # of the recommended training


class Span(NamedTuple):
    """The bytes of a file from ``start`` (inclusive) to ``end`` (exclusive)."""

    path: Path
    start: int
    end: int


class Unit(ABC):
    """The kind of a token. Token N of the model is ``symbols[N]``, after fairseq's specials.

    Attributes:
        size: of a model in Table F.2 of Csordás 2023, as the end of the architecture's name.
        context, batch: its tokens per segment (and per memory), and its streams.
        eos: whether every entry ends with fairseq's end symbol.
    """

    symbols: Sequence[str]
    size: str
    context: int
    batch: int
    eos: bool
    files: Mapping[str, bytes]

    @abstractmethod
    def entries(self, text: Path) -> Iterator[list[int]]:
        """Yields the text as lists of symbol numbers."""


class Bytes(Unit):
    """A token is a byte. The dictionary has all 256 in order, ``<0x00>`` to ``<0xFF>``; there are no end symbols."""

    symbols = tuple(f"<0x{byte:02X}>" for byte in range(256))
    size, context, batch, eos = "e8", 512, 32, False
    files = MappingProxyType({})

    def entries(self, text: Path) -> Iterator[list[int]]:
        with text.open("rb") as stream:
            while block := stream.read(ENTRY):
                yield list(block)


class Pieces(Unit):
    """A token is a subword; every line ends with fairseq's end symbol for the newline."""

    size, context, batch, eos = "wt_s", 256, 64, True

    def __init__(self, subwords: Subwords) -> None:
        """``subwords`` must be learned ``by_bytes``, so that no letter is unknown, and ``exact``, so
        that all spaces are kept.
        """
        self.subwords = subwords
        self.symbols = subwords.pieces[1:]  # fairseq has its own <unk>
        self.files = {"spm.model": subwords.content}

    def entries(self, text: Path) -> Iterator[list[int]]:
        with text.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield [number - 1 for number in self.subwords.numbers(line.removesuffix("\n"))]


@dataclass(frozen=True)
class TextCorpus(Material):
    """Text in named subsets, and its kind of tokens.

    Attributes:
        spans: subset -> its parts of files, in order; ``train`` first.
        rule, membership, origin: see ``Material``.
    """

    spans: Mapping[str, Sequence[Span]]
    unit: Unit
    rule: str
    membership: str
    origin: Json
    _measured: dict[str, Json] = field(default_factory=dict, init=False, repr=False)

    def check(self) -> None:
        """Raises DataError for a subset without text, or a subword that is a special symbol of fairseq."""
        for name, spans in self.spans.items():
            if not any(span.end > span.start for span in spans):
                raise DataError(
                    f"subset {name} is empty: give a longer text, or another share (--valid-share, --test-share)"
                )
        special = next((symbol for symbol in SPECIALS if symbol in self.unit.symbols), None)
        if special is not None:
            raise DataError(
                f"{special} is a special symbol of fairseq and cannot be a subword: try another --vocab-size"
            )

    def write(self, folder: Path, raw_only: bool) -> None:
        """Writes ``raw/SUBSET.txt`` with the unchanged bytes, ``dict.txt``, ``SUBSET.{bin,idx}``,
        and the files of the unit.
        """
        raw = folder / "raw"
        raw.mkdir(parents=True)
        for name, spans in self.spans.items():
            self._measured[name] = copy(spans, raw / f"{name}.txt")
        for name, content in self.unit.files.items():
            (folder / name).write_bytes(content)
        if raw_only:
            return
        counts = {name: self._binarize(folder, name) for name in self.spans}
        dictionary = make_dictionary(self.unit.symbols, counts["train"])
        dictionary.save(str(folder / "dict.txt"))

    def _binarize(self, folder: Path, name: str) -> Counter[int]:
        """Writes the indexed dataset of a subset; returns the frequency of each symbol in it."""
        from fairseq.data import Dictionary

        specials = Dictionary()
        first, end = specials.nspecial, [specials.eos()] if self.unit.eos else []
        counts: Counter[int] = Counter()

        def entries() -> Iterator[list[int]]:
            for entry in self.unit.entries(folder / "raw" / f"{name}.txt"):
                counts.update(entry)
                yield [*[first + number for number in entry], *end]

        tokens = write_indexed(folder / name, progress(entries(), f"binarizing {name}"), first + len(self.unit.symbols))
        self._measured[name]["tokens"] = tokens
        return counts

    def describe(self) -> Json:
        """Bytes, characters, words, lines and tokens of the subsets, known once the corpus is written.

        They convert a loss per token to a loss per byte, character or word.
        """
        return {"subsets": dict(self._measured), "vocabulary": {"symbols": len(self.unit.symbols)}}

    def summary(self, description: Json) -> list[str]:
        columns = ("bytes", "characters", "words", "lines", "tokens")
        lines = [f"text: {self.membership}", f"{'subset':10}" + "".join(f"{column:>14}" for column in columns)]
        for name, entry in description["subsets"].items():
            numbers = (entry.get(column) for column in columns)
            lines.append(f"{name:10}" + "".join(f"{'-' if n is None else format(n, ','):>14}" for n in numbers))
        return [*lines, f"vocabulary: {description['vocabulary']['symbols']} symbols"]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """For a language model. ``valid`` picks the best checkpoint, never ``test``; without
        ``valid``, there is no validation.
        """
        names = ",".join(name for name in self.spans if name != "train")
        validates = "valid" in self.spans
        validation = f"--valid-subset {names} --batch-size-valid 4" if validates else "--disable-validation"
        context = self.unit.context
        command = (
            f"fairseq-train {shell_word(out)} --user-dir fairseq_sg --task sg_language_modeling --arch "
            f"{dataset.arch}_{self.unit.size} --decoder-attention relative --attention-scale learned "
            f"--attention-dropout 0 --criterion cross_entropy_orthogonality --tokens-per-sample {context} "
            f"--memory-length {context} --eval-memory-length {4 * context} --batch-size {self.unit.batch} "
            f"{validation} --optimizer torch_adam --lr 2.5e-4 --lr-scheduler cosine --clip-norm 0.25 --max-update "
            f"{UPDATES} {saving(out, UPDATES, validates)}"
        )
        return [command]


def make_dictionary(symbols: Sequence[str], counts: Counter[int]) -> Dictionary:
    """Makes fairseq's dictionary of the symbols in their own order, with their training frequencies."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for number, symbol in enumerate(symbols):
        dictionary.add_symbol(symbol, n=counts[number])
    return dictionary


def blocks(spans: Iterable[Span]) -> Iterator[bytes]:
    """Yields the bytes of spans in blocks. Raises DataError for a file that has become shorter."""
    for span in spans:
        with span.path.open("rb") as stream:
            stream.seek(span.start)
            left = span.end - span.start
            while left:
                block = stream.read(min(BLOCK, left))
                if not block:
                    raise DataError("has changed while it was read", span.path)
                left -= len(block)
                yield block


def copy(spans: Sequence[Span], target: Path) -> Json:
    """Writes the bytes of spans to one file; returns its numbers of bytes, characters, words and lines.

    Characters are code points, None if the bytes are not UTF-8. One that is cut in two counts where it begins. ASCII
    white space separates words. Text after the last newline counts as a line.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    cut_before, cut_after = spans[0].start > 0, spans[-1].end < spans[-1].path.stat().st_size
    size, words, newlines, last = 0, 0, 0, b"\n"
    characters: int | None = 0
    with target.open("wb") as stream:
        for block in blocks(spans):
            stream.write(block)
            size += len(block)
            words += len(block.split()) - (not last.isspace() and not block[:1].isspace())
            newlines += block.count(b"\n")
            last = block[-1:]
            if cut_before:
                block = block.lstrip(CONTINUATION)
                cut_before = not block
            characters = count_characters(decoder, block, characters)
    if cut_after and characters is not None:
        characters += bool(decoder.getstate()[0])  # the bytes of a character that is not complete
    else:
        characters = count_characters(decoder, b"", characters, final=True)
    return {"bytes": size, "characters": characters, "words": words, "lines": newlines + (last != b"\n")}


def count_characters(
    decoder: codecs.IncrementalDecoder, block: bytes, so_far: int | None, final: bool = False
) -> int | None:
    """``so_far`` plus the characters that end in ``block``; None if anything is not UTF-8."""
    if so_far is None:
        return None
    try:
        return so_far + len(decoder.decode(block, final))
    except UnicodeDecodeError:
        return None

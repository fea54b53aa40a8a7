"""Your own text for language modelling: byte by byte as Enwik8, or in subwords as WikiText-103.

    --unit bytes          "Anarchism …"  ->  <0x41> <0x6E> <0x61> <0x72> <0x63> …
    --unit sentencepiece  " = Robert Boulter = "  ->  ▁ ▁= ▁Robert ▁B oul ter ▁= ▁ </s>

The two protocols of the models in chapter 7 of Csordás (2023):

    Enwik8        --unit bytes --input enwik8
                  the first 90, the next 5 and the last 5 million bytes are train, valid and test. The file is
                  mattmahoney.net/dc/enwik8.zip, unpacked; it is recognized by its hash.
    WikiText-103  --unit sentencepiece --vocab-size 8000 --input wiki.train.tokens
                  --valid-input wiki.valid.tokens --test-input wiki.test.tokens

Any other text works as well. Subsets without files come from the end of ``--input``: the last ``--test-share`` of its
bytes is test, the ``--valid-share`` before it valid. With subwords, a share ends at the end of a line. Several files
are concatenated in the given order.

    bytes          The dictionary has all 256 bytes. Nothing is added to the text, and byte b is token b + 4, after
                   fairseq's four specials.
    sentencepiece  One model (spm.model) is trained on train. Its pieces include the 256 bytes, which spell rare
                   letters, so nothing is unknown. The tokens restore the text, except ▁, SentencePiece's sign for a
                   space, which is read as one. A line, also an empty one, ends with fairseq's end symbol.

raw/SUBSET.txt has the unchanged bytes of the text, and dataset.json its numbers of bytes, characters, words, lines and
tokens. ``--task sg_language_modeling`` uses them to log bits per character and byte, and the perplexity per word.

fairseq-eval-lm prints a loss of x bits per token (base 2). Bits per character are x · tokens / characters. Perplexity
per word is 2^(x · tokens / (words + lines)); a line end counts as a word.

Source: yours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.dataset import (
    DataError,
    Dataset,
    Json,
    Options,
    Sources,
    UsageError,
    check_path,
    check_unpacked,
    option,
    share,
    whole_number,
)
from data_prep.draws import DEFAULT_SHARE, exact, shares_of
from data_prep.parallel import LARGEST_SIZE
from data_prep.subwords import KINDS, learn, library_version
from data_prep.text import check_beginning, decode_utf8
from data_prep.text_corpus import Bytes, Pieces, Span, TextCorpus, blocks

UNITS = ("bytes", "sentencepiece")
HELD_OUT = ("valid", "test")
COVERAGE = 0.9995  # of the letters of train; bytes spell the others (thousands in WikiText-103)
ENWIK8_SIZE, ENWIK8_SHA1 = 100_000_000, "57b8363b814821dc9d47aa4d41f58733519076b2"
# Options for subwords only, and their defaults.
SUBWORD_DEFAULTS = {"model": "unigram", "vocab_size": 8_000, "model_lines": 1_000_000}


@dataclass(frozen=True)
class TextFiles(Sources):
    """The user's files."""

    input: list[Path] = option(help="the text to train on", type=Path, nargs="+", action="extend", metavar="FILE")
    others: dict[str, list[Path]] = option(
        help="the text of {}",
        flag="--{}-input",
        keys=HELD_OUT,
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        for flag, paths in self.flags.items():
            for path in paths:
                check_path(flag, path, "file")
                check_unpacked(flag, path)
                if not path.stat().st_size:
                    raise DataError(f"{flag} is empty: give another file, or leave it out", path)

    @property
    def flags(self) -> dict[str, list[Path]]:
        """The options that take files, with their files."""
        return {"--input": self.input} | {f"--{subset}-input": paths for subset, paths in self.others.items()}

    @property
    def files(self) -> dict[str, list[Path]]:
        """The files of every subset that has some."""
        return {"train": self.input, **self.others}


@dataclass(frozen=True)
class TextOptions(Options):
    """The options of text; ``files`` are the hashes of the files of every subset."""

    unit: str = option(help="what a token is", choices=UNITS)
    files: dict[str, list[str]] = field(default_factory=dict)
    shares: dict[str, float] = option(
        help=f"share of --input used as {{0}} without --{{0}}-input; 0 makes no {{0}} (default: {DEFAULT_SHARE})",
        flag="--{}-share",
        keys=HELD_OUT,
        type=share,
    )
    model: str | None = option(None, "kind of subwords (default: unigram)", choices=KINDS, when_given=True)
    vocab_size: int | None = option(
        None,
        f"number of subwords (default: {SUBWORD_DEFAULTS['vocab_size']})",
        type=whole_number(2, LARGEST_SIZE),
        when_given=True,
    )
    model_lines: int | None = option(
        None,
        f"maximum lines of train to learn subwords from (default: {SUBWORD_DEFAULTS['model_lines']}). If there are "
        "more, every second, third … line is taken",
        type=whole_number(1),
        when_given=True,
    )

    def complete(self, sources: TextFiles) -> TextOptions:
        shares = shares_of(self.shares, (name for name in HELD_OUT if name not in sources.others))
        given = {name for name in SUBWORD_DEFAULTS if getattr(self, name) is not None}
        for name in SUBWORD_DEFAULTS if self.unit == "bytes" else ():
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')} is for subwords, and --unit bytes has none")
        for name in self.shares:
            if name in sources.others:
                raise UsageError(f"--{name}-share and --{name}-input both define {name}: omit one of them")
        missing = {name: value for name, value in SUBWORD_DEFAULTS.items() if name not in given}
        return replace(
            self,
            shares={name: part for name, part in shares.items() if part},
            **(missing if self.unit == "sentencepiece" else {}),
        )

    def identify(self, sources: TextFiles) -> TextOptions:
        return replace(self, files={name: [sources.sha256(p) for p in paths] for name, paths in sources.files.items()})


class Text(Dataset):
    """``python -m data_prep text``."""

    name = "text"
    title = "Text for language modelling"
    source = "text files of yours"
    licence = "that of your text"
    size = "that of your files"
    arch = "sg_transformer_lm"
    splits = UNITS
    options = TextOptions
    sources = TextFiles

    def build(self, options: TextOptions, sources: TextFiles) -> TextCorpus:
        paths, lines = sources.files, options.unit == "sentencepiece"
        for files in paths.values():  # they may be larger than the memory, and so are read several times
            for path in files:
                sources.watch(path)
        check_apart(sources)
        for files in paths.values() if lines else ():
            check_lines(files)
        spans = {subset: [whole(path) for path in files] for subset, files in paths.items()}
        spans = divide(spans.pop("train"), options.shares, lines) | spans
        spans = {subset: spans[subset] for subset in ("train", *HELD_OUT) if subset in spans}
        origin: Json = {"files": [sources.describe(subset, path) for subset in paths for path in paths[subset]]}
        if lines:
            origin["subwords"] = library_version()
            unit, kind = learn_pieces(spans["train"], options), f"{options.vocab_size:,} subwords learnt on train"
        else:
            unit, kind = Bytes(), "a token is a byte"
        alone = "there is no held-out text" if len(paths) == 1 else "the subsets are files of their own"
        origins = rule(options.shares) or alone
        return TextCorpus(spans, unit, f"{kind}; {origins}", membership(options, sources), origin)


def check_apart(sources: TextFiles) -> None:
    """Raises DataError for a text that is given twice: models would be tested on what they are trained on."""
    seen: dict[str, str] = {}
    for flag, paths in sources.flags.items():
        for path in paths:
            before = seen.get(sources.sha256(path))
            # A held-out text that is given twice counts twice, and is not trained on.
            if before is not None and (before != flag or flag == "--input"):
                what = "is given twice" if before == flag else f"has the same text as {before}"
                raise DataError(f"{flag} {what}: leave one of them out", path)
            seen[sources.sha256(path)] = flag


def check_lines(files: Sequence[Path]) -> None:
    """Raises DataError for text that does not consist of clean lines.

    Refused are text that is not UTF-8, a byte order mark, carriage returns, and a file before another one whose
    last line has no newline.
    """
    for position, path in enumerate(files, start=1):
        line = b""
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    check_beginning(path, line)
                try:
                    decode_utf8(path, number, line)
                except DataError as error:
                    raise DataError(
                        f"{error.message}, or use --unit bytes, which accepts any bytes", path, number
                    ) from None
                if b"\r" in line:
                    raise DataError("has a carriage return (CR): save the file with plain newlines", path, number)
        if position < len(files) and not line.endswith(b"\n"):
            raise DataError("does not end with a newline: its last line would continue in the next file", path)


def whole(path: Path) -> Span:
    """The span of a whole file."""
    return Span(path, 0, path.stat().st_size)


def divide(spans: list[Span], shares: dict[str, float], lines: bool) -> dict[str, list[Span]]:
    """Cuts text into train and, at its end, the shares of valid and test.

    Each share is the last ⌊share · bytes⌋ before the later shares. With ``lines``, a cut moves on to the
    next beginning of a line.
    """
    total = sum(span.end - span.start for span in spans)
    cuts, left = {}, total
    for subset in reversed(HELD_OUT):
        if subset in shares:
            left -= int(exact(shares[subset]) * total)
            cuts[subset] = next_line(spans, left) if lines else left
    found, start = {}, 0
    for subset, following in zip(("train", *reversed(cuts)), (*reversed(cuts), None), strict=True):
        end = total if following is None else cuts[following]
        found[subset] = part(spans, start, end)
        start = end
    return found


def part(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The bytes from ``start`` to before ``end`` of concatenated spans."""
    found, before = [], 0
    for path, first, last in spans:
        low, high = max(start - before, 0) + first, min(end - before + first, last)
        if low < high:
            found.append(Span(path, low, high))
        before += last - first
    return found


def next_line(spans: Sequence[Span], position: int) -> int:
    """The first beginning of a line at or after a position of concatenated spans, or their end."""
    total = sum(span.end - span.start for span in spans)
    if not 0 < position < total:
        return position
    position -= 1  # lines begin after a newline
    for block in blocks(part(spans, position, total)):
        found = block.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(block)
    return total


def learn_pieces(spans: Sequence[Span], options: TextOptions) -> Pieces:
    """Learns subwords on the lines of spans. Raises UsageError and DataError as ``learn`` does."""
    number = sum(1 for _ in lines_in(spans))
    step = -(-number // options.model_lines)
    lines = (line for index, line in enumerate(lines_in(spans)) if index % step == 0)
    return Pieces(learn(lines, options.model, options.vocab_size, coverage=COVERAGE, by_bytes=True, exact=True))


def lines_in(spans: Sequence[Span]) -> Iterator[str]:
    """Yields the lines of spans, which begin and end with a line, without their newlines."""
    rest = b""
    for block in blocks(spans):
        *whole_lines, rest = (rest + block).split(b"\n")
        yield from (line.decode("utf-8") for line in whole_lines)
    if rest:
        yield rest.decode("utf-8")


def rule(shares: dict[str, float]) -> str:
    """The origin of held-out shares of the input, in words; "" without shares."""
    parts = [f"{subset} is {'the last' if subset == 'test' or 'test' not in shares else 'the'} {part:g} of the input"
             + (" before it" if subset == "valid" and "test" in shares else "")
             for subset, part in reversed(shares.items())]  # fmt: skip
    return ", ".join(parts)


def membership(options: TextOptions, sources: TextFiles) -> str:
    """Whether the subsets are the published ones, in words."""
    is_enwik8 = (
        options.unit == "bytes"
        and options.shares == dict.fromkeys(HELD_OUT, DEFAULT_SHARE)
        and [path.stat().st_size for path in sources.input] == [ENWIK8_SIZE]
        and sha1(sources.input[0]) == ENWIK8_SHA1
    )
    return "the published ones of Enwik8" if is_enwik8 else "your own; there are no published ones"


def sha1(path: Path) -> str:
    """The hash by which Enwik8 is published."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()

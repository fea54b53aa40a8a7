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
per word is 2^(x · tokens / (words + lines)); a line end counts as a word. Give fairseq-eval-lm
``--required-batch-size-multiple 1``: without it, the last few blocks are lost.

Source: yours.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from data_prep.dataset import DataError, Dataset, Json, UsageError, share
from data_prep.parallel import describe, vocabulary_size
from data_prep.subwords import KINDS, learn, library_version
from data_prep.text import check_beginning, decode_utf8, sha256, shorten
from data_prep.text_corpus import Bytes, Pieces, Span, TextCorpus, blocks

UNITS = ("bytes", "sentencepiece")
HELD_OUT = ("valid", "test")
DEFAULT_SHARE = 0.05
DEFAULT_SIZE = 8_000
DEFAULT_LINES = 1_000_000
COVERAGE = 0.9995  # of the letters of train; bytes spell the others (thousands in WikiText-103)
ENWIK8_SIZE, ENWIK8_SHA1 = 100_000_000, "57b8363b814821dc9d47aa4d41f58733519076b2"
# Options for subwords only, and their defaults.
SUBWORD_OPTIONS = {"model": "unigram", "vocab_size": DEFAULT_SIZE, "model_lines": DEFAULT_LINES}


class Text(Dataset):
    """``python -m data_prep text``."""

    name = "text"
    title = "Text for language modelling"
    source = "text files of yours"
    licence = "that of your text"
    size = "that of your files"
    arch = "sg_transformer_lm"
    splits = UNITS

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--unit", required=True, choices=UNITS, help="what a token is")
        parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE", help="the text to train on")
        for subset in HELD_OUT:
            parser.add_argument(f"--{subset}-input", type=Path, nargs="+", metavar="FILE", help=f"the text of {subset}")
            parser.add_argument(
                f"--{subset}-share",
                type=share,
                metavar="F",
                help=f"share of --input used as {subset} without --{subset}-input; 0 makes no "
                f"{subset} (default: {DEFAULT_SHARE})",
            )
        parser.add_argument("--model", choices=KINDS, help="kind of subwords (default: unigram)")
        parser.add_argument(
            "--vocab-size", type=vocabulary_size, metavar="N", help=f"number of subwords (default: {DEFAULT_SIZE})"
        )
        parser.add_argument(
            "--model-lines",
            type=number_of_lines,
            metavar="N",
            help=f"maximum lines of train to learn subwords from (default: {DEFAULT_LINES}). If there are more, every "
            "second, third … line is taken",
        )

    def request(self, args: argparse.Namespace) -> Json:
        shares = {subset: share_of(args, subset) for subset in HELD_OUT if getattr(args, f"{subset}_input") is None}
        if sum(map(exact, shares.values())) >= 1:
            raise UsageError("--valid-share and --test-share leave nothing to train on")
        for option in SUBWORD_OPTIONS if args.unit == "bytes" else ():
            if getattr(args, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} is for subwords, and --unit bytes has none")
        subwords = {
            option: default if getattr(args, option) is None else getattr(args, option)
            for option, default in SUBWORD_OPTIONS.items()
        }
        return {
            "unit": args.unit,
            "files": {subset: [sha256(path) for path in paths] for subset, paths in files_of(args).items()},
            "shares": {subset: part for subset, part in shares.items() if part},
            **(subwords if args.unit == "sentencepiece" else {}),
        }

    def build(self, args: argparse.Namespace, request: Json) -> TextCorpus:
        paths, lines = files_of(args), request["unit"] == "sentencepiece"
        check_apart(paths, request["files"])
        for files in paths.values() if lines else ():
            check_lines(files)
        spans = {subset: [whole(path) for path in files] for subset, files in paths.items()}
        spans = divide(spans.pop("train"), request["shares"], lines) | spans
        spans = {subset: spans[subset] for subset in ("train", *HELD_OUT) if subset in spans}
        origin: Json = {"files": [describe(subset, path) for subset, files in paths.items() for path in files]}
        if lines:
            origin["subwords"] = library_version()
            unit, kind = learn_pieces(spans["train"], request), f"{request['vocab_size']:,} subwords learnt on train"
        else:
            unit, kind = Bytes(), "a token is a byte"
        return TextCorpus(spans, unit, f"{kind}; {rule(request['shares'])}", membership(paths, request), origin)


def number_of_lines(text: str) -> int:
    """The argument type of ``--model-lines``."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {shorten(text)}")
    return int(text)


def share_of(args: argparse.Namespace, subset: str) -> float:
    """The share of a subset without files."""
    given = getattr(args, f"{subset}_share")
    return DEFAULT_SHARE if given is None else given


def exact(part: float) -> Fraction:
    """A share as the exact decimal fraction that was typed: 0.1 is a tenth."""
    return Fraction(repr(part))


def files_of(args: argparse.Namespace) -> dict[str, list[Path]]:
    """The files of every subset that has some. Raises UsageError for both a share and files."""
    found = {"train": args.input}
    for subset in HELD_OUT:
        if getattr(args, f"{subset}_input") is not None:
            if getattr(args, f"{subset}_share") is not None:
                raise UsageError(f"--{subset}-share and --{subset}-input both define {subset}: omit one of them")
            found[subset] = getattr(args, f"{subset}_input")
    return found


def check_apart(paths: dict[str, list[Path]], hashes: dict[str, list[str]]) -> None:
    """Raises DataError for a file in training and in another subset."""
    for subset in HELD_OUT:
        for path, digest in zip(paths.get(subset, ()), hashes.get(subset, ()), strict=True):
            if digest in hashes["train"]:
                raise DataError(f"--{subset}-input has the same text as --input", path)


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


def learn_pieces(spans: Sequence[Span], request: Json) -> Pieces:
    """Learns subwords on the lines of spans. Raises UsageError and DataError as ``learn`` does."""
    number = sum(block.count(b"\n") for block in blocks(spans)) + 1
    step = -(-number // request["model_lines"])
    lines = (line for index, line in enumerate(lines_in(spans)) if index % step == 0)
    return Pieces(learn(lines, request["model"], request["vocab_size"], coverage=COVERAGE, by_bytes=True, exact=True))


def lines_in(spans: Sequence[Span]) -> Iterator[str]:
    """Yields the lines of spans, which begin and end with a line, without their newlines."""
    rest = b""
    for block in blocks(spans):
        *whole_lines, rest = (rest + block).split(b"\n")
        yield from (line.decode("utf-8") for line in whole_lines)
    if rest:
        yield rest.decode("utf-8")


def rule(shares: dict[str, float]) -> str:
    """The origin of the subsets, in words."""
    parts = [f"{subset} is {'the last' if subset == 'test' or 'test' not in shares else 'the'} {part:g} of the input"
             + (" before it" if subset == "valid" and "test" in shares else "")
             for subset, part in reversed(shares.items())]  # fmt: skip
    return ", ".join(parts) or "the subsets are files of their own"


def membership(paths: dict[str, list[Path]], request: Json) -> str:
    """Whether the subsets are the published ones, in words."""
    is_enwik8 = (
        request["unit"] == "bytes"
        and request["shares"] == dict.fromkeys(HELD_OUT, DEFAULT_SHARE)
        and [path.stat().st_size for path in paths["train"]] == [ENWIK8_SIZE]
        and sha1(paths["train"][0]) == ENWIK8_SHA1
    )
    return "the published ones of Enwik8" if is_enwik8 else "your own; there are no published ones"


def sha1(path: Path) -> str:
    """The hash by which Enwik8 is published."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.sha1(usedforsecurity=False)).hexdigest()

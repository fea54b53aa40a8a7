"""A parallel corpus of your own: two text files, line N of one the translation of line N of the other.

    Imagine the first piece : …  ->  Hãy tưởng tượng mảnh đầu tiên : …
    ▁I m ag ine ▁the ▁first ▁piece ▁: …  ->  ▁H ãy ▁tư ởng ▁tư ợng ▁mảnh …      (as the model sees them)

``--src`` and ``--tgt`` are for training. Give validation and test sets as files, or as shares of the training pairs
whose source occurs once: ``--valid-share`` and ``--test-share``.

``--max-length L`` makes a test of length generalization. Chiang & Cholak (2022) train English-Vietnamese translation on
sentences of at most 20 words and test it on longer ones. By the words of the source:

    train, valid, test    the pairs with at most L words; longer ones are omitted from train
    gen, dev              the longer ones of the test and of the validation set

SentencePiece cuts text into subwords. It is trained on ``train`` alone, with one model for both languages (``--joint``:
spm.model) or one for each (``--separate``: spm.src.model and spm.tgt.model). A letter that no training sentence has is
its own piece in the dictionary. raw/SUBSET.plain.{src,tgt} keep the plain text; score translations against it:

    python -m fairseq_sg.scoring.plain_bleu FOLDER gen GENERATE-test.txt

Each run of white space, and SentencePiece's sign ▁, becomes one space; the text is otherwise unchanged. Pairs with an
empty side, and pairs whose source is in another subset, are omitted from train and counted.

Source: yours. Files are UTF-8, also as .gz.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from numpy.random import RandomState

from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Dataset, Json, Pair, UsageError, seed_number, share
from data_prep.draws import occurring_once
from data_prep.subwords import KINDS, SPACE, learn, library_version
from data_prep.text import decode_utf8, raw_lines, read_bytes, sha256, shorten

DEFAULT_SEED = 1
DEFAULT_SHARE = 0.05
DEFAULT_SIZE = 8_000
LARGEST_SIZE = 1_000_000
HELD_OUT = {"valid": "dev", "test": "gen"}  # subset -> the subset for its sentences that are too long
LENGTHS: dict[str, Callable[[str], int]] = {"words": lambda text: len(text.split(" ")), "characters": len}
# Escapes of the Moses tokenizer for characters that its files cannot hold.
ENTITIES = {
    f"&{name};": letter
    for letter, names in {
        "&": ["amp"],
        "<": ["lt"],
        ">": ["gt"],
        '"': ["quot"],
        "'": ["apos"],
        "[": ["#91", "bra"],
        "]": ["#93", "ket"],
        "|": ["#124", "bar"],
    }.items()
    for name in names
}
Subsets = dict[str, list[Pair]]


class Split(NamedTuple):
    """Subsets of plain text, and the pairs omitted from train: reason -> number."""

    subsets: Subsets
    left_out: dict[str, int]


class Parallel(Dataset):
    """``python -m data_prep parallel``."""

    name = "parallel"
    title = "Parallel corpus"
    source = "two text files of yours"
    licence = "that of your text"
    size = "that of your files"
    arch = "sg_transformer"
    splits = ("length", "random")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for subset in ("train", *HELD_OUT):
            for side in ("src", "tgt"):
                own = side if subset == "train" else f"{subset}-{side}"
                what = f"{'sources' if side == 'src' else 'targets'} of {subset}"
                parser.add_argument(f"--{own}", type=Path, metavar="FILE", required=subset == "train", help=what)
        for subset in HELD_OUT:
            parser.add_argument(
                f"--{subset}-share",
                type=share,
                metavar="F",
                help=f"share of the training pairs drawn for {subset} if it has no files; 0 makes no "
                f"{subset} (default: {DEFAULT_SHARE})",
            )
        parser.add_argument(
            "--unescape", action="store_true", help="the text is escaped as by Moses: read &apos; as an apostrophe, …"
        )
        add_subword_arguments(parser, str(DEFAULT_SIZE))
        add_length_arguments(parser, default=0)
        parser.add_argument(
            "--seed", type=seed_number, metavar="N", help=f"seed of the draws for the shares (default: {DEFAULT_SEED})"
        )

    def request(self, args: argparse.Namespace) -> Json:
        files = {"src": args.src, "tgt": args.tgt}
        shares = {}
        for subset in HELD_OUT:
            own = {f"{subset}_{side}": getattr(args, f"{subset}_{side}") for side in ("src", "tgt")}
            given = getattr(args, f"{subset}_share")
            if len(set(map(bool, own.values()))) == 2:
                raise UsageError(f"--{subset}-src and --{subset}-tgt go together: give both or neither")
            if all(own.values()):
                if given is not None:
                    raise UsageError(
                        f"--{subset}-share draws a {subset} set, and --{subset}-src gives one: omit one of them"
                    )
                files |= own
            elif given != 0:
                shares[subset] = DEFAULT_SHARE if given is None else given
        if sum(shares.values()) >= 1:
            raise UsageError("--valid-share and --test-share leave nothing to train on")
        if args.seed is not None and not shares:
            raise UsageError("--seed has no effect: nothing is drawn")
        return {
            "files": {name: sha256(path) for name, path in files.items()},
            "shares": shares,
            "seed": DEFAULT_SEED if shares and args.seed is None else args.seed,
            "unescape": args.unescape,
            **subword_request(args, DEFAULT_SIZE),
            **length_request(args),
        }

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        paths = {name: getattr(args, name) for name in request["files"]}
        train, empty = read_pairs(paths["src"], paths["tgt"], request["unescape"], may_be_empty=True)
        held_out = {
            subset: read_pairs(paths[f"{subset}_src"], paths[f"{subset}_tgt"], request["unescape"])[0]
            for subset in HELD_OUT
            if f"{subset}_src" in paths
        }
        train, shared = without(train, held_out.values())
        train, drawn = draw(train, request["shares"], request["seed"])
        held_out |= drawn
        left_out = {"with an empty side": empty, "whose source is in another subset": shared}
        subsets = {"train": train, **{subset: held_out[subset] for subset in HELD_OUT if subset in held_out}}
        split = split_by_length(Split(subsets, left_out), request)
        origin = {"files": [describe(name, path) for name, path in paths.items()]}
        return subword_corpus(split, {}, "your own; there are no published ones", origin, request)


def add_subword_arguments(parser: argparse.ArgumentParser, size: str) -> None:
    """Adds ``--model``, ``--vocab-size``, ``--joint`` and ``--separate``."""
    parser.add_argument("--model", choices=KINDS, default="unigram", help="kind of subwords (default: unigram)")
    parser.add_argument(
        "--vocab-size", type=vocabulary_size, metavar="N", help=f"number of subwords in a model (default: {size})"
    )
    both = parser.add_mutually_exclusive_group()
    both.add_argument(
        "--joint",
        action="store_const",
        const=True,
        default=True,
        help="one model and one dictionary for both languages (the default)",
    )
    both.add_argument("--separate", dest="joint", action="store_const", const=False, help="one for each language")


def subword_request(args: argparse.Namespace, size: int) -> Json:
    """The request entries for the options of ``add_subword_arguments``; ``size`` is the default of ``--vocab-size``."""
    return {"model": args.model, "vocab_size": args.vocab_size or size, "joint": args.joint}


def add_length_arguments(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds ``--max-length`` and ``--length-unit``."""
    parser.add_argument(
        "--max-length",
        type=greatest_length,
        metavar="L",
        default=default,
        help="maximum length of a training source; longer ones are tested as gen; 0 sets no limit and "
        f"makes no gen (default: {default})",
    )
    parser.add_argument("--length-unit", choices=tuple(LENGTHS), help="what --max-length counts (default: words)")


def length_request(args: argparse.Namespace) -> Json:
    """The request entries for the options of ``add_length_arguments``. Raises UsageError."""
    if args.length_unit is not None and not args.max_length:
        raise UsageError("--length-unit is the unit of --max-length: add --max-length, or omit it")
    return {"max_length": args.max_length, "length_unit": (args.length_unit or "words") if args.max_length else None}


def vocabulary_size(text: str) -> int:
    """The argument type of ``--vocab-size``."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 2 <= int(text) <= LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"must be a whole number from 2 to {LARGEST_SIZE}, not {shorten(text)}")
    return int(text)


def greatest_length(text: str) -> int:
    """The argument type of ``--max-length``."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, or 0 for no limit, not {shorten(text)}")
    return int(text)


def describe(name: str, path: Path) -> Json:
    """The entry of a user's file in ``dataset.json``."""
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def read_pairs(source: Path, target: Path, unescape: bool, may_be_empty: bool = False) -> tuple[list[Pair], int]:
    """Reads the pairs of two files; see ``pair_up``."""
    return pair_up(source, read_bytes(source), target, read_bytes(target), unescape, may_be_empty)


def pair_up(
    source: Path, source_data: bytes, target: Path, target_data: bytes, unescape: bool, may_be_empty: bool = False
) -> tuple[list[Pair], int]:
    """Pairs the lines of two plain texts; also returns how many pairs were omitted for an empty side.

    Raises:
        DataError: with file and line, for text that is not UTF-8, for different numbers of lines, and, unless
            ``may_be_empty``, for an empty side: a test must not lose examples silently.
    """
    sources, targets = (
        [clean(line, unescape) for line in decode(*content)]
        for content in ((source, source_data), (target, target_data))
    )
    if len(sources) != len(targets):
        message = f"{len(targets):,} lines, but {source.name} has {len(sources):,}: line N of one must translate line N"
        raise DataError(f"{message} of the other", target)
    pairs = list(map(Pair, sources, targets))
    empty = [number for number, pair in enumerate(pairs, start=1) if not all(pair)]
    if empty and not may_be_empty:
        raise DataError("empty line", source if not sources[empty[0] - 1] else target, empty[0])
    return [pair for pair in pairs if all(pair)], len(empty)


def decode(path: Path, data: bytes) -> list[str]:
    """The lines of a UTF-8 text file; only a newline ends a line. Raises DataError."""
    return [decode_utf8(path, number, raw) for number, raw in enumerate(raw_lines(path, data), start=1)]


def clean(line: str, unescape: bool) -> str:
    """A line as words between single spaces; with ``unescape``, escapes of Moses are reversed."""
    if unescape:
        line = re.sub("&[a-z#0-9]{2,4};", lambda match: ENTITIES.get(match[0], match[0]), line)
    return " ".join(line.replace(SPACE, " ").split())


def without(train: list[Pair], others: Iterable[list[Pair]]) -> tuple[list[Pair], int]:
    """The training pairs whose source is in no other subset, and how many were omitted."""
    tested = {pair.source for pairs in others for pair in pairs}
    kept = [pair for pair in train if pair.source not in tested]
    return kept, len(train) - len(kept)


def draw(pairs: list[Pair], shares: Mapping[str, float], seed: int | None) -> tuple[list[Pair], Subsets]:
    """Draws subsets from the pairs whose source occurs once, ⌊share · number of such pairs⌋ each.

    The draw uses numpy's frozen legacy generator, which is the same in every version.

    Returns:
        The other pairs, and the subsets; all in the order of ``pairs``.

    Raises:
        DataError: a subset would not have even one pair.
    """
    once = occurring_once(pairs)
    order, home = RandomState(seed).permutation(len(once)), dict.fromkeys(range(len(pairs)), "train")
    for subset, part in shares.items():
        number = int(len(once) * part)
        if number == 0:
            raise DataError(f"a --{subset}-share of {part:g} of {len(once):,} pairs is not even one")
        home |= {once[position]: subset for position in order[:number]}
        order = order[number:]
    found = {
        name: [pair for pair, place in zip(pairs, home.values(), strict=True) if place == name]
        for name in ("train", *shares)
    }
    return found.pop("train"), found


def split_by_length(split: Split, request: Json) -> Split:
    """Omits sources that are too long from train, and moves those of valid and test to dev and gen.

    Raises DataError if there is no long one to test, or if a subset has no short one.
    """
    limit = request["max_length"]
    if not limit:
        return split
    length = LENGTHS[request["length_unit"]]
    short, long = (
        {
            name: [pair for pair in pairs if (length(pair.source) > limit) == above]
            for name, pairs in split.subsets.items()
        }
        for above in (False, True)
    )
    subsets = short | {HELD_OUT[name]: long[name] for name in reversed(HELD_OUT) if long.get(name)}
    unit = f"{limit} {request['length_unit']}"
    if "gen" not in subsets:
        raise DataError(f"no test sentence has more than {unit}: lower --max-length, or give a test set with long ones")
    for name, pairs in short.items():
        if not pairs:
            raise DataError(f"no sentence of {name} has at most {unit}: raise --max-length")
    return Split(subsets, split.left_out | {f"with more than {unit}": len(long["train"])})


def subword_corpus(split: Split, published: Mapping[str, int], membership: str, origin: Json, request: Json) -> Corpus:
    """Learns subwords on train and splits all subsets by them. Raises UsageError and DataError as ``learn`` does."""
    kind, size = request["model"], request["vocab_size"]
    train = split.subsets["train"]
    if request["joint"]:
        source = target = learn((side for pair in train for side in pair), kind, size)
        files = {"spm.model": source.content}
    else:
        source, target = (learn((getattr(pair, side) for pair in train), kind, size) for side in Pair._fields)
        files = {"spm.src.model": source.content, "spm.tgt.model": target.content}
    subsets = {
        name: [Pair(source.split(pair.source), target.split(pair.target)) for pair in pairs]
        for name, pairs in split.subsets.items()
    }
    models = "one model for both languages" if request["joint"] else "a model for each language"
    rule = f"{size:,} subwords ({kind}, {models}) learnt on train"
    if request["max_length"]:
        rule += f"; the sources of train, valid and test have at most {request['max_length']} {request['length_unit']}"
        rule += ", those of gen and dev more"
    left_out = ", ".join(f"{number:,} {reason}" for reason, number in split.left_out.items() if number)
    return Corpus(
        subsets,
        published,
        rule,
        f"{membership}; left out of train: {left_out or 'none'}",
        {**origin, "subwords": library_version(), "left_out_of_train": split.left_out},
        None,
        joined=request["joint"],
        plain=split.subsets,
        files=files,
    )

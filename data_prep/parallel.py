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
spm.model) or one for each (``--separate``: spm.src.model and spm.tgt.model). Letters that no training
sentence has are words of the dictionary too, a run of them one word, with an untrained embedding.
raw/SUBSET.plain.{src,tgt} keep the plain text; score translations against it:

    python -m fairseq_sg.scoring.plain_bleu FOLDER gen results/generate-gen.txt

Each run of white space, and SentencePiece's sign ▁, becomes one space; the text is otherwise unchanged. Pairs with an
empty side, and pairs whose source is in another subset, are omitted from train and counted.

``--model words`` needs no SentencePiece. Words are what spaces separate, and ▁ is a letter:

    walk twice  ->  WALK WALK

Each side has a dictionary of its words in all subsets. Words of other subsets that train lacks are counted; their
embeddings stay untrained. There is no plain text beside raw/SUBSET.{src,tgt}.

Source: yours. Files are UTF-8, also as .gz.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from data_prep.binarize import check_words
from data_prep.corpus import Corpus, Subset, vocabulary
from data_prep.dataset import (
    DataError,
    Dataset,
    Json,
    Options,
    Pair,
    Sources,
    Subsets,
    UsageError,
    check_path,
    check_unpacked,
    option,
    seed_number,
    share,
    whole_number,
)
from data_prep.draws import DEFAULT_SHARE, draw, seed_of, shares_of
from data_prep.subwords import KINDS, SPACE, learn, library_version
from data_prep.text import decode_utf8, raw_lines

WORDS = "words"  # the choice of --model without subwords
DEFAULT_SEED = 1
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


class Split(NamedTuple):
    """Subsets of plain text, and the pairs omitted from train: reason -> number."""

    subsets: Subsets
    left_out: dict[str, int]


def max_length_option(default: int) -> Any:
    """The option ``--max-length``."""
    text = (
        "maximum length of a training source; longer ones are tested as gen; 0 sets no limit and "
        f"makes no gen (default: {default})"
    )
    return option(default, text, type=whole_number(0))


def file_option(what: str, default: Any = None) -> Any:
    """An option that takes a file of the user."""
    return option(default, what, type=Path, metavar="FILE")


@dataclass(frozen=True)
class TranslationOptions(Options):
    """The options of parallel corpora: subwords, whose number has the default of the dataset, then lengths.

    ``shares`` of the training pairs are drawn for other subsets; datasets with published tests have none.
    """

    shares: ClassVar[Mapping[str, float]] = {}

    model: str = option("unigram", "kind of subwords (default: %(default)s)", choices=KINDS)
    vocab_size: int | None = option(
        None,
        f"number of subwords in a model (default: {DEFAULT_SIZE})",
        type=whole_number(2, LARGEST_SIZE),
    )
    joint: bool | None = option(
        None,
        "one model and one dictionary for both languages (the default), or one for each language",
        given={"--joint": True, "--separate": False},
    )
    max_length: int = max_length_option(0)
    length_unit: str | None = option(None, "what --max-length counts (default: words)", choices=tuple(LENGTHS))
    train_all: bool = option(
        False,
        "train on sources of all lengths: --max-length splits only the others",
        given={"--train-all": True},
        when_given=True,
    )

    def default_size(self) -> int:
        """The default of ``vocab_size``."""
        return DEFAULT_SIZE

    def complete(self, sources: Sources) -> Self:
        if self.length_unit is not None and not self.max_length:
            raise UsageError("--length-unit is the unit of --max-length: add --max-length, or omit it")
        if self.train_all and not self.max_length:
            raise UsageError(
                "--train-all needs --max-length, which splits the other subsets: add it, or omit --train-all"
            )
        if self.max_length and self.shares.get("test") == 0:
            raise UsageError(
                "--max-length tests on longer sentences, and there is no test set: give one, or omit --max-length"
            )
        unit = (self.length_unit or "words") if self.max_length else None
        size = self.default_size() if self.vocab_size is None else self.vocab_size
        return replace(self, vocab_size=size, joint=self.joint is not False, length_unit=unit)


@dataclass(frozen=True)
class ParallelFiles(Sources):
    """The user's files."""

    src: Path = file_option("sources of train", MISSING)
    tgt: Path = file_option("targets of train", MISSING)
    valid_src: Path | None = file_option("sources of valid")
    valid_tgt: Path | None = file_option("targets of valid")
    test_src: Path | None = file_option("sources of test")
    test_tgt: Path | None = file_option("targets of test")

    def __post_init__(self) -> None:
        for subset in HELD_OUT:
            if (getattr(self, f"{subset}_src") is None) != (getattr(self, f"{subset}_tgt") is None):
                raise UsageError(f"--{subset}-src and --{subset}-tgt go together: give both or neither")
        for name, path in self.files.items():
            flag = f"--{name.replace('_', '-')}"
            check_path(flag, path, "file")
            if path.suffix != ".gz":
                check_unpacked(flag, path)

    def has(self, subset: str) -> bool:
        """Whether a subset has files."""
        return getattr(self, f"{subset}_src") is not None

    @property
    def files(self) -> dict[str, Path]:
        """The name of an option, with underscores -> the file."""
        names = ["src", "tgt", *(f"{subset}_{side}" for subset in HELD_OUT for side in ("src", "tgt"))]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def pairs(self, subset: str, unescape: bool, words: bool = False) -> tuple[list[Pair], int]:
        """Reads the pairs of a subset; see ``pair_up``."""
        train = subset == "train"
        source, target = (self.files[side if train else f"{subset}_{side}"] for side in ("src", "tgt"))
        data = source, self.read_bytes(source), target, self.read_bytes(target)
        return pair_up(*data, unescape, may_be_empty=train, words=words)


@dataclass(frozen=True)
class ParallelOptions(TranslationOptions):
    """The options of a parallel corpus; ``files`` are the hashes of the files, by option."""

    model: str = option(
        "unigram", "kind of subwords, or the words between spaces (default: %(default)s)", choices=(*KINDS, WORDS)
    )
    files: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = option(
        help="share of the training pairs drawn for {0} if it has no files; 0 makes no {0} "
        f"(default: {DEFAULT_SHARE})",
        flag="--{}-share",
        keys=tuple(HELD_OUT),
        type=share,
    )
    seed: int | None = option(None, f"seed of the draws for the shares (default: {DEFAULT_SEED})", type=seed_number)
    unescape: bool = option(
        False, "the text is escaped as by Moses: read &apos; as an apostrophe, …", given={"--unescape": True}
    )

    def complete(self, sources: ParallelFiles) -> ParallelOptions:
        for subset in self.shares:
            if sources.has(subset):
                raise UsageError(
                    f"--{subset}-share draws a {subset} set, and --{subset}-src gives one: omit one of them"
                )
        shares = shares_of(self.shares, (name for name in HELD_OUT if not sources.has(name)))
        shares = {name: part for name, part in shares.items() if part}
        seed = seed_of(self.seed, bool(shares), DEFAULT_SEED, "nothing is drawn")
        complete = replace(super().complete(sources), shares=shares, seed=seed)
        return replace(complete, **self.without_subwords()) if self.model == WORDS else complete

    def without_subwords(self) -> Json:
        """What ``--model words`` sets. Raises UsageError for options of subwords, and for another unit of lengths."""
        given = {
            "--vocab-size": self.vocab_size is not None,
            "--joint": self.joint is True,
            "--separate": self.joint is False,
            "--length-unit characters": self.length_unit == "characters",
        }
        useless = [flag for flag, is_given in given.items() if is_given]
        if useless:
            raise UsageError(
                "--model words makes a dictionary of words for each side, and lengths are in words: omit "
                f"{' and '.join(useless)}"
            )
        return {"vocab_size": None, "joint": False}

    def identify(self, sources: ParallelFiles) -> ParallelOptions:
        return replace(self, files={name: sources.sha256(path) for name, path in sources.files.items()})


class Parallel(Dataset):
    """``python -m data_prep parallel``."""

    name = "parallel"
    title = "Parallel corpus"
    source = "two text files of yours"
    licence = "that of your text"
    size = "that of your files"
    arch = "sg_transformer"
    splits = ("length", "random")
    options = ParallelOptions
    sources = ParallelFiles

    def build(self, options: ParallelOptions, sources: ParallelFiles) -> Corpus:
        words = options.model == WORDS
        train, empty = sources.pairs("train", options.unescape, words)
        held_out = {name: sources.pairs(name, options.unescape, words)[0] for name in HELD_OUT if sources.has(name)}
        check_apart(held_out, sources)
        train, shared = without(train, held_out.values())
        left_out = {"with an empty side": empty, "whose source is in another subset": shared}
        if not train:
            counts = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items())
            raise DataError(f"no pair is left to train on: there are {counts}", sources.src)
        train, drawn = draw(train, options.shares, options.seed)
        held_out |= drawn
        subsets = {"train": train, **{subset: held_out[subset] for subset in HELD_OUT if subset in held_out}}
        split = split_by_length(Split(subsets, left_out), options)
        origin = {"files": [sources.describe(name, path) for name, path in sources.files.items()]}
        membership = "your own; there are no published ones"
        if words:
            return word_corpus(split, membership, origin, options)
        return subword_corpus(split, {}, membership, origin, options)


def check_apart(held_out: Mapping[str, list[Pair]], sources: ParallelFiles) -> None:
    """Raises DataError if valid and test have the same sources: the best checkpoint would be chosen by the test."""
    texts = [{pair.source for pair in pairs} for pairs in held_out.values()]
    if len(texts) == len(HELD_OUT) and texts[0] == texts[1]:
        path = sources.files["test_src"]
        raise DataError("--test-src has the same text as --valid-src: give another, or leave one of them out", path)


def pair_up(
    source: Path,
    source_data: bytes,
    target: Path,
    target_data: bytes,
    unescape: bool,
    may_be_empty: bool = False,
    words: bool = False,
) -> tuple[list[Pair], int]:
    """Pairs the lines of two plain texts; also returns how many pairs were omitted for an empty side.

    Args:
        unescape: see ``clean``.
        may_be_empty: whether a side may be empty: a test must not lose examples silently.
        words: whether the text is not cut into subwords: SentencePiece's sign is a letter, and fairseq's special
            symbols are refused.

    Raises:
        DataError: with file and line, for an empty file, for text that is not UTF-8, for different numbers of lines,
            and, according to the arguments, for an empty side or a special symbol.
    """
    for path, data in ((source, source_data), (target, target_data)):
        if not data:
            raise DataError("the file is empty", path)
    sources, targets = (
        [clean(line, unescape, keep_sign=words) for line in decode(*content)]
        for content in ((source, source_data), (target, target_data))
    )
    if words:
        for path, lines in ((source, sources), (target, targets)):
            for number, line in enumerate(lines, start=1):
                check_words(line.split(" "), path, number)
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


def clean(line: str, unescape: bool, keep_sign: bool = False) -> str:
    """A line as words between single spaces; with ``unescape``, escapes of Moses are reversed.

    SentencePiece's sign for a space becomes one, except with ``keep_sign``.
    """
    if unescape:
        line = re.sub("&[a-z#0-9]{2,4};", lambda match: ENTITIES.get(match[0], match[0]), line)
    return " ".join((line if keep_sign else line.replace(SPACE, " ")).split())


def without(train: list[Pair], others: Iterable[list[Pair]]) -> tuple[list[Pair], int]:
    """The training pairs whose source is in no other subset, and how many were omitted."""
    tested = {pair.source for pairs in others for pair in pairs}
    kept = [pair for pair in train if pair.source not in tested]
    return kept, len(train) - len(kept)


def split_by_length(split: Split, options: TranslationOptions) -> Split:
    """Moves sources of valid and test that are too long to dev and gen, and omits those of train unless all are wanted.

    Raises DataError if test has no long one, or a subset no short one.
    """
    limit = options.max_length
    if not limit:
        return split
    length = LENGTHS[options.length_unit]
    short, long = (
        {
            name: [pair for pair in pairs if (length(pair.source) > limit) == above]
            for name, pairs in split.subsets.items()
        }
        for above in (False, True)
    )
    if options.train_all:
        short["train"], long["train"] = split.subsets["train"], []
    subsets = short | {HELD_OUT[name]: long[name] for name in reversed(HELD_OUT) if long.get(name)}
    unit = f"{limit} {options.length_unit}"
    if "gen" not in subsets:
        advice = ", or give a test set with long ones" if isinstance(options, ParallelOptions) else ""
        raise DataError(f"no test sentence has more than {unit}: lower --max-length{advice}")
    for name, pairs in short.items():
        if not pairs:
            raise DataError(f"no sentence of {name} has at most {unit}: raise --max-length")
    return Split(subsets, split.left_out | {f"with more than {unit}": len(long["train"])})


def subword_corpus(
    split: Split, published: Mapping[str, int], membership: str, origin: Json, options: TranslationOptions
) -> Corpus:
    """Learns subwords on train and splits all subsets by them. Raises UsageError and DataError as ``learn`` does."""
    kind, size = options.model, options.vocab_size
    train = split.subsets["train"]
    if options.joint:
        source = target = learn((side for pair in train for side in pair), kind, size)
        files = {"spm.model": source.content}
    else:
        source, target = (learn((getattr(pair, side) for pair in train), kind, size) for side in Pair._fields)
        files = {"spm.src.model": source.content, "spm.tgt.model": target.content}
    subsets = {
        name: Subset(
            [Pair(source.split(pair.source), target.split(pair.target)) for pair in pairs],
            plain=pairs,
            published=published.get(name),
        )
        for name, pairs in split.subsets.items()
    }
    models = "one model for both languages" if options.joint else "a model for each language"
    rule = f"{size:,} subwords ({kind}, {models}) learnt on train{length_rule(options)}"
    return Corpus(
        subsets,
        rule,
        f"{membership}; left out of train: {listed(split.left_out)}",
        {**origin, "subwords": library_version(), "left_out_of_train": split.left_out},
        joined=options.joint,
        files=files,
    )


def word_corpus(split: Split, membership: str, origin: Json, options: TranslationOptions) -> Corpus:
    """The subsets in words, as they are; counts the words of other subsets that train lacks."""
    lacking = {}
    for side in Pair._fields:
        known, all_words = (
            vocabulary(getattr(pair, side) for name in names for pair in split.subsets[name])
            for names in (["train"], split.subsets)
        )
        lacking[f"of a {side}"] = len(all_words - known)
    return Corpus(
        {name: Subset(pairs) for name, pairs in split.subsets.items()},
        f"words between spaces{length_rule(options)}",
        f"{membership}; left out of train: {listed(split.left_out)}; words that train lacks: {listed(lacking)}",
        {**origin, "left_out_of_train": split.left_out},
    )


def length_rule(options: TranslationOptions) -> str:
    """What ``--max-length`` does to the subsets, as the end of a rule; empty without it."""
    if not options.max_length:
        return ""
    short = "valid and test" if options.train_all else "train, valid and test"
    rule = f"; the sources of {short} have at most {options.max_length} {options.length_unit}"
    return f"{rule}, those of gen and dev more"


def listed(numbers: Mapping[str, int]) -> str:
    """The numbers that are not 0, each before its name."""
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items() if number) or "none"

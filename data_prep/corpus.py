"""A corpus of sentence pairs in named subsets: its checks, files and description."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.binarize import LANGUAGES, binarize, link_labels
from data_prep.dataset import DataError, Dataset, Json, Material, Pair, shell_word, shorten
from data_prep.text import write_lines

FAIRSEQ_LONGEST = 1_024  # maximum tokens with the begin and end symbols, unless an option raises it
UPDATES = 10_000  # of the recommended training
EVALUATIONS = 20  # per training
NEVER = 1_000_000  # epochs
BATCH = 64  # examples of an update
MOST_EXAMPLES, MOST_WORDS = 1 << 10, 1 << 16  # per batch on the device


#: Side -> the number of bits of a word (``width``), and for every marker the flags that it sets (``markers``).
Bits = Mapping[str, Mapping[str, Any]]


class Counts(NamedTuple):
    """The number of different words in the sources, in the targets, and in both together."""

    source: int
    target: int
    together: int


class Subset(NamedTuple):
    """One subset of a corpus.

    Attributes:
        pairs: the examples.
        types: the type of every example; empty if the examples have none.
        plain: the pairs as plain text before tokenization; empty if that is not kept.
        published: the size in the paper or the official files, before any hold-out.
        may_repeat: whether it may share examples with training by design.
    """

    pairs: Sequence[Pair]
    types: Sequence[str] = ()
    plain: Sequence[Pair] = ()
    published: int | None = None
    may_repeat: bool = False


@dataclass(frozen=True)
class Corpus(Material):
    """Pairs of sentences, or of a sentence and its class.

    Attributes:
        subsets: by name, ``train`` first. The names are those for fairseq, so never ``valid1``.
        rule, membership, origin: see ``Material``.
        vocabulary: the expected numbers of source and of target words in all subsets, or None.
        joined: whether sources and targets share one dictionary, as in the papers.
        together: the expected number of words in the joined dictionary, or None.
        groups: name of a group of types -> those types.
        labels: whether every target is one word, a class; then the data are also written for classification
            (``link_labels``).
        files: name -> content of further files, such as a subword model.
        official: whether all examples are unchanged published files. Examples shared with training are then counted.
        no_label: the word of a target that is none, where every word of a source has a label in the target.
        bits: how words of bits become vectors (``words_of_bits``), or None.
        words: further words for a ``joined`` dictionary: all words of the language, where other data lack some.
    """

    subsets: Mapping[str, Subset]
    rule: str
    membership: str
    origin: Json
    vocabulary: tuple[int, int] | None = None
    joined: bool = False
    together: int | None = None
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    labels: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    official: bool = False
    words: Sequence[str] = ()
    no_label: str | None = None
    bits: Bits | None = None

    def check(self) -> None:
        """Raises DataError for an inconsistent corpus.

        Checked are the names of subsets, empty subsets, training examples in other subsets, the size of the vocabulary,
        and that types, groups, labels and plain text match the examples.
        """
        if next(iter(self.subsets)) != "train":
            raise DataError(f"the first subset is {next(iter(self.subsets))}, not train")
        for name, subset in self.subsets.items():
            # fairseq joins valid, valid1, valid2, ... into one validation set.
            if not re.fullmatch(r"[a-z][a-z_]*", name):
                raise DataError(f"a subset may not be named {name!r}: small letters and underscores only")
            if not len(subset.pairs):
                raise DataError(f"subset {name} is empty")
        self._check_overlap()
        self._check_companions()
        self._check_vocabulary()

    @cached_property
    def _overlaps(self) -> Mapping[str, set[str]]:
        """Subset -> sources shared with training, for subsets that must not share any."""
        # Hashes save memory: sources of millions of examples are not stored twice.
        train = self.subsets["train"].pairs
        trained = {hash(pair.source) for pair in train}
        shared = {}
        for name, subset in self.subsets.items():
            if name == "train" or subset.may_repeat:
                continue
            suspects = {pair.source for pair in subset.pairs if hash(pair.source) in trained}
            found = {pair.source for pair in train if pair.source in suspects} if suspects else set()
            if found:
                shared[name] = found
        return shared

    def _check_overlap(self) -> None:
        train = self.subsets["train"].pairs
        for name, shared in {} if self.official else self._overlaps.items():
            first = next(n for n, pair in enumerate(train, start=1) if pair.source in shared)
            source = train[first - 1].source
            other = next(n for n, pair in enumerate(self.subsets[name].pairs, start=1) if pair.source == source)
            raise DataError(
                f"train and {name} overlap: example {first:,} of train is example "
                f"{other:,} of {name}, {shorten(source)}"
            )

    def _check_companions(self) -> None:
        for name, (pairs, types, plain, *_) in self.subsets.items():
            for what, companions in (("types", types), ("plain pairs", plain)):
                if companions and len(companions) != len(pairs):
                    raise DataError(f"subset {name} has {len(pairs):,} examples and {len(companions):,} {what}")
        known = {kind for subset in self.subsets.values() for kind in subset.types}
        for group, kinds in self.groups.items():
            missing = next((kind for kind in kinds if kind not in known), None)
            if missing is not None:
                raise DataError(f"group {group} names the type {missing}, but no example has it")
        for name, subset in self.subsets.items() if self.labels else ():
            wrong = next((pair for pair in subset.pairs if not pair.target or " " in pair.target), None)
            if wrong is not None:
                raise DataError(f"{name} has a target that is not one word: {shorten(wrong.target)}")
        for name, subset in self.subsets.items() if self.no_label is not None else ():
            for number, pair in enumerate(subset.pairs, start=1):
                source, target = pair.source.count(" ") + 1, pair.target.split(" ")
                if source != len(target):
                    raise DataError(f"example {number:,} of {name} has {source} words and {len(target)} labels")
                if target.count(self.no_label) == len(target):
                    raise DataError(f"example {number:,} of {name} has no label: {shorten(pair.target)}")

    @cached_property
    def counts(self) -> Counts:
        """The sizes of the vocabularies, from one pass over possibly millions of pairs."""
        sources, targets = (
            vocabulary(getattr(pair, side) for subset in self.subsets.values() for pair in subset.pairs)
            for side in Pair._fields
        )
        return Counts(len(sources), len(targets), len(sources | targets))

    def _check_vocabulary(self) -> None:
        found = self.counts
        for side, expected in zip(Pair._fields, self.vocabulary or (None, None), strict=True):
            if expected is not None and getattr(found, side) != expected:
                raise DataError(f"the {side} vocabulary has {getattr(found, side)} words instead of {expected}")
        if self.together is not None and found.together != self.together:
            raise DataError(f"the common vocabulary has {found.together} words instead of {self.together}")

    def write(self, folder: Path, raw_only: bool) -> None:
        """Writes ``raw/SUBSET.{src,tgt}``, ``.type`` and ``.plain.{src,tgt}`` if there are any, the
        binaries and further files.
        """
        raw = folder / "raw"
        raw.mkdir(parents=True)
        for name, subset in self.subsets.items():
            write_pairs(raw / name, subset.pairs)
            if subset.types:
                write_lines(raw / f"{name}.type", subset.types)
            if subset.plain:
                write_pairs(raw / f"{name}.plain", subset.plain)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if not raw_only:
            binarize(folder, self.subsets, joined=self.joined, words=self.words)
            if self.labels:
                link_labels(folder, self.subsets)

    def describe(self) -> Json:
        """Sizes, maximum lengths and types of the subsets, and the vocabulary."""
        entries: Json = {
            "subsets": {
                name: {
                    "published_size": subset.published,
                    **self._measured[name],
                    **({"types": dict(sorted(Counter(subset.types).items()))} if subset.types else {}),
                    **self._count_overlap(name),
                }
                for name, subset in self.subsets.items()
            },
            "vocabulary": self.counts._asdict() | ({"joined": True} if self.joined else {}),
        }
        if self.groups:
            entries["groups"] = {name: list(kinds) for name, kinds in self.groups.items()}
        if self.labels:
            entries["labels"] = sorted(vocabulary(p.target for subset in self.subsets.values() for p in subset.pairs))
        if self.no_label is not None:
            entries["no_label"] = self.no_label
        if self.bits is not None:
            entries["bits"] = self.bits
        return entries

    @cached_property
    def _measured(self) -> Mapping[str, Json]:
        return {name: measure(subset.pairs) for name, subset in self.subsets.items()}

    def _count_overlap(self, name: str) -> Json:
        shared = self._overlaps.get(name)
        return {"in_train": sum(pair.source in shared for pair in self.subsets[name].pairs)} if shared else {}

    def summary(self, description: Json) -> list[str]:
        subsets, words = description["subsets"], description["vocabulary"]
        width = max(10, *(len(name) + 2 for name in subsets))
        lines = [
            f"examples: {self.membership}",
            f"{'subset':{width}}{'size':>10}{'published':>12}{'longest source':>17}{'longest target':>17}",
        ]
        for name, entry in subsets.items():
            published = "-" if entry["published_size"] is None else f"{entry['published_size']:,}"
            lengths = f"{entry['longest_source']:>17}{entry['longest_target']:>17}"
            lines.append(f"{name:{width}}{entry['size']:>10,}{published:>12}{lengths}")
        for name, entry in subsets.items():
            if "in_train" in entry:
                lines.append(f"{entry['in_train']:,} examples of {name} are also in train, in the published files")
        together = f", {words['together']} together, in one dictionary" if self.joined else ""
        together += f" of {len(self.words):,}" if self.words else ""
        classes = f"; {len(description['labels'])} classes" if self.labels else ""
        return [*lines, f"vocabulary: {words['source']} source and {words['target']} target words{together}{classes}"]

    def training_commands(self, dataset: Dataset, out: Path) -> list[str]:
        """Commands for an encoder-decoder and, if targets are classes, for a classifier.

        The first validation subset picks the best checkpoint. It is never a test set: without another subset, the
        commands do not validate. Exact match decides; for translations (``plain`` pairs), of which hardly any is exact,
        the loss.
        """
        # A source has a begin and an end symbol, a target an end symbol; sg_tagging has neither.
        symbols = {"source": 2, "target": 1} if self.no_label is None else {"source": 0, "target": 0}
        longest = {
            side: symbols[side] + max(entry[f"longest_{side}"] for entry in self._measured.values())
            for side in Pair._fields
        }
        names = sorted((name for name in self.subsets if name != "train"), key=lambda name: name != "valid")
        validates = bool(names) and names[0] in ("valid", "dev")
        validation = "--disable-validation"
        if validates:
            validation = f"--valid-subset {','.join(names)} --batch-size-valid {batch_that_fits(max(longest.values()))}"
            if not self.subsets["train"].plain:
                validation += " --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric"
        for side, length in longest.items():
            if length > FAIRSEQ_LONGEST:
                validation += f" --max-{side}-positions {length}"
        trained = max(self._measured["train"][f"longest_{side}"] + symbols[side] for side in Pair._fields)
        fits = min(BATCH, batch_that_fits(trained))
        batch = f"--batch-size {fits}" + (f" --update-freq {BATCH // fits}" if fits < BATCH else "")
        forms = {"": f"--task sg_translation --arch {dataset.arch} --criterion cross_entropy_orthogonality"}
        if self.no_label is not None:
            forms = {"": f"--task sg_tagging --arch {dataset.arch} --criterion tagging"}
        if self.labels:
            forms["_classifier"] = f"--task sg_classification --arch {dataset.classifier} --criterion classification"
        return [
            f"fairseq-train {shell_word(out)} --user-dir fairseq_sg {form} {validation} --optimizer torch_adam "
            f"--lr 1e-3 --clip-norm 5 {batch} --required-batch-size-multiple 1 --max-update {UPDATES} "
            f"{saving(out, UPDATES, validates, suffix)}"
            for suffix, form in forms.items()
        ]


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Writes the two sides of pairs, with the names of the languages after that of ``path``."""
    for language, side in zip(LANGUAGES, Pair._fields, strict=True):
        write_lines(path.with_name(f"{path.name}.{language}"), (getattr(pair, side) for pair in pairs))


def vocabulary(lines: Iterable[str]) -> set[str]:
    """The set of words in all lines."""
    words: set[str] = set()
    for line in lines:
        words.update(line.split(" "))
    return words


def measure(pairs: Sequence[Pair]) -> Json:
    """The size of a subset and its maximum lengths in words, without the end symbol."""
    return {
        "size": len(pairs),
        "longest_source": max(pair.source.count(" ") + 1 for pair in pairs),
        "longest_target": max(pair.target.count(" ") + 1 for pair in pairs),
    }


def saving(out: Path, updates: int, validates: bool, suffix: str = "") -> str:
    """Options of a training of ``updates`` on the folder ``out``: save folder, and intervals of saving and validation.

    Both happen after every twentieth of the updates instead of after epochs, which may take only a second. The last
    checkpoint and, with ``validates``, the best one are kept.
    """
    every = updates // EVALUATIONS
    kinds = ("validate", "save") if validates else ("save",)
    intervals = " ".join(f"--{kind}-interval-updates {every} --{kind}-interval {NEVER}" for kind in kinds)
    folder = Path("checkpoints") / (out.resolve().name + suffix)
    return f"{intervals} --keep-interval-updates 1 --no-epoch-checkpoints --save-dir {shlex.quote(str(folder))}"


def batch_that_fits(longest: int) -> int:
    """The number of examples of at most ``longest`` words in a batch: a power of two that fits in memory."""
    most = max(1, min(MOST_EXAMPLES, MOST_WORDS // longest))
    return 1 << (most.bit_length() - 1)

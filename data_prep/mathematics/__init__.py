"""Mathematics dataset: school problems in plain text, one module of 56 at a time (Saxton et al. 2019).

    What is 87 - -64?                         ->  151
    What is the hundreds digit of 2068?       ->  0
    Solve 25 = 156*l - 151*l for l.           ->  5

Every character is a word, and a space is the word ▁ (U+2581), as in SentencePiece:

    W h a t ▁ i s ▁ 8 7 ▁ - ▁ - 6 4 ?         ->  1 5 1

``--post-process sentencepiece`` of fairseq restores the plain text. Sources and targets share one dictionary with the
characters of this module; the 69 of the papers are those of all modules together.

A module has training questions in three difficulties, 666,666 each, and 10,000 to interpolate. 15 modules have
10,000 to extrapolate, with greater numbers, more terms or more samples than in training. As in Csordás et al.
2021, repeated questions are dropped in the order easy, medium, hard, interpolate, extrapolate. Then 10,000 are
drawn from every difficulty:

    train         the rest of easy, medium and hard, in this order
    valid         the drawn questions; raw/valid.type has the difficulty of every line
    interpolate   questions like the harder ones of training
    gen           extrapolate, if the module has it

``--archive FILE`` reads mathematics_dataset-v1.0.tar.gz once, from beginning to end, without writing any of it to disk;
its size and sha256 are those in TensorFlow Datasets. ``--raw-dir FOLDER`` reads the unpacked folder. ``--generate N``
draws N questions per difficulty with the authors' generator (pip install mathematics_dataset); these are not the
official data. The tests read files of the archive's form, never the archive itself.

Source: storage.googleapis.com/mathematics-dataset, Apache 2.0.
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy
from numpy.random import RandomState

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import (
    DataError,
    Dataset,
    Hashing,
    Json,
    Options,
    Pair,
    Sources,
    UsageError,
    check_path,
    check_sizes,
    option,
    seed_number,
    shorten,
    whole_number,
)
from data_prep.draws import PackedPairs, processors
from data_prep.mathematics.generator import REGIMES, chunks
from data_prep.mathematics.sample import describe, generate
from data_prep.sources import OfficialFile, members
from data_prep.subwords import SPACE
from data_prep.text import check_beginning, decode_line

ARCHIVE = OfficialFile(
    "mathematics_dataset-v1.0.tar.gz",
    2_333_082_954,
    "def638343403cb9ed60437d6b684c859dd23b72779f5cc5661b0a31e67c58576",
)
FOLDER = "mathematics_dataset-v1.0"
LARGEST_FILE = 1 << 28  # bytes; 666,666 examples of maximum length have half of it
LONGEST_LINE = 1 << 12  # bytes; questions have at most 160 characters
DIFFICULTIES = ("easy", "medium", "hard")
REFERENCE_SEED, REFERENCE_HOLDOUT = 1234, 10_000  # of the draw from every difficulty, by Csordás et al. 2021
DEFAULT_SEED = 1
MOST = 2_000_000  # questions to generate per difficulty
DEFAULT_WORKERS, MOST_WORKERS = 16, 256
TESTED = 10_000  # maximum generated questions to interpolate, and to extrapolate
PUBLISHED = dict.fromkeys(REGIMES[:3], 666_666) | dict.fromkeys(REGIMES[3:], 10_000)  # questions of a file
# Csordás et al. 2021, table of the datasets, without duplicates and valid.
SIZES = {
    "arithmetic__add_or_sub": {"train": 1_969_029, "interpolate": 10_000, "gen": 10_000},
    "numbers__place_value": {"train": 1_492_268, "interpolate": 9_988, "gen": 10_000},
}
EXTRAPOLATIONS = {
    "algebra__polynomial_roots": "algebra__polynomial_roots_big",
    "arithmetic__add_or_sub": "arithmetic__add_or_sub_big",
    "arithmetic__add_sub_multiple": "arithmetic__add_sub_multiple_longer",
    "arithmetic__div": "arithmetic__div_big",
    "arithmetic__mixed": "arithmetic__mixed_longer",
    "arithmetic__mul": "arithmetic__mul_big",
    "arithmetic__mul_div_multiple": "arithmetic__mul_div_multiple_longer",
    "comparison__closest": "comparison__closest_more",
    "comparison__kth_biggest": "comparison__kth_biggest_more",
    "comparison__sort": "comparison__sort_more",
    "measurement__conversion": "measurement__conversion",
    "numbers__place_value": "numbers__place_value_big",
    "numbers__round_number": "numbers__round_number_big",
    "probability__swr_p_level_set": "probability__swr_p_level_set_more_samples",
    "probability__swr_p_sequence": "probability__swr_p_sequence_more_samples",
}
CATEGORIES = {
    "algebra": (
        *("linear_1d", "linear_1d_composed", "linear_2d", "linear_2d_composed", "polynomial_roots"),
        *("polynomial_roots_composed", "sequence_next_term", "sequence_nth_term"),
    ),
    "arithmetic": (
        *("add_or_sub", "add_or_sub_in_base", "add_sub_multiple", "div", "mixed", "mul", "mul_div_multiple"),
        *("nearest_integer_root", "simplify_surd"),
    ),
    "calculus": ("differentiate", "differentiate_composed"),
    "comparison": (
        *("closest", "closest_composed", "kth_biggest", "kth_biggest_composed", "pair", "pair_composed"),
        *("sort", "sort_composed"),
    ),
    "measurement": ("conversion", "time"),
    "numbers": (
        *("base_conversion", "div_remainder", "div_remainder_composed", "gcd", "gcd_composed", "is_factor"),
        *("is_factor_composed", "is_prime", "is_prime_composed", "lcm", "lcm_composed", "list_prime_factors"),
        *("list_prime_factors_composed", "place_value", "place_value_composed", "round_number"),
        *("round_number_composed",),
    ),
    "polynomials": (
        *("add", "coefficient_named", "collect", "compose", "evaluate", "evaluate_composed", "expand"),
        *("simplify_power",),
    ),
    "probability": ("swr_p_level_set", "swr_p_sequence"),
}
MODULES = tuple(f"{category}__{module}" for category, modules in CATEGORIES.items() for module in modules)
Contents = Mapping[str, PackedPairs]  # regime -> its examples, as plain text


@dataclass(frozen=True)
class MathematicsSources(Sources):
    """The archive, or the folder unpacked from it; ``workers`` draw generated questions."""

    archive: Path | None = option(None, f"the official {ARCHIVE.name}", one_of="source", type=Path, metavar="FILE")
    raw_dir: Path | None = option(
        None, f"the folder {FOLDER} unpacked from it", one_of="source", type=Path, metavar="FOLDER"
    )
    workers: int | None = option(
        None,
        "processes of --generate; the result is the same for any number (default: as many as there are "
        f"processors, at most {DEFAULT_WORKERS})",
        type=whole_number(1, MOST_WORKERS),
    )

    def __post_init__(self) -> None:
        check_path("--archive", self.archive, "file")

    def files(self, module: str) -> dict[str, Path]:
        """The files of a module in the folder, by place. Raises DataError for a missing one."""
        check_path("--raw-dir", self.raw_dir, "folder")
        inside = self.raw_dir / FOLDER
        folder = inside if inside.is_dir() else self.raw_dir
        for place in places(module):
            if not (folder / place).is_file():
                raise DataError(f"has no {place}: name the folder {FOLDER} that was unpacked from the archive", folder)
        return {place: folder / place for place in places(module)}

    def streams(self, module: str) -> Iterator[tuple[str, BinaryIO, Path]]:
        """Yields place, content and path of every file of a module, in any order. Raises DataError."""
        if self.archive is None:
            for place, path in self.files(module).items():
                with self.open(path) as stream:
                    yield place, stream, path
            return
        wanted = dict.fromkeys((f"{FOLDER}/{place}" for place in places(module)), LARGEST_FILE)
        with self.open(self.archive) as packed:
            for name, stream in members(self.archive, packed, wanted):
                yield name.removeprefix(f"{FOLDER}/"), stream, self.archive / name

    def read(self, module: str) -> tuple[Contents, list[Json]]:
        """Reads a module's examples; also returns descriptions of the files. Raises DataError."""
        contents, files = {}, {}
        for place, stream, path in self.streams(module):
            hashing = Hashing(stream)
            contents[places(module)[place]] = PackedPairs(parse(io.BufferedReader(hashing), path))
            files[place] = hashing.describe(place)
        return contents, [files[place] for place in places(module)]


@dataclass(frozen=True)
class MathematicsOptions(Options):
    """The options of the Mathematics dataset.

    Attributes:
        source: generated, archive or folder.
        source_bytes: the size of the archive, whose content is checked.
        source_sha256: the hashes of the module's files in the folder.
    """

    module: str = option(choices=MODULES)
    source: str = ""
    source_bytes: int | None = field(default=None, metadata={"when_given": True})
    source_sha256: tuple[str, ...] | None = field(default=None, metadata={"when_given": True})
    generate: int | None = option(
        None,
        "draw N questions for each of the three difficulties (published: 666666), and at most "
        f"{TESTED:,} each to interpolate and extrapolate: not the official data",
        one_of="source",
        type=whole_number(100, MOST),
    )
    seed: int | None = option(None, f"seed of --generate (default: {DEFAULT_SEED})", type=seed_number)
    holdout: int | None = option(
        None,
        f"questions per difficulty that become valid (default: {REFERENCE_HOLDOUT}, but at "
        "most a tenth of generated ones)",
        type=whole_number(1, MOST),
    )

    def complete(self, sources: MathematicsSources) -> MathematicsOptions:
        holdout = REFERENCE_HOLDOUT if self.holdout is None else self.holdout
        if self.generate is None:
            for name, value in (("seed", self.seed), ("workers", sources.workers)):
                if value is not None:
                    raise UsageError(f"--{name} belongs to --generate; the official files are as they are")
            return replace(self, source="archive" if sources.archive else "folder", holdout=holdout)
        if self.holdout is None:
            holdout = min(holdout, self.generate // 10)
        if holdout >= self.generate:
            raise UsageError(f"--holdout {holdout} leaves nothing of the {self.generate} questions to train on")
        seed = DEFAULT_SEED if self.seed is None else self.seed
        return replace(self, source="generated", seed=seed, holdout=holdout)

    def identify(self, sources: MathematicsSources) -> MathematicsOptions:
        if self.source == "archive":
            return replace(self, source_bytes=sources.archive.stat().st_size)
        if self.source == "folder":
            return replace(self, source_sha256=tuple(map(sources.sha256, sources.files(self.module).values())))
        return self


class Mathematics(Dataset):
    """``python -m data_prep mathematics``."""

    name = "mathematics"
    title = "Mathematics dataset"
    source = "mathematics_dataset-v1.0.tar.gz, or its generator"
    licence = "Apache 2.0"
    size = "2.3 GB, or generated"
    arch = "sg_transformer_math"
    splits = ("56 modules",)
    options = MathematicsOptions
    sources = MathematicsSources

    def build(self, options: MathematicsOptions, sources: MathematicsSources) -> Corpus:
        module = options.module
        if options.generate is not None:
            tested = min(TESTED, options.generate)
            sizes = [options.generate] * 3 + [tested] * len(regimes(module)[3:])
            workers = sources.workers or min(processors(), DEFAULT_WORKERS, number_of_chunks(sizes))
            contents: Contents = generate(module, EXTRAPOLATIONS.get(module), sizes, options.seed, workers)
            origin = describe()
            return make_corpus(module, contents, options.holdout, origin, origin["generated"], {})
        if options.source == "archive":
            contents, files = read_archive(sources, module)
            membership = "the published ones"
        else:
            contents, files = sources.read(module)
            membership = "those of your files, whose hashes are in dataset.json" + missing(contents)
        # The published sizes are those of the reference's hold-out.
        published = SIZES.get(module, {}) if options.holdout == REFERENCE_HOLDOUT else {}
        return make_corpus(module, contents, options.holdout, {"files": files}, membership, published)


def missing(contents: Contents) -> str:
    """Which files of a folder are not complete, as the end of a sentence; '' if all are."""
    wrong = {regime: pairs for regime, pairs in contents.items() if len(pairs) != PUBLISHED[regime]}
    return "".join(
        f"; {regime} has {len(pairs):,} questions instead of the published {PUBLISHED[regime]:,}: is the file complete?"
        for regime, pairs in wrong.items()
    )


def number_of_chunks(sizes: list[int]) -> int:
    """The number of processes that could be busy."""
    return sum(1 for _ in chunks(sizes))


def regimes(module: str) -> tuple[str, ...]:
    """The regimes of a module."""
    return REGIMES if module in EXTRAPOLATIONS else REGIMES[:-1]


def places(module: str) -> dict[str, str]:
    """Path of a file in the archive's folder -> its regime, for all files of a module."""
    names = dict.fromkeys(regimes(module), module) | {"extrapolate": EXTRAPOLATIONS.get(module)}
    return {f"{regime}/{names[regime]}.txt": regime for regime in regimes(module)}


def read_archive(sources: MathematicsSources, module: str) -> tuple[Contents, list[Json]]:
    """Reads a module's examples as ``read`` does. Raises DataError if the archive is not the official one."""
    path = sources.archive
    size = path.stat().st_size
    if size != ARCHIVE.size:
        raise DataError(f"not the official {ARCHIVE.name}: {size:,} bytes, expected {ARCHIVE.size:,}", path)
    try:
        found, failure = sources.read(module), None
    except DataError as error:
        found, failure = None, error
    # Known without a second pass, unless reading has failed: then another archive is the better reason.
    digest = sources.sha256(path)
    if digest != ARCHIVE.sha256:
        raise DataError(f"not the official {ARCHIVE.name}: sha256 {digest}, expected {ARCHIVE.sha256}", path)
    if failure is not None:
        raise failure
    return found


def parse(stream: BinaryIO, path: Path) -> Iterator[Pair]:
    """Reads the examples of a file with a question and its answer on two lines, without spaces at their ends.

    Raises:
        DataError: with the line, if one is empty, too long, not UTF-8, has an unprintable character or the sign for a
            space, or if a question has no answer; see also ``text.decode_line``.
    """
    question, number = None, 0
    for number, raw in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), start=1):
        if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
            raise DataError(
                f"a line has {LONGEST_LINE:,} bytes or more, too long for a question or an answer", path, number
            )
        if number == 1:
            check_beginning(path, raw)
        line = decode_line(path, number, raw.removesuffix(b"\n")).strip(" ")
        if not line.isprintable() or SPACE in line:
            raise DataError(f"a character that cannot occur in a question or an answer: {shorten(line)}", path, number)
        if question is None:
            question = line
        else:
            yield Pair(question, line)
            question = None
    if question is not None:
        raise DataError(f"the question {shorten(question)} has no answer: the number of lines is odd", path, number)


def tokenize(text: str) -> str:
    """Splits plain text into its characters, separated by spaces."""
    return " ".join(text.replace(" ", SPACE))


def different(contents: Contents) -> dict[str, numpy.ndarray]:
    """Regime -> indices of examples whose question does not occur earlier, in this regime or one before it.

    Questions are compared by an 8-byte hash: two of two million collide with a probability of 1e-7.
    """
    digests = array("Q")
    for pairs in contents.values():
        for pair in pairs:
            digest = hashlib.blake2b(pair.source.encode("utf-8"), digest_size=8).digest()
            digests.append(int.from_bytes(digest, "little"))
    is_first = numpy.zeros(len(digests), dtype=bool)
    is_first[numpy.unique(numpy.frombuffer(digests, dtype=numpy.uint64), return_index=True)[1]] = True
    kept, start = {}, 0
    for regime, pairs in contents.items():
        kept[regime] = numpy.flatnonzero(is_first[start : start + len(pairs)])
        start += len(pairs)
    return kept


def make_corpus(
    module: str, contents: Contents, holdout: int, origin: Json, membership: str, published: Mapping[str, int]
) -> Corpus:
    """Makes the subsets from the files or from generated questions; ``holdout`` of every difficulty become valid.

    Raises DataError if a difficulty has no more questions than that, if all questions of a file occur before it, or if
    a subset has not its published size.
    """
    contents = {regime: contents[regime] for regime in regimes(module)}
    kept = different(contents)
    for regime, place in zip(contents, places(module)):
        if len(contents[regime]) and not len(kept[regime]):
            fix = "is it the right file?" if "files" in origin else "choose another --generate"
            raise DataError(f"all {len(contents[regime]):,} questions of {place} are in the files before it: {fix}")
    training, drawn = {}, {}
    for regime in REGIMES[:3]:
        indices = kept[regime]
        if len(indices) <= holdout:
            incomplete = origin.get("files") and len(contents[regime]) < PUBLISHED[regime]
            fix = f"the file has {len(contents[regime]):,} of {PUBLISHED[regime]:,}: get it again" if incomplete else ""
            raise DataError(
                f"{regime} has {len(indices):,} different questions, too few for a valid set "
                f"of {holdout:,}: {fix or 'lower --holdout'}"
            )
        chosen = numpy.zeros(len(indices), dtype=bool)
        chosen[RandomState(REFERENCE_SEED).choice(len(indices), holdout, replace=False)] = True
        training[regime], drawn[regime] = indices[~chosen], indices[chosen]
    subsets = {"train": select(contents, training), "valid": select(contents, drawn)}
    subsets["interpolate"] = select(contents, {"interpolate": kept["interpolate"]})
    if "extrapolate" in contents:
        subsets["gen"] = select(contents, {"extrapolate": kept["extrapolate"]})
    check_sizes(subsets, published)
    dropped = sum(len(contents[regime]) - len(kept[regime]) for regime in contents)
    rule = f"{module}; repeated questions dropped ({dropped:,}), then {holdout:,} of every difficulty drawn as valid"
    if "gen" not in subsets:
        rule += "; there is no gen, since this module has no extrapolation test"
    made = {name: Subset(pairs, published=published.get(name)) for name, pairs in subsets.items()}
    types = [difficulty for difficulty in DIFFICULTIES for _ in range(holdout)]
    return Corpus(made | {"valid": made["valid"]._replace(types=types)}, rule, membership, origin, joined=True)


def select(contents: Contents, indices: Mapping[str, numpy.ndarray]) -> PackedPairs:
    """The chosen examples in their order, tokenized."""
    return PackedPairs(
        Pair(*map(tokenize, contents[regime][index])) for regime in indices for index in indices[regime].tolist()
    )

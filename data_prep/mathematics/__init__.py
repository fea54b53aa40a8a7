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

import argparse
import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy
from numpy.random import RandomState

from data_prep.archive import members
from data_prep.corpus import Corpus
from data_prep.dataset import DataError, Dataset, Json, Pair, UsageError, check_sizes, seed_number
from data_prep.draws import PackedPairs, processors
from data_prep.mathematics.generator import REGIMES, chunks
from data_prep.mathematics.sample import describe, sample
from data_prep.sources import OfficialFile
from data_prep.text import decode_line, sha256, shorten

SPACE = "\u2581"
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
LEAST, MOST = 100, 2_000_000  # questions to generate per difficulty
DEFAULT_WORKERS, MOST_WORKERS = 16, 256
TESTED = 10_000  # maximum generated questions to interpolate, and to extrapolate
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


class Mathematics(Dataset):
    """``python -m data_prep mathematics``."""

    name = "mathematics"
    title = "Mathematics dataset"
    source = "mathematics_dataset-v1.0.tar.gz, or its generator"
    licence = "Apache 2.0"
    size = "2.3 GB, or generated"
    arch = "sg_transformer_math"
    splits = ("56 modules",)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--module", required=True, choices=MODULES, metavar="MODULE", help=f"one of {', '.join(MODULES)}"
        )
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--archive", type=Path, metavar="FILE", help=f"the official {ARCHIVE.name}")
        source.add_argument("--raw-dir", type=Path, metavar="FOLDER", help=f"the folder {FOLDER} unpacked from it")
        source.add_argument(
            "--generate",
            type=number_to_generate,
            metavar="N",
            help="draw N questions for each of the three difficulties (published: 666666), and at most "
            f"{TESTED:,} each to interpolate and extrapolate: not the official data",
        )
        parser.add_argument(
            "--holdout",
            type=number_to_hold_out,
            metavar="N",
            help=f"questions per difficulty that become valid (default: {REFERENCE_HOLDOUT}, but at "
            "most a tenth of generated ones)",
        )
        parser.add_argument(
            "--seed", type=seed_number, metavar="N", help=f"seed of --generate (default: {DEFAULT_SEED})"
        )
        parser.add_argument(
            "--workers",
            type=number_of_workers,
            metavar="N",
            help="processes of --generate; the result is the same for any number (default: as many as there are "
            f"processors, at most {DEFAULT_WORKERS})",
        )

    def request(self, args: argparse.Namespace) -> Json:
        for option in ("seed", "workers"):
            if args.generate is None and getattr(args, option) is not None:
                raise UsageError(f"--{option} belongs to --generate; the official files are as they are")
        holdout = REFERENCE_HOLDOUT
        if args.generate is not None:
            holdout = min(holdout, args.generate // 10)
        if args.generate is not None and args.holdout is not None and args.holdout >= args.generate:
            raise UsageError(f"--holdout {args.holdout} leaves nothing of the {args.generate} questions to train on")
        seed = DEFAULT_SEED if args.seed is None else args.seed
        return {
            "module": args.module,
            "source": "generated" if args.generate is not None else "archive" if args.archive else "folder",
            **({} if args.generate is not None else identity(args)),
            "generate": args.generate,
            "seed": None if args.generate is None else seed,
            "holdout": holdout if args.holdout is None else args.holdout,
        }

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        extrapolation = EXTRAPOLATIONS.get(args.module)
        if args.generate is not None:
            tested = min(TESTED, args.generate)
            sizes = [args.generate] * 3 + [tested] * len(regimes(args.module)[3:])
            workers = args.workers or min(processors(), DEFAULT_WORKERS, number_of_chunks(sizes))
            contents: Contents = sample(args.module, extrapolation, sizes, request["seed"], workers)
            origin = describe()
            return make_corpus(args.module, contents, request["holdout"], origin, origin["generated"], {})
        if args.archive is not None:
            contents, files = read_archive(args.archive, args.module)
            membership = "the published ones"
        else:
            contents, files = read_folder(args)
            membership = "those of your files, whose hashes are in dataset.json"
        # The published sizes are those of the reference's hold-out.
        published = SIZES.get(args.module, {}) if request["holdout"] == REFERENCE_HOLDOUT else {}
        return make_corpus(args.module, contents, request["holdout"], {"files": files}, membership, published)


def number_of_chunks(sizes: list[int]) -> int:
    """The number of processes that could be busy."""
    return sum(1 for _ in chunks(sizes))


def whole_number(text: str, least: int, most: int) -> int:
    """Parses a whole number in a range. Raises ArgumentTypeError."""
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {shorten(text)}")
    return int(text)


def number_to_generate(text: str) -> int:
    """The argument type of ``--generate``."""
    return whole_number(text, LEAST, MOST)


def number_to_hold_out(text: str) -> int:
    """The argument type of ``--holdout``."""
    return whole_number(text, 1, MOST)


def number_of_workers(text: str) -> int:
    """The argument type of ``--workers``."""
    return whole_number(text, 1, MOST_WORKERS)


def regimes(module: str) -> tuple[str, ...]:
    """The regimes of a module."""
    return REGIMES if module in EXTRAPOLATIONS else REGIMES[:-1]


def places(module: str) -> dict[str, str]:
    """Path of a file in the archive's folder -> its regime, for all files of a module."""
    names = dict.fromkeys(regimes(module), module) | {"extrapolate": EXTRAPOLATIONS.get(module)}
    return {f"{regime}/{names[regime]}.txt": regime for regime in regimes(module)}


def identity(args: argparse.Namespace) -> Json:
    """Identifies the input: the size of the archive, whose contents are checked on reading, or the
    sha256 of the module's files.

    Raises DataError for a missing file.
    """
    if args.archive is not None:
        if not args.archive.is_file():
            raise DataError("--archive is not a file", args.archive)
        return {"source_bytes": args.archive.stat().st_size}
    return {"source_sha256": [sha256(find_folder(args) / place) for place in places(args.module)]}


def find_folder(args: argparse.Namespace) -> Path:
    """The folder with all files of the module: ``--raw-dir``, or the unpacked one in it. Raises DataError."""
    inside = args.raw_dir / FOLDER
    folder = inside if inside.is_dir() else args.raw_dir
    for place in places(args.module):
        if not (folder / place).is_file():
            raise DataError(f"has no {place}: name the folder {FOLDER} that was unpacked from the archive", folder)
    return folder


def read_folder(args: argparse.Namespace) -> tuple[Contents, list[Json]]:
    """Reads a module's examples from an unpacked folder; also returns descriptions of the files. Raises DataError."""
    folder = find_folder(args)
    contents, files = {}, []
    for place, regime in places(args.module).items():
        with (folder / place).open("rb") as stream:
            contents[regime], file = read_examples(stream, folder / place)
        files.append({"name": place, **file})
    return contents, files


def read_archive(path: Path, module: str) -> tuple[Contents, list[Json]]:
    """Reads a module's examples from the official archive; also returns descriptions of the files. Raises DataError."""
    check_archive(path)
    wanted = {f"{FOLDER}/{place}": regime for place, regime in places(module).items()}
    contents, files = {}, {}
    for name, stream in members(path, lambda name: LARGEST_FILE if name in wanted else None):
        contents[wanted[name]], file = read_examples(stream, path / name)
        files[name] = {"name": name.removeprefix(f"{FOLDER}/"), **file}
    missing = next((name for name in wanted if name not in files), None)
    if missing is not None:
        raise DataError(f"has no {missing}", path)
    return contents, [files[name] for name in wanted]


def check_archive(path: Path) -> None:
    """Raises DataError if ``path`` is not the official archive."""
    size = path.stat().st_size
    if size != ARCHIVE.size:
        raise DataError(f"not the official {ARCHIVE.name}: {size:,} bytes, expected {ARCHIVE.size:,}", path)
    found = sha256(path)
    if found != ARCHIVE.sha256:
        raise DataError(f"not the official {ARCHIVE.name}: sha256 {found}, expected {ARCHIVE.sha256}", path)


def read_examples(stream: BinaryIO, path: Path) -> tuple[PackedPairs, Json]:
    """Reads the examples of one file, with its size and hash; ``path`` is for messages. Raises DataError."""
    hashed = hashlib.sha256()
    size = 0

    def lines() -> Iterator[bytes]:
        nonlocal size
        while line := stream.readline(LONGEST_LINE):
            hashed.update(line)
            size += len(line)
            yield line

    pairs = PackedPairs(parse(lines(), path))
    return pairs, {"bytes": size, "sha256": hashed.hexdigest()}


def parse(lines: Iterable[bytes], path: Path) -> Iterator[Pair]:
    """Reads the examples of a file with a question and its answer on two lines, without spaces at their ends.

    Raises:
        DataError: with the line, if one is empty, too long, not UTF-8, has an unprintable character or the sign for a
            space, or if a question has no answer; see also ``text.decode_line``.
    """
    question, number = None, 0
    for number, raw in enumerate(lines, start=1):
        if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
            raise DataError(
                f"a line has {LONGEST_LINE:,} bytes or more, too long for a question or an answer", path, number
            )
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


def detokenize(tokens: str) -> str:
    """The inverse of ``tokenize``."""
    return tokens.replace(" ", "").replace(SPACE, " ")


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

    Raises DataError if a difficulty has no more questions than that, or if a subset has not its published size.
    """
    contents = {regime: contents[regime] for regime in regimes(module)}
    kept = different(contents)
    training, drawn = {}, {}
    for regime in REGIMES[:3]:
        indices = kept[regime]
        if len(indices) <= holdout:
            raise DataError(
                f"{regime} has {len(indices):,} different questions, too few for a valid set "
                f"of {holdout:,}: lower --holdout"
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
    types = {"valid": [difficulty for difficulty in DIFFICULTIES for _ in range(holdout)]}
    return Corpus(subsets, published, rule, membership, origin, None, joined=True, types=types)


def select(contents: Contents, indices: Mapping[str, numpy.ndarray]) -> PackedPairs:
    """The chosen examples in their order, tokenized."""
    return PackedPairs(
        Pair(*map(tokenize, contents[regime][index])) for regime in indices for index in indices[regime].tolist()
    )

"""PCFG SET: string edits such as `append reverse A1 B2 , C3` and the strings they make (Hupkes et al. 2020).

    swap_first_last shift reverse copy M2 H16 K3 Z20               ->  Z20 H16 M2 K3
    repeat append I19 V5 , S11 B10                                 ->  I19 V5 S11 B10 I19 V5 S11 B10
    remove_second K3 F20 M4 , reverse echo E19 Y4                  ->  K3 F20 M4

Ten functions of strings of 520 letters, in prefix notation, a comma between two arguments; `pcfg_functions` has them
with their meaning, and every target is checked against it. Sources and targets share one dictionary, 531 words (535 in
papers that count the four synonyms of the substitutivity test, which is not made here).

`--condition` says what is tested. 97,203 examples were drawn; 4,860 of them are `dev`.

    iid             82,622 to train; `test` has 9,721 others of the same kind
    systematicity   `gen` has the 10,175 expressions in which one of four functions stands directly before one of its
                    partners: swap_first_last repeat | append remove_second | repeat remove_second | append
                    swap_first_last. `train` has the 82,168 without such a pair.
    productivity    `gen` has the 11,333 expressions with 9 to 35 functions, `train` the 81,010 with at most 8

`valid` is the part of the official dev set that is like `train`: all 4,860, or the 4,339 without such a pair, or the
4,249 with at most 8 functions. (Csordás et al. 2021 validate systematicity and productivity on `gen` itself.)

`--generate N` draws N expressions by a sampler of our own (`pcfg_sample`) and splits them by the same rules: generated,
not the official data, so the results are not those of the papers.

Source: github.com/i-machine-think/am-i-compositional, data/pcfgset, MIT licence. Its substitutivity, localism and
overgeneralisation tests are not made here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from data_prep.common import Corpus, DataError, Dataset, Json, Pair, UsageError, check_sizes, seed_number
from data_prep.official import OfficialFile, OfficialFiles, add_source_arguments
from data_prep.pcfg_functions import count_functions, interpret
from data_prep.pcfg_sample import sample
from data_prep.text import shorten, split_lines

BASE_URL = (
    "https://raw.githubusercontent.com/i-machine-think/am-i-compositional/"
    "4f75bdd78889150dd78e90bbb7ddec840204c159/data/pcfgset"
)
OFFICIAL = (
    OfficialFile("pcfgset/train.src", None, None, git_blob="2d5deb5423bbc442dec018b8149f906d7b4d8023"),
    OfficialFile(
        "pcfgset/train.tgt", 2_742_789, "3fa13c7ca2f3fb8dce126612d77f6666fb49f541c0936aa55c88cd033693475a"
    ),
    OfficialFile("pcfgset/dev.src", 438_284, "67bd466f77b7acb9863ddbbbacb4784848bdfb9094c40e2f94955aff7cb75d0a"),
    OfficialFile("pcfgset/dev.tgt", 164_248, "95648e697cb86a8724d71d6e841f37eea27d15951091b134538906bfbf0d14d1"),
    OfficialFile("pcfgset/test.src", 863_344, "65af9357dc169a22629456be7cf43e97e275e076db10d72202d5389be7d8c0b2"),
    OfficialFile("pcfgset/test.tgt", 321_669, "7d23524995eb28a4726b3f1ffc11daec8f13692f7f804f4be20ca1a25c941517"),
    OfficialFile("systematicity/train.src", None, None, git_blob="77f60c1bb8b583cfef6144f1de04d3d62b6b57f4"),
    OfficialFile(
        "systematicity/train.tgt", 2_589_979, "5b8911aac24433e1a32e769e4ae237ace7e599352f8c4783334f9cae4de53b98"
    ),
    OfficialFile(
        "systematicity/test.src", 1_235_202, "9c47ccf869899e65c2c2cf530403c8fefdcb5de57787c9ff029dc7d9b8018941"
    ),
    OfficialFile(
        "systematicity/test.tgt", 474_479, "2896474cdeb151929bd85ed10aeeca37866e11dafa00f62e1660804f0dfc5a8a"
    ),
    OfficialFile("productivity/train.src", None, None, git_blob="299b8b8b6cbaf9381ee5a8b5bb58ade3dfbaa5d1"),
    OfficialFile(
        "productivity/train.tgt", 2_444_044, "604b73127083b9dc6f6331be6722423d2344eac36278e48d658618f0e78a8da9"
    ),
    OfficialFile(
        "productivity/test.src", 1_930_144, "ba03bc5c468e955d537c06ca02c900c431a16f37b8b3f02e5eaa8a93434a3f73"
    ),
    OfficialFile(
        "productivity/test.tgt", 620_414, "55704b1e887ffeffb104fc1ba4bc44dd6b0e95e34a355bd07d86881fd226a254"
    ),
)
FILES = {file.path: file for file in OFFICIAL}
FOLDERS = {"iid": "pcfgset", "systematicity": "systematicity", "productivity": "productivity"}
# Published sizes of the training and the test set, and the size of the part of the dev set that is like training.
SIZES = {"iid": (82_622, 9_721), "systematicity": (82_168, 10_175), "productivity": (81_010, 11_333)}
VALID_SIZES = {"iid": 4_860, "systematicity": 4_339, "productivity": 4_249}
VOCABULARY, TOGETHER = (531, 520), 531

HELD_OUT_PAIRS = (
    *("swap_first_last repeat", "append remove_second"),
    *("repeat remove_second", "append swap_first_last"),
)
MOST_FUNCTIONS = 8
# Condition -> whether an expression belongs to its test; iid has no such rule.
TESTED: dict[str, Callable[[str], bool]] = {
    "systematicity": lambda source: any(f" {pair} " in f" {source} " for pair in HELD_OUT_PAIRS),
    "productivity": lambda source: count_functions(source) > MOST_FUNCTIONS,
}
RULES = {
    "iid": "train, valid and test are drawn alike",
    "systematicity": f"gen has the expressions with {' | '.join(HELD_OUT_PAIRS)}, train and valid have others",
    "productivity": f"gen has the expressions with more than {MOST_FUNCTIONS} functions, train and valid have others",
}
ENDS = ("src", "tgt")
LEAST, MOST = 1_000, 1_000_000  # expressions to generate
DEFAULT_SEED = 1
Subsets = dict[str, list[Pair]]


class Pcfg(Dataset):
    """`python -m data_prep pcfg`."""

    name = "pcfg"
    title = "PCFG SET"
    source = "github.com/i-machine-think/am-i-compositional"
    licence = "MIT"
    arch = "sg_transformer_pcfg"
    splits = tuple(FOLDERS)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--condition", required=True, choices=self.splits, metavar="CONDITION", help=", ".join(self.splits)
        )
        parser.add_argument(
            "--generate",
            type=number_to_generate,
            metavar="N",
            help="instead of the official files, draw N expressions of our own: not the official data",
        )
        parser.add_argument(
            "--seed", type=seed_number, metavar="N", help=f"of --generate (default: {DEFAULT_SEED})"
        )
        add_source_arguments(parser, BASE_URL)

    def request(self, args: argparse.Namespace) -> Json:
        files = OfficialFiles(args, self.name, BASE_URL)
        if args.generate is None and args.seed is not None:
            raise UsageError("--seed belongs to --generate; the official files are as they are")
        if args.generate is not None and files.asked_for:
            raise UsageError("--generate needs no official files: leave --raw-dir and --download out")
        seed = DEFAULT_SEED if args.seed is None else args.seed
        return {
            "condition": args.condition,
            "generate": args.generate,
            "seed": None if args.generate is None else seed,
        }

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        if request["generate"] is not None:
            return generated_corpus(args.condition, args.generate, request["seed"])
        return official_corpus(args.condition, OfficialFiles(args, self.name, BASE_URL))


def number_to_generate(text: str) -> int:
    """The argument type of `--generate`."""
    if not re.fullmatch("[0-9]{1,9}", text) or not LEAST <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be a whole number from {LEAST} to {MOST}, not {shorten(text)}")
    return int(text)


def tested_subset(condition: str) -> str:
    """The subset with the examples that are tested: `test` if they are from the training distribution."""
    return "gen" if condition in TESTED else "test"


def like_training(condition: str, pairs: list[Pair]) -> list[Pair]:
    """The pairs that could be in the training set of a condition."""
    return [pair for pair in pairs if condition not in TESTED or not TESTED[condition](pair.source)]


def official_corpus(condition: str, source: OfficialFiles) -> Corpus:
    """The official training and test set of a condition, and of the dev set what is like training. Raises DataError."""
    names = {"train": f"{FOLDERS[condition]}/train", "valid": "pcfgset/dev"}
    names[tested_subset(condition)] = f"{FOLDERS[condition]}/test"
    subsets = {subset: load(name, source) for subset, name in names.items()}
    subsets["valid"] = like_training(condition, subsets["valid"])
    check_rule(condition, subsets)
    published = dict(zip(("train", tested_subset(condition)), SIZES[condition], strict=True))
    check_sizes(subsets, published | {"valid": VALID_SIZES[condition]})
    if condition == "iid":
        published["valid"] = VALID_SIZES["iid"]
    paths = [f"{name}.{end}" for name in names.values() for end in ENDS]
    origin = {"files": [{**FILES[path].describe(), "name": path} for path in paths]}
    membership = "the published ones"
    if condition in TESTED:
        membership += "; valid has those of the official dev set that are like train"
    return Corpus(subsets, published, RULES[condition], membership, origin, VOCABULARY, True, TOGETHER)


def generated_corpus(condition: str, number: int, seed: int) -> Corpus:
    """Expressions of our own: the official shares, 5 % dev and 10 % test, and the official rules."""
    pairs = sample(number, seed)
    dev, rest = pairs[: number // 20], pairs[number // 20 :]
    if condition in TESTED:
        tested = [pair for pair in rest if TESTED[condition](pair.source)]
        train = like_training(condition, rest)
    else:
        tested, train = rest[: number // 10], rest[number // 10 :]
    subsets = {"train": train, "valid": like_training(condition, dev), tested_subset(condition): tested}
    origin = {"generator": "data_prep.pcfg_sample", "generated": "generated, not the official data"}
    membership = "generated, not the official data"
    return Corpus(subsets, {}, RULES[condition], membership, origin, None, joined=True)


def load(name: str, source: OfficialFiles) -> list[Pair]:
    """The pairs of two official files, NAME.src and NAME.tgt. Raises DataError."""
    files = [FILES[f"{name}.{end}"] for end in ENDS]
    contents = [source.read(file) for file in files]
    pairs = parse(*(part for content in contents for part in content))
    for file, (path, data) in zip(files, contents, strict=True):
        file.check(path, data)
    return pairs


def parse(source_path: Path, source_data: bytes, target_path: Path, target_data: bytes) -> list[Pair]:
    """The pairs of two files with one expression, or what it means, on a line.

    Raises DataError with file and line for a line that is not an expression, for a target that is not what the
    expression on the same line of the other file means (see `pcfg_functions`), and if the files have not equally many
    lines; see also `text.split_lines`.
    """
    sources, targets = split_lines(source_path, source_data), split_lines(target_path, target_data)
    pairs = []
    for number, pair in enumerate(map(Pair, sources, targets), start=1):
        try:
            meant = interpret(pair.source)
        except ValueError as error:
            raise DataError(str(error), source_path, number) from None
        if meant != pair.target:
            raise DataError(difference(pair.target, meant), target_path, number)
        pairs.append(pair)
    if len(sources) != len(targets):
        raise DataError(f"{len(targets):,} lines, and {source_path.name} has {len(sources):,}", target_path)
    return pairs


def difference(target: str, meant: str) -> str:
    """Where a target departs from what its expression means."""
    found, expected = ([*text.split(" "), "the end"] for text in (target, meant))
    position = next(i for i, (one, other) in enumerate(zip(found, expected)) if one != other)
    word = shorten(found[position])
    return f"wrong target: word {position + 1} is {word}, and the expression means {expected[position]}"


def check_rule(condition: str, subsets: Subsets) -> None:
    """Raises DataError for an example that the rule of the condition has in another subset."""
    if condition not in TESTED:
        return
    for subset, pairs in subsets.items():
        for pair in pairs:
            if TESTED[condition](pair.source) != (subset == tested_subset(condition)):
                raise DataError(f"{subset} may not have {shorten(pair.source)}: {RULES[condition]}")


DATASET = Pcfg()

"""COGS: English sentences and their logical forms (Kim & Linzen 2020).

    A rose was helped by a dog .  ->  rose ( x _ 1 ) AND help . theme ( x _ 3 , x _ 1 )
                                      AND help . agent ( x _ 3 , x _ 6 ) AND dog ( x _ 6 )
    The captain ate .             ->  * captain ( x _ 1 ) ; eat . agent ( x _ 2 , x _ 1 )
    shark                         ->  LAMBDA a . shark ( a )

The four subsets are four official files with three columns, sentence, logical form and type, all split into words:

    train   24,155: 24,000 sentences, 143 single words (primitives) and 12 sentences that show one word in one role each
    valid   3,000 sentences like those of training (dev.tsv)
    test    3,000 more of them (test.tsv)
    gen     21,000 in 21 types of generalization, 1,000 each: 18 lexical (known words in new roles), 3 structural
            (deeper recursion of clauses, or of prepositional phrases, and such phrases at the subject)

Subsets have no sentence in common. Sources and targets share one dictionary of 871 words. Line N of raw/SUBSET.type is
the type of line N of raw/SUBSET.src. Evaluation logs the accuracy of the lexical and of the structural types, and of
each type with ``--accuracy-by types``.

On 2022-09-13 the authors corrected 51 logical forms of gen.tsv, all of type obj_pp_to_subj_pp (theme instead of agent
for subjects of unaccusative verbs). Papers of 2021 and before used the old file, which ``--gen-2021`` takes.

Source: github.com/najoungkim/COGS, MIT licence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import DataError, Dataset, Options, Pair, check_sizes, option, shorten
from data_prep.sources import OfficialFile, OfficialFiles, official_files
from data_prep.text import split_lines

FILES = dict(zip(("train", "valid", "test", "gen"), official_files("cogs").values(), strict=True))
GEN_2021 = official_files("cogs_2021")["gen.tsv"]
SIZES = {"train": 24_155, "valid": 3_000, "test": 3_000, "gen": 21_000}
VOCABULARY, TOGETHER = (745, 723), 871

LEXICAL = (
    "active_to_passive",
    "do_dative_to_pp_dative",
    "obj_omitted_transitive_to_transitive",
    "obj_to_subj_common",
    "obj_to_subj_proper",
    "only_seen_as_transitive_subj_as_unacc_subj",
    "only_seen_as_unacc_subj_as_obj_omitted_transitive_subj",
    "only_seen_as_unacc_subj_as_unerg_subj",
    "passive_to_active",
    "pp_dative_to_do_dative",
    "prim_to_inf_arg",
    "prim_to_obj_common",
    "prim_to_obj_proper",
    "prim_to_subj_common",
    "prim_to_subj_proper",
    "subj_to_obj_common",
    "subj_to_obj_proper",
    "unacc_to_transitive",
)
STRUCTURAL = ("cp_recursion", "obj_pp_to_subj_pp", "pp_recursion")
GROUPS = {"lexical": LEXICAL, "structural": STRUCTURAL}
EXPOSURES = (
    *("active", "do_dative", "obj_common", "obj_omitted_transitive", "obj_proper", "passive", "pp_dative"),
    *("subj_common", "subj_proper", "transitive_subj", "unacc", "unacc_subj"),
)
IN_DISTRIBUTION = {"in_distribution": 3_000}
# Subset -> type -> number of examples.
TYPES = {
    "train": {"in_distribution": 24_000, "primitive": 143} | {f"exposure_example_{name}": 1 for name in EXPOSURES},
    "valid": IN_DISTRIBUTION,
    "test": IN_DISTRIBUTION,
    "gen": dict.fromkeys((*LEXICAL, *STRUCTURAL), 1_000),
}


class CogsFiles(OfficialFiles):
    """The sources of COGS."""

    urls = {
        "cogs": "https://raw.githubusercontent.com/najoungkim/COGS/165a7b669eade971fa47bf568a2e51925360fed8/data",
        "cogs_2021": "https://raw.githubusercontent.com/najoungkim/COGS/86c9be5929c3b86b510afdfe56a4df9d5d341ab9/data",
    }


@dataclass(frozen=True)
class CogsOptions(Options):
    """The options of COGS."""

    gen: str = option(
        "2022",
        "use gen.tsv from before the correction of 51 logical forms in September 2022",
        given={"--gen-2021": "2021"},
    )


class Cogs(Dataset):
    """``python -m data_prep cogs``."""

    name = "cogs"
    title = "COGS"
    source = "github.com/najoungkim/COGS"
    licence = "MIT"
    size = "11 MB"
    arch = "sg_transformer_cogs"
    splits = ("gen",)
    options = CogsOptions
    sources = CogsFiles

    def build(self, options: CogsOptions, sources: CogsFiles) -> Corpus:
        files, membership = FILES, "the published ones"
        if options.gen == "2021":
            files = files | {"gen": GEN_2021}
            membership += ", with gen as it was before the correction of 51 logical forms in September 2022"
        read = {subset: load(file, sources, subset) for subset, file in files.items()}
        check_sizes({subset: pairs for subset, (pairs, _) in read.items()}, SIZES)
        check_types({subset: types for subset, (_, types) in read.items()})
        return Corpus(
            {subset: Subset(pairs, types, published=SIZES[subset]) for subset, (pairs, types) in read.items()},
            "the official train.tsv, dev.tsv (valid), test.tsv and gen.tsv",
            membership,
            {"files": [file.describe() for file in files.values()]},
            VOCABULARY,
            joined=True,
            together=TOGETHER,
            groups=GROUPS,
        )


def load(file: OfficialFile, source: OfficialFiles, subset: str) -> tuple[list[Pair], list[str]]:
    """Reads the pairs and the types of an official file. Raises DataError."""
    path, data = source.read(file)
    pairs, types = parse(path, data, TYPES[subset])
    other = {FILES["gen"]: GEN_2021, GEN_2021: FILES["gen"]}.get(file)
    if other is not None and other.matches(data):
        advice = "--gen-2021 takes it" if other is GEN_2021 else "omit --gen-2021, or get the old file"
        age = "of 2021, before 51 logical forms were corrected" if other is GEN_2021 else "of September 2022"
        raise DataError(f"this is the gen.tsv {age}: {advice}", path)
    file.check(path, data)
    return pairs, types


def parse(path: Path, data: bytes, known: dict[str, int]) -> tuple[list[Pair], list[str]]:
    """Reads pairs and types from lines such as ``shark<tab>LAMBDA a . shark ( a )<tab>primitive``.

    Raises:
        DataError: with the line, for another form (see ``text.split_lines`` and ``parse_line``), for a type that is not
            in ``known``, and for a repeated sentence.
    """
    seen: dict[str, int] = {}
    pairs, types = [], []
    for number, line in enumerate(split_lines(path, data), start=1):
        try:
            pair, kind = parse_line(line)
        except ValueError as error:
            raise DataError(str(error), path, number) from None
        if kind not in known:
            raise DataError(f"unknown type {shorten(kind)}", path, number)
        first = seen.setdefault(pair.source, number)
        if first != number:
            raise DataError(f"the sentence {shorten(pair.source)} is already on line {first}", path, number)
        pairs.append(pair)
        types.append(kind)
    return pairs, types


def parse_line(line: str) -> tuple[Pair, str]:
    """Reads one line: the pair and its type. Raises ValueError unless it is three columns of
    words between single spaces.
    """
    columns = line.split("\t")
    if len(columns) != 3:
        raise ValueError(f"{len(columns)} columns between tabs instead of sentence, logical form and type")
    for name, column in zip(("sentence", "logical form", "type"), columns):
        if not column:
            raise ValueError(f"the {name} is empty")
        if " ".join(column.split()) != column:
            raise ValueError(f"the {name} does not consist of words between single spaces: {shorten(column)}")
    sentence, form, kind = columns
    return Pair(sentence, form), kind


def check_types(types: dict[str, list[str]]) -> None:
    """Raises DataError for a type whose number of examples is not the published one."""
    for subset, expected in TYPES.items():
        found = Counter(types[subset])
        for kind, size in expected.items():
            if found[kind] != size:
                raise DataError(f"subset {subset} has {found[kind]:,} examples of type {kind}, not {size:,}")

"""PCFG SET: string edits such as ``append reverse A1 B2 , C3`` and the strings they make (Hupkes et al. 2020).

    swap_first_last shift reverse copy M2 H16 K3 Z20               ->  Z20 H16 M2 K3
    repeat append I19 V5 , S11 B10                                 ->  I19 V5 S11 B10 I19 V5 S11 B10
    remove_second K3 F20 M4 , reverse echo E19 Y4                  ->  K3 F20 M4

Ten functions act on strings of 520 letters, in prefix notation, with a comma between two arguments. ``pcfg.language``
has their meaning; every target is checked against it. Sources and targets share one dictionary, as in the papers. In
every condition it has 535 words: 531, and the four synonyms of substitutivity.

``--condition`` is the test. The authors drew 97,203 examples; 4,860 of them are ``dev`` in every condition.

    iid             82,622 to train; ``test`` has 9,721 others of the same kind
    systematicity   ``gen`` has the 10,175 expressions with one of these pairs of adjacent functions: swap_first_last
                    repeat | append remove_second | repeat remove_second | append swap_first_last. ``train`` has the
                    82,168 without such a pair.
    productivity    ``gen`` has the 11,333 expressions with 9 to 35 functions, ``train`` the 81,010 with at most 8.
    substitutivity_primitive, substitutivity_equally_distributed
                    four functions have synonyms such as append_twin. Line N of ``gen`` is line N of ``test`` with one
                    function renamed. In ``train`` synonyms are in 332 lines of their own, with no other function, or
                    stand for about half of the functions. The score is how often both lines get the same answer.
    localism        Training and ``test`` are those of iid. ``gen`` has one function on 10,070 strings of up to 20
                    letters; in training strings have 2 to 5. raw/unrolled.tsv has the steps of 9,567 expressions of
                    ``test``. The score is how often the steps, each on earlier answers, lead to the answer for the
                    whole.
    overgeneralisation --ratio R
                    ``train`` has 9, 59, 125 or 554 exceptions, in which two adjacent functions mean something else.
                    ``exception`` has them again, ``original`` with their targets by the rule: answers of both kinds are
                    counted after every epoch. No other line of ``train`` has such a pair of functions.

``valid`` is the part of the official dev set that is like ``train``. It has 4,339 examples for systematicity, 4,249 for
productivity, 4,333 for overgeneralisation, and all 4,860 otherwise. For equally distributed synonyms, our own draw
renames half of the functions in it. Csordás et al. 2021 validate systematicity and productivity on ``gen`` itself.

Types, for accuracy by type:

    functions_01, functions_02, …   the number of functions
    the renamed function            ``test`` and ``gen`` of substitutivity
    letters_02 … letters_20         the longest string, ``gen`` of localism
    the pair of functions           exceptions

``--generate N`` draws N expressions by a sampler of our own (``pcfg.sample``) and splits them by the rules of iid,
systematicity and productivity. These are not the official data, so results are not comparable with the papers'.

Source: github.com/i-machine-think/am-i-compositional, data/pcfgset, MIT licence. localism/unrolled_train.tsv there, and
test sets of one function each, are not made here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from data_prep.corpus import Corpus
from data_prep.dataset import (
    DataError,
    Dataset,
    Options,
    Pair,
    Subsets,
    UsageError,
    check_sizes,
    option,
    seed_number,
    shorten,
    whole_number,
)
from data_prep.pcfg.exceptions import EXCEPTION_SIZES, exceptions_corpus
from data_prep.pcfg.files import (
    DEV,
    DEV_SIZE,
    TEST_SIZE,
    TOGETHER,
    TRAIN_SIZE,
    VOCABULARY,
    PcfgFiles,
    describe,
    function_counts,
    load,
    pair_files,
    subsets_of,
)
from data_prep.pcfg.language import TWINS, WORDS, count_functions, mentions
from data_prep.pcfg.localism import localism_corpus
from data_prep.pcfg.sample import sample
from data_prep.pcfg.synonyms import synonyms_corpus

FOLDERS = {"iid": "pcfgset", "systematicity": "systematicity", "productivity": "productivity"}
SUBSTITUTIVITY = "substitutivity_"
CONDITIONS = (
    *FOLDERS,
    *(f"{SUBSTITUTIVITY}primitive", f"{SUBSTITUTIVITY}equally_distributed"),
    *("localism", "overgeneralisation"),
)
# Published sizes of the training and the test set, and the size of the part of the dev set like training.
SIZES = {"iid": (TRAIN_SIZE, TEST_SIZE), "systematicity": (82_168, 10_175), "productivity": (81_010, 11_333)}
VALID_SIZES = {"iid": DEV_SIZE, "systematicity": 4_339, "productivity": 4_249}

HELD_OUT_PAIRS = (
    *("swap_first_last repeat", "append remove_second"),
    *("repeat remove_second", "append swap_first_last"),
)
MOST_FUNCTIONS = 8
# Condition -> predicate: an expression belongs to its test; iid has no such rule.
TESTED: dict[str, Callable[[str], bool]] = {
    "systematicity": lambda source: any(mentions(source, pair) for pair in HELD_OUT_PAIRS),
    "productivity": lambda source: count_functions(source) > MOST_FUNCTIONS,
}
RULES = {
    "iid": "train, valid and test are drawn alike",
    "systematicity": f"gen has the expressions with {' | '.join(HELD_OUT_PAIRS)}, train and valid have others",
    "productivity": f"gen has the expressions with more than {MOST_FUNCTIONS} functions, train and valid have others",
}
DEFAULT_SEED = 1


@dataclass(frozen=True)
class PcfgOptions(Options):
    """The options of PCFG SET."""

    condition: str = option(choices=CONDITIONS)
    ratio: str | None = option(
        None,
        "ratio of exceptions, with --condition overgeneralisation: " + ", ".join(EXCEPTION_SIZES),
        choices=EXCEPTION_SIZES,
        metavar="R",
    )
    generate: int | None = option(
        None,
        "draw N expressions of our own instead of the official data",
        type=whole_number(1_000, 1_000_000),
    )
    seed: int | None = option(None, f"seed of --generate (default: {DEFAULT_SEED})", type=seed_number)

    def complete(self, sources: PcfgFiles) -> PcfgOptions:
        if (self.ratio is not None) != (self.condition == "overgeneralisation"):
            raise UsageError("--condition overgeneralisation needs --ratio, and no other condition has it")
        if self.generate is None:
            if self.seed is not None:
                raise UsageError("--seed belongs to --generate; the official files are not drawn")
            return self
        if self.condition not in FOLDERS:
            raise UsageError(f"--generate makes {', '.join(FOLDERS)}; {self.condition} needs the official files")
        if sources.asked_for:
            raise UsageError("--generate needs no official files: omit --raw-dir and --download")
        return replace(self, seed=DEFAULT_SEED if self.seed is None else self.seed)


class Pcfg(Dataset):
    """``python -m data_prep pcfg``."""

    name = "pcfg"
    title = "PCFG SET"
    source = "github.com/i-machine-think/am-i-compositional"
    licence = "MIT"
    size = "12 to 17 MB, or generated"
    arch = "sg_transformer_pcfg"
    splits = CONDITIONS
    words = tuple(sorted({*WORDS, *TWINS}))
    options = PcfgOptions
    sources = PcfgFiles

    def build(self, options: PcfgOptions, sources: PcfgFiles) -> Corpus:
        return replace(make_corpus(options, sources), words=self.words)


def make_corpus(options: PcfgOptions, sources: PcfgFiles) -> Corpus:
    """Makes the examples of a condition."""
    if options.generate is not None:
        return generated_corpus(options.condition, options.generate, options.seed)
    if options.condition in FOLDERS:
        return official_corpus(options.condition, sources)
    if options.condition == "localism":
        return localism_corpus(sources)
    if options.condition == "overgeneralisation":
        return exceptions_corpus(options.ratio, sources)
    return synonyms_corpus(options.condition.removeprefix(SUBSTITUTIVITY), sources)


def tested_subset(condition: str) -> str:
    """The name of the tested subset: ``test`` if it has the training distribution."""
    return "gen" if condition in TESTED else "test"


def like_training(condition: str, pairs: list[Pair]) -> list[Pair]:
    """The pairs that could be in the training set of a condition."""
    return [pair for pair in pairs if condition not in TESTED or not TESTED[condition](pair.source)]


def official_corpus(condition: str, sources: PcfgFiles) -> Corpus:
    """The official training and test set of a condition, and the part of the dev set like
    training. Raises DataError.
    """
    names = {"train": f"{FOLDERS[condition]}/train", "valid": DEV}
    names[tested_subset(condition)] = f"{FOLDERS[condition]}/test"
    subsets = {subset: load(name, sources) for subset, name in names.items()}
    subsets["valid"] = like_training(condition, subsets["valid"])
    check_rule(condition, subsets)
    published = dict(zip(("train", tested_subset(condition)), SIZES[condition], strict=True))
    check_sizes(subsets, published | {"valid": VALID_SIZES[condition]})
    if condition == "iid":
        published["valid"] = VALID_SIZES["iid"]
    origin = describe(pair_files(names.values()))
    membership = "the published ones"
    if condition in TESTED:
        membership += "; valid is the part of the official dev set that is like train"
    types = {subset: function_counts(pairs) for subset, pairs in subsets.items()}
    return Corpus(
        subsets_of(subsets, types, published),
        RULES[condition],
        membership,
        origin,
        VOCABULARY,
        joined=True,
        together=TOGETHER,
        official=True,
    )


def generated_corpus(condition: str, number: int, seed: int) -> Corpus:
    """Our own expressions with the official shares, 5 % dev and 10 % test, and the official rules."""
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
    types = {subset: function_counts(pairs) for subset, pairs in subsets.items()}
    return Corpus(subsets_of(subsets, types, {}), RULES[condition], membership, origin, joined=True)


def check_rule(condition: str, subsets: Subsets) -> None:
    """Raises DataError for an example in the wrong subset by the rule of the condition."""
    if condition not in TESTED:
        return
    for subset, pairs in subsets.items():
        for pair in pairs:
            if TESTED[condition](pair.source) != (subset == tested_subset(condition)):
                raise DataError(f"{subset} may not have {shorten(pair.source)}: {RULES[condition]}")

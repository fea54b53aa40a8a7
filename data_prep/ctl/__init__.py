"""CTL, compositional table lookup (Liška et al. 2018), in the version of Csordás et al. 2022 (ICLR).

    --order forward     101 d a b   ->  011        the symbol, then the functions in the order of their application
    --order backward    b a d 101   ->  011        as b(a(d(101))) is written: the functions, then the symbol

The language has eight symbols, 000 to 111, each one word, and eleven random bijections of them, ``a`` to ``k``. The
target is the resulting symbol, one word: a class. Both orders have the same examples.

    train               53,704: 53,136 distinct examples with 2 to 5 of the functions ``a`` to ``i``, and the 88 with
                        a single one of all eleven. Those of ``j`` and ``k`` occur 31 times.
    valid, test         4,000 each of the same kind as the 53,136, and distinct from them
    dev                 1,000 with 6 to 8 functions, for model selection
    gen                 1,000 with 9 and 10 functions: "longer" in the papers
    new_composition     605, each with its own composition of at most 5 functions (once of none). No other subset has
                        that composition, with any symbol.
    new_primitive_one, new_primitive_two
                        1,000 each with 2 to 5 functions, at least one of them ``j``, or ``k``. In training, ``j`` and
                        ``k`` occur only alone.

The length of a training example is drawn uniformly, but repeated examples are dropped, and there are few short ones.
With the default seed, 432 of the 53,136 have 2 functions, 3,749 have 3, 20,859 have 4 and 28,096 have 5. The type of an
example is its number of functions, ``length_2``, for accuracy by length.

With the default seed, the tables, ``dev``, ``gen``, ``new_primitive_one``, and train, valid and test taken together are
those of the reference code (github.com/RobertCsordas/ndr). The reference draws without a seed which of these examples
are valid and test, ``new_primitive_two``, and the symbols of ``new_composition`` (see ``ctl.sample``). Two departures
keep tests out of training: ``test`` lacks the reference's 88 functions alone, and ``new_composition`` lacks 3 of them.

``--functions`` and ``--longest`` make a smaller task of our own, for a first look on a CPU.

Source: generated, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from data_prep.corpus import Corpus, Subset
from data_prep.ctl.sample import (
    COMPOSED,
    FUNCTIONS,
    SMALL_HELD_OUT,
    SYMBOLS,
    Example,
    Sample,
    Tables,
    sample,
    sample_small,
)
from data_prep.dataset import Dataset, Options, Pair, Sources, UsageError, option, seed_number, whole_number

REFERENCE_SEED = 0x12345678
DEFAULT_LONGEST = 4
PUBLISHED = {
    "train": 53_704,
    "valid": 4_000,
    "dev": 1_000,
    "gen": 1_000,
    "test": 4_000,
    "new_composition": 608,
    "new_primitive_one": 1_000,
    "new_primitive_two": 1_000,
}
VOCABULARY = (len(SYMBOLS) + len(FUNCTIONS), len(SYMBOLS))
RULE = "train, valid and test have at most 5 functions, dev has 6 to 8, gen 9 and 10"


@dataclass(frozen=True)
class CtlOptions(Options):
    """The options of CTL; ``functions`` and ``longest`` make a smaller task of our own (``sample_small``)."""

    order: str = option(choices=("forward", "backward"))
    seed: int = option(
        REFERENCE_SEED,
        f"seed of the tables and the examples (default: {REFERENCE_SEED}, the reference's)",
        type=seed_number,
    )
    functions: int | None = option(
        None,
        f"a smaller task, of our own: number of functions, 3 to {COMPOSED}",
        type=whole_number(3, COMPOSED),
        when_given=True,
    )
    longest: int | None = option(
        None,
        "of the smaller task: maximum functions of a training example, 3 to 6 "
        f"(default: {DEFAULT_LONGEST}). dev has one more, gen has two and three more",
        type=whole_number(3, 6),
        when_given=True,
    )

    def complete(self, sources: Sources) -> CtlOptions:
        if self.functions is None:
            if self.longest is not None:
                raise UsageError("--longest is for the smaller task: give its --functions too")
            return self
        longest = DEFAULT_LONGEST if self.longest is None else self.longest
        if len(SYMBOLS) * self.functions**longest < 4 * SMALL_HELD_OUT:
            raise UsageError(
                f"--functions {self.functions} --longest {longest} has too few examples for a "
                "valid set: choose a greater number"
            )
        return replace(self, longest=longest)


class Ctl(Dataset):
    """``python -m data_prep ctl``."""

    name = "ctl"
    title = "CTL"
    source = "its rules (Csordás et al. 2022)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    classifier = "sg_encoder_ctl_baseline"
    splits = ("forward", "backward")
    options = CtlOptions

    def build(self, options: CtlOptions, sources: Sources) -> Corpus:
        if options.functions is not None:
            return build_small(options)
        drawn = sample(options.seed)
        membership = "drawn like the published ones, from another seed"
        if options.seed == REFERENCE_SEED:
            membership = (
                "the published ones, except which of train, valid and test one is in, new_primitive_two, and the "
                "symbols of new_composition: the reference draws those without a seed"
            )
        return Corpus(
            subsets_of(drawn, options.order, PUBLISHED),
            f"{RULE}; {options.order}",
            membership,
            {"generator": "data_prep.ctl_sample", "tables": dict(zip(FUNCTIONS, named(drawn.tables), strict=True))},
            VOCABULARY,
            labels=True,
        )


def build_small(options: CtlOptions) -> Corpus:
    """The smaller task."""
    longest = options.longest
    drawn = sample_small(options.functions, longest, options.seed)
    return Corpus(
        subsets_of(drawn, options.order, {}),
        f"train and valid have at most {longest} functions, dev has {longest + 1}, gen {longest + 2} and "
        f"{longest + 3}; {options.order}",
        "a smaller task of our own, not the published one",
        {"generator": "data_prep.ctl_small", "tables": dict(zip(FUNCTIONS, named(drawn.tables), strict=False))},
        (len(SYMBOLS) + options.functions, len(SYMBOLS)),
        labels=True,
    )


def subsets_of(drawn: Sample, order: str, published: Mapping[str, int]) -> dict[str, Subset]:
    """The examples as words, with their numbers of functions as types, except in train."""
    return {
        name: Subset(
            [render(example, drawn.tables, order) for example in examples],
            () if name == "train" else [f"length_{len(example.functions)}" for example in examples],
            published=published.get(name),
        )
        for name, examples in drawn.subsets.items()
    }


def render(example: Example, tables: Tables, order: str) -> Pair:
    """The example as words. ``order`` is ``forward`` or ``backward``."""
    words = [*(FUNCTIONS[function] for function in example.functions), SYMBOLS[example.symbol]]
    return Pair(" ".join(words if order == "backward" else words[::-1]), SYMBOLS[example.result(tables)])


def named(tables: Tables) -> list[str]:
    """Function -> its values for 000, 001 … 111."""
    return [" ".join(SYMBOLS[result] for result in table) for table in tables]

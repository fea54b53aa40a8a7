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

With the default seed, the tables and all examples are those of the reference code (github.com/RobertCsordas/ndr). The
reference assigns examples to valid, test and train by an unseeded generator (see ``ctl.sample``). Two departures keep
tests out of training: ``test`` lacks the reference's 88 functions alone, and ``new_composition`` lacks 3 of them.

``--functions`` and ``--longest`` make a smaller task of our own, for a first look on a CPU.

Source: generated, nothing is downloaded.
"""

from __future__ import annotations

import argparse

from data_prep.corpus import Corpus
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
from data_prep.dataset import Dataset, Json, Pair, UsageError, seed_number
from data_prep.draws import number_between

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

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--order", required=True, choices=self.splits, metavar="ORDER", help=", ".join(self.splits))
        parser.add_argument(
            "--seed",
            type=seed_number,
            metavar="N",
            default=REFERENCE_SEED,
            help=f"seed of the tables and the examples (default: {REFERENCE_SEED}, the reference's)",
        )
        small = parser.add_argument_group("a smaller task, of our own (see data_prep/ctl/sample.py)")
        small.add_argument(
            "--functions", type=number_between(2, COMPOSED), metavar="N", help=f"number of functions, 2 to {COMPOSED}"
        )
        small.add_argument(
            "--longest",
            type=number_between(3, 6),
            metavar="N",
            help=f"maximum functions of a training example, 3 to 6 (default: {DEFAULT_LONGEST}). dev has one more, gen "
            "has two and three more",
        )

    def request(self, args: argparse.Namespace) -> Json:
        request = {"order": args.order, "seed": args.seed}
        if args.functions is None:
            if args.longest is not None:
                raise UsageError("--longest is for the smaller task: give its --functions too")
            return request
        longest = DEFAULT_LONGEST if args.longest is None else args.longest
        if len(SYMBOLS) * args.functions**longest < 4 * SMALL_HELD_OUT:
            raise UsageError(
                f"--functions {args.functions} --longest {longest} has too few examples for a "
                "valid set: choose a greater number"
            )
        return request | {"functions": args.functions, "longest": longest}

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        if "functions" in request:
            return self.build_small(request["order"], request["seed"], request["functions"], request["longest"])
        drawn = sample(request["seed"])
        membership = "drawn like the published ones, from another seed"
        if request["seed"] == REFERENCE_SEED:
            membership = (
                "the published ones, except valid, test and new_primitive_two: the reference draws them without a seed"
            )
        return Corpus(
            {
                name: [render(example, drawn.tables, request["order"]) for example in examples]
                for name, examples in drawn.subsets.items()
            },
            PUBLISHED,
            f"{RULE}; {request['order']}",
            membership,
            {"generator": "data_prep.ctl_sample", "tables": dict(zip(FUNCTIONS, named(drawn.tables), strict=True))},
            VOCABULARY,
            types=types_of(drawn),
            labels=True,
        )

    def build_small(self, order: str, seed: int, functions: int, longest: int) -> Corpus:
        drawn = sample_small(functions, longest, seed)
        return Corpus(
            {name: [render(e, drawn.tables, order) for e in examples] for name, examples in drawn.subsets.items()},
            {},
            f"train and valid have at most {longest} functions, dev has {longest + 1}, gen {longest + 2} and "
            f"{longest + 3}; {order}",
            "a smaller task of our own, not the published one",
            {"generator": "data_prep.ctl_small", "tables": dict(zip(FUNCTIONS, named(drawn.tables), strict=False))},
            (len(SYMBOLS) + functions, len(SYMBOLS)),
            types=types_of(drawn),
            labels=True,
        )


def types_of(drawn: Sample) -> dict[str, list[str]]:
    """The numbers of functions as types, for all subsets except train."""
    return {
        name: [f"length_{len(example.functions)}" for example in examples]
        for name, examples in drawn.subsets.items()
        if name != "train"
    }


def render(example: Example, tables: Tables, order: str) -> Pair:
    """The example as words. ``order`` is ``forward`` or ``backward``."""
    words = [*(FUNCTIONS[function] for function in example.functions), SYMBOLS[example.symbol]]
    return Pair(" ".join(words if order == "backward" else words[::-1]), SYMBOLS[example.result(tables)])


def named(tables: Tables) -> list[str]:
    """Function -> its values for 000, 001 … 111."""
    return [" ".join(SYMBOLS[result] for result in table) for table in tables]

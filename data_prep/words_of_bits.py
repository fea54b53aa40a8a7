"""What the memory tasks share: words that are strings of bits, with one label a word, drawn from a seed.

A row of a published format, a vector of bits, is one word:

    01101001          a row of bits
    .                 a blank row, and in targets "no label here"
    <copy>            a marker: a row whose bits are 0 and whose flags are set
    011010|......     two halves, one of them unknown

``dataset.json`` says under ``bits`` how many bits the words of each side have and which flags a marker sets, so that a
model can read and write the published vectors. Sources and targets have equally many words.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.random import RandomState

from data_prep.corpus import Bits, Corpus, Subset
from data_prep.dataset import DataError, Dataset, Options, Pair, Sources, UsageError, option, whole_number
from data_prep.draws import PackedPairs, first_distinct, seed_option
from data_prep.strings import lengths

BLANK = "."
MOST_BITS = 32
LEAST = 10  # examples in a subset
#: Draws in a row that find nothing new, after which a subset is taken to have too few examples.
VAIN = 10_000


class Example(NamedTuple):
    """Rows of the source and of the target, and the type."""

    source: Sequence[str]
    target: Sequence[str]
    type: str

    def pair(self) -> Pair:
        return Pair(" ".join(self.source), " ".join(self.target))


#: Draws one example.
Draw = Callable[[RandomState], Example]


def word(number: int, bits: int) -> str:
    """A number as a string of bits."""
    return format(number, f"0{bits}b")


def words(generator: RandomState, size: int, bits: int) -> list[str]:
    """Random words, drawn with repetitions."""
    return [word(number, bits) for number in generator.randint(0, 2**bits, size, dtype="int64").tolist()]


def distinct_numbers(generator: RandomState, size: int, bits: int) -> list[int]:
    """Random numbers below 2 ** bits, none of them twice."""
    return first_distinct(size, lambda: int(generator.randint(0, 2**bits, dtype="int64")))


def one_of(generator: RandomState, choices: Sequence[int]) -> int:
    """One of some numbers, each with the same probability."""
    return choices[generator.randint(len(choices))]


def numbers_option(default: str, text: str) -> Any:
    """An option of numbers and ranges, such as 2-14."""
    # An immutable default, which the request has as a list, like the value of the command line.
    return option(tuple(lengths(default)), f"{text} (default: {default})", type=lengths, metavar="NUMBERS")


def refuse_trained(flag: str, test: Sequence[int], train: Sequence[int]) -> None:
    """Raises UsageError for a number of a test subset that is trained too."""
    common = sorted(set(test) & set(train))
    if common:
        raise UsageError(f"{flag} has {common[0]}, which train has too: choose other numbers")


@dataclass(frozen=True)
class WordOptions(Options):
    """The options of all memory tasks."""

    train: int = option(50_000, "examples in train (default: %(default)s)", type=whole_number(100, 10_000_000))
    test: int = option(1_000, "examples in each other subset (default: %(default)s)", type=whole_number(LEAST, 100_000))
    seed: int = seed_option()


class WordsOfBits(Dataset):
    """A memory task: its subsets, each as a draw."""

    licence = "none (generated)"
    size = "generated"
    options = WordOptions
    source = "its rule (Csordás & Schmidhuber 2019)"

    @abstractmethod
    def subsets(self, options: WordOptions) -> Mapping[str, Draw]:
        """Subset -> its draw; ``train`` and ``valid`` have the same one."""

    @abstractmethod
    def bits(self, options: WordOptions) -> Bits:
        """The form of the words."""

    @abstractmethod
    def rule(self, options: WordOptions) -> str:
        """How the subsets differ, in words."""

    def build(self, options: WordOptions, sources: Sources) -> Corpus:
        draws = self.subsets(options)
        held_out: set[str] = set()
        made: dict[str, Subset] = {}
        for number, (name, draw) in enumerate(draws.items()):
            if name != "train":
                made[name] = distinct(name, draw, options.test, RandomState([options.seed, number]), held_out)
        # The draw of training is the last, as it leaves out what others have.
        train = others(draws["train"], options.train, RandomState([options.seed, 0]), held_out, options.test)
        return Corpus(
            {"train": train, **made},
            self.rule(options),
            "generated; the published code draws new examples in every step",
            {"generator": f"data_prep.{self.name}"},
            no_label=BLANK,
            bits=self.bits(options),
        )


def distinct(name: str, draw: Draw, size: int, generator: RandomState, taken: set[str]) -> Subset:
    """``size`` examples, none of them twice or in ``taken``, to which they are added."""
    pairs, types, vain = [], [], 0
    while len(pairs) < size:
        example = draw(generator)
        pair = example.pair()
        if pair.source in taken:
            vain += 1
            if vain > VAIN:
                raise DataError(f"subset {name} cannot have {size:,} different examples: {advice(size)}")
            continue
        vain = 0
        taken.add(pair.source)
        pairs.append(pair)
        types.append(example.type)
    return Subset(PackedPairs(pairs), types)


def advice(size: int) -> str:
    """What to choose where there are too few examples for subsets of ``size``."""
    return "choose more --bits or longer examples" + (", or a smaller --test" if size > LEAST else "")


def others(draw: Draw, size: int, generator: RandomState, excluded: set[str], tested: int) -> Subset:
    """``size`` examples that are not excluded, with repetitions; ``tested`` is the size of each other subset."""

    def pairs():
        left, vain = size, 0
        while left:
            pair = draw(generator).pair()
            if pair.source not in excluded:
                left, vain = left - 1, 0
                yield pair
            elif (vain := vain + 1) > VAIN:
                raise DataError(f"the other subsets have all examples that there are: {advice(tested)}")

    return Subset(PackedPairs(pairs()))

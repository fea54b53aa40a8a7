"""Double addition, and addition and multiplication: two functions for one network (Csordás et al. 2021, section 3.1).

Both ask whether a network has modules: does it compute one function for two inputs with the same weights, and two
functions with different ones? ``fairseq-sg analysis masks`` finds the weights of each function.

Numbers are 0 to 99, results are modulo 100. All are two digits, the least significant first, as in the authors' code.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from numpy.random import RandomState

from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Dataset, Options, Pair, Sources, option, whole_number
from data_prep.draws import seed_option

NUMBERS = 100  # 0 to 99
DIGITS, LETTERS = "0123456789", "abcdefghij"


@dataclass(frozen=True)
class AdditionOptions(Options):
    """The options of both datasets."""

    train: int = option(
        8_000,
        f"of the {NUMBERS**2:,} pairs of numbers of each type, those in train; valid has the others "
        "(default: %(default)s)",
        type=whole_number(100, NUMBERS**2 - 100),
    )
    seed: int = seed_option()


def digits(number: int, alphabet: str = DIGITS) -> list[str]:
    """The two digits of a number modulo 100, the least significant first."""
    return [alphabet[number % 10], alphabet[number // 10 % 10]]


class TwoFunctions(Dataset):
    """Two types of examples, each with all pairs of numbers from 0 to 99."""

    source = "its rule (Csordás et al. 2021)"
    licence = "none (generated)"
    size = "generated"
    arch = "sg_transformer_scan"
    splits = ("random",)
    options = AdditionOptions
    types: tuple[str, str]
    vocabulary: tuple[int, int]

    @abstractmethod
    def example(self, kind: str, first: int, second: int) -> Pair:
        """The example of a type for two numbers."""

    def build(self, options: AdditionOptions, sources: Sources) -> Corpus:
        train, valid = Subset([], []), Subset([], [])
        for number, kind in enumerate(self.types):
            order = RandomState([options.seed, number]).permutation(NUMBERS**2).tolist()
            for subset, drawn in ((train, order[: options.train]), (valid, order[options.train :])):
                subset.pairs.extend(self.example(kind, *divmod(place, NUMBERS)) for place in sorted(drawn))
                subset.types.extend([kind] * len(drawn))
        return Corpus(
            {"train": train, "valid": valid},
            f"{options.train:,} random pairs of numbers of each type are in train, the others in valid",
            "generated; the authors draw training and validation examples from all pairs, with repetitions",
            {"generator": "data_prep.addition"},
            self.vocabulary,
        )


class DoubleAddition(TwoFunctions):
    """Double addition: one function with two inputs and outputs of their own (Csordás et al. 2021, section 3.1)

        7 1 5 2     ->  2 4        17 + 25 = 42
        h b f c     ->  c e        the same of the second pair

    Each pair of numbers has its own alphabet in source and target: 0 to 9, or a to j. So nothing in the data tells that
    both are additions. Numbers are 0 to 99 with the least significant digit first, results are modulo 100. Line N of
    raw/SUBSET.type is ``pair1`` or ``pair2``.

    Each type has all 10,000 pairs of numbers: 8,000 in train (``--train``), the others in valid.

    Departure from the authors: their network reads one-hot digits of both pairs in separate places. Here they are
    words, for models of sequences.

    Source: generated.
    """

    name = "double_addition"
    title = "Double addition"
    types = ("pair1", "pair2")
    vocabulary = (20, 20)

    def example(self, kind: str, first: int, second: int) -> Pair:
        alphabet = DIGITS if kind == "pair1" else LETTERS
        return Pair(
            " ".join(digits(first, alphabet) + digits(second, alphabet)), " ".join(digits(first + second, alphabet))
        )


class AddMultiply(TwoFunctions):
    """Addition and multiplication: two functions with common inputs and outputs (Csordás et al. 2021, section 3.1)

        + 7 1 5 2   ->  2 4        17 + 25 = 42
        * 7 1 5 2   ->  5 2        17 · 25 = 425

    Numbers are 0 to 99 with the least significant digit first, results are modulo 100. Line N of raw/SUBSET.type is
    ``add`` or ``multiply``.

    Each type has all 10,000 pairs of numbers: 8,000 in train (``--train``), the others in valid.

    Source: generated.
    """

    name = "add_multiply"
    title = "Addition and multiplication"
    types = ("add", "multiply")
    vocabulary = (12, 10)

    def example(self, kind: str, first: int, second: int) -> Pair:
        result = first + second if kind == "add" else first * second
        operator = "+" if kind == "add" else "*"
        return Pair(" ".join([operator, *digits(first), *digits(second)]), " ".join(digits(result)))

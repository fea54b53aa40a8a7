"""Key–value retrieval: rows with a key and a value, then keys alone, whose values are the labels (Csordás &
Schmidhuber 2019).

    00|11 01|00 <query> 01|.. 00|.. <query>                            ->  . . . 00 11 .
    00|11 01|00 <by_key> 01|.. 00|.. <by_value> ..|11 ..|00 <end>      ->  . . . 00 11 . 00 01 .

An example has L rows, their L keys in another order, and with ``--queries both`` then their L values in another order,
whose keys are the labels. A row has ``--bits`` bits, half of them of its key.

    train           50,000 examples (``--train``) with L of ``--lengths``
    valid           1,000 (``--test``) of the same kind; none of them is in train
    gen             1,000 with L of ``--test-lengths``

Line N of raw/valid.type and of raw/gen.type is the number of rows, ``rows_12``. Keys are distinct, and in the first
part ascending, as in the released code; ``--order random`` leaves them as they are drawn. Values are drawn with
repetitions for keys alone. With both queries they are distinct, as a repeated value has no one key;
``--repeat-values`` is the released code.

The released code has rows of 12 bits (the default); appendix A.2 of Csordás 2023 has 16. It draws new examples in every
step, and all of a batch have the same L.

Source: generated; Csordás 2023, section 2.3 and appendix A.2, and github.com/RobertCsordas/dnc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from numpy.random import RandomState

from data_prep.corpus import Bits
from data_prep.dataset import Sources, UsageError, option, whole_number
from data_prep.strings import format_lengths
from data_prep.words_of_bits import (
    BLANK,
    MOST_BITS,
    Draw,
    Example,
    WordOptions,
    WordsOfBits,
    distinct_numbers,
    numbers_option,
    one_of,
    refuse_trained,
    word,
    words,
)

QUERIES = {
    "keys": {"<query>": "1"},
    "both": {"<by_key>": "01", "<by_value>": "10", "<end>": "11"},
}


@dataclass(frozen=True)
class KeyValueOptions(WordOptions):
    """The options of key–value retrieval."""

    queries: str = option(
        "keys", "'keys' alone, or 'both' keys and values (default: %(default)s)", choices=tuple(QUERIES)
    )
    lengths: tuple[int, ...] = numbers_option("2-16", "numbers L of rows in train and valid")
    test_lengths: tuple[int, ...] = numbers_option("17-24", "numbers of rows in gen")
    bits: int = option(12, "bits of a row, an even number (default: %(default)s)", type=whole_number(2, MOST_BITS))
    order: str = option("ascending", "order of the keys in the first part (default: %(default)s)",
                        choices=("ascending", "random"))  # fmt: skip
    repeat_values: bool = option(
        False, "with --queries both: draw values with repetitions", given={"--repeat-values": True}
    )

    def complete(self, sources: Sources) -> KeyValueOptions:
        refuse_trained("--test-lengths", self.test_lengths, self.lengths)
        if self.bits % 2:
            raise UsageError(f"--bits is {self.bits}: a row has two halves, so choose an even number")
        keys, most = 2 ** (self.bits // 2), max(*self.lengths, *self.test_lengths)
        if most > keys // 2:
            raise UsageError(
                f"--bits {self.bits} has {keys} keys, of which an example has at most half, not {most}: choose more"
            )
        if self.repeat_values and self.queries != "both":
            raise UsageError("--repeat-values is for --queries both; for keys alone, values are repeated anyway")
        return self


class KeyValue(WordsOfBits):
    """``python -m data_prep key_value``."""

    name = "key_value"
    title = "key–value retrieval"
    arch = "sg_dnc_key_value"
    splits = ("length",)
    options = KeyValueOptions

    def subsets(self, options: KeyValueOptions) -> Mapping[str, Draw]:
        half = options.bits // 2

        def draw(lengths: tuple[int, ...]) -> Draw:
            def one(generator: RandomState) -> Example:
                size = one_of(generator, lengths)
                numbers = distinct_numbers(generator, size, half)
                keys = [word(n, half) for n in (sorted(numbers) if options.order == "ascending" else numbers)]
                if options.queries == "both" and not options.repeat_values:
                    values = [word(n, half) for n in distinct_numbers(generator, size, half)]
                else:
                    values = words(generator, size, half)
                parts = 2 if options.queries == "both" else 1
                orders = [generator.permutation(size).tolist() for _ in range(parts)]
                return example(keys, values, orders, options.queries)

            return one

        return {"train": draw(options.lengths), "valid": draw(options.lengths), "gen": draw(options.test_lengths)}

    def bits(self, options: KeyValueOptions) -> Bits:
        return {
            "source": {"width": options.bits, "markers": QUERIES[options.queries]},
            "target": {"width": options.bits // 2, "markers": {}},
        }

    def rule(self, options: KeyValueOptions) -> str:
        trained, more = (format_lengths(list(numbers)) for numbers in (options.lengths, options.test_lengths))
        return f"train and valid have {trained} rows, gen {more}; queries: {options.queries}"


def example(keys: list[str], values: list[str], orders: list[list[int]], queries: str) -> Example:
    """The rows, and the queries: keys in the first order, and values in the second if there is one."""
    markers = list(QUERIES[queries])
    unknown = BLANK * len(keys[0])
    source = [f"{key}|{value}" for key, value in zip(keys, values, strict=True)] + [markers[0]]
    target = [BLANK] * len(source)
    for by_value, order in enumerate(orders):
        for row in order:
            source.append(f"{unknown}|{values[row]}" if by_value else f"{keys[row]}|{unknown}")
            target.append(keys[row] if by_value else values[row])
        source.append(markers[by_value + 1] if queries == "both" else markers[0])
        target.append(BLANK)
    return Example(source, target, f"rows_{len(keys)}")

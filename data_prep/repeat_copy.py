"""Repeated copying: sequences of random words are to be repeated, one after another (Csordás & Schmidhuber 2019).

    01101001 11100010 <copy> . . .    ->  . . . 01101001 11100010 <copy>
    011 <copy> . . 110 <copy> . .     ->  . . 011 <copy> . . 110 <copy>

One example has N such blocks with a length L of its own each: L words, the marker, L + 1 blanks. During the blanks the
L words are the labels, and then the marker: the model must say when it is done. The blocks have more words together
than a small memory has cells, so cells must be used again.

    train           50,000 examples (``--train``) with N of ``--repeats`` and every L of ``--lengths``
    valid           1,000 (``--test``) of the same kind; none of them is in train
    gen_repeats     1,000 with N of ``--test-repeats`` and every L of ``--lengths``
    gen_lengths     1,000 with N of ``--repeats`` and every L of ``--test-lengths``

Line N of raw/SUBSET.type is the number of blocks, ``repeats_8``, or in gen_lengths the length of the longest block;
train has no such file.

The defaults, N of 1 to 8 and L of 2 to 14, are those of the released code. Appendix A.2 of Csordás 2023 has them the
other way round, L of 1 to 8 and N of 2 to 14, which does not fit its Figure 2.4. The released code draws new examples
in every step, and all of a batch have the same N and L.

Source: generated; Csordás 2023, section 2.3 and appendix A.2, and github.com/RobertCsordas/dnc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from numpy.random import RandomState

from data_prep.corpus import Bits
from data_prep.dataset import Sources, option, whole_number
from data_prep.strings import format_lengths
from data_prep.words_of_bits import (
    BLANK,
    MOST_BITS,
    Draw,
    Example,
    WordOptions,
    WordsOfBits,
    numbers_option,
    one_of,
    refuse_trained,
    words,
)

COPY = "<copy>"


@dataclass(frozen=True)
class RepeatCopyOptions(WordOptions):
    """The options of repeated copying."""

    lengths: tuple[int, ...] = numbers_option("2-14", "lengths L of the blocks in train and valid")
    repeats: tuple[int, ...] = numbers_option("1-8", "numbers N of blocks in train and valid")
    test_lengths: tuple[int, ...] = numbers_option("15-20", "lengths of the blocks in gen_lengths")
    test_repeats: tuple[int, ...] = numbers_option("9-16", "numbers of blocks in gen_repeats")
    bits: int = option(8, "bits of a word (default: %(default)s)", type=whole_number(1, MOST_BITS))

    def complete(self, sources: Sources) -> RepeatCopyOptions:
        refuse_trained("--test-lengths", self.test_lengths, self.lengths)
        refuse_trained("--test-repeats", self.test_repeats, self.repeats)
        return self


class RepeatCopy(WordsOfBits):
    """``python -m data_prep repeat_copy``."""

    name = "repeat_copy"
    title = "repeated copying"
    arch = "sg_dnc_copy"
    splits = ("repeats", "length")
    options = RepeatCopyOptions

    def subsets(self, options: RepeatCopyOptions) -> Mapping[str, Draw]:
        def draw(repeats: tuple[int, ...], lengths: tuple[int, ...], by_length: bool = False) -> Draw:
            def one(generator: RandomState) -> Example:
                blocks = [
                    words(generator, one_of(generator, lengths), options.bits)
                    for _ in range(one_of(generator, repeats))
                ]
                kind = f"length_{max(map(len, blocks))}" if by_length else f"repeats_{len(blocks)}"
                return example(blocks, kind)

            return one

        trained = draw(options.repeats, options.lengths)
        return {
            "train": trained,
            "valid": trained,
            "gen_repeats": draw(options.test_repeats, options.lengths),
            "gen_lengths": draw(options.repeats, options.test_lengths, by_length=True),
        }

    def bits(self, options: RepeatCopyOptions) -> Bits:
        side = {"width": options.bits, "markers": {COPY: "1"}}
        return {"source": side, "target": side}

    def rule(self, options: RepeatCopyOptions) -> str:
        lengths, repeats = (format_lengths(list(numbers)) for numbers in (options.lengths, options.repeats))
        longer, more = (format_lengths(list(numbers)) for numbers in (options.test_lengths, options.test_repeats))
        return (
            f"train and valid have {repeats} blocks of length {lengths}, gen_repeats has {more} blocks, gen_lengths "
            f"lengths {longer}"
        )


def example(blocks: list[list[str]], kind: str) -> Example:
    """The rows of some blocks of words."""
    source, target = [], []
    for block in blocks:
        source += [*block, COPY, *[BLANK] * (len(block) + 1)]
        target += [*[BLANK] * (len(block) + 1), *block, COPY]
    return Example(source, target, kind)

"""Associative recall: which block of words came after this one? (Graves et al. 2014; Csordás & Schmidhuber 2019)

    00 01 <next> 10 00 <next> 11 10 <query> 00 01 <query> . .    ->  . . . . . . . . . . . . 10 00
    01 <next> 10 <query> 01 <query> .                            ->  . . . . . . 10

B blocks of 3 random words of 8 bits (2 and 1 words of 2 bits above) follow one another, each ended by a marker. Then
one of the first B − 1 blocks is repeated. The labels of the last three rows are the words of the next block. An example
has 4 B + 7 rows.

    train           50,000 examples (``--train``) with B of ``--blocks``
    valid           1,000 (``--test``) of the same kind; none of them is in train
    gen             1,000 with B of ``--test-blocks``

Line N of raw/valid.type and of raw/gen.type is the number of blocks, ``blocks_12``. The defaults are the published
sizes. The published code draws new examples in every step, and all of a batch have the same B.

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
    numbers_option,
    one_of,
    refuse_trained,
    words,
)

NEXT, QUERY = "<next>", "<query>"
#: Possible blocks for every pair of blocks in a sentence: at most one sentence in so many has two blocks alike.
POSSIBLE = 100


@dataclass(frozen=True)
class AssociativeRecallOptions(WordOptions):
    """The options of associative recall."""

    blocks: tuple[int, ...] = numbers_option("2-16", "numbers of blocks in train and valid, from 2 on")
    test_blocks: tuple[int, ...] = numbers_option("17-24", "numbers of blocks in gen")
    block_words: int = option(3, "words of a block (default: %(default)s)", type=whole_number(1, 64))
    bits: int = option(8, "bits of a word (default: %(default)s)", type=whole_number(1, MOST_BITS))

    def complete(self, sources: Sources) -> AssociativeRecallOptions:
        refuse_trained("--test-blocks", self.test_blocks, self.blocks)
        for flag, numbers in (("--blocks", self.blocks), ("--test-blocks", self.test_blocks)):
            if min(numbers) < 2:
                raise UsageError(f"{flag} has 1: the block after the repeated one needs a second")
        pairs = max(*self.blocks, *self.test_blocks) ** 2
        if 2 ** (self.bits * self.block_words) < POSSIBLE * pairs:
            raise UsageError(
                f"--bits {self.bits} --block-words {self.block_words} makes blocks that are often alike, so that a "
                "question has several answers: choose more of either, or fewer blocks"
            )
        return self


class AssociativeRecall(WordsOfBits):
    """``python -m data_prep associative_recall``."""

    name = "associative_recall"
    title = "associative recall"
    arch = "sg_dnc_recall"
    splits = ("blocks",)
    options = AssociativeRecallOptions

    def subsets(self, options: AssociativeRecallOptions) -> Mapping[str, Draw]:
        def draw(blocks: tuple[int, ...]) -> Draw:
            def one(generator: RandomState) -> Example:
                number = one_of(generator, blocks)
                drawn = [words(generator, options.block_words, options.bits) for _ in range(number)]
                return example(drawn, generator.randint(number - 1))

            return one

        return {"train": draw(options.blocks), "valid": draw(options.blocks), "gen": draw(options.test_blocks)}

    def bits(self, options: AssociativeRecallOptions) -> Bits:
        # Targets have the flags too, as published, although none is ever set.
        side = {"width": options.bits, "markers": {NEXT: "10", QUERY: "01"}}
        return {"source": side, "target": side}

    def rule(self, options: AssociativeRecallOptions) -> str:
        trained, more = (format_lengths(list(numbers)) for numbers in (options.blocks, options.test_blocks))
        return f"train and valid have {trained} blocks, gen {more}"


def example(blocks: list[list[str]], asked: int) -> Example:
    """The rows of some blocks and the question what follows block ``asked``."""
    last = len(blocks) - 1
    source = [row for i, block in enumerate(blocks) for row in (*block, QUERY if i == last else NEXT)]
    answer = blocks[asked + 1]
    source += [*blocks[asked], QUERY, *[BLANK] * len(answer)]
    return Example(source, [*[BLANK] * (len(source) - len(answer)), *answer], f"blocks_{len(blocks)}")

"""FIRST: is the first symbol a one? (Chiang & Cholak 2022)

    CLS 1 0 0 1 0     ->  1
    CLS 0 1 1 0 1     ->  0

Strings have symbols 0 and 1, each with probability 1/2, after CLS, the first token, from which the class is
read. The class is the symbol right after it. ``--train-lengths`` are those of the strings in ``train`` and
``valid``, ``--test-lengths`` those in ``gen``; no length may be in both. The authors train on length 10, 30, 100
or 300 and test on 1,000:

    python -m data_prep first --train-lengths 10 --test-lengths 1000 --out FOLDER

    train   10,000 strings per training length (``--train``), drawn with repetitions
    valid   1,000 distinct ones per training length (``--test``), but at most a tenth of all strings of that length
            (102 of length 10). None of them is in train.
    gen     1,000 distinct ones per test length, or all there are

Line N of raw/SUBSET.type is the length of string N without CLS, for accuracy by length. The authors draw new strings in
every step; here the files are fixed, and --seed makes others. fairseq takes sources of up to 1,024 tokens with the end
symbol: beyond length 1,022 it needs --max-source-positions.

Source: generated; Chiang & Cholak 2022, section 3, and github.com/ndnlp/parity, first.py.
"""

from __future__ import annotations

from data_prep.dataset import Pair
from data_prep.strings import CLS, SIZES, BinaryStrings


class First(BinaryStrings):
    """``python -m data_prep first``."""

    name = "first"
    title = "FIRST"
    classifier = f"{SIZES} --encoder-attention-heads 1 --readout first"

    def example(self, string: str) -> Pair:
        return Pair(" ".join([CLS, *string]), string[0])


DATASET = First()

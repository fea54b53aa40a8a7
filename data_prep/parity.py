"""PARITY: is the number of ones odd? (Chiang & Cholak 2022, after Hahn 2020)

    0 1 1 0 1 CLS     ->  1
    1 0 0 1 0 CLS     ->  0

Strings have symbols 0 and 1, each with probability 1/2, and CLS, the last token, from which the class is read. The
class is 1 for an odd number of ones. ``--train-lengths`` are those of the strings in ``train`` and ``valid``,
``--test-lengths`` those in ``gen``; no length may be in both:

    python -m data_prep parity --train-lengths 1-40 --test-lengths 50,100,1000 --out FOLDER

    train   10,000 strings per training length (``--train``), drawn with repetitions
    valid   1,000 distinct ones per training length (``--test``), but at most a tenth of all strings of that length.
            None of them is in train.
    gen     1,000 distinct ones per test length, or all there are

Line N of raw/SUBSET.type is the length of string N without CLS, for accuracy by length. The authors train on one length
and draw new strings in every step; here the files are fixed, and --seed makes others. fairseq takes sources of up to
1,024 tokens with the end symbol: beyond length 1,022 it needs --max-source-positions.

Source: generated; Chiang & Cholak 2022, section 3, and github.com/ndnlp/parity, parity.py.
"""

from __future__ import annotations

from data_prep.dataset import Pair
from data_prep.strings import CLS, SIZES, BinaryStrings


class Parity(BinaryStrings):
    """``python -m data_prep parity``."""

    name = "parity"
    title = "PARITY"
    classifier = f"{SIZES} --encoder-attention-heads 2 --readout last"

    def example(self, string: str) -> Pair:
        return Pair(" ".join([*string, CLS]), str(string.count("1") % 2))


DATASET = Parity()

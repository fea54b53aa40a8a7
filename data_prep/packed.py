"""Stores millions of pairs compactly: all text in one block of UTF-8, with the end of each sentence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from data_prep.dataset import Pair


class PackedPairs(Sequence[Pair]):
    """A sequence of pairs with 16 bytes of overhead per pair; a list has some 200.

    It is made from an iterable that is read once, and indexed by whole numbers; it has no slices.
    """

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        text, ends = bytearray(), array("q", [0])
        for pair in pairs:
            for side in pair:
                text += side.encode("utf-8")
                ends.append(len(text))
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self):,}")
        first = 2 * (index % len(self))
        start, middle, end = self._ends[first : first + 3]
        return Pair(self._text[start:middle].decode("utf-8"), self._text[middle:end].decode("utf-8"))

    def __iter__(self) -> Iterator[Pair]:
        return (self[index] for index in range(len(self)))

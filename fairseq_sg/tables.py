"""Tables as lines of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(cells: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table, its header included.

    Args:
        cells: the rows, all of one length; the first is the header.
        left: how many columns stand at the left of their column; the others stand at its right.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip() for row in cells]

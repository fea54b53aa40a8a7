"""Progress bars, on a terminal alone: where the output goes to a file, nothing is printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before a bar is shown


def progress(items: Iterable[Item], what: str, total: int | None = None, unit: str = "") -> Iterable[Item]:
    """The items, with a bar on the standard error that says ``what`` is being done, gone when it is done."""
    return bar(what, total, unit, items)


def bar(what: str, total: int | None = None, unit: str = "", items: Iterable[Item] | None = None) -> tqdm:
    """A bar to be moved by ``update``, or by iteration over ``items``."""
    return tqdm(
        items, desc=what, total=total, unit=unit, unit_scale=True, leave=False, delay=PATIENCE, disable=None, ncols=80
    )

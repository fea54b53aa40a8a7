"""Progress bars, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before a bar is shown


def progress(items: Iterable[Item], what: str, total: int | None = None, unit: str = "") -> Iterable[Item]:
    """The items, with a temporary bar on standard error that describes the work as ``what``."""
    return bar(what, total, unit, items)


def bar(what: str, total: int | None = None, unit: str = "", items: Iterable[Item] | None = None) -> tqdm:
    """A bar that advances by ``update``, or by iteration over ``items``."""
    return tqdm(
        items, desc=what, total=total, unit=unit, unit_scale=True, leave=False, delay=PATIENCE, disable=None, ncols=80
    )

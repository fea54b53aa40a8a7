"""Files that are written atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``, which it becomes at the end. After an error, ``path`` is as before.

    A pipe or a device is written to itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """JSON without escapes; what is none of its types becomes a text."""
    write_text(path, json.dumps(value, indent=indent, default=str, ensure_ascii=False) + "\n")

"""What is made once for all processes of pytest."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Calls ``make(folder)`` once; waits where another process does it."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".done")
        if not done.exists():
            make(folder)
            done.touch()
    return folder

"""Memory of a training on a CPU: what is freed stays with the process.

A step frees tensors of megabytes and allocates as many again. glibc's ``free`` gives memory back to the system where
much of it is free, and the next step pays for every page anew. ``man 3 mallopt`` has the two thresholds that decide on
this.
"""

from __future__ import annotations

import ctypes
import os
import platform

from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Larger blocks are mapped one by one and given back one by one. glibc raises its own threshold up to this by and by.
_MAPPED_FROM = 32 << 20
_NEVER = -1
#: By them the user decides, and so does ``glibc.malloc…`` in GLIBC_TUNABLES.
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Has glibc keep what this process frees, in blocks below 32 MiB; whether it does.

    The process then stays as large as it ever was. Without effect, and False, where the C library is another, or where
    the environment has one of the two thresholds or other settings of glibc's allocator.
    """
    decided = any(name in os.environ for name in _OF_THE_USER)
    if decided or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Either one alone would end glibc's own adjustment of the other at its first, small value.
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def keep_for_training(model: nn.Module) -> None:
    """``keep_freed_memory`` where the model is on a CPU."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        keep_freed_memory()

"""Memory of a training on a CPU: freed memory stays with the process.

A step frees tensors of megabytes and allocates as many again. glibc's ``free`` returns memory to the system when much
of it is free, and the next step pays for every page again. ``man 3 mallopt`` describes the two thresholds for this.
"""

from __future__ import annotations

import ctypes
import os
import platform

from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Larger blocks are mapped and returned one by one; glibc's dynamic threshold never exceeds this.
_MAPPED_FROM = 32 << 20
_NEVER = -1
#: Settings of the user that take precedence, as ``glibc.malloc…`` in GLIBC_TUNABLES does.
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Makes glibc keep the memory that this process frees, in blocks below 32 MiB; returns whether it does.

    The process then keeps its largest size. There is no effect with another C library, or with settings of glibc's
    allocator in the environment.
    """
    decided = any(name in os.environ for name in _USER_SETTINGS)
    if decided or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Set both: one alone would fix the other at its first, small value.
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def keep_for_training(model: nn.Module) -> None:
    """``keep_freed_memory`` where the model is on a CPU."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        keep_freed_memory()

"""Where Triton kernels can run, and how they are launched. Triton itself is imported by the kernels' files alone.

Kernels are in ``triton.py`` of each operator. They take float32, float16 and bfloat16, and compute in float32.

Where a factor of a product is made in a kernel (scores, weights of attention), tiles have 32 rows at most. With 64,
Triton multiplies on Hopper with asynchronous instructions that read that factor from registers, and compilers up to
Triton 3.6 and CUDA 13.2 may overwrite registers that are still being read (triton-lang/triton #9433, #11781;
fla-org/flash-linear-attention #1262). ``cvmm``, whose tiles are larger, does not overlap such products there.
"""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (3, 3)
CAPABILITY = (8, 0)
#: What Triton takes for yes in the environment.
YES = ("1", "true", "on", "yes", "y")
#: Of the second and third dimension of a grid.
LARGEST_GRID = 65535


def why_not_triton(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot run on these tensors; None where they can.

    They run on an Nvidia GPU of compute capability 8.0 or newer, and on the CPU under Triton's interpreter
    (``TRITON_INTERPRET=1`` in the environment before the first import of Triton). On a CPU without it Triton is not
    imported.
    """
    other = next((x.dtype for x in tensors if x.dtype not in DTYPES), None)
    if other is not None:
        return f"kernels take float32, float16 and bfloat16, not {str(other).removeprefix('torch.')}"
    devices = {x.device for x in tensors}
    if len(devices) != 1:
        return f"the tensors are on several devices: {', '.join(sorted(map(str, devices)))}"
    return why_not_here(devices.pop())


def require_triton(operator: str, reason: str | None) -> None:
    """Raises `ValueError` with the reason of `why_not_triton` (or of the operator), if there is one."""
    if reason is not None:
        raise ValueError(f"{operator} cannot run its implementation 'triton' here: {reason}")


@_disable_dynamo
def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a kernel on the device of the first argument; an empty grid is nothing to do.

    Raises:
        ValueError: the grid is larger than a GPU takes.
    """
    if 0 in grid:
        return
    if max(grid[1:], default=0) > LARGEST_GRID:
        raise ValueError(
            f"these tensors are too long for the Triton kernels, which cut them into {max(grid[1:]):,} tiles of at "
            f"most {LARGEST_GRID:,}: choose another implementation"
        )
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options)


def dense_rows(x: Tensor) -> Tensor:
    """x with a dense last dimension, the layout that the kernels need; the other strides may be any."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as kernels read it."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def power_of_two(size: int, least: int, most: int) -> int:
    """The smallest power of two that is not below `size`, kept between two others."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether products of matrices run asynchronously there (compute capability 9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def why_not_here(device: torch.device) -> str | None:
    """`why_not_triton` of a device: the same for a whole program."""
    return _why_not_on(device, os.environ.get("TRITON_INTERPRET", "").lower() in YES) or why_not_installed()


@cache
def why_not_installed() -> str | None:
    """Why there is no usable Triton, whatever the device; None where there is one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton

        version = triton.__version__
    except Exception as error:  # whatever a broken installation raises
        return f"Triton cannot be imported: {error}"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        return f"Triton {version} is older than {'.'.join(map(str, OLDEST))}"
    return None


@cache
def _why_not_on(device: torch.device, interpreted: bool) -> str | None:
    if device.type == "cpu":
        return None if interpreted else "the tensors are on the CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels are for Nvidia GPUs, not for {device.type if torch.version.hip is None else 'ROCm'}"
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return "compute capability {}.{} is below {}.{}".format(*found, *CAPABILITY)
    return None

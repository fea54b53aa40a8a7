"""Triton kernels as compiled for GPUs, on a machine without one: registers, memory, instructions.

    python tests/helpers/triton_compiled.py                                # all operators, for 8.0 and 9.0
    python tests/helpers/triton_compiled.py cvmm --capability 90 --quick   # one operator, at two sizes

The operators are called forward and backward with tensors on the CPU, at sizes with different tiles, with and without
the optional parts of their kernels. Launched kernels are compiled instead of run. The command fails if a kernel does
not compile, needs too much memory, adds atomically, or overlaps products unsafely.

``stack`` is the memory for spilled registers of a thread. ``products`` counts instructions of tensor cores. Hopper's,
``wgmma``, run asynchronously, which is unsafe from registers (see ``fairseq_sg/ops/triton_support.py``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fairseq_sg.ops import (
    cvmm_sorted,
    geometric_attention,
    linear_attention,
    relative_attention,
    sort_selection,
    triton_support,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH, HEADS, LENGTH = 2, 4, 130
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
#: Maximum bytes of shared memory per program, by compute capability.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its call, and the resources of a program. Memory in bytes; registers per thread."""

    kernel: str
    call: str
    registers: int
    stack: int
    shared: int
    mma: int
    wgmma: int
    from_registers: int
    running: int
    atomics: int


class Absent:
    """The driver of a missing GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> str:
        return f"absent {self.capability}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_interface(self) -> Any:
        return torch.cuda


class Collection:
    """A context that compiles the kernels that operators launch, for one compute capability.

    The process has no GPU afterwards.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.call = ""
        self.found: dict[str, Compiled] = {}

    def __enter__(self) -> Collection:
        driver.set_active(Absent(self.capability))
        self._before = JITFunction.run, triton_support._why_not_on, triton_support.is_hopper
        run, collection = JITFunction.run, self

        def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            made = run(kernel, *arguments, grid=grid, warmup=True, **options)
            if made.hash not in collection.found:
                collection.found[made.hash] = described(kernel.fn.__name__, collection.call, made)

        JITFunction.run = compile_only
        triton_support._why_not_on = lambda device, interpreted: None
        triton_support.is_hopper = lambda device: self.capability == 90
        return self

    def __exit__(self, *error: Any) -> None:
        JITFunction.run, triton_support._why_not_on, triton_support.is_hopper = self._before


def described(kernel: str, call: str, made: Any) -> Compiled:
    """Instruction counts of the assembler text; registers and stack of the machine code."""
    text = made.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    of = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    products = re.findall(r"\bwgmma\.mma_async\S* \{[^}]*\}, *(\{|%)", text)
    waits = [int(left) for left in re.findall(r"\bwgmma\.wait_group\S* (\d+)", text)]
    return Compiled(
        kernel=kernel.strip("_").removesuffix("_kernel"),
        call=call,
        registers=of["REG"],
        stack=of["STACK"],
        shared=made.metadata.shared,
        mma=len(re.findall(r"(?<!wg)\bmma\.sync", text)),
        wgmma=len(products),
        from_registers=products.count("{"),
        running=max(waits, default=0),
        atomics=len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", text, re.MULTILINE)),
    )


# Calls of the operators, for a dtype and possibly fewer sizes.


def heads(length: int, width: int, dtype: torch.dtype) -> Tensor:
    """(B, H, N, width) as in models, after a time-first projection."""
    return torch.randn(BATCH, length, HEADS, width, dtype=dtype).transpose(1, 2).requires_grad_()


def padding(length: int, padded: bool) -> Tensor | None:
    return torch.zeros(BATCH, length, dtype=torch.bool) if padded else None


def call_linear(dtype: torch.dtype, dim: int, width: int, with_state: bool) -> None:
    q, k, v = heads(LENGTH, dim, dtype), heads(LENGTH, dim, dtype), heads(LENGTH, width, dtype)
    state = torch.randn(BATCH, HEADS, dim, width), torch.randn(BATCH, HEADS, dim)
    more = dict(state=state, return_state=True, key_padding_mask=padding(LENGTH, True)) if with_state else {}
    out = linear_attention(q, k, v, causal=True, implementation="triton", **more)
    (out[0] if more else out).sum().backward()


def call_geometric(dtype: torch.dtype, keys: int, causal: bool, padded: bool) -> None:
    logits = torch.randn(BATCH, HEADS, min(keys, 16), keys, dtype=dtype, requires_grad=True)
    options = dict(
        causal=causal, key_padding_mask=padding(keys, padded), offset=keys - logits.shape[2] if causal else 0
    )
    geometric_attention(logits, implementation="triton", **options).sum().backward()


def call_cvmm(dtype: torch.dtype, width: int, size: int, experts: int) -> None:
    x = torch.randn(1500, width, dtype=dtype, requires_grad=True)
    first, second = (torch.randn(experts, *s, dtype=dtype, requires_grad=True) for s in ((width, size), (size, width)))
    weights = torch.rand(1500, 2, requires_grad=True)
    routing = sort_selection(torch.randint(experts, (1500, 2)), experts)
    u = cvmm_sorted(x, routing, first, from_tokens=True, implementation="triton")
    y = cvmm_sorted(u, routing, second, to_tokens=True, relu=True, weights=weights, implementation="triton")
    y.sum().backward()


def call_relative(dtype: torch.dtype, dim: int, width: int, causal: bool, padded: bool) -> None:
    q, position, k = (heads(LENGTH, dim, dtype) for _ in range(3))
    v = heads(LENGTH, width, dtype)
    p = torch.randn(HEADS, 2 * LENGTH - 1, dim, dtype=dtype, requires_grad=True)
    options = dict(causal=causal, key_padding_mask=padding(LENGTH, padded), dropout_p=0.1 * padded)
    relative_attention(q, position, k, v, p, implementation="triton", **options).sum().backward()


WIDTHS = [(64, 64), (8, 8), (16, 16), (32, 32), (80, 24), (128, 128), (256, 256)]
#: operator -> its call and the arguments; the first two are those of ``--quick``.
CALLS: dict[str, tuple[Callable[..., None], list[tuple]]] = {
    "linear_attention": (
        call_linear,
        [(*w, with_state) for w in WIDTHS for with_state in (True, False)],
    ),
    "geometric_attention": (
        call_geometric,
        [(keys, *options) for keys in (300, 5, 50, 2048, 8192) for options in ((True, True), (False, False))],
    ),
    "cvmm": (
        call_cvmm,
        [(512, 128, 16), (80, 40, 16), (24, 5, 3), (128, 33, 3), (64, 16, 300), (1024, 256, 1)],
    ),
    "relative_attention": (
        call_relative,
        [(*w, *options) for w in WIDTHS for options in ((True, True), (False, True), (False, False))],
    ),
}


def compiled(operator: str, dtype: str, capability: int, quick: bool) -> Iterable[Compiled]:
    """All kernels launched by the calls of an operator."""
    function, calls = CALLS[operator]
    with Collection(capability) as collection:
        for arguments in calls[:2] if quick else calls:
            collection.call = ", ".join(map(str, arguments))
            function(DTYPES[dtype], *arguments)
    return collection.found.values()


def wrong(one: Compiled, capability: int) -> str | None:
    """The reason why a kernel must not be used, or None."""
    if one.shared > SHARED[capability]:
        return f"needs more than {SHARED[capability]} bytes of shared memory"
    if one.atomics:
        return "adds atomically, in an order that varies"
    if one.from_registers and one.running:
        return "leaves asynchronous products running that read registers"
    return None


def summary(found: list[Compiled]) -> list[list[str]]:
    """A row for each kernel: its maximum resources per program, over all calls."""
    rows = []
    for name in dict.fromkeys(one.kernel for one in found):
        of = [one for one in found if one.kernel == name]
        most = {key: max(getattr(one, key) for one in of) for key in Compiled.__dataclass_fields__ if key != "kernel"}
        products = [f"{kind} {most[kind]}" for kind in ("mma", "wgmma") if most[kind]]
        if most["from_registers"]:
            products[-1] += f" ({most['from_registers']} from registers)"
        rows.append([name, str(len(of)), str(most["registers"]), str(most["stack"]), f"{most['shared'] / 1024:.0f}"])
        rows[-1].append(", ".join(products) or "none")
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(CALLS)}; all by default")
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], choices=SHARED, help="80 is 8.0")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--quick", action="store_true", help="two calls of each operator")
    options = parser.parse_args(arguments)
    if unknown := set(options.operators) - set(CALLS):
        parser.error(f"no operator {', '.join(sorted(unknown))}: choose from {', '.join(CALLS)}")
    torch.set_num_threads(1)
    rows = []
    for capability in options.capability:
        for operator in options.operators or CALLS:
            for dtype in options.dtype:
                found = list(compiled(operator, dtype, capability, options.quick))
                for one in found:
                    if problem := wrong(one, capability):
                        sys.exit(f"{operator}, {dtype}, {capability / 10}: a kernel {problem}: {one}")
                rows += [[operator, f"{capability / 10}", dtype, *row] for row in summary(found)]
                print(f"{operator}, {dtype}, {capability / 10}: {len(found)} kernels", file=sys.stderr)
    header = ["operator", "capability", "dtype", "kernel", "compiled", "registers", "stack B", "shared KiB", "products"]
    for row in (header, *rows):
        print(" | ".join(row))


if __name__ == "__main__":
    main()

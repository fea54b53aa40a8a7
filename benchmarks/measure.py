"""The method of the benchmarks: check results against float64, then time them interleaved, beside the machine's limits.

A ``Case`` is one operator at one size; its ``Contender``s are functions of the same inputs. ``measure`` computes the
value of each and its gradients for all inputs, and compares them with the naive form in float64. It times the correct
ones, one sample of each per round, so that other work of the machine affects all alike.

On a CPU with one thread, time is processor time, which excludes other processes. On a GPU it is the time between events
on the stream, including Python's launch time if that is longer.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fairseq_sg.errors import first_line, in_one_line
from fairseq_sg.kernels.timing import Run, differentiated, interleaved, quartiles
from fairseq_sg.kernels.verify import errors
from fairseq_sg.modules.cpu.memory import keep_freed_memory

Function = Callable[..., Tensor]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Maximum error, relative to the largest number of a correct result.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def as_in_training() -> None:
    """Computes with one thread, and keeps freed memory in the process as a training on a CPU does (docs/speed.md).

    Otherwise a measurement after a larger one would pay for memory that the system has reclaimed in between.
    """
    torch.set_num_threads(1)
    keep_freed_memory()


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
        name: in tables.
        function: of the case's inputs, differentiable.
        ours: whether it is this project's.
        exact, inputs: the naive form and the inputs of a contender that computes something else than the case, such as
            softmax attention or a dense layer; None for those of the case.
        skip: the reason not to run it; empty to run it.
    """

    name: str
    function: Function
    ours: bool = True
    exact: Function | None = None
    inputs: Sequence[Tensor] | None = None
    skip: str = ""


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        operator, size: its place in tables and plots.
        inputs: all of them get a gradient.
        shape: of the value.
        exact: the naive form, of the inputs in float64.
        flops: of forward and backward, the known minimum; only matrix products count.
        part: the part of every input, output and gradient that is computed in float64 (all of it is timed).
        activations: the inputs (by number) that are no weights; None if the memory that is kept is not wanted.
    """

    operator: str
    size: int
    inputs: Sequence[Tensor]
    shape: Sequence[int]
    exact: Function
    contenders: Sequence[Contender]
    flops: float
    part: Callable[[Tensor], Tensor] = lambda x: x
    activations: Collection[int] | None = None


@dataclass
class Row:
    """The result for one contender. Times in milliseconds, memory in bytes; None if not measured.

    Attributes:
        status: ``timed``, ``wrong`` (and therefore not timed), ``failed`` (it raised) or ``skipped``.
        reason: for a status other than ``timed``.
        error: the maximum over value and gradients, relative to the largest correct number.
        low, median, high: of the times of all rounds, with the quartiles.
        peak, kept: the most memory during forward and backward, and what autograd keeps in between.
        floor, floor_of: the minimum time on this machine, and whether bytes or FLOPs limit it.
    """

    operator: str
    size: int
    contender: str
    ours: bool
    status: str
    reason: str = ""
    error: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    peak: int | None = None
    kept: int | None = None
    floor: float | None = None
    floor_of: str = ""


@dataclass(frozen=True)
class Machine:
    """The limits of a device: bytes per second of copies of several sizes, and FLOPs per second of a matrix product."""

    bandwidths: Sequence[tuple[int, float]]
    flops: float

    def floor(self, working_set: int, traffic: int, flops: float) -> tuple[float, str]:
        """The minimum milliseconds for these bytes and FLOPs, and which of the two limits.

        The bandwidth is that of the largest copy within the working set, so data that fit into a cache are
        compared with the cache.
        """
        fitting = [rate for size, rate in self.bandwidths if size <= working_set] or [self.bandwidths[0][1]]
        by_bytes, by_flops = 1e3 * traffic / fitting[-1], 1e3 * flops / self.flops
        return (by_bytes, "bytes") if by_bytes >= by_flops else (by_flops, "FLOPs")

    def __str__(self) -> str:
        copies = ", ".join(f"{rate / 1e9:,.1f} GB/s for {size / 1e6:g} MB" for size, rate in self.bandwidths)
        return f"copies (read and written bytes): {copies}; product of square matrices: {self.flops / 1e9:,.0f} GFLOP/s"


def measure_machine(device: str, dtype: torch.dtype, quick: bool) -> Machine:
    """Medians of copies and of a product in the dtype of the benchmarks."""
    if quick:
        sizes, width = (1 << 20,), 128
    else:
        sizes, width = ((1 << 22, 1 << 26, 1 << 30), 8192) if device == "cuda" else ((1 << 18, 1 << 22, 1 << 27), 1024)
    bandwidths = []
    for size in sizes:
        source = torch.zeros(size // 8, device=device)
        target = torch.empty_like(source)
        times = interleaved({"copy": lambda target=target, source=source: target.copy_(source)}, 5, device)["copy"]
        bandwidths.append((size, 1e3 * size / statistics.median(times)))
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = statistics.median(interleaved({"product": lambda: a @ b}, 5, device)["product"])
    return Machine(bandwidths, 1e3 * 2 * width**3 / product)


def peak_memory(run: Run, device: str) -> int:
    """Peak bytes of a run, including its results, beyond the memory in use before.

    On a CPU these are torch's allocations as recorded by its profiler, without those of libraries, such as
    buffers of matrix products.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Its log has two lines per profile, which would interrupt the tables.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def kept_activations(weights: Iterable[Tensor], run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of a run, without weights, each storage once."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run()
    del loss
    return sum(kept.values())


def error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[float, str]:
    """The maximum error over value and gradients, and its place.

    Each error is relative to the largest number of its own tensor, or to a hundredth of the largest of all if that is
    more. So a vanishing gradient, such as that of queries with a single key, is compared with one that does not vanish.
    """
    names = ["value", *(f"gradient of input {number}" for number in range(1, len(truth)))]
    by_name = (dict(zip(names, tensors, strict=True)) for tensors in (found, truth))
    each = errors(*by_name)
    worst = max(each, key=lambda name: each[name])
    return each[worst], worst


def measure(case: Case, rounds: int, device: str, machine: Machine) -> list[Row]:
    """Rows of all contenders, in order; only those with correct value and gradients are timed."""
    dtype = case.inputs[0].dtype
    weighting = torch.randn(*case.shape, generator=torch.Generator().manual_seed(0)).to(device)
    truths: dict[Function, list[Tensor]] = {}
    rows: dict[str, Row] = {}
    runs: dict[str, Run] = {}
    for contender in case.contenders:
        row = rows[contender.name] = Row(case.operator, case.size, contender.name, contender.ours, "timed")
        if contender.skip:
            row.status, row.reason = "skipped", contender.skip
            continue
        exact = contender.exact or case.exact
        inputs = contender.inputs or case.inputs
        if exact not in truths:
            some = [case.part(x).double() for x in inputs]
            truths[exact] = differentiated(exact, some, case.part(weighting).double())()
        try:
            run = differentiated(contender.function, inputs, weighting)
            row.error, place = error([case.part(x) for x in run()], truths[exact])
        except Exception as raised:  # any error becomes a row of the table
            # Operators raise this if an implementation cannot run here.
            cannot = contender.ours and isinstance(raised, ValueError)
            row.status, row.reason = ("skipped", first_line(raised)) if cannot else ("failed", in_one_line(raised))
            continue
        if row.error <= ALLOWED[dtype]:
            runs[contender.name] = run
            if case.activations is not None:
                leaves = [x.detach().requires_grad_() for x in inputs]
                weights = [x for number, x in enumerate(leaves) if number not in case.activations]
                row.kept = kept_activations(weights, partial(contender.function, *leaves))
        else:
            row.status = "wrong"
            row.reason = f"{place} is off by {row.error:.1e}, more than the allowed {ALLOWED[dtype]:.0e}"
    truths.clear()
    for name, run in runs.items():
        rows[name].peak = peak_memory(run, device)
    for name, times in interleaved(runs, rounds, device).items():
        row = rows[name]
        row.low, row.median, row.high = quartiles(times)
    # Forward reads inputs and writes the value; backward reads inputs and its gradient, and writes gradients.
    read = sum(x.numel() * x.element_size() for x in case.inputs)
    written = math.prod(case.shape) * case.inputs[0].element_size()
    floor, of = machine.floor(read + written, 3 * read + 2 * written, case.flops)
    for row in rows.values():
        row.floor, row.floor_of = floor, of
    return list(rows.values())

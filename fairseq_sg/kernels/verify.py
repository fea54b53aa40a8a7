"""Every implementation of an operator against its equation in float64: values, gradients, repetition, memory.

An implementation is verified on a device if, in every case (`fairseq_sg.kernels.cases`) and dtype,

- its value, with gradients and without, and every gradient are as exact as those of the equation, the naive
  implementation, in the same dtype: the largest error is at most `TIMES` of its, or `LEAST`, and never above `MOST`;
- two runs are equal bit for bit, if it is a compiled kernel;
- a compiled kernel writes nothing outside the tensors that it is given, and writes all of those that it makes.

Errors are relative to the largest number of a tensor, or to a hundredth of the largest of all tensors of the case if
that is more, so that a vanishing gradient is compared with one that does not vanish. Inputs are of order 1, and a small
gradient is the difference of terms of this order, which have been rounded: errors are absolute below `SMALL`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_sg.errors import first_line, in_one_line, out_of_memory
from fairseq_sg.kernels.cases import CASES, Case, Make
from fairseq_sg.kernels.processes import isolated
from fairseq_sg.kernels.timing import synchronize
from fairseq_sg.ops.operators import NAIVE, OPERATORS, TRITON
from fairseq_sg.ops.triton_support import why_not_here
from fairseq_sg.ops.tuning import dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIMES = 3
LEAST = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MOST = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SMALL = {torch.float32: 0.2, torch.float16: 1.0, torch.bfloat16: 1.0}
#: What an error says that is a refusal: of our operators, and of torch, also where its compiler reports another error.
REFUSALS = ("cannot run its implementation", "NotImplementedError")
#: Rows of NaN before and after a tensor that a kernel writes.
GUARD_ROWS = 64
#: Seconds for one case in one dtype, which on a GPU includes the compilation of kernels.
LIMIT = 120.0


def errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor], small: float = 0.0) -> dict[str, float]:
    """The largest error of each tensor, relative as the module says; infinite for NaN and for another shape."""
    largest = {name: float(exact.abs().max()) if exact.numel() else 0.0 for name, exact in truth.items()}
    result = {}
    for name, exact in truth.items():
        x, scale = found[name], max(largest[name], max(largest.values()) / 100, small)
        if x.shape != exact.shape:
            result[name] = math.inf
            continue
        error = float((x.double() - exact).abs().max()) if exact.numel() else 0.0
        result[name] = math.inf if math.isnan(error) else error / scale if scale else error
    return result


def with_gradients(case: Case, implementation: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a case, and the gradient of every input under a fixed random weighting of them all."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = case.function(implementation, **leaves)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)).sum()
        for out in outputs.values()
    )
    gradients = torch.autograd.grad(total, list(leaves.values()))
    values = {name: out.detach() for name, out in outputs.items()}
    return values | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


@torch.no_grad()
def without_gradients(case: Case, implementation: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a case, for which torch may choose other kernels than where it needs gradients."""
    return case.function(implementation, **inputs)


class GuardRows(TorchDispatchMode):
    """Within the block, tensors that Python code makes lie between rows of NaN, and those that are empty hold NaN."""

    MAKERS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    MAKERS |= {"zeros", "zeros_like", "new_zeros"}

    def __init__(self) -> None:
        super().__init__()
        self._guarded: list[tuple[Tensor, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in self.MAKERS or not out.is_floating_point():
            return out
        return self.guarded(out, fill="zeros" in name)

    def guarded(self, x: Tensor, fill: bool = True) -> Tensor:
        """A copy of x between rows of NaN, of the same strides; without ``fill`` it holds NaN."""
        if x.numel() == 0:
            return x
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        # Multiples of 64 numbers: a GPU loads 16 bytes at once where it can.
        margin = -(-GUARD_ROWS * x.shape[-1] // 64) * 64 if x.dim() else 64
        buffer = x.new_full((extent + 2 * margin,), math.nan)
        self._guarded.append((buffer, margin, extent))
        copy = buffer.as_strided(x.shape, x.stride(), margin)
        return copy.copy_(x) if fill else copy

    def intact(self) -> bool:
        """Whether all rows of NaN are there still."""
        ends = ((buffer[:margin], buffer[margin + extent :]) for buffer, margin, extent in self._guarded)
        return all(bool(end.isnan().all()) for both in ends for end in both)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape and bool(torch.equal(a.isnan(), b.isnan())) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


@dataclass(frozen=True)
class Result:
    """One case in one dtype.

    Attributes:
        case, dtype: which.
        error: the largest.
        problem: what is wrong; empty for nothing.
        cannot: why the implementation does not take this call; empty if it does.
    """

    case: str
    dtype: str
    error: float = 0.0
    problem: str = ""
    cannot: str = ""


def check(
    operator: str, implementation: str, device: str, tiny: bool = False, part: int = 0, parts: int = 1
) -> Iterator[Result]:
    """Results of an implementation in all cases and dtypes; of a kernel under Triton's interpreter, in tiny ones.

    Args:
        part, parts: every ``parts``-th of them alone, from this one on.
    """
    if implementation == TRITON and device == "cpu" and why_not_here(torch.device(device)) is None:
        import fairseq_sg.kernels.interpreter  # noqa: F401

        tiny = True
    for case, dtype in islice(product(CASES[operator](Make(device), tiny), DTYPES), part, None, parts):
        yield check_case(case, implementation, dtype)


def first_step(device: str) -> Iterator[float]:
    """Something that works wherever a device does."""
    yield torch.ones(1, device=device).sum().item()


def check_case(case: Case, implementation: str, dtype: torch.dtype) -> Result:
    """The result of a case in one dtype."""
    found = partial(Result, case.name, dtype_name(dtype))
    inputs = case.inputs_in(dtype)
    compiled = implementation == TRITON
    try:
        if compiled:
            guard = GuardRows()
            inside = {name: guard.guarded(x) for name, x in inputs.items()}
            # A GPU's backward pass has a thread of its own, where the guard would not be.
            with guard, torch.autograd.set_multithreading_enabled(False):
                runs = [with_gradients(case, implementation, inside) for _ in range(2)]
                alone = without_gradients(case, implementation, inside)
        else:
            runs = [with_gradients(case, implementation, inputs)]
            alone = without_gradients(case, implementation, inputs)
        synchronize(next(iter(inputs.values())).device.type)
        truth = with_gradients(case, NAIVE, {name: x.double() for name, x in inputs.items()})
        naive = errors(with_gradients(case, NAIVE, inputs), truth, SMALL[dtype])
    except Exception as error:  # whatever a broken kernel raises
        raised = f"{type(error).__name__}: {error}"
        if out_of_memory(error) or any(words in raised for words in REFUSALS):
            return found(cannot=first_line(error))
        return found(problem=in_one_line(error))
    mine = errors(runs[0], truth, SMALL[dtype])
    for of, which in ((mine, ""), (errors(runs[0] | alone, truth, SMALL[dtype]), " without gradients")):
        for name, error in of.items():
            allowed = min(max(TIMES * naive[name], LEAST[dtype]), MOST[dtype])
            if not error <= allowed:
                return found(error, f"{name}{which} is off by {error:.1e}, and {allowed:.1e} is allowed")
    problem = ""
    if compiled:
        if not all(same_bits(runs[0][name], runs[1][name]) for name in mine):
            problem = "two runs are not equal bit for bit"
        if not all(same_bits(inside[name], x) for name, x in inputs.items()):
            problem = "it writes into its inputs"
        if not guard.intact():
            problem = "it writes outside its tensors"
    return found(max(mine.values()), problem)


@dataclass
class Verdict:
    """What was found about an implementation.

    Attributes:
        operator, implementation: which.
        results: of all cases that ended.
        ended: why the process ended before the last case; empty if it did not.
        seconds: taken.
    """

    operator: str
    implementation: str
    results: list[Result] = field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong, in one line; empty for nothing."""
        for result in self.results:
            if result.problem:
                return f"{result.case}, {result.dtype}: {result.problem}"
        if self.ended:
            return f"{self.ended}, after {len(self.results)} cases"
        return ""

    @property
    def cannot(self) -> str:
        """Why it runs nowhere here; empty if it does somewhere."""
        every = [result.cannot for result in self.results]
        return every[0] if every and all(every) and not self.ended else ""

    @property
    def without_memory(self) -> int:
        """How many cases had no memory, so that nothing is known of them."""
        return sum(out_of_memory(result.cannot) for result in self.results)

    @property
    def unknown(self) -> bool:
        """Whether it is neither verified nor fails, for want of memory."""
        return bool(self.without_memory) and not self.problem

    def worst(self, dtype: str) -> float:
        return max((r.error for r in self.results if r.dtype == dtype and not r.cannot), default=0.0)


def verdict_of(
    operator: str,
    implementation: str,
    device: str,
    tiny: bool = False,
    limit: float = LIMIT,
    task: Any = check,
    parts: int = 1,
) -> Verdict:
    """Runs `check` in processes of its own, which may crash or hang.

    Args:
        operator, implementation, device, tiny: as for `check`.
        limit: seconds for a case.
        task: what to run instead of `check`, such as one that breaks the implementation first.
        parts: processes that share the cases.
    """
    start = time.monotonic()
    tasks = [partial(task, operator, implementation, device, tiny, part, parts) for part in range(parts)]
    with ThreadPoolExecutor(parts) as pool:
        found = list(pool.map(lambda task: isolated(task, limit), tasks))
    results = [result for of_part, _ in found for result in of_part]
    ended = next((why for _, why in found if why), "")
    return Verdict(operator, implementation, results, ended, time.monotonic() - start)


def everything() -> list[tuple[str, str]]:
    """All operators with all of their implementations."""
    return [(operator, name) for operator, known in sorted(OPERATORS.items()) for name in known.implementations]

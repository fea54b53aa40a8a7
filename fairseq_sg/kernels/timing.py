"""Times of functions in interleaved rounds: one sample of each a round, so that other work of the machine affects all.

On a CPU with one thread, time is processor time, which excludes other processes. On a GPU it is the time between events
on the stream, including Python's launch time if that is longer.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Run = Callable[[], object]

#: Minimum milliseconds of a sample; faster functions are called several times.
SHORTEST = 25.0
WARM_UP = 2


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Run, calls: int, device: str) -> float:
    """The mean time of one of ``calls`` calls."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        run()
    return 1e3 * (clock() - start) / calls


def interleaved(
    runs: dict[str, Run], rounds: int, device: str, shortest: float | None = None
) -> dict[str, list[float]]:
    """Milliseconds of every run in every round: one sample of each per round, after untimed warm-up rounds.

    The order changes between rounds, because a run affects the next one through caches and the allocator. If a sample
    consists of several short calls, an untimed call precedes them for the same reason. A sample takes at least
    ``shortest`` milliseconds, by default `SHORTEST`.
    """
    calls, shortest = {}, SHORTEST if shortest is None else shortest
    for name, run in runs.items():
        for _ in range(WARM_UP):
            once = milliseconds(run, 1, device)
        calls[name] = max(1, math.ceil(shortest / max(once, 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            if calls[name] > 1:
                runs[name]()
            times[name].append(milliseconds(runs[name], calls[name], device))
    return times


def medians(runs: dict[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of every run."""
    return {name: statistics.median(times) for name, times in interleaved(runs, rounds, device).items()}


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; for a single number, the number."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, statistics.median(times), high


def differentiated(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], weighting: Tensor
) -> Callable[[], list[Tensor]]:
    """A run that returns the value and the gradients of all inputs, of the value weighted by ``weighting``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    weightings = {weighting.dtype: weighting}

    def run() -> list[Tensor]:
        out = function(*leaves)
        if out.dtype not in weightings:
            weightings[out.dtype] = weighting.to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, weightings[out.dtype])]

    return run

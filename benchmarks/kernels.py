"""Triton kernels on a GPU, against the same operators in torch and against the methods they replace.

    python -m benchmarks.kernels linear_attention      # causal, forward and backward by length; softmax beside
    python -m benchmarks.kernels geometric_attention   # forward and backward by length
    python -m benchmarks.kernels cvmm                  # forward and backward by number of experts; a dense layer beside
    python -m benchmarks.kernels relative_attention    # forward and backward by length; torch's flex_attention beside
    python -m benchmarks.kernels causal_relative_attention

Results are compared before timing. Times are medians of interleaved rounds. Compare them as ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import publish, table, where
from fairseq_sg.ops import (
    cvmm_sorted,
    geometric_attention,
    linear_attention,
    relative_attention,
    sort_selection,
)
from fairseq_sg.ops.triton_support import why_not_triton

HEADS = 8
POSITIONS = 8192  # per batch, for all lengths
CHOSEN, SIZE = 4, 128  # experts per token, and hidden units of each
# Sequence lengths; for cvmm, numbers of experts.
LENGTHS = {
    "linear_attention": (32, 64, 256, 1024, 4096),
    "geometric_attention": (16, 50, 200, 1000),
    "cvmm": (16, 32, 64, 128),
    "relative_attention": (32, 64, 256, 1024, 2048),
    "causal_relative_attention": (32, 64, 256, 1024, 2048),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Run = Callable[[], list[Tensor]]


def interleaved(runs: dict[str, Run], rounds: int) -> dict[str, tuple[float, float]]:
    """Median and interquartile range in milliseconds on the GPU, without the first five rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 5):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if number >= 5:
                times[name].append(begin.elapsed_time(end))
    found = {}
    for name, measured in times.items():
        low, _, high = statistics.quantiles(measured, n=4)
        found[name] = statistics.median(measured), high - low
    return found


def peak(run: Run) -> float:
    """Peak megabytes of a run, beyond the memory in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def check(runs: dict[str, Run], exact: list[Tensor], dtype: torch.dtype) -> None:
    """Stops if a result, value or gradient, is farther from float64 than 5 times the torch path and some roundings."""
    errors = {
        name: [float((x.double() - truth).abs().max()) for x, truth in zip(run(), exact, strict=True)]
        for name, run in runs.items()
    }
    for name in runs:
        for ours, theirs, truth in zip(errors[name], errors["torch"], exact, strict=True):
            allowed = 5 * theirs + 8 * torch.finfo(dtype).eps * float(truth.abs().max())
            if not ours <= allowed:
                sys.exit(f"kernels: {name}: wrong result, error {ours:.3g}, allowed {allowed:.3g}; nothing was timed")


def differentiated(function: Callable[..., Tensor], *inputs: Tensor) -> Run:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    weighting = torch.randn_like(function(*leaves))

    def run() -> list[Tensor]:
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, weighting.to(out.dtype))]

    return run


def compared(
    function: Callable[..., Tensor], inputs: list[Tensor], in_torch: str, others: Sequence[str] = (), seed: int = 1
) -> tuple[dict[str, Run], list[Tensor]]:
    """Runs of the implementations with one weighting of the outputs, and the results in float64."""

    def of(implementation: str, *tensors: Tensor) -> Run:
        torch.manual_seed(seed)
        return differentiated(lambda *x: function(*x, implementation=implementation), *tensors)

    torch.manual_seed(seed)
    weighting = torch.randn_like(function(*inputs, implementation=in_torch))
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out = function(*leaves, implementation=in_torch)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, weighting.double())]
    named = {"triton": "triton", "torch": in_torch} | {name: name for name in others}
    return {name: of(implementation, *inputs) for name, implementation in named.items()}, exact


def cases(what: str, length: int, dim: int, dtype: torch.dtype) -> tuple[dict[str, Run], list[Tensor]]:
    batch = max(POSITIONS // length, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    if what == "linear_attention":
        q, k = (torch.nn.functional.elu(normal(batch, HEADS, length, dim).float()).add(1).to(dtype) for _ in range(2))
        v = normal(batch, HEADS, length, dim)
        runs, exact = compared(lambda *x, **options: linear_attention(*x, causal=True, **options), [q, k, v], "chunked")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        runs["softmax"] = differentiated(lambda *x: sdpa(*x, is_causal=True), q, k, v)
        return runs, exact
    if what == "cvmm":
        return mixture_cases(length, HEADS * dim, dtype)
    if what.endswith("relative_attention"):
        # Makes flex_attention compile for each length separately.
        torch.compiler.reset()
        heads = [normal(batch, HEADS, length, dim) for _ in range(4)]
        attention = partial(relative_attention, causal=what.startswith("causal"))
        return compared(attention, [*heads, normal(HEADS, 2 * length - 1, dim)], "shift", ["flex"])
    rows = max(POSITIONS // length, 1)
    return compared(geometric_attention, [normal(rows, HEADS, length, length)], "scan")


def mixture_cases(experts: int, width: int, dtype: torch.dtype) -> tuple[dict[str, Run], list[Tensor]]:
    """A mixture of experts with sorted tokens, and a dense layer with as many FLOPs."""

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") / shape[-2] ** 0.5).to(dtype)

    x = torch.randn(POSITIONS, width, device="cuda").to(dtype)
    weights, selection = torch.rand(POSITIONS, experts, device="cuda").topk(CHOSEN)
    routing = sort_selection(selection, experts, complete=True)

    def mixture(x: Tensor, a: Tensor, b: Tensor, weights: Tensor, implementation: str) -> Tensor:
        u = cvmm_sorted(x, routing, a, from_tokens=True, implementation=implementation)
        options = {"relu": True, "weights": weights, "implementation": implementation}
        return cvmm_sorted(u, routing, b, to_tokens=True, **options)

    inputs = [x, normal(experts, width, SIZE), normal(experts, SIZE, width), weights]
    runs, exact = compared(mixture, inputs, "grouped")
    hidden = CHOSEN * SIZE
    runs["dense"] = differentiated(lambda x, a, b: (x @ a).relu() @ b, x, normal(width, hidden), normal(hidden, width))
    return runs, exact


def rows_of(what: str, dim: int, dtype: torch.dtype, rounds: int) -> list[tuple[str, ...]]:
    rows = []
    for length in LENGTHS[what]:
        runs, exact = cases(what, length, dim, dtype)
        check({name: runs[name] for name in ("triton", "torch", "flex") if name in runs}, exact, dtype)
        memory = {name: peak(run) for name, run in runs.items()}
        times = interleaved(runs, rounds)
        base = times["triton"][0]
        for name, (median, spread) in times.items():
            rows.append(
                (f"{length:,}", name, f"{median:.3f}", f"{spread:.3f}", f"{median / base:.2f}", f"{memory[name]:.1f}")
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=LENGTHS)
    parser.add_argument("--dim", type=int, default=64, help="width of a head (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds (default 50)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also put the table into this file (RESULTS.md)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels: torch finds no GPU, and these kernels need one")
    dtype = DTYPES[args.dtype]
    reason = why_not_triton(torch.empty(0, dtype=dtype, device="cuda"))
    if reason is not None:
        sys.exit(f"kernels: {reason}")
    torch.manual_seed(0)
    command = f"`python -m benchmarks.kernels {args.what} --dim {args.dim} --dtype {args.dtype} --rounds {args.rounds}`"
    about = f"median of {args.rounds} interleaved rounds, and interquartile range; {command}; {where(gpu=True)}.\n\n"
    if args.what == "cvmm":
        text = (
            f"Forward and backward of a mixture of experts of {SIZE} units, {CHOSEN} a token, and of a dense layer of "
            f"{CHOSEN * SIZE} units, {POSITIONS:,} tokens of width {HEADS * args.dim}, {args.dtype}; {about}"
        )
        header = ("experts", "implementation", "ms", "spread", "times triton", "MB at the peak")
        text += table(header, rows_of(args.what, args.dim, dtype, args.rounds))
    else:
        text = f"Forward and backward, {POSITIONS:,} positions in a batch, {HEADS} heads, {args.dtype}; {about}"
        header = ("length", "implementation", "ms", "spread", "times triton", "MB at the peak")
        text += table(header, rows_of(args.what, args.dim, dtype, args.rounds))
    publish(f"Kernels: {args.what} ({args.dtype}, width {args.dim})", text, args.results)


if __name__ == "__main__":
    main()

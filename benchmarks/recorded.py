"""A recorded training step on a GPU (``--step-graphs``): its milliseconds, and its kernels.

    python -m benchmarks.recorded                                          # SCAN, batch 256: every model in every way
    python -m benchmarks.recorded --models relative --ways recorded TF32
    python -m benchmarks.recorded --models relative --arguments="--batch-size 64"
    python -m benchmarks.recorded --models relative --ways recorded --longest 20    # also its longest kernels by name

A step is that of ``fairseq-train`` on one batch, replayed. All take turns, so compare ratios. A step whose kernels take
as long as the step keeps the GPU busy all the time; then only fewer or shorter kernels make it faster. A way that fails
leaves its row empty. A step whose loss does not fall is an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import report, step
from fairseq_sg.errors import first_line
from fairseq_sg.kernels.timing import Run, interleaved, quartiles, synchronize
from fairseq_sg.ops import torch_attention
from fairseq_sg.ops.dispatch import ENVIRONMENT_VARIABLE
from fairseq_sg.parsers import Command, index

ARGUMENTS = "--arch sg_transformer_scan --depth shared --lr 1e-3 --clip-norm 5 --batch-size 256 --step-graphs 4"
LINEAR = "--encoder-attention linear --decoder-attention linear --cross-attention linear"
MODELS = {
    "transformer": "",
    "relative": "--encoder-attention relative --decoder-attention relative",
    "linear-l2": f"{LINEAR} --qk-norm l2",
}
#: Steps before the timed ones. The first runs as it is, and the second is recorded.
BEFORE = 6


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Products of float32 matrices in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Way:
    """Further arguments of a training, and what it is recorded within."""

    arguments: str = ""
    within: Callable[[], AbstractContextManager] = contextlib.nullcontext


WAYS = {
    "recorded": Way(),
    "compiled": Way("--compile default"),
    "TF32": Way(within=tf32),
    "compiled, TF32": Way("--compile default", within=tf32),
    "bfloat16": Way("--autocast bfloat16"),
    "compiled, bfloat16": Way("--autocast bfloat16 --compile default"),
    "Triton": Way(within=functools.partial(mock.patch.dict, os.environ, {ENVIRONMENT_VARIABLE: "triton"})),
    "fused attention": Way(within=functools.partial(mock.patch.object, torch_attention, "FEW", 0)),
}


def ready(arguments: str, way: Way, data: Path, device: str) -> tuple[Run, list[float]]:
    """A replay of the recorded step, and the losses of the steps before it."""
    with way.within():
        ours = step.OurStep(shlex.split(f"{arguments} {way.arguments}"), data, device)
        batch = ours.batches(1)[0]
        losses = [ours.step(batch).loss for _ in range(BEFORE)]
    return functools.partial(ours.trainer.train_step, [batch]), losses


def kernels(run: Run, device: str) -> list[tuple[str, float]]:
    """The kernels of a run, each with its milliseconds; copies do not count."""
    run()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        synchronize(device)
    of_gpu = (e for e in recorded.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA)
    found = [(event.name(), event.duration_ns() / 1e6) for event in of_gpu]
    return [(name, ms) for name, ms in found if not name.startswith(("Memcpy", "Memset"))]


def by_name(found: Sequence[tuple[str, float]], most: int) -> list[str]:
    """Lines of the kernels that take the longest together: milliseconds, number, and name."""
    together: dict[str, list[float]] = {}
    for name, ms in found:
        together.setdefault(name, []).append(ms)
    longest = sorted(together.items(), key=lambda entry: -sum(entry[1]))[:most]
    return [f"{sum(ms):9.3f} ms {len(ms):5} × {name}" for name, ms in longest]


COLUMNS = [
    ("step", "{}"),
    ("ms", "{:.2f} [{:.2f}, {:.2f}]"),
    ("× recorded", "{:.2f}"),
    ("kernels", "{:,}"),
    ("ms of kernels", "{:.2f}"),
    ("loss", "{:.3f} → {:.3f}"),
]


def section(
    models: Sequence[str],
    ways: Sequence[str],
    rounds: int,
    device: str,
    data: Path,
    arguments: str = "",
    longest: int = 0,
) -> report.Section:
    """Every model in every way; the ways take turns.

    Args:
        models: of ``MODELS``. ways: of ``WAYS``.
        rounds: timed, of at least 25 ms each.
        device: ``cuda``.
        data: a prepared folder.
        arguments: further ones of fairseq-train.
        longest: the number of kernels that are printed of each run.
    """
    runs: dict[str, Run] = {}
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for model in models:
        for way in ways:
            name = f"{model}: {way}"
            try:
                runs[name], losses[name] = ready(f"{ARGUMENTS} {MODELS[model]} {arguments}", WAYS[way], data, device)
            except Exception as error:  # such as a kernel that this GPU cannot run
                failed[name] = first_line(error)
                print(f"{name} failed: {failed[name]}", file=sys.stderr, flush=True)
                continue
            step.check(name, losses[name])
    counted = {name: kernels(run, device) for name, run in runs.items()}
    for name, found in counted.items() if longest else ():
        print("\n".join([f"{name}:", *by_name(found, longest)]), file=sys.stderr, flush=True)
    times = interleaved(runs, rounds, device)
    rows: list[list[Any]] = []
    for name in (f"{model}: {way}" for model in models for way in ways):
        if name in failed:
            rows.append([name, *[None] * (len(COLUMNS) - 1)])
            continue
        low, median, high = quartiles(times[name])
        base = times.get(f"{name.partition(':')[0]}: recorded")
        ratio = quartiles(base)[1] / median if base else None
        sizes = len(counted[name]), sum(ms for _, ms in counted[name])
        rows.append([name, [median, low, high], ratio, *sizes, [losses[name][0], losses[name][-1]]])
    chosen = " ".join(filter(None, (ARGUMENTS, arguments)))
    note = "; ".join((f"{rounds} rounds", *(f"{name} failed: {why}" for name, why in failed.items())))
    title = f"SCAN ({device}{f', {arguments}' if arguments else ''})"
    return report.Section("recorded", title, device, COLUMNS, report.rounded(rows), about=f"`{chosen}`", note=note)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.recorded", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--arguments", default="", help="further arguments of fairseq-train, as one string")
    parser.add_argument(
        "--longest", type=index, default=0, metavar="N", help="print N kernels of each step (default: 0)"
    )
    parser.add_argument("--data", type=Path, help="the data folder (default: generated)")
    report.add_options(parser, rounds=9)
    args = report.parse(parser, argv, "benchmarks.recorded")
    if args.device == "cpu":
        fix = ": leave --device cpu out" if torch.cuda.is_available() else ", and torch finds none"
        parser.error(f"steps are recorded on a GPU alone{fix}")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or step.prepared("scan", Path(folder) / "scan")
        found = section(args.models, args.ways, args.rounds, args.device, data, args.arguments, args.longest)
    report.publish(found, args.command, args.out)


if __name__ == "__main__":
    main()

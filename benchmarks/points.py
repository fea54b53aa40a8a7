"""Operator models by number of points: time and memory of a training update, with several attentions.

    python -m benchmarks.points                                        # at 256 to 8,192 points
    python -m benchmarks.points --models softmax --at 16384 --rounds 3

The models are ``sg_operator_burgers_small`` and, without attention, ``sg_operator_fno_small``; the loss is that of
Burgers' equation (``relative_l2 --h1-weight 0.1``). An update is forward and backward without optimizer. Loss and
gradients are first compared with the same model in float64, with the naive form of each operator. Models of one number
of points take turns. Times are medians of the rounds, processor time on a CPU (``measure.py``). Compare them as ratios.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from benchmarks import report
from benchmarks.attention import built, check_in_float64
from benchmarks.measure import as_in_training, peak_memory
from fairseq_sg.criterions.relative_l2 import RelativeL2, RelativeL2Config
from fairseq_sg.kernels.timing import interleaved, quartiles
from fairseq_sg.models.sg_operator import SGOperator
from fairseq_sg.parsers import Command, positive

POINTS = (256, 512, 1024, 2048, 4096, 8192)
BASE = "galerkin"
#: Name in tables -> architecture and options.
MODELS = {
    BASE: ("sg_operator_burgers_small", []),
    "fourier": ("sg_operator_burgers_small", ["--encoder-attention", "fourier"]),
    "linear l2": ("sg_operator_burgers_small", ["--encoder-attention", "linear", "--qk-norm", "l2"]),
    "softmax": ("sg_operator_burgers_small", ["--encoder-attention", "softmax"]),
    "no attention (FNO)": ("sg_operator_fno_small", []),
}
#: Maximum number of points of the comparison: the naive forms in float64 keep numbers of all pairs of points.
CHECKED = 1024
WAVES = 8  # frequencies of the functions
TASK = SimpleNamespace(fields=SimpleNamespace(dims=1, statistics={}, gradient=True))


def model_of(name: str) -> SGOperator:
    """A model of ``MODELS`` in training mode."""
    architecture, arguments = MODELS[name]
    return built(architecture, arguments, TASK)


def sample_of(functions: int, points: int, device: str) -> dict[str, Any]:
    """A batch as ``sg_operator`` makes it: random functions of period 1, two for each row, (functions, points)."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.arange(points, dtype=torch.float64) / points
    k = 2 * math.pi * torch.arange(1, WAVES + 1, dtype=torch.float64)
    phases = k.outer(axis)  # (WAVES, points)
    c, s = torch.randn(2, 2 * functions, WAVES, generator=generator, dtype=torch.float64) / k
    values = c @ phases.cos() + s @ phases.sin()
    derivatives = (s * k) @ phases.cos() - (c * k) @ phases.sin()
    axis = axis.to(device)
    return {
        "net_input": {"a": values[:functions].float().to(device), "axis": axis, "target_axis": axis},
        "target": values[functions:].to(device),
        "gradient": derivatives[functions:].to(device),
        "spacing": 1 / points,
        "ntokens": functions * points,
    }


def loss_of(model: SGOperator, sample: dict[str, Any]) -> Tensor:
    """The mean over the functions."""
    total, size, _ = RelativeL2(RelativeL2Config(h1_weight=0.1), TASK)(model, sample)
    return total / size


def sections(
    rounds: int, device: str, names: Sequence[str] = (), points: Sequence[int] = POINTS, functions: int = 2
) -> list[report.Section]:
    """Times and memory of the models, by number of points; of all models without names."""
    chosen = [name for name in MODELS if not names or name in (BASE, *names)]
    for name in chosen:

        def make(dtype: torch.dtype, name: str = name) -> tuple[SGOperator, Callable[[], Tensor]]:
            model, sample = model_of(name).to(device, dtype), sample_of(functions, min(CHECKED, max(points)), device)
            sample["net_input"]["a"] = sample["net_input"]["a"].to(dtype)
            return model, functools.partial(loss_of, model, sample)

        check_in_float64(name, make)
    models = {name: model_of(name).to(device) for name in chosen}
    times: dict[str, list[list[float]]] = {name: [] for name in chosen}
    peaks: dict[str, list[float]] = {name: [] for name in chosen}
    for n in points:
        sample = sample_of(functions, n, device)

        def update(model: SGOperator, sample: dict[str, Any] = sample) -> None:
            model.zero_grad()
            loss_of(model, sample).backward()

        runs = {name: functools.partial(update, model) for name, model in models.items()}
        for name, run in runs.items():
            models[name].zero_grad()  # gradients are of the peak, also of a model that has been run
            peaks[name].append(peak_memory(run, device) / 1e6)
        measured = {name: quartiles(of) for name, of in interleaved(runs, rounds, device).items()}
        base = measured[BASE][1]
        for name, (low, median, high) in measured.items():
            times[name].append([median / base, low / base, high / base, median])
    about = f"{functions} function{'s' * (functions > 1)}, float32{', one thread' * (device == 'cpu')}."
    note = f"{rounds} rounds"

    def section(title: str, text: str, form: str, cells: dict[str, list]) -> report.Section:
        columns = [("attention", "{}"), *((f"{n:,} points", form) for n in points)]
        rows = report.rounded([[name, *cells[name]] for name in chosen])
        return report.Section(
            "points", f"{title} ({device})", device, columns, rows, about=f"{text} {about}", note=note
        )

    return [
        section(
            "Time of operator models",
            f"Times the update of {BASE}, median [quartiles], and its milliseconds.",
            "{:.2f} [{:.2f}, {:.2f}]; {:,.0f} ms",
            times,
        ),
        section("Memory of operator models", "MB in use at most, gradients included.", "{:,.1f}", peaks),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.points", description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        help=f"from {', '.join(MODELS)} (default: all); {BASE} is always measured",
    )
    parser.add_argument("--at", type=positive, nargs="+", metavar="N", default=POINTS, help="numbers of points")
    parser.add_argument("--functions", type=positive, default=2, help="in a batch (default %(default)s)")
    report.add_options(parser, rounds=9)
    args = report.parse(parser, argv, "benchmarks.points")
    if unknown := set(args.models or ()) - set(MODELS):
        parser.error(f"--models {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    # A spectral layer of both architectures keeps 16 modes.
    if min(args.at) < 30:
        parser.error(f"--at {min(args.at)}: choose at least 30, whose transform has 16 modes")
    as_in_training()
    for section in sections(args.rounds, args.device, args.models or (), args.at, args.functions):
        report.publish(section, args.command, args.out)


if __name__ == "__main__":
    main()

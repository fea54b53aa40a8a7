"""Steps per second of many small trainings at once: in processes of their own, or several in one process.

    python -m benchmarks.together                              # 15 SCAN trainings of 300 steps on a GPU, 4 on a CPU
    python -m benchmarks.together --models 6 --steps 100 --graphs 32
    python -m benchmarks.together --processes 15 3 --mps       # also by NVIDIA's service for processes that share a GPU
    python -m benchmarks.together --stacked                    # also with steps of all models at once
    python -m benchmarks.together --arguments="--compile default"

Each way trains the same models by ``fairseq-train`` and its own start; steps are those of the models' logs, without
their first interval. On a GPU, ``graphs`` records steps (``--step-graphs``). Compare ratios.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.step import MODELS, prepared
from fairseq_sg.experiments import groups
from fairseq_sg.experiments.jobs import environment
from fairseq_sg.experiments.logs import events
from fairseq_sg.parsers import Command, positive

#: Trainings at once.
USUAL = {"cpu": 4, "cuda": 15}
#: Lengths rounded up, so that shapes recur.
ARGUMENTS = (
    "--user-dir {plugin} --task sg_translation --criterion cross_entropy_orthogonality --optimizer torch_adam "
    "--dropout 0.1 --no-save --disable-validation --required-seq-len-multiple 8 --log-format json "
    "--distributed-world-size 1"
)


#: Starts the Multi-Process Service (MPS): kernels of several processes run at the same time.
MPS = "nvidia-cuda-mps-control"


class Way(NamedTuple):
    """How trainings share a device: the number of processes, and whether steps are recorded, MPS runs, and steps of
    all models are made at once (``fairseq_sg.stacked``).
    """

    processes: int
    graphs: bool = False
    mps: bool = False
    stacked: bool = False


def ways(
    models: int, device: str, processes: Sequence[int] = (), mps: bool = False, stacked: bool = False
) -> dict[str, Way]:
    """Name -> way. The first is what all are compared with.

    Args:
        models: trainings at once.
        device: ``cpu`` or ``cuda``.
        processes: of the other ways; by default ``models``, a fifth and one.
        mps: recorded steps also with MPS.
        stacked: also steps of all models at once.
    """
    if device == "cpu":
        found = [Way(models), *(Way(number) for number in processes or (1,) if number != models)]
    else:
        recorded = [Way(number, graphs=True) for number in processes or (models, max(1, models // 5), 1)]
        found = [Way(models), *recorded, *(way._replace(mps=True) for way in recorded if mps)]
    found += [Way(1, graphs=device == "cuda", stacked=True)] * stacked
    return {name_of(way): way for way in found}


def name_of(way: Way) -> str:
    number = "one process" if way.processes == 1 else f"{way.processes} processes"
    return f"{number}{', graphs' * way.graphs}{', MPS' * way.mps}{', stacked' * way.stacked}"


@contextlib.contextmanager
def service() -> Iterator[dict[str, str]]:
    """MPS, for processes that have these environment variables; it ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            os.mkdir(path)
        started = {"env": {**os.environ, **variables}, "check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([MPS, "-d"], **started)
        try:
            yield variables
        finally:
            subprocess.run([MPS], input=b"quit\n", **started)


def rate(data: Path, models: int, way: Way, steps: int, device: str, graphs: int, further: str = "") -> float:
    """Steps per second of all models together; ``further`` arguments of fairseq-train."""
    every = max(1, steps // 5)
    common = ARGUMENTS.format(plugin=shlex.quote(str(report.REPOSITORY / "fairseq_sg")))
    arguments = [str(data), *shlex.split(common), *shlex.split(MODELS["scan"]["arguments"])]
    arguments += ["--max-update", str(steps), "--log-interval", str(every)]
    arguments += ["--step-graphs", str(graphs if way.graphs else 0), *shlex.split(further)]
    arguments += ["--cpu"] if device == "cpu" else []
    shared = service() if way.mps else contextlib.nullcontext({})
    with tempfile.TemporaryDirectory() as folder, shared as variables:
        entries = []
        for seed in range(1, models + 1):
            own = Path(folder) / str(seed)
            own.mkdir()
            words = [*arguments, "--seed", str(seed), "--save-dir", str(own)]
            entries.append(groups.entry(own, own / "train.log", words, None, "all" if way.stacked else None))
        started = [
            groups.launch(entries[first :: way.processes], environment() | variables, Path(folder) / f"{first}.log")
            for first in range(way.processes)
        ]
        failed = [number for number, process in enumerate(started) if process.wait()]
        logs = sorted(Path(folder).glob("*/train.log"))
        if failed:
            own = [Path(entry["end"]) for entry in entries[failed[0] :: way.processes]]
            ended = [end for end in own if not end.is_file() or end.read_text() != "0"]
            printed = [Path(folder) / f"{failed[0]}.log", *(end.parent / "train.log" for end in ended)]
            shown = "".join(path.read_text()[-2000:] for path in printed)
            raise SystemExit(f"a training failed: {shown}")
        return sum(
            statistics.median(e["ups"] for e in events(log) if e["kind"] == "train_inner" and e["num_updates"] > every)
            for log in logs
        )


def section(
    chosen: dict[str, Way],
    models: int,
    steps: int,
    rounds: int,
    device: str,
    graphs: int,
    data: Path,
    further: str = "",
) -> report.Section:
    """Median rates of the rounds, in which the ways take turns."""
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, way in chosen.items():
            found[name].append(rate(data, models, way, steps, device, graphs, further))
            print(f"{name}: {found[name][-1]:.1f} steps/s in total", file=sys.stderr, flush=True)
    base = statistics.median(next(iter(found.values())))
    rows = [[name, statistics.median(rates), statistics.median(rates) / base] for name, rates in found.items()]
    columns = [("trainings", "{}"), ("steps/s in total", "{:.1f}"), ("× the first", "{:.2f}")]
    about = f"{models} SCAN models, `{' '.join(filter(None, (MODELS['scan']['arguments'], further)))}`."
    title = f"Many small trainings ({device}{f', {further}' if further else ''})"
    note = f"{steps} steps, {rounds} round{'s' * (rounds > 1)}"
    return report.Section("together", title, device, columns, report.rounded(rows), about=about, note=note)


def section_of(models: int, steps: int, rounds: int, device: str, graphs: int = 64) -> report.Section:
    """``section`` of the usual ways, on data that it prepares."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepared("scan", Path(folder) / "scan")
        return section(ways(models, device, stacked=device == "cuda"), models, steps, rounds, device, graphs, data)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.together", description=__doc__)
    parser.add_argument("--models", type=positive, help="trainings at once (default: 15 on a GPU, 4 on a CPU)")
    parser.add_argument("--steps", type=int, default=300, help="of each training (default: %(default)s)")
    parser.add_argument("--graphs", type=positive, default=64, help="most graphs of a training (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=positive,
        nargs="+",
        default=[],
        help="of the ways (default: all, a fifth and 1; on a CPU all, 1)",
    )
    parser.add_argument("--mps", action="store_true", help=f"recorded steps also with MPS ({MPS})")
    parser.add_argument("--stacked", action="store_true", help="also steps of all models at once")
    parser.add_argument("--arguments", default="", help="further arguments of fairseq-train, as one string")
    parser.add_argument("--data", type=Path, help="the data folder (default: generated)")
    report.add_options(parser, rounds=1)
    args = report.parse(parser, argv, "benchmarks.together")
    if args.steps < 10:
        parser.error(f"--steps is {args.steps}: choose at least 10")
    models = args.models or USUAL[args.device]
    if args.processes and max(args.processes) > models:
        parser.error(f"--processes {max(args.processes)}: choose at most {models}, the number of trainings")
    if args.mps and (args.device == "cpu" or not shutil.which(MPS)):
        parser.error(f"--mps needs a GPU of NVIDIA and the program {MPS}: leave it out")
    chosen = ways(models, args.device, args.processes, args.mps, args.stacked)
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or prepared("scan", Path(folder) / "scan")
        found = section(chosen, models, args.steps, args.rounds, args.device, args.graphs, data, args.arguments)
    report.publish(found, args.command, args.out)


if __name__ == "__main__":
    main()

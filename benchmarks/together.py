"""Steps per second of many small trainings at once: in processes of their own, or several in one process.

    python -m benchmarks.together                              # 15 SCAN trainings of 300 steps on a GPU, 4 on a CPU
    python -m benchmarks.together --models 6 --steps 100 --graphs 32

Each way trains the same models by ``fairseq-train`` and its own start; steps are those of the models' logs, without
their first interval. On a GPU, ``graphs`` records steps (``--step-graphs``). Compare ratios.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.step import MODELS, prepared
from fairseq_sg.experiments import groups
from fairseq_sg.experiments.jobs import environment
from fairseq_sg.experiments.logs import events

#: Lengths rounded up, so that shapes recur.
ARGUMENTS = (
    "--user-dir {plugin} --task sg_translation --criterion cross_entropy_orthogonality --optimizer torch_adam "
    "--dropout 0.1 --no-save --disable-validation --required-seq-len-multiple 8 --log-format json --num-workers 0"
)


def ways(models: int, device: str) -> dict[str, tuple[int, bool]]:
    """Name -> number of processes, and whether steps are recorded."""
    if device == "cpu":
        return {f"{models} processes": (models, False), "one process": (1, False)}
    some = max(1, models // 5)
    return {
        f"{models} processes": (models, False),
        f"{models} processes, graphs": (models, True),
        f"{some} processes, graphs": (some, True),
        "one process, graphs": (1, True),
    }


def usual(device: str) -> int:
    """The number of trainings at once."""
    return 15 if device == "cuda" else 4


def rate(data: Path, models: int, processes: int, steps: int, device: str, graphs: int) -> float:
    """Steps per second of all models together."""
    every = max(1, steps // 5)
    common = ARGUMENTS.format(plugin=shlex.quote(str(report.REPOSITORY / "fairseq_sg")))
    arguments = [str(data), *shlex.split(common), *shlex.split(MODELS["scan"]["arguments"])]
    arguments += ["--max-update", str(steps), "--log-interval", str(every), "--step-graphs", str(graphs)]
    arguments += ["--cpu"] if device == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        entries = []
        for seed in range(1, models + 1):
            own = Path(folder) / str(seed)
            own.mkdir()
            words = [*arguments, "--seed", str(seed), "--save-dir", str(own)]
            entries.append(groups.entry(own, own / "train.log", words, None))
        started = [
            groups.launch(entries[first::processes], environment(), Path(folder) / f"{first}.log")
            for first in range(processes)
        ]
        failed = [number for number, process in enumerate(started) if process.wait()]
        logs = sorted(Path(folder).glob("*/train.log"))
        if failed:
            printed = [Path(folder) / f"{failed[0]}.log", Path(entries[failed[0]]["log"])]
            shown = "".join(path.read_text()[-2000:] for path in printed)
            raise SystemExit(f"a training failed: {shown}")
        return sum(
            statistics.median(e["ups"] for e in events(log) if e["kind"] == "train_inner" and e["num_updates"] > every)
            for log in logs
        )


def section(models: int, steps: int, rounds: int, device: str, graphs: int, data: Path) -> report.Section:
    """Median rates of the rounds, in which the ways take turns."""
    chosen = ways(models, device)
    found: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, (processes, recorded) in chosen.items():
            found[name].append(rate(data, models, processes, steps, device, graphs if recorded else 0))
            print(f"{name}: {found[name][-1]:.1f} steps/s in total", file=sys.stderr, flush=True)
    base = statistics.median(next(iter(found.values())))
    rows = [[name, statistics.median(rates), statistics.median(rates) / base] for name, rates in found.items()]
    columns = [("trainings", "{}"), ("steps/s in total", "{:.1f}"), ("× the first", "{:.2f}")]
    about = f"{models} SCAN models, `{MODELS['scan']['arguments']}`."
    title = f"Many small trainings ({device})"
    note = f"{steps} steps, {rounds} round{'s' * (rounds > 1)}"
    return report.Section("together", title, device, columns, report.rounded(rows), about=about, note=note)


def section_of(models: int, steps: int, rounds: int, device: str, graphs: int = 64) -> report.Section:
    """``section`` on data that it prepares."""
    with tempfile.TemporaryDirectory() as folder:
        return section(models, steps, rounds, device, graphs, prepared("scan", Path(folder) / "scan"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, help="trainings at once (default: 15 on a GPU, 4 on a CPU)")
    parser.add_argument("--steps", type=int, default=300, help="of each training (default: %(default)s)")
    parser.add_argument("--graphs", type=int, default=64, help="most graphs of a training (default: %(default)s)")
    report.add_options(parser, rounds=1)
    args = report.parse(parser, argv, "benchmarks.together")
    if min(args.steps // 10, args.models or 1, args.graphs) < 1:
        parser.error("choose at least 10 steps, 1 model and 1 graph")
    models = args.models or usual(args.device)
    found = section_of(models, args.steps, args.rounds, args.device, args.graphs)
    report.publish(found, args.command, args.out)


if __name__ == "__main__":
    main()

"""SCAN with length cutoff 26: trains, evaluates, tabulates and plots universal transformers with different attentions.

    python scripts/quickstart.py                    # three models, a first result in minutes
    python scripts/quickstart.py --paper            # Park & Kim's model for their 50,000 steps of 256
    python scripts/quickstart.py --models all --seeds 1,2,3 --steps 50000 --batch-size 256 --length-window 1

Finished runs are skipped, stopped ones are resumed. The summary has every command, so that you can run it by hand.
``--results results/NAME`` also writes the table to results/NAME.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import figures  # noqa: E402
from runs import (  # noqa: E402
    ENDED,
    REPOSITORY,
    Run,
    curve,
    diverged,
    end,
    environment,
    on,
    partial_result,
    position,
    result_of,
    run_all,
    saved,
    schedule,
    starts_of,
    write_json,
)

LINEAR = ["--encoder-attention", "linear", "--decoder-attention", "linear", "--cross-attention", "linear"]

#: model -> its arguments; all are universal transformers (one shared layer, three steps) of the size of Table C.1
MODELS: dict[str, list[str]] = {
    "absolute": [],
    "relative": ["--encoder-attention", "relative", "--decoder-attention", "relative"],
    "linear": LINEAR,
    "linear-l2": [*LINEAR, "--qk-norm", "l2"],
    "linear-l2-orthogonality": [*LINEAR, "--qk-norm", "l2", "--orthogonality-weight", "1e-4"],
}
#: model -> (IID, OOD) as published, after 50,000 steps of 256, five seeds
PUBLISHED = {
    "absolute": ("1.00", ".21 ± .01", "Csordás 2023, Tables 4.3 and C.4"),
    "relative": ("1.00", "1.00 ± .00", "Csordás 2023, Tables 4.3 and C.4"),
    "linear": (".998 ± .001", ".469 ± .089", "Park & Kim 2024, Table 4"),
    "linear-l2": (".997 ± .001", ".506 ± .086", "Park & Kim 2024, Table 4"),
    "linear-l2-orthogonality": (".997 ± .001", ".563 ± .054", "Park & Kim 2024, Table 4"),
}
SUBSETS = {"valid": "IID", "gen": "OOD"}


@dataclass
class Comparison:
    """Models that are trained alike on SCAN, with the texts of their script.

    Attributes:
        models: name -> arguments.
        about: the script's help.
        out: folder of the runs.
        default: the models that are trained by default.
        published: name -> (IID, OOD, source).
        paper: the model of ``--paper``; None without that option.
        small: the arguments of ``--small``; empty without that option.
    """

    models: dict[str, list[str]]
    about: str
    out: str
    default: str = "all"
    published: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    paper: str = ""
    small: list[str] = field(default_factory=list)


QUICKSTART = Comparison(
    MODELS, __doc__, "runs/scan26", "absolute,relative,linear", PUBLISHED, paper="linear-l2-orthogonality"
)


def parse_arguments(comparison: Comparison) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=comparison.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        default=comparison.default,
        help=f"comma separated, of {', '.join(comparison.models)}; or all",
    )
    add_arguments(parser, comparison.out)
    parser.add_argument("--steps", type=int, help="training steps (default: 4,000 on a CPU, 20,000 on a GPU)")
    parser.add_argument("--batch-size", type=int, help="sentences per step (default: 64 on a CPU, 256 on a GPU)")
    parser.add_argument(
        "--length-window",
        type=int,
        help="as fairseq-train's --length-window; 1 draws batches as in the papers (default: 1024)",
    )
    parser.add_argument(
        "--validate-every", type=int, help="steps between evaluations (default: an eighth of the steps)"
    )
    parser.set_defaults(paper=False, small=False)
    if comparison.paper:
        parser.add_argument(
            "--paper", action="store_true", help=f"{comparison.paper} for its paper's 50,000 steps of 256"
        )
    if comparison.small:
        parser.add_argument(
            "--small", action="store_true", help=f"narrower models, for a CPU: {shlex.join(comparison.small)}"
        )
    parser.add_argument(
        "--no-generation",
        action="store_true",
        help="skip decoding at the end (no BLEU): accuracy comes from one teacher-forced pass",
    )
    args = parser.parse_args()
    if args.paper:
        given = {"--models": args.models != comparison.default, "--steps": args.steps}
        given |= {"--batch-size": args.batch_size, "--length-window": args.length_window}
        for option in (option for option, is_given in given.items() if is_given):
            parser.error(f"--paper sets {option}: omit one of them")
        args.models, args.steps, args.batch_size, args.length_window = comparison.paper, 50_000, 256, 1
    args.data = args.data or Path("data-bin/scan26")
    args.out = args.out or Path(f"{comparison.out}-paper" if args.paper else comparison.out)
    complete_arguments(parser, args, comparison.models)
    args.steps = args.steps or (20_000 if args.device == "cuda" else 4_000)
    args.batch_size = args.batch_size or (256 if args.device == "cuda" else 64)
    args.length_window = args.length_window or 1024
    args.validate_every = args.validate_every or max(1, args.steps // 8)
    return args


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds the options of every comparison; ``--data`` and ``--out`` default to None."""
    parser.add_argument("--seeds", default="1", help="comma separated (default 1)")
    parser.add_argument(
        "--report",
        action="store_true",
        help="train nothing; report the runs in --out, at the last step that all trainings have reached",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--jobs", type=int, help="parallel trainings (default: all, at most 3 or the number of cores)")
    parser.add_argument("--data", type=Path, help="the data folder; generated if missing")
    parser.add_argument("--out", type=Path, help=f"folder of the runs (default: {out})")
    parser.add_argument(
        "--results", help="also write PREFIX.json, PREFIX.md and PREFIX.png (default: summary.* in --out)"
    )


def complete_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, models: Iterable[str]) -> None:
    """Splits and checks ``--models`` and ``--seeds``, and sets the defaults of other options."""
    args.models = list(models) if args.models == "all" else args.models.split(",")
    for model in args.models:
        if model not in models:
            parser.error(f"unknown model {model!r}: choose from {', '.join(models)}, or all")
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds is {args.seeds!r}: it must be numbers, comma separated")
    args.device = args.device if args.device != "auto" else ("cuda" if has_gpu() else "cpu")
    args.jobs = args.jobs or min(len(args.models) * len(args.seeds), max(3, os.cpu_count() or 1))
    args.results = Path(args.results or args.out / "summary")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def title_of(data: Path) -> str:
    """The title of a prepared folder."""
    request = json.loads((REPOSITORY / data / "dataset.json").read_text()).get("request", {})
    return request.get("dataset", "scan").upper() + (
        f", length cutoff {request['cutoff']}" if request.get("cutoff") else ""
    )


def prepare_data(data: Path) -> None:
    """Generates the data if their folder has no dataset.json."""
    if not (REPOSITORY / data / "dataset.json").exists():
        command = [sys.executable, "-m", "data_prep", "scan", "--split", "length", "--cutoff", "26", "--out", str(data)]
        subprocess.run(command, cwd=REPOSITORY, env=environment(), check=True)


def make_runs(args: argparse.Namespace, comparison: Comparison) -> list[Run]:
    common = [
        "--task", "sg_translation", "--arch", "sg_transformer_scan", "--depth", "shared",
        "--criterion", "cross_entropy_orthogonality",
        "--optimizer", "torch_adam", "--lr", "1e-3", "--clip-norm", "5",
        "--batch-size", str(args.batch_size), "--length-window", str(args.length_window),
        "--batch-size-valid", "1024", *schedule(args.validate_every, args.device),
        *(comparison.small if args.small else []),
    ]  # fmt: skip
    return [
        Run(
            name=model,
            seed=seed,
            folder=args.out / f"{model.replace(' ', '_')}-seed{seed}",
            data=args.data,
            steps=args.steps,
            arguments=common + comparison.models[model],
            subsets=SUBSETS,
            # The longest target has 48 tokens; 64 stops models that do not predict the end.
            evaluation=["--batch-size", "256", *on(args.device)],
            generation=["--max-len-b", "64"],
            generate=not args.no_generation,
        )
        for seed in args.seeds
        for model in args.models
    ]


class Watcher:
    """Progress of the trainings: bars on a terminal, otherwise a line per evaluation."""

    def __init__(self, runs: list[Run]) -> None:
        self.seen: dict[str, Any] = {}
        self.bars = None
        self.asked = 0.0
        self.started = time.time()
        self.ended: dict[str, dict[str, Any]] = {}
        self.at_start = {str(run.folder): position(run)["step"] for run in runs}
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bars = Progress(
                TextColumn("{task.description:<36}"), BarColumn(),
                        TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            )  # fmt: skip
            self.ids = {
                str(r.folder): self.bars.add_task(f"{r.name} (seed {r.seed})", total=r.steps, note="") for r in runs
            }
            self.all = self.bars.add_task("all", total=sum(r.steps for r in runs), note="")
            self.bars.start()

    def left(self, runs: list[Run], state: dict[str, str], steps: dict[str, int]) -> str:
        """The estimated remaining time from the steps since the start; empty before the first steps."""
        made = sum(steps[str(r.folder)] - self.at_start[str(r.folder)] for r in runs)
        to_make = sum(max(0, r.steps - steps[str(r.folder)]) for r in runs if state[str(r.folder)] not in ENDED)
        if made <= 0 or not to_make:
            return ""
        minutes = (time.time() - self.started) / made * to_make / 60
        return f"about {minutes:.0f} min left" if minutes < 120 else f"about {minutes / 60:.1f} h left"

    def __call__(self, runs: list[Run], state: dict[str, str]) -> None:
        finished = all(s in ENDED for s in state.values())
        if time.time() - self.asked < 5 and not finished:
            return
        self.asked = time.time()
        # Ended runs are not read again.
        at_all = {str(r.folder): self.ended.get(str(r.folder)) or position(r) for r in runs}
        self.ended = {key: at for key, at in at_all.items() if state[key] in ENDED}
        left = self.left(runs, state, {key: at["step"] for key, at in at_all.items()})
        for run in runs:
            key = str(run.folder)
            at = at_all[key]
            note = "  ".join(f"{shown} {at[s]:.1f}%" for s, shown in run.subsets.items() if s in at)
            note = f"{state[key]}  {note}"
            step = run.steps if state[key] == "done" else at["step"]
            if self.bars:
                # A terminal has no room for bars of many runs.
                seen = len(runs) <= 20 or state[key] in ("training", "evaluating")
                self.bars.update(self.ids[key], completed=step, note=note, visible=seen)
            elif self.seen.get(key) != note:
                self.seen[key] = note
                where = f"{run.name} (seed {run.seed})  step {step}/{run.steps}"
                print(f"{time.strftime('%H:%M:%S')}  {where}  {note}  {left}".rstrip(), flush=True)
        if self.bars:
            ended = sum(s in ENDED for s in state.values())
            self.bars.update(
                self.all,
                completed=sum(at["step"] for at in at_all.values()),
                note=f"{ended} of {len(runs)} ended  {left}",
            )

    def close(self) -> None:
        """Ends the live display, which hides the cursor."""
        if self.bars:
            self.bars.stop()


def report(runs: list[Run]) -> list[dict[str, Any]]:
    """The records of the runs: finished, or cut at the last evaluated step common to all of them.

    Diverged runs have no result and do not shorten the others.
    """
    going = [run for run in runs if not diverged(run)]
    if all(result_of(run) for run in going):
        return [saved(run) for run in runs]
    reached = [{point["step"] for point in curve(run) if set(run.subsets) <= set(point)} for run in going]
    common = set.intersection(*reached)
    if not common:
        raise ValueError("nothing to report yet: no step has evaluations of all trainings")
    return [
        saved(run)
        if diverged(run)
        else saved(run)
        | {"name": run.name, "seed": run.seed, "folder": str(run.folder), "commands": [shlex.join(run.train_command())]}
        | partial_result(run, max(common))
        for run in runs
    ]


def summarize(args: argparse.Namespace, records: list[dict[str, Any]], comparison: Comparison) -> dict[str, Any]:
    sizes = "narrower than" * args.small + " Csordás 2023 Table C.1" + " (--small)" * args.small
    published = comparison.published
    return {
        "what": f"{title_of(args.data)}; universal transformers (one shared encoder and decoder "
        f"layer, 3 steps), {sizes.strip()}",
        **common_summary(args, records),
        "steps": max((r["result"]["steps"] for r in records if "result" in r), default=0),
        "batch_size": args.batch_size,
        "length_window": args.length_window,
        "published": {
            model: dict(zip(("IID", "OOD", "source"), published[model])) for model in args.models if model in published
        },
    }


def common_summary(args: argparse.Namespace, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the runs, and their records."""
    starts = [start for record in records if record for start in starts_of(record)]
    return {
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commits": sorted({start["commit"] for start in starts}),
        "machines": [json.loads(m) for m in sorted({json.dumps(start["machine"]) for start in starts})],
        "seeds": args.seeds,
        "runs": records,
    }


def spread(values: list[float], digits: int = 1) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(summary: dict[str, Any]) -> list[list[str]]:
    """Rows of text with a header; percentages over the sentences, mean ± sample std over the seeds."""
    published = summary["published"]
    columns = ["model", "steps", "IID %", "OOD %", "OOD BLEU", "minutes"]
    rows = [[*columns, *(["published IID / OOD"] if published else []), "folder"]]
    for model, done, steps, folder in by_model(summary):
        cells = [steps] + ["–"] * 4
        if done:
            results = [r["result"] for r in done]
            cells = [
                steps,
                spread([r["accuracy"]["valid"] for r in results]),
                spread([r["accuracy"]["gen"] for r in results]),
                spread([r["generated"]["gen"]["bleu"] for r in results])
                if all(r["generated"] for r in results)
                else "–",
                spread([r["minutes"] for r in done]),
            ]
        beside = [f"{published[model]['IID']} / {published[model]['OOD']}"] if model in published else []
        rows.append([model, *cells, *beside, folder])
    return rows


def by_model(summary: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]], str, str]]:
    """For every model: its records with a result, their steps with failures noted, and their folders."""
    for model in dict.fromkeys(r["name"] for r in summary["runs"] if r):
        records = [r for r in summary["runs"] if r and r["name"] == model]
        done = [r for r in records if "result" in r]
        steps = str(done[0]["result"]["steps"]) if done else "failed"
        if 0 < len(done) < len(records):
            steps += f" ({len(records) - len(done)} failed)"
        first = Path(records[0]["folder"])
        several = len(summary["seeds"]) > 1
        yield (
            model,
            done,
            steps,
            str(first.parent / f"{first.name.rpartition('-seed')[0]}-seed*") if several else str(first),
        )


def as_text(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(summary: dict[str, Any]) -> str:
    lines = markdown_lines([row[:-1] for row in table(summary)])
    machine = machines(summary)
    sources = "; ".join(sorted({p["source"] for p in summary["published"].values()}))
    return "\n".join(
        [
            f"# {summary['what']}",
            "",
            f"`{summary['command']}`",
            "",
            f"Commit {', '.join(summary['commits'])}; {machine}; batch {summary['batch_size']}, length window "
            f"{summary['length_window']}, seeds {', '.join(map(str, summary['seeds']))}. IID is the subset `valid`, "
            "OOD `gen`; exact match in percent at the last step"
            + (", mean ± sample standard deviation over the seeds" if len(summary["seeds"]) > 1 else "")
            + "."
            + f" The published numbers are the papers' ({sources}), after 50,000 steps of "
            "256, five seeds, as fractions." * bool(sources),
            "",
            *lines,
            "",
        ]
    )


def markdown_lines(rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def machines(summary: dict[str, Any]) -> str:
    """The machines of the runs, as text."""
    return "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in summary["machines"])


#: More models than this are drawn as bars: their curves would be indistinguishable.
CURVES = 8


def plot(summary: dict[str, Any], path: Path) -> None:
    """Accuracy and loss through training; bars of the last accuracies for many models or single evaluations."""
    curves: dict[str, list[list[dict[str, float]]]] = {}
    for record in summary["runs"]:
        if record and "result" in record:
            curves.setdefault(record["name"], []).append(record["result"]["curve"])
    courses = {summary["what"].partition(";")[0]: curves}
    if len(curves) <= CURVES and figures.through_training(courses, list(SUBSETS), list(SUBSETS), path, SUBSETS):
        return
    plt = figures.pyplot()
    figure, axes = plt.subplots(figsize=(9, max(4.2, 0.28 * len(curves))))
    draw_bars(axes, curves)
    axes.set_title(*courses)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_bars(axes: Any, curves: dict[str, list[list[dict[str, float]]]]) -> None:
    """Bars for IID and OOD, from top to bottom in the models' order: mean over seeds, range from minimum to maximum."""
    for number, (subset, shown) in enumerate(SUBSETS.items()):
        values = [[curve[-1][subset] for curve in found] for found in curves.values()]
        means = [statistics.mean(v) for v in values]
        reach = [[m - min(v) for m, v in zip(means, values)], [max(v) - m for m, v in zip(means, values)]]
        places = [model + 0.4 * number for model in range(len(curves))]
        axes.barh(places, means, height=0.4, xerr=reach, label=shown, color=f"C{number}")
    axes.set(
        xlabel="exact match, %", xlim=(0, 102), yticks=[m + 0.2 for m in range(len(curves))], yticklabels=list(curves)
    )
    axes.invert_yaxis()
    axes.legend(frameon=False)


def main(comparison: Comparison = QUICKSTART) -> int:
    """Trains, evaluates and reports the models of a comparison beside their published numbers."""
    args = parse_arguments(comparison)

    def publish(records: list[dict[str, Any]]) -> None:
        summary = summarize(args, records, comparison)
        write_results(args.results, summary, as_markdown(summary))
        print(f"\n{title_of(args.data)}: exact match on commands as long as in training (IID) and longer (OOD)\n")
        print(as_text(table(summary)))

    return carry_out(args, make_runs(args, comparison), lambda: prepare_data(args.data), publish)


def write_results(prefix: Path, summary: dict[str, Any], markdown: str) -> None:
    """Writes PREFIX.json, PREFIX.md, and the curves as PREFIX.png."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(prefix.with_suffix(".json"), summary)
    prefix.with_suffix(".md").write_text(markdown)
    plot(summary, prefix.with_suffix(".png"))


def carry_out(
    args: argparse.Namespace,
    runs: list[Run],
    prepare: Callable[[], None],
    publish: Callable[[list[dict[str, Any]]], None],
    read: Callable[[list[Run]], list[dict[str, Any]]] = report,
    train: Callable[..., list[dict[str, Any]]] = run_all,
) -> int:
    """Prepares the data, trains and evaluates ``runs`` (with ``--report`` only reads them), and
    publishes their records.

    ``read`` and ``train`` (called as ``run_all``) give the records in the two cases. Returns the exit status: a
    training that diverged is a result, one that failed is an error.
    """
    os.chdir(REPOSITORY)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM also ends the trainings
    started = time.time()
    try:
        if args.report:
            records = read(runs)
        else:
            prepare()
            print(f"{len(runs)} trainings on {args.device}, {args.jobs} at a time:")
            for run in runs:
                print(f"  {shlex.join(run.train_command())}")
            with contextlib.closing(Watcher(runs)) as watcher:
                records = train(runs, args.jobs, watcher)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command resumes from the last checkpoints", file=sys.stderr)
        return 130
    publish(records)
    print(
        f"\nlogs: FOLDER/train.log, checkpoints: FOLDER/{runs[0].checkpoint.name}, plot: "
        f"{args.results.with_suffix('.png')}"
    )
    print(f"{(time.time() - started) / 60:.1f} minutes in all")
    for run in filter(diverged, runs):
        print(f"{run.name} (seed {run.seed}) diverged: {diverged(run)['why']}; see {run.log}", file=sys.stderr)
    failed = [run for run, record in zip(runs, records) if record.get("failed")]
    for run in failed:
        print(
            f"error: {run.name} (seed {run.seed}) failed in {saved(run)['failed']}; see {run.folder}", file=sys.stderr
        )
    return 1 if failed else 0


if __name__ == "__main__":
    end(main)

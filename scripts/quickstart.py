"""SCAN with length cutoff 26: trains, evaluates, tabulates and plots universal transformers that differ in their attention.

    python scripts/quickstart.py                                  # three models, a first result in minutes
    python scripts/quickstart.py --paper                          # Park & Kim's model at their length: 50,000 steps of 256
    python scripts/quickstart.py --models all --seeds 1,2,3 --steps 50000 --batch-size 256 --length-window 1 --results results/NAME

What is done is skipped, what was stopped continues. Every command is printed in the summary, to be run by hand.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from runs import (  # noqa: E402
    REPOSITORY,
    Run,
    curve,
    environment,
    on,
    partial_result,
    position,
    result_of,
    run_all,
    saved,
    schedule,
    write_json,
)

LINEAR = ["--encoder-attention", "linear", "--decoder-attention", "linear", "--cross-attention", "linear"]

#: model -> its arguments; all are universal transformers (one shared layer, three steps) of the size of Table C.1
MODELS: Dict[str, List[str]] = {
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
    """Models that are trained alike on SCAN, and what a script tells of them.

    Attributes:
        models: name -> arguments. about: the script's help. out: where runs go. default: the models that it trains unasked.
        published: name -> (IID, OOD, source). paper: the model of ``--paper``, if there is that option.
        small: the arguments of ``--small``, if there is that option.
    """

    models: Dict[str, List[str]]
    about: str
    out: str
    default: str = "all"
    published: Dict[str, Tuple[str, str, str]] = field(default_factory=dict)
    paper: str = ""
    small: List[str] = field(default_factory=list)


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
    parser.add_argument("--batch-size", type=int, help="sentences a step (default: 64 on a CPU, 256 on a GPU)")
    parser.add_argument(
        "--length-window",
        type=int,
        default=1024,
        help="see fairseq-train's --length-window; 1 draws batches as the papers do",
    )
    parser.add_argument(
        "--validate-every", type=int, help="steps between evaluations (default: an eighth of the steps)"
    )
    parser.set_defaults(paper=False, small=False)
    if comparison.paper:
        parser.add_argument(
            "--paper", action="store_true", help=f"{comparison.paper} at its paper's length, 50,000 steps of 256"
        )
    if comparison.small:
        parser.add_argument(
            "--small", action="store_true", help=f"narrower models, for a CPU: {shlex.join(comparison.small)}"
        )
    parser.add_argument(
        "--no-generation",
        action="store_true",
        help="do not decode at the end (no BLEU): accuracy comes out of one teacher-forced pass",
    )
    args = parser.parse_args()
    if args.paper:
        args.models, args.steps, args.batch_size, args.length_window = comparison.paper, 50_000, 256, 1
    args.data = args.data or Path("data-bin/scan26")
    args.out = args.out or Path(f"{comparison.out}-paper" if args.paper else comparison.out)
    complete_arguments(parser, args, comparison.models)
    args.steps = args.steps or (20_000 if args.device == "cuda" else 4_000)
    args.batch_size = args.batch_size or (256 if args.device == "cuda" else 64)
    args.validate_every = args.validate_every or max(1, args.steps // 8)
    return args


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The options that every comparison has; ``--data`` and ``--out`` are None where they are not given."""
    parser.add_argument("--seeds", default="1", help="comma separated (default 1)")
    parser.add_argument(
        "--report",
        action="store_true",
        help="train nothing; report what is in --out, at the last step that all trainings have reached",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--jobs", type=int, help="trainings at a time (default: all, but no more than 3 or the number of cores)"
    )
    parser.add_argument("--data", type=Path, help="the data folder; generated when missing")
    parser.add_argument("--out", type=Path, help=f"where runs go (default: {out})")
    parser.add_argument(
        "--results", help="also write PREFIX.json, PREFIX.md and PREFIX.png (default: summary.* in --out)"
    )


def complete_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, models: Iterable[str]) -> None:
    """Reads ``--models`` and ``--seeds`` as lists, checks them, and puts the defaults of the other options."""
    args.models = list(models) if args.models == "all" else args.models.split(",")
    for model in args.models:
        if model not in models:
            parser.error(f"unknown model {model!r}: choose from {', '.join(models)}, or all")
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds is {args.seeds!r}: it must be numbers, comma separated")
    args.device = args.device if args.device != "auto" else ("cuda" if _has_gpu() else "cpu")
    args.jobs = args.jobs or min(len(args.models) * len(args.seeds), max(3, os.cpu_count() or 1))
    args.results = Path(args.results or args.out / "summary")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def title_of(data: Path) -> str:
    """What a prepared folder holds."""
    request = json.loads((REPOSITORY / data / "dataset.json").read_text()).get("request", {})
    return "SCAN" + (f", length cutoff {request['cutoff']}" if request.get("cutoff") else "")


def prepare_data(data: Path) -> None:
    """Generates the data when its folder has no dataset.json."""
    if not (REPOSITORY / data / "dataset.json").exists():
        command = [sys.executable, "-m", "data_prep", "scan", "--split", "length", "--cutoff", "26", "--out", str(data)]
        subprocess.run(command, cwd=REPOSITORY, env=environment(), check=True)


def make_runs(args: argparse.Namespace, comparison: Comparison) -> List[Run]:
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
            # The longest target has 48 tokens; a model that has not learned to stop is stopped at 64.
            evaluation=["--batch-size", "256", *on(args.device)],
            generation=["--max-len-b", "64"],
            generate=not args.no_generation,
        )
        for seed in args.seeds
        for model in args.models
    ]


class Watcher:
    """Progress of the trainings: bars on a terminal, otherwise a line for every evaluation."""

    def __init__(self, runs: List[Run]):
        self.seen: Dict[str, Any] = {}
        self.bars = None
        self.asked = 0.0
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bars = Progress(
                TextColumn("{task.description:<36}"), BarColumn(), TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            )  # fmt: skip
            self.ids = {
                str(r.folder): self.bars.add_task(f"{r.name} (seed {r.seed})", total=r.steps, note="") for r in runs
            }
            self.bars.start()

    def __call__(self, runs: List[Run], state: Dict[str, str]) -> None:
        finished = all(s in ("done", "failed") for s in state.values())
        if time.time() - self.asked < 5 and not finished:
            return
        self.asked = time.time()
        for run in runs:
            key = str(run.folder)
            at = position(run)
            note = "  ".join(f"{shown} {at[s]:.1f}%" for s, shown in run.subsets.items() if s in at)
            note = f"{state[key]}  {note}"
            step = run.steps if state[key] == "done" else at["step"]
            if self.bars:
                self.bars.update(self.ids[key], completed=step, note=note)
            elif self.seen.get(key) != note:
                self.seen[key] = note
                print(
                    f"{time.strftime('%H:%M:%S')}  {run.name} (seed {run.seed})  step {step}/{run.steps}  {note}",
                    flush=True,
                )

    def close(self) -> None:
        """Gives the terminal back; a live display hides its cursor."""
        if self.bars:
            self.bars.stop()


def report(runs: List[Run]) -> List[Dict[str, Any]]:
    """The records of the runs as they are: finished, or cut at the last evaluated step that all of them have reached."""
    if all(result_of(run) for run in runs):
        return [saved(run) for run in runs]
    reached = [{point["step"] for point in curve(run) if set(run.subsets) <= set(point)} for run in runs]
    common = set.intersection(*reached)
    if not common:
        raise ValueError("nothing to report yet: there is no step at which all trainings have been evaluated")
    return [
        saved(run)
        | {"name": run.name, "seed": run.seed, "folder": str(run.folder), "commands": [shlex.join(run.train_command())]}
        | partial_result(run, max(common))
        for run in runs
    ]


def summarize(args: argparse.Namespace, records: List[Dict[str, Any]], comparison: Comparison) -> Dict[str, Any]:
    sizes = "narrower than" * args.small + " Csordás 2023 Table C.1" + " (--small)" * args.small
    published = comparison.published
    return {
        "what": f"{title_of(args.data)}; universal transformers (one shared encoder and decoder layer, 3 steps), {sizes.strip()}",
        **common_summary(args, records),
        "steps": max((r["result"]["steps"] for r in records if "result" in r), default=0),
        "batch_size": args.batch_size,
        "length_window": args.length_window,
        "published": {
            model: dict(zip(("IID", "OOD", "source"), published[model])) for model in args.models if model in published
        },
    }


def common_summary(args: argparse.Namespace, records: List[Dict[str, Any]]) -> Dict[str, Any]:
    """How the records came about, and the records themselves."""
    return {
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commits": sorted({r["commit"] for r in records if r}),
        "machines": [json.loads(m) for m in sorted({json.dumps(r["machine"]) for r in records if r})],
        "seeds": args.seeds,
        "runs": records,
    }


def spread(values: List[float], digits: int = 1) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(summary: Dict[str, Any]) -> List[List[str]]:
    """Rows of text, the header first; percentages over the sentences, mean ± sample std over the seeds."""
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


def by_model(summary: Dict[str, Any]) -> Iterator[Tuple[str, List[Dict[str, Any]], str, str]]:
    """For every model its records that have a result, the steps they took and whether some failed, and where they are."""
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


def as_text(rows: List[List[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(summary: Dict[str, Any]) -> str:
    lines = markdown_lines([row[:-1] for row in table(summary)])
    machine = machines(summary)
    sources = "; ".join(sorted({p["source"] for p in summary["published"].values()}))
    return "\n".join(
        [
            f"# {summary['what']}",
            "",
            f"`{summary['command']}`",
            "",
            f"Commit {', '.join(summary['commits'])}; {machine}; batch {summary['batch_size']}, length window {summary['length_window']}, "
            f"seeds {', '.join(map(str, summary['seeds']))}. IID is the subset `valid`, OOD `gen`; exact match in percent at the last "
            "step"
            + (", mean ± sample standard deviation over the seeds" if len(summary["seeds"]) > 1 else "")
            + "."
            + f" The published numbers are the papers' ({sources}), after 50,000 steps of 256, five seeds, as fractions."
            * bool(sources),
            "",
            *lines,
            "",
        ]
    )


def markdown_lines(rows: List[List[str]]) -> List[str]:
    """The lines of a table, the first row being its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def machines(summary: Dict[str, Any]) -> str:
    """The machines that the runs ran on, as text."""
    return "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in summary["machines"])


def plot(summary: Dict[str, Any], path: Path) -> None:
    """Accuracy through training: OOD solid, IID dashed; mean over seeds, with a band from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.2))
    models = list(dict.fromkeys(r["name"] for r in summary["runs"] if r and "result" in r))
    for number, model in enumerate(models):
        curves = [r["result"]["curve"] for r in summary["runs"] if r and r["name"] == model and "result" in r]
        for subset, style in (("valid", "--"), ("gen", "-")):
            steps = sorted(set.intersection(*({p["step"] for p in c if subset in p} for c in curves)))
            values = [[next(p[subset] for p in c if p["step"] == s) for c in curves] for s in steps]
            label = f"{model} ({SUBSETS[subset]})"
            axes.plot(steps, [statistics.mean(v) for v in values], style, color=f"C{number}", label=label)
            if len(curves) > 1:
                axes.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], color=f"C{number}", alpha=0.15, lw=0
                )
    axes.set(xlabel="training step", ylabel="exact match, %", ylim=(-2, 102), title=summary["what"].partition(";")[0])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8 if len(models) <= 8 else 5, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(comparison: Comparison = QUICKSTART) -> int:
    """Trains, evaluates and reports the models of a comparison beside their published numbers."""
    args = parse_arguments(comparison)

    def publish(records: List[Dict[str, Any]]) -> None:
        summary = summarize(args, records, comparison)
        write_results(args.results, summary, as_markdown(summary))
        print(f"\n{title_of(args.data)}: exact match on commands as long as in training (IID) and longer (OOD)\n")
        print(as_text(table(summary)))

    return carry_out(args, make_runs(args, comparison), lambda: prepare_data(args.data), publish)


def write_results(prefix: Path, summary: Dict[str, Any], markdown: str) -> None:
    """PREFIX.json, PREFIX.md, and the curves as PREFIX.png."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(prefix.with_suffix(".json"), summary)
    prefix.with_suffix(".md").write_text(markdown)
    plot(summary, prefix.with_suffix(".png"))


def carry_out(
    args: argparse.Namespace,
    runs: List[Run],
    prepare: Callable[[], None],
    publish: Callable[[List[Dict[str, Any]]], None],
) -> int:
    """Prepares the data, trains and evaluates ``runs``, or with ``--report`` only reads them, and publishes their records.

    Returns the exit status.
    """
    os.chdir(REPOSITORY)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a kill, too, ends the trainings with it
    started = time.time()
    try:
        if args.report:
            records = report(runs)
        else:
            prepare()
            print(f"{len(runs)} trainings on {args.device}, {args.jobs} at a time:")
            for run in runs:
                print(f"  {shlex.join(run.train_command())}")
            with contextlib.closing(Watcher(runs)) as watcher:
                records = run_all(runs, args.jobs, watcher)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        return 130
    publish(records)
    print(
        f"\nlogs: FOLDER/train.log, checkpoints: FOLDER/{runs[0].checkpoint.name}, plot: {args.results.with_suffix('.png')}"
    )
    print(f"{(time.time() - started) / 60:.1f} minutes in all")
    failed = [run for run, record in zip(runs, records) if "result" not in record]
    for run in failed:
        print(f"error: {run.name} (seed {run.seed}) failed; see {run.log}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

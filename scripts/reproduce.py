"""Reproduces a published table with one command: trains and evaluates its rows, and sets them
beside the published numbers.

    python scripts/reproduce.py list                                            # the recipes
    python scripts/reproduce.py park_kim_table_4 --dry-run                      # the plan and every command
    python scripts/reproduce.py park_kim_table_4 --rows linear,linear-l2 --seeds 3 --jobs 6
    python scripts/reproduce.py thesis_table_5_1 --rows ndr --on forward --steps-scale 0.1
    python scripts/reproduce.py thesis_table_4_1 --device cuda --slurm table_4_1.sbatch && sbatch table_4_1.sbatch

RECIPE is a file of scripts/recipes, or the path of your own. Finished runs are skipped, stopped ones are resumed from
their last checkpoint. A training that diverges is stopped and counts as "Fail". See docs/reproducing.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import quickstart  # noqa: E402
import recipe as recipes  # noqa: E402
import verdicts  # noqa: E402
from recipe import Data, Recipe, RecipeError  # noqa: E402
from runs import REPOSITORY, Run, begun, check_data, end, environment, on, run_all, schedule, write_json  # noqa: E402
from verdicts import Trial  # noqa: E402


def parse_arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help=f"one of: {', '.join(recipes.names())}; or the path of a .yaml file; or list")
    parser.add_argument("--rows", default="all", help="comma separated (default: all that can be trained)")
    parser.add_argument("--on", default="all", help="the recipe's data for training, comma separated (default: all)")
    parser.add_argument(
        "--seeds", help="a number N: seeds 1 to N; or a list, as 4,5,6 (default: as many as the paper has)"
    )
    parser.add_argument(
        "--steps-scale", type=float, default=1.0, help="factor on the published number of steps (default: 1)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--jobs", type=int, help="parallel trainings (default: one per core; three per GPU)")
    parser.add_argument(
        "--memory-guard",
        type=float,
        default=3.0,
        metavar="GB",
        help="GB of free memory, on the machine and on its GPU, needed to start another "
        "training (default 3; 0: no check)",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data-bin"), help="parent of the data folders (default: data-bin)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the runs (default: runs/RECIPE, with the scale of the steps)"
    )
    parser.add_argument("--results", help="also write PREFIX.json, .md, .tex and .png (default: summary.* in --out)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the plan and every command; run and write nothing")
    what.add_argument("--report", action="store_true", help="train nothing; report the runs in --out")
    what.add_argument(
        "--slurm", type=Path, metavar="FILE", help="prepare the data and write an sbatch script of the same runs"
    )
    what.add_argument(
        "--index", type=int, metavar="I", help="do only run number I of the plan (from 0), for --slurm's script"
    )
    args = parser.parse_args(line)
    if args.recipe == "list":
        return args
    try:
        args.recipe_path = recipes.find(args.recipe)
        args.recipe = recipes.read(args.recipe_path)
    except RecipeError as error:
        parser.error(str(error))
    _complete(parser, args)
    return args


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Checks the options against the recipe, and sets the defaults."""
    recipe: Recipe = args.recipe
    trained = [name for name, row in recipe.rows.items() if row.arguments is not None]
    args.rows = trained if args.rows == "all" else args.rows.split(",")
    for name in args.rows:
        if name not in trained:
            why = f" ({recipe.rows[name].missing})" if name in recipe.rows else ""
            parser.error(
                f"--rows has {name!r}, which is not among the rows that can be trained{why}: {', '.join(trained)}"
            )
    args.on = list(recipe.data) if args.on == "all" else args.on.split(",")
    for name in args.on:
        if name not in recipe.data:
            parser.error(f"--on has {name!r}, which is not among the recipe's data: {', '.join(recipe.data)}")
    args.seeds = _seeds(parser, args.seeds, recipe.seeds)
    if not 0 < args.steps_scale < float("inf"):
        parser.error(f"--steps-scale is {args.steps_scale}: choose a number above 0")
    if args.memory_guard < 0:
        parser.error(f"--memory-guard is {args.memory_guard}: choose 0 or more")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}: choose at least 1")
    if args.slurm and args.device == "auto":
        parser.error(
            "--slurm needs --device cuda or --device cpu: the machine that writes the script "
            "may lack the device of the runs"
        )
    if args.device == "auto":
        args.device = "cuda" if quickstart.has_gpu() else "cpu"
    scale = f"-x{args.steps_scale:g}" if args.steps_scale != 1 else ""
    args.out = args.out or Path("runs", recipe.name + scale)
    args.results = Path(args.results or args.out / "summary")
    args.trials = plan(args)
    if not args.trials:
        parser.error("no row in --rows is trained on the data in --on")
    if args.index is not None and not 0 <= args.index < len(args.trials):
        parser.error(f"--index is {args.index}: the plan has runs 0 to {len(args.trials) - 1}")


def _seeds(parser: argparse.ArgumentParser, text: str | None, published: int) -> list[int]:
    if text is None:
        return list(range(1, published + 1))
    if not re.fullmatch(r"\d+(,\d+)*,?", text) or text == "0":
        parser.error(f"--seeds is {text!r}: it must be a number of seeds, or a list as 4,5,6 (one seed: 4,)")
    if "," not in text:
        return list(range(1, int(text) + 1))
    return list(dict.fromkeys(int(seed) for seed in text.strip(",").split(",")))


def plan(args: argparse.Namespace) -> list[Trial]:
    """The runs, with the first seed of every row before any second seed."""
    recipe: Recipe = args.recipe
    trials = []
    for seed in args.seeds:
        for name in args.rows:
            for data in recipe.rows[name].on:
                if data in args.on:
                    trials.append(Trial(make_run(args, name, data, seed), name, data))
    return trials


def make_run(args: argparse.Namespace, name: str, data: str, seed: int) -> Run:
    recipe: Recipe = args.recipe
    row, source = recipe.rows[name], recipe.data[data]
    steps = max(1, round(row.steps * args.steps_scale))
    every = max(1, min(steps, round(recipe.validate_every * min(1.0, args.steps_scale))))
    arguments = [
        *recipe.train,
        *source.arguments,
        *row.arguments,
        "--batch-size-valid",
        str(recipe.batch_size_valid),
        *schedule(every, args.device),
    ]
    columns = recipe.columns_of(data)
    # Training shows accuracy only.
    shown = {column.subset: key for key, column in columns.items() if column.metric == "accuracy"}
    overrides = ["--model-overrides", row.overrides] if row.overrides else []
    return Run(
        name=f"{row.label}, {data}" if len(recipe.data) > 1 else row.label,
        seed=seed,
        folder=args.out / f"{name}-{data}-seed{seed}",
        data=args.data / source.folder,
        steps=steps,
        arguments=arguments,
        subsets={subset: shown.get(subset, subset) for subset in source.subsets},
        evaluation=["--batch-size", str(recipe.batch_size_valid), *overrides, *on(args.device)],
        generation=list(recipe.generate),
        generate=bool(recipe.generate),
        best=recipe.checkpoint == "best",
    )


def used(args: argparse.Namespace) -> dict[str, Data]:
    """The data of the plan."""
    return {name: args.recipe.data[name] for name in dict.fromkeys(trial.data for trial in args.trials)}


def prepare_command(args: argparse.Namespace, data: Data) -> list[str]:
    return ["python", "-m", "data_prep", *shlex.split(data.prepare), "--out", str(args.data / data.folder)]


def prepare(args: argparse.Namespace) -> None:
    """Makes missing data folders.

    Raises:
        ValueError: a folder needs a file from the user, cannot be made, or holds other data.
    """
    for name, data in used(args).items():
        if (args.data / data.folder / "dataset.json").exists():
            check_data(args.data / data.folder, shlex.split(data.prepare))
            continue
        command = prepare_command(args, data)
        if data.needs_file:
            raise ValueError(
                f"the data {name!r} do not exist and need a file that cannot be downloaded: {shlex.join(command)}, "
                "with its path for FILE (docs/datasets.md)"
            )
        print(shlex.join(command), flush=True)
        made = subprocess.run([sys.executable, *command[1:]], cwd=REPOSITORY, env=environment())
        if made.returncode:
            raise ValueError(f"the data {name!r} were not made: {shlex.join(command)}")


class Guard:
    """Decides by free memory where another training may start: ``run_all``'s ``place``.

    A training that has not logged anything may not have allocated its memory yet, so ``gigabytes`` are reserved for it.
    The first one always starts.

    Args:
        gigabytes: required free memory; 0 disables the check.
        gpus: their ids; empty for a CPU.
        free: returns the free gigabytes of a GPU, or (None) of the machine.
    """

    def __init__(
        self, gigabytes: float, gpus: Sequence[str] = (), free: Callable[[str | None], float] | None = None
    ) -> None:
        self.gigabytes, self.gpus, self.free = gigabytes, list(gpus), free or free_gigabytes

    def __call__(self, active: list[dict[str, Any]]) -> dict[str, str] | None:
        if active and not self._room(None, active):
            return None
        if not self.gpus:
            return {}
        there = {gpu: [job for job in active if job["where"].get("CUDA_VISIBLE_DEVICES") == gpu] for gpu in self.gpus}
        for gpu in sorted(self.gpus, key=lambda gpu: len(there[gpu])):
            if not active or self._room(gpu, there[gpu]):
                return {"CUDA_VISIBLE_DEVICES": gpu}
        return None

    def _room(self, gpu: str | None, jobs: list[dict[str, Any]]) -> bool:
        if not self.gigabytes:
            return True
        set_aside = self.gigabytes * sum(not begun(job) for job in jobs)
        return self.free(gpu) - set_aside >= self.gigabytes


def free_gigabytes(gpu: str | None) -> float:
    """Free memory of a GPU, or of the machine for None. Raises ValueError if it cannot be determined."""
    try:
        if gpu is None:
            kilobytes = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
            return int(kilobytes[1]) / 2**20
        command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 2**10
    except (OSError, TypeError, ValueError, subprocess.CalledProcessError) as error:
        raise ValueError(f"free memory is unknown ({error}): use --memory-guard 0 to disable the check") from None


def visible_gpus() -> list[str]:
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def told(args: argparse.Namespace) -> list[str]:
    """The options that select the same runs again."""
    return [
        "python", "scripts/reproduce.py", str(args.recipe_path),
        "--rows", ",".join(args.rows), "--on", ",".join(args.on), "--seeds", ",".join(map(str, args.seeds)) + ",",
        "--steps-scale", f"{args.steps_scale:g}", "--device", args.device,
        "--data", str(args.data), "--out", str(args.out),
    ]  # fmt: skip


def slurm_script(args: argparse.Namespace) -> str:
    """An sbatch script whose array index selects the run."""
    limit = f"%{args.jobs}" if args.jobs else ""
    gpu = ["#SBATCH --gres=gpu:1"] if args.device == "cuda" else []
    command = [sys.executable, *told(args)[1:]]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name=sg-{args.recipe.name}",
            f"#SBATCH --array=0-{len(args.trials) - 1}{limit}",
            f"#SBATCH --output={args.out.resolve()}/slurm-%a.log",
            "#SBATCH --cpus-per-task=2",
            *gpu,
            f"# {len(args.trials)} trainings: {args.recipe.title}.",
            "# Submit it again to resume: finished runs are skipped.",
            f"# Results so far: {shlex.join(told(args))} --report",
            "set -euo pipefail",
            f"cd {shlex.quote(str(REPOSITORY))}",
            f'exec {shlex.join(command)} --index "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )


def dry_run(args: argparse.Namespace) -> None:
    recipe: Recipe = args.recipe
    steps = sum(trial.run.steps for trial in args.trials)
    print(f"{recipe.title}: {recipe.source}")
    seeds = ", ".join(map(str, args.seeds))
    print(f"{len(args.trials)} trainings, {steps:,} steps in total, seeds {seeds}; dry run\n")
    for command in dict.fromkeys(shlex.join(prepare_command(args, data)) for data in used(args).values()):
        print(command)
    for number, trial in enumerate(args.trials):
        run = trial.run
        print(f"\n# {number}: {run.name} (seed {run.seed}), {run.steps:,} steps, in {run.folder}")
        for command in run.commands():
            print(shlex.join(command))
    print(f"\n{recipe.about_choices}")
    for sentence in recipe.chosen:
        print(f"- {sentence}")


def publish(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Writes PREFIX.json, .md, .tex and figures, and prints the table."""
    recipe: Recipe = args.recipe
    found = verdicts.lines(recipe, args.trials, records, args.steps_scale)
    summary = {
        "recipe": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "steps_scale": args.steps_scale,
        **quickstart.common_summary(args, [record for record in records if record]),
        "lines": [{k: v for k, v in asdict(line).items() if k != "curves"} for line in found],
        "chosen": recipe.chosen,
    }
    prefix = args.results
    prefix.parent.mkdir(parents=True, exist_ok=True)
    write_json(prefix.with_name(prefix.name + ".json"), summary)
    prefix.with_name(prefix.name + ".md").write_text(verdicts.markdown(recipe, found, summary))
    prefix.with_name(prefix.name + ".tex").write_text(verdicts.latex(recipe, found))
    verdicts.plots(recipe, found, prefix)
    print(f"\n{recipe.title} ({recipe.source})\n")
    print(quickstart.as_text(verdicts.table(recipe, found)))
    if recipe.by_length:
        publish_by_length(args, records, summary)


def publish_by_length(args: argparse.Namespace, records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Scores the translations of finished runs by length: writes PREFIX-bleu.json, .md and .png, and prints the tables.

    Exits with one line if translations are missing or come from other data.
    """
    import bleu_by_length

    recipe, how = args.recipe, args.recipe.by_length
    comparisons = {}
    try:
        for name, data in used(args).items():
            shown = (column.subset for column in recipe.columns_of(name).values() if column.metric == "bleu")
            subsets = list(dict.fromkeys(shown))
            systems = [
                bleu_by_length.System(
                    recipe.rows[trial.row].label,
                    trial.run.seed,
                    {s: bleu_by_length.find_output(trial.run.folder, s) for s in subsets},
                )
                for trial, record in zip(args.trials, records, strict=True)
                if trial.data == name and record.get("result", {}).get("generated")
            ]
            if subsets and systems:
                text = bleu_by_length.read_text(args.data / data.folder, subsets)
                comparisons[name] = bleu_by_length.compare(
                    text, systems, recipe.rows[how.baseline].label, how.bounds, how.tokenize
                )
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not comparisons:
        print("\nBLEU by length: no training has ended yet")
        return
    ended = [record["result"]["steps"] for record in records if "result" in record]
    note = (
        f"Commit {', '.join(summary['commits'])}; {quickstart.machines(summary)}. {len(ended)} of {len(records)} "
        f"trainings, of {', '.join(f'{steps:,}' for steps in sorted(set(ended)))} steps. "
        f"The settings are in `{args.results.name}.md`."
    )
    prefix = args.results.with_name(args.results.name + "-bleu")
    bleu_by_length.publish(prefix, recipe.title, summary["command"], note, comparisons)


def main() -> int:
    args = parse_arguments()
    if args.recipe == "list":
        width = max(map(len, recipes.names())) + 2
        for name in recipes.names():
            print(f"{name:<{width}}{recipes.read(recipes.find(name)).title}")
        return 0
    if args.dry_run:
        dry_run(args)
        return 0
    args.recipe_path = args.recipe_path.resolve()
    if args.slurm:
        args.slurm = args.slurm.resolve()
        os.chdir(REPOSITORY)
        return write_slurm(args)
    runs = [trial.run for trial in args.trials]
    if args.index is not None:
        runs, args.jobs = [runs[args.index]], 1
    gpus = visible_gpus() if args.device == "cuda" else []
    args.jobs = min(len(runs), args.jobs or (3 * len(gpus) if gpus else os.cpu_count() or 1))
    guard = Guard(args.memory_guard, gpus)
    return quickstart.carry_out(
        args,
        runs,
        lambda: prepare(args),
        (lambda records: None) if args.index is not None else (lambda records: publish(args, records)),
        read=lambda runs: verdicts.records_of(args.trials),
        train=lambda runs, jobs, watch: run_all(runs, jobs, watch, place=guard, share=True),
    )


def write_slurm(args: argparse.Namespace) -> int:
    try:
        prepare(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    args.slurm.write_text(slurm_script(args))
    print(f"{len(args.trials)} runs; submit them by: sbatch {args.slurm}")
    return 0


if __name__ == "__main__":
    end(main)

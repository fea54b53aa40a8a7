"""Experiments: published tables and our own, by one command each.

    python -m fairseq_sg.experiments list                                       # the recipes, and what was run
    python -m fairseq_sg.experiments show park_kim_table_4                      # the plan and every command
    python -m fairseq_sg.experiments run quickstart
    python -m fairseq_sg.experiments run park_kim_table_4 --rows linear,linear-l2 --seeds 3 --jobs 6
    python -m fairseq_sg.experiments run thesis_table_5_1 --variant small --on forward
    python -m fairseq_sg.experiments report park_kim_table_4                    # the results so far; trains nothing
    python -m fairseq_sg.experiments slurm thesis_table_4_1 t.sbatch --device cuda && sbatch t.sbatch
    python -m fairseq_sg.experiments compare results/a.json results/b.json
    python -m fairseq_sg.experiments compare results/a.json --rows linear,linear-l2
    python -m fairseq_sg.experiments render                                     # pages and pictures of results/*.json

A recipe is named, or given as the path of a .yaml file. Finished trainings are skipped, stopped ones are resumed from
their last checkpoint. A training that diverges is stopped and counts as "Fail". See docs/reproducing.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep.draws import processors
from fairseq_sg.errors import UsageError, exit_code, of_system
from fairseq_sg.experiments import arguments, report, results
from fairseq_sg.experiments import recipe as recipes
from fairseq_sg.experiments.jobs import failure, interrupt_by_signals, run_all
from fairseq_sg.experiments.memory import Guard
from fairseq_sg.experiments.plan import Plan, Trial, make_plan
from fairseq_sg.experiments.records import diverged, evaluated, nothing_left, result_of, saved, visible_gpus
from fairseq_sg.experiments.results import Results
from fairseq_sg.files import alone, check_writable
from fairseq_sg.parsers import Command, Parser, choice, from_0, positive

#: The folder of results files; an installed package may have none.
RESULTS = Path("results")


def _path(text: str) -> Path:
    """Argument type: a path; an empty one, as that of a variable without a value, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: is a variable unset?")
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fairseq-sg experiments", description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=Command
    )

    one = commands.add_parser("list", help="the recipes, and what was run of them")
    one.add_argument("--results", type=_path, default=RESULTS, metavar="FOLDER", help="default: results")

    for name, what in (
        ("show", "print the plan and every command; run and write nothing"),
        ("run", "train and evaluate, and report the results"),
        ("report", "report the runs so far; train nothing"),
        ("slurm", "prepare the data and write an sbatch script of the runs"),
    ):
        one = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        one.add_argument("recipe", metavar="RECIPE", help="the name of a recipe, or the path of a .yaml file")
        if name == "slurm":
            one.add_argument("script", type=_path, metavar="FILE", help="the script that is written")
        _add_choice(one)
        if name in ("run", "report"):
            one.add_argument(
                "--results",
                type=_path,
                metavar="PREFIX",
                help="write PREFIX.json, .md, .tex, .csv and .png (default: OUT/results); results that PREFIX.json "
                "has of other trainings stay",
            )
        if name in ("run", "slurm"):
            one.add_argument(
                "--jobs", type=positive, help="parallel trainings (default: a process per core; three per GPU)"
            )
        if name == "run":
            one.add_argument(
                "--memory-guard",
                type=from_0,
                default=3.0,
                metavar="GB",
                help="start another training, or group of --together, only if so much memory is free, on machine and "
                "GPU (default 3; 0: off)",
            )
            one.add_argument(
                "--together",
                type=positive,
                default=1,
                metavar="K",
                help="trainings per process: they take turns, and share one start-up and one GPU (default: 1)",
            )
            one.add_argument(
                "--stacked",
                action="store_true",
                help="the K trainings of --together are seeds of one model, whose steps are made at once",
            )
            one.add_argument(
                "--index", type=int, metavar="I", help="train only run number I of the plan, from 0 (for SLURM)"
            )

    one = commands.add_parser("render", help="make pages and pictures from results files, without the runs")
    one.add_argument("files", type=_path, nargs="*", metavar="FILE", help="results files (default: all of results/)")
    one.add_argument("--results", type=_path, default=RESULTS, metavar="FOLDER", help="default: results")

    what = "the common numbers of two results files, or those of two rows of one file"
    one = commands.add_parser("compare", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.add_argument("a", type=_path, metavar="A", help="a results file")
    one.add_argument("b", type=_path, nargs="?", metavar="B", help="another one: its numbers less those of A")
    one.add_argument("--rows", metavar="ROW,ROW", help="two rows of A alone: the second less the first")
    one.set_defaults(refuse=one.error)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what")
    what.add_argument("--variant", default="", help="a variant of the recipe, such as small")
    what.add_argument("--rows", default="all", help="comma separated (default: all that can be trained)")
    what.add_argument("--on", default="all", metavar="DATA", help="the recipe's data, comma separated (default: all)")
    what.add_argument("--seeds", help="a number N: seeds 1 to N; or a list: 4,5,6 (default: as many as the paper has)")
    what.add_argument("--steps-scale", type=float, default=1.0, help="factor on the number of steps (default: 1)")
    where = parser.add_argument_group("where")
    where.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    where.add_argument(
        "--step-graphs",
        type=int,
        default=0,
        metavar="N",
        help="most CUDA graphs of a training's steps, one per shape of batch (default: 0; docs/speed.md)",
    )
    where.add_argument("--data", type=_path, default=Path("data-bin"), help="folder of data (default: data-bin)")
    where.add_argument("--out", type=_path, help="folder of the runs (default: runs/RECIPE)")


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises UsageError for a wrong option."""
    recipe = recipes.read(recipes.find(args.recipe), args.variant)
    device = args.device if args.device != "auto" else "cuda" if has_gpu() else "cpu"
    choice = args.rows, args.on, args.seeds, args.steps_scale
    stacked = getattr(args, "stacked", False)
    return make_plan(recipe, *choice, device, args.data, args.out, args.step_graphs, stacked)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def list_recipes(args: argparse.Namespace) -> int:
    from fairseq_sg.experiments import render

    if args.results != RESULTS and not args.results.is_dir():
        raise UsageError(f"--results {args.results}: there is no such folder")
    rows = [["recipe", "trainings", "done", "title"]]
    files = render.read_all(args.results) if args.results.is_dir() else {}
    for found in render.overview(files):
        recipe = found.recipe
        shown = f"{recipe.name} --variant {recipe.variant}" if recipe.variant else recipe.name
        rows.append([shown, str(found.planned), str(found.done), recipe.title])
    print(report.as_text(rows))
    return 0


def _trainings(number: int) -> str:
    return "1 training" if number == 1 else f"{number} trainings"


def show(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    recipe, trials = plan.recipe, plan.trials()
    steps = sum(trial.run.steps for trial in trials)
    print(f"{recipe.title}\n{report.about_source(recipe)}")
    print(f"{_trainings(len(trials))}, {steps:,} steps in total, seeds {', '.join(map(str, plan.seeds))}\n")
    for command in dict.fromkeys(shlex.join(plan.prepare_command(data)) for data in plan.used()):
        print(command)
    for number, trial in enumerate(trials):
        run = trial.run
        print(f"\n# {number}: {run.name} (seed {run.seed}), {run.steps:,} steps, in {run.folder}")
        for command in run.commands():
            print(shlex.join(command))
    for sentence in recipe.chosen:
        print(f"\n- {sentence}" if sentence == recipe.chosen[0] else f"- {sentence}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Prepares the data, trains and evaluates, and reports.

    Returns the exit status: a training that diverged is a result, one that failed is an error.
    """
    from fairseq_sg.experiments import figures
    from fairseq_sg.experiments.progress import Progress

    if args.index is None:
        figures.pyplot()  # before hours of training, not after them
    plan = plan_of(args)
    together = _together(args, plan)
    trials = plan.trials()
    if args.index is not None and not 0 <= args.index < len(trials):
        raise UsageError(f"--index is {args.index}: the plan has runs 0 to {len(trials) - 1}")
    if plan.device == "cuda" and not has_gpu():
        # fairseq would train on the CPU.
        raise UsageError("--device is cuda, but PyTorch finds no GPU: choose cpu or auto, or see `fairseq-sg doctor`")
    chosen = trials if args.index is None else [trials[args.index]]
    runs = [trial.run for trial in chosen]
    gpus = visible_gpus() if plan.device == "cuda" else []
    processes = 3 * len(gpus) if gpus else processors()
    jobs = min(len(runs), args.jobs or processes * together)
    prefix = _prefix(args, plan)
    if args.index is None:
        figures.check_name(prefix)
        check_writable(f"--results {_file(prefix)}", _file(prefix))
    earlier = _earlier(prefix)
    if earlier:
        # Refuses results of another recipe before hours of training, not after them.
        results.merged(earlier, results.collect(plan, trials), _file(prefix))
    plan.check()
    if args.index is None:
        arguments.check(trial for trial in trials if not nothing_left(trial.run))
    started = time.time()
    interrupt_by_signals()
    try:
        plan.prepare()
        print(plan.recipe.title)
        print(f"{_trainings(len(runs))} on {plan.device}, {jobs} at a time, in {plan.out}; for every command: ", end="")
        print(f"fairseq-sg experiments show {shlex.join([args.recipe, *plan.options()])}\n", flush=True)
        with contextlib.closing(Progress(runs, plan.recipe.full_name)) as progress:
            ended = run_all(runs, jobs, progress, Guard(args.memory_guard, gpus), together=together)
    except KeyboardInterrupt:
        print("stopped; the same command resumes from the last checkpoints", file=sys.stderr)
        return 130
    try:
        if args.index is None:
            publish(plan, trials, prefix)
            print(f"{(time.time() - started) / 60:.1f} minutes in all")
    finally:  # also where the results cannot be written
        failed = _end(chosen)
    # How a training ended cannot be recorded on a full disk.
    unrecorded = any(not record.keys() & {"result", "diverged"} for record in ended)
    return failed or int(unrecorded)


def _together(args: argparse.Namespace, plan: Plan) -> int:
    """The trainings of a process. Raises UsageError for a stack of one."""
    if not plan.stacked:
        return args.together
    together = min(args.together, len(plan.seeds), args.jobs or args.together)
    if together == 1 or args.index is not None:
        raise UsageError(
            "--stacked makes the steps of several seeds at once: give --together K, at least two --seeds and --jobs, "
            "and no --index"
        )
    return together


def report_runs(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    trials = plan.trials()
    if not any(saved(trial.run) for trial in trials):
        raise UsageError(
            f"{plan.out} has no runs of this plan: start them with `fairseq-sg experiments run`, or name their folder "
            "with --out"
        )
    try:
        publish(plan, trials, _prefix(args, plan))
    finally:
        failed = _end(trials)
    otherwise = [run for run in (trial.run for trial in trials) if result_of(run) and not evaluated(run)]
    if otherwise:
        print(
            f"warning: {_trainings(len(otherwise))} evaluated otherwise than the recipe asks now, such as "
            f"{otherwise[0].folder}: numbers are missing until `fairseq-sg experiments run` evaluates again",
            file=sys.stderr,
        )
    return failed


def publish(plan: Plan, trials: Sequence[Trial], prefix: Path) -> None:
    """Writes PREFIX.json and what is rendered from it, and prints the table."""
    from fairseq_sg.experiments import by_length, render

    with alone(prefix.parent):  # it reads, unites and writes
        own, earlier = results.collect(plan, trials), _earlier(prefix)
        found = results.merged(earlier, own, _file(prefix)) if earlier else own
        try:
            if plan.recipe.by_length:
                found.bleu = by_length.score(plan, trials, own, found.bleu)
        finally:
            # Also where translations are missing: the other numbers are right.
            try:
                found.write(_file(prefix))
                written = render.write_pages(found, prefix)
            except OSError as error:  # that of a full disk names no file
                where = f"{_file(prefix)}, or a page or figure of it,"
                raise UsageError(f"{where} cannot be written: {of_system(error)}") from error
    print(f"\n{plan.recipe.title}\n{report.about_source(plan.recipe)}\n")
    lines = report.lines(found)
    print(report.as_text(report.table(plan.recipe, lines)))
    legend = report.legend(plan.recipe, lines, found.steps_scale)
    print("\n" + "\n".join(legend).replace("`", ""))
    for sentence in report.mixed_code(found):
        print(f"warning: {sentence}")
    if found.bleu:
        print("\n" + by_length.as_tables(found.bleu))
    print(f"\nresults: {', '.join([str(_file(prefix)), *(path.name.removeprefix(prefix.name) for path in written)])}")
    print(f"logs: {plan.out}/*/train.log, checkpoints: {plan.out}/*/{trials[0].run.checkpoint.name}")


def _prefix(args: argparse.Namespace, plan: Plan) -> Path:
    """The results files without their endings."""
    found = args.results or plan.out / "results"
    if found.name in ("", ".."):
        raise UsageError(f"--results {found} names no file: give the path of one, without its ending")
    return found.with_name(found.name.removesuffix(".json"))


def _file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def _earlier(prefix: Path) -> Results | None:
    return results.read(_file(prefix)) if _file(prefix).exists() else None


def _end(trials: Sequence[Trial]) -> int:
    for trial in trials:
        run, record = trial.run, saved(trial.run)
        if diverged(run):
            print(f"{run.name} (seed {run.seed}) diverged: {diverged(run)['why']}; see {run.log}", file=sys.stderr)
        if "failed" in record:
            print(failure(run), file=sys.stderr)
    return int(any("failed" in saved(trial.run) for trial in trials))


def slurm(args: argparse.Namespace) -> int:
    if args.device == "auto":
        raise UsageError(
            "slurm needs --device cuda or --device cpu: the machine that writes the script may lack that of the runs"
        )
    if args.script.is_dir():
        raise UsageError(f"{args.script} is a folder: name a file in it")
    if not args.script.absolute().parent.is_dir():
        raise UsageError(f"{args.script}: No such file or directory: name a file in a folder that exists")
    plan = plan_of(args)
    plan.check()
    arguments.check(plan.trials())
    plan.prepare()
    plan.out.mkdir(parents=True, exist_ok=True)
    args.script.write_text(slurm_script(plan, args.recipe, args.jobs), "utf-8")
    print(f"{len(plan.trials())} runs; submit them by: {shlex.join(['sbatch', str(args.script)])}")
    return 0


def slurm_script(plan: Plan, recipe: str, jobs: int | None) -> str:
    """An sbatch script whose array index selects the run."""
    number = len(plan.trials())
    given = str(Path(recipe).resolve()) if recipe.endswith(".yaml") else recipe
    chosen = shlex.join([given, *plan.options()])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "#SBATCH --job-name=" + shlex.quote(f"sg-{plan.recipe.full_name}"),
            f"#SBATCH --array=0-{number - 1}{f'%{jobs}' if jobs else ''}",
            "#SBATCH --output=" + shlex.quote(str(plan.out.resolve()).replace("%", "%%") + "/slurm-%a.log"),
            "#SBATCH --cpus-per-task=2",
            *(["#SBATCH --gres=gpu:1"] if plan.device == "cuda" else []),
            f"# {number} trainings: {plan.recipe.title}.",
            "# Submit it again to resume: finished runs are skipped.",
            f"# Results so far: fairseq-sg experiments report {chosen}",
            "set -euo pipefail",
            f"cd {shlex.quote(os.getcwd())}",
            f'exec {shlex.quote(sys.executable)} -m fairseq_sg.experiments run {chosen} --index "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )


def render_files(args: argparse.Namespace) -> int:
    from fairseq_sg.experiments import render

    files = args.files or sorted(args.results.glob("*.json"))
    if not files:
        raise UsageError(f"{args.results} has no results files: give their paths, or --results FOLDER")
    written = render.render(files)
    if not args.files and (args.results / render.QUESTIONS).exists():
        written += render.render_questions(args.results, args.results.parent / "README.md")
    print("\n".join(map(str, written)))
    return 0


def compare(args: argparse.Namespace) -> int:
    if (args.b is None) == (args.rows is None):
        args.refuse("compare takes two files, or one file and --rows ROW,ROW")
    return _compare_files(args) if args.rows is None else _compare_rows(args)


def _compare_files(args: argparse.Namespace) -> int:
    names = (args.a.stem, args.b.stem) if args.a.stem != args.b.stem else (str(args.a), str(args.b))
    a, b = results.read(args.a), results.read(args.b)
    if a.recipe.unit != b.recipe.unit:
        units = {"percent": "in percent", "fraction": "a fraction"}
        raise UsageError(
            f"accuracies of {args.a} are {units[a.recipe.unit]}, those of {args.b} {units[b.recipe.unit]}: give both "
            "recipes one 'unit', and make the results again with `fairseq-sg experiments report`"
        )
    rows = report.compare(a, b, names)
    if len(rows) == 1:
        left_out = ", ".join(report.measured_otherwise(a, b))
        raise UsageError(
            f"{args.a} and {args.b} have no row, data and column in common"
            f"{f' ({left_out}: measured otherwise)' if left_out else ''}: compare pairs rows of equal name; for two "
            "rows of one file, compare FILE --rows A,B"
        )
    print(report.as_text(rows))
    print(f"\nThe difference is {names[1]} less {names[0]}.")
    for sentence in report.unlike(a, b):
        print(f"note: {sentence}")
    return 0


def _compare_rows(args: argparse.Namespace) -> int:
    found = results.read(args.a)
    names = tuple(args.rows.split(","))
    if len(set(names)) != 2 or len(names) != 2:
        raise UsageError(f"--rows is {args.rows!r}: give two rows, separated by a comma")
    there = list(dict.fromkeys(line.row for line in report.lines(found) if line.planned))
    for name in names:
        if name not in there:
            raise UsageError(f"--rows: {args.a} has no row {choice(name, there)}")
    rows = report.compare_rows(found, names)
    if len(rows) == 1:
        raise UsageError(f"{args.a} has no column with numbers of both {names[0]} and {names[1]} on the same data")
    print(report.as_text(rows))
    print(f"\nThe difference is {names[1]} less {names[0]}.")
    if len(set(map(found.recipe.trained_as, names))) == 1:
        print("Both rows show the same trainings: numbers and intervals are those of the seeds that both have.")
    return 0


COMMANDS = {
    "list": list_recipes,
    "show": show,
    "run": run,
    "report": report_runs,
    "slurm": slurm,
    "render": render_files,
    "compare": compare,
}


def main(line: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a training failed; 2 for an error that the user can fix; 130 if interrupted."""
    args = make_parser().parse_args(line)
    try:
        return COMMANDS[args.command](args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {of_system(error)}", file=sys.stderr)
        return 2
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(exit_code(main))

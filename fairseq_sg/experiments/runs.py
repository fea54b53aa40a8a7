"""Trainings as subprocesses: ``fairseq-train`` commands, run in parallel, watched and resumable,
with their curves read back.

A run has a folder of its own with ``train.log``, the checkpoints and ``run.json``: its commands and, when it
is finished, its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from fairseq_sg.experiments import groups
from fairseq_sg.experiments.quantities import QUANTITIES, part
from fairseq_sg.files import write_json

#: The folder that has the package: a clone, or site-packages.
_HOME = Path(__file__).resolve().parents[2]
_LOG_LINE = re.compile(r"\| INFO \| (\w+) \| (\{.*\})\s*$")
#: A training with this accuracy in percent on some subset has learned something …
LEARNT = 10.0
#: … and has collapsed if its accuracy is 0 on all subsets in this many successive evaluations.
EVALUATIONS_AT_ZERO = 5
#: Final states of a run.
ENDED = ("done", "failed", "diverged")


@dataclass
class Run:
    """One training: a model's arguments, a seed, and a folder.

    Attributes:
        name: the model's name in tables.
        seed: fairseq's ``--seed``.
        folder: the folder of all its files.
        data: the data folder.
        steps: ``--max-update``.
        arguments: all other arguments of ``fairseq-train``.
        subsets: evaluated during training and at the end; the values are their names in tables.
        types: types and groups of examples whose accuracies are kept too.
        evaluation: further arguments of ``fairseq-validate`` and ``fairseq-generate`` (besides device and batch size).
        generation: further arguments of ``fairseq-generate`` alone.
        decodings: what is decoded at the end, besides the teacher-forced pass: subsets, each with further arguments of
            ``fairseq-generate`` or "".
        best: whether to evaluate the best checkpoint by ``checkpoint_metric`` on the first subset (the latest of
            several) instead of the last one.
        checkpoint_metric: one of ``QUANTITIES``.
        model_overrides: of the evaluation.
        more_overrides: of further evaluations.
        analyses: name -> arguments of ``fairseq-sg analysis``, which writes NAME.json into the folder.
        analysed: the numbers that are kept of them, ``NAME/key/key``.
    """

    name: str
    seed: int
    folder: Path
    data: Path
    steps: int
    arguments: list[str]
    subsets: dict[str, str]
    types: tuple[str, ...] = ()
    evaluation: list[str] = field(default_factory=list)
    generation: list[str] = field(default_factory=list)
    decodings: tuple[tuple[str, str], ...] = ()
    best: bool = False
    checkpoint_metric: str = "accuracy"
    model_overrides: str = ""
    more_overrides: tuple[str, ...] = ()
    analyses: dict[str, list[str]] = field(default_factory=dict)
    analysed: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return self.arguments[self.arguments.index("--task") + 1]

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def checkpoint(self) -> Path:
        return self.folder / ("checkpoint_best.pt" if self.best else "checkpoint_last.pt")

    def train_command(self) -> list[str]:
        quantity = QUANTITIES[self.checkpoint_metric]
        best = ["--best-checkpoint-metric", quantity.logged] if self.best else []
        best += ["--maximize-best-checkpoint-metric"] if self.best and quantity.more_is_better else []
        return [
            "fairseq-train", str(self.data), "--user-dir", "fairseq_sg", *self.arguments, *best,
            "--seed", str(self.seed), "--max-update", str(self.steps), "--save-dir", str(self.folder),
            "--valid-subset", ",".join(self.subsets), "--log-format", "json",
        ]  # fmt: skip

    def validate_command(self, model_overrides: str | None = None) -> list[str]:
        return [
            "fairseq-validate", str(self.data), *self._evaluated(model_overrides),
            "--valid-subset", ",".join(self.subsets), "--log-format", "json", *self.evaluation,
        ]  # fmt: skip

    def generate_command(self, subset: str, more: str = "") -> list[str]:
        return [
            "fairseq-generate", str(self.data), *self._evaluated(), "--gen-subset", subset, "--beam", "1",
            "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none", *self.evaluation, *self.generation,
            *shlex.split(more),
        ]  # fmt: skip

    def _evaluated(self, model_overrides: str | None = None) -> list[str]:
        overrides = self.model_overrides if model_overrides is None else model_overrides
        changed = ["--model-overrides", overrides] if overrides else []
        return ["--user-dir", "fairseq_sg", "--task", self.task, "--path", str(self.checkpoint), *changed]

    def outputs(self) -> dict[Path, list[str]]:
        """The commands of the evaluation, by the file of their output."""
        return {
            self.folder / "validate.log": self.validate_command(),
            **{self.more_log(n): self.validate_command(more) for n, more in enumerate(self.more_overrides)},
            **{self.decoded_log(*how): self.generate_command(*how) for how in self.decodings},
            **{
                self.folder / f"{name}.log": ["fairseq-sg", "analysis", *words] for name, words in self.analyses.items()
            },
        }

    def more_log(self, number: int) -> Path:
        """The output of further evaluation ``number``."""
        return self.folder / f"validate-{number + 1}.log"

    def decoded_log(self, subset: str, more: str = "") -> Path:
        """The output of a decoding."""
        number = [how for how in self.decodings if how[0] == subset and how[1]].index((subset, more)) + 1 if more else 0
        return self.folder / (f"generate-{subset}-{number}.log" if number else f"generate-{subset}.log")

    def commands(self) -> list[list[str]]:
        """The commands of the training and of its evaluation."""
        return [self.train_command(), *self.outputs().values()]


@dataclass
class Job:
    """A started run.

    Attributes:
        lock: of its folder; its process inherits it.
        where: environment variables of its processes.
        process: None if the run had ended before.
        stage: "training" or "evaluating".
        since: time of the start.
        size: of the log when it was last read.
        start: where the log of this start begins.
        begun: whether this start has logged a step.
    """

    run: Run
    lock: IO[str]
    where: dict[str, str]
    process: subprocess.Popen | groups.Member | None = None
    stage: str = "training"
    since: float = field(default_factory=time.time)
    size: int = 0
    start: int = 0
    begun: bool = False


def end(main: Callable[..., int], *arguments: Any) -> None:
    """Exits with the return value of ``main``; with 1 if the reader of the output, such as ``head``, has closed it."""
    try:
        try:
            code = main(*arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python flushes the rest at exit and fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def on(device: str) -> list[str]:
    """The arguments of fairseq's commands for the device ``cpu`` or ``cuda``."""
    return ["--cpu"] if device == "cpu" else []


def schedule(every: int, device: str) -> list[str]:
    """Arguments of a resumable training that evaluates and saves every ``every`` steps and
    keeps the last checkpoint.
    """
    return [
        "--required-batch-size-multiple", "1",
        "--validate-interval-updates", str(every), "--validate-interval", "1000000",
        "--save-interval-updates", str(every), "--keep-interval-updates", "1", "--save-interval", "1000000",
        "--no-epoch-checkpoints", "--log-interval", "100",
        "--num-workers", "0" if device == "cpu" else "1", *on(device),
    ]  # fmt: skip


def executable(command: list[str]) -> list[str]:
    """The command with this interpreter and package, from whichever folder it is started.

    ``fairseq-train`` becomes the module ``fairseq_cli.train``, ``fairseq-sg`` the module ``fairseq_sg``, and
    ``--user-dir fairseq_sg`` the path of this package.
    """
    program, *arguments = command
    for place, word in enumerate(arguments):
        if arguments[place - 1 : place + 1] == ["--user-dir", "fairseq_sg"]:
            arguments[place] = str(_HOME / word)
    module = "fairseq_sg" if program == "fairseq-sg" else program.replace("fairseq-", "fairseq_cli.")
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """One thread per training: parallel trainings use the cores better than one multithreaded training."""
    return os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}


def events(log: Path) -> list[dict[str, Any]]:
    """fairseq's JSON log lines in order, with numbers as floats; ``kind`` is train_inner, train, or a subset."""
    if not log.exists():
        return []
    found = []
    for line in log.read_text(errors="replace").splitlines():
        match = _LOG_LINE.search(line)
        if match:
            values = {key: _number(value) for key, value in json.loads(match[2]).items()}
            found.append({"kind": match[1], **values})
    return found


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def curve(run: Run) -> list[dict[str, float]]:
    """Every quantity of every subset at every validation:
    [{step, SUBSET: percent, SUBSET/TYPE: percent, SUBSET_loss: bits per token, …}].
    """
    points: dict[int, dict[str, float]] = {}
    for event in events(run.log):
        subset = event["kind"]
        if subset in run.subsets:
            step = int(event[f"{subset}_num_updates"])
            point = points.setdefault(step, {"step": step})
            point |= {QUANTITIES[name].key(place): value for name, place, value in _values(run, event)}
    return [points[step] for step in sorted(points)]


def _values(run: Run, event: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The quantity, ``part`` and value of each number in a log line of a subset."""
    subset = event["kind"]
    for name, quantity in QUANTITIES.items():
        for kind in ("", *run.types):
            logged = f"{subset}_{quantity.logged}_{kind}" if kind else f"{subset}_{quantity.logged}"
            if logged in event:
                yield name, part(subset, kind), event[logged]


def _has(point: dict[str, float], subset: str) -> bool:
    """Whether a point of a curve has a number of the subset."""
    return any(quantity.key(subset) in point for quantity in QUANTITIES.values())


def complete(run: Run, points: list[dict[str, float]]) -> list[dict[str, float]]:
    """The points of a curve that have every subset of the training: the recipe may have got more since then."""
    there = [subset for subset in run.subsets if any(_has(point, subset) for point in points)]
    return [point for point in points if all(_has(point, subset) for subset in there)]


def divergence(run: Run, finished: bool = False) -> dict[str, Any] | None:
    """The reason and step if a training counts as "Fail" by its log; else None.

    A training fails in two ways. Its loss is NaN or infinite (or fairseq gave up for that reason). Or its accuracy
    collapsed: it was at least ``LEARNT`` percent on some subset and is 0 on all of them at the last
    ``EVALUATIONS_AT_ZERO`` evaluations, or at the last one of a training that has ``finished``.
    """
    for event in events(run.log):
        prefix = f"{event['kind']}_" if event["kind"] in run.subsets else ""
        for name in ("loss", "nll_loss"):
            loss = event.get(f"{prefix}{name}", 0.0)
            if isinstance(loss, float) and not math.isfinite(loss):
                where = f" on {event['kind']}" if prefix else ""
                return {"step": int(event.get(f"{prefix}num_updates", 0)), "why": f"the loss{where} is {loss}"}
    if _gave_up(run):
        return {"step": position(run)["step"], "why": "a gradient is not finite (FloatingPointError)"}
    points = [point for point in curve(run) if all(subset in point for subset in run.subsets)]
    best = [max(point[subset] for subset in run.subsets) for point in points]
    zeros = len(best) - next((i + 1 for i in range(len(best) - 1, -1, -1) if best[i] > 0), 0)
    if zeros >= (1 if finished else EVALUATIONS_AT_ZERO) and max(best) >= LEARNT:
        fell = points[len(points) - zeros]["step"]
        return {
            "step": fell,
            "why": f"the accuracy was {max(best):.1f} %, fell to 0 at step {fell} and did not recover",
        }
    return None


def _gave_up(run: Run) -> bool:
    """Whether the last start of the training ended because of a gradient that is not finite."""
    last = run.log.read_text(errors="replace").rpartition("\n$ fairseq-train ")[2]
    return "\nFloatingPointError" in last


def selected(run: Run, points: list[dict[str, float]]) -> dict[str, float]:
    """The point of a curve whose checkpoint is evaluated: the last one, or the latest of the
    best on the first subset.
    """
    points = complete(run, points)
    selector, quantity = next(iter(run.subsets)), QUANTITIES[run.checkpoint_metric]
    return max(points, key=lambda point: (quantity.rank(point, selector) if run.best else 0, point["step"]))


def partial_result(run: Run, step: int) -> dict[str, Any] | None:
    """The result at ``step`` of an unfinished training from its log: accuracies, curve and minutes up to there."""
    points = [point for point in curve(run) if point["step"] <= step]
    if not points or points[-1]["step"] != step or points[-1] not in complete(run, points):
        return None
    chosen = selected(run, points)
    places = [part(subset, kind) for subset in run.subsets for kind in ("", *run.types)]
    stamps = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ", _log_until(run, step), re.MULTILINE)
    first, last = (datetime.fromisoformat(stamp) for stamp in (stamps[0], stamps[-1]))
    return {
        "minutes": (last - first).total_seconds() / 60,
        "result": {
            "steps": step,
            "checkpoint_step": chosen["step"],
            **{
                name: {p: chosen[quantity.key(p)] for p in places if quantity.key(p) in chosen}
                for name, quantity in QUANTITIES.items()
                if any(quantity.key(p) in chosen for p in places)
            },
            "generated": {},
            "curve": points,
        },
    }


def _log_until(run: Run, step: int) -> str:
    """The log up to the last line about ``step``."""
    text = run.log.read_text(errors="replace")
    return text[: text.rindex(f'_num_updates": "{step}"')]


def position(run: Run) -> dict[str, Any]:
    """The last step and accuracies of a training, for display."""
    state: dict[str, Any] = {"step": 0}
    for event in events(run.log):
        if event["kind"] == "train_inner":
            state["step"] = int(event["num_updates"])
        elif event["kind"] in run.subsets:
            if f"{event['kind']}_accuracy" in event:
                state[event["kind"]] = event[f"{event['kind']}_accuracy"]
            state["step"] = int(event[f"{event['kind']}_num_updates"])
    return state


def check_data(folder: Path, arguments: Sequence[str]) -> None:
    """Compares a prepared folder with the request of ``python -m data_prep ARGUMENTS``.

    The source of the files does not count, nor do missing files. A folder that is not from ``data_prep`` is accepted.

    Raises:
        ValueError: the folder was made by another request.
    """
    from data_prep.__main__ import DATASETS, make_parser
    from data_prep.dataset import DataError

    found = json.loads((folder / "dataset.json").read_text()).get("request", {})
    known = {dataset.name: dataset for dataset in DATASETS}
    if found.get("dataset") not in known:
        return
    args, dataset = make_parser().parse_args([*arguments, "--out", str(folder)]), known[arguments[0]]
    try:
        wanted = {"dataset": dataset.name, **dataset.request(args)}
    except (DataError, OSError):  # a named file is missing: use the options as given
        given = {name: value for name, value in vars(args).items() if isinstance(value, (str, int, float))}
        wanted = {"dataset": dataset.name, **{name: value for name, value in given.items() if name in found}}
    origin = ("official_files", "raw_only")
    other = [
        f"{name} {found.get(name)} instead of {value}"
        for name, value in wanted.items()
        if found.get(name) != value and name not in origin and not name.startswith("source")
    ]
    if other:
        raise ValueError(
            f"the data in {folder} differ from those of `python -m data_prep {shlex.join(arguments)}`: "
            f"{', '.join(other)}. Choose another folder with --data, or move this one away"
        )


def saved(run: Run) -> dict[str, Any]:
    path = run.folder / "run.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def result_of(run: Run) -> dict[str, Any] | None:
    """The result of a finished run with the same settings, or None.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    done = _checked(run).get("result")
    return done if done and done["steps"] >= run.steps else None


def evaluated(run: Run) -> bool:
    """Whether a finished run was evaluated as ``run`` asks: its recipe may have got more since then."""
    record = saved(run)
    result = record["result"]
    measured = {place for name in QUANTITIES for place in result.get(name, {})}
    return (
        "failed" not in record
        and {shlex.join(command) for command in run.outputs().values()} <= set(record["commands"])
        and all(any(part(subset, kind) in measured for subset in run.subsets) for kind in run.types)
        and all(name in result.get("analysed", {}) for name in run.analysed)
    )


def _nothing_left(run: Run) -> bool:
    """Whether a run has diverged, or is trained and evaluated."""
    return bool(diverged(run) or (result_of(run) and evaluated(run)))


def diverged(run: Run) -> dict[str, Any] | None:
    """The reason and step of a recorded divergence, or None. Raises ValueError as ``result_of`` does."""
    return _checked(run).get("diverged")


def _checked(run: Run) -> dict[str, Any]:
    record = saved(run)
    now, then = _settings(run), record.get("settings", {})
    # Another choice of the best checkpoint makes another training. Records of earlier versions do not tell it.
    if not run.best or "best" not in then:
        now, then = ({key: value for key, value in d.items() if key != "best"} for d in (now, then))
    if record and then != now:
        raise ValueError(
            f"{run.folder} holds a training with other settings (see its run.json): choose "
            "another --out, or delete the folder"
        )
    return record


def _settings(run: Run) -> dict[str, Any]:
    best = [run.checkpoint_metric if run.best else "", next(iter(run.subsets))]
    return {"data": str(run.data), "seed": run.seed, "arguments": run.arguments, "best": best}


def _check_steps(run: Run) -> None:
    """Raises ValueError for a training that was stopped after more steps than now requested.

    Otherwise its evaluation would be reported as that of fewer steps.
    """
    reached = max((point["step"] for point in curve(run)), default=0)
    if reached > run.steps:
        raise ValueError(
            f"{run.folder} holds a training at step {reached}, beyond the requested {run.steps}: request more "
            "steps, or choose another --out"
        )


class Busy(ValueError):
    """Another process is training in a run's folder."""


def run_all(
    runs: list[Run],
    jobs: int,
    watch: Callable[[list[Run], dict[str, str]], None],
    place: Callable[[list[Job]], dict[str, str] | None] | None = None,
    share: bool = False,
    together: int = 1,
) -> list[dict[str, Any]]:
    """Trains and evaluates unfinished runs, ``jobs`` in parallel, and returns every run's record, in order.

    ``watch`` is called every second with the state of each run by folder ("waiting", "training", "evaluating", "done",
    "diverged", "failed", "elsewhere"). A failed training is recorded as such and does not stop the others; a diverging
    one (``divergence``) is stopped and recorded as diverged.

    Args:
        runs: the runs, each with its own folder.
        jobs: the number of parallel runs.
        watch: called every second.
        place: gets the running jobs and returns the environment variables for another one, or None to wait. By default,
            every job may start.
        share: whether to wait for a folder in which another process is training, instead of refusing it.
        together: trainings that begin together in one process (``groups``), at most ``jobs``.

    Raises:
        Busy: another process is training in a folder, without ``share``.
        ValueError: a folder holds a run with other settings, or one with more steps.
    """
    together = min(together, jobs)
    state = {str(run.folder): "waiting" for run in runs}
    active: dict[str, Job] = {}
    waiting = []
    for run in runs:
        if diverged(run):
            state[str(run.folder)] = "diverged"
        elif _nothing_left(run):
            state[str(run.folder)] = "done"
        elif result_of(run) and not run.checkpoint.exists():
            print(f"warning: {run.checkpoint} is gone, so what is new in the recipe stays empty", file=sys.stderr)
            state[str(run.folder)] = "done"
        else:
            _check_steps(run)
            waiting.append(run)
    try:
        while waiting or active:
            while waiting and jobs - len(active) >= min(together, len(waiting)):
                if not _begin_some(waiting, active, state, min(together, jobs - len(active)), place, share):
                    break
            for key, job in list(active.items()):
                if job.process is None or _advance(job):
                    state[key] = _ended(job.run)
                    job.lock.close()
                    del active[key]
                else:
                    state[key] = job.stage
            watch(runs, state)
            time.sleep(1)
    finally:
        for job in active.values():
            # The whole group, so that data loaders or evaluation commands end too.
            if job.process:
                _signal(job.process, signal.SIGTERM)
    watch(runs, state)
    return [saved(run) for run in runs]


def _begin_some(waiting, active, state, most, place, share) -> int:
    """Starts up to ``most`` waiting runs, whose trainings are in one process; returns how many were begun."""
    where = place(list(active.values())) if place else {}
    if where is None:
        return 0
    jobs: list[Job] = []
    for run in list(waiting):
        if len(jobs) == most:
            break
        try:
            job = _begin(run, where)
        except Busy:
            if not share:
                raise
            state[str(run.folder)] = "elsewhere"
            continue
        waiting.remove(run)
        active[str(run.folder)] = job
        jobs.append(job)
    left = [job for job in jobs if not _nothing_left(job.run)]
    _train([job for job in left if job.stage == "training"])
    for job in left:
        if job.stage == "evaluating":
            _evaluate(job)
    for job in jobs:
        state[str(job.run.folder)] = job.stage if job.process else _ended(job.run)
    return len(jobs)


def starts_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The commits and machines of a run's starts, each with its first step."""
    if "starts" in record or "commit" not in record:
        return record.get("starts", [])
    return [{"step": 0, "commit": record["commit"], "machine": record["machine"]}]


def _ended(run: Run) -> str:
    record = saved(run)
    return next((state for state in ("diverged", "failed") if state in record), "done")


def _advance(job: Job) -> bool:
    """Advances a job by the progress of its process; returns whether it is finished."""
    run, process = job.run, job.process
    ended = process.poll() is not None
    if job.stage == "training":
        # Logs are read again only if they have grown.
        size = run.log.stat().st_size
        found = divergence(run, finished=process.returncode == 0) if ended or size != job.size else None
        job.size = size
        if found:
            _stop(process)
            _record(run, diverged=found, minutes=_minutes(job))
            return True
    if not ended:
        return False
    if process.returncode != 0:
        _record(run, failed="training" if job.stage == "training" else "evaluation")
        return True
    if job.stage == "training":
        _finish_training(job)
        return False
    _finish_evaluation(job)
    return True


def begun(job: Job) -> bool:
    """Whether a job's training has logged a step since its start, so that all its memory is allocated."""
    if not job.begun:
        with open(job.run.log, "rb") as log:
            log.seek(job.start)
            job.begun = b"| INFO | train_inner |" in log.read()
    return job.begun


def _signal(process: subprocess.Popen | groups.Member, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _stop(process: subprocess.Popen | groups.Member) -> None:
    """Ends a process and its group, by SIGKILL after ten seconds; of a shared process, its training alone."""
    if isinstance(process, groups.Member):
        process.stop()
        return
    _signal(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    _signal(process, signal.SIGKILL)
    process.wait()


def _begin(run: Run, where: dict[str, str]) -> Job:
    """A job that holds its folder and has recorded where it runs; its training is not started."""
    run.folder.mkdir(parents=True, exist_ok=True)
    job = Job(run, _lock(run.folder), where)
    if _nothing_left(run):
        # Another process has finished it in the meantime.
        return job
    if result_of(run):
        # The recipe has got more since then. The earlier result stays until there is another.
        job.stage = "evaluating"
        return job
    before = saved(run)
    record = {"settings": _settings(run), "minutes": before.get("minutes", 0.0), "starts": _starts(run, before)}
    write_json(run.folder / "run.json", record, indent=1)
    with open(run.log, "a") as log:
        log.write(f"$ {shlex.join(run.train_command())}\n")
        log.flush()
        job.start = job.size = log.tell()
    return job


def _starts(run: Run, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The starts of a record, and this one where its commit or machine is another."""
    start = {"commit": commit(), "machine": machine(gpu="--cpu" not in run.arguments)}
    starts = starts_of(record)
    if starts and all(starts[-1].get(key) == start[key] for key in start):
        return starts
    return [*starts, {"step": position(run)["step"], **start}]


def _train(jobs: list[Job]) -> None:
    """Starts the trainings of jobs at one place: one in a process of its own, several in one process."""
    if len(jobs) == 1:
        (job,) = jobs
        with open(job.run.log, "a") as log:
            job.process = _launch(executable(job.run.train_command()), job, stdout=log, stderr=subprocess.STDOUT)
    elif jobs:
        entries = [
            groups.entry(job.run.folder, job.run.log, executable(job.run.train_command())[3:], job.lock.fileno())
            for job in jobs
        ]
        output = jobs[0].run.folder.parent / "together.log"
        process = groups.launch(entries, environment() | jobs[0].where, output)
        for job in jobs:
            job.process = groups.Member(process, job.run.folder, job.run.log, output)


def _lock(folder: Path) -> IO[str]:
    """A lock on the folder that its training inherits; it lasts until both processes have ended."""
    lock = open(folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Busy(f"{folder}: another process is training there; wait for it, or stop it") from None
    return lock


def _launch(command: list[str], job: Job, **kwargs: Any) -> subprocess.Popen:
    """Starts a command in its own process group, with the lock inherited."""
    environ = environment() | job.where
    return subprocess.Popen(command, env=environ, start_new_session=True, pass_fds=(job.lock.fileno(),), **kwargs)


def commit() -> str:
    """The commit of the clone, with "-dirty" if code differs from it; without a clone, the installed version.

    ``SG_COMMIT`` in the environment replaces it.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=_HOME, capture_output=True, text=True)

    if os.environ.get("SG_COMMIT"):
        return os.environ["SG_COMMIT"]
    try:
        if (_HOME / ".git").exists():
            found = git("rev-parse", "--short=12", "HEAD").stdout.strip()
            dirty = git("diff", "--quiet", "HEAD", "--", "fairseq_sg", "data_prep").returncode == 1
            return found + "-dirty" * dirty or "unknown"
        return f"version {metadata.version('fairseq_sg')}"
    except (OSError, metadata.PackageNotFoundError):
        return "unknown"


def machine(gpu: bool = True) -> dict[str, Any]:
    """The machine for a run's record; ``gpu`` says whether the run would use one."""
    import torch

    cpu = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    found = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    if gpu and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _minutes(job: Job) -> float:
    """Minutes of a training, including earlier starts that ended regularly."""
    return saved(job.run)["minutes"] + (time.time() - job.since) / 60


def _finish_training(job: Job) -> None:
    run = job.run
    write_json(run.folder / "run.json", saved(run) | {"minutes": _minutes(job)}, indent=1)
    _evaluate(job)


def _evaluate(job: Job) -> None:
    run = job.run
    # Evaluation is one shell command, so it is also one process to wait for.
    script = " && ".join(
        f"{shlex.join(executable(command))} > {shlex.quote(str(output))} 2>&1"
        for output, command in run.outputs().items()
    )
    job.process, job.stage = _launch(["bash", "-c", script], job), "evaluating"


def _finish_evaluation(job: Job) -> None:
    run = job.run
    generated = {" ".join(filter(None, how)): _generated(run.decoded_log(*how)) for how in run.decodings}
    result = {
        "steps": run.steps,
        "checkpoint_step": selected(run, curve(run))["step"],
        **_measured(run, run.folder / "validate.log"),
        "generated": generated,
        "curve": curve(run),
    }
    if run.more_overrides:
        result["more"] = {more: _measured(run, run.more_log(n)) for n, more in enumerate(run.more_overrides)}
    if run.analysed:
        result["analysed"] = {path: analysed(run.folder, path) for path in run.analysed}
        for path in (path for path, value in result["analysed"].items() if value is None):
            print(f"warning: {run.folder}: {path.partition('/')[0]}.json has no number {path}", file=sys.stderr)
    record = saved(run)
    _record(run, result=result, starts=_starts(run, record), failed=None)


def analysed(folder: Path, path: str) -> float | None:
    """The number at ``NAME/key/key`` in NAME.json of a run's folder; keys of lists are numbers. None without it."""
    name, *keys = path.split("/")
    found = json.loads((folder / f"{name}.json").read_text("utf-8"))
    try:
        for key in keys:
            found = found[int(key)] if isinstance(found, list) else found[key]
        return float(found)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _measured(run: Run, log: Path) -> dict[str, dict[str, float]]:
    """quantity -> ``part`` -> value, from the output of ``fairseq-validate``."""
    found: dict[str, dict[str, float]] = {}
    for event in events(log):
        for name, place, value in _values(run, event):
            found.setdefault(name, {})[place] = value
    return found


def _record(run: Run, **more: Any) -> None:
    """Writes more of a run's record; None removes."""
    record = saved(run) | {
        "name": run.name,
        "seed": run.seed,
        "folder": str(run.folder),
        "commands": [shlex.join(c) for c in run.commands()],
    }
    record = {key: value for key, value in (record | more).items() if value is not None}
    write_json(run.folder / "run.json", record, indent=1)


def _generated(path: Path) -> dict[str, float]:
    """Exact match in percent, BLEU, its length ratio and the number of sentences of a ``fairseq-generate`` output."""
    target, output, bleu, ratio = {}, {}, math.nan, math.nan
    for line in path.read_text(errors="replace").splitlines():
        fields = line.split("\t")
        if line.startswith("T-"):
            target[fields[0][2:]] = fields[1].split() if len(fields) > 1 else []
        elif line.startswith("D-"):
            output[fields[0][2:]] = fields[2].split() if len(fields) > 2 else []
        elif line.startswith("Generate "):
            match = re.search(r"BLEU[^=]*= ([0-9.]+)", line)
            bleu = float(match[1]) if match else math.nan
            match = re.search(r"ratio = ([0-9.]+)", line)
            ratio = float(match[1]) if match else math.nan
    right = sum(output.get(key) == words for key, words in target.items())
    exact = 100.0 * right / max(1, len(target))
    return {"exact_match": exact, "bleu": bleu, "length_ratio": ratio, "sentences": len(target)}

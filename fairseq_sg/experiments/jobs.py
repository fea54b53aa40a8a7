"""Runs as processes: trained and evaluated in parallel, watched and resumable.

A run has a folder of its own with ``train.log``, the checkpoints and ``run.json`` (`records`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import groups, logs, records
from fairseq_sg.experiments.logs import divergence
from fairseq_sg.experiments.records import HOME, check_steps, diverged, nothing_left, result_of, saved
from fairseq_sg.experiments.run import Run

#: Final states of a run.
ENDED = ("done", "failed", "diverged")


@dataclass
class Job:
    """A started run.

    Attributes:
        lock: of its folder; its process inherits it.
        where: environment variables of its processes.
        process: None if the run had ended before.
        stage: "training" or "evaluating".
        size: of the log when it was last read.
        start: where the log of this start begins.
        begun: whether this start has logged a step.
    """

    run: Run
    lock: IO[str]
    where: dict[str, str]
    process: subprocess.Popen | groups.Member | None = None
    stage: str = "training"
    size: int = 0
    start: int = 0
    begun: bool = False

    @property
    def work(self) -> str:
        """The stage as a noun, for the record of a failure."""
        return "training" if self.stage == "training" else "evaluation"


def executable(command: list[str]) -> list[str]:
    """The command with this interpreter and package, from whichever folder it is started.

    ``fairseq-train`` becomes the module ``fairseq_cli.train``, ``fairseq-sg`` the module ``fairseq_sg``, and
    ``--user-dir fairseq_sg`` the path of this package.
    """
    program, *arguments = command
    for place, word in enumerate(arguments):
        if arguments[place - 1 : place + 1] == ["--user-dir", "fairseq_sg"]:
            arguments[place] = str(HOME / word)
    module = "fairseq_sg" if program == "fairseq-sg" else program.replace("fairseq-", "fairseq_cli.")
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """One thread per training: parallel trainings use the cores better than one multithreaded training.

    Without LOGLEVEL, by which fairseq would leave out the numbers that are read in its logs.
    """
    kept = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1"}


def run_all(
    runs: list[Run],
    jobs: int,
    watch: Callable[[list[Run], dict[str, str]], None],
    place: Callable[[list[Job]], dict[str, str] | None] | None = None,
    together: int = 1,
) -> list[dict[str, Any]]:
    """Trains and evaluates unfinished runs, ``jobs`` in parallel, and returns every run's record, in order.

    ``watch`` is called every second with the state of each run by folder ("waiting", "training", "evaluating", "done",
    "diverged", "failed", "elsewhere"). A failed training is recorded as such and does not stop the others; a diverging
    one (``divergence``) is stopped and recorded as diverged. One that cannot be started fails alone while others run.
    A folder in which another process is training is waited for.

    Args:
        runs: the runs, each with its own folder.
        jobs: the number of parallel runs.
        watch: called every second.
        place: gets the running jobs and returns the environment variables for another one, or None to wait. By default,
            every job may start.
        together: trainings that begin together in one process (``groups``), at most ``jobs``. Stacked ones differ in
            their seeds alone.

    Raises:
        ValueError: a folder holds a run with other settings, or one with more steps.
        OSError, UsageError: a training cannot be started, and none is running.
    """
    together = min(together, jobs)
    state = {str(run.folder): _state_before(run) for run in runs}
    waiting = [run for run in runs if state[str(run.folder)] == "waiting"]
    active: dict[str, Job] = {}
    try:
        while waiting or active:
            while waiting and jobs - len(active) >= min(together, len(waiting)):
                if not _begin_some(waiting, active, state, min(together, jobs - len(active)), place):
                    break
            _advance_all(active, state)
            watch(runs, state)
            time.sleep(1)
    finally:
        for job in active.values():
            # The whole group, so that data loaders or evaluation commands end too.
            if job.process:
                _signal(job.process, signal.SIGTERM)
    watch(runs, state)
    return [saved(run) for run in runs]


def _state_before(run: Run) -> str:
    """The state of a run before this start: "waiting" where something of it is left."""
    if diverged(run):
        check_steps(run)
        return "diverged"
    if nothing_left(run):
        return "done"
    if result_of(run) and not run.checkpoint.exists():
        print(f"warning: {run.checkpoint} is gone, so what is new in the recipe stays empty", file=sys.stderr)
        return "done"
    check_steps(run)
    return "waiting"


def _advance_all(active: dict[str, Job], state: dict[str, str]) -> None:
    """Advances the ``active`` jobs, of which those that have ended are dropped; notes their states."""
    for key, job in list(active.items()):
        if job.process is not None and not _advance_or_fail(job):
            state[key] = job.stage
            continue
        state[key] = _ended(job.run)
        if state[key] == "failed":
            print(failure(job.run), file=sys.stderr, flush=True)
        job.lock.close()
        del active[key]


def _begin_some(waiting, active, state, most, place) -> int:
    """Starts up to ``most`` waiting runs, whose trainings are in one process; returns how many were begun."""
    where = place(list(active.values())) if place else {}
    if where is None:
        return 0
    jobs: list[Job] = []
    for run in list(waiting):
        if len(jobs) == most:
            break
        if run.stacked and jobs and not run.alike(jobs[0].run):
            continue
        try:
            job = _begin(run, where)
        except (OSError, UsageError) as error:
            if not active:
                raise
            print(f"error: {run.folder}: {error}", file=sys.stderr)
            waiting.remove(run)
            state[str(run.folder)] = "failed"
            continue
        if job is None:
            state[str(run.folder)] = "elsewhere"
            continue
        waiting.remove(run)
        active[str(run.folder)] = job
        jobs.append(job)
    left = [job for job in jobs if not nothing_left(job.run)]
    try:
        _train([job for job in left if job.stage == "training"])
        for job in left:
            if job.stage == "evaluating":
                _evaluate(job)
    except OSError as error:  # such as of a machine without memory for another process
        for job in left:
            if job.process is None:
                _fail(job, error)
    return len(jobs)


def _begin(run: Run, where: dict[str, str]) -> Job | None:
    """A job that holds its folder and has recorded where it runs; its training is not started.

    None where another process is training in the folder.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(run.folder)
    if lock is None:
        return None
    job = Job(run, lock, where)
    if nothing_left(run):
        # Another process has finished it in the meantime.
        return job
    if result_of(run):
        # The recipe has got more since then. The earlier result stays until there is another.
        job.stage = "evaluating"
        return job
    records.begin(run, where)
    with open(run.log, "a") as log:
        log.write(f"$ {shlex.join(run.train_command())}\n")
        log.flush()
        job.start = job.size = log.tell()
    return job


def _ending_signals() -> tuple[signal.Signals, ...]:
    """Those that end the trainings: of Ctrl-C, ``kill``, and a closed terminal, except under ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))


def interrupt_by_signals() -> None:
    """From now on ``kill`` and a closed terminal interrupt this process as Ctrl-C does."""
    for number in _ending_signals()[1:]:
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """``_ending_signals`` wait: a process that was started and is not yet a job's would go on alone."""
    held: list[int] = []
    numbers = _ending_signals()
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


@_signals_held()
def _train(jobs: list[Job]) -> None:
    """Starts the trainings of jobs at one place: one in a process of its own, several, or stacked ones, in one."""
    if len(jobs) == 1 and not jobs[0].run.stacked:
        (job,) = jobs
        with open(job.run.log, "a") as log:
            job.process = _launch(executable(job.run.train_command()), job, stdout=log, stderr=subprocess.STDOUT)
    elif jobs:
        entries = [
            groups.entry(
                job.run.folder,
                job.run.log,
                executable(job.run.train_command())[3:],
                job.lock.fileno(),
                stack="seeds" if job.run.stacked else None,
            )
            for job in jobs
        ]
        output = jobs[0].run.folder.parent / "together.log"
        process = groups.launch(entries, environment() | jobs[0].where, output)
        for job in jobs:
            job.process = groups.Member(process, job.run.folder, job.run.log, output)


def _lock(folder: Path) -> IO[str] | None:
    """A lock on the folder that its training inherits; it lasts until both processes have ended. None where another
    process has it.
    """
    lock = open(folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        lock.close()
        raise UsageError(f"{folder} cannot be locked ({error.strerror}): --out needs another file system") from error
    return lock


def _launch(command: list[str], job: Job, **kwargs: Any) -> subprocess.Popen:
    """Starts a command in its own process group, with the lock inherited."""
    environ = environment() | job.where
    return subprocess.Popen(command, env=environ, start_new_session=True, pass_fds=(job.lock.fileno(),), **kwargs)


def _advance_or_fail(job: Job) -> bool:
    """``_advance``; an error, such as of a file that is gone, ends this job alone."""
    try:
        return _advance(job)
    except Exception as error:
        _stop(job.process)
        _fail(job, error)
        return True


def _fail(job: Job, error: Exception) -> None:
    """Records why a job without a process has failed."""
    try:
        job.run.folder.mkdir(parents=True, exist_ok=True)
        records.end(job.run, failed=f"{job.work} ({type(error).__name__}: {error})")
    except OSError as problem:  # such as a full disk; the next start tries again
        print(f"{job.run.folder}: {problem}, after {error}", file=sys.stderr)


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
            records.end(run, diverged=found, minutes=logs.minutes(run))
            return True
    if not ended:
        return False
    if process.returncode != 0:
        records.end(run, failed=job.work + _signalled(process.returncode))
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


def _ended(run: Run) -> str:
    """How a run has ended; "failed" also where that could not be recorded, such as on a full disk."""
    record = saved(run)
    unknown = "done" if "result" in record else "failed"
    return next((state for state in ("diverged", "failed") if state in record), unknown)


def _signalled(code: int) -> str:
    """The signal by which a process ended, or a command of its shell, for the record; empty if by none."""
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-code if code < 0 else code - 128)
    return f" (ended by {name}{', perhaps for lack of memory' * (name == 'SIGKILL')})" if name else ""


def failure(run: Run) -> str:
    """The message about a failed run: its newest log, and the last error line there if the record has no cause."""
    what = saved(run).get("failed", "training")
    written = [log for log in ([run.log] if what.startswith("training") else run.outputs()) if log.is_file()]
    # Of files of one moment, the last command's: the others have succeeded.
    log = max(reversed(written), key=lambda path: path.stat().st_mtime_ns, default=None)
    lines = logs.starts(log)[-1].splitlines() if log and " (" not in what else []
    why = next((f" ({line.removeprefix('error: ')})" for line in reversed(lines) if line.startswith("error: ")), "")
    return f"error: {run.name} (seed {run.seed}) failed in {what}; see {log or run.folder}{why}"


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


def _signal(process: subprocess.Popen | groups.Member, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _finish_training(job: Job) -> None:
    run = job.run
    records.write(run, saved(run) | {"minutes": logs.minutes(run)})
    _evaluate(job)


@_signals_held()
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
    result = logs.result(run)
    for path in (path for path, value in result.get("analysed", {}).items() if value is None):
        print(f"warning: {run.folder}: {path.partition('/')[0]}.json has no number {path}", file=sys.stderr)
    records.end(run, result=result, starts=records.starts_with_this(run, saved(run), job.where), failed=None)

"""Trainings as subprocesses: real ``fairseq-train`` commands, several at a time, watched, resumable, with their curves read back.

A run lives in a folder of its own: ``train.log``, the checkpoints, ``run.json`` (its commands, and once it is done its result).
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
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Optional

REPOSITORY = Path(__file__).resolve().parents[1]
_LOG_LINE = re.compile(r"\| INFO \| (\w+) \| (\{.*\})\s*$")


@dataclass
class Run:
    """One training: a model's arguments, a seed, and where it lives.

    Attributes:
        name: the model's name in tables. seed: fairseq's ``--seed``. folder: where everything of it goes.
        data: the data folder. steps: ``--max-update``. arguments: everything else of ``fairseq-train``.
        subsets: evaluated through training and at the end; their names in tables are the values.
        evaluation: arguments of ``fairseq-validate`` and ``fairseq-generate`` besides the usual (device, batch size).
        generation: further arguments of ``fairseq-generate`` alone.
        generate: whether the subsets are also decoded at the end, besides the one teacher-forced pass.
        best: whether the checkpoint that is evaluated is the one of the highest accuracy on the first subset (the latest of
            several), rather than the last one.
    """

    name: str
    seed: int
    folder: Path
    data: Path
    steps: int
    arguments: List[str]
    subsets: Dict[str, str]
    evaluation: List[str] = field(default_factory=list)
    generation: List[str] = field(default_factory=list)
    generate: bool = True
    best: bool = False

    @property
    def task(self) -> str:
        return self.arguments[self.arguments.index("--task") + 1]

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def checkpoint(self) -> Path:
        return self.folder / ("checkpoint_best.pt" if self.best else "checkpoint_last.pt")

    def train_command(self) -> List[str]:
        best = ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"] if self.best else []
        return [
            "fairseq-train", str(self.data), "--user-dir", "fairseq_sg", *self.arguments, *best,
            "--seed", str(self.seed), "--max-update", str(self.steps), "--save-dir", str(self.folder),
            "--valid-subset", ",".join(self.subsets), "--log-format", "json",
        ]  # fmt: skip

    def validate_command(self) -> List[str]:
        subsets = ",".join(self.subsets)
        common = ["--user-dir", "fairseq_sg", "--task", self.task, "--path", str(self.checkpoint)]
        return [
            "fairseq-validate",
            str(self.data),
            *common,
            "--valid-subset",
            subsets,
            "--log-format",
            "json",
            *self.evaluation,
        ]

    def generate_command(self, subset: str) -> List[str]:
        common = ["--user-dir", "fairseq_sg", "--task", self.task, "--path", str(self.checkpoint)]
        return [
            "fairseq-generate", str(self.data), *common, "--gen-subset", subset, "--beam", "1",
            "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none", *self.evaluation, *self.generation,
        ]  # fmt: skip


def on(device: str) -> List[str]:
    """The arguments of fairseq's commands that choose the device ``cpu`` or ``cuda``."""
    return ["--cpu"] if device == "cpu" else []


def schedule(every: int, device: str) -> List[str]:
    """Arguments of a training that evaluates and saves every so many steps, keeps the last checkpoint, and can be stopped."""
    return [
        "--required-batch-size-multiple", "1",
        "--validate-interval-updates", str(every), "--validate-interval", "1000000",
        "--save-interval-updates", str(every), "--keep-interval-updates", "1", "--save-interval", "1000000",
        "--no-epoch-checkpoints", "--log-interval", "100",
        "--num-workers", "0" if device == "cpu" else "1", *on(device),
    ]  # fmt: skip


def executable(command: List[str]) -> List[str]:
    """The command through this very interpreter: ``fairseq-train`` is the module ``fairseq_cli.train``."""
    return [sys.executable, "-m", command[0].replace("fairseq-", "fairseq_cli."), *command[1:]]


def environment() -> Dict[str, str]:
    """One thread a training: several trainings share the cores better than one training uses them."""
    return os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}


def events(log: Path) -> List[Dict[str, Any]]:
    """fairseq's JSON log lines, in order, each with ``kind`` (train_inner, train, or a subset) and numbers as floats."""
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


def curve(run: Run) -> List[Dict[str, float]]:
    """Accuracy and loss of every subset at every validation: [{step, SUBSET: percent, SUBSET_loss: bits per token}]."""
    points: Dict[int, Dict[str, float]] = {}
    for event in events(run.log):
        subset = event["kind"]
        if subset in run.subsets:
            step = int(event[f"{subset}_num_updates"])
            point = points.setdefault(step, {"step": step})
            point[subset] = event[f"{subset}_accuracy"]
            point[f"{subset}_loss"] = event[f"{subset}_nll_loss"]
    return [points[step] for step in sorted(points)]


def selected(run: Run, points: List[Dict[str, float]]) -> Dict[str, float]:
    """The point of a curve whose checkpoint is evaluated: the last one, or the latest of the best on the first subset."""
    points = [point for point in points if set(run.subsets) <= set(point)]
    selector = next(iter(run.subsets))
    return max(points, key=lambda point: (point[selector] if run.best else 0, point["step"]))


def partial_result(run: Run, step: int) -> Optional[Dict[str, Any]]:
    """The result at ``step`` of a training that has not finished, from its log alone: accuracies, curve up to there, minutes."""
    points = [point for point in curve(run) if point["step"] <= step]
    if not points or points[-1]["step"] != step or not set(run.subsets) <= set(points[-1]):
        return None
    stamps = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ", _log_until(run, step), re.MULTILINE)
    first, last = (datetime.fromisoformat(stamp) for stamp in (stamps[0], stamps[-1]))
    return {
        "minutes": (last - first).total_seconds() / 60,
        "result": {
            "steps": step,
            "checkpoint_step": selected(run, points)["step"],
            "accuracy": {s: selected(run, points)[s] for s in run.subsets},
            "generated": {},
            "curve": points,
        },
    }


def _log_until(run: Run, step: int) -> str:
    """The log up to the last line that tells of ``step``."""
    text = run.log.read_text(errors="replace")
    return text[: text.rindex(f'_num_updates": "{step}"')]


def position(run: Run) -> Dict[str, Any]:
    """Where a training is: its last step and accuracies, for the eye."""
    state: Dict[str, Any] = {"step": 0}
    for event in events(run.log):
        if event["kind"] == "train_inner":
            state["step"] = int(event["num_updates"])
        elif event["kind"] in run.subsets:
            state[event["kind"]] = event[f"{event['kind']}_accuracy"]
            state["step"] = int(event[f"{event['kind']}_num_updates"])
    return state


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
    temporary.replace(path)


def saved(run: Run) -> Dict[str, Any]:
    path = run.folder / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def result_of(run: Run) -> Optional[Dict[str, Any]]:
    """The finished result of a run with the same settings, or None.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    record = saved(run)
    if record and record["settings"] != _settings(run):
        raise ValueError(
            f"{run.folder} holds a training with other settings (see its run.json): choose another --out, or delete the folder"
        )
    done = record.get("result")
    return done if done and done["steps"] >= run.steps else None


def _settings(run: Run) -> Dict[str, Any]:
    return {"data": str(run.data), "seed": run.seed, "arguments": run.arguments}


def run_all(runs: List[Run], jobs: int, watch: Callable[[List[Run], Dict[str, str]], None]) -> List[Dict[str, Any]]:
    """Trains and evaluates what is not done yet, ``jobs`` at a time, and returns every run's record, in order.

    ``watch`` is called every second with the state of each run by folder ("waiting", "training", "evaluating", "done", "failed").
    A training that fails is recorded as failed and does not stop the others.
    """
    state = {str(run.folder): "waiting" for run in runs}
    active: Dict[str, Dict[str, Any]] = {}
    waiting = []
    for run in runs:
        if result_of(run):
            state[str(run.folder)] = "done"
        else:
            waiting.append(run)
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active[str(run.folder)] = _start(run)
                state[str(run.folder)] = "training"
            for key, job in list(active.items()):
                if job["process"].poll() is None:
                    continue
                if job["process"].returncode != 0:
                    state[key] = "failed"
                    del active[key]
                    _record(job["run"], failed=job["stage"])
                elif job["stage"] == "training":
                    _finish_training(job)
                    state[key] = "evaluating"
                else:
                    _finish_evaluation(job)
                    state[key] = "done"
                    del active[key]
            watch(runs, state)
            time.sleep(1)
    finally:
        for job in active.values():
            # The group: its data loaders, or the commands of its evaluation, end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job["process"].pid, signal.SIGTERM)
    watch(runs, state)
    return [saved(run) for run in runs]


def _start(run: Run) -> Dict[str, Any]:
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(run.folder)
    record = {
        "settings": _settings(run),
        "minutes": saved(run).get("minutes", 0.0),
        "commit": commit(),
        "machine": machine(gpu="--cpu" not in run.arguments),
    }
    write_json(run.folder / "run.json", record)
    with open(run.log, "a") as log:
        log.write(f"$ {shlex.join(run.train_command())}\n")
        log.flush()
        process = _launch(executable(run.train_command()), lock, stdout=log, stderr=subprocess.STDOUT)
    return {"run": run, "lock": lock, "process": process, "stage": "training", "since": time.time()}


def _lock(folder: Path) -> IO[str]:
    """A lock on the folder that its training inherits: it lasts as long as either lives, however this process ends."""
    lock = open(folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{folder}: another process trains there already; wait for it, or stop it") from None
    return lock


def _launch(command: List[str], lock: IO[str], **kwargs: Any) -> subprocess.Popen:
    """Starts a command in a process group of its own, with the lock in its hands."""
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), start_new_session=True, pass_fds=(lock.fileno(),), **kwargs
    )


def commit() -> str:
    """The commit that runs, "-dirty" where code differs from it; ``SG_COMMIT`` says it where there is no git."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        dirty = git("diff", "--quiet", "HEAD", "--", "fairseq_sg", "data_prep", "scripts").returncode == 1
    except OSError:
        found, dirty = "", False
    return os.environ.get("SG_COMMIT") or (found + "-dirty" * dirty) or "unknown"


def machine(gpu: bool = True) -> Dict[str, Any]:
    """What a run runs on, for its record; ``gpu`` says whether it would use one."""
    import torch

    cpu = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    found = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    if gpu and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _finish_training(job: Dict[str, Any]) -> None:
    run = job["run"]
    record = saved(run)
    record["minutes"] += (time.time() - job["since"]) / 60
    write_json(run.folder / "run.json", record)
    # Evaluation is one shell command, so that it, too, is one process to wait for.
    decoded = run.subsets if run.generate else ()
    commands = [run.validate_command(), *(run.generate_command(subset) for subset in decoded)]
    outputs = [run.folder / "validate.log", *(run.folder / f"generate-{subset}.log" for subset in decoded)]
    script = " && ".join(f"{shlex.join(executable(c))} > {shlex.quote(str(o))} 2>&1" for c, o in zip(commands, outputs))
    job.update(process=_launch(["bash", "-c", script], job["lock"]), stage="evaluation")


def _finish_evaluation(job: Dict[str, Any]) -> None:
    run = job["run"]
    accuracy = {}
    for event in events(run.folder / "validate.log"):
        if event["kind"] in run.subsets:
            accuracy[event["kind"]] = event[f"{event['kind']}_accuracy"]
    decoded = run.subsets if run.generate else ()
    generated = {subset: _generated(run.folder / f"generate-{subset}.log") for subset in decoded}
    result = {
        "steps": run.steps,
        "checkpoint_step": selected(run, curve(run))["step"],
        "accuracy": accuracy,
        "generated": generated,
        "curve": curve(run),
    }
    _record(run, result=result)


def _record(run: Run, **more: Any) -> None:
    record = saved(run) | {
        "name": run.name,
        "seed": run.seed,
        "folder": str(run.folder),
        "commands": [
            shlex.join(c)
            for c in (
                run.train_command(),
                run.validate_command(),
                *(run.generate_command(s) for s in run.subsets if run.generate),
            )
        ],
    }
    write_json(run.folder / "run.json", record | more)


def _generated(path: Path) -> Dict[str, float]:
    """Exact match in percent, BLEU and the number of sentences of a ``fairseq-generate`` output."""
    target, output, bleu = {}, {}, math.nan
    for line in path.read_text(errors="replace").splitlines():
        fields = line.split("\t")
        if line.startswith("T-"):
            target[fields[0][2:]] = fields[1].split() if len(fields) > 1 else []
        elif line.startswith("D-"):
            output[fields[0][2:]] = fields[2].split() if len(fields) > 2 else []
        elif line.startswith("Generate "):
            match = re.search(r"BLEU[^=]*= ([0-9.]+)", line)
            bleu = float(match[1]) if match else math.nan
    right = sum(output.get(key) == words for key, words in target.items())
    return {"exact_match": 100.0 * right / max(1, len(target)), "bleu": bleu, "sentences": len(target)}

"""``run.json``, the record of a run: its settings, commands, starts and, when it has ended, its result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import shapes
from fairseq_sg.experiments.logs import curve, partial_result
from fairseq_sg.experiments.quantities import QUANTITIES, decoding, part
from fairseq_sg.experiments.run import Run, on_any_device, values_of
from fairseq_sg.files import write_json

#: The folder that has the package: a clone, or site-packages.
HOME = Path(__file__).resolve().parents[2]


def saved(run: Run) -> dict[str, Any]:
    """The record of a run; {} for one that never began. Raises UsageError for a file that is no record."""
    path = run.folder / "run.json"
    try:
        record = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if record != {}:
            shapes.check(record, shapes.RUN)
        return record
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no record of a training ({error}): move its folder away, or choose another --out"
        ) from error


def write(run: Run, record: dict[str, Any]) -> None:
    write_json(run.folder / "run.json", record, indent=1)


def begin(run: Run, where: Mapping[str, str]) -> None:
    """The record of a training that starts or is resumed: nothing is known of how it ends.

    Args:
        where: environment variables of its processes.
    """
    write(run, {"settings": settings_of(run), "starts": starts_with_this(run, saved(run), where)})


def end(run: Run, **more: Any) -> None:
    """Adds how a run ended, its ``result``, or why it ``diverged`` or ``failed``, and its commands; None removes."""
    commands = [shlex.join(command) for command in run.commands()]
    of_run = {"name": run.name, "seed": run.seed, "folder": str(run.folder), "commands": commands}
    # Where the folder was deleted while it trained, no record has the settings.
    record = {"settings": settings_of(run)} | saved(run)
    if "result" in more or "result" not in record:
        record |= of_run  # otherwise an evaluation failed, and an earlier result stays with its commands
    write(run, {key: value for key, value in (record | more).items() if value is not None})


def result_of(run: Run) -> dict[str, Any] | None:
    """The result of a finished run with the same settings and steps, or None.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    done = _checked(run).get("result")
    return done if done and done["steps"] == run.steps else None


def evaluated(run: Run) -> bool:
    """Whether a finished run was evaluated as ``run`` asks: its recipe may have got more since then."""
    record = saved(run)
    result = record["result"]
    measured = {place for name in QUANTITIES for place in result.get(name, {})}
    return (
        "failed" not in record
        and commands_of(run.outputs().values()) <= commands_of(recorded(run))
        and all(any(part(subset, kind) in measured for subset in run.subsets) for kind in run.types)
        and all(name in result.get("analysed", {}) for name in run.analysed)
    )


def recorded(run: Run) -> list[list[str]]:
    """The commands in a run's record, as words, with the present path of its folder, which may have been moved."""
    record = saved(run)
    folder = record.get("folder", str(run.folder))
    commands = map(shlex.split, record.get("commands", ()))
    return [[word.replace(folder, str(run.folder)) for word in command] for command in commands]


def commands_of(commands: Iterable[list[str]]) -> set[tuple[str, ...]]:
    """Commands as they are on any device, with absolute paths."""
    return {tuple(_anywhere(command)) for command in commands}


def _anywhere(command: list[str]) -> list[str]:
    return [os.path.realpath(word) if "/" in word else word for word in on_any_device(command)]


def as_asked(run: Run) -> dict[str, Any]:
    """The result of a finished run without the numbers that were measured otherwise than ``run`` asks.

    Those at the checkpoint are then of its validation in training, as for an unfinished run.
    """
    done = set(map(_measurement, recorded(run)))

    def measured(command: list[str]) -> bool:
        return _measurement(command) in done

    found = dict(saved(run)["result"])
    if not measured(run.validate_command()):
        of_log = partial_result(run) or {}
        for name in (*QUANTITIES, "checkpoint_step"):
            found.pop(name, None)
            found |= {name: of_log[name]} if name in of_log else {}
    decoded = {decoding(*how) for how in run.decodings if measured(run.generate_command(*how))}
    more = {overrides for overrides in run.more_overrides if measured(run.validate_command(overrides))}
    # An analysis may read the files of earlier ones.
    analyses = list(takewhile(lambda name: measured(["fairseq-sg", "analysis", *run.analyses[name]]), run.analyses))
    analysed = {path for path in run.analysed if path.partition("/")[0] in analyses}
    for name, kept in (("generated", decoded), ("more", more), ("analysed", analysed)):
        if name in found:
            found[name] = {key: value for key, value in found[name].items() if key in kept}
    return found


def _measurement(command: list[str]) -> str:
    """A command of an evaluation, without what changes no number: device, batch size, further subsets."""
    text = " ".join(_anywhere(command))
    return text if command[0] == "fairseq-sg" else re.sub(r" --(batch-size|valid-subset) \S+", "", text)


def nothing_left(run: Run) -> bool:
    """Whether a run has diverged, or is trained and evaluated."""
    return bool(diverged(run) or (result_of(run) and evaluated(run)))


def diverged(run: Run) -> dict[str, Any] | None:
    """The reason and step of a recorded divergence, or None. Raises ValueError as ``result_of`` does."""
    return _checked(run).get("diverged")


def _checked(run: Run) -> dict[str, Any]:
    """The record of a run, or {} where nothing of its training is left to resume, such as after a wrong option."""
    record = saved(run)
    if record.get("failed", "").startswith("training") and not record.keys() & {"result", "diverged"}:
        if not any(run.folder.glob("*.pt")):
            return {}
    now, then = settings_of(run), record.get("settings", {})
    for name in filter(then.__contains__, now):  # records of earlier versions lack some
        equal = now[name] == then[name]
        if name == "arguments":
            equal = on_any_device(now[name]) == on_any_device(then[name])
        if name == "data":
            equal = os.path.realpath(now[name]) == os.path.realpath(then[name])
        # Another choice of the best checkpoint makes another training, where that is evaluated.
        if not equal and (name != "best" or run.best):
            raise ValueError(
                f"{run.folder} holds a training with other settings ({name}: see its run.json): choose another --out"
                f"{', or give the original --data' if name == 'data' else ''}, or move the folder away"
            )
    return record


def settings_of(run: Run) -> dict[str, Any]:
    """What makes a training the same training."""
    best = [run.checkpoint_metric if run.best else "", next(iter(run.subsets))]
    data = {"data": str(run.data), "prepare": run.prepare, "user_dir": run.user_dir}
    steps = {"steps": run.steps} if ends_with_training(run.arguments) else {}
    return {**data, "seed": run.seed, "arguments": run.arguments, "best": best, **steps}


#: Schedules of the learning rate over the whole training -> the option that gives their length otherwise.
OVER_ALL_STEPS = {
    "tri_stage": "--warmup-steps", "cosine": "--lr-period-updates", "polynomial_decay": "--total-num-update",
    "one_cycle": None,
}  # fmt: skip


def ends_with_training(arguments: Sequence[str]) -> bool:
    """Whether the learning rate depends on the number of steps, so that more steps are another training."""
    name = (values_of("--lr-scheduler", arguments) or [""])[-1]
    if name not in OVER_ALL_STEPS:
        return False
    length = OVER_ALL_STEPS[name]
    return length is None or not any(value.strip("0.") for value in values_of(length, arguments))


def check_steps(run: Run) -> None:
    """Raises ValueError for a training that has made more steps than are requested.

    Otherwise its evaluation would be reported as that of fewer steps.
    """
    steps = [point["step"] for point in curve(run)] + [(diverged(run) or {}).get("step", 0)]
    reached = max(steps)
    if reached > run.steps:
        raise ValueError(
            f"{run.folder} holds a training at step {reached}, beyond the requested {run.steps}: request more "
            "steps, or choose another --out"
        )


def starts_with_this(run: Run, record: dict[str, Any], where: Mapping[str, str]) -> list[dict[str, Any]]:
    """The starts of a record, each with its first step, commit and machine, and this one where it differs.

    A start resumes from the last evaluation, after which a checkpoint is saved. What was trained beyond it is lost.
    """
    points = curve(run) if (run.folder / "checkpoint_last.pt").exists() else []
    step = points[-1]["step"] if points else 0
    if (record.get("result") or {}).get("steps") == run.steps:
        step = run.steps  # it is evaluated again, perhaps without its last checkpoint
    starts = [start for start in record.get("starts", []) if start["step"] < step]
    own = "" if run.user_dir == "fairseq_sg" else f" with {run.user_dir} {files_of(Path(run.user_dir))}"
    # An evaluation leaves the steps as they were made.
    stacked = run.stacked if step < run.steps else bool(starts) and "steps" in starts[-1]["machine"]
    how = {"steps": "stacked"} if stacked else {}
    start = {"commit": commit() + own, "machine": machine(gpu="--cpu" not in run.arguments, where=where) | how}
    if starts and all(starts[-1].get(key) == start[key] for key in start):
        return starts
    return [*starts, {"step": step, **start}]


def commit() -> str:
    """The commit of the clone, with "-dirty" if code differs from it; without a clone, the installed version.

    ``SG_COMMIT`` in the environment replaces it.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=HOME, capture_output=True, text=True)

    if os.environ.get("SG_COMMIT"):
        return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", os.environ["SG_COMMIT"])
    try:
        if (HOME / ".git").exists():
            found = git("rev-parse", "--short=12", "HEAD").stdout.strip()
            dirty = git("diff", "--quiet", "HEAD", "--", "fairseq_sg", "data_prep").returncode == 1
            return found + "-dirty" * dirty or "unknown"
        return f"version {metadata.version('fairseq_sg')}"
    except (OSError, metadata.PackageNotFoundError):
        return "unknown"


def files_of(folder: Path) -> str:
    """A hash of the Python files in a folder, by their paths and bytes: twelve hexadecimal digits."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def machine(gpu: bool = True, where: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The machine for a run's record.

    Args:
        gpu: whether the run would use one.
        where: environment variables of its processes; CUDA_VISIBLE_DEVICES is one of ``visible_gpus``.
    """
    import torch

    cpu = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    found = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    if gpu and torch.cuda.is_available():
        chosen = (where or {}).get("CUDA_VISIBLE_DEVICES")
        found["gpu"] = torch.cuda.get_device_name(visible_gpus().index(chosen) if chosen else 0)
        if torch.get_float32_matmul_precision() != "highest":  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE has it
            found["float32 products"] = "TF32"
    return found

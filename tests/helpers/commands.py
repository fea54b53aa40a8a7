"""fairseq's commands on a tiny dataset and with tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import Process
from pathlib import Path
from resource import RLIM_INFINITY
from typing import NamedTuple

from helpers import forked
from helpers.forked import REPOSITORY

#: The installed commands lie beside the interpreter that runs the tests.
COMMANDS = Path(sys.executable).parent

LINEAR = "--encoder-attention linear --decoder-attention linear --cross-attention linear --qk-norm l2".split()
RELATIVE = "--encoder-attention relative --decoder-attention relative".split()
MIXED = [
    *("--encoder-attention", "geometric", "--encoder-update", "copy_gate"),
    *("--decoder-attention", "linear", "--feature-map", "hedgehog", "--position", "rotary"),
    *("--cross-attention", "compositional"),
]
#: kind of model -> its arguments, and the epochs after which it gets some sentences right and some wrong
KINDS: dict[str, tuple[list[str], int]] = {
    "linear": ([*LINEAR, "--depth", "shared", "--orthogonality-weight", "1e-4"], 10),
    "relative": (RELATIVE, 6),
    "softmax": ([], 12),
    "mixed": (MIXED, 12),
}
SIZES = [
    f"--{side}-{name}"
    for side in ("encoder", "decoder")
    for name in ("embed-dim=32", "ffn-embed-dim=64", "attention-heads=4", "layers=2")
]


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This process's, with one thread a process and without what would change where modules are found."""
    left_out = ("PYTHONPATH", "PYTHONWARNINGS", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def launch(name: str, *arguments: object, text: str = "", cwd: Path = REPOSITORY, **env: str) -> Result:
    """Runs an installed command, or ``python`` itself, as a user does; ``text`` is its standard input.

    For what an import prints or loads, and for how commands are found; ``run`` takes a fraction of the time.
    """
    command = [str(COMMANDS / name), *map(str, arguments)]
    options = {"cwd": cwd, "env": environment(**env), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, input=text, **options)
    return Result(done.returncode, done.stdout, done.stderr)


def run(
    name: str,
    *arguments: object,
    text: str = "",
    cwd: Path = REPOSITORY,
    largest_file: int = RLIM_INFINITY,
    **env: str,
) -> Result:
    """Runs a command (``fairseq-train``), a module (``fairseq_sg.options``) or code (``-c``) in a forked process.

    No file that it writes has more than ``largest_file`` bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / stream for stream in ("in", "out", "err")]
        streams[0].write_text(text)
        options = {"streams": streams, "cwd": cwd, "env": environment(**env), "largest_file": largest_file}
        process = forked.start(name, *arguments, **options)
        process.join(300)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{name} {' '.join(map(str, arguments))}\n{streams[2].read_text()}")
        return Result(process.exitcode, *(file.read_text() for file in streams[1:]))


def start_training(arguments: Sequence[object], log: Path, largest_file: int = RLIM_INFINITY) -> Process:
    """Starts a training that writes what it prints to the end of ``log``, and no file of more than so many bytes."""
    streams = (os.devnull, log, log)
    return forked.start("fairseq-train", *arguments, streams=streams, env=environment(), largest_file=largest_file)


def succeed(name: str, *arguments: object, text: str = "", cwd: Path = REPOSITORY, **env: str) -> str:
    """Runs a command that must succeed without a warning; returns what it printed."""
    return check(run(name, *arguments, text=text, cwd=cwd, **env))


def check(result: Result) -> str:
    printed = result.out + result.err
    assert result.code == 0, printed[-5000:]
    noise = re.compile("warning|detected shared parameter|can_reuse_epoch_itr|^DEBUG", re.IGNORECASE)
    found = [line for line in printed.splitlines() if noise.search(line)]
    assert not found, found
    return printed


#: Options of a training of one update.
SHORT = "--max-update 1 --valid-subset gen --num-workers 0 --batch-size 512".split()


def training(data: Path, folder: Path, *more: object) -> list[str]:
    """Arguments of ``fairseq-train``; ``more`` comes last and so overrides what stands here."""
    fixed = (
        "--user-dir fairseq_sg --task sg_translation --arch sg_transformer --criterion cross_entropy_orthogonality "
        "--optimizer torch_adam --lr 5e-3 --clip-norm 5 --dropout 0 --batch-size 32 --batch-size-valid 64 "
        "--valid-subset valid,gen --no-epoch-checkpoints --cpu --log-format json"
    )
    arguments = [data, *fixed.split(), *SIZES, "--save-dir", folder, *more]
    return [str(argument) for argument in arguments]


def evaluation(data: Path, checkpoint: Path, *more: object) -> list[str]:
    """Arguments that ``fairseq-validate``, ``fairseq-generate`` and ``fairseq-interactive`` share."""
    fixed = "--user-dir fairseq_sg --task sg_translation --cpu".split()
    arguments = [data, *fixed, "--path", checkpoint, *more]
    return [str(argument) for argument in arguments]


def metrics(printed: str, subset: str) -> list[dict[str, float]]:
    """Reports on a subset (``train`` too) of training or validation with ``--log-format json``, a dict each time."""
    records = re.findall(rf"\| {subset} \| (\{{.*\}})$", printed, re.MULTILINE)
    return [{name.removeprefix(f"{subset}_"): float(value) for name, value in json.loads(r).items()} for r in records]


class Translation(NamedTuple):
    """One sentence of ``fairseq-generate`` or ``fairseq-interactive``; the target is None where there is none."""

    target: str | None
    hypothesis: str
    score: float


def translations(printed: str) -> dict[int, Translation]:
    """The sentences by their number in the subset."""
    targets = {int(i): text for i, text in re.findall(r"^T-(\d+)\t(.*)$", printed, re.MULTILINE)}
    best: dict[int, Translation] = {}
    for i, score, text in re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.MULTILINE):
        best.setdefault(int(i), Translation(targets.get(int(i)), text, float(score)))
    return best


LAUNCHER = "fairseq_sg.experiments.workers"


def in_two(*arguments: str) -> str:
    """The output of the first of the two processes of a training; both must succeed."""
    return succeed(LAUNCHER, 2, "fairseq-train", *(word for word in arguments if word != "--cpu"))

"""Trainings that share a process: the runner's side of ``fairseq_sg.together``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Files in the folder of a training, beside its log.
END, STOP = "train.end", "train.stop"


class Member:
    """A training in a process that it shares, with what is asked of a ``subprocess.Popen``.

    Attributes:
        pid: of the shared process.
        returncode: of the training; that of the process if it ended before the training.
    """

    def __init__(self, process: subprocess.Popen, folder: Path, log: Path, output: Path):
        self._process, self._folder, self._log, self._output = process, folder, log, output
        self.pid, self.returncode = process.pid, None

    def poll(self) -> int | None:
        ended = self._process.poll()
        if self.returncode is not None:
            return self.returncode
        if (self._folder / END).exists():
            self.returncode = int((self._folder / END).read_text())
        elif ended is not None:
            self.returncode = ended or 1
            with open(self._log, "a") as log:
                log.write(f"the process of this training ended with exit code {ended}; it printed {self._output}\n")
        return self.returncode

    def stop(self) -> None:
        """Ends the training before its next step; the others go on."""
        (self._folder / STOP).touch()


def entry(
    folder: Path, log: Path, arguments: Sequence[str], lock: int | None, stack: str | None = None
) -> dict[str, Any]:
    """The entry of a training in the plan of ``fairseq_sg.together``; an earlier end or stop is forgotten."""
    for name in (END, STOP):
        (folder / name).unlink(missing_ok=True)
    files = {"log": str(log.resolve()), "end": str((folder / END).resolve()), "stop": str((folder / STOP).resolve())}
    # torch waits five seconds for each loader's process when a training ends, and the others with it.
    return {"arguments": [*arguments, "--num-workers", "0"], "lock": lock, "stack": stack, **files}


def launch(entries: Sequence[dict[str, Any]], environment: dict[str, str], output: Path) -> subprocess.Popen:
    """Starts the process of some trainings; ``output`` has what it prints besides their logs."""
    with open(output, "a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fairseq_sg.together", "/dev/stdin"],
            env=environment,
            start_new_session=True,
            pass_fds=[entry["lock"] for entry in entries if entry["lock"] is not None],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    with process.stdin as plan:
        json.dump(entries, plan)
    return process

"""Free memory of the machine and its GPUs: where another training may start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.jobs import Job, begun
from fairseq_sg.experiments.records import visible_gpus


class Guard:
    """Decides by free memory where another training may start: ``run_all``'s ``place``.

    A training that has not logged anything may not have allocated its memory yet, so ``gigabytes`` are reserved for it.
    The first one always starts. While free memory is unknown, no other one does.

    Args:
        gigabytes: required free memory; 0 disables the check.
        gpus: their ids; empty for a CPU.
        free: returns the free gigabytes of a GPU, or (None) of the machine.
    """

    def __init__(
        self, gigabytes: float, gpus: Sequence[str] = (), free: Callable[[str | None], float] | None = None
    ) -> None:
        self.gigabytes, self.gpus, self.free = gigabytes, list(gpus), free or free_gigabytes
        self._warned = False

    def __call__(self, active: list[Job]) -> dict[str, str] | None:
        if active and not self._room(None, active):
            return None
        if not self.gpus:
            return {}
        there = {gpu: [job for job in active if job.where.get("CUDA_VISIBLE_DEVICES") == gpu] for gpu in self.gpus}
        for gpu in sorted(self.gpus, key=lambda gpu: len(there[gpu])):
            if not active or self._room(gpu, there[gpu]):
                return {"CUDA_VISIBLE_DEVICES": gpu}
        return None

    def _room(self, gpu: str | None, jobs: list[Job]) -> bool:
        if not self.gigabytes:
            return True
        set_aside = self.gigabytes * sum(not begun(job) for job in jobs)
        try:
            return self.free(gpu) - set_aside >= self.gigabytes
        except UsageError as error:  # perhaps of one call of nvidia-smi: the running trainings go on
            if not self._warned:
                print(f"warning: {error}", file=sys.stderr)
            self._warned = True
            return False


def _uuid(gpu: str) -> str:
    """The name of a GPU for nvidia-smi, which does not number them as CUDA does."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(visible_gpus().index(gpu)).uuid}"


def free_gigabytes(gpu: str | None) -> float:
    """Free memory of a GPU, or of the machine for None. Raises UsageError if it cannot be determined."""
    try:
        if gpu is None:
            kilobytes = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
            return int(kilobytes[1]) / 2**20
        command = ["nvidia-smi", "-i", _uuid(gpu), "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 2**10
    except (OSError, TypeError, ValueError, subprocess.CalledProcessError) as error:
        why = f"free memory is unknown ({error}), so trainings wait for each other"
        raise UsageError(f"{why}: use --memory-guard 0 to disable the check") from None

"""Arguments of trainings, read before the first of them starts: a row with a wrong one may be the last to train."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.jobs import environment, executable
from fairseq_sg.experiments.plan import Trial


def check(trials: Iterable[Trial]) -> None:
    """Reads the command of one training of every row on every dataset, as fairseq-train reads it.

    Raises:
        UsageError: it would refuse one; what depends on data is only found when the training starts.
    """
    some = list({(trial.row, trial.data): trial for trial in trials}.values())
    if not some:
        return
    lines = [executable(trial.run.train_command())[3:] for trial in some]  # of python -m fairseq_cli.train
    command = [sys.executable, "-m", "fairseq_sg.parse"]
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, env=environment())
    if done.returncode:
        read, said = done.stdout.split(), done.stderr.strip().splitlines()
        if not read or not said or not said[-1].startswith("error: "):
            print(done.stderr, file=sys.stderr)  # of a module of the user, say
        row, why = some[int(read[-1]) if read else 0].row, said[-1] if said else f"exit code {done.returncode}"
        raise UsageError(f"the row {row!r} cannot be trained: {why.removeprefix('error: ')}")

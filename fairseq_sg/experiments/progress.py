"""Progress of trainings: a live table on a terminal, otherwise a line per evaluation."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import Any

from fairseq_sg.experiments.jobs import ENDED
from fairseq_sg.experiments.logs import position
from fairseq_sg.experiments.quantities import QUANTITIES
from fairseq_sg.experiments.run import Run

#: Seconds between two looks at the logs.
PAUSE = 5.0
#: Rows of the live table. Of more trainings it shows those that are running.
ROOM = 24


class Progress:
    """Shows the state of runs; ``run_all`` calls it every second.

    Args:
        runs: all runs.
        title: of the live table.
        console: a rich Console; by default that of standard output.
    """

    def __init__(self, runs: Sequence[Run], title: str, console: Any = None) -> None:
        self.title = title
        self.shown: dict[str, tuple[str, int]] = {}
        self.asked = 0.0
        self.started = time.time()
        self.ended: dict[str, dict[str, Any]] = {}
        self.begun: dict[str, tuple[float, int]] = {}
        self.at_start = {str(run.folder): position(run)["step"] for run in runs}
        self.live = None
        if console or (sys.stdout.isatty() and importlib.util.find_spec("rich")):
            from rich.live import Live

            self.live = Live(console=console, auto_refresh=False)
            self.live.start()

    def __call__(self, runs: Sequence[Run], state: dict[str, str]) -> None:
        finished = all(s in ENDED for s in state.values())
        if time.time() - self.asked < PAUSE and not finished:
            return
        self.asked = time.time()
        # Ended runs are not read again.
        reached = {str(r.folder): self.ended.get(str(r.folder)) or position(r) for r in runs}
        self.ended = {key: at for key, at in reached.items() if state[key] in ENDED}
        for key, at in reached.items():
            if state[key] == "training":
                self.begun.setdefault(key, (self.asked, at["step"]))
        left = self.left(runs, state, {key: at["step"] for key, at in reached.items()})
        if self.live:
            self.live.update(self.table(runs, state, reached, left), refresh=True)
        else:
            self._print(runs, state, reached, left)

    def close(self) -> None:
        """Ends the live display, which hides the cursor."""
        if self.live:
            self.live.stop()

    def left(self, runs: Sequence[Run], state: dict[str, str], steps: dict[str, int]) -> str:
        """The estimated remaining time from the steps since the start; empty before the first steps."""
        made = sum(steps[str(r.folder)] - self.at_start[str(r.folder)] for r in runs)
        to_make = sum(max(0, r.steps - steps[str(r.folder)]) for r in runs if state[str(r.folder)] not in ENDED)
        if made <= 0 or not to_make:
            return ""
        return f"about {_duration((time.time() - self.started) / made * to_make)} left"

    def table(self, runs: Sequence[Run], state: dict[str, str], reached: dict[str, dict[str, Any]], left: str) -> Any:
        """The live table: model, seed, state, steps, speed, time left, and the last numbers."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        columns = list(dict.fromkeys(_column(run, name) for run in runs for name in run.subsets.values()))
        ended = sum(s in ENDED for s in state.values())
        found = Table(
            title=f"{self.title}: {ended} of {len(runs)} trainings ended  {left}".rstrip(), box=box.SIMPLE_HEAD
        )
        for name in ("model", "seed", "state", "steps", "steps/s", "left", *columns):
            found.add_column(name, justify="left" if name in ("model", "state") else "right", no_wrap=True)
        shown = [r for r in runs if len(runs) <= ROOM or state[str(r.folder)] in ("training", "evaluating")]
        for run in shown[:ROOM]:
            key = str(run.folder)
            at = reached[key]
            step = run.steps if state[key] == "done" else at["step"]
            speed = self._speed(key, at["step"]) if state[key] == "training" else 0.0
            text = QUANTITIES[run.shown].shown
            numbers = {_column(run, name): text(at[s]) for s, name in run.subsets.items() if s in at}
            found.add_row(
                Text(run.name),  # brackets in a label are no markup
                str(run.seed),
                state[key],
                f"{step:,} / {run.steps:,}",
                f"{speed:.1f}" if speed else "",
                _duration((run.steps - step) / speed) if speed else "",
                *(numbers.get(name, "") for name in columns),
            )
        if len(shown) < len(runs):
            found.caption = f"{len(runs) - len(shown[:ROOM])} more are not shown"
        return found

    def _speed(self, key: str, step: int) -> float:
        since, first = self.begun[key]
        return (step - first) / (time.time() - since) if step > first else 0.0

    def _print(self, runs: Sequence[Run], state: dict[str, str], reached: dict[str, dict[str, Any]], left: str) -> None:
        for run in runs:
            key = str(run.folder)
            at = reached[key]
            quantity = QUANTITIES[run.shown]
            last = [f"{name} {quantity.shown(at[s])}{quantity.percent}" for s, name in run.subsets.items() if s in at]
            note = f"{state[key]}  {'  '.join(last)}"
            if self.shown.get(key) != (note, at["evaluated"]):
                self.shown[key] = note, at["evaluated"]
                step = run.steps if state[key] == "done" else at["step"]
                where = f"{run.name} (seed {run.seed})  step {step}/{run.steps}"
                print(f"{time.strftime('%H:%M:%S')}  {where}  {note}  {left}".rstrip(), flush=True)


def _column(run: Run, name: str) -> str:
    """The head of a column of the live table."""
    return f"{name} {QUANTITIES[run.shown].percent}".rstrip()


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

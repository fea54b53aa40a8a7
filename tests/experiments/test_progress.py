"""Progress of trainings: a line for every change where nobody watches, a live table on a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fairseq_sg.experiments import progress
from fairseq_sg.experiments.logs import curve
from fairseq_sg.experiments.progress import Progress
from fairseq_sg.experiments.run import Run
from helpers.experiment_files import STAMP, evaluated, inner, make_run


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds."""
    now = {"time": 1000.0}
    monkeypatch.setattr(progress.time, "time", lambda: now["time"])
    monkeypatch.setattr(progress.time, "strftime", lambda _: "10:00:00")
    return now


def write(run: Run, *lines: str) -> None:
    with open(run.log, "a") as log:
        log.writelines(lines)


def look(shown: Progress, clock: dict, runs: list[Run], *states: str, seconds: float = 60.0) -> None:
    clock["time"] += seconds
    shown(runs, {str(run.folder): state for run, state in zip(runs, states, strict=True)})


def test_a_line_for_every_change_off_a_terminal(clock, tmp_path, capsys):
    """Of a state or of an evaluation, and none between two looks at the logs."""
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    write(runs[1], inner(40))  # of an earlier start
    shown = Progress(runs, "a table")
    assert shown.live is None
    look(shown, clock, runs, "training", "waiting")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "10:00:00  m (seed 1)  step 0/100  training",
        "10:00:00  m (seed 1)  step 40/100  waiting",
    ]
    write(runs[0], inner(10))
    look(shown, clock, runs, "training", "waiting")
    assert capsys.readouterr().out == ""
    write(runs[0], evaluated(20, 50, 12.5))
    look(shown, clock, runs, "training", "waiting", seconds=progress.PAUSE / 2)
    assert capsys.readouterr().out == ""
    look(shown, clock, runs, "training", "waiting", seconds=progress.PAUSE * 23.5)
    # 20 steps in four minutes and 80 + 60 to make.
    expected = "10:00:00  m (seed 1)  step 20/100  training  IID 50.0%  OOD 12.5%  about 28 min left\n"
    assert capsys.readouterr().out == expected
    write(runs[0], evaluated(40, 50, 12.5))  # the same numbers
    look(shown, clock, runs, "training", "waiting")
    assert "step 40/100  training  IID 50.0%  OOD 12.5%" in capsys.readouterr().out
    look(shown, clock, runs, "done", "diverged", seconds=0)  # the end is shown at once
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "10:00:00  m (seed 1)  step 100/100  done  IID 50.0%  OOD 12.5%",
        "10:00:00  m (seed 1)  step 40/100  diverged",
    ]
    shown.close()


def test_a_quantity_other_than_accuracy(clock, tmp_path, capsys):
    """Errors have no percent sign; in percent they have."""
    runs = [make_run(tmp_path / shown, shown=shown) for shown in ("mse_last", "word_error")]
    for run in runs:
        values = {"valid_mse_last": "0.12345", "valid_word_error": "1.25", "valid_num_updates": "20"}
        write(run, f"{STAMP} | valid | {json.dumps(values)}\n")
    shown, terminal = live(runs)
    look(shown, clock, runs, "training", "training")
    first, second = (line.split() for line in terminal.getvalue().splitlines() if "/ 100" in line)
    assert first[-1] == "0.123" and second[-1] == "1.2"
    shown.close()
    shown = Progress(runs, "a table")
    look(shown, clock, runs, "training", "training")
    assert [line.split("training  ")[1] for line in capsys.readouterr().out.splitlines()] == ["IID 0.123", "IID 1.2%"]


def live(runs: list[Run], width: int = 160):
    """A live table on a terminal, and what that terminal has shown."""
    console = pytest.importorskip("rich.console")
    terminal = io.StringIO()
    return Progress(runs, "a table", console.Console(file=terminal, force_terminal=True, width=width)), terminal


def test_a_live_table_on_a_terminal(clock, tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b", "c")]
    runs[1].name = "relative, forward"
    shown, terminal = live(runs)
    look(shown, clock, runs, "training", "waiting", "waiting")
    write(runs[0], evaluated(20, 50, 12.5), inner(50))
    look(shown, clock, runs, "training", "waiting", "done")
    text = terminal.getvalue().rpartition("a table: ")[2]
    assert text.startswith("1 of 3 trainings ended")
    for name in ("model", "seed", "state", "steps", "steps/s", "left", "IID %", "OOD %"):
        assert name in text
    first, second, third = (line.split() for line in text.splitlines() if "/ 100" in line)
    # 50 steps in the minute between two looks, so as long for the other 50.
    assert first == ["m", "1", "training", "50", "/", "100", "0.8", "1", "min", "50.0", "12.5"]
    assert second == ["relative,", "forward", "1", "waiting", "0", "/", "100"]
    assert third == ["m", "1", "done", "100", "/", "100"]
    assert "\x1b[?25l" in terminal.getvalue() and not terminal.getvalue().endswith("\x1b[?25h")
    shown.close()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_brackets_in_a_label_are_shown(clock, tmp_path):
    (run,) = [make_run(tmp_path / "a")]
    run.name = "linear [/norm] [ours]"
    shown, terminal = live([run])
    look(shown, clock, [run], "training")
    assert run.name in terminal.getvalue()
    shown.close()


def test_of_many_trainings_the_running_ones_are_shown(clock, tmp_path):
    runs = [make_run(tmp_path / f"r{number}") for number in range(progress.ROOM + 2)]
    shown, terminal = live(runs)
    look(shown, clock, runs, *["done"] * progress.ROOM, "training", "evaluating")
    text = terminal.getvalue()
    assert f"{progress.ROOM} of {progress.ROOM + 2} trainings ended" in text
    assert text.count("/ 100") == 2 and f"{progress.ROOM} more are not shown" in text
    shown.close()


def test_ended_trainings_are_not_read_again(clock, tmp_path, monkeypatch):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    shown, asked = Progress(runs, "a table"), []
    monkeypatch.setattr(progress, "position", lambda run: asked.append(run.folder.name) or {"step": 1, "evaluated": 0})
    for _ in range(3):
        look(shown, clock, runs, "done", "training")
    assert asked == ["a", "b", "b", "b"]


@pytest.mark.parametrize("seconds,text", [(20, "0 min"), (600, "10 min"), (7140, "119 min"), (9000, "2.5 h")])
def test_durations(seconds, text):
    assert progress._duration(seconds) == text


def test_folder_names_are_paths(tmp_path):
    """The state is given by folder; a run without a log is at step 0."""
    run = Run("m", 1, Path(tmp_path / "new"), Path("data"), 10, [], {"valid": "IID"})
    assert Progress([run], "a table").at_start == {str(tmp_path / "new"): 0}


def test_a_damaged_line_of_a_log_is_left_out_and_named_once(tmp_path, caplog):
    run = make_run(tmp_path, evaluated(1, 10.0, 5.0) + evaluated(2, 20.0, 6.0) + evaluated(3, 30.0, 7.0))
    lines = run.log.read_text().splitlines()
    lines[2] = lines[2].replace(",", "", 1)
    run.log.write_text("\n".join(lines) + "\n")
    found = [(point["step"], point.get("valid"), point.get("gen")) for _ in range(2) for point in curve(run)]
    assert found == [(1, 10.0, 5.0), (2, None, 6.0), (3, 30.0, 7.0)] * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{run.log}:3 is damaged and left out (Expecting ',' delimiter")

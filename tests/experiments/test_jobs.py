"""Trainings as processes: failures, folders and their locks, free memory, logs that are read back."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fairseq_sg
from fairseq_sg import files
from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import groups, jobs, logs, memory, records
from fairseq_sg.experiments.quantities import chosen
from fairseq_sg.experiments.run import Run
from helpers import forked
from helpers.experiment_files import (
    STAMP,
    TINY,
    course,
    evaluated,
    inner,
    make_run,
    of_subset,
    planned,
    save,
    write_recipe,
)

PACKAGE = Path(fairseq_sg.__file__).parent

# The criteria of a Fail.


@pytest.mark.parametrize(
    "log,finished,step,why",
    [
        (evaluated(1, 50, 20) + inner(2), True, None, None),
        # A loss that is not a number, in training or in an evaluation.
        (inner(1) + inner(2, "nan") + inner(3), False, 2, "the loss is nan"),
        (inner(1) + inner(2, "inf"), False, 2, "the loss is inf"),
        (evaluated(5, 0, 0, "nan"), False, 5, "the loss on valid is nan"),
        # Accuracy that fell to 0, at five evaluations or at the end.
        (course(5, 30, 0, 0, 0, 0, 0), False, 3, "was 30.0 %, fell to 0"),
        (course(5, 30, 0, 0, 0, 0), False, None, None),
        (course(5, 30, 0, 0, 0, 0), True, 3, "was 30.0 %, fell to 0"),
        # It recovers; another subset is not 0; it never learned anything.
        (course(30, 0, 0, 0, 0, 1, 0, 0), False, None, None),
        (course(30, 0, 0, 0, 0, 0, 0, 0, gen=1), True, None, None),
        (course(0, 0, 0, 0, 0, 0, 0, 0), True, None, None),
        (course(9.9, 0, 0, 0, 0, 0, 0, 0), True, None, None),
        # Only the first subset was evaluated at the last step: incomplete.
        (course(30, 0, 0, 0, 0) + of_subset("valid", 6, 0), False, None, None),
        # fairseq gave up, now or before the restart.
        (f"$ fairseq-train x\n{inner(3)}Traceback …\nFloatingPointError: …\n", False, 3, "FloatingPointError"),
        (f"$ fairseq-train x\nFloatingPointError: …\n$ fairseq-train x\n{inner(3)}", False, None, None),
    ],
)  # fmt: skip
def test_divergence(log, finished, step, why, tmp_path):
    found = logs.divergence(make_run(tmp_path, log), finished)
    if why is None:
        assert found is None
    else:
        assert found["step"] == step and why in found["why"]


# Running, with shell commands instead of fairseq's.


@pytest.fixture
def commands(monkeypatch):
    """folder's name -> the shell script instead of its training; evaluation prints two accuracies."""
    scripts = {}
    final = evaluated(100, 60, 40)

    def executable(command):
        if command[0] == "fairseq-train":
            return ["bash", "-c", scripts[Path(command[command.index("--save-dir") + 1]).name]]
        return ["printf", "%s", final]

    sleep = time.sleep
    monkeypatch.setattr(jobs, "executable", executable)
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    return scripts


GOOD = f"printf '%s' '{evaluated(50, 50, 10)}{evaluated(100, 60, 40)}'"


def test_a_diverging_training_is_stopped_and_the_others_go_on(commands, tmp_path, capsys):
    process = tmp_path / "process"
    bad = f"echo $$ > {process}; printf '%s' '{inner(1)}{inner(2, 'nan')}'; exec sleep 600"
    commands |= {"bad": bad, "good": GOOD, "broken": "exit 3"}
    all_runs = [make_run(tmp_path / name) for name in commands]
    states = []
    bad, good, broken = jobs.run_all(all_runs, 2, lambda _, state: states.append(dict(state)))
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)
    assert bad["diverged"] == {"step": 2, "why": "the loss is nan"} and "result" not in bad
    assert good["result"]["accuracy"] == {"valid": 60, "gen": 40} and good["result"]["loss"] == {
        "valid": 0.5,
        "gen": 0.5,
    }
    assert broken["failed"] == "training"
    assert list(states[-1].values()) == ["diverged", "done", "failed"]
    assert "(seed 1) failed in training; see " in capsys.readouterr().err
    # Run again: a Fail is a result, failed runs are retried.
    commands |= {"bad": "exit 9", "good": "exit 9", "broken": GOOD}
    bad, good, broken = jobs.run_all(all_runs, 3, lambda *_: None)
    assert bad["diverged"]["step"] == 2 and "result" in good and "result" in broken and "failed" not in broken


@pytest.mark.parametrize(
    "name,cause",
    [("KILL", "SIGKILL, perhaps for lack of memory"), ("SEGV", "SIGSEGV")],
)
def test_a_training_that_a_signal_ends_has_failed(name, cause, commands, tmp_path, capsys):
    """It may have been killed for its memory, say, after its last evaluation. Errors of its log are older."""
    commands["r"] = f"{GOOD}; echo 'error: earlier'; kill -{name} $$"
    (record,) = jobs.run_all([make_run(tmp_path / "r")], 1, lambda *_: None)
    assert record["failed"] == f"training (ended by {cause})" and "result" not in record
    message = f"error: m (seed 1) failed in training (ended by {cause}); see {tmp_path}/r/train.log\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "script,what,why",
    [
        ("echo 'error: one'; echo 'error: no such subset'; exit 2", "evaluation", " (no such subset)"),
        ("kill -KILL $$", "evaluation (ended by SIGKILL, perhaps for lack of memory)", ""),
    ],
)
def test_a_failed_evaluation_names_its_log_and_says_why(script, what, why, commands, tmp_path, monkeypatch, capsys):
    """The second of two; an earlier log of a third is older."""
    run = make_run(tmp_path / "r", more_overrides=("{1: 1}", "{2: 2}"))
    commands["r"] = f"{GOOD}; echo; echo 'error: of the training'"
    executable = jobs.executable
    first = run.validate_command()
    monkeypatch.setattr(
        jobs,
        "executable",
        lambda words: executable(words) if words in (first, run.train_command()) else ["bash", "-c", script],
    )
    run.more_log(1).write_text("error: of another time\n")
    os.utime(run.more_log(1), (0, 0))
    (record,) = jobs.run_all([run], 1, lambda *_: None)
    assert record["failed"] == what
    assert capsys.readouterr().err == f"error: m (seed 1) failed in {what}; see {run.more_log(0)}{why}\n"


def test_a_training_that_cannot_be_recorded_has_failed(commands, tmp_path, monkeypatch):
    """Such as on a full disk; the next start tries again."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "end", full)
    commands["r"] = GOOD
    states = []
    (record,) = jobs.run_all([make_run(tmp_path / "r")], 1, lambda _, state: states.append(*state.values()))
    assert states[-1] == "failed" and not record.keys() & {"result", "failed"}


@pytest.mark.parametrize("what", ["log", "folder"])
def test_an_error_about_one_training_does_not_end_the_others(what, commands, tmp_path):
    """A log without an evaluation, and a folder that is deleted while its training runs."""
    bad = make_run(tmp_path / "bad")
    commands |= {
        "bad": "true" if what == "log" else f"rm -r {bad.folder}; sleep 600",
        "good": f"sleep 1; {GOOD}",
    }
    states = []
    broken, good = jobs.run_all([bad, make_run(tmp_path / "good")], 2, lambda _, state: states.append(dict(state)))
    assert good["result"]["accuracy"]["gen"] == 40 and list(states[-1].values()) == ["failed", "done"]
    why = "has no evaluation" if what == "log" else "FileNotFoundError"
    assert why in broken["failed"] and broken["failed"].startswith(("training (", "evaluation ("))


def test_a_signal_to_the_runner_ends_its_trainings(tmp_path):
    """``kill`` and a closed terminal as well as Ctrl-C: no training goes on alone."""
    write_recipe(tmp_path)
    script = f"""
import signal, sys
from fairseq_sg.experiments import __main__ as command, jobs
# Tests in a shell's background ignore Ctrl-C, those under nohup SIGHUP, and hand that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
command.Plan.prepare = command.arguments.check = lambda _: None
jobs.executable = lambda words: ["bash", "-c", "echo $$ > {tmp_path}/$$.pid; exec sleep 600"]
sys.exit(command.main(["run", "{tmp_path}/tiny.yaml", "--device", "cpu", "--jobs", "2", "--memory-guard", "0",
                       "--out", "{tmp_path}/out"]))
"""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        log = tmp_path / f"{number}.log"
        runner = forked.start("-c", script, streams=(os.devnull, log, log), env=environment)
        while len(started := list(tmp_path.glob("*.pid"))) < 2 or not all(p.read_text() for p in started):
            assert runner.is_alive(), log.read_text()
            time.sleep(0.05)
        os.kill(runner.pid, number)
        runner.join(60)
        assert runner.exitcode == 130 and "the same command resumes" in log.read_text()
        for path in started:
            gone = Path(f"/proc/{path.read_text().strip()}")
            for _ in range(1200):
                if not gone.exists():
                    break
                time.sleep(0.05)
            assert not gone.exists()
            path.unlink()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_trainings_except_under_nohup(ignored):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        handler = signal.SIG_IGN if ignored else signal.SIG_DFL
        signal.signal(signal.SIGHUP, handler)
        jobs.interrupt_by_signals()
        with nullcontext() if ignored else pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        with jobs._signals_held():  # the processes that start here inherit it
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_while_a_training_starts_ends_it(commands, tmp_path, monkeypatch):
    """It comes after the process has begun, and before the runner knows it."""
    commands["r"] = "exec sleep 600"
    launch, started = jobs._launch, []

    def interrupted(*arguments, **more):
        started.append(launch(*arguments, **more))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(jobs, "_launch", interrupted)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.run_all([make_run(tmp_path / "r")], 1, lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert started[0].wait(60) == -signal.SIGTERM


def test_the_environment_of_trainings(monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "WARNING")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "LOGLEVEL" not in jobs.environment() and jobs.environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert jobs.environment()["OMP_NUM_THREADS"] == "3"


def test_where_the_process_of_several_trainings_ends_early_only_those_that_had_not_ended_have_failed(tmp_path):
    """It may have been killed for its memory, say."""
    process = subprocess.Popen(["bash", "-c", "kill -9 $$"])
    members = {}
    for name in ("ended", "other"):
        run = make_run(tmp_path / name)
        members[name] = groups.Member(process, run.folder, run.log, tmp_path / "together.log")
    (tmp_path / "ended" / groups.END).write_text("0")
    process.wait()
    assert {name: member.poll() for name, member in members.items()} == {"ended": 0, "other": -9}
    assert members["other"].poll() == members["other"].returncode == -9
    log = (tmp_path / "other" / "train.log").read_text()
    assert log == f"the process of this training ended with exit code -9; it printed {tmp_path / 'together.log'}\n"
    assert (tmp_path / "ended" / "train.log").read_text() == ""
    # The next start forgets how the last one ended.
    members["other"].stop()
    entry = groups.entry(tmp_path / "ended", tmp_path / "log", ["data", "--seed", "1"], 5)
    assert entry["arguments"] == ["data", "--seed", "1", "--num-workers", "0"] and entry["lock"] == 5
    assert not Path(entry["end"]).exists() and (tmp_path / "other" / groups.STOP).exists()


def test_a_training_without_an_end_has_failed_however_its_process_ended(tmp_path):
    process, run = subprocess.Popen(["true"]), make_run(tmp_path / "r")
    process.wait()
    assert groups.Member(process, run.folder, run.log, tmp_path / "together.log").poll() == 1


def test_a_collapse_at_the_end_is_a_fail(commands, tmp_path):
    commands["late"] = f"printf '%s' '{evaluated(50, 50, 10)}{evaluated(100, 0, 0)}'"
    (record,) = jobs.run_all([make_run(tmp_path / "late")], 1, lambda *_: None)
    assert record["diverged"]["step"] == 100


def test_no_more_than_the_jobs_and_the_place_allow(commands, tmp_path):
    commands |= {f"r{i}": f"sleep 0.3; {GOOD}" for i in range(4)}
    most = []
    asked = []

    def place(active):
        asked.append(len(active))
        return {"PLACE": "here"} if len(active) < 2 else None

    def watch(_, state):
        most.append(sum(s in ("training", "evaluating") for s in state.values()))

    records = jobs.run_all([make_run(tmp_path / name) for name in commands], 3, watch, place)
    assert all("result" in record for record in records) and max(most) == 2 and max(asked) == 2


@pytest.mark.parametrize("finishes", [False, True])
def test_a_folder_of_another_process_is_waited_for(finishes, commands, tmp_path):
    """The other process ends with a result, or without one; then we train."""
    commands["r"] = "exit 9" if finishes else GOOD
    run = make_run(tmp_path / "r")
    lock = open(run.folder / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    seen = []

    def watch(_, state):
        seen.append(state[str(run.folder)])
        if len(seen) == 3 and finishes:
            save(run, result={"steps": run.steps, "accuracy": {"gen": 40}})
        if len(seen) == 3:
            lock.close()

    (record,) = jobs.run_all([run], 1, watch)
    assert seen[:3] == ["elsewhere"] * 3 and record["result"]["accuracy"]["gen"] == 40


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match=r"cannot be locked \(Function not implemented\): --out needs another file"):
        jobs.run_all([make_run(tmp_path / "r")], 1, lambda *_: None)


def test_a_training_that_cannot_be_started_fails_alone_while_others_run(commands, tmp_path, capsys):
    commands |= {"good": f"sleep 1; {GOOD}", "later": GOOD}
    broken = make_run(tmp_path / "broken")
    (broken.folder / "lock").mkdir()
    all_runs = [make_run(tmp_path / "good"), broken, make_run(tmp_path / "later")]
    states = []
    good, failed, later = jobs.run_all(all_runs, 2, lambda _, state: states.append(dict(state)))
    assert [record["result"]["accuracy"]["gen"] for record in (good, later)] == [40, 40]
    assert list(states[-1].values()) == ["done", "failed", "done"] and "result" not in failed
    assert f"error: {broken.folder}: [Errno 21] Is a directory" in capsys.readouterr().err
    with pytest.raises(IsADirectoryError):
        jobs.run_all([broken], 1, lambda *_: None)


def test_a_process_that_cannot_be_started_fails_alone(commands, tmp_path, monkeypatch):
    launch = jobs._launch

    def full(command, job, **kwargs):
        if job.run.folder.name == "bad":
            raise OSError(12, "Cannot allocate memory")
        return launch(command, job, **kwargs)

    monkeypatch.setattr(jobs, "_launch", full)
    commands |= {"good": f"sleep 1; {GOOD}", "bad": GOOD}
    good, bad = jobs.run_all([make_run(tmp_path / "good"), make_run(tmp_path / "bad")], 2, lambda *_: None)
    assert good["result"]["accuracy"]["gen"] == 40
    assert bad["failed"] == "training (OSError: [Errno 12] Cannot allocate memory)"


def test_a_further_evaluation_is_in_the_result(commands, tmp_path):
    commands["r"] = GOOD
    run = make_run(tmp_path / "r", more_overrides=("{'encoder_layers': 3}", "{'encoder_layers': 4}"))
    (record,) = jobs.run_all([run], 1, lambda *_: None)
    measured = {"accuracy": {"valid": 60, "gen": 40}, "loss": {"valid": 0.5, "gen": 0.5}}
    assert record["result"]["more"] == dict.fromkeys(run.more_overrides, measured)
    words = [shlex.split(command) for command in record["commands"][1:]]
    assert all("--model-overrides" not in first for first in words[:1])
    assert [more[more.index("--model-overrides") + 1] for more in words[1:]] == list(run.more_overrides)


def test_what_a_recipe_has_got_since_is_evaluated_and_an_error_keeps_the_result(
    commands, tmp_path, monkeypatch, capsys
):
    """Another subset, type and overrides; the training is not started again."""
    commands["r"] = GOOD
    run = make_run(tmp_path / "r")
    run.checkpoint.touch()
    (before,) = jobs.run_all([run], 1, lambda *_: None)
    commands["r"] = "exit 9"
    executable, states = jobs.executable, []
    more = replace(run, more_overrides=("{'encoder_layers': 3}",), types=("long",))
    more.subsets = run.subsets | {"other": "other"}
    monkeypatch.setattr(jobs, "executable", lambda _: ["false"])
    (failed,) = jobs.run_all([more], 1, lambda _, state: states.append(dict(state)))
    assert failed["failed"] == "evaluation"
    assert [failed[key] for key in ("result", "commands")] == [before[key] for key in ("result", "commands")]
    assert list(states[-1].values()) == ["failed"] and all("training" not in state.values() for state in states)
    final = evaluated(100, 61, 41) + of_subset("other", 100, 5).replace("other_nll_loss", "other_accuracy_long")
    monkeypatch.setattr(jobs, "executable", lambda _: ["printf", "%s", final])
    (after,) = jobs.run_all([more], 1, lambda *_: None)
    assert "failed" not in after and after["result"]["checkpoint_step"] == 100
    assert after["result"]["accuracy"] == {"valid": 61, "gen": 41, "other": 5, "other/long": 0.5}
    assert list(after["result"]["more"]) == ["{'encoder_layers': 3}"] and after["minutes"] == before["minutes"]
    # Now nothing is left. Without the checkpoint, nothing can be evaluated.
    monkeypatch.setattr(jobs, "executable", executable)
    assert jobs.run_all([more], 1, lambda *_: None) == [after]
    run.checkpoint.unlink()
    more.more_overrides = ("{'encoder_layers': 5}",)
    assert jobs.run_all([more], 1, lambda *_: None) == [after]
    assert "is gone, so what is new in the recipe stays empty" in capsys.readouterr().err


def test_a_folder_that_was_moved_has_nothing_left(commands, tmp_path):
    commands["r"] = GOOD
    run = make_run(tmp_path / "r")
    jobs.run_all([run], 1, lambda *_: None)
    moved = replace(run, folder=run.folder.rename(tmp_path / "elsewhere"))
    assert records.nothing_left(moved)
    moved.more_overrides = ("{'encoder_layers': 3}",)
    assert not records.nothing_left(moved)


def test_another_choice_of_the_best_checkpoint_is_another_training(commands, tmp_path):
    commands["r"] = GOOD
    run = make_run(tmp_path / "r", best=True)
    jobs.run_all([run], 1, lambda *_: None)
    run.best = False
    assert records.result_of(run)
    run.best, run.subsets = True, {"gen": "OOD", "valid": "IID"}
    with pytest.raises(ValueError, match="other settings"):
        records.result_of(run)


def test_more_trainings_in_a_process_than_jobs(commands, tmp_path, monkeypatch):
    commands |= {"a": GOOD, "b": GOOD}
    sizes = []
    train = jobs._train
    monkeypatch.setattr(jobs, "_train", lambda jobs: (sizes.append(len(jobs)), train(jobs)))
    records = jobs.run_all([make_run(tmp_path / name) for name in commands], 1, lambda *_: None, together=3)
    assert all("result" in record for record in records) and sizes == [1, 1]


def test_stacked_trainings_of_a_process_differ_in_their_seeds_alone(tmp_path, monkeypatch):
    """Also one that is alone goes through a stack."""
    plans = []

    def launch(entries, *_):
        plans.append([(Path(entry["log"]).parent.name, entry["stack"]) for entry in entries])
        raise OSError("no process")

    monkeypatch.setattr(groups, "launch", launch)
    runs = []
    for seed in (1, 2, 3):
        for name, arguments in (("a", ["--lr", "1"]), ("b", ["--lr", "2"])):
            run = make_run(tmp_path / f"{name}{seed}", stacked=True)
            runs.append(replace(run, seed=seed, arguments=[*run.arguments, *arguments]))
    jobs.run_all(runs, 2, lambda *_: None, together=2)
    expected = [["a1", "a2"], ["b1", "b2"], ["a3"], ["b3"]]
    assert plans == [[(name, "seeds") for name in names] for names in expected]


@pytest.mark.parametrize("stacked", [False, True])
def test_the_record_says_how_steps_were_made(stacked, tmp_path):
    """An evaluation afterwards changes nothing."""
    run = make_run(tmp_path / "r", stacked=stacked)
    (start,) = records.starts_with_this(run, {}, {})
    assert start["machine"].get("steps") == ("stacked" if stacked else None)
    again = replace(run, stacked=not stacked)
    later = records.starts_with_this(again, {"starts": [start | {"commit": "old"}], "result": {"steps": run.steps}}, {})
    assert [one["machine"].get("steps") for one in later] == [start["machine"].get("steps")] * 2


def test_commands_are_those_of_this_package_from_every_folder():
    found = jobs.executable(["fairseq-train", "data", "--user-dir", "fairseq_sg", "--seed", "1"])
    assert found == [sys.executable, "-m", "fairseq_cli.train", "data", "--user-dir", str(PACKAGE), "--seed", "1"]
    mine = ["fairseq-validate", "fairseq_sg", "--user-dir", "my/fairseq_sg"]
    assert jobs.executable(mine) == [sys.executable, "-m", "fairseq_cli.validate", *mine[1:]]


# Free memory.


def job(run: Run, gpu: str = "", start: int = 0) -> jobs.Job:
    return jobs.Job(run, open(os.devnull), {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}, start=start)


def test_memory_guard(tmp_path):
    begun, young = make_run(tmp_path / "begun", inner(100)), make_run(tmp_path / "young", "$ fairseq-train\n")
    free = {None: 5.0}
    guard = memory.Guard(3, free=free.get)
    assert guard([job(begun)]) == {} and guard([job(young)]) is None  # 3 GB are set aside for one that has not begun
    free[None] = 6.0
    assert guard([job(young)]) == {}
    free[None] = 2.9
    assert guard([job(begun)]) is None and guard([]) == {}  # the first always starts
    assert memory.Guard(0, free=free.get)([job(young)] * 9) == {}
    # Among GPUs with enough memory, the one with the fewest jobs.
    free |= {None: 50.0, "0": 20.0, "1": 5.0}
    guard = memory.Guard(3, ["0", "1"], free.get)
    assert guard([]) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert guard([job(begun, "0")]) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert guard([job(begun, "0"), job(young, "1")]) == {"CUDA_VISIBLE_DEVICES": "0"}
    free["0"] = 1.0
    assert guard([job(begun, "0"), job(young, "1")]) is None
    free |= {None: 1.0, "1": 50.0}
    assert guard([job(begun, "0")]) is None  # the machine's own memory


def test_while_free_memory_is_unknown_no_other_training_starts(tmp_path, capsys):
    answers = iter([UsageError("free memory is unknown"), UsageError("free memory is unknown"), 9.0])

    def free(_):
        answer = next(answers)
        if isinstance(answer, UsageError):
            raise answer
        return answer

    guard, running = memory.Guard(3, free=free), job(make_run(tmp_path, inner(100)))
    assert [guard([]), guard([running]), guard([running]), guard([running])] == [{}, None, None, {}]
    assert capsys.readouterr().err == "warning: free memory is unknown\n"


def test_what_a_training_logged_before_its_restart_does_not_count(tmp_path):
    run = make_run(tmp_path, inner(100))
    restarted = job(run, start=run.log.stat().st_size)
    assert not jobs.begun(restarted)
    with open(run.log, "a") as log:
        log.write(inner(200))
    assert jobs.begun(restarted)


def test_free_memory_of_this_machine():
    assert 0 < memory.free_gigabytes(None) < 1e5
    with pytest.raises(UsageError, match="use --memory-guard 0 to disable the check"):
        memory.free_gigabytes("no such GPU")


def test_free_memory_is_that_of_the_gpu_that_trains(monkeypatch):
    """CUDA numbers the fastest GPU 0, nvidia-smi the first on the bus."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"uuid-of-{gpu}"))
    asked = []

    def nvidia_smi(command, **options):
        asked.append(command[2])
        return SimpleNamespace(stdout="2048\n")

    monkeypatch.setattr(memory.subprocess, "run", nvidia_smi)
    assert memory.free_gigabytes("0") == memory.free_gigabytes("2") == 2
    assert asked == ["GPU-uuid-of-1", "GPU-uuid-of-0"]


def test_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    assert records.visible_gpus() == ["2", "GPU-5"]


def test_the_gpu_of_a_record_is_that_of_its_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("A100", "H100")[device])
    assert records.machine()["gpu"] == "A100"
    assert records.machine(where={"CUDA_VISIBLE_DEVICES": "GPU-5"})["gpu"] == "H100"
    assert "gpu" not in records.machine(gpu=False) and "float32 products" not in records.machine()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert records.machine()["float32 products"] == "TF32" and "float32 products" not in records.machine(gpu=False)


# Logs.

LOG = """\
$ fairseq-train …
2026-01-01 10:00:00 | INFO | fairseq_cli.train | some line
2026-01-01 10:00:10 | INFO | train_inner | {"epoch": 1, "loss": "2.5", "num_updates": "100", "lr": "0.001"}
2026-01-01 10:01:00 | INFO | valid | {"epoch": 1, "valid_accuracy": "12.5", "valid_nll_loss": "0.75", "valid_num_updates": "100"}
2026-01-01 10:01:30 | INFO | gen | {"epoch": 1, "gen_accuracy": "1.25", "gen_nll_loss": "1.5", "gen_num_updates": "100"}
2026-01-01 10:02:00 | INFO | valid | {"epoch": 1, "valid_accuracy": "50", "valid_nll_loss": "0.5", "valid_num_updates": "200"}
2026-01-01 10:03:00 | INFO | train_inner | {"epoch": 1, "loss": "inf", "num_updates": "250"}
killed in mid-wri"""  # noqa: E501


@pytest.fixture
def run(tmp_path) -> Run:
    folder = tmp_path / "linear-seed1"
    folder.mkdir()
    (folder / "train.log").write_text(LOG)
    return Run("linear", 1, folder, Path("data"), 400, ["--arch", "x"], {"valid": "IID", "gen": "OOD"})


def test_curve_and_position(run):
    assert logs.curve(run) == [
        {"step": 100, "valid": 12.5, "valid_loss": 0.75, "gen": 1.25, "gen_loss": 1.5},
        {"step": 200, "valid": 50.0, "valid_loss": 0.5},
    ]
    assert logs.position(run) == {"step": 250, "evaluated": 200, "valid": 50.0, "gen": 1.25}


def test_partial_result_is_cut_at_the_step(run):
    """The last one at which every subset was evaluated."""
    partial = logs.partial_result(run)
    assert partial["steps"] == 100 and partial["accuracy"] == {"valid": 12.5, "gen": 1.25}
    assert partial["curve"] == logs.curve(run)[:1]
    run.log.write_text(LOG[: LOG.index("train_inner")])
    assert logs.partial_result(run) is None


def test_minutes_do_not_count_what_lies_between_two_starts(run):
    assert logs.minutes(run) == 3
    later = LOG.replace("2026-01-01", "2026-01-03")
    run.log.write_text(f"$ fairseq-train data\n{LOG}\n$ fairseq-train data\n{later}$ fairseq-train data\n")
    assert logs.minutes(run) == 6


def test_a_folder_with_other_settings_is_refused(run):
    files.write_json(
        run.folder / "run.json", {"settings": records.settings_of(run), "minutes": 1.0, "result": {"steps": 400}}
    )
    assert records.result_of(run) == {"steps": 400}
    run.steps = 500
    assert records.result_of(run) is None  # goes on
    run.steps = 300
    assert records.result_of(run) is None
    run.steps, earlier = 400, records.settings_of(run)
    del earlier["prepare"]  # as in records of earlier versions
    run.prepare = "ctl --order backward"
    files.write_json(run.folder / "run.json", {"settings": earlier, "result": {"steps": 400}})
    assert records.result_of(run) == {"steps": 400}
    files.write_json(run.folder / "run.json", {"settings": {**earlier, "prepare": "ctl"}, "result": {"steps": 400}})
    with pytest.raises(ValueError, match=r"other settings \(prepare: see its run.json\)"):
        records.result_of(run)
    run.prepare = "ctl"
    run.arguments = ["--arch", "y"]
    with pytest.raises(ValueError, match="holds a training with other settings"):
        records.result_of(run)


def test_a_training_that_failed_without_a_checkpoint_may_have_other_settings(run):
    """Such as after a wrong option."""
    run.arguments = ["--task", "x", "--arch", "linaer"]
    save(run, failed="training")
    corrected = replace(run, arguments=["--task", "x", "--arch", "linear"])
    assert records.result_of(corrected) is None and records.diverged(corrected) is None
    records.begin(corrected, {})
    found = records.saved(run)
    assert found["settings"]["arguments"] == corrected.arguments and "failed" not in found
    for kept in ({"failed": "training"}, {"failed": "evaluation", "result": {"steps": run.steps}}):
        (run.folder / "checkpoint_last.pt").touch()
        save(run, **kept)
        with pytest.raises(ValueError, match="holds a training with other settings"):
            records.result_of(corrected)
        (run.folder / "checkpoint_last.pt").unlink()


def test_finished_runs_are_not_evaluated_again_on_another_device(run):
    run.arguments = ["--task", "x"]
    save(run, result={"steps": run.steps}, commands=[shlex.join(command) for command in run.commands()])
    assert records.evaluated(run)
    elsewhere = replace(run, evaluation=[*run.evaluation, "--cpu"])
    assert records.evaluated(elsewhere) and not records.evaluated(replace(run, evaluation=["--quiet"]))
    analysed = replace(run, analyses={"masks": ["masks", "x.pt", "--device", "cpu"]})
    save(run, result={"steps": run.steps}, commands=[shlex.join(command) for command in analysed.commands()])
    assert records.evaluated(replace(run, analyses={"masks": ["masks", "x.pt", "--device", "cuda"]}))


def test_starts_stay_where_the_last_checkpoint_is_gone(run):
    """A finished training that is evaluated again keeps its starts; one that begins again does not."""
    starts = [{"step": 0, "commit": "old", "machine": "there"}]
    done = {"starts": starts, "result": {"steps": run.steps}}
    assert records.starts_with_this(run, done, {})[:-1] == starts
    assert records.starts_with_this(run, done, {})[-1]["step"] == run.steps
    assert [s["step"] for s in records.starts_with_this(replace(run, steps=run.steps + 1), done, {})] == [0]
    assert records.starts_with_this(replace(run, steps=run.steps + 1), done, {})[0]["commit"] != "old"


def test_the_task_is_the_last_one(run):
    for words in (["--task", "x", "--task=y"], ["--task=y"], ["--lr", "1", "--task", "y"]):
        assert replace(run, arguments=words).task == "y"


def test_a_failure_that_cannot_be_recorded_ends_one_training_alone(run, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jobs, "_advance", lambda job: full())
    monkeypatch.setattr(jobs, "_stop", lambda process: None)
    monkeypatch.setattr(records, "end", full)
    assert jobs._advance_or_fail(SimpleNamespace(run=run, process=None, work="training"))
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "schedule,other",
    [
        ("--lr-scheduler tri_stage --phase-ratio [0.1,0.4,0.5]", "--warmup-steps 1 --hold-steps 1 --decay-steps 1"),
        ("--lr_scheduler=cosine --warmup-updates 10", "--lr-period-updates=50"),
        ("--lr-scheduler cosine --lr-period-updates 0", "--lr_period_updates 9"),
        ("--lr-scheduler inverse_sqrt --lr-scheduler polynomial_decay", "--total-num-update 100"),
        ("--lr-scheduler one_cycle", "--lr-scheduler fixed"),
    ],
)
def test_more_steps_of_a_rate_that_ends_with_the_training_are_another_training(schedule, other, run):
    """Its first part would have had another rate; with a constant one, or a length of its own, it continues."""
    for words, continues in ((schedule.split(), False), ([*schedule.split(), *other.split()], True)):
        run.arguments, run.steps = ["--task", "x", *words], 400
        save(run, result={"steps": 400})
        assert records.result_of(run) == {"steps": 400}
        run.steps = 500
        if continues:
            assert records.result_of(run) is None
        else:
            with pytest.raises(ValueError, match=r"other settings \(steps: see its run.json\)"):
                records.result_of(run)


def test_fewer_steps_than_a_stopped_training_has_made_are_refused(run):
    """Otherwise the evaluation would be reported as that of fewer steps."""
    run.steps = 150
    with pytest.raises(
        ValueError, match="holds a training at step 200, beyond the requested 150: request more steps, or choose"
    ):
        jobs.run_all([run], 1, lambda *_: None)
    assert not (run.folder / "run.json").exists()


def test_a_training_continues_on_another_device(tmp_path):
    ways = [("cpu", 0), ("cuda", 0), ("cuda", 8)]
    runs = [planned(tmp_path, device=device, graphs=graphs).trials()[0].run for device, graphs in ways]
    assert len({tuple(run.arguments) for run in runs}) == 3
    for first in runs:
        save(first, result={"steps": first.steps})
        assert [records.result_of(run)["steps"] for run in runs] == [first.steps] * 3
        for run in runs:
            other = replace(run, arguments=[*run.arguments, "--cpu-like"])
            with pytest.raises(ValueError, match=r"other settings \(arguments: see its run.json\)"):
                records.result_of(other)


def test_a_training_continues_with_smaller_batches_in_validation(tmp_path):
    """Such as after it ran out of memory there; language models have as many streams, and other numbers."""
    first, smaller = (
        planned(tmp_path, TINY.replace("batch_size_valid: 50", f"batch_size_valid: {size}")).trials()[0].run
        for size in (50, 5)
    )
    save(first, result={"steps": first.steps})
    assert smaller.arguments != first.arguments and records.result_of(smaller) == {"steps": first.steps}
    assert records.evaluated(first) and not records.evaluated(smaller)
    streams = [replace(run, arguments=[*run.arguments, "--task", "sg_language_modeling"]) for run in (first, smaller)]
    save(streams[0], result={"steps": first.steps})
    with pytest.raises(ValueError, match=r"other settings \(arguments: see its run.json\)"):
        records.result_of(streams[1])


def test_every_commit_and_machine_that_a_training_was_started_at_is_kept(run, monkeypatch):
    """What was trained after the last checkpoint is trained again, by the next start."""

    def begin(commit: str) -> list[tuple[int, str]]:
        monkeypatch.setenv("SG_COMMIT", commit)
        jobs._begin(run, {}).lock.close()
        return [(start["step"], start["commit"]) for start in records.saved(run)["starts"]]

    assert begin("aaa") == begin("aaa") == [(0, "aaa")]
    assert begin("bbb") == [(0, "bbb")]
    (run.folder / "checkpoint_last.pt").touch()
    assert begin("bbb") == [(0, "bbb")]
    assert begin("ccc") == [(0, "bbb"), (200, "ccc")]
    assert begin("ddd") == [(0, "bbb"), (200, "ddd")]
    assert records.saved(run)["starts"][0]["machine"] == records.machine()


def test_generated_output_is_scored(tmp_path):
    path = tmp_path / "generate.log"
    path.write_text(
        "S-0\tjump\nT-0\tA B\nH-0\t-0.1\tA B\nD-0\t-0.1\tA B\nT-1\tA\nD-1\t-0.2\tA A\nT-2\tC\nD-2\t-0.2\t\n"
        "Generate gen with beam=1: BLEU = 41.50 1/1/1/1 (BP = 1.000 ratio = 1.250 hyp_len = 5 ref_len = 4)\n"
    )
    assert logs.generated(path) == {"bleu": 41.5, "length_ratio": 1.25}


def test_further_decodings_have_their_own_output(tmp_path):
    run = make_run(
        tmp_path / "r", decodings=(("gen", ""), ("gen", "--beam 2"), ("valid", "--lenpen 2"), ("gen", "--lenpen 2"))
    )
    names = [path.name for path in run.outputs()]
    assert names == ["validate.log", *(f"generate-{end}.log" for end in ("gen", "gen-1", "valid-1", "gen-2"))]
    commands = list(run.outputs().values())[1:]
    assert [command[-2:] for command in commands[1:]] == [["--beam", "2"], ["--lenpen", "2"], ["--lenpen", "2"]]
    assert [command[command.index("--gen-subset") + 1] for command in commands] == ["gen", "gen", "valid", "gen"]


def test_a_training_that_was_given_up_before_its_first_checkpoint_leaves_no_numbers(tmp_path):
    given_up = inner(30, loss="nan") + evaluated(30, 90.0, 90.0)
    started = "$ fairseq-train a\n"
    again = f"{STAMP} | fairseq.trainer | No existing checkpoint found x.pt\n{evaluated(20, 10.0, 1.0)}"
    run = make_run(tmp_path, started + given_up + started + again)
    assert [(point["step"], point["valid"]) for point in logs.curve(run)] == [(20, 10.0)]
    assert logs.divergence(run, finished=False) is None
    resumed = f"{STAMP} | fairseq.trainer | Loaded checkpoint x.pt (epoch 1 @ 20 updates)\n{evaluated(40, 20.0, 2.0)}"
    run = make_run(tmp_path, run.log.read_text() + started + resumed)
    assert [point["step"] for point in logs.curve(run)] == [20, 40]


def test_the_best_checkpoint_may_be_older_than_a_subset_of_the_recipe(tmp_path):
    """It was evaluated on the first subset alone."""
    log = of_subset("valid", 10, 99.0) + evaluated(20, 50.0, 5.0) + evaluated(30, 60.0, 6.0) + of_subset("valid", 40, 0)
    run = make_run(tmp_path, log, best=True)
    partial = logs.partial_result(run)
    assert (partial["steps"], partial["checkpoint_step"], partial["accuracy"]) == (30, 10, {"valid": 99.0})
    (tmp_path / "validate.log").write_text(evaluated(10, 99.0, 4.0))
    found = logs.result(run)
    assert (found["checkpoint_step"], found["accuracy"]) == (10, {"valid": 99.0, "gen": 4.0})


def test_latest_of_the_best_is_selected():
    points = [{"step": s, "dev": dev, "gen": gen} for s, dev, gen in ((1, 50, 9), (2, 70, 1), (3, 70, 2), (4, 60, 3))]
    assert chosen(points, "accuracy", "dev", True)["step"] == 3
    assert chosen(points, "accuracy", "dev", False)["step"] == 4


def of_errors(subset: str, step: int, last: float, mean: float) -> str:
    """The line of an evaluation of ``--criterion regression``."""
    values = {"loss": 9.0, "mse_last": last, "mse_last_mean": mean, "num_updates": step}
    return f"{STAMP} | {subset} | {json.dumps({f'{subset}_{key}': str(value) for key, value in values.items()})}\n"


def test_the_least_squared_error_is_the_best(tmp_path):
    """The errors of the log become curve and result, and the latest of the least errors is the checkpoint."""
    errors = ((1, 0.5, 0.6), (2, 0.25, 0.75), (3, 0.25, 0.5), (4, 0.375, 0.25))
    log = "".join(of_errors("valid", *point) + of_errors("gen", *point) for point in errors)
    run = make_run(tmp_path, log, best=True, checkpoint_metric="mse_last")
    points = logs.curve(run)
    assert points[0] == {
        "step": 1, "valid_mse_last": 0.5, "valid_mse_last_mean": 0.6, "gen_mse_last": 0.5, "gen_mse_last_mean": 0.6,
    }  # fmt: skip
    assert logs.complete(run, [*points, {"step": 5}]) == points
    assert chosen(points, "mse_last", "valid", True)["step"] == 3
    assert chosen(points, "mse_last_mean", "valid", True)["step"] == 4
    run.checkpoint_metric = "mse_last_mean"
    command = run.train_command()
    assert command[command.index("--best-checkpoint-metric") + 1] == "mse_last_mean"
    assert "--maximize-best-checkpoint-metric" not in command and run.checkpoint.name == "checkpoint_best.pt"
    assert logs.measured(run, run.log)["mse_last"] == {"valid": 0.375, "gen": 0.375}
    assert logs.divergence(run, finished=True) is None
    run.checkpoint_metric = "mse_last"
    partial = logs.partial_result(run)
    assert partial["mse_last"] == {"valid": 0.25, "gen": 0.25} and "accuracy" not in partial


def test_accuracies_of_types_are_kept_where_a_column_has_them(tmp_path):
    lines = [
        {"valid_accuracy": "90", "valid_num_updates": "4"},
        {"gen_accuracy": "40", "gen_accuracy_long": "10", "gen_accuracy_short": "70", "gen_num_updates": "4"},
    ]
    log = "".join(f"{STAMP} | {kind} | {json.dumps(line)}\n" for kind, line in zip(("valid", "gen"), lines))
    run = make_run(tmp_path, f"{STAMP} | INFO | start\n{log}", types=("long", "other"))
    assert logs.curve(run) == [{"step": 4, "valid": 90.0, "gen": 40.0, "gen/long": 10.0}]
    of_parts = {"valid": 90.0, "gen": 40.0, "gen/long": 10.0}
    assert logs.measured(run, run.log) == {"accuracy": of_parts}
    assert logs.partial_result(run)["accuracy"] == of_parts


def test_the_best_checkpoint_by_accuracy_or_loss(tmp_path):
    run = Run("m", 1, tmp_path, tmp_path, 4, [], {"dev": "x"}, best=True)
    points = [{"step": 1, "dev": 50, "dev_loss": 1.0}, {"step": 2, "dev": 70, "dev_loss": 2.0}, {"step": 3}]
    assert "--maximize-best-checkpoint-metric" in run.train_command()
    assert chosen(points, "accuracy", "dev", True)["step"] == 2
    run.checkpoint_metric = "loss"
    command = run.train_command()
    assert command[command.index("--best-checkpoint-metric") + 1] == "nll_loss"
    assert chosen(points, "loss", "dev", True)["step"] == 1

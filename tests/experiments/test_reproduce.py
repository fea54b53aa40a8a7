"""Tables of papers in one command: failures, verdicts, tables, the memory guard, a tiny recipe killed and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from labelled_data import write_labelled

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import reproduce  # noqa: E402
import runs  # noqa: E402
import verdicts  # noqa: E402
from recipe import Published  # noqa: E402

STAMP = "2026-01-01 10:00:00 | INFO"


def inner(step: int, loss: str = "1.5") -> str:
    return f'{STAMP} | train_inner | {{"loss": "{loss}", "num_updates": "{step}"}}\n'


def of_subset(name: str, step: int, accuracy: float, loss: str = "0.5", stamp: str = STAMP) -> str:
    values = {"accuracy": accuracy, "nll_loss": loss, "num_updates": step}
    return f"{stamp} | {name} | {json.dumps({f'{name}_{key}': str(value) for key, value in values.items()})}\n"


def evaluated(step: int, valid: float, gen: float, loss: str = "0.5") -> str:
    return of_subset("valid", step, valid, loss) + of_subset("gen", step, gen, loss)


def course(*valid: float, gen: float = 0) -> str:
    """Evaluations at steps 1, 2, …"""
    return "".join(evaluated(step, accuracy, gen) for step, accuracy in enumerate(valid, 1))


def make_run(folder: Path, log: str = "", steps: int = 100, **more) -> runs.Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.log").write_text(log)
    arguments = ["--task", "sg_classification", "--cpu"]
    return runs.Run(
        "m", 1, folder, Path("data"), steps, arguments, {"valid": "IID", "gen": "OOD"}, generate=False, **more
    )


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
    found = runs.divergence(make_run(tmp_path, log), finished)
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
    monkeypatch.setattr(runs, "executable", executable)
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    return scripts


GOOD = f"printf '%s' '{evaluated(50, 50, 10)}{evaluated(100, 60, 40)}'"


def test_a_diverging_training_is_stopped_and_the_others_go_on(commands, tmp_path):
    process = tmp_path / "process"
    bad = f"echo $$ > {process}; printf '%s' '{inner(1)}{inner(2, 'nan')}'; exec sleep 600"
    commands |= {"bad": bad, "good": GOOD, "broken": "exit 3"}
    all_runs = [make_run(tmp_path / name) for name in commands]
    states = []
    bad, good, broken = runs.run_all(all_runs, 2, lambda _, state: states.append(dict(state)))
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)
    assert bad["diverged"] == {"step": 2, "why": "the loss is nan"} and "result" not in bad
    assert good["result"]["accuracy"] == {"valid": 60, "gen": 40} and good["result"]["loss"] == {
        "valid": 0.5,
        "gen": 0.5,
    }
    assert broken["failed"] == "training"
    assert list(states[-1].values()) == ["diverged", "done", "failed"]
    # Run again: a Fail is a result, failed runs are retried.
    commands |= {"bad": "exit 9", "good": "exit 9", "broken": GOOD}
    bad, good, broken = runs.run_all(all_runs, 3, lambda *_: None)
    assert bad["diverged"]["step"] == 2 and "result" in good and "result" in broken and "failed" not in broken


def test_a_collapse_at_the_end_is_a_fail(commands, tmp_path):
    commands["late"] = f"printf '%s' '{evaluated(50, 50, 10)}{evaluated(100, 0, 0)}'"
    (record,) = runs.run_all([make_run(tmp_path / "late")], 1, lambda *_: None)
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

    records = runs.run_all([make_run(tmp_path / name) for name in commands], 3, watch, place)
    assert all("result" in record for record in records) and max(most) == 2 and max(asked) == 2


@pytest.mark.parametrize("finishes", [False, True])
def test_a_folder_of_another_process_is_waited_for(finishes, commands, tmp_path):
    """The other process ends with a result, or without one; then we train."""
    commands["r"] = "exit 9" if finishes else GOOD
    run = make_run(tmp_path / "r")
    lock = open(run.folder / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(runs.Busy, match="another process is training there"):
        runs.run_all([run], 1, lambda *_: None)
    seen = []

    def watch(_, state):
        seen.append(state[str(run.folder)])
        if len(seen) == 3 and finishes:
            result = {"steps": run.steps, "accuracy": {"gen": 40}}
            runs.write_json(run.folder / "run.json", {"settings": runs._settings(run), "result": result})
        if len(seen) == 3:
            lock.close()

    (record,) = runs.run_all([run], 1, watch, share=True)
    assert seen[:3] == ["elsewhere"] * 3 and record["result"]["accuracy"]["gen"] == 40


# The memory guard.


def job(run: runs.Run, gpu: str = "") -> dict:
    return {"run": run, "where": {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}, "from": 0, "begun": False}


def test_memory_guard(tmp_path):
    begun, young = make_run(tmp_path / "begun", inner(100)), make_run(tmp_path / "young", "$ fairseq-train\n")
    free = {None: 5.0}
    guard = reproduce.Guard(3, free=free.get)
    assert guard([job(begun)]) == {} and guard([job(young)]) is None  # 3 GB are set aside for one that has not begun
    free[None] = 6.0
    assert guard([job(young)]) == {}
    free[None] = 2.9
    assert guard([job(begun)]) is None and guard([]) == {}  # the first always starts
    assert reproduce.Guard(0, free=free.get)([job(young)] * 9) == {}
    # Among GPUs with enough memory, the one with the fewest jobs.
    free |= {None: 50.0, "0": 20.0, "1": 5.0}
    guard = reproduce.Guard(3, ["0", "1"], free.get)
    assert guard([]) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert guard([job(begun, "0")]) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert guard([job(begun, "0"), job(young, "1")]) == {"CUDA_VISIBLE_DEVICES": "0"}
    free["0"] = 1.0
    assert guard([job(begun, "0"), job(young, "1")]) is None
    free |= {None: 1.0, "1": 50.0}
    assert guard([job(begun, "0")]) is None  # the machine's own memory


def test_what_a_training_logged_before_its_restart_does_not_count(tmp_path):
    run = make_run(tmp_path, inner(100))
    restarted = job(run) | {"from": run.log.stat().st_size}
    assert not runs.begun(restarted)
    with open(run.log, "a") as log:
        log.write(inner(200))
    assert runs.begun(restarted)


def test_free_memory_of_this_machine():
    assert 0 < reproduce.free_gigabytes(None) < 1e5
    with pytest.raises(ValueError, match="use --memory-guard 0 to disable the check"):
        reproduce.free_gigabytes("no such GPU")


# Verdicts and tables.

SPREAD = Published("46.9 ± 8.9", 46.9, 8.9, 0.05)
EXACT = Published("1.00 ± 0.00", 1.0, 0.0, 0.005)
MEDIAN = Published("0.61", 0.61, None, 0.005)
FAIL = Published("Fail", fail=True)


@pytest.mark.parametrize(
    "values,diverged,published,statistic,expected",
    [
        ([40.0, 50.0], 0, SPREAD, "mean", "within one std"),
        ([38.0], 0, SPREAD, "mean", "within one std"),
        ([37.9], 0, SPREAD, "mean", "below"),
        ([50.0, 62.0], 0, SPREAD, "mean", "above"),
        ([0.995], 0, EXACT, "mean", "within one std"),  # prints as 1.00
        ([0.994], 0, EXACT, "mean", "below"),
        ([0.6, 0.7, 0.9], 0, MEDIAN, "median", "within one std"),  # of ours, 0.15, where none is printed
        ([0.70], 0, MEDIAN, "median", "above"),
        ([0.1, 0.62, 0.61], 0, MEDIAN, "median", "within one std"),
        ([50.0], 2, SPREAD, "mean", "within one std"),
        ([], 3, SPREAD, "mean", "fail"),
        ([], 3, FAIL, "mean", "fail, as published"),
        ([12.0], 2, FAIL, "mean", "above (published: Fail)"),
        ([], 0, SPREAD, "mean", "not run"),
        ([], 0, FAIL, "mean", "not run"),
        ([12.0], 0, None, "mean", "–"),
    ],
)
def test_verdict(values, diverged, published, statistic, expected):
    assert verdicts.verdict(values, diverged, published, statistic) == expected


TINY = """\
title: A tiny table, 100 % & more
source: Nobody 1999, Table 0
data:
  tiny: {folder: tiny, prepare: ctl --order forward, subsets: [dev, valid, gen]}
steps: STEPS
validate_every: 20
batch_size_valid: 50
seeds: 2
unit: fraction
checkpoint: best
train: >-
  --task sg_classification --criterion classification --optimizer torch_adam --clip-norm 1 --batch-size 16
  --no-source-bos --arch sg_lstm_ctl --hidden-dim 32
columns:
  IID: {subset: valid, at: end}
  OOD: {subset: gen}
  OOD-20: {subset: gen, at: 20}
rows:
  good:
    label: An LSTM_1
    arguments: --lr 3e-3
    published:
      tiny: {IID: "1.00 ± 0.00", OOD: ".21 ± .01"}
  bad:
    arguments: --lr 1e38
    steps: 60
    published:
      tiny: {IID: Fail, OOD: Fail}
  shown:
    label: of another paper
    missing: it is not ours
    published:
      tiny: {OOD: ".5"}
chosen: [the learning rate of 100 %]
"""


def tiny_recipe(folder: Path, steps: int) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TINY.replace("STEPS", str(steps)))
    return path


def arguments(path: Path, out: Path, *more: object):
    return reproduce.parse_arguments(list(map(str, [path, "--device", "cpu", "--out", out, *more])))


def record(run: runs.Run, final: float, curve) -> None:
    points = [{"step": s, "dev": d, "valid": v, "gen": g} for s, d, v, g in curve]
    result = {
        "steps": run.steps,
        "accuracy": {"dev": 0.0, "valid": 0.0, "gen": final},
        "generated": {},
        "curve": points,
    }
    run.folder.mkdir(parents=True)
    saved = {
        "settings": runs._settings(run),
        "name": run.name,
        "seed": run.seed,
        "folder": str(run.folder),
        "minutes": 1.0,
    }
    runs.write_json(run.folder / "run.json", saved | {"commit": "abc", "machine": {"cpu": "x"}, "result": result})


def fail(run: runs.Run) -> None:
    run.folder.mkdir(parents=True)
    saved = {"settings": runs._settings(run), "commit": "abc", "machine": {"cpu": "x"}, "minutes": 1.0}
    runs.write_json(run.folder / "run.json", saved | {"diverged": {"step": 3, "why": "the loss is nan"}})


@pytest.fixture
def finished(tmp_path):
    """A plan of two rows and two seeds: both of good are done; one of bad diverged, the other is not run."""
    args = arguments(tiny_recipe(tmp_path, 40), tmp_path / "out")
    trials = {(t.row, t.run.seed): t.run for t in args.trials}
    record(trials["good", 1], 20.0, [(20, 5, 90, 8), (40, 4, 100, 10)])
    record(trials["good", 2], 24.0, [(20, 5, 90, 10), (40, 9, 99, 30)])
    fail(trials["bad", 1])
    return args


def test_lines(finished):
    found = verdicts.lines(finished.recipe, finished.trials, verdicts.records_of(finished.trials), 1.0)
    good, bad, shown = found
    assert (good.done, good.planned, good.steps, good.of) == (2, 2, 40, 40)
    assert good.cells["IID"].values == [1.0, 0.99] and good.cells["IID"].verdict == "within one std"
    assert good.cells["OOD"].values == [0.2, 0.24] and good.cells["OOD"].verdict == "within one std"
    assert good.cells["OOD-20"].values == [0.08, 0.1] and good.cells["OOD-20"].verdict == "–"
    assert (bad.done, bad.diverged, bad.planned) == (0, 1, 2) and bad.cells["OOD"].verdict == "fail, as published"
    assert shown.planned == 0 and shown.cells["OOD"].published.mean == 0.5
    assert verdicts.table(finished.recipe, found) == [
        ["model", "seeds", "steps", "IID here", "IID published", "OOD here", "OOD published", "OOD-20 here",
         "OOD-20 published", "verdict"],
        ["An LSTM_1", "2 of 2", "40", "0.99 ± 0.01", "1.00 ± 0.00", "0.22 ± 0.03", ".21 ± .01", "0.09 ± 0.01", "–",
         "IID within one std; OOD within one std"],
        ["bad", "0 of 2, 1 Fail", "–", "Fail", "Fail", "Fail", "Fail", "Fail", "–",
         "IID fail, as published; OOD fail, as published; OOD-20 fail"],
        ["of another paper", "–", "–", "–", "–", "–", ".5", "–", "–", "it is not ours"],
    ]  # fmt: skip


def test_lines_without_a_paper(finished):
    """Unpublished columns and texts are omitted; a verdict appears only with a published number."""
    alone = replace(finished.recipe, rows={k: replace(row, published={}) for k, row in finished.recipe.rows.items()})
    found = verdicts.lines(alone, finished.trials, verdicts.records_of(finished.trials), 1.0)
    assert verdicts.table(alone, found) == [
        ["model", "seeds", "steps", "IID", "OOD", "OOD-20", "verdict"],
        ["An LSTM_1", "2 of 2", "40", "0.99 ± 0.01", "0.22 ± 0.03", "0.09 ± 0.01", "–"],
        ["bad", "0 of 2, 1 Fail", "–", "Fail", "Fail", "Fail", "fail"],
        ["of another paper", "–", "–", "–", "–", "–", "it is not ours"],
    ]
    assert [len(row) for row in verdicts.table(alone, found[:1])] == [6, 6]
    assert "paper" not in verdicts.legend(alone) and "as fractions" in verdicts.legend(alone)
    assert alone.about_choices == "Chosen:" and alone.about_source.startswith("Source: ")


def test_steps_of_a_column_scale_with_the_training(tmp_path):
    args = arguments(tiny_recipe(tmp_path, 40), tmp_path / "out", "--steps-scale", 0.5, "--rows", "good", "--seeds", 1)
    (trial,) = args.trials
    assert (
        trial.run.steps == 20
        and trial.run.arguments[trial.run.arguments.index("--validate-interval-updates") + 1] == "10"
    )
    record(trial.run, 1.0, [(10, 5, 90, 8), (20, 9, 90, 9)])
    (line, _) = verdicts.lines(args.recipe, args.trials, verdicts.records_of(args.trials), 0.5)
    assert line.cells["OOD-20"].values == [0.08] and line.steps == 20
    assert verdicts.table(args.recipe, [line])[1][2] == "20 of 40"


def test_a_column_later_than_the_training_is_empty(tmp_path):
    args = arguments(tiny_recipe(tmp_path, 15), tmp_path / "out", "--rows", "good", "--seeds", 1)
    record(args.trials[0].run, 1.0, [(15, 5, 90, 8)])
    (line, _) = verdicts.lines(args.recipe, args.trials, verdicts.records_of(args.trials), 1.0)
    assert line.cells["OOD-20"].values == [] and line.cells["OOD"].values == [0.01]


def test_other_metrics(tmp_path):
    text = TINY.replace("STEPS", "40").replace("subset: gen, at: 20", "subset: gen, metric: perplexity")
    text = text.replace("{subset: valid, at: end}", "{subset: valid, metric: bleu}").replace(
        "seeds: 2", "seeds: 2\ngenerate: --max-len-b 9"
    )
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    args = arguments(path, tmp_path / "out")
    run = args.trials[0].run
    assert run.generate and "--max-len-b" in run.generate_command("gen")
    result = {"accuracy": {}, "loss": {"gen": 3.0}, "generated": {"valid": {"bleu": 41.5}}, "curve": []}
    found = [verdicts.value(args.recipe, c, run, {"result": result}, 1.0) for c in args.recipe.columns.values()]
    assert found == [41.5, None, 8.0]


def test_what_has_not_ended_is_cut_at_the_common_step(tmp_path):
    args = arguments(tiny_recipe(tmp_path, 40), tmp_path / "out", "--rows", "good")
    log = "".join(
        of_subset(name, s, s, stamp=f"2026-01-01 10:0{s // 10}:00 | INFO")
        for s in (10, 20)
        for name in ("dev", "valid", "gen")
    )
    lines = log.splitlines(keepends=True)
    for trial, part in zip(args.trials, (lines, lines[:5]), strict=True):
        trial.run.folder.mkdir(parents=True)
        trial.run.log.write_text("".join(part))
        runs.write_json(trial.run.folder / "run.json", {"settings": runs._settings(trial.run), "minutes": 0.0})
    (line, _) = verdicts.lines(args.recipe, args.trials, verdicts.records_of(args.trials), 1.0)
    assert (line.steps, line.done) == (10, 2) and line.cells["OOD"].values == [0.1, 0.1]
    # Only finished seeds count.
    (args.trials[0].run.folder / "run.json").unlink()
    args.trials[0].run.log.unlink()
    args.trials[0].run.folder.rmdir()
    record(args.trials[0].run, 30.0, [(20, 5, 90, 8), (40, 4, 100, 10)])
    (line, _) = verdicts.lines(args.recipe, args.trials, verdicts.records_of(args.trials), 1.0)
    assert (line.steps, line.done) == (40, 1) and line.cells["OOD"].values == [0.3]


def test_files_of_results(finished, tmp_path, monkeypatch, capsys):
    finished.results = tmp_path / "results" / "tiny.table"
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny"])
    reproduce.publish(finished, verdicts.records_of(finished.trials))
    shown = (tmp_path / "results" / "tiny.table.md").read_text()
    row = "| An LSTM_1 | 2 of 2 | 40 | 0.99 ± 0.01 | 1.00 ± 0.00 | 0.22 ± 0.03 | .21 ± .01 | 0.09 ± 0.01 | – | IID with"
    assert row in shown and "- the learning rate of 100 %" in shown and "Commit abc; cpu x." in shown
    latex = (tmp_path / "results" / "tiny.table.tex").read_text()
    assert r"An LSTM\_1 & 2 of 2 & 40 & 0.99 $\pm$ 0.01 & 1.00 $\pm$ 0.00 & 0.22 $\pm$ 0.03 & .21 $\pm$ .01" in latex
    assert r"\caption{A tiny table, 100 \% \& more. Published: Nobody 1999, Table 0.}" in latex
    assert latex.count(r" \\") == 4 and latex.count("&") - latex.count(r"\&") == 4 * 9
    for name in ("tiny.table.png", "tiny.table-curves.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "results" / "tiny.table.json").read_text())
    assert summary["lines"][0]["cells"]["OOD"]["values"] == [0.2, 0.24] and len(summary["runs"]) == 3
    assert "A tiny table" in capsys.readouterr().out


# The plan, and wrong options.


def test_plan(tmp_path):
    args = arguments(tiny_recipe(tmp_path, 40), tmp_path / "out", "--seeds", "7,9")
    assert [(t.row, t.run.seed) for t in args.trials] == [("good", 7), ("bad", 7), ("good", 9), ("bad", 9)]
    assert [t.run.steps for t in args.trials] == [40, 60, 40, 60]
    assert len({t.run.folder for t in args.trials}) == 4
    assert arguments(tiny_recipe(tmp_path, 40), tmp_path, "--seeds", "5,").seeds == [5]
    assert arguments(tiny_recipe(tmp_path, 40), tmp_path, "--seeds", "3").seeds == [1, 2, 3]
    assert arguments(tiny_recipe(tmp_path, 40), tmp_path).seeds == [1, 2]


def test_dry_run_needs_and_writes_nothing(tmp_path):
    path = tiny_recipe(tmp_path, 40)
    command = [
        sys.executable,
        REPOSITORY / "scripts/reproduce.py",
        path,
        "--dry-run",
        "--device",
        "cpu",
        "--seeds",
        "1",
    ]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "2 trainings, 100 steps in total, seeds 1; dry run" in lines
    assert "python -m data_prep ctl --order forward --out data-bin/tiny" in lines
    assert (
        sum(line.startswith("fairseq-train ") for line in lines)
        == sum(line.startswith("fairseq-validate ") for line in lines)
        == 2
    )
    assert "- the learning rate of 100 %" in lines
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line,message",
    [
        (["--rows", "good,goood"], "--rows has 'goood', which is not among the rows that can be trained: good, bad"),
        (["--rows", "shown"], "'shown', which is not among the rows that can be trained (it is not ours): good, bad"),
        (["--on", "large"], "--on has 'large', which is not among the recipe's data: tiny"),
        (["--seeds", "0"], "--seeds is '0'"),
        (["--seeds", "1,a"], "--seeds is '1,a'"),
        (["--steps-scale", "0"], "--steps-scale is 0.0: choose a number above 0"),
        (["--steps-scale", "nan"], "--steps-scale is nan: choose a number above 0"),
        (["--memory-guard", "-1"], "--memory-guard is -1.0: choose 0 or more"),
        (["--jobs", "0"], "--jobs is 0: choose at least 1"),
        (["--index", "4"], "--index is 4: the plan has runs 0 to 3"),
        (["--slurm", "x", "--device", "auto"], "--slurm needs --device cuda or --device cpu"),
        (["--dry-run", "--report"], "not allowed with argument"),
    ],
)
def test_wrong_options(line, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        arguments(tiny_recipe(tmp_path, 40), tmp_path, *line)
    assert message in capsys.readouterr().err


def test_a_recipe_that_cannot_be_read_is_one_line(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text(TINY)
    with pytest.raises(SystemExit):
        arguments(path, tmp_path)
    assert f"{path}: the recipe, key 'steps': must be a whole number, not 'STEPS'" in capsys.readouterr().err


def test_data_that_need_a_file(capsys, tmp_path):
    args = reproduce.parse_arguments(["park_kim_table_5", "--device", "cpu", "--data", str(tmp_path)])
    with pytest.raises(ValueError, match="mathematics --module arithmetic__add_or_sub --archive FILE --out"):
        reproduce.prepare(args)


# Real trainings.


def command(path: Path, data: Path, out: Path, *more: object):
    line = [sys.executable, "scripts/reproduce.py", path, "--device", "cpu", "--data", data, "--out", out, *more]
    return list(map(str, line))


def test_killed_resumed_and_whole(tmp_path):
    """Two rows, one of which diverges; killed in the middle; then one more seed as in a SLURM array."""
    write_labelled(tmp_path / "tiny")
    path, out = tiny_recipe(tmp_path, 160), tmp_path / "out"
    line = command(path, tmp_path, out, "--seeds", 1, "--jobs", 2, "--results", tmp_path / "results" / "tiny")
    options = {"cwd": REPOSITORY, "env": runs.environment(), "text": True}
    first = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    folder = out / "good-tiny-seed1"
    while not (folder / "checkpoint_last.pt").exists():
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.1)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    first.kill()
    for child in children:
        os.killpg(int(child), signal.SIGKILL)
    first.communicate()
    assert "result" not in runs.saved(runs.Run("", 1, folder, tmp_path, 0, [], {}))

    second = subprocess.run(line, capture_output=True, timeout=600, **options)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "bad (seed 1) diverged: " in second.stderr and "error" not in second.stderr
    assert "Loaded checkpoint" in (folder / "train.log").read_text()
    summary = json.loads((tmp_path / "results" / "tiny.json").read_text())
    good, bad, _ = summary["lines"]
    assert good["done"] == 1 and good["steps"] == 160 and len(good["cells"]["OOD"]["values"]) == 1
    assert bad["diverged"] == 1 and bad["cells"]["OOD"]["verdict"] == "fail, as published"
    steps = [point["step"] for point in summary["runs"][0]["result"]["curve"]]
    assert steps == list(range(20, 161, 20))
    for suffix in ("md", "tex", "png"):
        assert (tmp_path / "results" / f"tiny.{suffix}").stat().st_size > 200

    script = tmp_path / "array.sbatch"
    written = subprocess.run(
        command(path, tmp_path, out, "--rows", "good", "--seeds", "1,2", "--jobs", 1, "--slurm", script),
        capture_output=True, **options,
    )  # fmt: skip
    assert written.returncode == 0 and "2 runs; submit them by: sbatch" in written.stdout, written.stderr
    text = script.read_text()
    assert "#SBATCH --array=0-1%1\n" in text and "gres" not in text
    subprocess.run(["bash", "-n", script], check=True)
    # Index 1 is the second seed, trained to the end; here with the steps of two evaluations.
    (tmp_path / "tiny.yaml").write_text(path.read_text().replace("steps: 160", "steps: 40"))
    ran = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env=runs.environment() | {"SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert runs.saved(runs.Run("", 2, out / "good-tiny-seed2", tmp_path, 0, [], {}))["result"]["steps"] == 40
    assert not (out / "summary.json").exists()


def test_slurm_script_for_gpus(tmp_path):
    args = arguments(tiny_recipe(tmp_path, 40), tmp_path / "out", "--device", "cuda", "--slurm", tmp_path / "x")
    script = reproduce.slurm_script(args)
    assert "#SBATCH --gres=gpu:1\n" in script and "#SBATCH --array=0-3\n" in script
    assert script.count("--seeds 1,2, ") == 2 and '--index "$SLURM_ARRAY_TASK_ID"' in script


# Closed pipes.


def test_a_reader_that_has_gone_ends_a_script_without_a_traceback():
    command = [
        sys.executable,
        REPOSITORY / "scripts" / "reproduce.py",
        "thesis_table_7_4",
        "--device",
        "cpu",
        "--dry-run",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("Language models: ")
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 1)


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_script_ends_with_what_its_main_returns(code):
    with pytest.raises(SystemExit) as ended:
        runs.end(lambda *arguments: code + sum(arguments), 1, -1)
    assert ended.value.code == code


def test_help_ends_a_script_too():
    with pytest.raises(SystemExit) as ended:
        runs.end(sys.exit, 2)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "name", ["attentions", "bleu_by_length", "ndr", "quickstart", "reproduce", "summary", "workers"]
)
def test_every_script_ends_this_way(name):
    *_, last = (REPOSITORY / "scripts" / f"{name}.py").read_text().split("\n\n")
    assert last.lstrip().startswith('if __name__ == "__main__":\n    end(')

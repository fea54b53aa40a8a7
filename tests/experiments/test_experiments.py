"""The command ``experiments`` without trainings: its list, plans, scripts and reports, and what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_sg.experiments import __main__ as command
from fairseq_sg.experiments import memory, progress, recipe, results
from fairseq_sg.experiments.results import Results
from helpers.experiment_files import TINY, fail, finish, finished, planned, record, save, tiny, write_recipe


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """The user stands in a folder with a recipe, and nothing else."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture
def arguments_unread(monkeypatch) -> None:
    """Without the process of seconds that reads the trainings' arguments, which other tests run."""
    monkeypatch.setattr(command.arguments, "check", lambda trials: None)


@pytest.fixture
def prepared(monkeypatch, arguments_unread) -> None:
    """As if the data were there; signals stay those of the tests."""
    monkeypatch.setattr(command.Plan, "prepare", lambda self: None)
    monkeypatch.setattr(command, "interrupt_by_signals", lambda: None)


def refused(capsys, *line: str) -> str:
    """The one line of a command that ends with 2; it prints nothing else."""
    assert command.main([*map(str, line)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed
    return printed.err.removeprefix("error: ").strip()


# list

FEW = ["own_orthogonality_sweep", "park_kim_table_4"]


def test_list(here, capsys, monkeypatch):
    """Every recipe and variant, the number of its trainings, and how many were done."""
    monkeypatch.setattr(recipe, "names", lambda: FEW)
    sweep, table = (recipe.read(recipe.find(name)) for name in FEW)
    assert command.main(["list"]) == 0
    before = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert before[0] == ["recipe", "trainings", "done", "title"]
    assert [line[:-1][: 2 if "--variant" not in line else 4] for line in before[2:]] == [
        ["own_orthogonality_sweep", str(5 * len(sweep.trained))],
        ["own_orthogonality_sweep", "--variant", "small", "12"],
        ["park_kim_table_4", str(5 * len(table.trained))],
    ]
    steps = table.steps
    done = [record("linear", 1, "scan26", gen=1.0, steps=steps), record("linear", 2, "scan26", diverged={"step": 1})]
    cut = record("linear", 4, "scan26", gen=1.0, steps=steps - 1)
    Results(table, 1.0, [*done, record("linear", 3, "scan26"), cut]).write(here / "results" / "any name.json")
    assert command.main(["list"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[-1].split()[:3] == ["park_kim_table_4", str(5 * len(table.trained)), "2"]
    assert found[-1].endswith(table.title)
    (here / "results" / "broken.json").write_text("[")
    assert "broken.json: not a results file" in refused(capsys, "list")
    assert "--results absent: there is no such folder" in refused(capsys, "list", "--results", "absent")


# show


def test_show_needs_and_writes_nothing(here):
    line = [sys.executable, "-m", "fairseq_sg.experiments", "show", "tiny.yaml", "--device", "cpu", "--seeds", "1"]
    environment = {"PYTHONPATH": str(Path(command.__file__).parents[2]), "PATH": ""}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "A tiny table, 100 % & more", "Published: Nobody 1999, Table 0", "2 trainings, 100 steps in total, seeds 1",
    ]  # fmt: skip
    assert "python -m data_prep ctl --order forward --out data-bin/tiny" in lines
    for program in ("fairseq-train", "fairseq-validate"):
        assert sum(line.startswith(f"{program} data-bin/tiny --user-dir fairseq_sg ") for line in lines) == 2
    assert "# 0: An LSTM_1 (seed 1), 40 steps, in runs/tiny/good-tiny-seed1" in lines
    assert "- the learning rate of 100 %" in lines
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_show_of_a_variant(capsys):
    line = ["show", "own_orthogonality_sweep", "--variant", "small", "--rows", "none", "--device", "cpu"]
    assert command.main([*line, "--steps-scale", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 trainings, 200 steps in total, seeds 1, 2" in lines
    assert any("in runs/own_orthogonality_sweep-small-x0.1/none-scan8-seed1" in line for line in lines)


# Wrong options: one line, exit code 2, before anything is made.


@pytest.mark.parametrize("name", ["show", "run", "report"])
@pytest.mark.parametrize(
    "options,message",
    [
        ("--rows good,goood", "--rows has 'goood': choose from good, bad"),
        ("--rows shown", "--rows has 'shown' (it is not ours): choose from good, bad"),
        ("--on large", "--on has 'large': choose from tiny"),
        ("--seeds 0", "--seeds is '0': it must be a number of seeds, or a list as 4,5,6"),
        ("--steps-scale 0", "--steps-scale is 0.0: choose a number above 0"),
        ("--steps-scale=-2", "--steps-scale is -2.0: choose a number above 0"),
        ("--steps-scale nan", "--steps-scale is nan: choose a number above 0"),
        ("--steps-scale inf", "--steps-scale is inf: choose a number above 0"),
        ("--variant big", "there is no variant 'big': it has none"),
    ],
)
def test_wrong_choices_are_refused(name, options, message, here, capsys):
    assert message in refused(capsys, name, "tiny.yaml", "--device", "cpu", *options.split())
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    "options,message",
    [
        ("--results .", "--results . names no file: give the path of one, without its ending"),
        ("--results a/..", "--results a/.. names no file"),
        ("--index 4", "--index is 4: the plan has runs 0 to 3"),
        ("--index=-1", "--index is -1: the plan has runs 0 to 3"),
    ],
)
def test_wrong_options_of_run_are_refused(options, message, here, capsys):
    assert message in refused(capsys, "run", "tiny.yaml", "--device", "cpu", *options.split())
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_a_row_that_cannot_be_trained_is_refused_before_any_training(here, capsys):
    """It may be the last one, days later."""
    write_recipe(here, TINY.replace("--lr 1e38", "--hidden-dm 8"))
    message = "the row 'bad' cannot be trained: there is no option --hidden-dm: did you mean --hidden-dim?"
    assert refused(capsys, "run", "tiny.yaml", "--device", "cpu") == message
    assert refused(capsys, "slurm", "tiny.yaml", "x.sbatch", "--device", "cpu") == message
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    "wrong,why",
    [
        ("--encoder-attention linear --linear-attention-eps -1", "--linear-attention-eps is -1.0: choose"),
        ("--encoder-attention linear --qk-norm l3", "unknown query/key normalization 'l3'"),
        ("--encoder-attention linear --encoder-attention-window 4", "--encoder-attention-window"),
        ("--lr-scheduler tri_stage --phase-ratio (0.1,0.2,0.3)", "--phase-ratio is "),
    ],
)
def test_values_and_mechanisms_that_do_not_fit_are_refused_before_any_training(wrong, why, here, capsys):
    text = TINY.replace("--arch sg_lstm_ctl --hidden-dim 32", "--arch sg_encoder")
    write_recipe(here, text.replace("--lr 1e38", f"--lr 1e-3 {wrong}"))
    message = refused(capsys, "run", "tiny.yaml", "--device", "cpu")
    assert message.startswith("the row 'bad' cannot be trained: ") and why in message, message
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_without_a_gpu_nothing_is_trained_as_on_one(here, capsys, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    message = refused(capsys, "run", "tiny.yaml", "--device", "cuda")
    assert message == "--device is cuda, but PyTorch finds no GPU: choose cpu or auto, or see `fairseq-sg doctor`"
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_without_matplotlib_nothing_is_trained(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(capsys, "run", "tiny.yaml", "--device", "cpu")
    assert message.startswith("figures need matplotlib") and not (here / "runs").exists()


@pytest.mark.parametrize(
    "line", [[], ["--version"], ["tun"], ["run"], ["show", "x", "y"], ["run", "x", "--device", "tpu"], ["compare", "a"]]
)
def test_other_wrong_lines_end_with_one_line(line, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(line)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert "(see fairseq-sg experiments" in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["run", "x", "--sedes", "3"], "run has no option --sedes: did you mean --seeds or --stacked? ("),
        (["run", "x", "--step", "2"], "run has no option --step: did you mean "),
        (["rum", "x"], "unknown command 'rum': did you mean run? "),
        (["show", "x", "y"], "y is unexpected: show takes one RECIPE ("),
        (["compare", "a", "b", "c"], "c is unexpected: compare takes one A and one B ("),
        (["list", "a"], "a is unexpected: list takes options alone ("),
        (["run", "x", "--device", "tpu"], "--device is 'tpu': "),
        *(
            (line, f"argument {name}: the path is empty: is a variable unset? (")
            for name in ("--results", "--out", "--data")
            for line in (["run", "x", name, ""], ["report", "x", f"{name}="])
        ),
        (["list", "--results", ""], "argument --results: the path is empty: "),
        (["slurm", "x", ""], "argument FILE: the path is empty: "),
        (["compare", "a", ""], "argument B: the path is empty: "),
        (["run", "x", "--jobs", "0"], "argument --jobs: '0' is not a number from 1 on ("),
        (["run", "x", "--jobs=-1"], "argument --jobs: '-1' is not a number from 1 on ("),
        (["run", "x", "--together", "0"], "argument --together: '0' is not a number from 1 on ("),
        (["run", "x", "--memory-guard=-1"], "argument --memory-guard: '-1' is not a number from 0 on ("),
        (["run", "x", "--memory-guard", "nan"], "argument --memory-guard: 'nan' is not a number from 0 on ("),
        (["slurm", "x", "y", "--device", "cpu", "--jobs", "0"], "argument --jobs: '0' is not a number from 1 on ("),
    ],
)
def test_a_wrong_word_is_named_with_what_was_meant(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(line)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")


def test_recipes_that_cannot_be_read_are_one_line(here, capsys):
    (here / "wrong.yaml").write_text(TINY)
    assert refused(capsys, "run", "wrong.yaml").startswith("wrong.yaml: steps: Value 'STEPS'")
    (here / "wrong.yaml").write_text("title: [\n")
    assert refused(capsys, "show", "wrong.yaml").startswith("wrong.yaml: while parsing a flow node")
    assert "there is no recipe 'none.yaml': give the path of a file that exists" in refused(capsys, "run", "none.yaml")
    assert "there is no recipe 'my.yml': the path of a recipe's file ends in .yaml" in refused(capsys, "run", "my.yml")
    assert "there is no recipe 'table_4': choose from " in refused(capsys, "show", "table_4")
    assert "there is no recipe 'quickstrat': did you mean quickstart? or give" in refused(capsys, "run", "quickstrat")


@pytest.mark.parametrize("name", ["run", "slurm"])
def test_a_data_folder_of_another_request_is_refused(name, here, arguments_unread, capsys):
    """Published numbers never stand beside other data."""
    (here / "data-bin" / "tiny").mkdir(parents=True)
    request = {"dataset": "ctl", "order": "backward"}
    (here / "data-bin" / "tiny" / "dataset.json").write_text(json.dumps({"request": request}))
    line = [name, "tiny.yaml", *(["x.sbatch"] if name == "slurm" else []), "--device", "cpu"]
    message = refused(capsys, *line)
    assert "the data in data-bin/tiny differ from " in message and "order backward instead of forward" in message
    assert not (here / "runs").exists() and not (here / "x.sbatch").exists()


def test_results_of_other_trainings_are_refused_before_any_training(here, capsys):
    """With the same prefix of the results."""
    other = tiny(here, TINY.replace("--lr 3e-3", "--lr 4e-3"))
    finished(other).write(here / "x.json")
    write_recipe(here)
    assert "x.json has results of another version of the recipe" in refused(
        capsys, "run", "tiny.yaml", "--device", "cpu", "--results", "x"
    )
    assert not (here / "data-bin").exists()


# report


def test_report_before_any_run(here, capsys):
    assert refused(capsys, "report", "tiny.yaml", "--device", "cpu") == (
        "runs/tiny has no runs of this plan: start them with `fairseq-sg experiments run`, or name their folder with "
        "--out"
    )
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_report(here, capsys):
    """The runs so far, as text and as files; a prefix with a point keeps it; relative to where the user stands."""
    for trial in planned(here).trials():
        if trial.row == "good":
            finish(trial.run, 20.0 + 4 * (trial.run.seed - 1), (20, 5, 90, 8), (40, 4, 100, 10))
        elif trial.run.seed == 1:
            fail(trial.run)
    line = ["report", "tiny.yaml", "--device", "cpu", "--out", "out", "--results", "tables/x_v0.2"]
    assert command.main(line) == 0
    printed = capsys.readouterr()
    assert sorted(path.name for path in (here / "tables").iterdir()) == [
        "x_v0.2-curves.png", "x_v0.2.csv", "x_v0.2.json", "x_v0.2.md", "x_v0.2.png", "x_v0.2.tex",
    ]  # fmt: skip
    assert results.read(here / "tables" / "x_v0.2.json").done == 3
    assert "An LSTM_1         2               40" in printed.out and "0.22 ± 0.03" in printed.out
    assert "results: tables/x_v0.2.json, .md, .tex, .csv, .png, -curves.png\n" in printed.out
    assert printed.err == "bad (seed 1) diverged: the loss is nan; see out/bad-tiny-seed1/train.log\n"
    # Another part of the table stays.
    assert command.main([*line, "--rows", "bad", "--seeds", "1"]) == 0
    assert results.read(here / "tables" / "x_v0.2.json").done == 3


def test_report_of_a_failed_training_is_an_error(here, capsys):
    (trial, *_) = planned(here, rows="good").trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    content = json.loads((trial.run.folder / "run.json").read_text())
    del content["result"]
    (trial.run.folder / "run.json").write_text(json.dumps(content | {"failed": "training"}))
    assert command.main(["report", "tiny.yaml", "--rows", "good", "--device", "cpu", "--out", "out"]) == 1
    message = "error: An LSTM_1 (seed 1) failed in training; see out/good-tiny-seed1"
    assert f"{message}\n" in capsys.readouterr().err
    trial.run.log.write_text("begin\nerror: there is no option --qk-nrom\n")
    assert command.main(["report", "tiny.yaml", "--rows", "good", "--device", "cpu", "--out", "out"]) == 1
    assert f"{message}/train.log (there is no option --qk-nrom)\n" in capsys.readouterr().err


def test_a_full_disk_hides_no_failed_training(here, prepared, monkeypatch, capsys):
    (trial, *_) = planned(here, rows="good", seeds="1").trials()
    save(trial.run, failed="training")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "run_all", lambda runs, *_, **__: [{"failed": "training"} for _ in runs])
    monkeypatch.setattr(Results, "write", full)
    line = ["run", "tiny.yaml", "--rows", "good", "--seeds", "1", "--device", "cpu", "--out", "out"]
    assert command.main(line) == 2
    assert capsys.readouterr().err == (
        "error: An LSTM_1 (seed 1) failed in training; see out/good-tiny-seed1\n"
        "error: out/results.json, or a page or figure of it, cannot be written: No space left on device\n"
    )


def test_a_report_says_what_was_evaluated_otherwise(here, capsys):
    (trial, *_) = planned(here, rows="good").trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    trial.run.log.touch()
    line = ["report", "tiny.yaml", "--rows", "good", "--device", "cpu", "--out", "out", "--results"]
    assert command.main([*line, "one"]) == 0 and capsys.readouterr().err == ""
    write_recipe(here, TINY.replace("checkpoint: best", "checkpoint: last"))
    assert command.main([*line, "other"]) == 0
    assert capsys.readouterr().err == (
        "warning: 1 training evaluated otherwise than the recipe asks now, such as out/good-tiny-seed1: numbers are "
        "missing until `fairseq-sg experiments run` evaluates again\n"
    )
    assert ",OOD,0.2" in (here / "one.csv").read_text() and ",OOD," not in (here / "other.csv").read_text()


# A label is the same everywhere.


def test_a_row_has_one_label(here, capsys):
    """In the plan, the progress, the report, and on every page."""
    plan = planned(here)
    for trial in plan.trials():
        finish(trial.run, 20.0, (20, 5, 90, 8), (40, 4, 100, 10))
    options = ["--device", "cpu", "--out", "out", "--rows", "good"]
    assert command.main(["show", "tiny.yaml", *options]) == 0
    shown = capsys.readouterr().out
    assert command.main(["report", "tiny.yaml", *options]) == 0
    reported = capsys.readouterr().out
    shown_live = progress.Progress([trial.run for trial in plan.trials()], "x")
    shown_live([trial.run for trial in plan.trials()], {str(t.run.folder): "done" for t in plan.trials()})
    pages = [(here / "out" / f"results.{end}").read_text() for end in ("md", "csv")]
    for text in (shown, reported, capsys.readouterr().out, *pages):
        assert "An LSTM_1" in text
    assert r"An LSTM\_1" in (here / "out" / "results.tex").read_text()


# slurm


def test_slurm_needs_a_device(capsys):
    assert refused(capsys, "slurm", "tiny.yaml", "x.sbatch") == (
        "slurm needs --device cuda or --device cpu: the machine that writes the script may lack that of the runs"
    )


def test_a_place_for_the_script_is_there_before_data_are_made(here, capsys):
    for place, problem in (("absent/x.sbatch", "No such file or directory"), (".", "is a folder: name a file in it")):
        message = refused(capsys, "slurm", "tiny.yaml", place, "--device", "cpu")
        assert message.startswith(place) and problem in message
    assert [path.name for path in here.iterdir()] == ["tiny.yaml"]


def test_slurm_with_a_space_in_names(here, arguments_unread, monkeypatch, capsys):
    write_recipe(here, name="my table")
    for name in ("check", "prepare"):
        monkeypatch.setattr(command.Plan, name, lambda self: None)
    assert command.main(["slurm", "my table.yaml", "s x.sh", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "4 runs; submit them by: sbatch 's x.sh'\n"
    assert "#SBATCH --job-name='sg-my table'\n" in (here / "s x.sh").read_text()


def test_slurm_script_for_gpus(here):
    plan = planned(here, device="cuda", seeds="1,3")
    script = command.slurm_script(plan, "tiny.yaml", None)
    assert "#SBATCH --gres=gpu:1\n" in script and "#SBATCH --array=0-3\n" in script
    assert script.count("--seeds 1,3 ") == 2 and '--index "$SLURM_ARRAY_TASK_ID"' in script
    # Both commands name the recipe, and start in the user's folder.
    assert script.count(str(here / "tiny.yaml")) == 2 and f"\ncd {here}\n" in script
    words = shlex.split(next(line for line in script.splitlines() if line.startswith("exec ")))
    assert words[1:5] == [sys.executable, "-m", "fairseq_sg.experiments", "run"]
    again = command.make_parser().parse_args([w for w in words[4:] if w != "$SLURM_ARRAY_TASK_ID"] + ["3"])
    assert [t.run for t in command.plan_of(again).trials()] == [t.run for t in plan.trials()] and again.index == 3
    spaced = command.slurm_script(replace(plan, out=here / "my runs, 100%"), "tiny.yaml", None)
    assert f"#SBATCH --output='{here}/my runs, 100%%/slurm-%a.log'\n" in spaced
    on_cpu = command.slurm_script(planned(here), "tiny", 2)
    assert "--gres" not in on_cpu and "#SBATCH --array=0-3%2\n" in on_cpu and " run tiny --rows " in on_cpu


# compare


def test_compare(here, capsys):
    found = tiny(here)
    for name, seeds in (("one", (10.0, 12.0)), ("other", (14.0, 18.0))):
        made = [record("good", seed, gen=gen) for seed, gen in enumerate(seeds, 1)]
        Results(found, 1.0, made).write(here / f"{name}.json")
    assert command.main(["compare", "one.json", "other.json"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["model", "data", "column", "one", "other", "difference", "interval excludes 0"]
    assert ["An LSTM_1", "tiny", "OOD", "0.11 ± 0.01", "0.16 ± 0.03", "+0.05 [−0.09, +0.19]", "no"] in rows
    assert rows[-1] == ["The difference is other less one."]
    changed = replace(found, checkpoint="last")
    Results(changed, 1.0, [record("good", 1, gen=14.0)]).write(here / "other.json")
    assert command.main(["compare", "one.json", "other.json"]) == 0
    note = "note: The checkpoints are chosen differently: the best by accuracy on `dev`, and the last one."
    assert capsys.readouterr().out.splitlines()[-1] == note


def test_files_of_one_name_are_compared_by_their_paths(here, capsys):
    for name in ("a", "b"):
        Results(tiny(here), 1.0, [record("good", 1, gen=1.0)]).write(here / name / "results.json")
    assert command.main(["compare", "a/results.json", "b/results.json"]) == 0
    assert capsys.readouterr().out.split()[:5] == ["model", "data", "column", "a/results.json", "b/results.json"]


def test_compare_without_anything_in_common(here, capsys):
    found = tiny(here)
    Results(found, 1.0, [record("good", 1, gen=1.0)]).write(here / "a.json")
    Results(found, 1.0, [record("bad", 1, gen=1.0)]).write(here / "b.json")
    message = "a.json and b.json have no row, data and column in common"
    advice = ": compare pairs rows of equal name; for two rows of one file, compare FILE --rows A,B"
    assert refused(capsys, "compare", "a.json", "b.json") == message + advice
    late = {name: replace(column, at="second_half") for name, column in found.columns.items()}
    Results(replace(found, columns=late), 1.0, [record("good", 1, gen=1.0)]).write(here / "b.json")
    message += " (IID, OOD, OOD-20: measured otherwise)"
    assert refused(capsys, "compare", "a.json", "b.json") == message + advice
    Results(replace(found, unit="percent"), 1.0, [record("good", 1, gen=1.0)]).write(here / "b.json")
    assert refused(capsys, "compare", "b.json", "a.json") == (
        "accuracies of b.json are in percent, those of a.json a fraction: give both recipes one 'unit', and make the "
        "results again with `fairseq-sg experiments report`"
    )
    (here / "c.json").write_text("3")
    assert "c.json: not a results file of fairseq_sg.experiments" in refused(capsys, "compare", "a.json", "c.json")
    assert "d.json: No such file or directory" in refused(capsys, "compare", "d.json", "a.json")


def test_compare_two_rows_of_one_file(here, capsys):
    finished(tiny(here)).write(here / "a.json")
    assert refused(capsys, "compare", "a.json", "--rows", "good,bda") == (
        "--rows: a.json has no row 'bda': did you mean bad? choose from good, bad"
    )
    for text in ("good", "good,good", "good,bad,good", ""):
        message = f"--rows is {text!r}: give two rows, separated by a comma"
        assert refused(capsys, "compare", "a.json", "--rows", text) == message
    assert command.main(["compare", "a.json", "--rows", "good,bad"]) == 0
    assert "tiny  OOD     0.22 ± 0.03  Fail  –           –" in capsys.readouterr().out.splitlines()
    Results(tiny(here), 1.0, [record("good", 1, gen=10.0), record("bad", 1)]).write(here / "a.json")
    message = "a.json has no column with numbers of both good and bad on the same data"
    assert refused(capsys, "compare", "a.json", "--rows", "good,bad") == message
    made = [record(row, seed, gen=gen) for row, seed, gen in (("good", 1, 10.0), ("bad", 1, 14.0), ("bad", 2, 18.0))]
    Results(tiny(here), 1.0, made).write(here / "a.json")
    assert command.main(["compare", "a.json", "--rows", "good,bad"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "tiny  OOD     0.10  0.16 ± 0.03  +0.06       –" in printed
    assert printed[-1] == "The difference is bad less good."


@pytest.mark.parametrize("line", [["a.json"], ["a.json", "b.json", "--rows", "good,bad"]])
def test_compare_takes_two_files_or_two_rows(line, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["compare", *line])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: compare takes two files, or one file and --rows ROW,ROW (see ")


# Where trainings run.


@pytest.mark.parametrize(
    "device,gpus,words,expected",
    [
        ("cpu", [], "", (4, 1)),
        ("cpu", [], "--jobs 2", (2, 1)),
        ("cuda", ["0"], "", (3, 1)),
        ("cpu", [], "--jobs 9", (4, 1)),
        ("cuda", ["0"], "--together 2", (4, 2)),
        ("cuda", ["0"], "--together 2 --jobs 2", (2, 2)),
        ("cpu", [], "--together 3 --jobs 3 --stacked", (3, 2)),
    ],
)
def test_parallel_trainings(device, gpus, words, expected, prepared, monkeypatch):
    """A process per core, three per GPU, at most as many trainings as there are runs."""
    seen = []
    monkeypatch.setattr(command, "has_gpu", lambda: bool(gpus))
    monkeypatch.setattr(command, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(command, "processors", lambda: 8)
    monkeypatch.setattr(command, "publish", lambda *_: None)

    def run_all(runs, jobs, watch, place, together):
        seen.append((len(runs), (jobs, together), place.gpus, isinstance(place, memory.Guard)))
        return [{"result": {}} for _ in runs]

    monkeypatch.setattr(command, "run_all", run_all)
    assert command.main(["run", "tiny.yaml", "--device", device, *words.split()]) == 0
    assert seen == [(4, expected, gpus, True)]
    assert command.main(["run", "tiny.yaml", "--device", device, "--index", "2"]) == 0
    assert seen[1][:2] == (1, (1, 1))


@pytest.mark.parametrize(
    "words,message",
    [
        (["slurm", "tiny.yaml", "missing/x.sbatch"], "missing/x.sbatch: No such file or directory"),
        (["run", "tiny.yaml", "--out", "tiny.yaml"], "--out tiny.yaml is a file: name a folder"),
        *(
            (["run", "tiny.yaml", "--stacked", *words.split()], "--stacked makes the steps of several seeds at once: ")
            for words in (
                "",
                "--together 1",
                "--together 2 --seeds 1",
                "--together 2 --jobs 1",
                "--together 2 --index 0",
            )
        ),
        (
            ["run", "tiny.yaml", "--results", "tiny.yaml/x"],
            "--results tiny.yaml/x.json cannot be written: ",
        ),
    ],
)
def test_paths_that_cannot_be_written_are_one_line(words, message, prepared, capsys):
    assert message in refused(capsys, *words, "--device", "cpu")


def test_a_record_that_cannot_be_read_is_named(here, capsys):
    folder = planned(here).trials()[0].run.folder
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    assert "good-tiny-seed1/run.json is no record of a training" in refused(
        capsys, "report", "tiny.yaml", "--device", "cpu", "--out", str(here / "out")
    )


def test_a_stopped_run_says_how_to_resume(prepared, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    assert command.main(["run", "tiny.yaml", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "stopped; the same command resumes from the last checkpoints\n"


@pytest.mark.parametrize("words", [[], ["--index", "1"]])
@pytest.mark.parametrize(
    "ended,status", [({"result": {}}, 0), ({"diverged": {}}, 0), ({"failed": "training"}, 1), ({}, 1)]
)
def test_a_training_without_a_recorded_end_is_an_error(words, ended, status, prepared, monkeypatch):
    """Such as on a full disk, where not even its failure can be recorded."""
    monkeypatch.setattr(command, "run_all", lambda runs, *_, **__: [ended for _ in runs])
    monkeypatch.setattr(command, "publish", lambda *_: None)
    assert command.main(["run", "tiny.yaml", "--device", "cpu", *words]) == status


@pytest.mark.parametrize("name", ["report", "render", "slurm", "show"])
def test_an_interrupted_command_ends_without_a_traceback(name, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(command.COMMANDS, name, interrupted)
    arguments = {"render": [], "slurm": ["tiny.yaml", "x.sbatch"]}.get(name, ["tiny.yaml"])
    assert command.main([name, *arguments]) == 130
    assert capsys.readouterr().err == "interrupted\n"

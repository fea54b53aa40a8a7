"""Results files: what is collected of runs, what is read, and how two of them are united."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import jobs, records, report, results, schema
from fairseq_sg.experiments.recipe import read as read_recipe
from fairseq_sg.experiments.results import Results, collect, merged
from helpers.experiment_files import (
    STAMP,
    TINY,
    fail,
    finish,
    finished,
    of_subset,
    planned,
    points,
    record,
    save,
    tiny,
    write_recipe,
)

# What is collected.


def test_the_records_of_runs(tmp_path):
    plan = planned(tmp_path)
    trials = plan.trials()
    runs_of = {(t.row, t.run.seed): t.run for t in trials}
    finish(runs_of["good", 1], 20.0, (20, 5, 90, 8), (40, 4, 100, 10))
    finish(runs_of["good", 2], 24.0, (20, 5, 90, 10), (40, 9, 99, 30))
    fail(runs_of["bad", 1])
    found = collect(plan, trials)
    assert [(r["row"], r["data"], r["seed"]) for r in found.records] == [
        ("good", "tiny", 1), ("bad", "tiny", 1), ("good", "tiny", 2), ("bad", "tiny", 2),
    ]  # fmt: skip
    good, bad, _, nothing = found.records
    assert good["result"]["accuracy"]["gen"] == 20.0 and len(good["result"]["curve"]) == 2
    assert bad["diverged"]["step"] == 3 and set(nothing) == {"row", "data", "seed"}
    assert good["commands"][0].startswith("fairseq-train ")
    assert (found.done, found.seeds, found.rows, found.commits) == (3, [1, 2], ["good", "bad"], ["abc"])
    assert found.machines == [{"cpu": "x"}]
    found.write(tmp_path / "new" / "x.json")
    assert results.read(tmp_path / "new" / "x.json").as_dict() == found.as_dict()


def test_numbers_of_an_evaluation_with_overrides_are_not_in_the_log(tmp_path):
    """The training has other ones, of the model without overrides."""
    text = TINY.replace("    arguments: --lr 3e-3", "    model_overrides: '{}'\n    arguments: --lr 3e-3")
    plan = planned(tmp_path, text, rows="good", seeds="1,")
    (trial,) = plan.trials()
    save(trial.run, failed="evaluation")
    lines = (of_subset(name, step, 30.0) for step in (20, 40) for name in ("dev", "valid", "gen"))
    trial.run.log.write_text(f"{STAMP} | INFO | start\n{''.join(lines)}")
    found = results.collect(plan, [trial])
    found.write(tmp_path / "x.json")
    (line, *_) = report.lines(results.read(tmp_path / "x.json"))
    assert {key: cell.values for key, cell in line.cells.items()} == {"IID": [0.3], "OOD": [], "OOD-20": [0.3]}


def test_numbers_of_another_evaluation_are_not_collected(tmp_path):
    """A finished run keeps what was measured as the recipe asks now, also after its folder was moved."""
    columns = (
        "  deeper: {subset: gen, model_overrides: '{}'}\n  BLEU: {subset: gen, metric: bleu}\n"
        "  first: {subset: gen, metric: analysis, value: a/x}\n  second: {subset: gen, metric: analysis, value: b/x}\n"
        "generate: --max-len-b 9\nanalyses: {a: 'masks {checkpoint}', b: 'overlap x={a}.npz'}\nrows:\n"
    )
    text = TINY.replace("rows:\n", columns)
    (trial, *_) = planned(tmp_path, text).trials()
    everything = {
        "steps": 40, "checkpoint_step": 20, "accuracy": {"dev": 5.0, "valid": 90.0, "gen": 8.0},
        "generated": {"gen": {"bleu": 7.0}}, "curve": points((20, 5, 90, 8), (40, 4, 100, 10)),
        "more": {"{}": {"accuracy": {"gen": 6.0}}}, "analysed": {"a/x": 1.0, "b/x": 2.0},
    }  # fmt: skip
    save(trial.run, result=everything)
    trial.run.log.write_text(
        "".join(of_subset(n, s, g) for s, g in ((20, 8), (40, 10)) for n in ("dev", "valid", "gen"))
    )

    def kept(old="", new=""):
        plan = planned(tmp_path, text.replace(old, new))
        found = collect(plan, plan.trials()[:1])
        cells = report.lines(found)[0].cells
        names = ("OOD", "deeper", "BLEU", "first", "second")
        return found.records[0]["result"], [cells[name].values for name in names]

    assert kept() == (everything, [[0.08], [0.06], [7.0], [1.0], [2.0]])
    found, cells = kept("checkpoint: best", "checkpoint: last")
    # The training's own validation is that of its last checkpoint.
    assert cells == [[0.1], [], [], [], []] and found["checkpoint_step"] == 40
    assert found["curve"] == everything["curve"]
    assert kept("--max-len-b 9", "--max-len-b 8")[1] == [[0.08], [0.06], [], [1.0], [2.0]]
    assert kept("masks {c", "masks --seed 2 {c")[1] == [[0.08], [0.06], [7.0], [], []]
    assert kept("overlap x", "overlap y")[1] == [[0.08], [0.06], [7.0], [1.0], []]
    own = "    model_overrides: '{1: 1}'\n    arguments: --lr 3e-3"
    assert kept("    arguments: --lr 3e-3", own)[1] == [[], [0.06], [], [1.0], [2.0]]
    assert kept("model_overrides: '{}'", "model_overrides: '{1: 1}'")[1][:2] == [[0.08], []]
    # Neither a smaller batch nor a further subset changes a number.
    assert kept("batch_size_valid: 50", "batch_size_valid: 5") == kept("gen]}", "gen, test]}") == kept()
    here = trial.run.folder.parent
    for name in ("moved", "moved to a path of 'words'"):
        here = here.rename(tmp_path / name)
        (moved, *_) = replace(planned(tmp_path, text), out=here).trials()
        assert records.as_asked(moved.run) == everything


def test_what_has_not_ended_is_cut_at_the_common_step(tmp_path):
    plan = planned(tmp_path, rows="good")
    trials = plan.trials()
    log = "".join(
        of_subset(name, s, s, stamp=f"2026-01-01 10:0{s // 10}:00 | INFO")
        for s in (10, 20)
        for name in ("dev", "valid", "gen")
    )
    logged = log.splitlines(keepends=True)
    for trial, part in zip(trials, (logged, logged[:5]), strict=True):
        save(trial.run, minutes=0.0)
        trial.run.log.write_text("".join(part))
    (line, _) = report.lines(collect(plan, trials))
    assert (line.steps, line.done) == (10, 2) and line.cells["OOD"].values == [0.1, 0.1]
    # Only finished seeds count.
    trials[0].run.log.unlink()
    finish(trials[0].run, 30.0, (20, 5, 90, 8), (40, 4, 100, 10))
    (line, _) = report.lines(collect(plan, trials))
    assert (line.steps, line.done) == (40, 1) and line.cells["OOD"].values == [0.3]


def test_a_second_look_drops_what_was_cut(tmp_path):
    """A seed that has finished since the first look is not averaged with the first look at another."""
    plan = planned(tmp_path, rows="good")
    trials = plan.trials()
    log = "".join(of_subset(name, s, s) for s in (10, 20) for name in ("dev", "valid", "gen"))
    for trial in trials:
        save(trial.run)
        trial.run.log.write_text(log)
    first = collect(plan, trials)
    assert [r["result"]["steps"] for r in first.records] == [20, 20] and first.done == 0
    finish(trials[0].run, 30.0, (20, 5, 90, 8), (40, 4, 100, 10))
    found = merged(first, collect(plan, trials), tmp_path / "x.json")
    (line, _) = report.lines(found)
    assert (line.steps, line.done, found.done) == (40, 1, 1) and line.cells["OOD"].values == [0.3]


def test_unfinished_trainings_of_two_files_are_cut_at_a_common_step(tmp_path):
    plan = planned(tmp_path, rows="good")
    one, other = plan.trials()
    for trial, steps in ((one, (10, 20, 30)), (other, (10, 20))):
        save(trial.run)
        trial.run.log.write_text("".join(of_subset(n, s, s) for s in steps for n in ("dev", "valid", "gen")))
    first, second = (collect(plan, [trial]) for trial in (one, other))
    (line, _) = report.lines(merged(first, second, tmp_path / "x.json"))
    assert (line.steps, line.done) == (20, 2) and line.cells["OOD"].values == [0.2, 0.2]


def test_results_of_fewer_steps_do_not_count_where_more_are_asked_for(tmp_path):
    """One training is continued to the new number of steps, the other is not yet."""
    plan = planned(tmp_path, rows="good", steps_scale=2.0)
    one, other = plan.trials()
    finish(one.run, 90.0, (40, 9, 99, 30), (80, 9, 99, 90))
    short = replace(other.run, steps=40)
    finish(short, 10.0, (40, 4, 100, 10))
    other.run.log.write_text("".join(of_subset(name, 40, 10) for name in ("dev", "valid", "gen")))
    (line, _) = report.lines(collect(plan, [one, other]))
    assert (line.steps, line.done) == (80, 1) and line.cells["OOD"].values == [0.9]
    one.run.log.write_text(of_subset("gen", 80, 10))
    with pytest.raises(ValueError, match="at step 80, beyond the requested 40"):
        collect(planned(tmp_path, rows="good"), [replace(one, run=replace(one.run, steps=40))])


def test_nothing_is_cut_for_a_training_that_diverged(tmp_path):
    """Of the same row: the one that goes on is reported as far as it got."""
    plan = planned(tmp_path, rows="good")
    going, bad = plan.trials()
    log = "".join(of_subset(name, s, s) for s in (10, 20) for name in ("dev", "valid", "gen"))
    fail(bad.run)
    bad.run.log.write_text(log[: log.index("20")])
    save(going.run)
    going.run.log.write_text(log)
    assert [r.get("result", {}).get("steps") for r in collect(plan, [going, bad]).records] == [20, None]


def test_a_report_made_elsewhere_has_the_commands_of_the_trainings(tmp_path):
    graphs = planned(tmp_path, device="cuda", graphs=8).trials()[0].run
    graphs.folder.mkdir(parents=True)
    records.begin(graphs, {})
    plan = planned(tmp_path)
    found = collect(plan, plan.trials()).records[0]
    assert found["commands"] == [shlex.join(graphs.train_command())]
    assert "--cpu" not in found["commands"][0] and "--step-graphs 8" in found["commands"][0]


def test_runs_with_other_settings_are_not_collected(tmp_path):
    """Trained on other data, their numbers are not those of the plan."""
    trials = planned(tmp_path, data=tmp_path / "one").trials()
    finish(trials[0].run, 20.0, (40, 4, 100, 10))
    other = planned(tmp_path, data=tmp_path / "two")
    with pytest.raises(ValueError, match="holds a training with other settings"):
        collect(other, other.trials())


def test_data_are_the_same_by_a_relative_and_an_absolute_path(tmp_path, monkeypatch):
    """Also for evaluations and analyses, which are not made again."""
    monkeypatch.chdir(tmp_path)
    analyses = "analyses: {a: 'masks {checkpoint} {tiny}:gen'}\nrows:\n"
    text = TINY.replace("rows:\n", f"  kept: {{subset: gen, metric: analysis, value: a/x}}\n{analyses}")
    plan = planned(tmp_path, text, rows="good", seeds="1,", data=Path("data"))
    (trial,) = plan.trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    record = records.saved(trial.run)
    records.write(trial.run, record | {"result": record["result"] | {"analysed": {"a/x": 1.0}}})
    again = replace(plan, data=tmp_path / "data")
    assert records.nothing_left(again.trials()[0].run)
    assert collect(again, again.trials()).records == collect(plan, plan.trials()).records


def test_every_commit_and_machine_of_all_starts(tmp_path):
    plan = planned(tmp_path, rows="good")
    first, second = plan.trials()
    starts = [
        {"step": 0, "commit": "bbb", "machine": {"cpu": "x"}},
        {"step": 9, "commit": "aaa", "machine": {"cpu": "y"}},
    ]
    save(first.run, starts=starts)
    save(second.run, starts=[{"step": 0, "commit": "ccc", "machine": {"cpu": "x"}}])
    found = collect(plan, [first, second])
    assert found.commits == ["aaa", "bbb", "ccc"] and found.machines == [{"cpu": "x"}, {"cpu": "y"}]
    assert found.records[0]["starts"] == starts


def test_the_command_of_results(tmp_path):
    recipe = read_recipe(write_recipe(tmp_path, TINY + "variants: {small: {steps: 10}}\n"), "small")
    every = [record(row, seed) for row in ("good", "bad") for seed in (1, 2)]
    command = "python -m fairseq_sg.experiments run tiny.yaml --variant small"
    assert Results(recipe, 1.0, every).command == command
    some = [record("good", 3), record("good", 5)]
    assert Results(recipe, 0.5, some).command == f"{command} --rows good --seeds 3,5 --steps-scale 0.5"
    fewer = [record("good", 1), record("bad", 1), record("bad", 2)]
    assert [Results(recipe, 1.0, found).made for found in (every, some, fewer)] == [4, 2, 4]


def test_a_training_whose_evaluation_failed_is_not_finished(tmp_path):
    """All its steps are in its log. Beside a finished seed it has no number."""
    plan = planned(tmp_path, rows="good")
    one, other = plan.trials()
    save(one.run, failed="evaluation")
    one.run.log.write_text("".join(of_subset(name, 40, 30.0) for name in ("dev", "valid", "gen")))
    finish(other.run, 20.0, (40, 4, 100, 10))
    found = collect(plan, [one, other])
    (line, _) = report.lines(found)
    assert (found.done, line.done, line.planned) == (1, 1, 2) and line.cells["OOD"].values == [0.2]


def test_numbers_stay_where_a_later_evaluation_fails(tmp_path):
    """Such as that of a column which is new."""
    plan = planned(tmp_path, rows="good")
    trials = plan.trials()
    for trial, gen in zip(trials, (20.0, 24.0), strict=True):
        finish(trial.run, gen, (40, 4, 100, 10))
        records.end(trial.run, failed="evaluation")
        found = collect(plan, trials)
        (line, _) = report.lines(found)
        assert line.done == found.done == len(line.cells["OOD"].values)
    assert line.cells["OOD"].values == [0.2, 0.24] and not records.evaluated(trials[0].run)


# What is read.


@pytest.fixture
def content(tmp_path):
    return finished(tiny(tmp_path)).as_dict()


def without(key):
    return lambda content: content.pop(key)


def put(value, *keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        *((without(key), f"not a results file of fairseq_sg.experiments (KeyError('{key}'))")
          for key in ("recipe", "records", "steps_scale", "note", "bleu")),
        (put("text", "recipe"), "not a results file of fairseq_sg.experiments"),
        (put([1], "recipe"), "recipe: "),
        (put(0, "recipe", "steps"), "recipe: steps: is 0: it must be above 0"),
        (put(3, "recipe", "steep"), "recipe: steep: is unknown: a newer fairseq_sg may have written it"),
        (put("text", "records"), "not a results file of fairseq_sg.experiments"),
        (put([1], "records"), "not a results file of fairseq_sg.experiments"),
        (put("much", "steps_scale"), "not a results file of fairseq_sg.experiments"),
        (put("ugly", "records", 0, "row"), "a record of the row 'ugly' on 'tiny', which the recipe does not have"),
        (put("huge", "records", 0, "data"), "a record of the row 'good' on 'huge', which the recipe does not have"),
        (put({}, "records", 0, "result"), "(records.0.result has no 'steps'): move it away, or name another file"),
        (put({"steps": 1}, "records", 0, "result"), "records.0.result has no 'curve'"),
        (put("1", "records", 0, "seed"), "records.0.seed is '1'"),
        (put("90", "records", 0, "result", "accuracy", "gen"), "records.0.result.accuracy.gen is '90'"),
        (put([3], "records", 0, "result", "curve"), "records.0.result.curve.0 is 3"),
        (put([{}], "records", 0, "starts"), "records.0.starts.0 has no 'step'"),
        (put(3, "note"), "note is 3"),
        (put({"tiny": [1]}, "bleu"), "bleu.tiny is [1]"),
        (put({"tiny": {}}, "bleu"), "bleu.tiny has no 'baseline'"),
        (lambda content: content["records"].append(content["records"][0]), "2 records of row, data, seed ('good', "),
        (put(math.nan, "steps_scale"), "steps_scale is nan"),
        (put(0, "steps_scale"), "steps_scale is 0.0"),
    ],
)  # fmt: skip
def test_what_is_no_results_file_is_refused_in_one_line(change, message, content, tmp_path):
    path = tmp_path / "x.json"
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as error:
        results.read(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value) and "\n" not in str(error.value)


def test_numbers_without_accuracies_are_read(content, tmp_path):
    put({"steps": 1, "curve": [], "relative_l2": {"gen": 0.5}}, "records", 0, "result")(content)
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert results.read(tmp_path / "x.json").records[0]["result"]["relative_l2"] == {"gen": 0.5}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"text"'])
def test_other_texts_are_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="x.json: not a results file of fairseq_sg.experiments"):
        results.read(tmp_path / "x.json")


def test_a_file_that_is_nested_too_deeply(content, tmp_path):
    text = json.dumps(content | {"note": "HERE"}).replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="x.json: not a results file .*RecursionError.*: move it away"):
        results.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change,why",
    [
        *((put(value, "settings"), f"it.settings is {value!r}") for value in ([], None, "text")),
        (put("text", "result"), "it.result is 'text'"),
        (put({}, "result"), "it.result has no 'steps'"),
        (put(3, "failed"), "it.failed is 3"),
        (put([{}], "starts"), "it.starts.0 has no 'step'"),
        (put([3], "commands"), "it.commands.0 is 3"),
        (put("nan", "diverged"), "it.diverged is 'nan'"),
    ],
)
def test_what_is_no_record_of_a_training_is_refused_in_one_line(change, why, tmp_path):
    (trial, *_) = planned(tmp_path, rows="good").trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    path = trial.run.folder / "run.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError) as error:
        records.saved(trial.run)
    message = f"{path} is no record of a training ({why}): move its folder away, or choose another --out"
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", "[" * 100_000])
def test_other_texts_are_no_records(text, tmp_path):
    (trial, *_) = planned(tmp_path, rows="good").trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    (trial.run.folder / "run.json").write_text(text)
    with pytest.raises(UsageError, match="run.json is no record of a training .*: move its folder away"):
        records.saved(trial.run)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="x.json: No such file or directory: give a results file of fairseq_sg"):
        results.read(tmp_path / "x.json")


# Two files of one table.


@pytest.fixture
def now(tmp_path):
    recipe = tiny(tmp_path)
    return Results(recipe, 1.0, [record("bad", 1, gen=3.0, steps=60), record("good", 3, gen=1.0)])


def test_rows_trained_at_different_times_unite(now, tmp_path):
    """In the order of the recipe, with each record's own commit; the note stays."""
    earlier = Results(now.recipe, 1.0, [record("good", seed, gen=9.0, commit="old") for seed in (2, 1)], "by night")
    found = merged(earlier, now, tmp_path / "x.json")
    assert [(r["row"], r["seed"]) for r in found.records] == [("good", 1), ("good", 2), ("good", 3), ("bad", 1)]
    assert found.commits == ["abc", "old"] and found.note == "by night" and found.done == 4
    assert report.lines(found)[0].cells["OOD"].values == [0.09, 0.09, 0.01]


@pytest.mark.parametrize(
    "before,after,expected",
    [
        ({}, {"gen": 2.0}, {"gen": 2.0}),
        ({"gen": 1.0}, {}, {"gen": 1.0}),
        ({"gen": 1.0}, {"gen": 2.0}, {"gen": 2.0}),
        ({"gen": 1.0, "steps": 40}, {"gen": 2.0, "steps": 20}, {"gen": 1.0, "steps": 40}),
        ({"gen": 1.0, "steps": 20}, {"gen": 2.0, "steps": 40}, {"gen": 2.0, "steps": 40}),
        ({"diverged": {"step": 30}}, {"gen": 2.0, "steps": 20}, {"diverged": {"step": 30}}),
        ({"diverged": {"step": 0}}, {}, {"diverged": {"step": 0}}),
        ({"gen": 1.0, "steps": 40}, {"diverged": {"step": 30}}, {"diverged": {"step": 30}}),
        ({"diverged": {"step": 30}}, {"gen": 2.0, "steps": 40}, {"gen": 2.0, "steps": 40}),
        ({"failed": "training"}, {}, {}),
    ],
)
def test_the_record_that_was_trained_further_wins(before, after, expected, now, tmp_path):
    then, now.records = Results(now.recipe, 1.0, [record("good", 1, **before)]), [record("good", 1, **after)]
    assert merged(then, now, tmp_path / "x.json").records == [record("good", 1, **expected)]


def test_a_collapse_replaces_what_was_reported_before_it_was_found(tmp_path):
    """It is at a step before the last one of the earlier report."""
    plan = planned(tmp_path, rows="good", seeds="1,")
    (trial,) = plan.trials()
    save(trial.run)
    trial.run.log.write_text(
        "".join(of_subset(name, step, 50.0 * (step < 10)) for step in (5, 10, 15) for name in ("dev", "valid", "gen"))
    )
    before = collect(plan, [trial])
    assert before.records[0]["result"]["steps"] == 15
    save(trial.run, diverged={"step": 10, "why": "the accuracy fell"})
    found = merged(before, collect(plan, [trial]), tmp_path / "x.json")
    assert found.done == 1 and [line.failed for line in report.lines(found)][0]


def test_a_divergence_beyond_the_requested_steps_is_refused(tmp_path):
    """A training of fewer steps would not have met it."""
    plan = planned(tmp_path, rows="good", seeds="1,")
    (trial,) = plan.trials()
    save(trial.run, diverged={"step": trial.run.steps + 1, "why": "the loss is nan"})
    match = f"holds a training at step {trial.run.steps + 1}, beyond the requested {trial.run.steps}"
    for use in (lambda: collect(plan, [trial]), lambda: jobs.run_all([trial.run], 1, lambda *_: None)):
        with pytest.raises(ValueError, match=match):
            use()


@pytest.mark.parametrize("how", [{}, {"failed": "evaluation"}], ids=["killed", "failed"])
def test_a_training_without_its_evaluation_replaces_no_finished_one(how, tmp_path):
    """It was trained again, in another folder."""
    plan = planned(tmp_path, rows="good", seeds="1,")
    (trial,) = plan.trials()
    finish(trial.run, 20.0, (40, 4, 100, 10))
    before = collect(plan, [trial])
    save(trial.run, **how)
    trial.run.log.write_text("".join(of_subset(name, 40, 30.0) for name in ("dev", "valid", "gen")))
    now = collect(plan, [trial])
    assert (before.done, now.done) == (1, 0) and now.records[0]["result"]["accuracy"]["gen"] == 30.0
    for first, second in ((before, now), (now, before)):
        assert merged(first, second, tmp_path / "x.json").records == before.records


def test_a_file_keeps_the_curve_of_a_training_that_is_not_finished(now, tmp_path):
    """Tables show one number of steps, whichever trainings are united first."""
    half = record("good", 1, gen=9.0, steps=20)
    half["result"]["curve"] = points((10, 5, 90, 8), (20, 5, 90, 9))
    found = merged(Results(now.recipe, 1.0, [half]), now, tmp_path / "x.json")  # seed 3 has all steps
    assert half in found.records and [line.done for line in report.lines(found)][0] == 1
    assert not [row for row in report.as_csv(found).splitlines() if row.startswith("good,") and ",1,20," in row]


OTHERWISE = {
    "arguments": ("arguments: --lr 3e-3", "arguments: --lr 4e-3"),
    "arguments of all rows": ("--clip-norm 1", "--clip-norm 2"),
    "data": ("--order forward", "--order backward"),
    "steps": ("steps: 40", "steps: 41"),
    "checkpoint": ("checkpoint: best", "checkpoint: last"),
    "evaluation": ("    arguments: --lr 3e-3", "    model_overrides: '{}'\n    arguments: --lr 3e-3"),
    "row": ("  good:", "  better:"),
    "evaluations to choose from": ("validate_every: 20", "validate_every: 5"),
    "subset that chooses": ("subsets: [dev, valid, gen]", "subsets: [gen, dev, valid]"),
}


@pytest.mark.parametrize("old,new", OTHERWISE.values(), ids=OTHERWISE)
def test_other_trainings_are_refused(old, new, now, tmp_path):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    earlier = Results(read_recipe(path), 1.0, [record("better" if "better" in new else "good", 1, gen=9.0)])
    with pytest.raises(UsageError, match="x.json has results of another version of the recipe .*choose another --resu"):
        merged(earlier, now, tmp_path / "x.json")
    if "better" in new:
        with pytest.raises(UsageError, match="this one has no row 'better' on 'tiny'"):
            merged(earlier, now, tmp_path / "x.json")
    # What was only planned has no numbers.
    earlier.records = [record(earlier.records[0]["row"], 1)]
    if "better" not in new:
        assert len(merged(earlier, now, tmp_path / "x.json").records) == 3


def test_a_row_that_was_only_planned_may_be_gone(now, tmp_path):
    earlier = Results(read_recipe(write_recipe(tmp_path, TINY.replace("  good:", "  better:"))), 1.0, [])
    earlier.records = [record("better", 1), record("bad", 2, diverged={"step": 3})]
    found = merged(earlier, now, tmp_path / "x.json").records
    assert "better" not in {r["row"] for r in found} and record("bad", 2, diverged={"step": 3}) in found


def test_an_analysis_that_is_new_does_not_refuse_the_results(now, tmp_path):
    earlier = Results(replace(now.recipe, analyses={}), 1.0, [record("good", 1, gen=9.0)])
    now.recipe = replace(now.recipe, analyses={"experts": "experts {checkpoint}"})
    assert len(merged(earlier, now, tmp_path / "x.json").records) == 3
    earlier.recipe = replace(now.recipe, analyses={"experts": "experts {checkpoint} --inverse"})
    with pytest.raises(UsageError, match="its row 'good' was trained or evaluated otherwise"):
        merged(earlier, now, tmp_path / "x.json")


def test_a_new_column_at_the_best_evaluation_does_not_refuse_the_results(now, tmp_path):
    """It needs the curve alone, which the results have; but not that of other evaluations."""
    column = now.recipe.columns["IID"]
    plain = replace(now.recipe, checkpoint="last", columns={"IID": column})
    more = replace(plain, columns={"IID": column, "best": replace(column, at="best")})
    earlier = [record("good", 1, gen=9.0)]
    for before, after in ((plain, more), (more, plain)):
        there = Results(after, 1.0, now.records)
        assert len(merged(Results(before, 1.0, earlier), there, tmp_path / "x.json").records) == 3
        with pytest.raises(UsageError, match="another version of the recipe"):
            merged(Results(replace(before, validate_every=5), 1.0, earlier), there, tmp_path / "x.json")


def test_another_number_of_streams_is_refused(now, tmp_path):
    """The batch size of a validation, except for language models."""
    for task in ("sg_classification", "sg_language_modeling"):
        train = now.recipe.train.replace("sg_classification", task)
        now.recipe = replace(now.recipe, train=train)
        earlier = Results(replace(now.recipe, batch_size_valid=7), 1.0, [record("good", 1, gen=9.0)])
        if task == "sg_classification":
            assert len(merged(earlier, now, tmp_path / "x.json").records) == 3
            continue
        with pytest.raises(UsageError, match="its row 'good' was trained or evaluated otherwise"):
            merged(earlier, now, tmp_path / "x.json")


def test_another_steps_scale_is_refused(now, tmp_path):
    earlier = Results(now.recipe, 0.5, [record("good", 1, gen=9.0)])
    with pytest.raises(UsageError, match=r"another version of the recipe \(with another --steps-scale\)"):
        merged(earlier, now, tmp_path / "x.json")


def test_evaluations_of_the_last_checkpoint_may_be_at_other_steps(now, tmp_path):
    columns = {key: column for key, column in now.recipe.columns.items() if key != "OOD-20"}
    now.recipe = replace(now.recipe, checkpoint="last", columns=columns)
    earlier = Results(replace(now.recipe, validate_every=7), 1.0, [record("good", 1, gen=9.0)])
    assert len(merged(earlier, now, tmp_path / "x.json").records) == 3
    for at in ("best", "peak", "second_half", 20):
        columns = {"IID": schema.Column("valid", at=at)}
        now.recipe, earlier.recipe = (replace(results.recipe, columns=columns) for results in (now, earlier))
        with pytest.raises(UsageError, match="its row 'good' was trained or evaluated otherwise"):
            merged(earlier, now, tmp_path / "x.json")


def test_titles_and_published_numbers_may_change(now, tmp_path):
    """They are those of the recipe of now."""
    old = replace(now.recipe, title="An old title", chosen=[])
    found = merged(Results(old, 1.0, [record("good", 1, gen=9.0)]), now, tmp_path / "x.json")
    assert found.recipe.title == now.recipe.title and len(found.records) == 3

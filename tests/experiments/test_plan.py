"""The plan of a recipe: chosen rows, data and seeds, their folders, and the data they need."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import plan as plans
from fairseq_sg.experiments.plan import as_seeds, make_plan, read_seeds
from fairseq_sg.experiments.recipe import find, read
from helpers.experiment_files import TINY, TWO, planned, tiny


def test_plan(tmp_path):
    plan = planned(tmp_path, seeds="7,9")
    trials = plan.trials()
    assert [(t.row, t.run.seed) for t in trials] == [("good", 7), ("bad", 7), ("good", 9), ("bad", 9)]
    assert [t.run.steps for t in trials] == [40, 60, 40, 60]
    assert len({t.run.folder for t in trials}) == 4
    assert planned(tmp_path, seeds="5,").seeds == [5]
    assert planned(tmp_path, seeds="3").seeds == [1, 2, 3]
    assert planned(tmp_path).seeds == [1, 2]


def test_a_run_of_the_plan(tmp_path):
    run = planned(tmp_path, device="cuda", data=Path("some/where")).trials()[0].run
    assert (run.name, run.data, run.folder) == (
        "An LSTM_1", Path("some/where/tiny"), tmp_path / "out" / "good-tiny-seed1",
    )  # fmt: skip
    assert run.subsets == {"dev": "dev", "valid": "IID", "gen": "OOD"} and run.best and not run.decodings
    trained, validated = (" ".join(command) for command in run.commands())
    assert "--lr 3e-3 --batch-size-valid 50 " in trained and "--validate-interval-updates 20 " in trained
    assert "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric" in trained
    assert "--cpu" not in trained + validated and "--seed 1 --max-update 40 " in trained
    assert "--path " + str(run.folder / "checkpoint_best.pt") in validated and "--batch-size 50" in validated
    on_cpu = planned(tmp_path).trials()[0].run
    assert "--cpu" in on_cpu.train_command() and "--cpu" in on_cpu.validate_command()


def test_a_training_that_needs_a_gpu_is_refused_before_data_are_made(tmp_path):
    text = TINY.replace("--lr 1e38", "--lr 1e38 --amp")
    with pytest.raises(UsageError, match="the row 'bad' trains with --amp, which needs a GPU"):
        planned(tmp_path, text, data=tmp_path).check()
    text = text.replace("ctl --order forward", "cfq --raw-dir FILE")
    good = planned(tmp_path, text, rows="good", data=tmp_path)
    good.check()
    with pytest.raises(UsageError, match="'tiny'|not made"):
        good.prepare()


def test_graphs_of_steps(tmp_path):
    """They are part of a training, and of the options that select it again; graphs need no worker of batches."""
    recipe = tiny(tmp_path)
    plan = make_plan(recipe, device="cuda", out=tmp_path / "out", graphs=8)
    trained, validated = (" ".join(command) for command in plan.trials()[0].run.commands())
    assert "--num-workers 0 --step-graphs 8 " in trained and "--step-graphs" not in validated
    assert plan.options()[-2:] == ["--step-graphs", "8"]
    without = make_plan(recipe, device="cuda", out=tmp_path / "out")
    assert "--step-graphs" not in without.trials()[0].run.train_command() + without.options()
    with pytest.raises(UsageError, match="--step-graphs is for a GPU: leave it out"):
        make_plan(recipe, graphs=8)
    with pytest.raises(UsageError, match="--step-graphs is -1: choose 0 or more"):
        make_plan(recipe, device="cuda", graphs=-1)


def test_rows_are_on_their_data(tmp_path):
    plan = planned(tmp_path, TWO, seeds="1")
    assert [(t.row, t.data, t.run.name) for t in plan.trials()] == [
        ("good", "tiny", "An LSTM_1, tiny"), ("good", "other", "An LSTM_1, other"), ("bad", "tiny", "bad, tiny"),
    ]  # fmt: skip
    assert plan.used() == ["tiny", "other"] and planned(tmp_path, TWO, rows="bad").used() == ["tiny"]
    assert [t.data for t in planned(tmp_path, TWO, on="other").trials()] == ["other"] * 2
    with pytest.raises(UsageError, match="no row in --rows is trained on the data in --on"):
        planned(tmp_path, TWO, rows="bad", on="other")


def test_what_is_named_twice_is_taken_once(tmp_path):
    plan = planned(tmp_path, TWO, rows="bad,good,bad", on="tiny,tiny", seeds="4,5,4")
    assert (plan.rows, plan.on, plan.seeds) == (["bad", "good"], ["tiny"], [4, 5])
    folders = [t.run.folder for t in plan.trials()]
    assert len(folders) == len(set(folders)) == 4


@pytest.mark.parametrize("scale,steps,every", [(0.5, 20, 10), (2, 80, 20), (1e-9, 1, 1), (0.3, 12, 6)])
def test_steps_are_scaled(scale, steps, every, tmp_path):
    """More steps are evaluated as often as before; fewer as many times."""
    (trial,) = planned(tmp_path, rows="good", seeds="1", steps_scale=scale).trials()
    arguments = trial.run.arguments
    assert trial.run.steps == steps
    assert arguments[arguments.index("--validate-interval-updates") + 1] == str(every)


def test_the_folder_of_the_runs(tmp_path):
    """Runs of another length or variant have one of their own."""
    recipe = tiny(tmp_path, TINY + "variants: {small: {steps: 10}}\n")
    small = read(tmp_path / "tiny.yaml", "small")
    outs = [make_plan(recipe).out, make_plan(recipe, steps_scale=0.1).out, make_plan(small, steps_scale=2).out]
    assert outs == [Path("runs/tiny"), Path("runs/tiny-x0.1"), Path("runs/tiny-small-x2")]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"rows": "good,goood"}, "--rows has 'goood': choose from good, bad"),
        ({"rows": "shown"}, r"--rows has 'shown' \(it is not ours\): choose from good, bad"),
        ({"rows": ""}, "--rows has '': choose from good, bad"),
        ({"on": "large"}, "--on has 'large': choose from tiny"),
        ({"seeds": "0"}, "--seeds is '0': it must be a number of seeds, or a list as 4,5,6"),
        ({"seeds": "00"}, "--seeds is '00'"),
        ({"seeds": "1,a"}, "--seeds is '1,a'"),
        ({"seeds": "-3"}, "--seeds is '-3'"),
        ({"seeds": "1,,2"}, "--seeds is '1,,2'"),
        ({"seeds": ""}, "--seeds is ''"),
        ({"seeds": "٣"}, "--seeds is '٣'"),
        ({"seeds": "1,4293967296"}, "--seeds has 4293967296: choose seeds up to 4293967295, to which epochs are added"),
        ({"seeds": "1234"}, "--seeds 1234 is the seeds 1 to 1234: for this seed alone, give --seeds 1234,"),
        ({"steps_scale": 0.0}, "--steps-scale is 0.0: choose a number above 0"),
        ({"steps_scale": -1.0}, "--steps-scale is -1.0: choose a number above 0"),
        ({"steps_scale": float("nan")}, "--steps-scale is nan: choose a number above 0"),
        ({"steps_scale": float("inf")}, "--steps-scale is inf: choose a number above 0"),
    ],
)
def test_wrong_choices(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        planned(tmp_path, **options)


def test_two_trainings_never_have_one_folder(tmp_path):
    """The row good-x on the data tiny, and the row good on the data x-tiny."""
    text = TINY.replace("\nsteps:", "\n  x-tiny: {folder: other, prepare: ctl, subsets: [dev, valid, gen]}\nsteps:", 1)
    text = text.replace("  bad:", "  good-x: {arguments: --lr 1}\n  bad:")
    message = "the row 'good' on 'x-tiny' and the row 'good-x' on 'tiny' have one folder, .*good-x-tiny-seed1: rename"
    with pytest.raises(UsageError, match=message):
        planned(tmp_path, text)


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3], [5], [2**32 - 10**6 - 1], [4, 6], [2, 1], list(range(1, 151))])
def test_the_text_of_seeds_is_read_as_those_seeds(seeds):
    assert read_seeds(as_seeds(seeds)) == seeds


@pytest.mark.parametrize(
    "recipe,quantity,names",
    [
        ("quickstart", "accuracy", {"dev": "dev", "valid": "trained-lengths", "gen": "longer"}),
        ("article_looped", "mse_last_mean", {"valid": "valid", "test": "error"}),
        ("own_experts", "loss", {"valid": "valid", "test": "test"}),
    ],
)
def test_progress_shows_the_quantity_of_the_first_column(recipe, quantity, names):
    run = make_plan(read(find(recipe))).trials()[0].run
    assert (run.shown, run.subsets) == (quantity, names)


def test_options_select_the_same_runs(tmp_path):
    recipe = tiny(tmp_path, TWO + "variants: {small: {steps: 10}}\n")
    plan = make_plan(read(tmp_path / "tiny.yaml", "small"), "bad", "tiny", "3,", 0.5, "cuda", Path("d"), Path("o"))
    assert plan.options() == (
        "--rows bad --on tiny --seeds 3, --steps-scale 0.5 --device cuda --data d --out o --variant small".split()
    )
    assert "--variant" not in make_plan(recipe).options()
    third = make_plan(recipe, steps_scale=1 / 3).options()
    assert float(third[third.index("--steps-scale") + 1]) == 1 / 3


# Data folders.


@pytest.mark.parametrize(
    "column,arguments,message",
    [
        ("type: long", "", None),
        ("type: many", "--accuracy-by types", None),
        ("type: many", "--accuracy-by=types", None),
        ("type: mayn", "--accuracy-by types", "columns.OOD.type: gen of .*tiny has no 'mayn': long, few, many"),
        ("type: long, at: best", "", "columns.OOD.type: dev of .*tiny has no 'long': long"),
        ("type: many", "", "the training of the row 'good' does not log 'many': add --accuracy-by types"),
    ],
)
def test_types_of_columns_are_there(column, arguments, message, tmp_path):
    text = TINY.replace("OOD: {subset: gen}", f"OOD: {{subset: gen, {column}}}")
    plan = planned(tmp_path, text.replace("--lr 3e-3", f"--lr 3e-3 {arguments}"), rows="good", data=tmp_path)
    subsets = {"gen": {"types": {"few": 3, "many": 5}}, "dev": {}, "valid": {}}
    made = {"groups": {"long": ["many"]}, "subsets": subsets, "request": {}}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "dataset.json").write_text(json.dumps(made))
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        plan.prepare()


SUBSETS = ("dev", "gen", "valid")


@pytest.mark.parametrize(
    "subset,message", [("gen", None), ("test", "analyses.masks: .*tiny has no subset 'test': dev, gen")]
)
def test_subsets_of_analyses_are_there(subset, message, tmp_path):
    """Before training: an analysis comes after it."""
    analyses = f"analyses: {{masks: 'masks {{checkpoint}} --evaluate {{tiny}}:dev,{{tiny}}:{subset}'}}\n"
    plan = planned(tmp_path, TINY + analyses, rows="good", data=tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "dataset.json").write_text(json.dumps({"subsets": dict.fromkeys(SUBSETS, {}), "request": {}}))
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        plan.prepare()


@pytest.mark.parametrize("plain", [True, False])
def test_by_length_needs_plain_text(plain, tmp_path):
    """Before training: the table comes after it."""
    text = TINY.replace("rows:\n", "  BLEU: {subset: gen, metric: bleu}\ngenerate: --beam 1\nrows:\n")
    text += "by_length: {baseline: good, tokenize: none, bounds: [2]}\n"
    plan = planned(tmp_path, text, rows="good", data=tmp_path)
    (tmp_path / "tiny" / "raw").mkdir(parents=True)
    (tmp_path / "tiny" / "dataset.json").write_text(json.dumps({"subsets": dict.fromkeys(SUBSETS, {}), "request": {}}))
    if plain:
        (tmp_path / "tiny" / "raw" / "gen.plain.tgt").write_text("a\n")
    with nullcontext() if plain else pytest.raises(UsageError, match="by_length: .*tiny has no plain text of gen, "):
        plan.prepare()


def test_subsets_of_data_are_there(tmp_path):
    """Before training: each training would fail by itself."""
    plan = planned(tmp_path, TINY, rows="good", data=tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "dataset.json").write_text(json.dumps({"subsets": {"dev": {}, "gen": {}}, "request": {}}))
    with pytest.raises(UsageError, match="data.tiny.subsets: .*tiny has no subset 'valid': dev, gen"):
        plan.prepare()


def test_a_missing_folder_is_made_as_the_recipe_says(tmp_path, monkeypatch, capfd):
    """In whichever folder --data is, and with nothing else."""
    monkeypatch.chdir(tmp_path)
    text = TINY.replace("ctl --order forward", "ctl --order backward --functions 4 --longest 4 --raw-only")
    plan = planned(tmp_path, text, data=Path("elsewhere/data"))
    plan.prepare()
    written = json.loads((tmp_path / "elsewhere" / "data" / "tiny" / "dataset.json").read_text())
    request = {"dataset": "ctl", "order": "backward", "functions": 4, "longest": 4}
    assert {key: written["request"][key] for key in request} == request
    command = "python -m data_prep ctl --order backward --functions 4 --longest 4 --raw-only --out elsewhere/data/tiny"
    assert f"{command}\n" in capfd.readouterr().out
    # It is there now, and is not made again.
    monkeypatch.setattr(plans.subprocess, "run", None)
    plan.prepare()
    assert capfd.readouterr().out == ""


def write_request(folder: Path, **request: object) -> None:
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps({"request": request}))


def test_published_numbers_never_stand_beside_other_data(tmp_path):
    """A folder of another request is refused before anything is trained."""
    write_request(tmp_path / "tiny", dataset="scan", split="length", cutoff=26)
    with pytest.raises(
        ValueError, match=r"the data in .*tiny differ from .*ctl --order forward.*: dataset scan instead"
    ):
        planned(tmp_path, data=tmp_path).prepare()


def test_data_with_further_options_are_other_data(tmp_path):
    """Those that a request has only if they are given."""
    text = TINY.replace("ctl --order forward", "ctl --order forward --functions 4 --longest 4 --raw-only")
    planned(tmp_path, text, data=tmp_path).prepare()
    with pytest.raises(ValueError, match="differ from .*ctl --order forward`: functions 4 instead of None, longest 4"):
        planned(tmp_path, data=tmp_path).prepare()


def test_data_with_another_order_of_words_are_the_same_data(tmp_path):
    write_request(tmp_path / "data", dataset="ctl", order="forward", seed=0, raw_only=False, reordered_like={})
    request = ["ctl", "--order", "forward", "--seed", "0"]
    plans.check_data(tmp_path / "data", request)
    with pytest.raises(ValueError, match="differ from .*: seed 0 instead of 1"):
        plans.check_data(tmp_path / "data", [*request[:-1], "1"])


def test_data_of_a_dataset_of_the_user(tmp_path, monkeypatch):
    """Its package is named in ``prepare``: the request is compared as for other datasets."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planned_data").mkdir()
    (tmp_path / "planned_data" / "__init__.py").write_text(
        "from dataclasses import dataclass\n"
        "from data_prep.dataset import Dataset, Options, option\n\n"
        "@dataclass(frozen=True)\nclass MineOptions(Options):\n    size: int = option(1, 'size', type=int)\n\n"
        "class Mine(Dataset):\n    name = title = 'mine'\n    options = MineOptions\n    build = None\n\n"
        "DATASETS = (Mine(),)\n"
    )
    request = ["--user-dir", str(tmp_path / "planned_data"), "mine", "--size", "2"]
    write_request(tmp_path / "data", dataset="mine", size=2, raw_only=False)
    plans.check_data(tmp_path / "data", request)
    with pytest.raises(ValueError, match="differ from .*: size 2 instead of 3"):
        plans.check_data(tmp_path / "data", [*request[:-1], "3"])
    write_request(tmp_path / "other", dataset="scan", split="length")
    with pytest.raises(ValueError, match="differ from .*mine --size 2`: dataset scan instead of mine"):
        plans.check_data(tmp_path / "other", request)
    del sys.modules["planned_data"]


@pytest.mark.parametrize("content", ["", "[", "[]", "3", '{"request": 3}'])
def test_a_damaged_description_of_data_is_named(content, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "dataset.json").write_text(content)
    with pytest.raises(UsageError, match="tiny/dataset.json cannot be read .*: prepare the data in a new folder"):
        planned(tmp_path, data=tmp_path).prepare()


def test_data_that_need_a_file(tmp_path):
    plan = make_plan(read(find("park_kim_table_5")), data=tmp_path)
    with pytest.raises(UsageError, match="mathematics --module arithmetic__add_or_sub --archive FILE --out"):
        plan.prepare()


def test_data_that_cannot_be_made(tmp_path, capfd):
    plan = planned(tmp_path, TINY.replace("ctl --order forward", "scan --split nothing"), data=tmp_path / "data")
    with pytest.raises(UsageError, match="the data 'tiny' were not made: python -m data_prep scan --split nothing"):
        plan.prepare()
    assert "invalid choice: 'nothing'" in capfd.readouterr().err

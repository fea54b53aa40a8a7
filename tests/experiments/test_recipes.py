"""Recipes: strict reading; every shipped one parses, resolves and is a model."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import statistics
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.__main__ import DATASETS, make_parser
from data_prep.dataset import DataError
from fairseq_sg.experiments import recipe, report, schema
from fairseq_sg.experiments.plan import check_data, make_plan
from fairseq_sg.experiments.results import Results

#: (recipe, variant)
ALL = [(name, variant) for name in recipe.names() for variant in ("", *recipe.variants(recipe.find(name)))]


@cache
def shipped(name: str, variant: str = "") -> schema.Recipe:
    return recipe.read(recipe.find(name), variant)


SMALL = """\
title: A small table
source: Nobody 1999, Table 0
data:
  short: {folder: short, prepare: scan --split length, subsets: [valid, gen]}
  long: {folder: long, prepare: scan --split simple, subsets: [test]}
steps: 100
validate_every: 10
batch_size_valid: 16
seeds: 5
unit: percent
checkpoint: last
train: --task sg_translation --arch sg_transformer_scan
columns:
  IID: {subset: valid, at: end}
  OOD: {subset: gen}
  all: {subset: test}
rows:
  plain:
    arguments: --depth shared
    published:
      short: {IID: "99.8 ± 0.1", OOD: Fail}
  other:
    label: another
    missing: it is of another paper
    data: [long]
    published:
      long: {all: "46.9"}
chosen: [the seeds]
"""


def read(tmp_path: Path, text: str, variant: str = "", name: str = "small") -> schema.Recipe:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    return recipe.read(path, variant)


ANALYSED = SMALL.replace(
    "rows:\n",
    "  kept: {subset: gen, metric: analysis, value: control/kept_of_all/share}\n"
    "analyses:\n  control: masks {checkpoint} --data {long} --seed {seed} --device {device}\n"
    "  overlap: overlap a={control}.npz b={control}.npz\nrows:\n",
)


def test_analyses_have_the_paths_of_the_run(tmp_path):
    found = read(tmp_path, ANALYSED)
    assert found.used_by_analyses() == ["long"]
    plan = make_plan(found, on="short", seeds="3,", data=Path("data"), out=Path("out"))
    assert plan.used() == ["short", "long"]
    (trial,) = plan.trials()
    run = trial.run
    assert run.analyses == {
        "control": "masks out/plain-short-seed3/checkpoint_last.pt --data data/long --seed 3 --device cpu "
        "--format none --out out/plain-short-seed3/control".split(),
        "overlap": "overlap a=out/plain-short-seed3/control.npz b=out/plain-short-seed3/control.npz "
        "--format none --out out/plain-short-seed3/overlap".split(),
    }
    assert run.analysed == ("control/kept_of_all/share",)
    assert run.outputs()[Path("out/plain-short-seed3/overlap.log")][:3] == ["fairseq-sg", "analysis", "overlap"]


def test_braces_that_hold_no_name_are_text(tmp_path):
    """Those of a dict, and single ones in an input."""
    more = """ --model-overrides "{'encoder_layers': 4}" --input "a { b } {seed}" """
    found = read(tmp_path, ANALYSED.replace("masks {checkpoint}", ">-\n    masks {checkpoint}" + more))
    (trial,) = make_plan(found, on="short", seeds="3,", data=Path("data"), out=Path("out")).trials()
    assert trial.run.analyses["control"][2:6] == ["--model-overrides", "{'encoder_layers': 4}", "--input", "a { b } 3"]


def test_a_task_as_one_word(tmp_path):
    found = read(tmp_path, SMALL.replace("--task sg_translation", "--task=sg_translation"))
    assert "--task=sg_translation" in found.arguments_of("plain", "short")


@pytest.mark.parametrize(
    "before,after,message",
    [
        ("{long}", "{far}", "analyses.control: names 'far', which is not among the names in braces: checkpoint, seed"),
        ("{control}.npz b", "{overlap}.npz b", "analyses.overlap: names 'overlap'"),
        ("--seed {seed}", "--out x", "analyses.control: has --out, which experiments sets itself"),
        ("value: control/", "value: far/", "columns.kept.value: names 'far', which is not among the analyses"),
        (", value: control/kept_of_all/share", "", "columns.kept.value: is for the metric 'analysis', which needs it"),
        (", value:", ", at: end, value:", "columns.kept.at: an analysis is measured only at the checkpoint"),
        (", value:", ", model_overrides: '{}', value:", "columns.kept.model_overrides: are for accuracy, loss or an"),
        ("  overlap: o", "  long: o", "analyses: has the name 'long'"),
        ("  overlap: o", "  train: o", "analyses: has the name 'train'"),
        ("  overlap: o", "  mask.jump: o", "analyses: has the name 'mask.jump'"),
        ("  overlap: o", "  generate-gen: o", "analyses: has the name 'generate-gen'"),
    ],
)
def test_wrong_analyses(before, after, message, tmp_path):
    with pytest.raises(schema.RecipeError, match=re.escape(message)):
        read(tmp_path, ANALYSED.replace(before, after))


@pytest.mark.parametrize("name,variant", [(n, v) for n, v in ALL if shipped(n, v).analyses])
def test_the_analyses_of_a_shipped_recipe_are_commands(name, variant):
    """Every value is one that the analysis of its name writes into its JSON, by the first key."""
    from fairseq_sg.analysis.__main__ import make_parser as parser_of_analyses

    found = shipped(name, variant)
    (trial, *_) = make_plan(found).trials()
    keys = {
        "masks": {"kept_of_all", "evaluation"},
        "overlap": {"total", "mean_of_pairs", "tensors"},
        "accuracy": {"subsets"},
        "regression": {"subsets", "scales"},
    }
    for words in trial.run.analyses.values():
        assert parser_of_analyses().parse_args(words).command in keys
    for path in trial.run.analysed:
        analysis, key, *_ = path.split("/")
        assert key in keys[trial.run.analyses[analysis][0]]


def test_a_recipe_is_read(tmp_path):
    found = read(tmp_path, SMALL)
    plain, other = found.rows["plain"], found.rows["other"]
    assert (found.name, found.variant, found.full_name) == ("small", "", "small")
    assert (found.seeds, found.statistic, found.generate) == (5, "mean", "")
    expected = ["--task", "sg_translation", "--arch", "sg_transformer_scan", "--depth", "shared"]
    assert found.arguments_of("plain", "short") == expected and plain.label == "plain"
    assert found.data_of("plain") == ["short", "long"] and found.steps_of("plain") == 100
    assert found.published("plain", "short", "IID") == schema.Published("99.8 ± 0.1", 99.8, 0.1, 0.05)
    assert found.published("plain", "short", "OOD").fail and found.published("plain", "long", "all") is None
    assert found.trained == ["plain"] and other.label == "another" and found.data_of("other") == ["long"]
    assert found.published("other", "long", "all").std is None
    assert found.columns["IID"] == schema.Column("valid", "accuracy", "end")
    assert [list(found.columns_of(data)) for data in found.data] == [["IID", "OOD"], ["all"]]


def test_what_a_results_file_keeps_of_a_recipe_is_the_recipe(tmp_path):
    """With texts of ``define`` put in, and the rows of ``only``."""
    text = SMALL.replace("--depth shared", "${define.deep}") + "define: {deep: --depth shared}\nonly: [plain]\n"
    found = read(tmp_path, text)
    kept = json.loads(json.dumps(found.as_dict()))
    again = recipe.from_dict(kept)
    assert (
        again.as_dict() == kept and list(again.rows) == ["plain"] and again.rows["plain"].arguments == "--depth shared"
    )
    with pytest.raises(schema.RecipeError, match="^x.json: recipe: steps: is -1: it must be above 0"):
        recipe.from_dict(kept | {"steps": -1}, "x.json: recipe")


SIZES = """\
title: A model in two sizes
source: Nobody 1999, Table 1
data:
  small: {folder: text, prepare: text --unit bytes --input FILE, subsets: [test], arguments: --batch-size 8 --lr 2}
  large: {folder: text, prepare: text --unit bytes --input FILE, subsets: [test], arguments: --batch-size 9 --lr 3}
steps: 100
validate_every: 10
batch_size_valid: 4
seeds: 1
unit: fraction
checkpoint: last
train: --task sg_language_modeling --lr 1
columns:
  ppl: {subset: test, metric: perplexity, data: [small]}
  bits: {subset: test, metric: loss, data: [large]}
rows:
  plain:
    arguments: --depth shared
    published:
      small: {ppl: "8.00"}
      large: {bits: "2.0"}
  fast:
    arguments: --lr 4
chosen: [all of it]
"""


def test_data_with_arguments_and_columns_of_their_own(tmp_path):
    """Two sizes of a model: one folder, with arguments between those of all rows and those of the row."""
    found = read(tmp_path, SIZES)
    plan = make_plan(found)
    trained = {(t.row, t.data): " ".join(t.run.train_command()) for t in plan.trials()}
    assert "--lr 1 --batch-size 8 --lr 2 --depth shared --batch-size-valid 4" in trained["plain", "small"]
    assert "--lr 1 --batch-size 9 --lr 3 --lr 4 --batch-size-valid 4" in trained["fast", "large"]
    # A perplexity is shown as the loss in bits, so under another name than its column's.
    assert [t.run.subsets for t in plan.trials()] == [{"test": "test"}, {"test": "bits"}] * 2
    assert len({tuple(plan.prepare_command(data)) for data in plan.used()}) == 1

    result = {"steps": 100, "accuracy": {}, "loss": {"test": 3.0}, "generated": {}, "curve": []}
    records = [{"row": "plain", "data": data, "seed": 1, "result": result} for data in ("small", "large")]
    records += [{"row": "fast", "data": data, "seed": 1} for data in ("small", "large")]
    lines = report.lines(Results(found, 1.0, records))
    assert [list(line.cells) for line in lines] == [["ppl"], ["bits"]] * 2
    assert report.table(found, lines)[1:3] == [
        ["plain", "small", "1", "100", "8.00", "8.00", "", "", "within one std"],
        ["plain", "large", "1", "100", "", "", "3.00", "2.0", "above"],
    ]
    legend = report.legend(found)
    assert legend[0] == "ppl: perplexity per token, on `test` of the last checkpoint."
    assert legend[1] == "bits: loss in bits per token, on `test` of the last checkpoint."
    assert "The paper has 1 seed." in legend and not any("accuracy" in sentence for sentence in legend)


def refused(tmp_path: Path, text: str, *parts: str, variant: str = "") -> None:
    """The recipe is refused by one line, which names the file, then has all ``parts`` in their order."""
    with pytest.raises(schema.RecipeError) as error:
        read(tmp_path, text, variant)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'small.yaml'}: ") and "\n" not in message
    assert re.search(".*".join(map(re.escape, parts)), message), message


@pytest.mark.parametrize(
    "old,new,parts",
    [
        ("arguments: --batch-size 8", "arguments: --seed 8", ["data.small.arguments: has --seed, which experiments"]),
        (
            "arguments: --batch-size 9 --lr 3",
            "arguments: [--lr, 3]",
            ["data.large.arguments: Cannot convert", "string"],
        ),
        (
            "loss, data: [large]",
            "loss, data: [lage]",
            ["columns.bits.data: names 'lage'", "not among the data: small, large"],
        ),
        ("loss, data: [large]", "loss, data: large", ["columns.bits.data: must be a list"]),
        (
            'large: {bits: "2.0"}',
            'large: {ppl: "2.0"}',
            ["rows.plain.published.large: names 'ppl'", "columns", ": bits"],
        ),
    ],
)
def test_what_is_wrong_in_data_with_arguments_is_named(old, new, parts, tmp_path):
    assert SIZES.count(old) == 1
    refused(tmp_path, SIZES.replace(old, new), *parts)


@pytest.mark.parametrize(
    "old,new,parts",
    [
        ("steps: 100\n", "", ["steps: is missing"]),
        ("steps: 100", "steps: many", ["steps: Value 'many'", "could not be converted to Integer"]),
        ("steps: 100", "steps: true", ["steps: Value 'True'", "could not be converted to Integer"]),
        ("steps: 100", "steps: 1.5", ["steps: Value '1.5'", "could not be converted to Integer"]),
        ("steps: 100", "steps: 0", ["steps: is 0: it must be above 0"]),
        ("steps: 100", "stepps: 100", ["stepps: is unknown: choose from title, source, data", "steps", "variants"]),
        ("seeds: 5", "seeds: 5\nsteep: 1", ["steep: is unknown: choose from title", "extends, variants"]),
        ("seeds: 5", "seeds: 5\nname: x", ["the keys 'name' and 'variant' are unknown"]),
        ("seeds: 5", "seeds: 5\nstatistic: mode", ["statistic: is 'mode': choose from mean, median"]),
        ("seeds: 5", "seeds: 5\npublished_std: se", ["published_std: is 'se': choose from sample, population"]),
        ("seeds: 5", "seeds: 1\npublished_std: population", ["published_std: is that of a population, which needs"]),
        ("seeds: 5", "seeds: 5\npublished_seeds: 0", ["published_seeds: is 0: it must be above 0"]),
        ("seeds: 5", "seeds: 5\nseeds: 6", ["duplicate key seeds", "line 10"]),
        ("  other:\n", "  plain:\n", ["duplicate key plain", "line 22"]),
        ("  plain:\n", "  22:\n", ["rows.22: Key 22 (int)", "str"]),
        ("  plain:\n", "  no:\n", ["rows.False: Key False (bool)", ": put it in quotes"]),
        ("  plain:\n", "  a/b:\n", ["rows: has the name 'a/b': use only letters, digits and"]),
        ("  plain:\n", "  all:\n", ["rows: has the name 'all', which stands for every name in --rows"]),
        (
            "    label: another\n",
            "    lable: another\n",
            ["rows.other.lable: is unknown: choose from label, arguments"],
        ),
        (
            "arguments: --depth shared",
            "arguments: [--depth, shared]",
            ["rows.plain.arguments: Cannot convert", "string"],
        ),
        (
            "arguments: --depth shared",
            "arguments: --seed 3",
            ["rows.plain.arguments: has --seed, which experiments sets"],
        ),
        ("arguments: --depth shared", "arguments: --aux '{", ["rows.plain.arguments: cannot be split into words"]),
        (
            "    arguments: --depth shared\n",
            "",
            ["rows.plain.arguments: is needed (\"\" for those of 'train' alone), or 'evaluates'"],
        ),
        (
            "    missing:",
            "    arguments: --x\n    missing:",
            ["rows.other.arguments: is needed (", "or 'evaluates'", "'missing' with the reason", "one of them"],
        ),
        (
            "    missing:",
            "    evaluates: plain\n    missing:",
            ["rows.other.arguments: is needed (", "or 'evaluates'", "one of them"],
        ),
        ("rows:\n", "rows:\n  more: {evaluates: other}\n", ["rows.more.evaluates: is 'other': choose from plain"]),
        (
            "rows:\n",
            "rows:\n  more: {evaluates: plain}\n",
            ["rows.more.model_overrides: are needed", "the row 'plain'"],
        ),
        (
            "rows:\n",
            "rows:\n  more: {evaluates: plain, model_overrides: \"{'a': 1}\", steps: 3}\n",
            ["rows.more.steps: is that of the row 'plain'"],
        ),
        (
            "rows:\n",
            "rows:\n  more: {evaluates: plain, model_overrides: \"{'a': 1}\", published: {long: {IID: '.9'}}}\n",
            ["rows.more.published.long: names 'IID'", "not among the columns of these data: all"],
        ),
        ("--task sg_translation --arch", "--arch", ["rows.plain.arguments: have no --task, nor has 'train'"]),
        ("data: [long]", "data: [longer]", ["rows.other.data: names 'longer'", "not among the data: short, long"]),
        ("data: [long]", "data: long", ["rows.other.data: must be a list"]),
        (
            "data: [long]",
            "data: [short]",
            ["rows.other.published: names 'long'", "not among the data of the row: short"],
        ),
        ("{all: ", "{IID: ", ["rows.other.published.long: names 'IID'", "not among the columns of these data: all"]),
        ('"46.9"', "46.9", ["rows.other.published.long: Value 46.9 (float)", "'str'"]),
        ('"46.9"', '"46,9"', ["rows.other.published.long.all: is '46,9': it must be like '.21 ± .01'"]),
        ("at: end", "at: end, digits: 3", ["columns.IID.digits: is 3: it is for the metric 'analysis'"]),
        ("at: end", "at: 101", ["columns.IID.at: is 101, after the last step of every row"]),
        ("subset: gen}", "subset: gen, model_overrides: '{a'}", ["columns.OOD.model_overrides: are '{a': give a dict"]),
        (
            "subset: test}",
            "subset: test, data: [long, short]}",
            ["columns.all.subset: is 'test', which the data 'short' do not have"],
        ),
        (
            "rows:\n",
            "rows:\n  more: {label: plain, arguments: --lr 3}\n",
            ["rows.plain.label: is 'plain', as that of 'more': nothing tells them apart"],
        ),
        ("subset: test}", "subset: tset}", ["columns.all.subset: is 'tset', which no data has"]),
        (
            "at: end",
            "at: 0",
            ["columns.IID.at: is 0: it must be a number of steps or one of checkpoint, end, best, peak"],
        ),
        ("at: end", "at: 2.5", ["columns.IID.at: Value '2.5'", "int, str"]),
        (
            "at: end",
            "metric: bits",
            ["columns.IID.metric: is 'bits': choose from accuracy, loss, word_error, mean_word_error, mse_last"],
        ),
        ("subset: gen}", "subset: gen, metric: bleu}", ["generate: is for a column with the metric 'bleu'"]),
        ("at: end", "at: end, metric: bleu", ["columns.IID.at: BLEU is measured only at the checkpoint"]),
        ("at: end", "at: end, generate: --beam 9", ["columns.IID.generate: is for the metrics bleu and length_ratio"]),
        ("at: end", "at: end, model_overrides: '{}'", ["columns.IID.model_overrides: are for accuracy, loss or"]),
        (
            "unit: percent",
            "unit: percent\ncheckpoint_metric: bleu",
            ["checkpoint_metric: is 'bleu': choose from accuracy"],
        ),
        ("unit: percent", "unit: percent\ncheckpoint_metric: loss", ["checkpoint_metric: is for 'checkpoint: best'"]),
        (
            "checkpoint: last",
            "checkpoint: best\ncheckpoint_metric: relative_l2",
            ["checkpoint_metric: is 'relative_l2', which --task sg_translation", "choose from accuracy, loss"],
        ),
        ("folder: short", "folder: ..", ["data.short.folder: is '..': it must be the name of one folder"]),
        ("prepare: scan --split length", "prepare: ''", ["data.short.prepare: is empty: give the arguments of"]),
        ("split length", "split 'length", ["data.short.prepare: cannot be split into words"]),
        ("folder: short", "folder: a/b", ["data.short.folder: is 'a/b': it must be the name of one folder"]),
        ("length,", "length --out x,", ["data.short.prepare: has --out, which experiments sets itself"]),
        ("length,", "length --out=x,", ["data.short.prepare: has --out, which experiments sets"]),
        ("length,", "length --help,", ["data.short.prepare: asks for help, and makes no data: remove it"]),
        ("length,", "length -h,", ["data.short.prepare: asks for help"]),
        ("chosen: [the seeds]", "define: &x {a: *x}", ["is nested without end: does an alias"]),
        ("unit: percent", "unit: dB", ["unit: is 'dB': choose from fraction, percent"]),
        ("chosen: [the seeds]", "chosen: the seeds", ["chosen: must be a list"]),
        ("chosen: [the seeds]", "chosen: [a seed: 3]", ["chosen: {'a seed': 3} is no text: quote a sentence"]),
        ("chosen: [the seeds]", "variants: [small]", ["variants: must be a mapping (key: value), not ['small']"]),
        ("chosen: [the seeds]", "variants: {small: 3}", ["variants.small: must be a mapping (key: value), not 3"]),
        ("chosen: [the seeds]", "only: [plane]", ["only: there is no row 'plane': plain, other"]),
        ("title: A small table", "title: [", ["while parsing a flow sequence"]),
        (SMALL, "- a list\n", ["must be a mapping (key: value), not ['a list']"]),
        ("subset: gen", "metric: word_error, subset: gen", [
            ".metric: is 'word_error', which --task sg_translation of the row", "choose from accuracy, loss",
        ]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(old, new, parts, tmp_path):
    assert SMALL.count(old) == 1 or old == "steps: 100"
    refused(tmp_path, SMALL.replace(old, new, 1), *parts)


@pytest.mark.parametrize(
    "text",
    [
        "--seed=7", "--max_update 3", "--save-dir x", "--cpu", "--valid_subset=gen", "--restore-file x",
        "--reset-optimizer", "--reset_dataloader", "--no-save",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "place,key", [("train: ", "train"), ("arguments: ", "rows.plain.arguments"), ("seeds: 5\n", "override")]
)
def test_options_that_experiments_sets_are_refused_in_every_form(place, key, text, tmp_path):
    """As one word with "=", and with underscores, as fairseq's commands take them."""
    new = f"{place}override: {text}\n" if key == "override" else f"{place}{text} "
    refused(tmp_path, SMALL.replace(place, new, 1), f"{key}: has {text.split()[0]}, which experiments sets itself")


# Files on files.


def test_a_recipe_that_extends_another(tmp_path):
    """Mappings are merged, all else is replaced, and chosen sentences are added."""
    read(tmp_path, SMALL)
    above = f"""\
extends: {tmp_path / "small.yaml"}
title: Another table
data:
  short: {{subsets: [valid, gen, test]}}
rows:
  plain: {{label: not so plain}}
  more: {{arguments: --lr 1}}
chosen: [all of it]
"""
    found = read(tmp_path, above, name="above")
    assert (found.title, found.name, found.steps, found.chosen) == (
        "Another table", "above", 100, ["the seeds", "all of it"],
    )  # fmt: skip
    assert found.data["short"].subsets == ["valid", "gen", "test"] and found.data["short"].folder == "short"
    assert list(found.rows) == ["plain", "other", "more"] and found.rows["more"].arguments == "--lr 1"
    assert (found.rows["plain"].label, found.rows["plain"].arguments) == ("not so plain", "--depth shared")
    assert found.published("plain", "short", "IID").mean == 99.8


def test_a_file_is_named_from_the_folder_of_the_one_that_extends_it(tmp_path, monkeypatch):
    """Wherever the user stands."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    read(tmp_path / "one", SMALL)
    monkeypatch.chdir(tmp_path / "other")
    assert read(tmp_path / "other", "extends: ../one/small.yaml\nsteps: 7\n", name="above").steps == 7
    assert recipe.read(recipe.find("above.yaml")).seeds == 5


def test_null_removes_what_the_base_has(tmp_path):
    """A row, a column, one of the published numbers; in a variant too."""
    read(tmp_path, SMALL.replace("  plain:\n", "  last: {arguments: --lr 1}\n  plain:\n"))
    above = f"extends: {tmp_path / 'small.yaml'}\ncolumns: {{all: null}}\n"
    above += "rows: {other: null, plain: {published: {short: {OOD: null}}}}\nvariants: {one: {rows: {last: null}}}\n"
    found = read(tmp_path, above, name="above")
    assert list(found.rows) == ["last", "plain"] and list(found.columns) == ["IID", "OOD"]
    assert found.rows["plain"].published == {"short": {"IID": "99.8 ± 0.1"}}
    assert list(read(tmp_path, above, "one", name="above").rows) == ["plain"]


def test_a_base_is_no_recipe_but_can_be_extended():
    bases = sorted(path.stem for path in recipe.FOLDER.glob("_*.yaml"))
    assert bases and not set(bases) & set(recipe.names())
    assert recipe.find(bases[0]).is_file()


def test_a_recipe_extends_one_of_ours_by_name(tmp_path):
    found = read(tmp_path, "extends: park_kim_table_4\nsteps: 7\n")
    base = shipped("park_kim_table_4")
    assert found.steps == 7 and found.rows == base.rows and found.name == "small"


def test_the_name_of_a_recipe_of_ours_is_refused_for_another(tmp_path):
    ours = recipe.find("quickstart")
    same, other = tmp_path / "quickstart.yaml", tmp_path / "other" / "quickstart.yaml"
    same.write_bytes(ours.read_bytes())
    assert recipe.read(same).as_dict() == recipe.read(ours).as_dict()
    other.parent.mkdir()
    other.write_text("extends: quickstart\ntitle: longer\nsteps: 10000\n")
    with pytest.raises(recipe.RecipeError, match="quickstart.yaml: quickstart is the name of another recipe.*rename"):
        recipe.read(other)


@pytest.mark.parametrize("row", ["mine", "linear_l2"])
def test_a_row_that_only_would_leave_out_is_named(row, tmp_path):
    """A new one, or a misspelt one."""
    text = f"extends: park_kim_table_4\nrows: {{{row}: {{arguments: --qk-norm l2}}}}\n"
    refused(tmp_path, text, f"rows: {row!r} is not in the 'only' that is extended (transformer, ", "give 'only' here")
    assert list(read(tmp_path, f"{text}only: [linear, {row}]\n").rows) == ["linear", row]


def test_a_variant_extends_nothing(tmp_path):
    text = SMALL.replace("chosen: [the seeds]", "variants: {one: {extends: x}}")
    refused(tmp_path, text, "extends: is for a recipe, not for a variant", variant="one")


def test_a_circle_by_another_spelling_is_refused(tmp_path):
    base = f"../{tmp_path.name}/small.yaml"
    refused(tmp_path, f"extends: {base}\n", "extends: ", "extends itself, by way of nothing")


@pytest.mark.parametrize("chain", [["small"], ["small", "b"], ["small", "b", "c"]])
def test_a_circle_of_files_is_refused(chain, tmp_path):
    for name, base in zip(chain, [*chain[1:], chain[0]], strict=True):
        (tmp_path / f"{name}.yaml").write_text(f"extends: {tmp_path / base}.yaml\n")
    by_way = " and ".join(f"{name}.yaml" for name in chain[1:]) or "nothing"
    refused(tmp_path, (tmp_path / "small.yaml").read_text(), "extends: ", f"extends itself, by way of {by_way}")


def test_a_base_that_is_not_there_is_named(tmp_path):
    refused(tmp_path, "extends: park_kim\n", "extends: there is no recipe 'park_kim': choose from ", "park_kim_table_4")


VARIED = (
    SMALL
    + """\
variants:
  small:
    title: A smaller table
    steps: 10
    override: --lr 2
    only: [plain]
    rows:
      plain: {published: {short: {OOD: "50.0"}}}
  as_published:
"""
)


def test_a_variant_has_its_own_published_numbers_alone(tmp_path):
    base, small, same = (read(tmp_path, VARIED, variant) for variant in ("", "small", "as_published"))
    assert base.published("plain", "short", "IID").mean == 99.8 and list(base.rows) == ["plain", "other"]
    assert (small.full_name, small.title, small.steps) == ("small-small", "A smaller table", 10)
    assert small.rows["plain"].published == {"short": {"OOD": "50.0"}} and list(small.rows) == ["plain"]
    assert same.steps == 100 and not same.has_published and list(same.rows) == ["plain", "other"]
    assert recipe.variants(tmp_path / "small.yaml").keys() == {"small", "as_published"}


def test_variants_of_the_base_are_those_of_a_file_that_extends_it(tmp_path):
    read(tmp_path, VARIED)
    above = f"extends: {tmp_path / 'small.yaml'}\nvariants:\n  small: {{steps: 11}}\n  tiny: {{steps: 1}}\n"
    found = read(tmp_path, above, "small", name="above")
    assert (found.steps, found.override, found.full_name) == (11, "--lr 2", "above-small")
    assert read(tmp_path, above, "tiny", name="above").steps == 1 and read(tmp_path, above, name="above").steps == 100


def test_an_unknown_variant_is_answered_with_those_that_there_are(tmp_path):
    refused(tmp_path, VARIED, "there is no variant 'big': choose from small, as_published", variant="big")
    refused(tmp_path, SMALL, "there is no variant 'big': it has none", variant="big")


def test_override_comes_last(tmp_path):
    """After the arguments of all rows, of the data and of the row."""
    found = read(tmp_path, SIZES.replace("seeds: 1\n", "seeds: 1\noverride: --lr 5 --batch-size 1\n"))
    expected = "--task sg_language_modeling --lr 1 --batch-size 9 --lr 3 --lr 4 --lr 5 --batch-size 1"
    assert found.arguments_of("fast", "large") == expected.split()


def test_texts_that_are_defined_once(tmp_path):
    """A variant may change the text; an unknown one is an error."""
    text = SMALL.replace("--depth shared", "${define.deep} --lr 1") + "define: {deep: --depth shared}\n"
    text += "variants: {flat: {define: {deep: --depth separate}}}\n"
    assert read(tmp_path, text).rows["plain"].arguments == "--depth shared --lr 1"
    assert read(tmp_path, text, "flat").rows["plain"].arguments == "--depth separate --lr 1"
    refused(tmp_path, text.replace("define: {deep:", "define: {dep:"), "rows.plain.arguments: ", "define.deep")


# Rows with an x.

SWEEP = """\
title: A sweep
source: Nobody 1999
data:
  tiny: {folder: tiny, prepare: scan, subsets: [valid, gen]}
steps: 40
validate_every: 20
batch_size_valid: 4
seeds: 2
unit: percent
checkpoint: last
train: --task sg_translation
columns:
  IID: {subset: valid}
  OOD: {subset: gen, metric: loss}
x_axis: {label: weight λ, scale: log}
rows:
  none:
    label: without
    arguments: ""
  high:
    x: 1e-1
    arguments: --orthogonality-weight 1e-1
  low:
    x: 1
    arguments: --orthogonality-weight 1
"""


def test_an_x_is_read(tmp_path):
    found = read(tmp_path, SWEEP)
    assert found.x_axis == schema.XAxis("weight λ", "log")
    assert {name: row.x for name, row in found.rows.items()} == {"none": None, "high": 0.1, "low": 1.0}
    assert read(tmp_path, SWEEP.replace(", scale: log", "")).x_axis.scale == "linear"


@pytest.mark.parametrize(
    "old,new,parts",
    [
        ("x: 1e-1", "x: much", ["rows.high.x: Value 'much'", "could not be converted to Float"]),
        ("x: 1e-1", "x: yes", ["rows.high.x: Value 'True'", "could not be converted to Float"]),
        ("x: 1e-1", "x: .nan", ["rows.high.x: is nan: it must be finite"]),
        ("x: 1e-1", "x: -.inf", ["rows.high.x: is -inf: it must be finite"]),
        ("x: 1e-1", "x: 0", ["x_axis.scale: is log, but the x of the row 'high' is 0: it must be above 0"]),
        ("x: 1e-1", "x: 1.0", ["x_axis: has two rows with the same x, 1: 'high' and 'low'"]),
        ("    x: 1e-1\n", "", ["x_axis: needs at least two rows with an x"]),
        ("x_axis: {label: weight λ, scale: log}\n", "", ["x_axis: is missing: the row 'high' has an x, which"]),
        ("scale: log", "scale: lg", ["x_axis.scale: is 'lg': choose from linear, log"]),
        ("scale: log", "base: 2", ["x_axis.base: is unknown: choose from label, scale"]),
        ("label: weight λ, ", "", ["x_axis.label: is missing"]),
        ("{label: weight λ, scale: log}", "λ", ["x_axis: "]),
    ],
)
def test_what_is_wrong_with_an_x_is_named(old, new, parts, tmp_path):
    assert SWEEP.count(old) == 1
    refused(tmp_path, SWEEP.replace(old, new), *parts)


BY_LENGTH = SWEEP.replace("x_axis:", "column_axis:").replace("    x: 1e-1\n", "").replace("    x: 1\n", "")
BY_LENGTH = BY_LENGTH.replace("IID: {subset: valid}", "L10: {subset: gen, type: length_10, x: 10}")
BY_LENGTH = BY_LENGTH.replace("OOD: {subset: gen, metric: loss}", "L20: {subset: gen, type: length_20, x: 20}")


def test_columns_of_types_are_read(tmp_path):
    found = read(tmp_path, BY_LENGTH)
    assert found.column_axis == schema.XAxis("weight λ", "log")
    assert found.columns["L20"] == schema.Column("gen", type="length_20", x=20.0)


@pytest.mark.parametrize(
    "old,new,parts",
    [
        ("x: 10}", "x: 20}", ["column_axis: has two columns with the same x, 20: 'L10' and 'L20'"]),
        ("x: 10}", "x: -1}", ["column_axis.scale: is log, but the x of the column 'L10' is -1"]),
        ("column_axis: {label: weight λ, scale: log}\n", "", ["column_axis: is missing: the column 'L10' has an x"]),
        (", x: 10}", "}", ["column_axis: needs at least two columns with an x"]),
        (" type: length_10,", " metric: loss,", ["column_axis: has columns of different metrics: accuracy, loss"]),
        ("type: length_10,", "type: length_10, metric: loss,", ["columns.L10.type: is for accuracy"]),
        ("x: 10}", "x: 10, at: beginning}", ["columns.L10.at: is 'beginning'"]),
    ],
)
def test_what_is_wrong_with_columns_of_types_is_named(old, new, parts, tmp_path):
    assert BY_LENGTH.count(old) == 1
    refused(tmp_path, BY_LENGTH.replace(old, new), *parts)


def test_one_axis_is_enough(tmp_path):
    refused(
        tmp_path,
        SWEEP.replace("x_axis:", "column_axis: {label: length}\nx_axis:")
        .replace("{subset: valid}", "{subset: valid, x: 1}")
        .replace("metric: loss}", "x: 2}"),
        "column_axis: cannot be drawn beside an x_axis",
    )


# Translations by length.

TRANSLATION = """\
title: A tiny translation
source: nobody
data:
  tiny: {folder: tiny, prepare: parallel --src SRC --tgt TGT, subsets: [test, gen]}
steps: 4
validate_every: 2
batch_size_valid: 16
seeds: 2
unit: percent
checkpoint: last
generate: --beam 2
train: --task sg_translation
columns:
  short: {subset: test, metric: bleu}
  long: {subset: gen, metric: bleu}
by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}
rows:
  softmax: {label: soft, arguments: ""}
  relative: {arguments: --encoder-attention relative}
"""


def test_by_length_of_a_recipe(tmp_path):
    found = read(tmp_path, TRANSLATION).by_length
    assert found == schema.ByLength("softmax", [2, 6], "none")
    plain = TRANSLATION.replace("by_length: {baseline: softmax, tokenize: none, bounds: [2, 6]}\n", "")
    assert read(tmp_path, plain).by_length is None
    default = read(tmp_path, TRANSLATION.replace("tokenize: none, ", "")).by_length
    assert default.tokenize == "13a"


@pytest.mark.parametrize(
    "old,new,parts",
    [
        ("baseline: softmax", "baseline: soft", ["by_length.baseline: is 'soft': choose from softmax, relative"]),
        ("tokenize: none", "tokenize: moses", ["by_length.tokenize: is 'moses': choose from 13a, none, char"]),
        ("[2, 6]", "[6, 2]", ["by_length.bounds: must be whole numbers above 0, ascending, not [6, 2]"]),
        ("[2, 6]", "[0, 2]", ["by_length.bounds: must be whole numbers above 0"]),
        ("[2, 6]", "[]", ["by_length.bounds: must be whole numbers above 0"]),
        ("[2, 6]", "[2, 2]", ["by_length.bounds: must be whole numbers above 0"]),
        ("[2, 6]", "[true]", ["by_length.bounds", "Integer"]),
        (", bounds: [2, 6]", "", ["by_length.bounds: is missing"]),
        ("[2, 6]", "[2, 6], seeds: 3", ["by_length.seeds: is unknown: choose from baseline, bounds, tokenize"]),
        ("generate: --beam 2\n", "", ["generate: is for a column with the metric 'bleu' or", "which needs it"]),
        (
            "softmax: {label: soft, arguments",
            "soft: {arguments",
            ["baseline: is 'softmax': choose from soft, relative"],
        ),
    ],
)
def test_what_is_wrong_with_by_length_is_named(old, new, parts, tmp_path):
    assert TRANSLATION.count(old) == 1
    refused(tmp_path, TRANSLATION.replace(old, new), *parts)


def test_by_length_needs_bleu(tmp_path):
    text = TRANSLATION.replace(", metric: bleu", "").replace("generate: --beam 2\n", "")
    message = "by_length: is for a recipe with columns of the metric 'bleu' without a 'generate' of their own"
    refused(tmp_path, text, message)
    refused(tmp_path, TRANSLATION.replace("metric: bleu", "metric: length_ratio"), message)
    refused(tmp_path, TRANSLATION.replace("metric: bleu", "metric: bleu, generate: --beam 3"), message)


# The recipes that come with the package.


def test_an_unknown_recipe_is_answered_with_the_list():
    with pytest.raises(
        schema.RecipeError, match="no recipe 'table_4': choose from .*park_kim_table_4, park_kim_table_5"
    ):
        recipe.find("table_4")


@pytest.fixture(scope="module")
def plans():
    """(recipe, variant) -> row -> its first run."""
    pytest.importorskip("fairseq")
    found = {}
    for name, variant in ALL:
        plan = make_plan(shipped(name, variant), seeds="1")
        found[name, variant] = {trial.row: trial.run for trial in reversed(plan.trials())}
    return found


@pytest.fixture(scope="module")
def parsed(plans):
    """(recipe, variant) -> row -> fairseq's reading of its training command."""
    from fairseq import options

    import fairseq_sg.plugin  # noqa: F401

    return {
        name: {
            row: options.parse_args_and_arch(options.get_training_parser(), run.train_command()[1:])
            for row, run in rows.items()
        }
        for name, rows in plans.items()
    }


@pytest.mark.parametrize("name,variant", ALL)
def test_every_row_is_a_model(name, variant, plans, parsed):
    import torch
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
    from omegaconf import OmegaConf

    from fairseq_sg.models import sg_dnc, sg_encoder, sg_operator, sg_regressor, sg_transformer, sg_transformer_lm

    with_options = (sg_dnc, sg_encoder, sg_operator, sg_regressor, sg_transformer, sg_transformer_lm)
    modules = {module.__name__.rpartition(".")[2]: module for module in with_options}
    words = Dictionary()
    content = shipped(name, variant)
    assert list(parsed[name, variant]) == list(reversed(content.trained)) and content.trained
    for row, args in parsed[name, variant].items():
        model = ARCH_MODEL_NAME_REGISTRY[args.arch]
        if model in modules:
            config = OmegaConf.create(vars(args))
            modules[model].resolve(config)
            if args.task in ("sg_translation", "sg_classification", "sg_language_modeling"):
                task = SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=config, num_classes=8)
                with torch.device("meta"):
                    ARCH_MODEL_REGISTRY[args.arch].build_model(config, task)
        else:
            assert model == "sg_lstm" and (args.no_source_bos or args.task == "sg_tagging")
        assert args.task == plans[name, variant][row].task and args.max_update == content.steps_of(row)
        weights = json.loads(args.aux_loss_weights)
        assert weights == ({"ponder": 0.03} if getattr(args, "depth", "") == "shared_act" else {})


@pytest.mark.parametrize("name,variant", ALL)
def test_no_two_rows_are_one_model(name, variant, parsed):
    """An option that repeats what the architecture has would give a row the numbers of another one."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
    from omegaconf import OmegaConf

    found = {}
    for row, args in parsed[name, variant].items():
        options = {key: value for key, value in vars(args).items() if key != "save_dir"}
        resolve = getattr(sys.modules[MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[args.arch]].__module__], "resolve", None)
        if resolve is not None:
            options |= dataclasses.asdict(resolve(OmegaConf.create(vars(args))))
        same = repr(sorted(options.items()))
        assert same not in found, f"{row} is {found[same]}"
        found[same] = row


@pytest.mark.parametrize("name,variant", ALL)
def test_every_dataset_is_one_of_data_prep(name, variant):
    content = shipped(name, variant)
    for data in content.data.values():
        make_parser().parse_args([*shlex.split(data.prepare), "--out", data.folder])
        of_file = data.prepare.split()[0] in ("cfq", "mathematics", "text", "babi")
        assert data.needs_file == (of_file and "--generate" not in data.prepare)
    trainings = [(data.folder, data.arguments) for data in content.data.values()]
    assert len(set(trainings)) == len(trainings)


@pytest.mark.parametrize("name,variant", ALL)
def test_a_folder_of_other_data_is_refused(name, variant, tmp_path):
    """Each folder of a recipe is accepted unchanged, and refused with another number or name in its request."""
    for data in shipped(name, variant).data.values():
        arguments = shlex.split(data.prepare)
        args = make_parser().parse_args([*arguments, "--out", str(tmp_path)])
        (dataset,) = [one for one in DATASETS if one.name == arguments[0]]
        try:
            request = {"dataset": dataset.name, **dataset.request(args), "raw_only": False}
        except (DataError, OSError):  # needs a file
            given = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float))}
            request = {"dataset": dataset.name, **given, "source_sha256": "of the file"}

        def check(changed):
            (tmp_path / "dataset.json").write_text(json.dumps({"request": request | changed}))
            check_data(tmp_path, arguments)

        check({})
        check({"raw_only": True} | ({"official_files": ["elsewhere"]} if "official_files" in request else {}))
        check({"dataset": "my own", "order": "another"})
        others = {"dataset": "scan" if request["dataset"] == "ctl" else "ctl"}
        for key in ("split", "cutoff", "order", "condition", "module", "variant", "holdout", "unit", "train"):
            if request.get(key) is not None:
                others[key] = request[key] + 1 if isinstance(request[key], (int, float)) else "other"
        for key, other in others.items():
            with pytest.raises(ValueError, match=f"the data in .* differ from .*: {key} {other} instead of "):
                check({key: other})


def test_a_folder_holds_the_same_data_in_every_recipe():
    known = {}
    for name, variant in ALL:
        for data in shipped(name, variant).data.values():
            assert known.setdefault(data.folder, data.prepare) == data.prepare


# Language models: their sizes are arguments of the data.

#: Millions of parameters that the thesis gives for each size.
MILLIONS = {"wt_s": 47, "wt_s_star": 238, "wt_b": 262, "e8": 41}
LANGUAGE_MODELS = [f"thesis_table_7_{number}" for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def language_models():
    """recipe -> (row, data) -> fairseq's reading of its training command, with the defaults of mechanisms."""
    pytest.importorskip("fairseq")
    from fairseq import options

    from fairseq_sg.models.sg_transformer_lm import configuration

    def parsed_run(trial):
        args = options.parse_args_and_arch(options.get_training_parser(), trial.run.train_command()[1:])
        return SimpleNamespace(**vars(configuration.dataclass()) | vars(args))

    return {
        name: {(trial.row, trial.data): parsed_run(trial) for trial in make_plan(shipped(name)).trials()}
        for name in LANGUAGE_MODELS
    }


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_language_model_is_built_with_the_parameters_of_the_thesis(name, language_models):
    """Within 1 %; the values of a product-key memory equal the parameters that its dense layers lack."""
    import torch
    from fairseq.data import Dictionary

    from fairseq_sg.models.sg_transformer_lm import SGTransformerLM

    dictionaries = {}
    for unit, words in (("subwords", 8000), ("bytes", 256)):
        dictionaries[unit] = Dictionary()
        for word in range(words):
            dictionaries[unit].add_symbol(str(word))
    for (row, data), args in language_models[name].items():
        words = dictionaries["bytes" if data == "e8" else "subwords"]
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        with torch.device("meta"):
            model = SGTransformerLM.build_model(args, task)
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        if "-values" in row:
            assert parameters < 0.9 * MILLIONS[data]
        else:
            assert parameters == pytest.approx(MILLIONS[data], rel=0.01), (row, data)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_settings_of_language_models(name, language_models):
    found = language_models[name]
    content = shipped(name)
    assert (content.seeds, content.checkpoint, content.batch_size_valid) == (1, "last", 4)
    for (row, data), args in found.items():
        segment, batch = {"wt_b": (512, 64), "e8": (512, 32)}.get(data, (256, 64))
        assert args.arch == f"sg_transformer_lm_{data}"
        assert (args.tokens_per_sample, args.memory_length, args.eval_memory_length) == (segment, segment, 4 * segment)
        assert (args.batch_size, args.max_update, args.amp) == (batch, 100_000, True)
        assert (args.lr, args.lr_scheduler, args.min_lr) == ([2.5e-4], "cosine", 0)
        assert args.warmup_updates == (4000 if data == "wt_b" else 0)
        assert (args.optimizer, args.weight_decay) == ("torch_adam", 0)
        assert (args.decoder_attention, args.attention_scale) == ("relative", "learned") and args.attention_dropout == 0
        of_dense = args.decoder_ffn in ("dense", "topk") and data in ("wt_s", "wt_s_star")
        assert args.clip_norm == (0.1 if of_dense else 0.25), (row, data)
        assert content.data[data].folder == ("enwik8" if data == "e8" else "wikitext103_bpe8000")
        assert set(content.rows[row].published[data]) == {"bpc" if data == "e8" else "perplexity"}
    for data in content.data.values():
        assert ("--unit bytes" in data.prepare) == (data.folder == "enwik8")
    assert content.columns["bpc"].metric == "loss" and content.columns["bpc"].data == ["e8"]
    assert content.columns["perplexity"].metric == "perplexity"
    assert {column.subset for column in content.columns.values()} == {"test"}


def test_mixtures_of_experts_of_language_models(language_models):
    """Sizes, δ and γ (Table F.3, and where the released code differs, the code's); the code's effective γ of Switch."""

    def settings(name, row, data, *keys):
        args = language_models[name][row, data]
        return tuple(getattr(args, key) for key in keys)

    regularized = ("moe_expert_dropout", "moe_regularization")
    sizes = ("decoder_ffn_embed_dim", "moe_expert_dim", "moe_k")
    widths = {"wt_s": 2048, "wt_s_star": 16384, "wt_b": 4096, "e8": 2048}
    expected = {"wt_s": (0, 1e-4), "wt_s_star": (0.05, 1e-3), "wt_b": (0.1, 1e-3), "e8": (0.05, 1e-4)}
    for data, values in expected.items():
        width = widths[data]
        for row, dim, k in (("sigma_moe", 128, 4), ("k8-g64", 64, 8), ("k1-g512", 512, 1), ("s_base-g512", 512, 1)):
            assert settings("thesis_table_7_4", row, data, *sizes) == (width, dim, k)
        for row in ("sigma_moe", "softmax_after", "softmax_before", "standard_init", "k2-g256", "s_base"):
            assert settings("thesis_table_7_4", row, data, *regularized) == values
        assert settings("thesis_table_7_4", "no_reg", data, *regularized) == (0, 0)
        dropout = "dropout-wt_b" if data == "wt_b" else "dropout"
        assert settings("thesis_table_7_4", dropout, data, *regularized) == (0, values[1])
        assert settings("thesis_table_7_4", dropout, data, "moe_dropout") == (0.2 if data == "wt_b" else 0.1,)
        assert settings("thesis_table_7_3", f"sigma_moe-{data}", data, *sizes) == (width, 128, 4)
        gamma = 1e-3 if data == "wt_s" else values[1]
        assert settings("thesis_table_7_3", f"sigma_moe-{data}", data, *regularized) == (values[0], gamma)
    switches = 0
    for (row, data), args in language_models["thesis_table_7_4"].items():
        if row.startswith("switch"):
            experts = args.decoder_ffn_embed_dim // args.moe_expert_dim
            assert args.decoder_ffn == "switch" and args.moe_expert_dropout == 0
            assert args.moe_regularization == pytest.approx(0.01 / (experts**2 * args.moe_k), rel=1e-12)
            without = "no_dropout" in row or args.moe_k == 4
            assert args.moe_dropout == (0 if without else 0.2 if data == "wt_b" else 0.1), (row, data)
            switches += 1
        elif row.startswith("s_base"):
            assert (args.decoder_ffn, args.s_base_sinkhorn) == ("s_base", "released")
        else:
            assert args.decoder_ffn == "sigma_moe"
    assert switches == 17
    assert settings("thesis_table_7_4", "softmax_after", "e8", "moe_selection") == ("softmax_after_topk",)
    assert settings("thesis_table_7_4", "softmax_before", "e8", "moe_selection") == ("softmax_before_topk",)
    assert settings("thesis_table_7_4", "standard_init", "e8", "moe_init") == ("standard",)
    assert settings("thesis_table_7_1", "topk-64", "wt_s", "decoder_ffn", "topk_k") == ("topk", 64)


def test_product_key_memories_of_language_models(language_models):
    for (row, data), args in language_models["thesis_table_7_2"].items():
        if not row.startswith("dense"):
            small, large = (46, 64) if "-values" in row else (62, 89)
            assert args.decoder_ffn == "pkm" and args.decoder_ffn_embed_dim == (large if data == "wt_b" else small) ** 2
            assert args.pkm_activation == row.partition("-")[0] and (args.pkm_heads, args.pkm_k) == (4, None)
            assert args.pkm_init == ("dense_equivalent" if "-init" in row else "reference")


def test_sizes_and_optimization_of_the_papers(parsed):
    defaults = {"qk_norm": "none", "orthogonality_weight": 0}

    def settings(name, row, *keys):
        return tuple(getattr(parsed[name, ""][row], key, defaults.get(key)) for key in keys)

    common = ("lr", "batch_size", "max_update", "clip_norm")
    assert settings("park_kim_table_4", "linear-l2", *common) == ([1e-3], 256, 50_000, 5)
    assert settings("park_kim_table_7", "linear-l2", *common) == ([1e-4], 64, 300_000, 1)
    assert settings("thesis_table_c5_cogs", "relative", *common) == ([1e-4], 128, 50_000, 1)
    assert settings("thesis_table_c5_math", "relative", *common) == ([1e-4], 256, 50_000, 0.1)
    for row, lr, warmup, d in (("standard-ped", 0.9, 4000, 128), ("universal-ped", 2.24, 8000, 256)):
        # Noam's peak, lr/√(d · warm-up)
        assert settings("thesis_table_c4_cfq", row, "lr")[0] == [pytest.approx(lr / (d * warmup) ** 0.5, rel=1e-5)]
        assert settings("thesis_table_c4_cfq", row, "lr_scheduler", "warmup_updates") == ("inverse_sqrt", warmup)
    for row, norm, weight in (("linear", "none", 0), ("linear-rms", "rms", 0), ("linear-l1-orthogonality", "l1", 1e-4)):
        for table in (4, 5, 6, 7):
            name = f"park_kim_table_{table}"
            assert settings(name, row, "qk_norm", "orthogonality_weight", "depth") == (norm, weight, "shared")
            assert settings(name, row, "encoder_attention", "cross_attention") == ("linear", "linear")


def test_published_deviations_of_a_population():
    """The five trials of Table 1 have the population's deviations that Table 2 prints."""
    table, trials = shipped("park_kim_table_2"), shipped("park_kim_table_1")
    for column in ("unary", "binary", "ternary"):
        values = [trials.published(f"trial-{n}", "sort_of_clevr", column).mean for n in range(1, 6)]
        printed = table.published("linear", "sort_of_clevr", column)
        assert f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f}" == printed.text
        assert printed.std == pytest.approx(statistics.stdev(values), abs=0.06)
    # Of the other tables it is taken for the same, but not of what they quote from Csordás 2023.
    four = shipped("park_kim_table_4")
    assert four.published("linear", "scan26", "OOD").std == pytest.approx(8.9 * (5 / 4) ** 0.5)
    assert four.published("transformer", "scan26", "OOD").std == 1.0
    # Another number of seeds of ours does not change the paper's.
    three = dataclasses.replace(four, seeds=3)
    assert three.published("linear", "scan26", "OOD").std == pytest.approx(8.9 * (5 / 4) ** 0.5)


def test_models_and_columns_of_sort_of_clevr(parsed):
    """Mittal et al.'s training; each group by its own best epoch; Table 3 has other sizes on the same folder."""
    for name in ("park_kim_table_1", "park_kim_table_2", "park_kim_table_3", "own_visual_lambda"):
        found = shipped(name)
        assert (found.steps, found.validate_every, found.seeds) == (100 * 4_593, 4_593, 5)
        for group in ("unary", "binary", "ternary"):
            column = found.columns[group]
            assert (column.subset, column.type, column.at) == ("test", group, "best")
        for args in parsed[name, ""].values():
            assert (args.lr, args.batch_size, args.clip_norm, args.dropout) == ([1e-4], 64, 0.0, 0.1)
            assert (args.attention_residual_dropout, args.question_batches) == (0.0, "separate")
    weights = {row: args.orthogonality_weight for row, args in parsed["own_visual_lambda", ""].items()}
    assert weights == {"none": 0, "weight-1e-4": 1e-4, "weight-1e-3": 1e-3, "weight-1e-2": 1e-2}
    table = shipped("park_kim_table_3")
    assert len({data.folder for data in table.data.values()}) == 1
    sizes = [data.arguments.split()[1::2] for data in table.data.values()]
    assert sizes == [["4"], ["8"], ["512", "1024", "4"], ["512", "1024", "8"]]


def test_the_weights_of_the_orthogonality_sweep_are_what_is_trained():
    found = shipped("own_orthogonality_sweep")
    for name in found.trained:
        x, arguments = found.rows[name].x, found.arguments_of(name, "scan26")
        given = "--orthogonality-weight" in arguments
        assert given == (x is not None)
        assert not given or float(arguments[arguments.index("--orthogonality-weight") + 1]) == x
    # The rest equals the paper's table.
    table = shipped("park_kim_table_4")
    settings = {row: sorted(one.arguments_of(row, "scan26")) for one in (found, table) for row in one.trained}
    assert settings["none"] == settings["linear-l2"] and settings["weight-1e-4"] == settings["linear-l2-orthogonality"]


def test_the_models_of_translations_differ_in_attention_alone():
    found = shipped("own_translation_length")
    assert list(found.rows) == [
        *("softmax", "log_length", "relative", "rotary", "linear", "linear-l2-orthogonality", "galerkin"),
    ]
    for row in found.rows.values():
        assert {word for word in shlex.split(row.arguments) if word.startswith("--")} <= {
            *("--encoder-attention", "--decoder-attention", "--cross-attention", "--logit-scale", "--position"),
            *("--qk-norm", "--orthogonality-weight"),
        }
    short, everything = (data.prepare for data in found.data.values())
    assert everything == f"{short} --train-all" and "--max-length 20 " in short and 20 in found.by_length.bounds

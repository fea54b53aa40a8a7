"""Results as tables: verdicts, and numbers as text, Markdown, LaTeX and CSV, worked out by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from fairseq_sg.experiments import report
from fairseq_sg.experiments.recipe import read
from fairseq_sg.experiments.results import Results
from fairseq_sg.experiments.schema import Published
from helpers.experiment_files import TINY, TWO, finished, points, record, result, tiny, write_recipe

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
        ([0.5, 0.7], 0, Published("0.73", 0.73, None, 0.005), "mean", "within one std"),  # of the sample, 0.14
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
    assert report.verdict(values, diverged, published, statistic) == expected


# Lines, and their table.

TABLE = [
    ["model", "seeds", "steps", "IID here", "IID published", "OOD here", "OOD published", "OOD-20", "verdict"],
    ["An LSTM_1", "2", "40", "0.99 ± 0.01", "1.00 ± 0.00", "0.22 ± 0.03", ".21 ± .01", "0.09 ± 0.01",
     "IID within one std; OOD within one std"],
    ["bad", "0 of 2, 1 Fail", "–", "Fail", "Fail", "Fail", "Fail", "Fail",
     "IID fail, as published; OOD fail, as published; OOD-20 fail"],
    ["of another paper", "–", "–", "–", "–", "–", ".5", "–", "it is not ours"],
]  # fmt: skip


def test_lines(tmp_path):
    found = report.lines(finished(tiny(tmp_path)))
    good, bad, shown = found
    assert (good.done, good.planned, good.steps, good.of) == (2, 2, 40, 40)
    assert good.cells["IID"].values == [1.0, 0.99] and good.cells["IID"].verdict == "within one std"
    assert good.cells["OOD"].values == [0.2, 0.24] and good.cells["OOD"].verdict == "within one std"
    assert good.cells["OOD-20"].values == [0.08, 0.1] and good.cells["OOD-20"].verdict == "–"
    assert (bad.done, bad.diverged, bad.planned) == (0, 1, 2) and bad.cells["OOD"].verdict == "fail, as published"
    assert shown.planned == 0 and shown.cells["OOD"].published.mean == 0.5
    assert report.table(tiny(tmp_path), found) == TABLE


def test_rows_that_were_not_planned_have_no_line(tmp_path):
    """Rows that are only shown have one, beside others on the same data."""
    recipe = tiny(tmp_path)
    assert [line.row for line in report.lines(Results(recipe, 1.0, [record("bad", 1)]))] == ["bad", "shown"]


def test_lines_without_a_paper(tmp_path):
    """Unpublished columns and texts are omitted; a verdict appears only with a published number or a failure."""
    recipe = tiny(tmp_path)
    alone = replace(recipe, rows={name: replace(row, published={}) for name, row in recipe.rows.items()})
    found = report.lines(finished(alone))
    assert report.table(alone, found) == [
        ["model", "seeds", "steps", "IID", "OOD", "OOD-20", "verdict"],
        ["An LSTM_1", "2", "40", "0.99 ± 0.01", "0.22 ± 0.03", "0.09 ± 0.01", "–"],
        ["bad", "0 of 2, 1 Fail", "–", "Fail", "Fail", "Fail", "fail"],
        ["of another paper", "–", "–", "–", "–", "–", "it is not ours"],
    ]
    assert [len(row) for row in report.table(alone, found[:1])] == [6, 6]
    legend = " ".join(report.legend(alone))
    assert "paper" not in legend and "Verdict" not in legend and "accuracy, as a fraction, on `gen`" in legend
    assert report.about_source(alone) == "Source: Nobody 1999, Table 0"


def test_a_table_has_the_columns_of_its_data(tmp_path):
    """Also its legend; a recipe has more columns than data of some rows have."""
    recipe = tiny(tmp_path, TWO)
    found = report.lines(Results(recipe, 1.0, [record("good", 1, data="other", valid=90.0)]))
    header, (name, *_), *_ = report.table(recipe, found)
    assert header == ["model", "data", "seeds", "steps", "IID", "verdict"] and name == "An LSTM_1"
    assert [text.partition(":")[0] for text in report.legend(recipe, found)[:2]] == [
        "IID", "Numbers are mean ± sample standard deviation over the seeds that did not diverge.",
    ]  # fmt: skip
    found += report.lines(finished(recipe))
    assert report.table(recipe, found)[0][4:] == TABLE[0][3:]


def test_steps_of_a_column_scale_with_the_training(tmp_path):
    done = record("good", 1, gen=1.0, steps=20)
    done["result"]["curve"] = points((10, 5, 90, 8), (20, 9, 90, 9))
    found = Results(tiny(tmp_path), 0.5, [done])
    line = report.lines(found)[0]
    assert line.cells["OOD-20"].values == [0.08] and line.steps == 20
    assert report.table(found.recipe, [line])[1][2] == "20 of 40"
    assert "good,An LSTM_1,tiny,1,20,OOD-20,0.08" in report.as_csv(found).splitlines()


def test_the_scaled_step_of_a_column_is_rounded(tmp_path):
    """20 · 0.48 = 9.6 is step 10, as the legend says, and as the steps of a training are rounded."""
    done = record("good", 1, gen=1.0, steps=19)
    done["result"]["curve"] = points((9, 5, 90, 7), (10, 5, 90, 8), (19, 9, 90, 9))
    found = Results(tiny(tmp_path), 0.48, [done])
    assert report.lines(found)[0].cells["OOD-20"].values == [0.08]
    assert report.legend(found.recipe, scale=0.48)[2].endswith(" up to step 10.")


def test_a_column_later_than_the_training_is_empty(tmp_path):
    done = record("good", 1, gen=1.0, steps=15)
    done["result"]["curve"] = points((15, 5, 90, 8))
    line = report.lines(Results(tiny(tmp_path), 1.0, [done]))[0]
    assert line.cells["OOD-20"].values == [] and line.cells["OOD"].values == [0.01]


def test_a_column_after_the_last_step_of_a_row_is_not_that_rows(tmp_path):
    """It is not "not run": the row can never have it."""
    recipe = tiny(tmp_path, TINY.replace("at: 20", "at: 50"))
    found = Results(recipe, 1.0, [record("good", 1, gen=1.0), record("bad", 1, gen=1.0, steps=60)])
    good, bad, _ = report.lines(found)
    assert list(good.cells) == ["IID", "OOD"] and list(bad.cells) == ["IID", "OOD", "OOD-20"]
    table = report.table(recipe, [good, bad])
    assert "not run" not in table[1][-1] and "OOD-20 not run" in table[2][-1]


def test_a_number_at_a_step_is_that_of_the_checkpoint_chosen_until_then(tmp_path):
    """The latest of the best on dev, or the last one."""
    recipe = tiny(tmp_path, TINY.replace("at: 20", "at: 30"))
    done = record("good", 1, gen=1.0)
    done["result"]["curve"] = points((10, 7, 1, 11), (20, 7, 1, 22), (30, 6, 1, 33), (40, 9, 1, 44))
    (value, last) = (
        report.lines(Results(replace(recipe, checkpoint=which), 1.0, [done]))[0].cells["OOD-20"].values
        for which in ("best", "last")
    )
    assert (value, last) == ([0.22], [0.33])


def test_the_peak_and_the_mean_of_the_second_half(tmp_path):
    """Of evaluations in training, whatever the checkpoint; a loss is best where it is least."""
    columns = (
        "  peak: {subset: gen, at: peak}\n  late: {subset: gen, at: second_half}\n"
        "  loss: {subset: gen, metric: loss, at: peak}\nrows:\n"
    )
    recipe = tiny(tmp_path, TINY.replace("rows:\n", columns))
    done = record("good", 1, gen=1.0)
    done["result"]["curve"] = points((10, 7, 1, 80), (20, 7, 1, 60), (30, 6, 1, 30), (40, 9, 1, 40))
    for point, loss in zip(done["result"]["curve"], (3.0, 2.0, 1.0, 2.0), strict=True):
        point["gen_loss"] = loss
    cells = report.lines(Results(recipe, 1.0, [done]))[0].cells
    assert [cells[name].values for name in ("peak", "late", "loss")] == [[0.8], [0.35], [1.0]]
    assert report.legend(recipe)[3:5] == [
        "peak: accuracy, as a fraction, on `gen` at its best evaluation in training, which looks at the test.",
        "late: accuracy, as a fraction, on `gen` as the mean over the evaluations in the second half of training.",
    ]
    done["result"]["curve"] = []
    assert [report.value(recipe, recipe.columns[name], done, 1.0) for name in ("peak", "late")] == [None, None]


def test_other_metrics(tmp_path):
    text = TINY.replace("subset: gen, at: 20", "subset: gen, metric: perplexity")
    text = text.replace("{subset: valid, at: end}", "{subset: valid, metric: bleu}").replace(
        "seeds: 2", "seeds: 2\ngenerate: --max-len-b 9"
    )
    recipe = tiny(tmp_path, text)
    done = {"accuracy": {}, "loss": {"gen": 3.0}, "generated": {"valid": {"bleu": 41.5}}, "curve": []}
    found = [report.value(recipe, column, {"result": done}, 1.0) for column in recipe.columns.values()]
    assert found == [41.5, None, 8.0]
    diverging = {"result": done | {"loss": {"gen": 1500.0}}}
    assert report.value(recipe, recipe.columns["OOD-20"], diverging, 1.0) == math.inf


def test_squared_errors(tmp_path):
    """At the trained loops and at more of them, with three digits; the best checkpoint has the least."""
    text = TINY.replace("subset: gen, at: 20", "subset: gen, metric: mse_last, at: 20")
    text = text.replace("  OOD: {subset: gen}\n", "  OOD: {subset: gen, metric: mse_last_mean}\n")
    text = text.replace("columns:\n", "columns:\n  more: {subset: gen, metric: mse_last, model_overrides: '{}'}\n")
    text = text.replace("checkpoint: best", "checkpoint: best\ncheckpoint_metric: mse_last")
    text = text.replace("--task sg_classification", "--task of_a_user")
    recipe = tiny(tmp_path, text)
    curve = [{"step": s, "dev_mse_last": dev, "gen_mse_last": gen} for s, dev, gen in ((10, 0.5, 7.0), (20, 0.75, 8.0))]
    first = record("good", 1, gen=0.0)
    first["result"] |= {"mse_last_mean": {"gen": 0.0625}, "more": {"{}": {"mse_last": {"gen": 20.5}}}, "curve": curve}
    second = record("good", 2, gen=0.0)
    second["result"] |= {"mse_last_mean": {"gen": 0.1875}, "more": {"{}": {"mse_last": {"gen": 10.5}}}, "curve": curve}
    (good, *_) = report.lines(Results(recipe, 1.0, [first, second]))
    assert good.cells["OOD-20"].values == [7.0, 7.0]
    texts = [report.cell_text(recipe, good, column) for column in ("more", "OOD")]
    assert texts == ["15.500 ± 7.071", "0.125 ± 0.088"]
    assert good.cells["OOD"].verdict == "below"
    legend = report.legend(recipe)
    assert legend[2] == (
        "OOD: squared error at the query, mean over loops, on `gen` of the checkpoint with the best mse_last on `dev` "
        "(the latest of several)."
    )
    assert legend[0].startswith("more: squared error at the query, after the last loop, on `gen` of the checkpoint")


TYPES = TINY.replace(
    "columns:\n", "columns:\n  LONG: {subset: gen, type: long}\n  LONG-best: {subset: gen, type: long, at: best}\n"
)


def test_a_type_has_its_column(tmp_path):
    """At the checkpoint, and at the first evaluation that is the best for this type on the first subset."""
    recipe = tiny(tmp_path, TYPES)
    done = record("good", 1, gen=40.0)
    done["result"]["accuracy"]["gen/long"] = 10.0
    course = ((1, 50, 90, 1), (2, 70, 60, 2), (3, 70, 50, 3), (4, 60, 95, 4))
    done["result"]["curve"] = [
        {"step": step, "dev": other, "dev/long": dev, "gen/long": gen} for step, dev, other, gen in course
    ]
    good = report.lines(Results(recipe, 1.0, [done, record("good", 2, gen=8.0)]))[0]
    assert (good.cells["LONG"].values, good.cells["LONG-best"].values) == ([0.1], [0.02])
    for point in done["result"]["curve"]:
        del point["dev/long"]
    assert report.value(recipe, recipe.columns["LONG-best"], done, 1.0) is None
    assert report.legend(recipe)[:2] == [
        "LONG: accuracy, as a fraction, on `gen`, examples of `long` of the checkpoint with the best accuracy on `dev` "
        "(the latest of several).",
        "LONG-best: accuracy, as a fraction, on `gen`, examples of `long` at the evaluation with the best value of its "
        "own on `dev` (the first of several).",
    ]


def test_results_without_a_quantity_have_no_number(tmp_path):
    text = TINY.replace("--task sg_classification", "--task of_a_user")
    recipe = tiny(tmp_path, text.replace("{subset: gen}", "{subset: gen, metric: mse_last}"))
    assert report.value(recipe, recipe.columns["OOD"], record("good", 1, gen=1.0), 1.0) is None


def test_a_further_decoding_has_its_column(tmp_path):
    columns = "  Beam: {subset: gen, metric: bleu, generate: --beam 9}\n  Ratio: {subset: gen, metric: length_ratio}\n"
    text = TINY.replace("rows:\n", f"{columns}rows:\n").replace("seeds: 2", "seeds: 2\ngenerate: --max-len-b 9")
    recipe = tiny(tmp_path, text)
    done = {"generated": {"gen": {"bleu": 1.0, "length_ratio": 0.5}, "gen --beam 9": {"bleu": 2.0}}}
    assert report.value(recipe, recipe.columns["Beam"], {"result": done}, 1.0) == 2.0
    assert report.value(recipe, recipe.columns["Ratio"], {"result": done}, 1.0) == 0.5
    assert (
        "Beam: BLEU, on `gen` of the checkpoint with the best accuracy on `dev` (the latest of several), decoded with "
        "`--beam 9`."
    ) in report.legend(recipe)


MORE = TINY.replace("rows:\n", "  OOD-more: {subset: gen, model_overrides: \"{'encoder_layers': 9}\"}\nrows:\n")


def test_a_further_evaluation_has_its_column(tmp_path):
    """A training that was not evaluated so has no number there."""
    with_more = record("good", 1, gen=20.0)
    with_more["result"]["more"] = {"{'encoder_layers': 9}": {"accuracy": {"gen": 80.0}, "loss": {}}}
    found = Results(tiny(tmp_path, MORE), 1.0, [with_more, record("good", 2, gen=24.0)])
    cells = report.lines(found)[0].cells
    assert cells["OOD"].values == [0.2, 0.24] and cells["OOD-more"].values == [0.8]
    assert "0.80 (1 seed)" in report.page(found, []) and "0.80 (1 seed)" in report.latex(found)
    assert ",OOD-more,0.8\n" in report.as_csv(found)
    assert (
        "OOD-more: accuracy, as a fraction, on `gen` of the checkpoint with the best accuracy on `dev` (the latest of "
        "several), evaluated with `--model-overrides \"{'encoder_layers': 9}\"`."
    ) in report.legend(found.recipe)


def test_a_number_of_some_seeds_has_no_verdict(tmp_path):
    recipe = tiny(tmp_path)
    three = [record("good", seed, gen=20.0) for seed in (1, 2, 3)]
    del three[0]["result"]["accuracy"]["gen"]
    (line, _) = report.lines(Results(recipe, 1.0, three))
    assert (line.done, line.cells["OOD"].values, line.cells["OOD"].verdict) == (3, [0.2, 0.2], "–")
    assert report.cell_text(recipe, line, "OOD") == "0.20 ± 0.00 (2 seeds)"
    other = Results(recipe, 1.0, [record("good", 1, gen=30.0)])
    (row,) = [row for row in report.compare(Results(recipe, 1.0, three), other, ("a", "b")) if row[2] == "OOD"]
    assert row[3:5] == ["0.20 ± 0.00 (2 seeds)", "0.30"]
    for one in three[1:]:
        del one["result"]["accuracy"]["gen"]
    (line, _) = report.lines(Results(recipe, 1.0, three))
    assert (report.cell_text(recipe, line, "OOD"), line.cells["OOD"].verdict) == ("–", "not run")


def test_the_legend_names_the_subset_that_chooses_the_checkpoint_of_each_data(tmp_path):
    data = "  tiny: {folder: tiny, prepare: ctl --order forward, subsets: [dev, valid, gen]}\n"
    text = TINY.replace(data, data + "  other: {folder: other, prepare: ctl --order backward, subsets: [gen]}\n")
    legend = report.legend(tiny(tmp_path, text))
    assert "the best accuracy on `dev` or `gen` (the latest of several)" in legend[1]
    assert "the best accuracy on `dev` (the latest" in report.legend(tiny(tmp_path))[1]


def test_texts_of_several_lines_stand_on_one(tmp_path):
    text = TINY.replace("source: Nobody 1999, Table 0", "source: |\n  Nobody 1999,\n  Table 0")
    text = text.replace("missing: it is not ours", "missing: |\n      it is\n      not ours")
    page = report.page(finished(tiny(tmp_path, text)), [])
    assert "Published: Nobody 1999, Table 0." in page and "| it is not ours |" in page


def test_legend(tmp_path):
    assert report.legend(tiny(tmp_path, TINY.replace("checkpoint: best", "checkpoint: last"))) == [
        "IID: accuracy, as a fraction, on `valid` at the end of training.",
        "OOD: accuracy, as a fraction, on `gen` of the last checkpoint.",
        "OOD-20: accuracy, as a fraction, on `gen` of the last checkpoint up to step 20.",
        "Numbers are mean ± sample standard deviation over the seeds that did not diverge.",
        "The paper has 2 seeds.",
        "Verdict: within one published standard deviation, above or below. It is at least half a unit of the last "
        "printed digit; where none is printed, ours counts. Fail: all finished trainings diverged.",
    ]
    assert report.legend(tiny(tmp_path), scale=0.5)[2].endswith(" up to step 10.")
    unknown = report.legend(tiny(tmp_path, TINY.replace("seeds: 2", "seeds: 2\nseeds_known: false")))
    assert "The paper does not say how many seeds it has." in unknown
    assert not any("2 seeds" in sentence for sentence in unknown)


def test_the_legend_says_which_standard_deviation_is_published(tmp_path):
    population = "is the population's standard deviation of 2 seeds; verdicts take the sample's, 1.414 times as much."
    for of_all, of_row, expected in (
        ("sample", "", []),
        ("sample", "population", [f"Published ± of An LSTM_1 {population}"]),
        ("population", "", [f"Published ± {population}"]),
        ("population", "sample", [f"Published ± {population}", "For An LSTM_1 it is the sample's."]),
    ):
        text = TINY.replace("unit: fraction", f"unit: fraction\npublished_std: {of_all}")
        text = text.replace("arguments: --lr 3e-3", f"arguments: --lr 3e-3\n    published_std: {of_row}")
        found = report.legend(tiny(tmp_path, text if of_row else text.replace("    published_std: \n", "")))
        start = 1 + found.index("Numbers are mean ± sample standard deviation over the seeds that did not diverge.")
        assert found[start:] == [*expected, *found[-2:]]


@pytest.mark.parametrize(
    "unit,statistic,values,text",
    [
        ("percent", "mean", [], "–"),
        ("percent", "mean", [50.0], "50.0"),
        ("percent", "mean", [50.0, 60.0], "55.0 ± 7.1"),
        ("fraction", "mean", [0.5, 0.6], "0.55 ± 0.07"),
        ("percent", "median", [50.0, 60.0, 90.0], "60.0"),
        ("percent", "mean", [-0.04], "0.0"),
    ],
)
def test_the_text_of_numbers(unit, statistic, values, text, tmp_path):
    recipe = replace(tiny(tmp_path), unit=unit, statistic=statistic)
    assert report.shown(recipe, recipe.columns["OOD"], values) == text


# Files.


def test_as_text():
    assert report.as_text([["a", "bc"], ["def", "g"]]) == "a    bc\n-------\ndef  g"


def test_a_command_that_makes_more_than_a_page_has(tmp_path):
    found = finished(tiny(tmp_path))
    assert not any("It makes" in sentence for sentence in report.provenance(found))
    assert "It makes 4 trainings; 3 of them are here." in report.provenance(replace(found, records=found.records[:3]))


def test_a_page(tmp_path):
    """Numbers first, where they come from at the bottom."""
    found = replace(finished(tiny(tmp_path)), note="One of them was stopped.")
    assert report.page(found, ["x.png"]).split("\n") == [
        "# A tiny table, 100 % & more",
        "",
        "Published: Nobody 1999, Table 0.",
        "",
        *("| " + " | ".join(row) + " |" for row in TABLE[:1]),
        "|---|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in TABLE[1:]),
        "",
        "![A tiny table, 100 % & more](x.png)",
        "",
        *(f"- {sentence}" for sentence in report.legend(found.recipe)),
        "",
        "Chosen where the paper is silent, or differently from it:",
        "",
        "- the learning rate of 100 %",
        "",
        "---",
        "",
        "Command: `python -m fairseq_sg.experiments run tiny.yaml`.  ",
        "Commit: abc. Machine: cpu x.  ",
        "One of them was stopped.",
        "",
    ]


def test_a_page_before_any_training(tmp_path):
    page = report.page(Results(tiny(tmp_path), 1.0, [record("good", 1)]), [])
    assert "| An LSTM_1 | 0 of 1 | – | – |" in page and "not run" in page and "Commit" not in page


def test_a_bar_in_a_label_does_not_end_a_cell():
    assert report.markdown_table([["a|b"], ["c"]]) == [r"| a\|b |", "|---|", "| c |"]


def test_latex(tmp_path):
    text = report.latex(finished(tiny(tmp_path)))
    assert r"An LSTM\_1 & 2 & 40 & 0.99 $\pm$ 0.01 & 1.00 $\pm$ 0.00 & 0.22 $\pm$ 0.03 & .21 $\pm$ .01" in text
    assert r"\caption{A tiny table, 100 \% \& more. Published: Nobody 1999, Table 0.}" in text
    assert r"\begin{tabular}{lllllllll}" in text
    assert text.count(r" \\") == 4 and text.count("&") - text.count(r"\&") == 4 * 8


@pytest.mark.parametrize(
    "letters,expected",
    [
        (r"\&%$#_{}~^", r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}"),
        ("±×≤≥<>†–", r"$\pm$$\times$$\leq$$\geq$\textless{}\textgreater{}$^\dagger$--"),
        ("φλγδπσβ", r"$\phi$$\lambda$$\gamma$$\delta$$\pi$$\sigma$$\beta$"),
        ("[ours]", "{[}ours]"),  # no option of \\midrule
        ("a plain text (1.0)", "a plain text (1.0)"),
    ],
    ids=["signs", "relations", "greek", "bracket", "plain"],
)
def test_letters_that_latex_reads_otherwise(letters, expected):
    assert report.escaped(letters) == expected


def test_csv(tmp_path):
    """A line for every number of every seed; none for a divergence."""
    assert report.as_csv(finished(tiny(tmp_path))).splitlines() == [
        "row,label,data,seed,steps,column,value",
        "good,An LSTM_1,tiny,1,40,IID,1",
        "good,An LSTM_1,tiny,1,40,OOD,0.2",
        "good,An LSTM_1,tiny,1,40,OOD-20,0.08",
        "good,An LSTM_1,tiny,2,40,IID,0.99",
        "good,An LSTM_1,tiny,2,40,OOD,0.24",
        "good,An LSTM_1,tiny,2,40,OOD-20,0.1",
    ]


@pytest.mark.parametrize("gen", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_mean(gen, tmp_path):
    """Of one seed of two; files of numbers have both."""
    found = finished(tiny(tmp_path))
    found.records[1]["result"]["accuracy"]["gen"] = gen
    (line, *_) = report.lines(found)
    assert (line.cells["OOD"].values, line.cells["OOD"].verdict) == ([], "not finite")
    row = report.table(found.recipe, [line])[1]
    assert row[5] == "–" and row[-1] == "IID within one std; OOD not finite"
    assert f"good,An LSTM_1,tiny,2,40,OOD,{gen}" in report.as_csv(found).splitlines()
    assert "OOD" not in [cell for row in report.compare(found, found, ("a", "b")) for cell in row]


def test_a_comma_in_a_label_does_not_end_a_field(tmp_path):
    recipe = tiny(tmp_path, TINY.replace("An LSTM_1", "large, relative"))
    assert 'good,"large, relative",tiny,1,40,' in report.as_csv(finished(recipe))


# Two results.


def of_seeds(recipe, **accuracies):
    """Results with accuracies on gen of a row's seeds, in percent."""
    return Results(
        recipe,
        1.0,
        [
            {"row": row, "data": "tiny", "seed": seed, "result": result(gen=gen)}
            for row, found in accuracies.items()
            for seed, gen in enumerate(found, 1)
        ],
    )


@pytest.fixture
def recipe(tmp_path):
    """With accuracies in percent of one column."""
    text = TINY.replace("  IID: {subset: valid, at: end}\n", "").replace("  OOD-20: {subset: gen, at: 20}\n", "")
    return tiny(tmp_path, re.sub(r"    published:\n.*\n", "", text.replace("unit: fraction", "unit: percent")))


def test_comparison(recipe):
    """Two seeds each: means 11 and 16. Of so few, a difference of 5 says nothing."""
    one = of_seeds(recipe, good=[10.0, 12.0], bad=[50.0, 70.0])
    other = of_seeds(recipe, good=[14.0, 18.0], bad=[60.0, 61.0])
    assert report.compare(one, other, ("one", "other")) == [
        ["model", "data", "column", "one", "other", "difference", "interval excludes 0"],
        ["An LSTM_1", "tiny", "OOD", "11.0 ± 1.4", "16.0 ± 2.8", "+5.0 [−8.8, +18.8]", "no"],
        ["bad", "tiny", "OOD", "60.0 ± 14.1", "60.5 ± 0.7", "+0.5 [−125.2, +126.2]", "no"],
    ]
    alone = report.compare(of_seeds(recipe, good=[10.0]), other, ("one", "other"))
    assert alone[1:] == [["An LSTM_1", "tiny", "OOD", "10.0", "16.0 ± 2.8", "+6.0", "–"]]


def test_a_difference_whose_interval_excludes_zero(recipe):
    """Of two seeds and three, downwards: that of B less A."""
    one, other = of_seeds(recipe, good=[40.0, 42.0]), of_seeds(recipe, good=[12.0, 14.0, 16.0])
    (row,) = report.compare(one, other, ("one", "other"))[1:]
    assert row[3:] == ["41.0 ± 1.4", "14.0 ± 2.0", "−27.0 [−32.0, −22.0]", "yes"]


def test_trainings_that_diverged_are_named(recipe):
    """The mean of the others alone would make a model look better."""
    one, other = (of_seeds(recipe, good=[10.0, 12.0, 11.0]) for _ in range(2))
    for record_ in other.records[:2]:
        del record_["result"]
        record_["diverged"] = {"step": 3}
    (row,) = report.compare(one, other, ("one", "other"))[1:]
    assert row[3:] == ["11.0 ± 1.0", "11.0 (1 of 3, 2 Fail)", "+0.0", "–"]
    del other.records[2]["result"]
    other.records[2]["diverged"] = {"step": 3}
    (row,) = report.compare(one, other, ("one", "other"))[1:]
    assert row[3:] == ["11.0 ± 1.0", "Fail", "–", "–"]
    assert report.compare(other, other, ("one", "other"))[1:] == []


def test_numbers_of_other_steps_are_compared_with_their_steps(recipe):
    longer = of_seeds(recipe, good=[14.0])
    longer.records[0]["result"] |= {"steps": 5000, "curve": points((5000, 5, 90, 14))}
    (row,) = report.compare(of_seeds(recipe, good=[10.0]), longer, ("one", "other"))[1:]
    steps = of_seeds(recipe, good=[10.0]).records[0]["result"]["steps"]
    assert row[3:5] == [f"10.0 ({steps:,} steps)", "14.0 (5,000 steps)"]


def test_numbers_at_a_step_are_compared_where_it_is_the_same_step(recipe):
    columns = recipe.columns | {"OOD-20": replace(recipe.columns["OOD"], at=20)}
    recipe, curve = replace(recipe, columns=columns), points((10, 5, 90, 10), (20, 5, 90, 20))
    found = {scale: of_seeds(recipe, good=[20.0]) for scale in (1.0, 0.5)}
    for scale, results in found.items():
        results.records[0]["result"] |= {"curve": curve}
        found[scale] = replace(results, steps_scale=scale)
    assert "OOD-20" in [row[2] for row in report.compare(found[1.0], found[1.0], ("one", "other"))]
    assert "OOD-20" not in [row[2] for row in report.compare(found[1.0], found[0.5], ("one", "other"))]


def test_medians_have_no_interval(recipe):
    one, other = (
        replace(of_seeds(recipe, good=values), recipe=replace(recipe, statistic="median"))
        for values in ([10.0, 50.0, 60.0], [70.0, 71.0, 72.0])
    )
    (row,) = report.compare(one, other, ("one", "other"))[1:]
    assert row[3:] == ["50.0", "71.0", "+21.0", "–"]


def test_what_two_results_measure_otherwise(recipe):
    one = of_seeds(recipe, good=[10.0])
    assert report.unlike(one, one) == []
    data = {"tiny": replace(recipe.data["tiny"], prepare="ctl --order backward")}
    changed = replace(recipe, data=data, checkpoint="last")
    assert report.unlike(one, of_seeds(changed, good=[10.0])) == [
        "tiny is prepared differently: `ctl --order forward`, and `ctl --order backward`.",
        "The checkpoints are chosen differently: the best by accuracy on `dev`, and the last one.",
    ]
    assert report.unlike(one, of_seeds(replace(recipe, checkpoint_metric="loss"), good=[10.0])) == [
        "The checkpoints are chosen differently: the best by accuracy on `dev`, and the best by loss on `dev`."
    ]


def test_what_two_results_choose_on_other_subsets(recipe):
    columns = recipe.columns | {"best": replace(recipe.columns["OOD"], at="best")}
    data = {"tiny": replace(recipe.data["tiny"], subsets=["gen", "dev", "valid"])}
    found = (replace(recipe, columns=columns), replace(recipe, columns=columns, data=data))
    one, other = (of_seeds(each, good=[10.0]) for each in found)
    assert report.unlike(one, other) == [
        "The checkpoints are chosen differently: the best by accuracy on `dev`, and the best by accuracy on `gen`.",
        "The best evaluations are chosen differently: on `dev`, and on `gen`.",
    ]


def test_what_two_results_evaluate_otherwise(recipe):
    rows = recipe.rows | {"good": replace(recipe.rows["good"], model_overrides="{'encoder_layers': 4}")}
    one = replace(recipe, generate="--beam 1", analyses={"masks": "masks {checkpoint}", "a": "norms {checkpoint}"})
    other = replace(
        one, rows=rows, validate_every=3, generate="--beam 5", analyses={"masks": "masks {checkpoint} --steps 9"}
    )
    assert report.unlike(*(of_seeds(each, good=[10.0]) for each in (one, other))) == [
        f"validate_every differs: `{recipe.validate_every}`, and `3`.",
        "generate differs: `--beam 1`, and `--beam 5`.",
        "rows.good.model_overrides differs: none, and `{'encoder_layers': 4}`.",
        "analyses.masks differs: `masks {checkpoint}`, and `masks {checkpoint} --steps 9`.",
    ]


def test_how_often_was_evaluated_matters_where_one_evaluation_is_chosen(recipe):
    columns = {"OOD": replace(recipe.columns["OOD"], at="end")}
    last = replace(recipe, checkpoint="last", columns=columns)
    assert report.unlike(*(of_seeds(replace(last, validate_every=every), good=[10.0]) for every in (5, 10))) == []


def test_a_median_and_a_mean_are_compared_by_means(recipe):
    one, other = of_seeds(recipe, good=[10.0, 12.0, 50.0]), of_seeds(recipe, good=[20.0, 24.0, 52.0])
    other = replace(other, recipe=replace(recipe, statistic="median"))
    (row,) = report.compare(one, other, ("one", "other"))[1:]
    assert row[3:6] == ["24.0 ± 22.5", "32.0 ± 17.4", "+8.0 [−38.8, +54.8]"]
    note = "One recipe has the mean of the seeds, the other the median: both are compared by means."
    assert report.unlike(one, other) == [note]


@pytest.mark.parametrize("change", [{"data": ["tiny"]}, {"x": 3.0}, {"digits": 2}, {"at": "end"}, {"type": "long"}])
def test_columns_are_compared_where_they_are_measured_alike(change, recipe):
    """Their place, their digits, and the data that they name do not matter; what is left out is named."""
    other = replace(recipe, columns={"OOD": replace(recipe.columns["OOD"], **change)})
    one, other = (of_seeds(each, good=[10.0]) for each in (recipe, other))
    alike = change.keys() <= {"data", "x", "digits"}
    assert len(report.compare(one, other, ("one", "other"))) == 1 + alike
    assert report.unlike(one, other) == ([] if alike else ["left out, as they are measured otherwise: OOD"])


def test_seeds_with_different_code_of_the_users_own_mechanisms(recipe):
    found = of_seeds(recipe, good=[10.0, 12.0, 14.0], bad=[10.0])
    for record_, code in zip(found.records, ("my_mech 096cec", "my_mech 096cec", "my_mech 8aa3db", "my_mech 096cec")):
        record_["starts"] = [{"step": 0, "commit": f"{'3' * 12} with {code}", "machine": {}}]
    sentence = "An LSTM_1 on tiny had different code: my_mech 096cec in seeds 1, 2; my_mech 8aa3db in seed 3."
    assert report.mixed_code(found) == [sentence] and sentence in report.provenance(found)
    assert report.mixed_code(replace(found, records=found.records[:2])) == []


# Two rows of one file.


def test_two_rows(recipe):
    found = of_seeds(recipe, good=[10.0, 12.0], bad=[14.0, 18.0])
    assert report.compare_rows(found, ("good", "bad")) == [
        ["data", "column", "good", "bad", "difference", "interval excludes 0"],
        ["tiny", "OOD", "11.0 ± 1.4", "16.0 ± 2.8", "+5.0 [−8.8, +18.8]", "no"],
    ]
    (row,) = report.compare_rows(found, ("bad", "good"))[1:]
    assert row[2:5] == ["16.0 ± 2.8", "11.0 ± 1.4", "−5.0 [−18.8, +8.8]"]
    assert report.compare_rows(found, ("good", "shown"))[1:] == []


def test_two_rows_of_the_same_trainings_have_the_interval_of_equal_seeds(recipe):
    """Differences of 1 and 3; a seed that one of the rows lacks counts in neither."""
    rows = recipe.rows | {"deep": replace(recipe.rows["bad"], arguments=None, evaluates="good", model_overrides="{}")}
    found = of_seeds(replace(recipe, rows=rows), good=[10.0, 50.0])
    for record_, deep in zip(found.records, (11.0, 53.0), strict=True):
        record_["result"]["more"] = {"{}": {"accuracy": {"gen": deep}}}
    (row,) = report.compare_rows(found, ("good", "deep"))[1:]
    assert row[4:] == ["+2.0 [−10.7, +14.7]", "no"]
    del found.records[0]["result"]["more"]
    (row,) = report.compare_rows(found, ("good", "deep"))[1:]
    assert row[2:] == ["50.0 (1 seed)", "53.0 (1 seed)", "+3.0", "–"]
    del found.records[1]["result"]["more"]
    assert report.compare_rows(found, ("good", "deep"))[1:] == []


def test_only_common_numbers_are_compared(recipe, tmp_path):
    one, names = of_seeds(recipe, good=[10.0]), ("one", "other")
    path = write_recipe(tmp_path, name="other")
    path.write_text((tmp_path / "tiny.yaml").read_text())
    assert len(report.compare(one, of_seeds(read(path), good=[11.0]), names)) == 2
    assert len(report.compare(one, of_seeds(recipe, bad=[11.0]), names)) == 1
    assert len(report.compare(one, Results(recipe, 1.0, [record("good", 1)]), names)) == 1
    for old, new in (("subset: gen", "subset: valid"), ("unit: percent", "unit: fraction"), ("OOD:", "OOD2:")):
        path.write_text((tmp_path / "tiny.yaml").read_text().replace(old, new))
        assert len(report.compare(one, of_seeds(read(path), good=[11.0]), names)) == 1

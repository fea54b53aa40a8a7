"""The grid of all results: reading of every script's files, and the content of cells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import summary  # noqa: E402
from summary import Cell  # noqa: E402


def run(name: str, iid: float, ood: float, steps: int = 40, most: int = 40, last: float = -1.0) -> dict:
    curve = [{"step": steps, "valid": iid if last < 0 else last, "gen": 0.0}]
    result = {"steps": steps, "accuracy": {"valid": iid, "gen": ood}, "curve": curve}
    return {"name": name, "commands": [f"fairseq-train data --max-update {most} --seed 1"], "result": result}


def comparison(*runs: dict, **more) -> dict:
    return {"what": "SCAN | all", "published": {}, "runs": list(runs), **more}


def line(label: str, data: str, values, diverged: int = 0, steps: int = 100) -> dict:
    cells = {"IID": {"values": values}, "OOD": {"values": [v / 2 for v in values]}}
    done = {"label": label, "data": data, "done": len(values), "diverged": diverged, "planned": 3}
    return {**done, "steps": steps * bool(values), "of": 100, "cells": cells}


@pytest.fixture
def write(tmp_path):
    def write(name: str, content) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    "cell,text",
    [
        (Cell((50.0,), 0, 40, 40), "50.0"),
        (Cell((50.0, 60.0), 0, 40, 40), "55.0 ± 7.1, 2 seeds"),
        (Cell((50.0, 60.0), 1, 40, 40), "55.0 ± 7.1, 2 seeds, 1 Fail"),
        (Cell((0.5,), 0, 10, 40), "0.50, 25 % of steps"),
        (Cell((50.0,), 0, 80, 40), "50.0"),
        (Cell((), 2, 0, 40), "Fail"),
    ],
)
def test_the_text_of_a_cell(cell, text):
    assert cell.text == text


def test_a_comparison_of_models(write):
    failed, fail = {"name": "c", "failed": "training"}, {**run("b", 0, 0), "diverged": {"step": 3}}
    del fail["result"]
    found = summary.read(write("x", comparison(run("a", 90, 10), run("a", 80, 30), run("a", 70, 20), fail, failed, {})))
    assert found.cells == {
        ("a", "IID"): Cell((90, 80, 70), 0, 40, 40),
        ("a", "OOD"): Cell((10, 30, 20), 0, 40, 40),
        ("b", "IID"): Cell((), 1, 0, 40),
        ("b", "OOD"): Cell((), 1, 0, 40),
    }
    assert found.title == "SCAN | all" and found.steps == "40"


def test_the_steps_that_a_result_is_a_part_of(write):
    """The requested steps; the paper's with published numbers; for a scaled training, the unscaled ones."""
    stopped = comparison(run("a", 90, 10, steps=20))
    assert summary.read(write("x", stopped)).cells["a", "IID"].of == 40
    assert summary.read(write("x", stopped)).steps == "20 of 40"
    assert summary.read(write("x", {**stopped, "published": {"a": {}}})).cells["a", "IID"].of == 50_000
    scaled = comparison(run("a", 90, 10), published={"a": {}}, steps_scale=0.1)
    assert summary.read(write("x", scaled)).cells["a", "IID"].of == 400


def test_iid_is_of_the_last_step_and_ood_of_the_checkpoint_that_was_chosen(write):
    cells = summary.read(write("x", comparison(run("a", 90, 10, last=95.0)))).cells
    assert (cells["a", "IID"].values, cells["a", "OOD"].values) == ((95.0,), (10,))


def test_a_table_of_a_recipe(write):
    recipe = summary.recipes.read(summary.recipes.find("thesis_table_c4_scan"))
    assert recipe.unit == "fraction"
    first, second = list(recipe.columns)[:2]
    lines = [
        line("r", "d", [0.5, 0.7]),
        line("s", "d", [], diverged=2),
        line("t", "d", []),
        line("u", "d", [1.0], steps=50),
    ]
    for each in lines:
        each["cells"] = dict(zip((first, second), each["cells"].values(), strict=True))
    content = {"recipe": "thesis_table_c4_scan", "title": "T", "lines": lines, "runs": []}
    found = summary.read(write("x", content))
    assert found.cells["r", first] == Cell((50, 70), 0, 100, 100) and found.cells["s", first].text == "Fail"
    assert found.cells["u", second].text == "50.0, 50 % of steps" and ("t", first) not in found.cells
    content["lines"].append({**line("r", "e", []), "cells": {}})
    assert list(summary.read(write("x", content)).columns) == [f"d: {first}", f"d: {second}"]


def test_files_and_what_is_left_out(write, tmp_path, capsys):
    files = [
        write("one", comparison(run("a", 90, 10), run("b", 20, 0))),
        write("two", comparison(run("b", 30, 5), run("c|d", 40, 1))),
        write("other", {"tables": []}),
        write("empty", comparison({})),
        write("list", [1]),
    ]
    assert summary.main([*map(str, files), "--out", str(tmp_path / "new" / "grid")]) == 0
    shown = (tmp_path / "new" / "grid.md").read_text()
    assert "| model | one: IID, % | one: OOD, % | two: IID, % | two: OOD, % |" in shown
    assert "| b | 20.0 | 0.00 | 30.0 | 5.00 |" in shown and r"| c\|d |  |  | 40.0 | 1.00 |" in shown
    assert r"| [one](../one.md) | SCAN \| all | 40 |" in shown
    assert "Skipped files of another kind: other.json, empty.json, list.json." in shown
    assert (tmp_path / "new" / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "2 experiments, 3 models" in capsys.readouterr().out and "Run in full" not in shown


def test_files_of_the_same_name_are_told_apart_by_their_folders(write, tmp_path):
    (tmp_path / "runs").mkdir()
    path = write("runs/summary", comparison(run("a", 90, 10)))
    assert summary.table([summary.read(path)])[0] == ["model", "runs: IID, %", "runs: OOD, %"]


@pytest.mark.parametrize("content,message", [("{", "x.json cannot be read: "), ("{}", "there are no results in these")])
def test_what_cannot_be_shown_is_one_line(content, message, write, tmp_path, capsys):
    assert summary.main([str(write("x", content)), "--out", str(tmp_path / "grid")]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "grid.md").exists()


# Run in full, in part, not yet.


def shown(files, tmp_path) -> dict:
    """Experiment -> (extent of its runs, links)."""
    rows = summary.ledger([summary.read(file) for file in files], tmp_path)
    assert rows[0] == ["experiment", "run", "results"]
    return {row[0].partition(":")[0].strip("`"): tuple(row[1:]) for row in rows[1:]}


def of_recipe(*lines: dict, scale: float = 1.0) -> dict:
    """Results of ``own_experts_small``: nine rows, two seeds, 100 of 100 steps unless the line says otherwise."""
    made = [{"row": row, **line(row, "python", [2.0] * seeds), **more} for row, seeds, more in lines]
    for each in made:
        each["cells"] = {"valid": each["cells"]["IID"]}
    return {"recipe": "own_experts_small", "title": "T", "steps_scale": scale, "lines": made, "runs": []}


ROWS = list(summary.recipes.read(summary.recipes.find("own_experts_small")).rows)


@pytest.mark.parametrize(
    "contents,expected",
    [
        ([], "not yet"),
        ([of_recipe((ROWS[0], 0, {}))], "not yet"),
        ([of_recipe((ROWS[0], 2, {}), (ROWS[1], 1, {}))], "in part: 3 of 18 trainings"),
        ([of_recipe((ROWS[0], 2, {})), of_recipe((ROWS[0], 1, {}), (ROWS[1], 5, {}))], "in part: 4 of 18 trainings"),
        ([of_recipe((ROWS[0], 2, {"steps": 40}))], "in part: some, to 40 % of the steps"),
        ([of_recipe((ROWS[0], 2, {"steps": 10}), scale=0.1)], "in part: some, to 10 % of the steps"),
        (
            [of_recipe((ROWS[0], 2, {}), (ROWS[1], 1, {"steps": 40}), (ROWS[2], 1, {"steps": 20}))],
            "in part: 2 of 18 trainings; some, to 40 % of the steps",
        ),
        ([of_recipe((ROWS[0], 1, {"diverged": 1}))], "in part: 2 of 18 trainings"),
        ([of_recipe((ROWS[0], 0, {"diverged": 2}))], "in part: 2 of 18 trainings"),
        ([of_recipe(*((row, 2, {}) for row in ROWS))], "in full: 18 of 18 trainings"),
        ([of_recipe(*((row, 2, {}) for row in ROWS[1:]))], "in part: 16 of 18 trainings"),
    ],
)
def test_how_much_of_a_recipe_was_run(contents, expected, write, tmp_path):
    files = [write(f"x{number}", content) for number, content in enumerate(contents)]
    found = shown(files, tmp_path)
    links = ", ".join(f"[x{number}](x{number}.md)" for number in range(len(files)))
    assert found["own_experts_small"] == (expected, links)
    assert {entry for name, entry in found.items() if name != "own_experts_small"} == {("not yet", "")}


def test_how_much_of_a_comparison_was_run(write, tmp_path):
    def small(*runs: dict, what: str = "arithmetic (small)", script: str = "ndr.py arithmetic") -> dict:
        return {**comparison(*runs), "what": what, "command": f"python scripts/{script} --small --models x"}

    wanted = [model for model in summary.ndr.RECIPES["arithmetic"] if "lstm" not in model]
    files = [
        write("one", small(run(wanted[0], 90, 10), run(wanted[1], 90, 10, steps=10))),
        write("two", small(run("linear", 1, 1, steps=30), run("softmax", 1, 1), script="attentions.py")),
    ]
    found = shown(files, tmp_path)
    assert found["ndr.py arithmetic --small"] == (
        "in part: 1 of 4 models; 1 of 4 models, to 25 % of the steps",
        "[one](one.md)",
    )
    count = len(summary.attentions.MODELS)
    assert found["attentions.py --small"] == (f"in part: 1 of {count} models", "[two](two.md)")
    assert found["ndr.py arithmetic"] == found["attentions.py"] == ("not yet", "")
    files.append(write("three", small(*(run(model, 90, 10) for model in wanted))))
    assert shown(files, tmp_path)["ndr.py arithmetic --small"] == (
        "in full: 4 of 4 models",
        "[one](one.md), [three](three.md)",
    )


def test_every_recipe_and_comparison_is_in_the_list(tmp_path):
    found = shown([], tmp_path)
    assert set(found) == {*summary.recipes.names(), *summary.comparisons()}
    assert {"quickstart.py", "attentions.py --small", "ndr.py ctl backward", "ndr.py ctlpp R"} <= set(found)


def test_the_page_of_all_results_has_the_list(tmp_path, capsys):
    assert summary.main(["--out", str(tmp_path / "all")]) == 0
    page = (tmp_path / "all.md").read_text()
    assert "## Run in full, in part, not yet" in page
    assert all(f"| `{name}`: " in page for name in summary.recipes.names())
    results = [path for path in (REPOSITORY / "results").glob("*.json") if "runs" in json.loads(path.read_text())]
    listed = page.partition("## Run in full")[2]
    assert [path.stem for path in results if f"[{path.stem}](" not in listed] == []


def test_the_results_that_are_there():
    files = [path for path in (REPOSITORY / "results").glob("*.json") if "runs" in json.loads(path.read_text())]
    assert files and all(summary.read(path).cells for path in files)

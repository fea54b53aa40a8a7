"""Pages and pictures from results files alone: those of each file, of the questions, and those that are committed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.experiment_files import TINY, finished, metadata, record, result, tiny, write_recipe

pytest.importorskip("matplotlib")

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import __main__ as command
from fairseq_sg.experiments import recipe, render, report, results
from fairseq_sg.experiments.results import Results

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "results"
NAME = "a_v0.2"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path) -> Path:
    """results/ with two files: a tiny table, and some of Park & Kim's Table 4. There are no runs."""
    made = tmp_path / "results"
    made.mkdir()
    finished(tiny(tmp_path)).write(made / f"{NAME}.json")
    table = recipe.read(recipe.find("park_kim_table_4"))
    table = replace(table, columns={name: table.columns[name] for name in ("IID", "OOD")})
    records = [
        record("linear", seed, "scan26", steps=25_000, valid=99.0, gen=gen) for seed, gen in ((1, 40.0), (2, 42.0))
    ]
    records.append(record("transformer", 1, "scan26", steps=50_000, valid=100.0, gen=20.0))
    records.append(record("linear-l2", 1, "scan26"))
    Results(table, 1.0, records, "Stopped early.").write(made / "park.json")
    return made


# A file's own pages.


def test_pages_are_made_from_the_file_alone(folder):
    written = render.render([folder / f"{NAME}.json"])
    assert {path.name for path in written} == {
        f"{NAME}{end}" for end in (".md", ".tex", ".csv", ".png", "-curves.png")
    }  # fmt: skip
    assert all(path.is_file() and path.parent == folder for path in written)
    found = results.read(folder / f"{NAME}.json")
    page = (folder / f"{NAME}.md").read_text()
    assert page == report.page(found, [f"{NAME}.png", f"{NAME}-curves.png"])
    assert (folder / f"{NAME}.tex").read_text() == report.latex(found)
    assert (folder / f"{NAME}.csv").read_text() == report.as_csv(found)
    for picture in (path for path in written if path.suffix == ".png"):
        assert metadata(picture)["Source"] == digest(folder / f"{NAME}.json")


def test_a_stale_picture_can_be_told(folder):
    """The file changed since: the pages and pictures are made again, and say so."""
    path = folder / f"{NAME}.json"
    render.render([path])
    old = metadata(folder / f"{NAME}.png")["Source"]
    content = json.loads(path.read_text())
    content["records"][0]["result"]["accuracy"]["gen"] = 30.0
    path.write_text(json.dumps(content))
    assert old != digest(path)
    render.render([path])
    assert metadata(folder / f"{NAME}.png")["Source"] == digest(path)
    assert "| 0.27 ± 0.04 |" in (folder / f"{NAME}.md").read_text()


@pytest.mark.parametrize("end", ["-curves", "-loss", "-bleu"])
def test_two_files_whose_pictures_would_have_one_name(end, folder):
    (folder / f"{NAME}{end}.json").write_text((folder / f"{NAME}.json").read_text())
    for path in (folder / f"{NAME}.json", folder / f"{NAME}{end}.json"):
        with pytest.raises(UsageError, match="would have pictures of one name: rename one of them"):
            render.render([path])
    assert not list(folder.glob("*.png"))
    (folder / f"{NAME}.json").unlink()
    render.render([folder / f"{NAME}{end}.json"])
    assert f"({NAME}{end}.png)" in (folder / f"{NAME}{end}.md").read_text()


def test_pages_of_translations(folder):
    path = folder / f"{NAME}.json"
    content = json.loads(path.read_text())
    score = {metric: {"score": 20.0, "ci": 1.0, "p": None} for metric in ("BLEU", "chrF2")} | {"length_ratio": 1.0}
    content["bleu"] = {
        "tiny": {
            "baseline": "soft", "unit": "words", "limit": 4, "samples": 10, "signatures": {"BLEU": "nrefs:1"},
            "subsets": {"gen": 3}, "buckets": [{"low": 1, "high": None, "label": "1+", "sentences": 3}],
            "systems": [{"name": "soft", "seed": 1, "outputs": {}, "subsets": {"gen": score}, "buckets": [score]}],
        }
    }  # fmt: skip
    path.write_text(json.dumps(content))
    written = {file.name for file in render.render([path])}
    assert {f"{NAME}-bleu.md", f"{NAME}-bleu.png"} <= written
    assert "| gen | soft | 1 | 20.0 ± 1.0 | – |" in (folder / f"{NAME}-bleu.md").read_text()
    assert metadata(folder / f"{NAME}-bleu.png")["Source"] == digest(path)
    assert "-bleu.png" not in (folder / f"{NAME}.md").read_text()


# Questions.

QUESTIONS = f"""\
questions:
  - question: Is it a first look?
    answer: Nobody knows.
    key: look
    first_look: true
    tables: [{{results: {NAME}, columns: [OOD, IID], rows: [bad, good], header: {{OOD: longer}}}}]
  - question: Does it work?
    answer: >-
      It does: {{park/linear/scan26/OOD}} %, and {{{NAME}/good/tiny/OOD-20}} there.
    key: works
    tables: [{{results: park}}]
    notes:
      - >-
        The linear one has {{park/linear/scan26/IID}} %, and more words, more words, more words, more words, more words,
        more words, more words, more words.
      - The other has one seed.
    picture: park.png
"""


@pytest.fixture
def asked(folder, monkeypatch) -> Path:
    """The folder with questions; of the recipes there are only two."""
    (folder / render.QUESTIONS).write_text(QUESTIONS)
    monkeypatch.setattr(recipe, "names", lambda: ["own_orthogonality_sweep", "park_kim_table_4"])
    return folder


def test_the_page_of_questions(asked):
    """Strong evidence first, with numbers from the files; first looks collapsed; what was run of every recipe."""
    page = render.questions_page(asked)
    assert page.startswith("# Results\n")
    strong, weak = page.index("## Does it work?"), page.index("### Is it a first look?")
    assert strong < page.index("<details>") < weak < page.index("</details>") < page.index("## What was run")
    assert "It does: 41.0 ± 1.4 %, and 0.09 ± 0.01 there." in page
    assert "![Does it work?](park.png)" in page
    assert "\n- [Does it work?](#does-it-work)\n- [Is it a first look?](#is-it-a-first-look)\n" in page[:strong]
    # Numbers are filled in, and a line that is too long is wrapped under its mark.
    notes = page[page.index("46.9 ± 8.9 |\n\n- The linear one has 99.0 ± 0.0 %, and") : page.index("![Does it work?]")]
    assert [line[:2] for line in notes.split("\n\n", 1)[1].splitlines()] == ["- ", "  ", "- ", ""]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[:3] == [
        "| model | seeds | steps | IID, here | IID, paper | OOD, here | OOD, paper |",
        "| Transformer (the thesis's universal one) | 1 | 50,000 | 100.0 | 100.0 ± 0.0 | 20.0 | 21.0 ± 1.0 |",
        "| linear | 2 | 25,000 of 50,000 | 99.0 ± 0.0 | 99.8 ± 0.1 | 41.0 ± 1.4 | 46.9 ± 8.9 |",
    ]
    # Of the first look only rows with a result, which may be Fail, in the given order of rows and columns.
    assert rows[3:6] == [
        "| model | seeds | steps | longer, here | longer, paper | IID, here | IID, paper |",
        "| bad | 0 of 2, 1 Fail | – | Fail | Fail | Fail | Fail |",
        "| An LSTM_1 | 2 | 40 | 0.22 ± 0.03 | .21 ± .01 | 0.99 ± 0.01 | 1.00 ± 0.00 |",
    ]
    assert "<sub>[park](park.md): commit abc; x.</sub>" in page
    table, sweep = (recipe.read(recipe.find(name)) for name in reversed(recipe.names()))
    assert [line for line in rows if "planned" in line or " of " in line][-4:] == [
        "| recipe | trainings done of planned | steps | results |",
        f"| own_orthogonality_sweep | 0 of {5 * len(sweep.trained)} | – | – |",
        "| own_orthogonality_sweep-small | 0 of 12 | – | – |",
        f"| park_kim_table_4 | 1 of {5 * len(table.trained)} | 100% | [park](park.md) |",
    ]


@pytest.mark.parametrize("sign", ["+", "-", "*", "1."])
def test_no_line_of_a_text_begins_a_list(sign):
    words = f"{'x' * 114} elu {sign} 1"
    assert render._filled(words, {}) == f"{'x' * 114}\nelu {sign} 1"
    assert render._filled(words, {}, "- ") == f"- {'x' * 114}\n  elu {sign} 1"


def test_trainings_count_once_and_with_all_their_steps(asked):
    content = json.loads((asked / "park.json").read_text())
    (asked / "twice.json").write_text(json.dumps(content))
    (asked / "scaled.json").write_text(json.dumps(content | {"steps_scale": 0.5}))
    found = {of.recipe.full_name: of for of in render.overview(render.read_all(asked))}["park_kim_table_4"]
    assert (len(found.files), found.done, found.more) == (3, 1, 0)


def test_a_seed_that_the_recipe_does_not_have_is_counted_apart(asked):
    content = json.loads((asked / "park.json").read_text())
    full = next(record for record in content["records"] if record["row"] == "transformer")
    content["records"].append(full | {"seed": 6})
    (asked / "park.json").write_text(json.dumps(content))
    trained = recipe.read(recipe.find("park_kim_table_4")).trained
    assert f"| park_kim_table_4 | 1 of {5 * len(trained)}, 1 more | 100% |" in render.questions_page(asked)


def test_a_table_of_some_of_the_data(asked):
    """Two data have a column of their own; one of them has none."""
    path = asked / f"{NAME}.json"
    content = json.loads(path.read_text())
    content["recipe"]["data"]["moon"] = content["recipe"]["data"]["tiny"]
    content["records"] += [record | {"data": "moon"} for record in content["records"]]
    path.write_text(json.dumps(content))
    files = render.read_all(asked)
    both, one = (render._table(render.Show(NAME, rows=["good"], data=data), files) for data in (None, ["moon"]))
    assert [line[:2] for line in both] == [["model", "data"], ["An LSTM_1", "tiny"], ["An LSTM_1", "moon"]]
    assert [line[:2] for line in one] == [["model", "seeds"], ["An LSTM_1", "2"]] and one[1][-1] == both[2][-1]


def marked(keys: str, text: str = "") -> str:
    return f"<!-- results: {keys} -->\n{text}<!-- end of results -->\n"


def test_the_readme_has_answers_between_its_marks(asked):
    """One without its question, several with theirs; what is elsewhere stays."""
    text = f"# Mine\n\n{marked('works', 'old text')}\nBetween.\n\n{marked('look, works')}\nThe end.\n"
    found = render.with_results(text, asked)
    answer = "It does: 41.0 ± 1.4 %, and 0.09 ± 0.01 there."
    assert found.startswith(f"# Mine\n\n<!-- results: works -->\n\n{answer}\n\n| model | seeds | steps | IID, here |")
    first, second = found.split("\nBetween.\n")
    assert first.endswith("|\n\n<!-- end of results -->\n") and second.endswith("<!-- end of results -->\n\nThe end.\n")
    assert "**Is it a first look?** Nobody knows." in second and f"**Does it work?** {answer}" in second
    assert "old text" not in found and "![" not in found and "The other has one seed" not in found
    assert render.with_results(found, asked) == found
    assert render.with_results("no marks\n", asked) == "no marks\n"
    with pytest.raises(UsageError, match="no question with the key 'wroks': choose from look, works"):
        render.with_results(marked("wroks"), asked)
    with pytest.raises(UsageError, match="has no <!-- end of results -->"):
        render.with_results(f"{marked('works')}<!-- results: look -->\ntext\n", asked)


def test_tables_with_one_header_become_one_in_the_readme(asked):
    """After the answers, in the order of the questions."""
    text = QUESTIONS.replace(", columns: [OOD, IID], rows: [bad, good], header: {OOD: longer}", "")
    (asked / render.QUESTIONS).write_text(text.replace(f"results: {NAME}", "results: park, rows: [linear]"))
    found = render.with_results(marked("works, look"), asked).splitlines()
    assert [line.partition("**")[2].partition("**")[0] for line in found if line.startswith("**")] == [
        "Does it work?",
        "Is it a first look?",
    ]
    rows = [line.split(" | ")[0] for line in found if line.startswith("|")]
    assert rows == [
        "| model",
        "|---|---|---|---|---|---|---|",
        "| Transformer (the thesis's universal one)",
        "| linear",
        "| linear",
    ]


def test_all_is_written_by_the_command(asked, capsys, monkeypatch):
    """From a folder, its questions and the README beside it; a README without the marks stays."""
    readme = asked.parent / "README.md"
    readme.write_text(marked("works"))
    monkeypatch.chdir(asked.parent)
    assert command.main(["render"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "results/park.md" in printed and printed[-2:] == ["results/README.md", "README.md"]
    assert (asked / "README.md").read_text() == render.questions_page(asked)
    assert "It does: 41.0" in readme.read_text()
    readme.write_text("# Mine\n")
    (asked / "README.md").unlink()
    assert command.main(["render", "results/park.json"]) == 0 and not (asked / "README.md").exists()
    assert readme.read_text() == "# Mine\n"


def test_differences_with_their_intervals(asked):
    """Of two seeds against two others, against the same seeds, and of one seed."""
    path = asked / "park.json"
    content = json.loads(path.read_text())
    content["records"] += [
        record | {"row": "linear-l2"} | {"result": record["result"] | {"accuracy": {"valid": 99.0, "gen": gen}}}
        for record, gen in zip(content["records"], (43.0, 45.5), strict=False)
    ]
    content["records"] = [record for record in content["records"] if record["row"] != "linear-l2" or "result" in record]
    path.write_text(json.dumps(content))
    of_shares = content["recipe"] | {"unit": "fraction"}
    (asked / "share.json").write_text(json.dumps(content | {"recipe": of_shares}))

    def filled(place: str) -> str:
        (asked / render.QUESTIONS).write_text(QUESTIONS.replace("{park/linear/scan26/OOD}", f"{{{place}}}"))
        page = render.questions_page(asked)
        return page[page.index("It does: ") + 9 : page.index(" %, and 0.09")]

    one, other, alone = (f"park/{row}/scan26/OOD" for row in ("linear-l2", "linear", "transformer"))
    assert filled(f"{one} - {other}") == "+3.2 [−4.0, +10.5]"
    assert filled(f"{one} - {other}, paired") == "+3.2 [+0.1, +6.4]"
    path.write_text(json.dumps(content | {"records": content["records"][::-1]}))  # the seeds 2 and 1
    assert filled(f"{one} - {other}, paired") == "+3.2 [+0.1, +6.4]"
    assert filled(f"{other} - {alone}") == "+21.0"
    for place, message in (
        (f"{one} - {other}, pared", "must be {NAME/ROW/DATA/COLUMN}, {A - B} or {A - B, paired} of such"),
        (f"{one}, paired", "must be {NAME/ROW/DATA/COLUMN}, {A - B} or {A - B, paired} of such"),
        (f"{one} - {other} - {alone}", "must be {NAME/ROW/DATA/COLUMN}, {A - B} or {A - B, paired} of such"),
        (f"{one} - park/linear", "must be {NAME/ROW/DATA/COLUMN}"),
        (f"{one} - {alone}, paired", "has the seeds [1, 2] and [1], and pairs need equal ones"),
        (f"{one} - share/linear/scan26/OOD", "has accuracy in percent and accuracy in fraction, which are not alike"),
    ):
        with pytest.raises(UsageError) as error:
            filled(place)
        assert str(error.value).startswith("questions.yaml: {park/") and message in str(error.value)


@pytest.mark.parametrize(
    "place,message",
    [
        ("{park/linear/scan26}", "must be {NAME/ROW/DATA/COLUMN}"),
        ("{park}", "must be {NAME/ROW/DATA/COLUMN}"),
        ("{perk/linear/scan26/OOD}", "there is no results file 'perk': choose from a_v0.2, park"),
        ("{park/liner/scan26/OOD}", "is no number of park.json"),
        ("{park/linear/scan27/OOD}", "is no number of park.json"),
        ("{park/linear/scan26/ODD}", "is no number of park.json"),
        ("{park/linear-l2/scan26/OOD}", "is no number of park.json"),  # not run
    ],
)
def test_places_that_are_no_number(place, message, asked):
    (asked / render.QUESTIONS).write_text(QUESTIONS.replace("{park/linear/scan26/OOD}", place))
    with pytest.raises(UsageError) as error:
        render.questions_page(asked)
    assert str(error.value).startswith("questions.yaml: ") and message in str(error.value)


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("results: park}", "results: perk}", "there is no results file 'perk': choose from a_v0.2, park"),
        ("columns: [OOD, IID]", "columns: [ODD]", f"there is no column of {NAME} 'ODD': choose from IID, OOD"),
        ("rows: [bad, good]", "rows: [bed]", f"there is no row of {NAME} 'bed': choose from good, bad"),
        ("rows: [bad, good]", "data: [moon]", f"there is no data of {NAME} 'moon': choose from tiny"),
        ("answer: Nobody", "anser: Nobody", "anser: is unknown: choose from question, answer, tables"),
        ("    answer: Nobody knows.\n", "", "answer: is missing"),
        ("first_look: true", "first_look: perhaps", "first_look: Value 'perhaps' is not a valid bool"),
        ("questions:\n", "questions: [\n", "while parsing"),
    ],
)
def test_what_is_wrong_in_the_questions_is_named(old, new, message, asked):
    assert QUESTIONS.count(old) == 1
    (asked / render.QUESTIONS).write_text(QUESTIONS.replace(old, new))
    with pytest.raises(UsageError) as error:
        render.questions_page(asked)
    assert message in str(error.value) and "questions.yaml: " in str(error.value) and "\n" not in str(error.value)


def test_wrong_files_are_one_line_and_an_exit_code(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    for line, message in (
        (["render", str(tmp_path / "broken.json")], "broken.json: not a results file of fairseq_sg.experiments"),
        (["render", str(tmp_path / "none.json")], "none.json: No such file or directory: give a results file"),
        (["render", str(tmp_path / "page.md")], "page.md: the name of a results file ends in .json"),
        (["render", "--results", str(tmp_path)], "broken.json: not a results file"),
        (["render", "--results", str(tmp_path / "x")], "has no results files: give their paths, or --results FOLDER"),
    ):
        assert command.main(line) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
        assert message in shown.err
    assert not (tmp_path / "broken.md").exists()


# The pages that are committed.


def committed() -> list[Path]:
    found = sorted(RESULTS.glob("*.json"))
    assert found, f"{RESULTS} has no results files"
    return found


def test_committed_pages_are_those_of_their_files():
    """Remade with `python -m fairseq_sg.experiments render`; a picture says which file it was made from."""
    for path in committed():
        name = path.name.removesuffix(".json")
        found = results.read(path)
        page = (RESULTS / f"{name}.md").read_text("utf-8")
        pictures = [word.partition(")")[0] for word in page.split("](")[1:] if word.partition(")")[0].endswith(".png")]
        numbers = any(cell.values for line in report.lines(found) for cell in line.cells.values())
        assert (f"{name}.png" in pictures) == numbers
        pictures += [f"{name}-bleu.png"] if found.bleu else []
        for end, text in render.texts(found, name, pictures).items():
            assert (RESULTS / f"{name}{end}").read_text("utf-8") == text, f"{name}{end}: render it again"
        for picture in pictures:
            assert metadata(RESULTS / picture)["Source"] == digest(path), f"{picture}: render it again"


def test_every_committed_page_and_picture_has_its_file():
    """None is left from a file that was renamed or removed."""
    names = [path.name.removesuffix(".json") for path in committed()]
    made = {
        f"{name}{end}"
        for name in names
        for end in (".json", ".md", ".tex", ".csv", ".png", "-curves.png", "-loss.png", "-bleu.md", "-bleu.png")
    }
    assert {path.name for path in RESULTS.iterdir()} - made == {"README.md", render.QUESTIONS}


def test_committed_answers_are_those_of_the_files():
    assert committed() and (RESULTS / "README.md").read_text("utf-8") == render.questions_page(RESULTS)
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert 0 < readme.count("<!-- results: ") == readme.count("<!-- end of results -->")
    assert render.with_results(readme, RESULTS) == readme


def test_committed_answers_are_short():
    """Conditions and details are notes."""
    long = {q.question: len(q.answer.split()) for q in render.read_questions(RESULTS / render.QUESTIONS)}
    assert not {question: words for question, words in long.items() if words > 80}


def test_committed_results_are_of_recipes_that_there_are():
    """With the rows and data that were trained."""
    for path in committed():
        old = results.read(path).recipe
        now = recipe.read(recipe.find(old.name), old.variant)
        for row in old.trained:
            assert row in now.rows, f"{path.name}: {row}"
        assert old.data.keys() <= now.data.keys(), path.name


def test_results_of_a_training_that_is_not_done(tmp_path):
    """A file before any result has pages, without pictures."""
    found = Results(tiny(tmp_path), 1.0, [record("good", 1), record("bad", 1, failed="training")])
    found.write(tmp_path / "x.json")
    assert {path.name for path in render.render([tmp_path / "x.json"])} == {"x.md", "x.tex", "x.csv"}
    assert "![" not in (tmp_path / "x.md").read_text()


def test_labels_of_a_page_are_those_of_the_recipe(tmp_path):
    text = TINY.replace("An LSTM_1", "a | b")
    found = Results(recipe.read(write_recipe(tmp_path, text)), 1.0, [{**record("good", 1), "result": result(gen=3.0)}])
    assert r"| a \| b | 1 | 40 |" in report.page(found, [])

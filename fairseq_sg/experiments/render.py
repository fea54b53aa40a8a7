"""Renders results files: pages, pictures, LaTeX and CSV of each, and the pages that answer questions from several.

``results/questions.yaml`` asks the questions; ``results/README.md`` and the README's table are made from it.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_sg.errors import UsageError
from fairseq_sg.experiments import by_length, figures, recipe, report, results
from fairseq_sg.experiments.results import Results
from fairseq_sg.experiments.schema import Recipe
from fairseq_sg.files import write_text

QUESTIONS = "questions.yaml"
#: A place of the README for questions, by their keys: what stands between these marks is made.
_MARKED = re.compile(r"(<!-- results: ([\w, -]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
_PLACE = re.compile(r"\{([^{}]+)\}")


@dataclass
class Show:
    """A table of a question.

    Attributes:
        results: the name of a results file.
        rows: its rows; by default all. ``data`` and ``columns`` likewise.
        header: column -> its name in the table.
        labels: row -> its name in the table.
    """

    results: str = MISSING
    rows: list[str] | None = None
    data: list[str] | None = None
    columns: list[str] | None = None
    header: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Question:
    """A question and its answer.

    Attributes:
        question: the title.
        answer: one paragraph. ``{NAME/ROW/DATA/COLUMN}`` stands for our number there, also in notes. ``{A - B}`` is the
            difference of two of them, with its interval (`intervals`). ``{A - B, paired}`` is that of the same seeds.
        tables: those that show it.
        notes: conditions and details, one fact each; the README leaves them out.
        picture: a picture, by its path from the folder of results.
        first_look: whether the evidence is one seed; such questions come last, collapsed.
        key: its name for a place of the README.
    """

    question: str = MISSING
    answer: str = MISSING
    tables: list[Show] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    picture: str = ""
    first_look: bool = False
    key: str = ""


@dataclass
class Questions:
    questions: list[Question] = MISSING


def render(paths: list[Path]) -> list[Path]:
    """Renders results files, and returns what was written. Raises UsageError for a file that holds no results."""
    written = []
    for path in paths:
        if path.suffix != ".json":
            raise UsageError(f"{path}: the name of a results file ends in .json")
        written += write_pages(results.read(path), path.with_suffix(""))
    return written


def write_pages(found: Results, prefix: Path) -> list[Path]:
    """Writes PREFIX.md, .tex, .csv and the pictures of results whose file is PREFIX.json."""
    figures.check_name(prefix)
    source = hashlib.sha256(Path(f"{prefix}.json").read_bytes()).hexdigest()
    pictures = figures.draw_all(found, prefix, source)
    if found.bleu:
        pictures.append(Path(f"{prefix}-bleu.png"))
        figures.save(by_length.figure_of(found.bleu), pictures[-1], source)
    written = []
    for suffix, text in texts(found, prefix.name, [picture.name for picture in pictures]).items():
        written.append(Path(f"{prefix}{suffix}"))
        write_text(written[-1], text)
    return [*written, *pictures]


def texts(found: Results, name: str, pictures: list[str]) -> dict[str, str]:
    """The texts of a results file, by the ends of their names."""
    made = {
        ".md": report.page(found, [picture for picture in pictures if picture != f"{name}-bleu.png"]),
        ".tex": report.latex(found),
        ".csv": report.as_csv(found),
    }
    if found.bleu:
        made["-bleu.md"] = by_length.page(found.recipe.title, found.bleu, f"{name}-bleu.png")
    return made


def render_questions(folder: Path, readme: Path) -> list[Path]:
    """Writes FOLDER/README.md from FOLDER/questions.yaml, and answers between the marks of a README.

    Raises:
        UsageError: a question names a file, row, data or column that does not exist.
    """
    written = [folder / "README.md"]
    write_text(written[0], questions_page(folder))
    if readme.is_file() and "<!-- results: " in readme.read_text("utf-8"):
        write_text(readme, with_results(readme.read_text("utf-8"), folder))
        written.append(readme)
    return written


def read_questions(path: Path) -> list[Question]:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Questions), OmegaConf.load(path))
        return OmegaConf.to_object(merged).questions
    except (OmegaConfBaseException, yaml.YAMLError, OSError, RecursionError) as error:
        raise UsageError(f"{path}: {recipe.worded(error)}") from None


def questions_page(folder: Path) -> str:
    """The page of all questions, and what was run of every recipe.

    Questions with strong evidence come first. First looks are collapsed.
    """
    files = read_all(folder)
    questions = read_questions(folder / QUESTIONS)
    found = [
        "# Results",
        "",
        "Made by `fairseq-sg experiments render` from the `.json` files of this folder. They hold every command,",
        "curve, commit and machine.",
        "",
        "± is the standard deviation over seeds. Brackets are the 95 % confidence interval of a difference of means:",
        "Welch's, or that of the differences of equal seeds where one model is evaluated or computed in two ways.",
        "Where there is no difference, one interval of twenty excludes 0. Seeds have other first weights; they share",
        "the data and, an epoch apart, the batches.",
        "",
    ]
    strong, looks = ([q for q in questions if q.first_look is first] for first in (False, True))
    found += [f"- [{question.question}](#{_anchor(question.question)})" for question in (*strong, *looks)]
    found += [""]
    for question in strong:
        found += _block(question, files, "## ")
    if looks:
        found += ["<details>", "<summary>First looks: one seed, or few steps</summary>", ""]
        for question in looks:
            found += _block(question, files, "### ")
        found += ["</details>", ""]
    return "\n".join([*found, *_status(files)])


def with_results(text: str, folder: Path) -> str:
    """A README with new answers between its marks, ``<!-- results: KEY, KEY -->`` and its end.

    Answers come first, then their tables. Tables with the same header become one.

    Raises:
        UsageError: a mark names a question that there is not, or has no end.
    """
    files = read_all(folder)
    questions = {question.key: question for question in read_questions(folder / QUESTIONS) if question.key}

    def made(match: re.Match[str]) -> str:
        keys = match[2].strip().split(", ")
        found: list[str] = []
        tables: list[report.Table] = []
        for key in keys:
            question = _named(questions, key, "question with the key")
            title = f"**{question.question}** " if len(keys) > 1 else ""
            found += ["", _filled(title + question.answer, files)]
            for show in question.tables:
                header, *rows = _table(show, files)
                if tables and tables[-1][0] == header:
                    tables[-1] += rows
                else:
                    tables.append([header, *rows])
        for table in tables:
            found += ["", *report.markdown_table(table)]
        answers = "\n".join(found).strip()
        return f"{match[1]}\n{answers}\n\n{match[4]}"

    if text.count("<!-- results: ") != len(_MARKED.findall(text)):
        raise UsageError("README: a mark <!-- results: KEY --> has no <!-- end of results -->")
    return _MARKED.sub(made, text)


def read_all(folder: Path) -> dict[str, Results]:
    """The results files of a folder, by name."""
    return {path.stem: results.read(path) for path in sorted(folder.glob("*.json"))}


class Overview(NamedTuple):
    """Of a recipe or variant: the number of its trainings, its results files, how many of these trainings they have,
    each of them once and with all its steps, and how many of other seeds or rows.
    """

    recipe: Recipe
    planned: int
    files: dict[str, Results]
    done: int
    more: int


def overview(files: dict[str, Results]) -> Iterator[Overview]:
    """Every recipe and variant."""
    for name in recipe.names():
        for variant in ("", *recipe.variants(recipe.find(name))):
            table = recipe.read(recipe.find(name), variant)
            seeds = table.planned_seeds
            planned = {(row, data, seed) for row in table.trained for data in table.data_of(row) for seed in seeds}
            here = {key: found for key, found in files.items() if found.recipe.full_name == table.full_name}
            full = {key for found in here.values() for key in found.full}
            yield Overview(table, len(planned), here, len(full & planned), len(full - planned))


def _anchor(title: str) -> str:
    """The name by which GitHub links to a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _block(question: Question, files: dict[str, Results], level: str) -> list[str]:
    found = [f"{level}{question.question}", "", _filled(question.answer, files), ""]
    for show in question.tables:
        found += [*report.markdown_table(_table(show, files)), ""]
    if question.notes:
        found += [*(_filled(note, files, "- ") for note in question.notes), ""]
    if question.picture:
        found += [f"![{question.question}]({question.picture})", ""]
    for name in dict.fromkeys(show.results for show in question.tables):
        made = files[name]
        machine = ", ".join(dict.fromkeys(m.get("gpu") or m["cpu"] for m in made.machines))
        found += [f"<sub>[{name}]({name}.md): commit {', '.join(made.commits)}; {machine}.</sub>", ""]
    return found


def _table(show: Show, files: dict[str, Results]) -> report.Table:
    """model | (data) | seeds | steps | each column here, and in the paper where it has it."""
    made = _named(files, show.results, "results file")
    table = made.recipe
    order, data = show.rows or list(table.rows), show.data or list(table.data)
    found = [
        line for line in report.lines(made) if line.row in order and line.data in data and (line.done or line.diverged)
    ]
    columns = show.columns or report.columns_shown(table, found)
    for column in columns:
        _named(table.columns, column, f"column of {show.results}")
    for row in order:
        _named(table.rows, row, f"row of {show.results}")
    for name in data:
        _named(table.data, name, f"data of {show.results}")
    found.sort(key=lambda line: order.index(line.row))
    several = len({line.data for line in found}) > 1
    beside = report.columns_published(table, found)
    header = ["model", *(["data"] if several else []), "seeds", "steps"]
    for column in columns:
        name = show.header.get(column, column)
        header += [f"{name}, here", f"{name}, paper"] if column in beside else [name]
    rows = [header]
    for line in found:
        label = show.labels.get(line.row, line.label)
        cells = [label, *([line.data] if several else []), report.seeds_text(line), report.steps_text(line)]
        for column in columns:
            there = [report.published_text(line, column)] if column in beside else []
            cells += [report.cell_text(table, line, column), *there]
        rows.append(cells)
    return rows


def _filled(text: str, files: dict[str, Results], mark: str = "") -> str:
    """The text with the numbers of its places, in lines of 118 characters; the first begins with ``mark``."""

    def number(match: re.Match[str]) -> str:
        places, comma, how = match[1].partition(", ")
        found = [_cell(place, match[0], files) for place in places.split(" - ")]
        if how not in ("", "paired") or len(found) > 2 or comma and len(found) == 1:
            raise _wrong_place(match[0])
        if len(found) == 1:
            ((recipe, line, column),) = found
            return report.cell_text(recipe, line, column)
        return _difference(found, match[0], paired=bool(how))

    # A sign or a 1. at the start of a line would begin a list.
    text, hanging = mark + re.sub(r" (?=[-+*] |1[.)] )", "\0", _PLACE.sub(number, text)), " " * len(mark)
    lines = textwrap.fill(text, 118, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def _cell(place: str, text: str, files: dict[str, Results]) -> report.Place:
    """The recipe, line and column of ``NAME/ROW/DATA/COLUMN``, a part of ``text``.

    Raises UsageError where they have no number.
    """
    try:
        name, row, data, column = place.split("/")
    except ValueError:
        raise _wrong_place(text) from None
    made = _named(files, name, "results file")
    line = next((line for line in report.lines(made) if (line.row, line.data) == (row, data)), None)
    if line is None or column not in line.cells or not line.cells[column].values:
        raise UsageError(f"{QUESTIONS}: {text} is no number of {name}.json")
    return made.recipe, line, column


def _difference(found: list[report.Place], text: str, paired: bool) -> str:
    """Of two cells, the mean of the first less that of the second, with its interval."""
    a, b = (line.cells[column] for _, line, column in found)
    if any(recipe.statistic == "median" for recipe, *_ in found):
        raise UsageError(f"{QUESTIONS}: {text}: a median has no interval")
    one, other = ((recipe.columns[column].metric, recipe.unit) for recipe, _, column in found)
    if one != other:
        raise UsageError(f"{QUESTIONS}: {text} has {' in '.join(one)} and {' in '.join(other)}, which are not alike")
    if paired and a.seeds != b.seeds:
        raise UsageError(f"{QUESTIONS}: {text} has the seeds {a.seeds} and {b.seeds}, and pairs need equal ones")
    return report.difference(*found, paired)[0]


def _wrong_place(text: str) -> UsageError:
    return UsageError(f"{QUESTIONS}: {text} must be {{NAME/ROW/DATA/COLUMN}}, {{A - B}} or {{A - B, paired}} of such")


def _named(there: dict[str, Any], name: str, what: str) -> Any:
    if name not in there:
        raise UsageError(f"{QUESTIONS}: there is no {what} {name!r}: choose from {', '.join(there)}")
    return there[name]


def _status(files: dict[str, Results]) -> list[str]:
    """What was run of every recipe."""
    rows = [["recipe", "trainings done of planned", "steps", "results"]]
    for table, planned, here, done, more in overview(files):
        share = max(
            (line.steps / line.of for found in here.values() for line in report.lines(found) if line.of), default=0
        )
        rows.append(
            [
                table.full_name,
                f"{done} of {planned}" + (f", {more} more" if more else ""),
                f"{share:.0%}" if share else "–",
                ", ".join(f"[{key}]({key}.md)" for key in here) or "–",
            ]
        )
    return ["## What was run", "", *report.markdown_table(rows), ""]

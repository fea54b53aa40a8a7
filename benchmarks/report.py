"""Measurements as JSON, and the page and figures made of them.

    python -m benchmarks.report            # writes benchmarks/RESULTS.md and its figures again
    python -m benchmarks.report FOLDER     # those of FOLDER/results.json, which a benchmark wrote with --out FOLDER

``results.json`` is the source: a list of sections (``Section``), each with one table of numbers and its provenance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import summary
from benchmarks.measure import Row
from fairseq_sg.errors import UsageError
from fairseq_sg.experiments.figures import COLOURS
from fairseq_sg.experiments.records import commit, machine
from fairseq_sg.files import check_writable, write_text
from fairseq_sg.parsers import Command, positive

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent

#: Kind of section -> its heading and the text under it, in the order of the page.
KINDS = {
    "step": (
        "Training step beside the reference",
        "One step of `fairseq-train`, and the training step of the code released with the thesis "
        "([transformer_generalization](https://github.com/RobertCsordas/transformer_generalization)), on the same "
        "sentences. Seconds are the mean over the batches of a round: median [least, most] of the rounds. Bucketed "
        "batches come from `--length-window`, four batches wide.",
    ),
    "operator": (
        "Operators",
        "Forward and backward: median milliseconds by length or number of experts. `~` marks an uncertain median: its "
        "quartiles are more than 10 % of it apart. `auto` is what a model runs; its time may differ from that of the "
        "implementation it chooses by such noise. The floor is the least time for the bytes or the FLOPs on this "
        "machine. MB is the most memory in use at the largest size, MB kept what autograd keeps for the backward pass "
        "there, without weights. The error is the largest of value and gradients at any size, against float64.",
    ),
    "attentions": (
        "Training step by attention",
        "Forward and backward of SCAN's universal transformer with every attention, feature map and position. MB kept "
        "is what autograd keeps for the backward pass.",
    ),
    "decoding": (
        "Decoding by position",
        "One new token in one causal self-attention after the given number of others. The state is per sentence; "
        "softmax kinds double theirs when it is full.",
    ),
    "orthogonality": (
        "Orthogonality loss in a training step",
        "Forward and backward of SCAN's universal transformer: milliseconds, median [quartiles]. The share is the time "
        "of the loss alone in a step with it, on all nine attentions or on the encoder's three, the default.",
    ),
    "windows": (
        "Windows of softmax attention",
        "Forward and backward of one decoder self-attention, with and without `--attention-window`. MB kept is what "
        "autograd keeps for the backward pass.",
    ),
    "memory": (
        "Differentiable neural computers",
        "A training update, forward and backward, of `sg_dnc` beside torch's LSTM and a transcription of the "
        "equations. Models of one size take turns.",
    ),
    "points": (
        "Operator models by number of points",
        "A training update, forward and backward, of `sg_operator_burgers_small` with several attentions and of "
        "`sg_operator_fno_small`. Models of one number of points take turns.",
    ),
    "together": (
        "Many small trainings",
        "Steps per second of several trainings of `fairseq-train` at once, in processes of their own or in one.",
    ),
    "recorded": (
        "Recorded training steps",
        "A step with `--step-graphs`, replayed: median [quartiles] of its milliseconds, the number of its kernels, and "
        "their sum. `TF32` is that of torch's products, `bfloat16` is `--autocast bfloat16`, and `fused "
        "attention` is softmax attention by torch's fused kernel at every length. `attention in parts` is without it.",
    ),
    "preparation": (
        "Data preparation",
        "One command each, fairseq's binary files included. MB is the peak memory of the process.",
    ),
}
#: Fields of a ``measure.Row`` that are stored; the times of single rounds are not.
STORED = ("size", "contender", "ours", "status", "reason", "error", "low", "median", "high", "peak", "kept")
STORED += ("floor", "floor_of")


@dataclass
class Section:
    """One table with its provenance.

    Attributes:
        kind: of ``KINDS``.
        title: together with the kind the name of the section; a new measurement replaces its namesake.
        device: ``cpu`` or ``cuda``.
        columns: name and format of each. A format is that of `str.format`; a list in a cell fills several places.
        rows: of cells; None for a missing number.
        about: what was measured, as far as the text of the kind does not say it.
        size: of an operator, the meaning of the size. Its columns are ``STORED``, and its rows ``measure.Row``.
        note: for the footer, such as other work of the machine.
        figure: the file name of its figure, or empty.
        command, machine, commit: provenance, which ``publish`` adds.
    """

    kind: str
    title: str
    device: str
    columns: list[tuple[str, str]]
    rows: list[list[Any]]
    about: str = ""
    size: str = ""
    note: str = ""
    figure: str = ""
    command: str = ""
    machine: str = ""
    commit: str = ""

    def measured(self) -> list[Row]:
        """The rows of an operator."""
        operator, names = self.title.split()[0], [name for name, _ in self.columns]
        return [Row(operator=operator, **dict(zip(names, row, strict=True))) for row in self.rows]

    def cell(self, row: str, column: str) -> Any:
        """The cell of a column and the row with this first cell; None if there is none."""
        names = [name for name, _ in self.columns]
        return next((dict(zip(names, cells)).get(column) for cells in self.rows if cells[0] == row), None)


def operator_section(rows: Sequence[Row], title: str, device: str, size: str, note: str) -> Section:
    """The section of one operator, without implementations that cannot run here."""
    cells = [rounded([getattr(row, name) for name in STORED]) for row in rows if row.status != "skipped"]
    return Section("operator", title, device, [(name, "") for name in STORED], cells, size=size, note=note)


def rounded(value: Any) -> Any:
    """Fractions with six digits, also in lists; other values as they are."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def where(device: str) -> str:
    """The machine and versions on one line."""
    found = machine(gpu=device == "cuda")
    hardware = found.get("gpu") or f"{found['cores']} cores of {found['cpu']}"
    return f"{hardware}, Python {found['python']}, torch {found['torch']}"


# Options and files.


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options of every timed benchmark."""
    parser.add_argument("--rounds", type=positive, default=rounds, help="timed rounds (default %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_out(parser)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/results.json and RESULTS.md")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, module: str) -> argparse.Namespace:
    """The options, checked, and as ``command`` the command that has them."""
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if vars(args).get("quick") and args.out is not None and args.out.resolve() == FOLDER:
        parser.error("--quick gives numbers that mean nothing: choose another folder for --out")
    check_out(parser, args.out)
    args.command = command(module, argv)
    return args


def check_out(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Ends a benchmark, before it measures, whose results cannot be written to ``out`` or beside those there."""
    try:
        if out is not None:
            check_writable(f"--out {out}: results.json", out / "results.json")
            load(out)
    except UsageError as error:
        parser.error(f"{error}: choose another folder")
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"--out {out}: its results.json has no sections ({error}): choose another folder")


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command of a benchmark; paths of this machine become PATH."""
    line = shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])
    return re.sub(r"(--(?:out|reference|data|raw-dirs)[ =])(?:'[^']*'|\S+)", r"\1PATH", line)


def publish(section: Section, command: str, out: Path | None = None, figure: bool = False) -> None:
    """Prints a section; with ``out``, stores it in that folder and writes the page.

    Args:
        section: replaces its namesake in the folder, whose figure is drawn again.
        command: that made it.
        out: the folder.
        figure: whether to draw the figure of an operator.
    """
    section.command, section.machine, section.commit = command, where(section.device), commit()
    print(f"{as_markdown(section)}\n\n{footer(section)}\n", flush=True)
    if out is None:
        return
    sections = {(old.kind, old.title): old for old in load(out)}
    key = (section.kind, section.title)
    if figure or (key in sections and sections[key].figure):
        section.figure = figure_name(section.title)
        draw(section, out)
    sections[key] = section
    store(list(sections.values()), out)


def load(folder: Path) -> list[Section]:
    """The sections of a folder; none if it has no ``results.json``."""
    path = folder / "results.json"
    return [Section(**section) for section in json.loads(path.read_text("utf-8"))] if path.is_file() else []


def store(sections: Sequence[Section], folder: Path) -> None:
    """Writes ``results.json``, with one row on a line, and the page."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = []
    for section in sections:
        lines = [f"  {text(name)}: {text(value)}" for name, value in vars(section).items() if name != "rows"]
        rows = ",\n".join(f"   {text(row)}" for row in section.rows)
        parts.append(" {\n" + ",\n".join([*lines, f'  "rows": [\n{rows}\n  ]']) + "\n }")
    write_text(folder / "results.json", "[\n" + ",\n".join(parts) + "\n]\n")
    write_text(folder / "RESULTS.md", page(sections))


# Markdown.


def page(sections: Sequence[Section]) -> str:
    """The page: what a user wants to know first, the promises, then every section in the order of ``KINDS``."""
    links = {
        kind: f"#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')}"
        for kind, (heading, _) in KINDS.items()
    }
    answers = [(f"[{question}]({links[kind]})", *on) for question, kind, *on in summary.answers(sections)]
    promises = summary.all_promises(sections)
    met = [promise.met for _, promise in promises]
    parts = [
        "# Benchmarks",
        table(("question", *summary.DEVICES.values()), answers),
        f"Of the [promises](#promises) {met.count(True)} are met, **{met.count(False)} are not met**, and "
        f"{met.count(None)} are not measured. Never measured: {'; '.join(summary.unmeasured(sections)) or 'nothing'}.",
        "Compare ratios, not times, which depend on the machine. The small print below a table names command, machine "
        "and commit; it also holds for tables above without small print of their own. [README.md](README.md) has the "
        "commands and the method.",
        "## Promises",
        table(("promise", "device", "wanted", "measured", ""), [one.row(device) for device, one in promises]),
    ]
    for kind, (heading, text) in KINDS.items():
        of = [section for section in sections if section.kind == kind]
        if of:
            parts += [f"## {heading}", text]
            for section, after in itertools.zip_longest(of, of[1:]):
                parts.append(as_markdown(section))
                if after is None or footer(section) != footer(after):
                    parts.append(footer(section))
    return "\n\n".join(parts) + "\n"


def as_markdown(section: Section) -> str:
    """Title, text, table and figure of a section."""
    parts = [f"### {section.title}", section.about, table(*(by_size(section) if section.size else shown(section)))]
    if section.size:
        rows = [row for row in section.measured() if row.status != "timed"]
        parts += [f"{row.contender} at {row.size:,} is {row.status}: {row.reason}" for row in rows]
    if section.figure:
        parts.append(f"![Time and memory of {section.title}](figures/{section.figure})")
    return "\n\n".join(filter(None, parts))


def footer(section: Section) -> str:
    """The provenance of a section in small print."""
    parts = (f"`{section.command}`", section.machine, f"commit {section.commit}", section.note)
    return f"<sub>{'; '.join(filter(None, parts))}</sub>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns except the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def shown(section: Section) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table, as words."""

    def word(cell: Any, form: str) -> str:
        if cell is None:
            return "–"
        return form.format(*cell) if isinstance(cell, list) else form.format(cell)

    forms = [form for _, form in section.columns]
    return [name for name, _ in section.columns], [list(map(word, row, forms)) for row in section.rows]


def by_size(section: Section) -> tuple[list[str], list[list[str]]]:
    """Header and rows of an operator's table: implementations in rows, sizes in columns."""
    rows = section.measured()
    sizes = list(dict.fromkeys(row.size for row in rows))
    found = {(row.contender, row.size): row for row in rows}
    floors = {row.size: row.floor for row in rows}
    body = []
    if any(floors.values()):
        body.append(["floor", *(number(floors[size]) for size in sizes)])
    for name in dict.fromkeys(row.contender for row in rows):
        body.append([name, *(time(found.get((name, size))) for size in sizes)])
    header = [f"ms by {section.size}", *(f"{size:,}" for size in sizes)]
    for column, of in (("MB", "peak"), ("MB kept", "kept")):
        if any(getattr(row, of) is not None for row in rows):
            header.append(column)
            for line in body:
                value = getattr(found.get((line[0], sizes[-1])), of, None)
                line.append("" if line[0] == "floor" else number(value and value / 1e6))
    if any(row.error is not None for row in rows):
        header.append("error")
        for line in body:
            errors = [row.error for row in rows if row.contender == line[0] and row.error is not None]
            line.append(f"{max(errors):.0e}" if errors else "")
    return header, body


def time(row: Row | None) -> str:
    """A median, marked if it is uncertain; otherwise the reason why there is none."""
    if row is None or row.median is None:
        return "–" if row is None else row.status
    uncertain = row.low is not None and row.high - row.low > 0.1 * row.median
    return "~" * uncertain + number(row.median)


def number(x: float | None) -> str:
    """Three digits, or more before the decimal point."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


# Figures.


def figure_name(title: str) -> str:
    return re.sub(r"\W+", "-", title.replace(",", "")).strip("-") + ".png"


def draw(section: Section, folder: Path) -> None:
    """Draws an operator's time and memory by size into ``figures``."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = [row for row in section.measured() if row.status == "timed"]
    sizes = list(dict.fromkeys(row.size for row in rows))
    # The automatic choice is one of the others.
    names = [name for name in dict.fromkeys(row.contender for row in rows) if name != "auto"]
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 3.8), sharex=True)
    for axes, label, scale in zip(panels, ("milliseconds, forward and backward", "MB in use at most"), (1, 1e6)):
        ends = {}
        for name, colour in zip(names, itertools.cycle(COLOURS[:6])):
            of = [row for row in rows if row.contender == name]
            values = [(row.median if scale == 1 else row.peak) / scale for row in of]
            axes.plot([row.size for row in of], values, marker="o", markersize=4, color=colour)
            if scale == 1:
                low, high = [row.low or row.median for row in of], [row.high or row.median for row in of]
                axes.fill_between([row.size for row in of], low, high, alpha=0.2, color=colour)
            ends[name] = (of[-1].size, values[-1], colour)
        if scale == 1 and all(row.floor for row in rows):
            floors = {row.size: row.floor for row in rows}
            axes.plot(sizes, [floors[size] for size in sizes], linestyle="--", color="grey")
            ends["floor"] = (sizes[-1], floors[sizes[-1]], "grey")
        axes.set(xscale="log", yscale="log", xlabel=section.size, ylabel=label)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        label_ends(axes, ends)
    figure.suptitle(section.title, fontsize="medium")
    figure.tight_layout()
    path = folder / "figures" / section.figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def label_ends(axes: Any, ends: dict[str, tuple[float, float, str]]) -> None:
    """Writes names at the right ends of lines, moved up where they would overlap."""
    axes.figure.canvas.draw()
    below = -math.inf
    for name, (x, y, colour) in sorted(ends.items(), key=lambda end: end[1][1]):
        at = axes.transData.transform((x, y))[1]
        below = max(at, below + 11)  # points of a line of text
        axes.annotate(name, (x, y), (6, below - at), textcoords="offset pixels", va="center", color=colour, fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="with results.json (default: this one)")
    args = parser.parse_args(argv)
    sections = load(args.folder)
    if not sections:
        sys.exit(f"error: {args.folder / 'results.json'} has no section: write it with --out {args.folder}")
    store(sections, args.folder)
    for section in sections:
        if section.figure:
            draw(section, args.folder)


if __name__ == "__main__":
    main()

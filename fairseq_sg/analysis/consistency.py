"""PCFG SET: substitutivity, localism and overgeneralisation, scored from greedy outputs (Hupkes et al. 2020).

The data folder names the test, ``python -m data_prep pcfg --condition …``:

    substitutivity_…     ``consistent``: how often a source of ``test``, and the same one with a synonym in ``gen``, get
                         the same output, right or wrong
    localism             ``consistent``: how often an expression of ``test`` and its last step get the same output. A
                         step has one function, and reads the model's own outputs of earlier steps
    overgeneralisation   how often an exception's output follows the rule (``overgeneralised``), is the trained one
                         (``memorised``), or is neither (``other``)

Rows of the table are all pairs; those whose first output is right, or wrong; those with at least one wrong output; and
those of every type: the renamed function, the number of functions, the exceptional pair. OUT.json has percentages and
counts, OUT.npz one bool per pair and column, and ``group``, the number of its type in OUT.json's list.

Several checkpoints of one NAME are a profile over updates, with a band from minimum to maximum where several have the
same number: ``linear=runs/over/checkpoint*.pt``. A further file of one training with the same number, such as
checkpoint_last.pt, is omitted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.accuracy import natural
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest
from fairseq_sg.parsers import positive
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERGENERALISED = "overgeneralised"
#: row -> column -> percentage, and ``pairs``, their number
Scores = dict[str, dict[str, float]]


class Outputs(NamedTuple):
    """Attributes:
    columns: what is counted -> whether it holds for each pair, bool (P,).
    rows: members of subsets of the pairs beside "all" and the types, bool (P,).
    groups: the type of each pair.
    """

    columns: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    groups: list[str]


class Unrolled(NamedTuple):
    """An expression with its target, and its steps: sources with ``*K``, the output of step K."""

    source: str
    target: str
    steps: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_batches(parser)
    parser.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="maximum length of an output in words (default: the maximum target length of the data)",
    )


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    condition = condition_of(loaded.folder)
    outputs = TESTS[condition.partition("_")[0]](Path(loaded.folder, "raw"), loaded, args)
    names = sorted(set(outputs.groups), key=natural)
    group = np.array([names.index(name) for name in outputs.groups])
    scores = tabulate(outputs, names)
    facts = {"condition": condition, "updates": loaded.updates, "types": names, "scores": scores}
    return Result({**outputs.columns, "group": group}, facts, [condition, *table(scores)])


def condition_of(folder: str) -> str:
    """The condition of a folder of PCFG SET. Raises UsageError for one without these scores."""
    request = read_manifest(folder).get("request") or {}
    condition = request.get("condition", "") if request.get("dataset") == "pcfg" else ""
    if condition.partition("_")[0] not in TESTS:
        raise UsageError(
            f"{folder} has no such test: give a folder of `python -m data_prep pcfg --condition` {', '.join(TESTS)} "
            "with --data"
        )
    return condition


# The tests.


def substitutivity(raw: Path, loaded: Loaded, args: argparse.Namespace) -> Outputs:
    sources, targets, renamed = (read(raw / name, args) for name in ("test.src", "test.tgt", "gen.src"))
    found = answers(loaded, sources + renamed, args)
    return compare("test", found[: len(sources)], "gen", found[len(sources) :], targets, read(raw / "test.type", args))


def localism(raw: Path, loaded: Loaded, args: argparse.Namespace) -> Outputs:
    unrolled = read_unrolled(raw / "unrolled.tsv")[: args.limit]
    whole = answers(loaded, [expression.source for expression in unrolled], args)
    steps = step_by_step(loaded, [expression.steps for expression in unrolled], args)
    groups = [f"functions_{len(expression.steps):02}" for expression in unrolled]
    return compare("whole", whole, "steps", steps, [expression.target for expression in unrolled], groups)


def overgeneralisation(raw: Path, loaded: Loaded, args: argparse.Namespace) -> Outputs:
    found = answers(loaded, read(raw / "exception.src", args), args)
    rule, trained = (equal(found, read(raw / f"{name}.tgt", args)) for name in ("original", "exception"))
    held = {OVERGENERALISED: rule, "memorised": trained, "other": ~(rule | trained)}
    return Outputs(held, {}, read(raw / "exception.type", args))


TESTS = {"substitutivity": substitutivity, "localism": localism, "overgeneralisation": overgeneralisation}


def compare(
    first: str, one: list[str], second: str, other: list[str], targets: list[str], groups: list[str]
) -> Outputs:
    """Whether two outputs for each target are equal and right; the outputs are called ``first`` and ``second``."""
    same, right, other_right = equal(one, other), equal(one, targets), equal(other, targets)
    held = {"consistent": same, f"{first}_right": right, f"{second}_right": other_right}
    rows = {f"{first} is right": right, f"{first} is wrong": ~right, "one is wrong": ~(right & other_right)}
    return Outputs(held, rows, groups)


def equal(one: list[str], other: list[str]) -> np.ndarray:
    """Whether two outputs are equal and not empty, bool (P,)."""
    return np.array([a == b != "" for a, b in zip(one, other, strict=True)], dtype=bool)


# The outputs of the model.


def step_by_step(loaded: Loaded, expressions: list[list[str]], args: argparse.Namespace) -> list[str]:
    """The output of the last step of every expression; "" if a step was too long for the model."""
    done: list[list[str]] = [[] for _ in expressions]
    for number in range(max(map(len, expressions))):
        ready = [index for index, steps in enumerate(expressions) if number < len(steps) and "" not in done[index]]
        sources = [fill(expressions[index][number], done[index]) for index in ready]
        for index, answer in zip(ready, answers(loaded, sources, args), strict=True):
            done[index].append(answer)
    return ["" if "" in outputs else outputs[-1] for outputs in done]


def fill(step: str, outputs: list[str]) -> str:
    """A step with the output of step K instead of ``*K``."""
    return " ".join(outputs[int(word[1:]) - 1] if word.startswith("*") else word for word in step.split())


@torch.no_grad()
def answers(loaded: Loaded, sources: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The greedy output for every source, of one word at least; "" for a source too long for the model.

    Equal sources get one output, and sources of like lengths share a batch.
    """
    task, model, dictionary = loaded.task, loaded.model, loaded.task.source_dictionary
    lines = sorted(set(sources), key=lambda line: (len(line.split()), line))
    tokens = [torch.tensor([*map(dictionary.index, line.split()), dictionary.eos()]) for line in lines]
    longest = utils.resolve_max_positions(task.max_positions(), model.max_positions())[0]
    dataset = task.build_dataset_for_inference(tokens, list(map(len, tokens)))
    fitting = int((dataset.src_sizes <= longest).sum())
    # One word more than the longest target, end symbol included: an output that is cut there is wrong.
    limit = args.max_len or loaded.longest_target or 200
    generator = task.build_generator([model], GenerationConfig(beam=1, min_len=1, max_len_a=0, max_len_b=limit))
    found = dict.fromkeys(lines, "")
    for batch in loaded.batches(dataset, args.batch_size, fitting):
        hypotheses = task.inference_step(generator, [model], batch)
        for index, (best, *_) in zip(batch["id"].tolist(), hypotheses, strict=True):
            found[lines[index]] = task.target_dictionary.string(best["tokens"])
    return [found[source] for source in sources]


# The files of the test.


def read(path: Path, args: argparse.Namespace) -> list[str]:
    """The first lines of a file of ``raw/``."""
    return path.read_text(encoding="utf-8").splitlines()[: args.limit]


def read_unrolled(path: Path) -> list[Unrolled]:
    """The expressions of ``raw/unrolled.tsv`` and their steps. Raises UsageError for another file."""
    expressions, steps = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        label, *rest = line.split("\t")
        if label == "unrolled" and len(rest) == 2:
            steps.append(rest[0])
        elif label == "original" and len(rest) == 2 and steps:
            expressions.append(Unrolled(*rest, steps))
            steps = []
        else:
            raise UsageError(f"{path}:{number} is not a step: prepare the folder again with `python -m data_prep`")
    return expressions


# The scores.


def tabulate(outputs: Outputs, names: Sequence[str]) -> Scores:
    """The percentages of every row that has pairs."""
    pairs = len(outputs.groups)
    rows = {"all": np.ones(pairs, dtype=bool), **outputs.rows}
    rows |= {name: np.array([group == name for group in outputs.groups]) for name in names}
    return {
        row: {"pairs": int(members.sum())}
        | {column: 100 * float(holds[members].mean()) for column, holds in outputs.columns.items()}
        for row, members in rows.items()
        if members.any()
    }


def table(scores: Mapping[str, Mapping[str, float]], first: str = "%") -> list[str]:
    """The lines of a table; ``first`` is above the names of its rows."""
    columns = list(next(iter(scores.values())))
    cells = [[first, *columns]]
    for row, of in scores.items():
        cells.append([row, *(f"{of[name]:,.0f}" if name == "pairs" else f"{of[name]:.2f}" for name in columns)])
    return aligned(cells)


# Several checkpoints.


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """One result for several models, each with its checkpoints: of one training, or of several seeds.

    Raises UsageError if they were tested on different data.
    """
    first = next(iter(measured.values()))[0]
    facts = {name: first.facts[name] for name in ("condition", "types")}
    combined = Result(facts={**facts, "models": {}}, summary=[facts["condition"]])
    for model, results in measured.items():
        at: dict[str, list[Scores]] = {}
        seen: set[Any] = set()
        for result in sorted(results, key=lambda result: result.facts["updates"]):
            if tested(result) != tested(first):
                raise UsageError(
                    f"{model} was tested on other data than the first model: compare models of the same data"
                )
            updates = str(result.facts["updates"])
            if "checkpoint" in result.facts:
                same = (os.path.dirname(result.facts["checkpoint"]), updates, outcomes(result))
                if same in seen:
                    continue
                seen.add(same)
            at.setdefault(updates, []).append(result.facts["scores"])
            number = len(at[updates])
            combined.arrays |= {f"{model}.{updates}.{number}.{key}": array for key, array in result.arrays.items()}
        combined.facts["models"][model] = at
        means = {updates: mean([scores["all"] for scores in seeds]) for updates, seeds in at.items()}
        combined.summary += ["", *table(means, f"{model}, updates")]
        if OVERGENERALISED in first.facts["scores"]["all"]:
            peak = max(means, key=lambda updates: means[updates][OVERGENERALISED])
            combined.summary.append(f"peak: {means[peak][OVERGENERALISED]:.2f} % {OVERGENERALISED} at {peak} updates")
    return combined


def tested(result: Result) -> tuple[str, bytes]:
    """The test and the types of its pairs."""
    return result.facts["condition"], result.arrays["group"].tobytes()


def outcomes(result: Result) -> bytes:
    """What holds for each pair: seeds with files in one folder differ in it, copies of one checkpoint do not."""
    return b"".join(array.tobytes() for array in result.arrays.values())


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    """Bars by type for one checkpoint, else lines over updates."""
    facts = result.facts
    if "models" in facts:
        curves = {
            model: {
                column: {updates: [scores["all"][column] for scores in seeds] for updates, seeds in at.items()}
                for column in columns(next(iter(at.values()))[0])
            }
            for model, at in facts["models"].items()
        }
        return {"": plots.accuracies(curves, "updates", up="% of pairs")}
    scores, names = facts["scores"], facts["types"]
    bars = {column: {"": {name: [scores[name][column]] for name in names}} for column in columns(scores)}
    pairs = {"": {name: scores[name]["pairs"] for name in names}}
    return {"": plots.accuracies(bars, "type", None, names, pairs, "% of pairs")}


def columns(scores: Scores) -> list[str]:
    """The names of the columns with percentages."""
    return [name for name in scores["all"] if name != "pairs"]

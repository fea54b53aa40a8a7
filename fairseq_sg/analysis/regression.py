"""Error of a regressor by the number of examples, beside the errors of exact predictors (Garg et al. 2022).

Prediction i of a prompt has seen i − 1 examples. Errors are squared and divided by the unit of the data, as in
training. The predictors are computed on the same prompts:

    least_squares       linear weights of minimum norm; for linear functions without noise nothing is better
    averaging           weights Σ x y / (k σ²)
    gradient_step       weights Σ x y / ((k + n + 1) σ²): the best step of gradient descent for linear functions
    nearest_neighbors   the mean of the 3 nearest examples

A looped model predicts after every loop. The table by examples has the last one; a second table has the query's error
after each loop. --model-overrides "{'loops': 20}" runs more loops than the training.

OUT.npz has SUBSET.errors (loops, prompts, points), and SUBSET.PREDICTOR (prompts, points). OUT.json has their means,
and the least mean error that any predictor can have, where it is known.

Several checkpoints, NAME=CHECKPOINT each, are compared in one picture, those of one NAME as seeds of one model: their
mean, and a band from minimum to maximum.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data_prep.in_context.oracles import ORACLES
from data_prep.in_context.shifts import SHIFTS
from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Models of ``sg_regression``.
KINDS = ("numbers",)
#: Numbers of examples up to which all have a row; after it, powers of 2 and the last one.
ALL_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subset", default="test", metavar="NAMES", help="subsets, comma separated (default: test)")
    add_batches(parser, "default: all")


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    result = Result(facts={"subsets": {}})
    for name in loaded.named_subsets(args.subset):
        dataset = loaded.subset(name)
        prompts, unit = loaded.task.prompts, loaded.task.unit
        x, y, errors = [], [], []
        for batch in loaded.batches(dataset, args.batch_size, args.limit):
            predictions = loaded.model(**batch["net_input"])[0]  # (loops, B, P)
            errors.append(((predictions - batch["target"]).square() / unit).cpu().numpy())
            x.append(batch["net_input"]["x"].cpu().numpy())
            y.append(batch["target"].cpu().numpy())
        all_x, all_y = np.concatenate(x), np.concatenate(y)
        exact = {known: (oracle(all_x, all_y, prompts.x_std) - all_y) ** 2 / unit for known, oracle in ORACLES.items()}
        found = np.concatenate(errors, axis=1)
        result.arrays |= {f"{name}.errors": found, **{f"{name}.{known}": value for known, value in exact.items()}}
        entry = {
            "prompts": len(all_y),
            "unit": unit,
            "floor": None if name in SHIFTS else replace(prompts, examples=all_y.shape[1] - 1).floor,
            "oracles": {known: value.mean(0).tolist() for known, value in exact.items()},
            "errors": found[-1].mean(0).tolist(),
            "by_loop": found[:, :, -1].mean(1).tolist(),
        }
        result.facts["subsets"][name] = entry
        result.summary += describe(name, entry)
    return result


def describe(name: str, entry: Mapping[str, Any]) -> list[str]:
    """The lines on one subset of one checkpoint."""
    mean = float(np.mean(entry["errors"]))
    least = "" if entry["floor"] is None else f"; at least {entry['floor']:.4f} is expected of any predictor"
    lines = [f"{name}: {entry['prompts']:,} prompts, mean error {mean:.4f}{least}"]
    lines += table(entry["oracles"], {"model": [entry["errors"]]})
    if len(entry["by_loop"]) > 1:
        cells = [[str(loop), f"{error:.4f}"] for loop, error in enumerate(entry["by_loop"], start=1)]
        lines += aligned([["loops", "error of the query"], *cells], left=0)
    return lines


def table(oracles: Mapping[str, Sequence[float]], models: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """The lines of a table by examples: the mean over the seeds of every model, then the oracles."""
    columns = {model: np.mean(seeds, axis=0) for model, seeds in models.items()} | dict(oracles)
    points = len(next(iter(columns.values())))
    rows = [seen for seen in range(points) if seen <= ALL_ROWS or seen & (seen - 1) == 0 or seen == points - 1]
    cells = [[str(seen), *(f"{column[seen]:.4f}" for column in columns.values())] for seen in rows]
    return aligned([["examples", *columns], *cells], left=0)


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """One result for several models, each with its seeds. Raises UsageError if they were tested on other prompts."""
    first = next(iter(measured.values()))[0].facts["subsets"]
    combined = Result(facts={"subsets": {}})
    common = {name: {k: entry[k] for k in ("prompts", "unit", "floor", "oracles")} for name, entry in first.items()}
    for model, seeds in measured.items():
        for number, result in enumerate(seeds, 1):
            subsets = result.facts["subsets"]
            if any(subsets[name][key] != value for name, entry in common.items() for key, value in entry.items()):
                raise UsageError(f"{model} was tested on other prompts than the first model: give one folder by --data")
            combined.arrays |= {f"{model}.{number}.{key}": array for key, array in result.arrays.items()}
    for name, entry in common.items():
        of_models = {
            model: {key: [r.facts["subsets"][name][key] for r in seeds] for key in ("errors", "by_loop")}
            for model, seeds in measured.items()
        }
        for model, found in of_models.items():
            if len({len(loops) for loops in found["by_loop"]}) > 1:
                raise UsageError(f"the checkpoints of {model} have other numbers of loops: give each number its name")
        combined.facts["subsets"][name] = entry | {"models": of_models}
        combined.summary += [f"{name}: {entry['prompts']:,} prompts"]
        combined.summary += table(entry["oracles"], {model: found["errors"] for model, found in of_models.items()})
    return combined


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    """A panel by examples for every subset, and one by loops where a model has several."""
    by_examples, by_loops = {}, {}
    for name, entry in result.facts["subsets"].items():
        alone = {"model": {"errors": [entry["errors"]], "by_loop": [entry["by_loop"]]}} if "errors" in entry else {}
        models = entry.get("models", alone)
        by_examples[name] = plots.Lines(
            {model: (range(len(found["errors"][0])), found["errors"]) for model, found in models.items()},
            {known: (range(len(values)), values) for known, values in entry["oracles"].items()},
            "examples seen",
        )
        if any(len(found["by_loop"][0]) > 1 for found in models.values()):
            curves = {m: (range(1, len(f["by_loop"][0]) + 1), f["by_loop"]) for m, f in models.items()}
            by_loops[f"{name}, last point"] = plots.Lines(curves, {}, "loops")
    return {"": plots.errors(by_examples | by_loops, "squared error")}

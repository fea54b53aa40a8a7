"""Error of a regressor by the number of examples, beside the errors of exact predictors (Garg et al. 2022).

Prediction i of a prompt has seen i − 1 examples. Errors are squared and divided by the unit of the data, as in
training. The predictors are computed on the same prompts:

    least_squares       linear weights of minimum norm; for linear functions without noise nothing is better
    averaging           weights Σ x y / (k σ²)
    gradient_step       weights Σ x y / ((k + n + 1) σ²): the best step of gradient descent for linear functions
    nearest_neighbors   the mean of the 3 nearest examples

A looped model predicts after every loop. The table by examples has the last one; a second table has the query's error
after each loop. --model-overrides "{'loops': 20}" runs more loops than the training.

--scales N adds N tests of prompts like those of training, but for the standard deviation of x. Each test draws its own,
uniform between 0 and that of training. All checkpoints get the same prompts. An error is that of the query, the mean
over the loops, and a picture of its own shows boxes of them (the first figure of Laptev 2024).

OUT.npz has SUBSET.errors (loops, prompts, points), SUBSET.PREDICTOR (prompts, points) and scales.errors (loops, N).
OUT.json has their means, and the least mean error that any predictor can have, where it is known.

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
from fairseq_sg.parsers import positive
from fairseq_sg.tables import aligned
from fairseq_sg.tasks.sg_regression import FrozenPrompts, PromptDataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Models of ``sg_regression``.
KINDS = ("numbers",)
#: Numbers of examples up to which all have a row; after it, powers of 2 and the last one.
ALL_ROWS = 8
#: The name of the tests of ``--scales``, and the seed of their standard deviations and prompts.
SCALES, SCALES_SEED = "scales", 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subset", default="test", metavar="NAMES", help="subsets, comma separated (default: test)")
    add_batches(parser)
    parser.add_argument(
        "--scales", type=positive, metavar="N", help="also N tests with x of other standard deviations (default: none)"
    )


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    result = Result(facts={"subsets": {}})
    prompts, unit, size = loaded.task.prompts, loaded.task.unit, 0
    for name in loaded.named_subsets(args.subset):
        x, y, found = evaluate(loaded, loaded.subset(name), args)
        size = size or len(y)
        exact = {known: (oracle(x, y, prompts.x_std) - y) ** 2 / unit for known, oracle in ORACLES.items()}
        result.arrays |= {f"{name}.errors": found, **{f"{name}.{known}": value for known, value in exact.items()}}
        entry = {
            "prompts": len(y),
            "unit": unit,
            "floor": None if name in SHIFTS else replace(prompts, examples=y.shape[1] - 1).floor,
            "oracles": {known: value.mean(0).tolist() for known, value in exact.items()},
            "errors": found[-1].mean(0).tolist(),
            "by_loop": found[:, :, -1].mean(1).tolist(),
        }
        result.facts["subsets"][name] = entry
        result.summary += describe(name, entry)
    if args.scales:
        stds, found = at_scales(loaded, args, size)
        result.arrays[f"{SCALES}.errors"] = found
        errors = found.mean(0)
        facts = {"prompts": size, "x_std": stds.tolist()}
        result.facts[SCALES] = facts | {"errors": errors.tolist(), "mean": float(errors.mean())}
        result.summary += describe_scales(facts, {"model": [errors]})
    return result


def evaluate(
    loaded: Loaded, dataset: PromptDataset, args: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompts of a dataset, x (S, P, n) and y (S, P), and the model's squared errors / unit (loops, S, P)."""
    x, y, errors = [], [], []
    for batch in loaded.batches(dataset, args.batch_size, args.limit):
        predictions = loaded.model(**batch["net_input"])[0]  # (loops, B, P)
        errors.append(((predictions - batch["target"]).square() / loaded.task.unit).cpu().numpy())
        x.append(batch["net_input"]["x"].cpu().numpy())
        y.append(batch["target"].cpu().numpy())
    return np.concatenate(x), np.concatenate(y), np.concatenate(errors, axis=1)


def at_scales(loaded: Loaded, args: argparse.Namespace, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The tests of ``--scales``: the standard deviations of x (N,), and the query's errors / unit (loops, N).

    Each is the mean over ``size`` prompts, the same for every model that was trained on this distribution.
    """
    prompts = loaded.task.prompts
    stds = prompts.x_std * np.random.RandomState(SCALES_SEED).uniform(size=args.scales)
    errors = []
    for number, std in enumerate(stds):
        x, y = replace(prompts, x_std=std).draw_many(SCALES_SEED, f"{SCALES}{number}", size)
        found = evaluate(loaded, FrozenPrompts(x, y), args)[2]
        errors.append(found[:, :, -1].mean(1))
    return stds, np.stack(errors, axis=1)


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


def describe_scales(common: Mapping[str, Any], models: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """The lines on the tests of ``--scales``: the mean of every model, and its quartiles, over tests and seeds."""
    cells = [
        [model, f"{np.mean(seeds):.4f}", *(f"{value:.4f}" for value in np.quantile(seeds, (0.25, 0.5, 0.75)))]
        for model, seeds in models.items()
    ]
    head = f"{len(common['x_std'])} tests of {common['prompts']:,} prompts, each with x of its own standard deviation:"
    return [head, *aligned([["model", "mean", "quartile", "median", "quartile"], *cells], left=1)]


def table(oracles: Mapping[str, Sequence[float]], models: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """The lines of a table by examples: the mean over the seeds of every model, then the oracles."""
    columns = {model: np.mean(seeds, axis=0) for model, seeds in models.items()} | dict(oracles)
    points = len(next(iter(columns.values())))
    rows = [seen for seen in range(points) if seen <= ALL_ROWS or seen & (seen - 1) == 0 or seen == points - 1]
    cells = [[str(seen), *(f"{column[seen]:.4f}" for column in columns.values())] for seen in rows]
    return aligned([["examples", *columns], *cells], left=0)


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """One result for several models, each with its seeds. Raises UsageError if they were tested on other prompts."""
    facts = next(iter(measured.values()))[0].facts
    first, combined = facts["subsets"], Result(facts={"subsets": {}})
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
                raise UsageError(f"the checkpoints of {model} have different numbers of loops: give each its NAME")
        combined.facts["subsets"][name] = entry | {"models": of_models}
        combined.summary += [f"{name}: {entry['prompts']:,} prompts"]
        combined.summary += table(entry["oracles"], {model: found["errors"] for model, found in of_models.items()})
    if SCALES in facts:
        shared = {key: facts[SCALES][key] for key in ("prompts", "x_std")}
        errors = {model: [result.facts[SCALES]["errors"] for result in seeds] for model, seeds in measured.items()}
        combined.facts[SCALES] = shared | {"models": errors}
        combined.summary += describe_scales(shared, errors)
    return combined


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    """A panel by examples for every subset, one by loops where a model has several, and the boxes of ``--scales``."""
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
    figures = {"": plots.errors(by_examples | by_loops, "squared error")}
    if SCALES in result.facts:
        found = result.facts[SCALES]
        models = found.get("models") or {"model": [found["errors"]]}
        figures[SCALES] = plots.spreads({model: np.ravel(seeds) for model, seeds in models.items()}, "squared error")
    return figures

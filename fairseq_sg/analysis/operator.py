"""Predicted functions beside true ones, and their error by resolution (Cao 2021).

Errors are relative, ‖û − u‖₂/‖u‖₂, as in training. A subset has one grid: --subset test,test_512,test_2048 gives the
error on three. In one dimension the picture has input, truth, prediction and error over x. In two it has a map of each.

OUT.npz has SUBSET.errors (functions,), and of the functions of --samples SUBSET.input, SUBSET.target and
SUBSET.prediction. OUT.json has means, medians and largest errors, and the mean of ‖u‖₂ as ``size``.

Several checkpoints, NAME=CHECKPOINT each, are compared by resolution, those of one NAME as seeds of one model: their
mean, and a band from minimum to maximum.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches
from fairseq_sg.analysis.result import Result
from fairseq_sg.criterions.relative_l2 import norms
from fairseq_sg.errors import UsageError
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Models of ``sg_operator``.
KINDS = ("functions",)


def numbers(text: str) -> tuple[int, ...]:
    """Argument type: whole numbers, separated by commas."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"must be numbers of functions such as 0,1,5, not {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subset", default="test", metavar="NAMES", help="subsets, comma separated (default: test)")
    parser.add_argument(
        "--samples", type=numbers, default=(0, 1, 2), metavar="N,N", help="functions that are drawn (default: 0,1,2)"
    )
    add_batches(parser)


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    result = Result(facts={"dims": loaded.task.fields.dims, "samples": list(args.samples), "subsets": {}})
    for name in loaded.named_subsets(args.subset):
        dataset = loaded.subset(name)
        if max(args.samples) >= len(dataset):
            raise UsageError(
                f"--samples has {max(args.samples)}, and {name} has the functions 0 to {len(dataset) - 1}: choose "
                "among them"
            )
        errors, sizes = [], []
        for batch in loaded.batches(dataset, args.batch_size, args.limit):
            sizes.append(norms(batch["target"]))
            errors.append(norms(loaded.run(batch)[0].to(batch["target"]) - batch["target"]) / sizes[-1])
        found = torch.cat(errors).cpu().numpy()
        result.arrays[f"{name}.errors"] = found
        result.arrays |= {f"{name}.{part}": values for part, values in drawn(loaded, dataset, args.samples).items()}
        result.facts["subsets"][name] = {
            "functions": len(found),
            "points": len(dataset.target_axis),
            "size": float(torch.cat(sizes).double().mean()),
            "mean": float(found.mean()),
            "median": float(np.median(found)),
            "largest": float(found.max()),
        }
    result.summary = table(result.facts["subsets"])
    return result


def drawn(loaded: Loaded, dataset: Any, samples: Sequence[int]) -> dict[str, np.ndarray]:
    """Input, target and prediction of some functions, and the axes of their grids."""
    batch = dataset.collater([dataset[number] for number in samples])
    on_device = {name: x.to(loaded.device) for name, x in batch["net_input"].items()}
    prediction = loaded.model(**on_device)[0]
    return {
        "axis": dataset.axis.numpy(),
        "target_axis": dataset.target_axis.numpy(),
        "input": batch["net_input"]["a"].numpy(),
        "target": batch["target"].numpy(),
        "prediction": prediction.double().cpu().numpy(),
    }


def table(subsets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines on one checkpoint."""
    cells = [["subset", "points", "functions", "mean error", "median", "largest"]]
    for name, entry in subsets.items():
        errors = (f"{entry[key]:.6f}" for key in ("mean", "median", "largest"))
        cells.append([name, f"{entry['points']:,}", f"{entry['functions']:,}", *errors])
    return aligned(cells)


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """One result for several models, each with its seeds. Raises UsageError if their grids or functions differ."""
    first = next(iter(measured.values()))[0].facts
    common = {name: {k: entry[k] for k in ("functions", "points")} for name, entry in first["subsets"].items()}
    combined = Result(facts={"dims": first["dims"], "samples": first["samples"], "subsets": common})
    means: dict[str, dict[str, list[float]]] = {name: {} for name in common}
    for model, seeds in measured.items():
        for number, result in enumerate(seeds, 1):
            combined.arrays |= {f"{model}.{number}.{key}": array for key, array in result.arrays.items()}
            for name, entry in result.facts["subsets"].items():
                if any(entry[key] != value for key, value in common[name].items()):
                    raise UsageError(
                        f"{model} was tested on other grids than the first model: give one folder by --data"
                    )
                if not np.isclose(entry["size"], first["subsets"][name]["size"], rtol=1e-4):
                    raise UsageError(
                        f"{model} was tested on other functions than the first model: give one folder by --data"
                    )
                means[name].setdefault(model, []).append(entry["mean"])
    cells = [["subset", "points", *measured]]
    for name, entry in common.items():
        entry["models"] = means[name]
        cells.append([name, f"{entry['points']:,}", *(f"{np.mean(means[name][model]):.6f}" for model in measured)])
    combined.summary = aligned(cells)
    return combined


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    """``samples``: functions of the first subset, of one model. ``grids``: the error by resolution, where there are
    several, and of several models.
    """
    subsets, figures = result.facts["subsets"], {}
    name = next(iter(subsets))
    compared = "models" in subsets[name]
    if not compared:
        parts = {part: result.arrays[f"{name}.{part}"] for part in ("input", "target", "prediction")}
        titles = [f"{name} {number}" for number in result.facts["samples"]]
        if result.facts["dims"] == 1:
            axes = result.arrays[f"{name}.axis"], result.arrays[f"{name}.target_axis"]
            figures["samples"] = plots.functions(*axes, **parts, titles=titles)
        else:
            figures["samples"] = plots.fields(**parts, titles=titles)
    points = [entry["points"] for entry in subsets.values()]
    if compared or len(set(points)) > 1:
        # model -> the mean error of every seed, by subset, from the coarsest grid on
        means = [entry.get("models") or {"model": [entry["mean"]]} for entry in subsets.values()]
        order = np.argsort(points, kind="stable")
        at = np.array(points)[order]
        curves = {model: (at, np.array([means[number][model] for number in order]).T) for model in means[0]}
        figures["grids"] = plots.errors({"": plots.Lines(curves, {}, "points a side")}, "relative error")
    return figures

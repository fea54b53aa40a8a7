"""CTL++: how similarly functions represent the same symbol (Csordás 2023, section 6.3.1, Figures 6.3, E.5–E.7).

All functions are bijections, so for an output symbol s' each function f has one input s with f(s) = s'.
The representation of s' by f is the vector below the classification layer when the model reads "f s". For
every symbol s', OUT.npz has

    similarity.s'        (functions, functions), the cosine similarity of its representations by every two functions,
                         with the functions in the order of their groups (OUT.json's list)
    representations.s'   (functions, features)

If the groups form blocks, they have learned separate representations, and functions of one group cannot follow those of
another. OUT.json has the means inside and between groups, and how many single functions the model gets right. The
picture, OUT.png, has a panel for each symbol.

The data folder must come from ``python -m data_prep ctlpp``. The model may be an encoder with a classification layer,
or an encoder–decoder model, whose first output word is the class.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import read_sentence
from fairseq_sg.analysis.values import cosines
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels per row.
ACROSS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no options of its own."""


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    tables, groups = functions_of(loaded.folder)
    order = [name for names in groups.values() for name in names]
    result = Result(facts={"functions": order, "groups": groups, "right": {}, "mean_similarity": {}})
    for symbol in sorted(set(next(iter(tables.values())))):
        inputs = [f"{name} {symbols_to(tables[name])[symbol]}" for name in order]
        answers = [represent(loaded, line) for line in inputs]
        representations = torch.stack([vector for vector, _ in answers])
        similarity = cosines(representations).cpu().numpy()
        result.arrays[f"similarity.{symbol}"] = similarity
        result.arrays[f"representations.{symbol}"] = representations.float().cpu().numpy()
        result.facts["right"][symbol] = sum(word == symbol for _, word in answers)
        result.facts["mean_similarity"][symbol] = means = between_groups(similarity, order, groups)
        shown = ", ".join(f"{pair} {mean:.3f}" for pair, mean in means.items())
        right = result.facts["right"][symbol]
        result.summary.append(f"symbol {symbol}: {right} of {len(order)} functions right; mean cosine {shown}")
    return result


def functions_of(folder: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """function -> its values for the symbols in order, and group -> its functions. Raises UsageError."""
    try:
        origin = read_manifest(folder)["origin"]
        tables = {name: table.split() for name, table in origin["tables"].items()}
        groups = {name: functions.split() for name, functions in origin["groups"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{folder}/dataset.json is not of CTL++: give a folder of `python -m data_prep ctlpp` with --data"
        ) from None
    return tables, groups


def symbols_to(table: list[str]) -> dict[str, str]:
    """A function's inverse, output symbol -> input symbol; ``table`` has its values for the symbols in order."""
    return dict(zip(table, sorted(table), strict=True))


def represent(loaded: Loaded, line: str) -> tuple[Tensor, str]:
    """The vector (C,) below the classification layer when the model reads ``line``, and the predicted class.

    Raises UsageError for a model without such a layer.
    """
    model = loaded.model
    if loaded.has_decoder:
        sentence = read_sentence(loaded, line, longest=1)
        return model(**sentence.inputs, features_only=True)[0][0, 0], sentence.predicted[0]
    if not isinstance(getattr(model, "classifier", None), torch.nn.Linear):
        raise UsageError(f"{loaded.arch} has no classification layer")
    read: list[Tensor] = []
    handle = model.classifier.register_forward_hook(lambda module, args, output: read.append(args[0]))
    try:
        sentence = read_sentence(loaded, line)
    finally:
        handle.remove()
    return read[0][0], sentence.predicted[0]


def between_groups(similarity: np.ndarray, order: list[str], groups: dict[str, list[str]]) -> dict[str, float]:
    """The mean similarity of two different functions, for every pair of groups: ``a–a``, ``a–b`` and so on."""
    means: dict[str, Any] = {}
    names = list(groups)
    places = {name: [order.index(function) for function in groups[name]] for name in names}
    for number, first in enumerate(names):
        for second in names[number:]:
            pairs = [similarity[i, j] for i in places[first] for j in places[second] if i != j]
            if pairs:
                means[f"{first}–{second}"] = float(np.mean(pairs, dtype="float64"))
    return means


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    functions = result.facts["functions"]
    symbols = list(result.facts["right"])
    panels = [result.arrays[f"similarity.{symbol}"] for symbol in symbols]
    titles = [f"symbol {symbol}" for symbol in symbols]
    plots.announce(len(panels), "maps")
    rows = (plots.in_rows(sequence, ACROSS) for sequence in (panels, titles))
    labels = plots.Labels("representations of one symbol", "function", "function", "cosine similarity")
    return {"": plots.heatmaps(*rows, functions, functions, (0.0, 1.0), labels)}

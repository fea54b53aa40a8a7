"""Feedforward layers on a subset: active hidden units, use of experts (Csordás 2023, Figures 7.1, 7.3, F.2 to F.4).

For every feedforward layer SIDE.stepS (layers, or the steps of a shared layer, from 1 on), over all positions that are
not padding, OUT.npz has

    SIDE.stepS.active       (positions,), dense kinds: the number of hidden units of a token that are not 0
    SIDE.stepS.selections   (experts,), mixtures of experts: the number of tokens that select an expert
    SIDE.stepS.weights      (experts,), the sum of the selection weights
    SIDE.stepS.together     (experts, experts), the number of tokens that select both; the diagonal is ``selections``

OUT.json has mean and standard deviation of the active units, the experts that are never selected, and the effective
number of experts: exp of the entropy of their shares.

Pictures: OUT.SIDE.active.png has active units by step. OUT.SIDE.usage.png has the experts' shares of the weights,
largest first. OUT.SIDE.together.png has, for the tokens of an expert (row), the share that also select another
(column), experts in their own order.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches, add_subset
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward import FeedForward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The kinds of models that are accepted.
KINDS = ("words", "text", "images")
#: side -> the arrays of OUT.npz for one batch, per application in turn.
Calls = dict[str, list[dict[str, Tensor]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subset(parser, "valid")
    add_batches(parser, limit=1000)


@contextmanager
def watch(model: nn.Module) -> Iterator[Calls]:
    """Records all feedforward layers in passes of ``model`` inside the ``with`` block; copy gates are omitted."""
    calls: Calls = defaultdict(list)
    handles = []

    def hook(side: str) -> Callable[..., None]:
        def after(module: FeedForward, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: object) -> None:
            x, mask = args[0], kwargs.get("padding_mask")
            real = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else ~mask
            found = {name: value[real] for name, value in module.activity(x).items()}
            if "experts" in found:
                found |= count(found.pop("experts"), found.pop("weights"), module.experts)
            calls[side].append({name: value.cpu() for name, value in found.items()})

        return after

    try:
        for name, module in model.named_modules():
            if isinstance(module, FeedForward) and name.rpartition(".")[2] == "ffn":
                handles.append(module.register_forward_hook(hook(name.partition(".")[0]), with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def count(experts: Tensor, weights: Tensor, number: int) -> dict[str, Tensor]:
    """experts, weights (T, K) -> selections (E,), sums of weights (E,), and joint selections (E, E), float64."""
    chosen = torch.zeros(len(experts), number, dtype=torch.float64, device=experts.device).scatter_(1, experts, 1.0)
    summed = torch.zeros(number, dtype=torch.float64, device=experts.device)
    summed.index_add_(0, experts.flatten(), weights.flatten().double())
    return {"selections": chosen.sum(0), "weights": summed, "together": chosen.t() @ chosen}


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    dataset = loaded.subset(args.subset)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    steps: dict[str, int] = {}
    for batch in loaded.batches(dataset, args.batch_size, args.limit):
        with watch(loaded.model) as calls:
            loaded.run(batch)
        for side, applications in calls.items():
            steps[side] = max(steps.get(side, 0), len(applications))
            for step, found in enumerate(applications, start=1):
                for name, values in found.items():
                    parts[f"{side}.step{step}.{name}"].append(values)
    if not parts:
        raise UsageError(f"{loaded.arch} has no feedforward layer of a kind that this command supports")
    arrays = {
        name: (torch.cat(found) if name.endswith(".active") else torch.stack(found).sum(0)).numpy()
        for name, found in parts.items()
    }
    return describe(arrays, steps, args)


def effective(selections: np.ndarray) -> float:
    """exp of the entropy of the shares: the number of equally used experts with the same entropy."""
    shares = selections / selections.sum()
    return float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))


def describe(arrays: dict[str, np.ndarray], steps: dict[str, int], args: argparse.Namespace) -> Result:
    result = Result(arrays, {"subset": args.subset, "steps": steps, "layers": {}})
    for side, number in steps.items():
        for name in (f"{side}.step{step}" for step in range(1, number + 1)):
            facts = {}
            if f"{name}.active" in arrays:
                units = arrays[f"{name}.active"].astype("float64")
                facts["active_units"] = {"mean": units.mean(), "std": units.std()}
                result.summary.append(
                    f"{name}: {units.mean():.1f} ± {units.std():.1f} hidden units of a token are active"
                )
            if f"{name}.selections" in arrays:
                selections = arrays[f"{name}.selections"]
                used = effective(selections)
                facts["experts"] = {"effective": used, "dead": (np.flatnonzero(selections == 0) + 1).tolist()}
                result.summary.append(
                    f"{name}: {used:.1f} of {len(selections)} experts in effective use, "
                    f"{len(facts['experts']['dead'])} never used"
                )
            result.facts["layers"][name] = facts
    return result


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    found = {
        (side, what): [result.arrays.get(f"{side}.step{step}.{what}") for step in range(1, number + 1)]
        for side, number in result.facts["steps"].items()
        for what in ("active", "weights", "together")
    }
    found = {key: arrays for key, arrays in found.items() if any(array is not None for array in arrays)}
    plots.announce(len(found), "pictures")
    figures = {}
    for (side, what), arrays in found.items():
        # Layers of other kinds have none.
        arrays = {step: array for step, array in enumerate(arrays, start=1) if array is not None}
        heading = f"feedforward layers of the {side}"
        if what == "active":
            # One panel with a box per step.
            grid = [[list(arrays.values())]], [[""]], ["active hidden units of a word"]
            figures[f"{side}.active"] = plots.boxes(*grid, "step", heading, list(arrays))
        elif what == "weights":
            shares = {f"step {step}": np.sort(w / w.sum())[::-1] for step, w in arrays.items()}
            across, up = "expert, the most used first", "share of the weights"
            figures[f"{side}.usage"] = plots.shares(shares, across, up, heading)
        else:
            experts = [str(expert + 1) for expert in range(len(next(iter(arrays.values()))))]
            panels = [
                np.divide(t, t.diagonal()[:, None], where=t.diagonal()[:, None] > 0, out=np.zeros_like(t))
                for t in arrays.values()
            ]
            titles = [f"{side}, step {step}" for step in arrays]
            grid = (plots.in_rows(sequence, 4) for sequence in (panels, titles))
            heading += ": experts selected together"
            labels = plots.Labels(heading, "also selected", "expert", "share of the expert's tokens")
            figures[f"{side}.together"] = plots.heatmaps(*grid, experts, experts, (0.0, 1.0), labels)
    return figures

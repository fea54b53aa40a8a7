"""Distributions of the norms of Queries and Keys over a subset, per head and step (Park & Kim 2024, Figure 2).

OUT.npz has an array ROLE.stepS.WHAT.STAGE of shape (heads, count) for WHAT query and key, over all positions of all
sentences that are not padding. STAGE is one of

    projected   ‖Q‖ after the projection, for every attention
    mapped      ‖φ(Q)‖, for linear attention
    normalized  ‖Q̂‖ after --qk-norm, or after the layer norm of galerkin and fourier, if there is one

OUT.json has means, standard deviations and quantiles. In the pictures, OUT.ROLE.png, each row is a stage of Queries or
Keys and each column a step, with a box for each head.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.attention_maps import LABELS, roles_of
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches, add_roles, add_subset, choose_roles
from fairseq_sg.analysis.record import STAGES, record
from fairseq_sg.analysis.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: The sentences from which the Queries and the Keys of a role come.
SIDES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}

#: Stages and their names in the pictures.
PLAIN = {
    "query": "queries",
    "key": "keys",
    "projected": "after the projection",
    "mapped": "after the feature map",
    "normalized": "after normalization",
}


#: The kinds of models that are accepted.
KINDS = ("words", "images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subset(parser, "valid")
    add_batches(parser, limit=1000)
    add_roles(parser)


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    dataset = loaded.subset(args.subset)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    steps: dict[str, int] = {}
    for batch in loaded.batches(dataset, args.batch_size, args.limit):
        with record(loaded.model) as recording:
            loaded.model(**batch["net_input"])
        real = real_positions(batch["net_input"], loaded)
        for role in roles_of(recording, loaded.arch):
            steps[role] = max(steps.get(role, 0), len(recording.steps(role)))
            for step, call in enumerate(recording.steps(role), start=1):
                for name, norms in call.norms.items():
                    side = SIDES[role][name.startswith("key")]
                    parts[f"{role}.step{step}.{name}"].append(norms.transpose(0, 1)[:, real[side]].float().cpu())
    arrays = {name: torch.cat(values, dim=1).numpy() for name, values in parts.items()}
    number = min(args.limit, len(dataset))
    facts = {"subset": args.subset, "sentences": number, "examples": loaded.examples, "steps": steps}
    result = Result(arrays, facts | {"norms": {name: describe(norms) for name, norms in arrays.items()}})
    result.summary.append(f"{number} {loaded.examples} of {args.subset}; mean norm of all heads at each step")
    for role, count in steps.items():
        for name in names_of(result, role):
            found = (arrays.get(f"{role}.step{step}.{name}") for step in range(1, count + 1))
            means = " ".join("–" if norms is None else f"{norms.mean():.3f}" for norms in found)
            result.summary.append(f"{role} {name}: {means}")
    return result


def real_positions(inputs: dict[str, Tensor], loaded: Loaded) -> dict[str, Tensor]:
    """The positions of source and target that are not padding, (B, N) bool."""
    if loaded.reads_images:
        positions = len(loaded.model.encoder.embedding.names)
        return {"source": torch.ones(len(inputs["images"]), positions, dtype=torch.bool, device=loaded.device)}
    real = {"source": inputs["src_tokens"].ne(loaded.task.source_dictionary.pad())}
    if loaded.has_decoder:
        # A decoder that labels words reads them as its input.
        words = inputs.get("prev_output_tokens", inputs["src_tokens"])
        real["target"] = words.ne(loaded.task.target_dictionary.pad())
    return real


def describe(norms: np.ndarray) -> dict[str, Any]:
    """norms (H, count) -> mean, standard deviation and quantiles of every head."""
    quantiles = np.quantile(norms.astype("float64"), QUANTILES, axis=1)
    return {
        "mean": norms.mean(1, dtype="float64").tolist(),
        "std": norms.std(1, dtype="float64").tolist(),
        "quantiles": {str(q): values.tolist() for q, values in zip(QUANTILES, quantiles, strict=True)},
    }


def names_of(result: Result, role: str) -> list[str]:
    """The recorded quantities of a role, ``query.projected`` and so on, in the order of the stages."""
    candidates = [f"{what}.{stage}" for stage in STAGES for what in ("query", "key")]
    steps = range(1, result.facts["steps"][role] + 1)
    return [name for name in candidates if any(f"{role}.step{step}.{name}" in result.arrays for step in steps)]


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    grids = {}
    for role in choose_roles(args.roles, list(result.facts["steps"])):
        names, steps = names_of(result, role), range(1, result.facts["steps"][role] + 1)
        panels = [[result.arrays.get(f"{role}.step{step}.{name}") for step in steps] for name in names]
        titles = [[f"{role}, step {step}" for step in steps]] * len(names)
        labels = [f"norm of {PLAIN[what]}\n{PLAIN[stage]}" for what, stage in (name.split(".") for name in names)]
        grids[role] = panels, titles, labels
    plots.announce(sum(plots.count(panels) for panels, *_ in grids.values()), "box plots")
    of = f"{result.facts['sentences']} {result.facts['examples']} of {result.facts['subset']}"
    return {role: plots.boxes(*grid, "head", f"{LABELS[role].heading}: {of}") for role, grid in grids.items()}

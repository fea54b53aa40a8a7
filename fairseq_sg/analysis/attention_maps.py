"""Attention maps of one sentence, for every head and step (Csordás 2023, Figures 5.3, 5.4, D.3, D.4, D.6, D.8, D.9).

OUT.npz has an array ROLE.stepS of shape (heads, queries, keys) for every role (encoder, decoder, cross) and application
S of the attention: the layers, or the steps of a shared layer, from 1 on. The array is the matrix A with output A V.
For linear attention A is implied, and its rows need not be probabilities; for galerkin, A multiplies LN(V).

In the pictures, OUT.ROLE.png, each row is a head and each column a step; rows of a map are queries, columns are keys.
The colour scale ends at the largest weight of the picture, or at --vmax. --heads max draws the maximum over the
heads, as Figure D.8 does.

For a model of images and questions, --index chooses the question. OUT.scene.png has the image for every head and step:
the brighter a patch, the more weight CLS has on it. The arrays name their rows and columns CLS and row,column of the
patches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_scale, add_selection, add_sentence, choose_numbers, choose_roles
from fairseq_sg.analysis.record import Recording
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import Question, record_sentence
from fairseq_sg.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The kinds of models that are accepted.
KINDS = ("words", "images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sentence(parser)
    add_selection(parser)
    add_scale(parser, "the largest weight")


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    sentence, recording = record_sentence(loaded, args)
    roles = roles_of(recording, loaded.arch)
    result = Result(facts={**sentence.facts(), "roles": {}}, summary=sentence.summary())
    if isinstance(sentence, Question):
        result.arrays["image"] = sentence.image
        result.facts["grid"] = loaded.model.encoder.embedding.grid
    for role in roles:
        calls = recording.steps(role)
        for step, call in enumerate(calls, start=1):
            result.arrays[f"{role}.step{step}"] = call.weights[0].float().cpu().numpy()
        result.facts["roles"][role] = {"attention": [call.kind for call in calls], **sentence.words(role)}
        heads, queries, keys = calls[0].weights[0].shape
        sizes = f"{len(calls)} step{'s' * (len(calls) > 1)} of {heads} head{'s' * (heads > 1)}"
        result.summary.append(f"{role}: {sizes}, {queries} × {keys}")
    return result


#: role -> the name of its attention, and the labels of rows and columns of its maps.
LABELS = {
    "encoder": plots.Labels("encoder self-attention", "key (source word)", "query (source word)", "weight"),
    "decoder": plots.Labels("decoder self-attention", "key (word read)", "query (word read)", "weight"),
    "cross": plots.Labels("cross-attention", "key (source word)", "query (word to say)", "weight"),
}


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    figures = draw_heads(result, args, None, LABELS)
    if "image" in result.arrays:
        figures["scene"] = draw_scene(result, args)
    return figures


def draw_scene(result: Result, args: argparse.Namespace) -> Figure:
    """The weights of CLS on the patches of the image: heads from top to bottom, steps side by side."""
    rows, columns = result.facts["grid"]
    steps = choose_numbers("--steps", args.steps, len(result.facts["roles"]["encoder"]["attention"]))
    panels, titles = [], []
    for step in steps:
        heads = pick_heads(result.arrays[f"encoder.step{step + 1}"], args.heads)
        panels.append([weights[0, 1:].reshape(columns, rows).T for weights in heads.values()])
        of_cls = [float(weights[0, 0]) for weights in heads.values()]
        titles.append([f"step {step + 1}, {n}: CLS {w:.2f}" for n, w in zip(heads, of_cls, strict=True)])
    heading = f"weights of CLS: {question_of(result)}"
    by_heads = [list(map(list, zip(*of_steps, strict=True))) for of_steps in (panels, titles)]
    return plots.scenes(result.arrays["image"], *by_heads, heading, args.vmax)


def question_of(result: Result) -> str:
    """The question of a result, with the model's answer and the right one."""
    facts = result.facts
    return f"{facts['question']}? {facts['output']}" + f" ({facts['answer']})" * (facts["output"] != facts["answer"])


def roles_of(recording: Recording, arch: str) -> list[str]:
    """The roles that have attentions. Raises UsageError if there are none."""
    if not recording.roles:
        raise UsageError(f"{arch} has none of fairseq_sg's attentions")
    return recording.roles


def draw_heads(
    result: Result,
    args: argparse.Namespace,
    limits: tuple[float, float] | None,
    labels: Mapping[str, plots.Labels],
) -> dict[str, Figure]:
    """A figure for every chosen role: heads from top to bottom, steps side by side."""
    grids = {}
    for role in choose_roles(args.roles, list(result.facts["roles"])):
        words = result.facts["roles"][role]
        steps = choose_numbers("--steps", args.steps, sum(name.startswith(f"{role}.") for name in result.arrays))
        chosen = [pick_heads(result.arrays[f"{role}.step{step + 1}"], args.heads) for step in steps]
        shown = list(dict.fromkeys(name for heads in chosen for name in heads))
        grids[role] = (
            [[heads.get(name) for heads in chosen] for name in shown],
            [[f"{role}, step {step + 1}, {name}" for step in steps] for name in shown],
            words["queries"],
            words["keys"],
        )
    plots.announce(sum(plots.count(panels) for panels, *_ in grids.values()), "maps")
    return {role: plots.heatmaps(*grid, limits, labels[role], args.vmax) for role, grid in grids.items()}


def pick_heads(matrices: np.ndarray, heads: str | None) -> dict[str, np.ndarray]:
    """The chosen matrices (or maximum, or mean) of all heads (H, N, M), by name. Raises
    UsageError for an unknown head.
    """
    if heads == "max":
        return {"max of heads": matrices.max(0)}
    if heads == "mean":
        return {"mean of heads": matrices.mean(0)}
    return {f"head {head + 1}": matrices[head] for head in choose_numbers("--heads", heads, len(matrices))}

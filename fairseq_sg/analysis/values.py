"""Cosine similarity of the Values of one sentence, for every head and step (Park & Kim 2024, Figures 3 and 6).

OUT.npz has an array ROLE.stepS of shape (heads, keys, keys): V_i·V_j / (‖V_i‖ ‖V_j‖), or 0 for a zero Value. It is the
matrix V̄V̄ᵀ whose distance from I is the orthogonality loss. OUT.json also has, for every head, the mean absolute value
off the diagonal: 0 for orthogonal Values, 1 for parallel Values.

The Values are those after the projection, as in the loss; the papers' figures show an encoder. For compositional
attention, heads are its retrievals. In the pictures, OUT.ROLE.png, each row is a head and each column a step.

For a model of images and questions, --index chooses the question, and OUT.scene.png has the image.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.attention_maps import draw_heads, question_of, roles_of
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_scale, add_selection, add_sentence
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import Question, record_sentence
from fairseq_sg.ops.precision import accumulation_dtype

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The kinds of models that are accepted.
KINDS = ("words", "images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sentence(parser)
    add_selection(parser)
    add_scale(parser, "1")


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    sentence, recording = record_sentence(loaded, args)
    result = Result(facts={**sentence.facts(), "roles": {}}, summary=sentence.summary())
    if isinstance(sentence, Question):
        result.arrays["image"] = sentence.image
    for role in roles_of(recording, loaded.arch):
        keys = sentence.words(role)["keys"]
        means = []
        for step, call in enumerate(recording.steps(role), start=1):
            similarity = cosines(call.values[0]).cpu().numpy()
            result.arrays[f"{role}.step{step}"] = similarity
            means.append([mean_off_diagonal(head) for head in similarity])
        result.facts["roles"][role] = {"queries": keys, "keys": keys, "mean_off_diagonal": means}
        shown = " ".join("–" if None in heads else f"{np.mean(heads):.3f}" for heads in means)
        result.summary.append(f"{role}: mean |cos| of two Values at each of {len(means)} steps: {shown}")
    return result


def cosines(vectors: Tensor) -> Tensor:
    """vectors (…, N, E) -> cosines of their angles (…, N, N), float32 or wider; 0 for a zero vector."""
    vectors = vectors.to(accumulation_dtype(vectors))
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    return unit @ unit.transpose(-1, -2)


def mean_off_diagonal(matrix: np.ndarray) -> float | None:
    """The mean absolute value off the diagonal; None for a single entry."""
    others = np.abs(matrix[~np.eye(len(matrix), dtype=bool)])
    return float(others.mean(dtype="float64")) if others.size else None


#: role -> the origin of the Values, and the labels of rows and columns.
LABELS = {
    role: plots.Labels(f"Values of the {of}", f"Value ({word})", f"Value ({word})", "cosine similarity")
    for role, of, word in (
        ("encoder", "encoder self-attention", "source word"),
        ("decoder", "decoder self-attention", "word read"),
        ("cross", "cross-attention", "source word"),
    )
}


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    figures = draw_heads(result, args, (-1.0, 1.0), LABELS)
    if "image" in result.arrays:
        figures["scene"] = plots.scenes(result.arrays["image"], [[None]], [[question_of(result)]])
    return figures

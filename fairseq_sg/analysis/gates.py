"""Copy gates of one sentence, at every step (Csordás 2023, Figures 5.3 below, D.5, D.7, D.10).

OUT.npz has an array SIDE.stepS of shape (positions, features) for the encoder, and for the decoder if it has gates.
It is g of equation 5.4: 0 where a column keeps its state, 1 where it takes its new content. OUT.json also has the
means over the features. In the picture, OUT.SIDE.png, each panel is a step, columns are positions, and rows are
features, as in the figures.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_scale, add_sentence
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import record_sentence
from fairseq_sg.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels per row.
ACROSS = 6


#: The kinds of models that are accepted.
KINDS = ("words", "images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sentence(parser)
    add_scale(parser, "1")


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    sentence, recording = record_sentence(loaded, args)
    if not recording.updates:
        others = ": choose maps, values or norms" if recording.roles else ""
        raise UsageError(f"{loaded.arch} was trained without copy gates (--encoder-update copy_gate){others}")
    result = Result(facts={**sentence.facts(), "sides": {}}, summary=sentence.summary())
    for side, words in (("encoder", sentence.source), ("decoder", sentence.previous)):
        steps = [call.gates[0].float().cpu().numpy() for call in recording.gates(side)]
        if not steps:
            continue
        result.arrays.update({f"{side}.step{number}": gates for number, gates in enumerate(steps, start=1)})
        openings = [gates.mean(-1, dtype="float64").tolist() for gates in steps]
        result.facts["sides"][side] = {"words": words, "mean_over_features": openings}
        means = " ".join(f"{sum(opening) / len(opening):.3f}" for opening in openings)
        result.summary.append(f"{side}: mean gate at each of {len(steps)} steps: {means}")
    return result


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    grids = {}
    for side, facts in result.facts["sides"].items():
        steps = range(1, len(facts["mean_over_features"]) + 1)
        panels = [result.arrays[f"{side}.step{step}"].T for step in steps]
        titles = [f"{side}, step {step}" for step in steps]
        grids[side] = [plots.in_rows(sequence, ACROSS) for sequence in (panels, titles)]
    plots.announce(sum(plots.count(panels) for panels, _ in grids.values()), "maps")
    figures = {}
    for side, grid in grids.items():
        words, of = result.facts["sides"][side]["words"], {"encoder": "source word", "decoder": "word read"}[side]
        heading = f"copy gates of the {side}: 0 keeps the state, 1 takes the new content"
        labels = plots.Labels(heading, f"position ({of})", "feature", "gate")
        figures[side] = plots.heatmaps(*grid, [], words, (0.0, 1.0), labels, args.vmax)
    return figures

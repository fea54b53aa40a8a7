"""The memory of a differentiable neural computer while it reads one sentence (Csordás 2023, Figures 2.2b and 2.4).

OUT.npz has arrays whose first dimension is the word. Of the write head: write_weights and usage (words, cells),
allocation_gate and write_gate (words, 1), and with masks write_mask (words, 1, width). Of the read heads: read_weights,
forward and backward (words, heads, cells), modes (words, heads, 3: backward, content, forward), free (words, heads),
and with masks read_masks (words, heads, width). OUT.json has the words and the model's answer, which is printed where
the data have labels. In the picture, OUT.png, columns are words, and a column of panels is a head.
"""

from __future__ import annotations

import argparse
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_scale
from fairseq_sg.analysis.result import Result
from fairseq_sg.analysis.sentence import encode
from fairseq_sg.errors import UsageError
from fairseq_sg.parsers import index

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    read = parser.add_mutually_exclusive_group(required=True)
    read.add_argument("--input", metavar="WORDS", help="the sentence, in words of the data")
    read.add_argument("--index", type=index, metavar="I", help="the number of a sentence in --subset, from 0 on")
    parser.add_argument("--subset", metavar="NAME", help="the subset of --index (default: valid)")
    add_scale(parser, "1")


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    if not hasattr(loaded.model, "dnc"):
        raise UsageError(f"{loaded.arch} has no memory of cells: choose a checkpoint of sg_dnc")
    task, target, expected = loaded.task, None, []
    if args.input is None:
        subset = args.subset or "valid"
        dataset = loaded.subset(subset)
        if args.index >= len(dataset):
            raise UsageError(f"--index is {args.index}: {subset} has the sentences 0 to {len(dataset) - 1:,}")
        sample = dataset[args.index]
        tokens = sample["source"]
        target = sample["target"].to(loaded.device)
        expected = [task.target_dictionary[i] for i in target.tolist()]
    elif args.subset is not None:
        raise UsageError("--subset is for --index: omit it, or give --index instead of --input")
    else:
        tokens = encode(args.input, task.source_dictionary, "--input", loaded.data)
        tokens = task.build_dataset_for_inference([tokens], [len(tokens)])[0]["source"]
    words = [task.source_dictionary[i] for i in tokens.tolist()]
    y, _, record = loaded.model.run(tokens[None].to(loaded.device), record=True)
    if loaded.labels_words:
        predicted = task.words_of(y[0], target)
    else:
        answers, expected = task.target_dictionary, expected[:1]
        predicted = [answers[answers.nspecial + y[0, -1].argmax().item()]]
    result = Result(facts={"source": words, "output": predicted, "target": expected})
    result.arrays = {name: x[0].float().cpu().numpy() for name, x in record._asdict().items() if x is not None}
    shown = predicted
    if target is not None and loaded.labels_words:
        # Where nothing is asked, the loss ignores the answer by default.
        asked, blank = task.asked(target).tolist(), task.target_dictionary[task.no_label]
        shown = [word if counts else blank for word, counts in zip(predicted, asked, strict=True)]
    result.summary = [f"source  {' '.join(words)}", f"output  {' '.join(shown)}"]
    result.summary += [f"target  {' '.join(expected)}"] if expected else []
    for head, modes in enumerate(result.arrays["modes"].mean(0), start=1):
        shares = ", ".join(f"{name} {x:.2f}" for name, x in zip(("backward", "content", "forward"), modes, strict=True))
        result.summary.append(f"head {head}: mean read mode {shares}")
    return result


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    arrays = result.arrays
    of_write = {"write weights": arrays["write_weights"].T, "usage": arrays["usage"].T}
    if "write_mask" in arrays:
        of_write["write mask"] = arrays["write_mask"][:, 0].T
    # One axis of words for all that a column shows.
    columns = [of_write]
    for head in range(arrays["read_weights"].shape[1]):
        names = {"read weights": "read_weights", "forward links": "forward", "backward links": "backward"}
        names |= {"modes: backward, content, forward": "modes"}
        names |= {"read mask": "read_masks"} if "read_masks" in arrays else {}
        columns.append({f"head {head + 1}, {title}": arrays[name][:, head].T for title, name in names.items()})
    panels = list(zip_longest(*(column.values() for column in columns)))
    titles = list(zip_longest(*columns, fillvalue=""))
    plots.announce(plots.count(panels), "maps")
    labels = plots.Labels("memory while a sentence is read", "word", "cell (mode, number of a cell)", "weight")
    return {"": plots.heatmaps(panels, titles, [], result.facts["source"], (0.0, 1.0), labels, args.vmax)}

"""Do functions share weights? Compares masks of one network that ``masks`` has written (Csordás 2023, chapter 3).

For masks A and B, of all masked weights and of every tensor:

    IoU      |A ∩ B| / |A ∪ B|
    IoMin    |A ∩ B| / min(|A|, |B|): 1 if one is a part of the other
    chance   the same for random masks that keep as many weights of each tensor, E|A ∩ B| = |A| |B| / n

``shared`` is the part of a mask that any other mask also keeps. A mask that is named ``control`` is that for
everything: ``remaining`` is |A ∩ C| / |C|. If the output layer is masked, the share of the control's weights that A
lacks, |C ∧ ¬A| / |C|, is given for every word (Figure 3.5b).

Files without a name after NAME=FILE belong to the name before them: masks of further networks. File k of every name
belongs to network k, and the numbers are means over networks, with their standard deviation.

OUT.npz has iou, iomin, chance_iou and chance_iomin, (networks, masks, masks), and the same under TENSOR. for every
tensor. OUT.json has their means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.masks import from_arrays
from fairseq_sg.analysis.options import of_pictures
from fairseq_sg.analysis.result import Result
from fairseq_sg.errors import UsageError, in_one_line
from fairseq_sg.modules.masks import overlap, total
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What the command reads instead of checkpoints.
READS, WHAT = "MASKS.npz", "masks written by `masks`"
MEASURES = ("iou", "iomin", "chance_iou", "chance_iomin")
#: The name of the mask for everything.
CONTROL = "control"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of_pictures(parser, "tensors")
    parser.add_argument("--tensors", action="store_true", help="draw a matrix for every tensor, too")


def absent(path: str) -> str:
    """The error message for a name that is not a file."""
    return f"there is no file {path}: `fairseq-sg analysis masks` writes OUT.npz and OUT.json"


def measure(path: str, args: argparse.Namespace) -> Result:
    """One file of masks and its facts. Raises UsageError for another file, and for one that was cut off."""
    if len(args.checkpoint) < 2:
        raise UsageError("overlap compares two masks or more: NAME=MASKS.npz NAME=MASKS.npz …")
    if not path.endswith(".npz"):
        raise UsageError(f"{path} is no file of masks: name OUT.npz of `fairseq-sg analysis masks`")
    facts_of = f"{path.removesuffix('.npz')}.json"
    for name in (path, facts_of):
        if not Path(name).is_file():
            raise UsageError(absent(name))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            masks = from_arrays(arrays)
        facts = json.loads(Path(facts_of).read_text(encoding="utf-8"))
        kept = {
            name: facts[name] for name in ("checkpoint", "data", "model_overrides", "network", "outputs", "examples")
        }
    except Exception as error:
        raise UsageError(f"{path} or {facts_of} is no file of masks, or was cut off ({in_one_line(error)})") from error
    if not masks:
        raise UsageError(f"{path} has no masks: name OUT.npz of `fairseq-sg analysis masks`")
    return Result({name: mask.numpy() for name, mask in masks.items()}, kept)


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """The overlaps of the masks of one network, or their means over several.

    Raises UsageError for a single mask, for masks of different weights of one network, and for networks with different
    tensors or words.
    """
    names = list(measured)
    if len(names) < 2:
        raise UsageError("overlap compares two masks or more: NAME=MASKS.npz NAME=MASKS.npz …")
    numbers = {name: len(results) for name, results in measured.items()}
    if len(set(numbers.values())) > 1:
        counts = ", ".join(f"{name} has {number}" for name, number in numbers.items())
        raise UsageError(f"every name needs a file for every network: {counts}")
    networks = [{name: measured[name][k] for name in names} for k in range(numbers[names[0]])]
    for number, of in enumerate(networks, 1):
        check_same(of, number)
        check_like(of[names[0]], networks[0][names[0]], number)
    arrays = stack([compare(of) for of in networks])
    facts: dict[str, Any] = {
        "masks": names,
        "networks": len(networks),
        "total": {name: describe(arrays[name]) for name in MEASURES},
        "tensors": {
            tensor: {name: arrays[f"{tensor}.{name}"].mean(0).tolist() for name in MEASURES}
            | {"mean_of_pairs": {name: describe(of_pairs(arrays[f"{tensor}.{name}"])) for name in MEASURES}}
            for tensor in networks[0][names[0]].arrays
        },
        "mean_of_pairs": {name: describe(of_pairs(arrays[name])) for name in MEASURES},
        "kept": {name: describe(np.array([share_kept(of[name]) for of in networks])) for name in names},
        "shared": {name: describe(np.array([shared(of, name) for of in networks])) for name in names},
    }
    lines = pair_lines(names, arrays)
    if CONTROL in names:
        others = [name for name in names if name != CONTROL]
        remaining = {name: np.array([remains(of[name], of[CONTROL]) for of in networks]) for name in others}
        facts["remaining"] = {name: describe(values) for name, values in remaining.items()}
        facts["removed_by_word"] = removed = by_word(networks, others)
        lines += [f"{name}: {spread(values)} % of the control's weights remain" for name, values in remaining.items()]
        lines += word_lines(removed)
    return Result(arrays, facts, lines)


def check_same(of: Mapping[str, Result], number: int) -> None:
    """Raises UsageError unless the masks are on the same weights."""
    first, *others = of
    for name in others:
        if of[name].facts["network"] != of[first].facts["network"]:
            here, there = (of[n].facts["checkpoint"] for n in (name, first))
            raise UsageError(
                f"the masks {name} and {first} of network {number} are of different weights ({here}, {there}): compare "
                "masks of one checkpoint, with the same --parameters"
            )


def check_like(other: Result, first: Result, number: int) -> None:
    """Raises UsageError unless a network has the tensors and the words of the first one."""
    shapes, expected = ({name: mask.shape for name, mask in of.arrays.items()} for of in (other, first))
    different = [name for name in expected | shapes if shapes.get(name) != expected.get(name)]
    if different or other.facts["outputs"] != first.facts["outputs"]:
        what = f"other tensors ({different[0]})" if different else "other words in the output layer"
        raise UsageError(
            f"network {number} has {what} than network 1 ({other.facts['checkpoint']}, {first.facts['checkpoint']}): "
            "compare networks of one architecture and one dictionary, with the same --parameters"
        )


def compare(of: Mapping[str, Result]) -> dict[str, np.ndarray]:
    """The measures of all pairs of masks, (masks, masks): under their names in all, under TENSOR.NAME for a tensor."""
    masks = [{tensor: torch.from_numpy(mask) for tensor, mask in one.arrays.items()} for one in of.values()]
    pairs = [[{tensor: overlap(one[tensor], other[tensor]) for tensor in one} for other in masks] for one in masks]
    arrays = {name: np.array([[getattr(total(found), name) for found in row] for row in pairs]) for name in MEASURES}
    for tensor in masks[0]:
        for name in MEASURES:
            arrays[f"{tensor}.{name}"] = np.array([[getattr(found[tensor], name) for found in row] for row in pairs])
    return arrays


def stack(networks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.stack([arrays[key] for arrays in networks]) for key in networks[0]}


def describe(values: np.ndarray) -> dict[str, Any]:
    """Mean and sample standard deviation over networks, the first axis; no deviation of one network."""
    several = len(values) > 1
    return {"mean": values.mean(0).tolist()} | ({"std": values.std(0, ddof=1).tolist()} if several else {})


def of_pairs(matrices: np.ndarray) -> np.ndarray:
    """The mean over all pairs of different masks: (networks, masks, masks) -> (networks,)."""
    rows, columns = np.triu_indices(matrices.shape[-1], 1)
    return matrices[:, rows, columns].mean(1)


def share_kept(mask: Result) -> float:
    """The percentage of the weights that a mask keeps."""
    return 100 * sum(int(m.sum()) for m in mask.arrays.values()) / sum(m.size for m in mask.arrays.values())


def shared(of: Mapping[str, Result], name: str) -> float:
    """The percentage of a mask's weights that any other mask keeps, the control left out; 0 for an empty mask."""
    others = [mask for other, mask in of.items() if other not in (name, CONTROL)]
    own = of[name].arrays
    common = sum(int((own[t] & np.any([o.arrays[t] for o in others], axis=0)).sum()) for t in own) if others else 0
    return 100 * common / max(1, sum(int(m.sum()) for m in own.values()))


def remains(mask: Result, control: Result) -> float:
    """The percentage of the control's weights that a mask keeps, too."""
    common = sum(int((m & control.arrays[tensor]).sum()) for tensor, m in mask.arrays.items())
    return 100 * common / max(1, sum(int(m.sum()) for m in control.arrays.values()))


def by_word(networks: Sequence[Mapping[str, Result]], others: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Output layer -> mask -> word -> percentage of the control's weights in the word's row that the mask lacks.

    The mean over the networks whose control has weights in the row.
    """

    def of_layer(layer: str, words: Sequence[str], name: str) -> dict[str, float]:
        rows = zip(*(lacking_by_row(of[CONTROL].arrays[layer], of[name].arrays[layer]) for of in networks), strict=True)
        shares = {word: [x for x in row if x is not None] for word, row in zip(words, rows, strict=True)}
        return {word: float(np.mean(row)) for word, row in shares.items() if row}

    layers = networks[0][CONTROL].facts["outputs"]
    return {layer: {name: of_layer(layer, words, name) for name in others} for layer, words in layers.items()}


def lacking_by_row(control: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """The percentage of the control's weights in each row that a mask lacks, both (V, C); None without any."""
    counts = zip((control & ~mask).sum(1).tolist(), control.sum(1).tolist(), strict=True)
    return [100 * lacking / whole if whole else None for lacking, whole in counts]


def spread(values: np.ndarray) -> str:
    return f"{values.mean():.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def pair_lines(names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """The lines of a table of all pairs."""
    cells = [["masks", "IoU", "by chance", "IoMin", "by chance"]]
    for row in range(len(names)):
        for column in range(row + 1, len(names)):
            values = (spread(arrays[name][:, row, column]) for name in ("iou", "chance_iou", "iomin", "chance_iomin"))
            cells.append([f"{names[row]}, {names[column]}", *values])
    return aligned(cells)


def word_lines(removed: Mapping[str, Any]) -> list[str]:
    """The words whose rows of the output layer lose most."""
    lines = []
    for layer, masks in removed.items():
        for name, rows in masks.items():
            most = sorted(rows, key=rows.__getitem__, reverse=True)[:5]
            found = ", ".join(f"{word} {rows[word]:.1f} %" for word in most)
            lines.append(f"{name} lacks most of the control in {layer}: {found}")
    return lines


def two_lines(tensor: str) -> str:
    """A name for the title of a panel: a longer one has a new line after the dot that is nearest to its middle."""
    dots = [place for place, letter in enumerate(tensor, start=1) if letter == "."]
    if len(tensor) <= 25 or not dots:
        return tensor
    cut = min(dots, key=lambda place: abs(place - len(tensor) / 2))
    return f"{tensor[:cut]}\n{tensor[cut:]}"


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    names, arrays = result.facts["masks"], result.arrays
    titles = ["IoU", "IoU by chance", "IoMin", "IoMin by chance"]
    panels = [arrays[name].mean(0) for name in ("iou", "chance_iou", "iomin", "chance_iomin")]
    labels = plots.Labels("overlap of masks", "mask", "mask", "share of weights")
    figures = {"": plots.heatmaps([panels], [titles], names, names, (0.0, 1.0), labels)}
    if args.tensors:
        tensors = list(result.facts["tensors"])
        panels = [arrays[f"{tensor}.iou"].mean(0) for tensor in tensors]
        grid = (plots.in_rows(sequence, 4) for sequence in (panels, list(map(two_lines, tensors))))
        labels = plots.Labels("IoU of masks, by tensor", "mask", "mask", "IoU")
        figures["tensors"] = plots.heatmaps(*grid, names, names, (0.0, 1.0), labels)
    for masks in result.facts.get("removed_by_word", {}).values():
        bars = {name: {"": {word: [share] for word, share in rows.items()}} for name, rows in masks.items()}
        words = list(next(iter(masks.values())))
        figures["words"] = plots.accuracies(bars, "word", None, words, up="weights of the control that are removed, %")
    return figures

"""Which weights does a function need? Trains binary masks on the frozen weights of a model (Csordás 2023, chapter 3).

A mask is trained on the examples of --subset that have one of the source words --where, none of --where-not, one of
--types, and one of the --lengths. All examples are the control. The loss is that of the training, summed over a
sentence, plus β / (batch size) · Σ logits. Sentences of --data, another folder than that of the training, are encoded
again by word.

The accuracy is that of one teacher-forced pass, as in ``accuracy``, on every subset of --evaluate: of the model without
a mask, with the mask, with the inverse mask (--inverse), and with random masks that keep as many weights of each tensor
(--random). A subset has rows for the trained part (``chosen``), for the rest, for types, and for the sources that have
only one of the words --only. For language models it is the perplexity.

OUT.npz has the masks as packed bits, TENSOR.mask with TENSOR.shape, and TENSOR.logits in half precision. OUT.json has
accuracies and kept shares. ``overlap`` compares the masks of several functions. OUT.state.pt is what --resume continues
from, also for more --steps or another --evaluate. --save-checkpoint writes the masked model as an ordinary checkpoint,
for fairseq-validate, fairseq-generate and every other analysis.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data_prep.strings import lengths as numbers_and_ranges
from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.examples import Examples, Part, open_examples
from fairseq_sg.analysis.mask_training import TRAINED_WITH, fingerprint, maskable, save_state, train
from fairseq_sg.analysis.result import Result
from fairseq_sg.checkpoints import read
from fairseq_sg.errors import UsageError
from fairseq_sg.evaluate import SENTENCE_COLUMNS, TEXT_COLUMNS, by_type, choose_subsets, scores, summary
from fairseq_sg.files import check_writable
from fairseq_sg.modules.masks import (
    CHOICES,
    Masks,
    final_masks,
    inverted,
    masked,
    random_like,
    replaced,
)
from fairseq_sg.parsers import above_0, finite, from_0, index, positive
from fairseq_sg.scoring.perplexity import perplexity
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The kinds of models that are accepted.
KINDS = ("words", "text", "images")
#: The model has the folder of its training; ``--data`` is that of the masks.
OWN_DATA = True

#: The share of the model's accuracy that a control mask must keep (Csordás 2023, appendix B.3.3).
KEPT_ACCURACY = 0.95
#: The name of the mask in tables.
MASK = "mask"
#: That of random masks, whose column has the mean over draws.
RANDOM, DRAWS = "random", "random_draws"


def words(text: str) -> list[str]:
    """Argument type: names, comma separated."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def betas(text: str) -> list[float]:
    """Argument type: numbers above 0, comma separated, in ascending order."""
    return sorted({above_0(part) for part in text.split(",")})


def logit(text: str) -> float:
    """Argument type: a logit; samples of logits beyond ±16.7 keep every weight, or none."""
    return finite(text, lambda number: abs(number) <= 100, "a number from -100 to 100")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    part = parser.add_argument_group("the examples of the masks")
    part.add_argument("--subset", default="train", metavar="NAME", help="subset of --data (default: train)")
    part.add_argument(
        "--where", type=words, default=[], metavar="WORDS", help="sources with one of these words, comma separated"
    )
    part.add_argument("--where-not", type=words, default=[], metavar="WORDS", help="sources with none of these words")
    part.add_argument("--types", type=words, default=[], metavar="TYPES", help="these types of examples")
    part.add_argument(
        "--lengths",
        type=numbers_and_ranges,
        default=[],
        metavar="LENGTHS",
        help="these numbers of words in the source: 3, 2-4 or 2,5",
    )
    train = parser.add_argument_group("training of the masks")
    train.add_argument("--steps", type=positive, default=25_000, metavar="N", help="(default: 25000)")
    train.add_argument("--batch-size", type=positive, default=256, metavar="B", help="(default: 256)")
    train.add_argument(
        "--samples", type=positive, default=4, metavar="K", help="samples of the masks in a batch (default: 4)"
    )
    strength = train.add_mutually_exclusive_group()
    strength.add_argument("--beta", type=above_0, default=1e-3, metavar="β", help="of the penalty (default: 1e-3)")
    strength.add_argument(
        "--search-beta",
        type=betas,
        metavar="β,…",
        help=f"take the largest β with {100 * KEPT_ACCURACY:.0f} %% of the accuracy on the mask's examples in the "
        "first of --evaluate",
    )
    train.add_argument("--lr", type=above_0, default=1e-2, metavar="LR", help="of Adam (default: 1e-2)")
    train.add_argument(
        "--clip-norm", type=from_0, default=1.0, metavar="X", help="of the logits' gradient, 0 for none (default: 1)"
    )
    train.add_argument(
        "--initial-logit", type=logit, default=2.0, metavar="L", help="2 keeps 88 %%, 2.197 keeps 90 %% (default: 2)"
    )
    train.add_argument(
        "--parameters",
        default="weights",
        metavar="WHICH",
        help=f"{', '.join(CHOICES)}, or a regular expression on names (default: weights)",
    )
    train.add_argument("--seed", type=index, default=1, metavar="N", help="of batches and samples (default: 1)")
    train.add_argument("--log-interval", type=positive, default=100, metavar="N", help="in steps (default: 100)")
    train.add_argument("--save-interval", type=positive, default=1000, metavar="N", help="in steps (default: 1000)")
    train.add_argument("--resume", action="store_true", help="continue from OUT.state.pt, if there is one")
    shown = parser.add_argument_group("evaluation")
    shown.add_argument(
        "--evaluate",
        metavar="NAMES",
        help="subsets, or FOLDER:SUBSET, comma separated (default: all of --data but the training set)",
    )
    shown.add_argument(
        "--only", type=words, default=[], metavar="WORDS", help="rows for sources that have only this one of the words"
    )
    shown.add_argument("--inverse", action="store_true", help="evaluate the inverse mask, too")
    shown.add_argument("--random", type=index, default=0, metavar="N", help="and N random masks (default: 0)")
    shown.add_argument("--halves", action="store_true", help="and the mask on the early or the late layers alone")
    shown.add_argument("--save-checkpoint", metavar="FILE", help="write the masked model as a checkpoint")


def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    part = Part(args.where, args.where_not, args.types, args.lengths)
    if ":" in args.subset:
        raise UsageError(f"--subset {args.subset}: give the folder as --data, and its subset as --subset")
    examples = open_examples(loaded, args.subset, args.data)
    chosen = np.flatnonzero(examples.choose(part))
    evaluated = open_evaluated(loaded, examples, args)
    if args.save_checkpoint:
        check_save(args)
    parameters, idle = maskable(loaded, args.parameters)
    if args.halves:
        halves(parameters)  # refuses a model without layers of their own before the masks are trained
    facts: dict[str, Any] = {
        "network": fingerprint(parameters),
        "examples": {"subset": examples.name, **part._asdict(), "number": len(chosen)},
        "training": {name: getattr(args, name) for name in TRAINED_WITH},
        "not_masked": idle,
    }
    lines = [f"{name} is not masked: no output depends on it" for name in idle]
    rows = {one.name: parts_of(one, part, args.only) for one in evaluated}
    first = evaluated[0]
    if args.search_beta and not part.is_all and "chosen" not in rows[first.name]:
        raise UsageError(
            f"--search-beta needs the accuracy on the masks' examples, and {first.name} has none: name a subset with "
            f"some first in --evaluate, such as {args.subset}"
        )
    plain = {one.name: accuracies(one, args.batch_size) for one in evaluated}
    if args.search_beta:
        beta, logits, found = search(
            loaded, examples, chosen, parameters, first, rows[first.name], plain[first.name], args
        )
        facts["search"] = found
        lines += search_lines(found)
    else:
        beta = args.beta
        logits = train(loaded, examples, chosen, parameters, beta, f"{args.prefix}.state.pt", args)
    facts["training"]["beta"] = beta
    masks = final_masks(logits)
    facts["kept"], facts["kept_of_all"] = kept_shares(masks)
    facts["metric"] = "perplexity" if first.is_text else "accuracy"
    facts["evaluation"] = evaluate(loaded, evaluated, rows, plain, variants(masks, args), args.batch_size)
    facts["outputs"] = output_words(loaded, masks)
    if args.save_checkpoint:
        save_checkpoint(loaded, masks, args.checkpoint, args.save_checkpoint)
        lines.append(f"the masked model: {args.save_checkpoint}")
    lines.append(
        f"β {beta:g}, {args.steps} steps: {facts['kept_of_all']['share']:.2f} % of the masked weights are kept"
    )
    return Result(to_arrays(logits), facts, [*lines, *table(facts["evaluation"], facts["metric"])])


def open_evaluated(loaded: Loaded, examples: Examples, args: argparse.Namespace) -> list[Examples]:
    """The subsets in ``--evaluate``, or all of the masks' folder but the training set.

    Raises UsageError for none, for one that cannot be opened, and for two of one name in tables.
    """
    if args.evaluate is not None:
        subsets = list(dict.fromkeys(words(args.evaluate)))
        if not subsets:
            raise UsageError("--evaluate names no subset")
    else:
        subsets = choose_subsets(examples.loaded, None)
    found = [open_examples(loaded, subset, args.data) for subset in subsets]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--evaluate has two subsets with the name {name} in tables: rename one of their folders")
    return found


# The search for β.


def search(
    loaded: Loaded,
    examples: Examples,
    chosen: np.ndarray,
    parameters: Mapping[str, Tensor],
    evaluated: Examples,
    parts: Mapping[str, np.ndarray],
    plain: np.ndarray,
    args: argparse.Namespace,
) -> tuple[float, dict[str, Tensor], list[dict[str, Any]]]:
    """The largest β whose mask keeps the accuracy on the trained part; its logits, and a row for every β.

    Args:
        plain: ``accuracies`` of the model without masks on ``evaluated``.

    Raises UsageError where the model has no accuracy that a mask could keep.
    """
    rows, found = [], {}
    members = parts.get("chosen", parts["all"])
    before = value_of(evaluated, plain, members)
    if before == 0:
        raise UsageError(
            f"the model has 0 % on the masks' examples in {evaluated.name}, so there is no accuracy to keep: give "
            "--beta instead of --search-beta, or another subset first in --evaluate"
        )
    for beta in args.search_beta:
        print(f"β {beta:g}", flush=True)
        state = f"{args.prefix}.beta{beta:g}.state.pt"
        found[beta] = train(loaded, examples, chosen, parameters, beta, state, args)
        masks = final_masks(found[beta])
        with replaced(loaded.model, masked(loaded.model, masks)):
            after = value_of(evaluated, accuracies(evaluated, args.batch_size), members)
        ratio = before / after if evaluated.is_text else after / before
        kept = kept_shares(masks)[1]["share"]
        rows.append({"beta": beta, "accuracy": after, "kept": kept, "enough": ratio >= KEPT_ACCURACY})
    best = max((row["beta"] for row in rows if row["enough"]), default=args.search_beta[0])
    return best, found[best], rows


def search_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines on every β of a search."""
    lines = [f"β {row['beta']:g}: {row['accuracy']:.2f}, {row['kept']:.2f} % of the weights" for row in rows]
    if not any(row["enough"] for row in rows):
        lines.append(f"no β has {100 * KEPT_ACCURACY:.0f} % of the accuracy: these are the masks of the smallest")
    return lines


# Evaluation.


def accuracies(examples: Examples, batch_size: int) -> np.ndarray:
    """``scores`` of the model as it is now, float64 (4, S)."""
    return scores(examples.loaded, examples.dataset, batch_size)


def value_of(examples: Examples, of_each: np.ndarray, members: np.ndarray) -> float:
    """Exact match in percent over some examples, or a text's perplexity."""
    if examples.is_text:
        return perplexity(summary(of_each, TEXT_COLUMNS)["nll_loss"])
    return summary(of_each[:, members], SENTENCE_COLUMNS)["accuracy"]


def parts_of(examples: Examples, part: Part, only: Sequence[str]) -> dict[str, np.ndarray]:
    """The rows of a subset: all, the part of the masks and the rest, types, and words of their own; bool (S,).

    Raises UsageError for an unknown word in ``only``, and for words of a text.
    """
    found, own = {"all": np.ones(len(examples), dtype=bool)}, examples.only(only)
    if examples.is_text:
        return found
    if not part.is_all:
        try:
            chosen = examples.choose(part)
            found |= {"chosen": chosen, "rest": ~chosen}
        except UsageError:
            # A subset without such examples, or without types.
            pass
    if examples.subset != examples.loaded.task.cfg.train_subset:
        found |= by_type(examples.loaded, examples.subset)
    found |= own
    return {name: members for name, members in found.items() if members.any()}


def variants(masks: Masks, args: argparse.Namespace) -> dict[str, Masks]:
    """The masks to evaluate, by their names in the table."""
    found: dict[str, Masks] = {MASK: masks}
    if args.inverse:
        found["inverse"] = inverted(masks)
    if args.halves:
        found |= halves(masks)
    for number in range(args.random):
        found[f"{RANDOM} {number + 1}"] = random_like(masks, torch.Generator().manual_seed(args.seed + number))
    return found


def halves(masks: Mapping[str, Tensor]) -> dict[str, Masks]:
    """The masks of the early half of the layers, and of the late half: encoder before decoder, output last.

    Raises UsageError for a model without layers of their own.
    """
    # A decoder's own parameters, its output layer among them, come before those of its layers.
    masks = dict(sorted(masks.items(), key=lambda item: item[0].rpartition(".")[2].startswith("output_")))
    layers = [match[0] if (match := re.match(r".*?\.layers\.\d+\.", name)) else None for name in masks]
    different = list(dict.fromkeys(layer for layer in layers if layer))
    if len(different) < 2:
        raise UsageError("--halves needs a model with several layers of their own, such as --depth separate")
    middle = layers.index(different[len(different) // 2])
    names = list(masks)
    return {
        half: {name: masks[name] for name in part}
        for half, part in (("early", names[:middle]), ("late", names[middle:]))
    }


def evaluate(
    loaded: Loaded,
    evaluated: Sequence[Examples],
    parts: Mapping[str, Mapping[str, np.ndarray]],
    plain: Mapping[str, np.ndarray],
    chosen: Mapping[str, Masks],
    batch_size: int,
) -> dict[str, dict[str, dict[str, Any]]]:
    """subset -> part -> number of examples, and the values without a mask and with every mask; of random ones the mean
    and all draws.
    """
    measured = {"unmasked": plain}
    for name, masks in chosen.items():
        with replaced(loaded.model, masked(loaded.model, masks)):
            measured[name] = {one.name: accuracies(one, batch_size) for one in evaluated}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for one in evaluated:
        for row, members in parts[one.name].items():
            values = {name: value_of(one, of_each[one.name], members) for name, of_each in measured.items()}
            draws = [values.pop(name) for name in chosen if name.startswith(RANDOM)]
            means = {RANDOM: float(np.mean(draws)), DRAWS: draws} if draws else {}
            found.setdefault(one.name, {})[row] = {"examples": int(members.sum()), **values, **means}
    return found


def kept_shares(masks: Masks) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The weights of every tensor, how many are kept, and the percentage; the same for all."""
    found = {name: (mask.numel(), int(mask.sum())) for name, mask in masks.items()}
    every = tuple(map(sum, zip(*found.values(), strict=True)))

    def row(size: int, kept: int) -> dict[str, float]:
        return {"weights": size, "kept": kept, "share": 100 * kept / size}

    return {name: row(*counts) for name, counts in found.items()}, row(*every)


def output_words(loaded: Loaded, masks: Masks) -> dict[str, list[str]]:
    """Output layer -> the word of each of its rows."""
    dictionary = getattr(loaded.task, "target_dictionary", None)
    if loaded.reads_images or dictionary is None:
        return {}
    labels = not loaded.has_decoder or loaded.labels_words  # they have no special symbols
    rows = dictionary.symbols[dictionary.nspecial :] if labels else dictionary.symbols
    ends = ("output_weight", "output_projection.weight", "classifier.weight")
    return {name: list(rows) for name, mask in masks.items() if name.endswith(ends) and len(mask) == len(rows)}


def table(evaluation: Mapping[str, Any], metric: str) -> list[str]:
    """The lines of a table: rows are the parts of subsets, columns the masks."""
    first = next(iter(next(iter(evaluation.values())).values()))
    columns = [name for name in first if name not in ("examples", DRAWS)]
    cells = [["subset", "part", "n", *columns]]
    for subset, rows in evaluation.items():
        for part, row in rows.items():
            cells.append([subset, part, f"{row['examples']:,}", *(f"{row[name]:.2f}" for name in columns)])
    return ["perplexity" if metric == "perplexity" else "exact match, %", *aligned(cells, left=2)]


# Files.


def to_arrays(logits: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The masks 1(l > 0) as packed bits, with their shapes, and the logits in half precision."""
    arrays, masks = {}, final_masks(logits)
    for name, values in logits.items():
        arrays[f"{name}.mask"] = np.packbits(masks[name].numpy())
        arrays[f"{name}.shape"] = np.array(values.shape, dtype=np.int64)
        arrays[f"{name}.logits"] = values.clamp(-65_000, 65_000).half().numpy()
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The masks of ``to_arrays``. Raises KeyError or ValueError for other arrays."""
    names = [key.removesuffix(".mask") for key in arrays if key.endswith(".mask")]
    found = {}
    for name in names:
        shape = tuple(arrays[f"{name}.shape"].tolist())
        bits = np.unpackbits(arrays[f"{name}.mask"], count=math.prod(shape))
        found[name] = torch.from_numpy(bits.astype(bool)).view(shape)
    return found


def check_save(args: argparse.Namespace) -> None:
    """Raises UsageError for a ``--save-checkpoint`` that cannot be written, and beside options that it would lose."""
    if set(args.model_overrides) - {"data"}:
        raise UsageError(
            "--save-checkpoint writes the model's own options, and not those of --model-overrides: leave one out"
        )
    check_writable(f"--save-checkpoint {args.save_checkpoint}", args.save_checkpoint, read=[args.checkpoint])


def save_checkpoint(loaded: Loaded, masks: Masks, before: str, path: str) -> None:
    """Writes the checkpoint ``before`` with masked weights and without the state of its optimizer."""
    state = read(before)
    with replaced(loaded.model, masked(loaded.model, masks)):
        weights = {name: value.cpu().clone() for name, value in loaded.model.state_dict().items()}
    missing = set(state["model"]) ^ set(weights)
    if missing:
        raise UsageError(
            f"--save-checkpoint: {before} has other weights than the model: {', '.join(sorted(missing)[:3])}"
        )
    kept = {name: value for name, value in state.items() if name != "last_optimizer_state"}
    save_state(path, kept | {"model": weights})


# The pictures.


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    facts = result.facts
    shares = {MASK: {"": {name: [row["share"]] for name, row in facts["kept"].items()}}}
    figures = {"kept": plots.accuracies(shares, "tensor", None, list(facts["kept"]), up="kept weights, %")}
    if facts["metric"] != "accuracy":
        return figures
    bars: dict[str, dict[str, dict[str, list[float]]]] = {}
    rows, examples = [], {}
    for subset, parts in facts["evaluation"].items():
        for part, row in parts.items():
            label = subset if part == "all" else f"{subset}: {part}"
            rows.append(label)
            examples[label] = row["examples"]
            for name, value in row.items():
                if name not in ("examples", DRAWS):
                    bars.setdefault(name, {"": {}})[""][label] = row[DRAWS] if name == RANDOM else [value]
    figures["accuracy"] = plots.accuracies(bars, "subset and part", None, rows, {"": examples})
    return figures

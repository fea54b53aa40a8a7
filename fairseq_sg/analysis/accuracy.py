"""Accuracy by the length of sources or targets, or by type of example (number of functions, depth of nesting, …).

An output is right if all its words are, including the end symbol, in one teacher-forced pass. This is the ``accuracy``
of training and fairseq-validate, and the exact match of greedy decoding. Lengths count words, without begin and end
symbols. Of subwords they count the plain text, in words or in characters as --length-unit of the data. Types are those
of --accuracy-by types, sorted by the numbers in their names.

OUT.npz has SUBSET.right (bool) and SUBSET.group (the length, or the type's number in OUT.json's list) for every
sentence. OUT.json has the counts, and length_unit where that is not words. The picture, OUT.png, shades the lengths of
training, and shows the number of sentences per point.

Several checkpoints, NAME=CHECKPOINT each, are compared in one picture. Those of one NAME are seeds of one model:
the picture has their mean, and a band from minimum to maximum. A checkpoint without a name belongs to the model
before it, and ``linear=runs/linear-seed*/checkpoint_last.pt`` names all of them. The arrays are
NAME.NUMBER.SUBSET.right and .group.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_sg.analysis import plots
from fairseq_sg.analysis.checkpoint import Loaded
from fairseq_sg.analysis.options import add_batches
from fairseq_sg.analysis.result import Result
from fairseq_sg.criterions.classification import is_right
from fairseq_sg.criterions.cross_entropy_orthogonality import best
from fairseq_sg.criterions.oracle_length import scored
from fairseq_sg.errors import UsageError
from fairseq_sg.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The groups of --by -> their name in the picture.
BY = {"source_length": "{unit} in the source", "target_length": "{unit} in the target", "type": "type of example"}


#: The kinds of models that are accepted.
KINDS = ("words", "images")
#: Facts that compared models share.
DATA = ("by", "examples", "length_unit", "types")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--subset", default="valid,gen", metavar="NAMES", help="subsets, comma separated (default: valid,gen)"
    )
    parser.add_argument("--by", default="target_length", choices=list(BY), help="(default: target_length)")
    add_batches(parser)


@torch.no_grad()
def measure(loaded: Loaded, args: argparse.Namespace) -> Result:
    if loaded.reads_images and args.by != "type":
        raise UsageError("images and questions have no lengths: choose --by type")
    result = Result(facts={"by": args.by, "examples": loaded.examples, "subsets": {}})
    if args.by == "type":
        result.facts["types"] = sorted(_breakdown(loaded).types, key=natural)
    for name in loaded.named_subsets(args.subset):
        dataset = loaded.subset(name)
        right = np.zeros(min(len(dataset), args.limit or len(dataset)), dtype=bool)
        targets: dict[int, Any] = {}
        for batch in loaded.batches(dataset, args.batch_size, args.limit):
            targets |= zip(batch["id"].tolist(), words(loaded, batch["target"]), strict=True)
            logits = loaded.model(**batch["net_input"])[0]
            # fairseq sorts a batch by length.
            of_each, real = right_tokens(loaded, logits, batch)
            right[batch["id"].cpu()] = (of_each | ~real).all(-1).cpu()
        if args.by == "type":
            groups = types(loaded, name, result.facts["types"])
        else:
            groups = loaded.lengths(name, dataset, args.by.removesuffix("_length"))
        groups = groups[: len(right)]
        result.arrays |= {f"{name}.right": right, f"{name}.group": groups}
        table = tabulate(right, groups, result.facts.get("types"))
        result.facts["subsets"][name] = {
            "sentences": len(right),
            "right": int(right.sum()),
            "targets": hashlib.sha256(repr(sorted(targets.items())).encode()).hexdigest(),
            "groups": table,
        }
        result.summary.append(f"{name}: {100 * right.mean():.2f} % of {len(right)} {loaded.examples}")
        result.summary += [
            f"  {group}: {row['accuracy']:.2f} % of {row['sentences']} {loaded.examples}"
            for group, row in table.items()
        ]
    if args.by != "type":
        trained = loaded.trained_lengths(args.by.removesuffix("_length"))
        result.facts |= {"training": list(trained)} if trained else {}
        result.facts |= {} if loaded.length_unit == "words" else {"length_unit": loaded.length_unit}
    return result


def right_tokens(loaded: Loaded, logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The right tokens of the target and its tokens that are scored, bool (B, N); for a classifier its class (B, 1);
    where words have labels, the right labels and all of them (B, N).

    Args:
        logits: (B, N, V); for a classifier (B, K).
        batch: its ``target`` is (B, N).
    """
    target = batch["target"]
    if loaded.labels_words:
        return loaded.task.right(logits, target), loaded.task.asked(target)
    if not loaded.has_decoder:
        right = is_right(logits, loaded.task.classes(target))[:, None]
        return right, torch.ones_like(right)
    dictionary = loaded.task.target_dictionary
    logits, target, _ = scored(loaded.task, logits, batch)
    real = target.ne(dictionary.pad())
    return best(logits, dictionary.pad()).eq(target) & real, real


def words(loaded: Loaded, target: Tensor) -> list[Any]:
    """The words of every target of a batch (B, N), as two folders of the same data have them; of (B,) the numbers.

    Without begin and end symbols: models with and without them may be compared.
    """
    if target.dim() == 1:
        return target.tolist()
    dictionary = loaded.task.target_dictionary
    without = {dictionary.pad(), dictionary.bos(), dictionary.eos()}
    return [[dictionary[token] for token in row if token not in without] for row in target.tolist()]


def types(loaded: Loaded, subset: str, names: list[str]) -> np.ndarray:
    """The type of every sentence, by its number in ``names``, int64 (sentences,). Raises UsageError without types."""
    breakdown = _breakdown(loaded)
    found = breakdown.types_of(subset, len(loaded.subset(subset)))
    if found is None:
        fix = "another --subset" if loaded.reads_images else "--by source_length or target_length"
        raise UsageError(f"the subset {subset!r} of {loaded.data} has no types: choose {fix}")
    return np.array([names.index(breakdown.types[i]) for i in found.tolist()], dtype=np.int64)


def _breakdown(loaded: Loaded) -> Any:
    if not getattr(loaded.task, "breakdown", None):
        raise UsageError("--by type is for the tasks of fairseq_sg: choose --by source_length or target_length")
    return loaded.task.breakdown


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers in names by value: length_2 before length_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def tabulate(right: np.ndarray, groups: np.ndarray, names: list[str] | None) -> dict[str, dict[str, float]]:
    """For every group, by name (by number without names): its sentences, how many are right, and the percentage."""
    table = {}
    for number in np.unique(groups).tolist():
        members = right[groups == number]
        table[str(number) if names is None else names[number]] = {
            "sentences": len(members),
            "right": int(members.sum()),
            "accuracy": 100 * float(members.mean()),
        }
    return table


def combine(measured: Mapping[str, Sequence[Result]]) -> Result:
    """One result for several models, each with its seeds.

    Raises UsageError if their groups, training lengths or targets differ: their data are not the same.
    """
    combined = Result(facts={"models": {}})
    same, training, tested = None, None, None
    for model, seeds in measured.items():
        subsets: dict[str, dict[str, list[float]]] = {}
        for number, result in enumerate(seeds, 1):
            common = {name: result.facts[name] for name in DATA if name in result.facts}
            common["sentences"] = sentences_of(result.facts["subsets"])
            # Unknown where the folder of the training is gone.
            trained = result.facts.get("training", training)
            if same not in (None, common) or training not in (None, trained):
                raise UsageError(
                    f"{model} was trained on other data than the first model: compare models of the same data"
                )
            targets = {name: subset["targets"] for name, subset in result.facts["subsets"].items()}
            if tested not in (None, targets):
                raise UsageError(f"{model} was tested on other data than the first model: give one folder by --data")
            same, training, tested = common, trained, targets
            combined.arrays |= {f"{model}.{number}.{key}": array for key, array in result.arrays.items()}
            for name, subset in result.facts["subsets"].items():
                for group, row in subset["groups"].items():
                    subsets.setdefault(name, {}).setdefault(group, []).append(row["accuracy"])
        totals = {name: [100 * r.arrays[f"{name}.right"].mean() for r in seeds] for name in subsets}
        combined.facts["models"][model] = {
            name: {"accuracy": totals[name], "groups": subset} for name, subset in subsets.items()
        }
        for name, values in totals.items():
            spread = f" (from {min(values):.2f} to {max(values):.2f}, {len(values)} seeds)" if len(values) > 1 else ""
            combined.summary.append(f"{model}, {name}: {np.mean(values):.2f} %{spread}")
    combined.facts |= same | ({} if training is None else {"training": training})
    for name, groups in same["sentences"].items():
        combined.summary += compare(name, groups, combined.facts["models"], same["examples"])
    return combined


def sentences_of(subsets: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """subset -> group -> number of sentences, from the facts of one checkpoint."""
    return {
        name: {group: row["sentences"] for group, row in subset["groups"].items()} for name, subset in subsets.items()
    }


def compare(subset: str, groups: Mapping[str, int], models: Mapping[str, Any], examples: str) -> list[str]:
    """The lines of a table: for every group of a subset its ``examples``, and the mean accuracy of every model."""
    cells = [[subset, examples, *models]]
    for group, count in groups.items():
        means = (np.mean(of[subset]["groups"][group]) for of in models.values())
        cells.append([group, f"{count:,}", *(f"{mean:.2f}" for mean in means)])
    return aligned(cells)


def draw(result: Result, args: argparse.Namespace) -> dict[str, Figure]:
    facts = result.facts
    if "models" in facts:
        models = {
            model: {name: subset["groups"] for name, subset in subsets.items()}
            for model, subsets in facts["models"].items()
        }
    else:
        models = {
            "": {
                name: {group: [row["accuracy"]] for group, row in subset["groups"].items()}
                for name, subset in facts["subsets"].items()
            }
        }
    sentences = facts["sentences"] if "models" in facts else sentences_of(facts["subsets"])
    label = BY[args.by].format(unit=facts.get("length_unit", "words"))
    return {"": plots.accuracies(models, label, facts.get("training"), facts.get("types"), sentences)}

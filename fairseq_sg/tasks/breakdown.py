"""Accuracy by type of example: COGS has 21 types of generalization in two groups, CTL has numbers of functions.

``data_prep`` writes the type of line N of ``raw/SUBSET.src`` as line N of ``raw/SUBSET.type``, and the groups of types
into ``dataset.json``. ``--accuracy-by groups`` (the default) logs ``accuracy_GROUP`` beside ``accuracy`` for every
group, and ``--accuracy-by types`` also ``accuracy_TYPE`` for every type, wherever a subset that has types is evaluated.
With ``--task sg_tagging``, ``word_error_TYPE``, the percentage of wrong labels, is logged too, and the
mean over all types and groups that are logged, ``mean_word_error``.
"""

import numbers
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fairseq import utils
from fairseq.logging import metrics
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.files import read_manifest

CHOICES = ("none", "groups", "types")
COUNT, EXACT = "n_of_", "exact_of_"
TOKENS, RIGHT = "tokens_of_", "right_of_"


class Breakdown:
    """The accuracies that are logged for the folders ``data`` (as in fairseq: one, or several with colons between).

    ``reports`` maps the name of each accuracy to the numbers of its types. It is the same on every worker, because
    fairseq adds up workers' logs entry by entry.

    Raises UsageError for an unknown choice, a ``dataset.json`` that cannot be read, and types that do not match their
    subset.
    """

    def __init__(self, data: str, accuracy_by: str = "groups"):
        ranges.check_value("accuracy_by", accuracy_by, {"choices": CHOICES})
        self.folders = utils.split_paths(data)
        self.manifests = manifests = [read_manifest(f) for f in self.folders] if accuracy_by != "none" else []
        subsets = [subset for manifest in manifests for subset in manifest.get("subsets", {}).values()]
        self.types: list[str] = sorted({kind for subset in subsets for kind in subset.get("types", ())})
        number = {kind: i for i, kind in enumerate(self.types)}
        self.reports: dict[str, list[int]] = {}
        for manifest in manifests:
            for group, kinds in manifest.get("groups", {}).items():
                # Folders may have other types in a group of the same name.
                there = self.reports.setdefault(group, [])
                there += [number[kind] for kind in kinds if kind in number and number[kind] not in there]
        if accuracy_by == "types":
            self.reports.update({kind: [i] for kind, i in number.items()})

    def names_in(self, subset: str) -> list[str]:
        """The types and groups that are logged for a subset of every folder."""
        folders = [set(manifest.get("subsets", {}).get(subset, {}).get("types", ())) for manifest in self.manifests]
        return [
            name
            for name, numbers in self.reports.items()
            if folders and all(any(self.types[i] in kinds for i in numbers) for kinds in folders)
        ]

    def types_of(self, subset: str, size: int, epoch: int = 1) -> Tensor | None:
        """The number of the type of every example, int64 ``(size,)``; None without types, or if nothing is logged."""
        if not self.reports:
            return None
        path = os.path.join(self.folders[(epoch - 1) % len(self.folders)], "raw", f"{subset}.type")
        if not os.path.isfile(path):
            return None
        with open(path, encoding="utf-8") as stream:
            kinds = stream.read().splitlines()
        unknown = next((kind for kind in kinds if kind not in self.types), None)
        if len(kinds) != size or unknown is not None:
            problem = f"{len(kinds)} types for {size} examples" if unknown is None else f"the unknown type {unknown!r}"
            raise UsageError(f"{path} has {problem}: prepare the folder again with `python -m data_prep`")
        number = {kind: i for i, kind in enumerate(self.types)}
        return torch.tensor([number[kind] for kind in kinds])

    def logs(self, types: Tensor, exact: Tensor, tokens: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """Counts for the criterion's logs; ``types`` int64 ``(B,)`` and ``exact`` bool ``(B,)``, by sentence.

        ``tokens`` are the numbers of tokens and of right ones, both int64 ``(B,)``, where they are logged too.
        """
        logs = {}
        for name, kinds in self.reports.items():
            member = torch.isin(types, torch.tensor(kinds, device=types.device))
            logs[COUNT + name], logs[EXACT + name] = member.sum(), (member & exact).sum()
            if tokens is not None:
                logs[TOKENS + name], logs[RIGHT + name] = ((member * number).sum() for number in tokens)
        return logs


def sums_of_logs(logging_outputs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The sum of each number in the logs of workers and batches; other entries are dropped.

    All tensors of a device come to the host in one transfer: each transfer makes the host wait for a GPU.
    """
    sums: dict[str, float] = defaultdict(float)
    tensors: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    for log in logging_outputs:
        for key, value in log.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                tensors[value.device].append((key, value.detach().reshape(()).double()))
            elif isinstance(value, numbers.Real):
                sums[key] += float(value)
    for entries in tensors.values():
        for (key, _), value in zip(entries, torch.stack([value for _, value in entries]).tolist(), strict=True):
            sums[key] += value
    return sums


def log_breakdown(sums: dict[str, float]) -> None:
    """Logs ``accuracy_NAME`` and ``word_error_NAME`` in % from the counts of ``Breakdown.logs``; for the criterion's
    ``reduce_metrics``.
    """
    for key, count in sorted(sums.items()):
        if key.startswith(COUNT) and count:
            name = key[len(COUNT) :]
            exact = sums.get(EXACT + name, 0.0)
            metrics.log_scalar(f"accuracy_{name}", 100.0 * exact / count, count, round=4)
        if key.startswith(TOKENS) and count:
            name = key[len(TOKENS) :]
            wrong = count - sums.get(RIGHT + name, 0.0)
            metrics.log_scalar(f"word_error_{name}", 100.0 * wrong / count, count, round=4)
            # From the types' sums over all batches: the mean of a batch would weigh types by the batches they are in.
            metrics.log_derived("mean_word_error", mean_word_error)


def mean_word_error(meters: Mapping[str, Any]) -> float:
    """The mean over types, or groups, of the percentages of wrong labels, from fairseq's meters."""
    errors = [meter.avg for name, meter in meters.items() if name.startswith("word_error_")]
    return sum(errors) / len(errors)

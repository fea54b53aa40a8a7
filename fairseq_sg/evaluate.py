"""How good a checkpoint is on its data, in one table.

    fairseq-sg evaluate CHECKPOINT
    fairseq-sg evaluate CHECKPOINT --subset gen,test --json gen.json

Task, data folder and subsets are the checkpoint's own. One teacher-forced pass gives the exact match, the token
accuracy and the cross entropy of every subset. fairseq-validate logs the same as accuracy, token_accuracy and nll_loss.
Further rows have these numbers by type of example, and by the number of words in the target (for classifiers and
labels of words: in the source). Of subwords the plain text is counted, in words or in characters as --length-unit of
the data. For language models the table has tokens, perplexities, and bits per character and byte; further rows are
by the token's position in its segment.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.analysis.accuracy import natural, right_tokens
from fairseq_sg.analysis.checkpoint import Loaded, load
from fairseq_sg.criterions.oracle_length import scored
from fairseq_sg.errors import UsageError, exit_code, finish
from fairseq_sg.files import check_writable, read_manifest, write_json
from fairseq_sg.parsers import Command, add_model, positive
from fairseq_sg.scoring.perplexity import perplexity
from fairseq_sg.tables import aligned
from fairseq_sg.tasks.sg_language_modeling import UNITS
from fairseq_sg.tasks.streams import Text

#: The largest number of rows by length, or by position, for a subset.
BUCKETS = 8

#: The columns for sentences, for a classifier's (one answer each), and for a text, whose segments are no sentences.
SENTENCE_COLUMNS = ("sentences", "right", "accuracy", "tokens", "tokens_right", "token_accuracy", "nll_loss")
CLASS_COLUMNS = ("sentences", "right", "accuracy", "nll_loss")
TEXT_COLUMNS = ("tokens", "tokens_right", "token_accuracy", "nll_loss")


def make_parser() -> Command:
    parser = Command(
        prog="fairseq-sg evaluate",
        usage="%(prog)s CHECKPOINT [options]",
        description=__doc__,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of fairseq-train")
    data = parser.add_argument_group("data and output")
    data.add_argument("--data", metavar="DIR", help="the data folder (default: the one it was trained on)")
    data.add_argument(
        "--subset", metavar="NAMES", help="subsets, comma separated (default: all of the folder but the training set)"
    )
    data.add_argument("--json", metavar="FILE", help="write the numbers to FILE too")
    model = parser.add_argument_group("model and machine")
    model.add_argument(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="sentences in a batch, or parallel streams of a text, of which each has a whole segment (default: 64)",
    )
    add_model(model)
    return parser


def run(args: argparse.Namespace) -> None:
    """Measures, prints the table, and writes the numbers."""
    if args.json:
        check_writable(f"--json {args.json}", args.json, read=[args.checkpoint])
    inputs = ("words", "text", "images")
    loaded = load(args.checkpoint, args.data, args.model_overrides, args.device, args.user_dir, inputs)
    names = choose_subsets(loaded, args.subset)
    subsets = {name: measure(loaded, name, args.batch_size, args.checkpoint) for name in names}
    print(f"{args.checkpoint} ({loaded.arch}) on {loaded.data}", *table(subsets, loaded), sep="\n")
    if args.json:
        facts = {"checkpoint": args.checkpoint, "arch": loaded.arch, "data": loaded.data}
        unit = unit_of_lengths(subsets, loaded)
        facts |= {} if unit == "words" else {"length_unit": unit}
        write_json(args.json, facts | {"model_overrides": args.model_overrides, "subsets": subsets})
        print(f"written: {args.json}")


def choose_subsets(loaded: Loaded, text: str | None) -> list[str]:
    """The subsets that ``--subset`` names; without it all but the training set. Raises UsageError for others."""
    if text is not None:
        return loaded.named_subsets(text)
    found = loaded.subsets
    trained = getattr(loaded.task.cfg, "train_subset", "train")
    if os.path.isfile(os.path.join(loaded.folder, "dataset.json")):
        order = list(read_manifest(loaded.folder).get("subsets", ()))
        found.sort(key=lambda name: order.index(name) if name in order else len(order))
    names = [name for name in found if name != trained]
    if not names:
        raise UsageError(f"the data folder {loaded.data} has only {trained}: evaluate it by --subset {trained}")
    return names


def measure(loaded: Loaded, name: str, batch_size: int, checkpoint: str) -> dict[str, Any]:
    """The numbers of a subset, and under ``types`` and ``lengths``, or ``positions``, those of its parts (``summary``).

    Raises UsageError for a language model of another task.
    """
    dataset = loaded.subset(name)
    if isinstance(dataset, Text):
        return measure_text(scores_by_position(loaded, dataset, batch_size), dataset.units)
    if loaded.is_language_model:
        trained = loaded.cfg.task
        raise UsageError(
            f"{loaded.arch} was trained as a language model with another task than sg_language_modeling: run "
            f"fairseq-eval-lm {loaded.data} --user-dir fairseq_sg --path {checkpoint} --gen-subset {name} "
            f"--tokens-per-sample {trained.tokens_per_sample} --sample-break-mode {trained.sample_break_mode}"
        )
    told = SENTENCE_COLUMNS if loaded.has_decoder or loaded.labels_words else CLASS_COLUMNS
    of_each = scores(loaded, dataset, batch_size)
    found = summary(of_each, told)
    parts = {"types": by_type(loaded, name)}
    if not loaded.reads_images:
        parts["lengths"] = by_length(loaded.lengths(name, dataset, side_of_lengths(loaded)))
    for kind, members in parts.items():
        if members:
            found[kind] = {part: summary(of_each[:, chosen], told) for part, chosen in members.items()}
    return found


def measure_text(of_each: np.ndarray, units: dict[str, float]) -> dict[str, Any]:
    """The numbers of a text, and under ``positions`` those of ranges of positions.

    Args:
        of_each: ``scores_by_position``.
        units: the mean number of characters, bytes and words per token.
    """
    found = summary(of_each, TEXT_COLUMNS)
    found["ppl"] = perplexity(found["nll_loss"])
    found |= {UNITS[unit]: found["nll_loss"] / of_a_token for unit, of_a_token in units.items()}
    if "bits_per_word" in found:
        found["word_ppl"] = perplexity(found["bits_per_word"])
    if ranges := by_length(np.arange(1, of_each.shape[1] + 1)):
        found["positions"] = {}
        for positions, members in ranges.items():
            part = summary(of_each[:, members], TEXT_COLUMNS)
            found["positions"][positions] = part | {"ppl": perplexity(part["nll_loss"])}
    return found


def scores(loaded: Loaded, dataset: Any, batch_size: int) -> np.ndarray:
    """Scores of every sentence (for text, of every segment of a stream) in the order of the dataset.

    Returns:
        float64 (4, sentences): whether all of it is right, its tokens, its right tokens, its cross entropy in nats.
    """
    batches, ids = [], []
    for batch, right, real, nll in scored_batches(loaded, dataset, batch_size):
        columns = (right | ~real).all(-1), real.sum(-1), right.sum(-1), nll.double().sum(-1)
        batches.append(torch.stack([column.double() for column in columns]).cpu())
        ids.append(batch["id"].cpu())
    # A batch is sorted by length.
    return torch.cat(batches, 1)[:, torch.cat(ids).argsort()].numpy()


def scores_by_position(loaded: Loaded, text: Text, batch_size: int) -> np.ndarray:
    """Sums of scores over the segments of a text, for every position in a segment that has a token.

    Returns:
        float64 (4, positions): right tokens, tokens, right tokens, cross entropy in nats, as in ``scores``.
    """
    total = torch.zeros(4, loaded.task.cfg.tokens_per_sample, dtype=torch.float64)
    for _, right, real, nll in scored_batches(loaded, text, batch_size):
        columns = right, real, right, nll
        total[:, : right.size(1)] += torch.stack([column.double().sum(0) for column in columns]).cpu()
    return total[:, total[1] > 0].numpy()


@torch.no_grad()
def scored_batches(
    loaded: Loaded, dataset: Any, batch_size: int
) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor]]:
    """Yields every batch; its right tokens and the tokens that are scored, bool (B, N); their cross entropy in nats
    (B, N), 0 elsewhere. For a classifier N is 1.
    """
    for batch in loaded.batches(dataset, batch_size):
        logits, target = loaded.run(batch)[0], batch["target"]
        right, real = right_tokens(loaded, logits, batch)
        if loaded.labels_words:
            # As in the criterion: blanks have a loss with --score-blanks alone.
            blanks = getattr(loaded.cfg.criterion, "score_blanks", False)
            counted = target.ne(loaded.task.target_dictionary.pad()) if blanks else real
            nll = loaded.task.nll(logits, target).masked_fill(~counted, 0.0)
        elif loaded.has_decoder:
            padding = loaded.task.target_dictionary.pad()
            logits, target, _ = scored(loaded.task, logits, batch)
            nll = F.cross_entropy(
                logits.flatten(0, 1).float(), target.flatten(), ignore_index=padding, reduction="none"
            )
        else:
            nll = F.cross_entropy(logits.float(), loaded.task.classes(target), reduction="none")
        yield batch, right, real, nll.view_as(real)


def summary(of_each: np.ndarray, told: Sequence[str]) -> dict[str, float]:
    """Counts, percentages and bits per token (of a classifier: per sentence) of ``scores``, by the logged names; and
    ``not_finite``, if it is not 0: how many sentences, or positions, have a cross entropy that is NaN or infinite.
    """
    exact, tokens, tokens_right, nll = of_each.sum(1).tolist()
    found = {
        "sentences": of_each.shape[1],
        "right": int(exact),
        "accuracy": 100 * exact / of_each.shape[1],
        "tokens": int(tokens),
        "tokens_right": int(tokens_right),
        "token_accuracy": 100 * tokens_right / tokens,
        "nll_loss": nll / tokens / math.log(2),
    }
    not_finite = int((~np.isfinite(of_each[3])).sum())
    return {name: found[name] for name in told} | ({"not_finite": not_finite} if not_finite else {})


def by_type(loaded: Loaded, subset: str) -> dict[str, np.ndarray]:
    """The sentences of every group of types and of every type, bool (S,); empty for a subset without types."""
    breakdown = getattr(loaded.task, "breakdown", None)
    types = breakdown and breakdown.types_of(subset, len(loaded.subset(subset)))
    if types is None:
        return {}
    groups = [name for name in breakdown.reports if name not in breakdown.types]
    members = {
        name: np.isin(types.numpy(), breakdown.reports[name])
        for name in groups + sorted(breakdown.reports.keys() - groups, key=natural)
    }
    return {name: chosen for name, chosen in members.items() if chosen.any()}


def side_of_lengths(loaded: Loaded) -> str:
    """The side whose lengths are counted: "target", or "source" for classifiers and labels of words."""
    return "target" if loaded.has_decoder and not loaded.labels_words else "source"


def by_length(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The sentences of at most ``BUCKETS`` ranges of lengths, about as many in each, bool (S,); empty for one range."""
    ends = np.unique(lengths)
    if len(ends) > BUCKETS:
        ends = np.unique(np.quantile(lengths, np.arange(1, BUCKETS + 1) / BUCKETS, method="inverted_cdf"))
    buckets = np.searchsorted(ends, lengths)
    members = [buckets == number for number in range(len(ends))]
    ranges = [sorted({int(lengths[chosen].min()), int(lengths[chosen].max())}) for chosen in members]
    named = {"-".join(map(str, ends)): chosen for ends, chosen in zip(ranges, members, strict=True)}
    return named if len(named) > 1 else {}


def unit_of_lengths(subsets: dict[str, dict[str, Any]], loaded: Loaded) -> str:
    """``Loaded.length_unit``; "words" where there are no rows by length."""
    return loaded.length_unit if any("lengths" in found for found in subsets.values()) else "words"


def table(subsets: dict[str, dict[str, Any]], loaded: Loaded) -> list[str]:
    """The lines that are printed: the subsets, then their parts by type, then by length or position."""
    rows = [(name, "all", found) for name, found in subsets.items()]
    unit = unit_of_lengths(subsets, loaded)
    labels = {"types": "{}", "lengths": f"{side_of_lengths(loaded)} of {{}} {unit}", "positions": "positions {}"}
    for kind, label in labels.items():
        rows += [
            (name, label.format(part), values)
            for name, found in subsets.items()
            for part, values in found.get(kind, {}).items()
        ]
    of_text = all("sentences" not in found for found in subsets.values())
    of = "label" if loaded.labels_words else "token" if loaded.has_decoder else "sentence"
    columns = {
        **({"tokens": ("tokens", "{:,}")} if of_text else {"sentences": ("n", "{:,}")}),
        "accuracy": ("exact match %", "{:.2f}"),
        "token_accuracy": ("token accuracy %", "{:.2f}"),
        "nll_loss": (f"bits/{of}", "{:.4f}"),
        **{name: (name, "{:.4f}") for name in ("ppl", "bpc", "bpb", "word_ppl")},
    }
    shown = [key for key in columns if any(key in values for _, _, values in rows)]
    cells = [["subset", "part", *(columns[key][0] for key in shown)]]
    for name, part, values in rows:
        cells.append([name, part, *(columns[key][1].format(values[key]) if key in values else "" for key in shown)])
    parts = "at {:,} positions" if of_text else "of {:,} sentences"
    return aligned(cells, left=2) + [
        f"{name}: the loss {parts.format(found['not_finite'])} is NaN or infinite. Has the training diverged? An "
        "earlier checkpoint may be from before"
        for name, found in subsets.items()
        if "not_finite" in found
    ]


def main(line: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 for what the user can fix, 2 for a wrong command line."""
    return finish(run, make_parser().parse_args(line))


if __name__ == "__main__":
    # fairseq reports what it loads.
    logging.getLogger().setLevel(logging.WARNING)
    sys.exit(exit_code(main))

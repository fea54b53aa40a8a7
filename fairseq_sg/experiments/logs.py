"""What the logs of a run say: curves, divergence, the checkpoint that is evaluated, and the numbers of its evaluation.

fairseq writes JSON lines (``--log-format json``). A resumed training appends to its log, so it has one curve. What was
logged before a start without a checkpoint is of a training that was given up, and is left out.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fairseq_sg.experiments.quantities import QUANTITIES, chosen, decoding, part
from fairseq_sg.experiments.run import Run

logger = logging.getLogger(__name__)
_LOG_LINE = re.compile(r"\| INFO \| (\w+) \| (\{.*\})\s*$")
#: fairseq's message at the start of a training that is not resumed.
_FROM_SCRATCH = "| INFO | fairseq.trainer | No existing checkpoint found "
#: A training with this accuracy in percent on some subset has learned something …
LEARNT = 10.0
#: … and has collapsed if its accuracy is 0 on all subsets in this many successive evaluations.
EVALUATIONS_AT_ZERO = 5


def events(log: Path) -> list[dict[str, Any]]:
    """fairseq's JSON log lines in order, with numbers as floats; ``kind`` is train_inner, train, or a subset."""
    if not log.exists():
        return []
    found = []
    for number, line in enumerate(log.read_text(errors="replace").splitlines(), start=1):
        if _FROM_SCRATCH in line:
            found.clear()
        match = _LOG_LINE.search(line)
        if match:
            try:
                values = {key: _number(value) for key, value in json.loads(match[2]).items()}
            except json.JSONDecodeError as error:
                _tell_damaged(log, number, str(error))
                continue
            found.append({"kind": match[1], **values})
    return found


@functools.cache
def _tell_damaged(log: Path, number: int, cause: str) -> None:
    """Warns once of a line that is no JSON, which has no numbers then."""
    logger.warning("%s:%d is damaged and left out (%s)", log, number, cause)


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def curve(run: Run) -> list[dict[str, float]]:
    """Every quantity of every subset at every validation:
    [{step, SUBSET: percent, SUBSET/TYPE: percent, SUBSET_loss: bits per token, …}].
    """
    points: dict[int, dict[str, float]] = {}
    for event in events(run.log):
        subset = event["kind"]
        if subset in run.subsets:
            step = int(event[f"{subset}_num_updates"])
            point = points.setdefault(step, {"step": step})
            point |= {QUANTITIES[name].key(place): value for name, place, value in _values(run, event)}
    return [points[step] for step in sorted(points)]


def _values(run: Run, event: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The quantity, ``part`` and value of each number in a log line of a subset."""
    subset = event["kind"]
    for name, quantity in QUANTITIES.items():
        for kind in ("", *run.types):
            logged = f"{subset}_{quantity.logged}_{kind}" if kind else f"{subset}_{quantity.logged}"
            if logged in event:
                yield name, part(subset, kind), event[logged]


def _has(point: dict[str, float], subset: str) -> bool:
    """Whether a point of a curve has a number of the subset."""
    return any(quantity.key(subset) in point for quantity in QUANTITIES.values())


def complete(run: Run, points: list[dict[str, float]]) -> list[dict[str, float]]:
    """The points of a curve up to the last one with every subset of the training.

    The recipe may have got more subsets since the first ones, and since the training.
    """
    there = [subset for subset in run.subsets if any(_has(point, subset) for point in points)]
    whole = [number for number, point in enumerate(points, 1) if all(_has(point, subset) for subset in there)]
    return points[: max(whole, default=0)]


def divergence(run: Run, finished: bool) -> dict[str, Any] | None:
    """The reason and step if a training counts as "Fail" by its log; else None.

    A training fails in two ways. Its loss is NaN or infinite (or fairseq gave up for that reason). Or its accuracy
    collapsed: it was at least ``LEARNT`` percent on some subset and is 0 on all of them at the last
    ``EVALUATIONS_AT_ZERO`` evaluations, or at the last one of a training that has ``finished``.
    """
    for event in events(run.log):
        prefix = f"{event['kind']}_" if event["kind"] in run.subsets else ""
        for name in ("loss", "nll_loss"):
            loss = event.get(f"{prefix}{name}", 0.0)
            if isinstance(loss, float) and not math.isfinite(loss):
                where = f" on {event['kind']}" if prefix else ""
                return {"step": int(event.get(f"{prefix}num_updates", 0)), "why": f"the loss{where} is {loss}"}
    if _gave_up(run):
        return {"step": position(run)["step"], "why": "a gradient is not finite (FloatingPointError)"}
    points = [point for point in curve(run) if all(subset in point for subset in run.subsets)]
    best = [max(point[subset] for subset in run.subsets) for point in points]
    zeros = sum(1 for _ in itertools.takewhile(lambda accuracy: not accuracy > 0, reversed(best)))
    if zeros >= (1 if finished else EVALUATIONS_AT_ZERO) and max(best) >= LEARNT:
        fell = points[len(points) - zeros]["step"]
        return {
            "step": fell,
            "why": f"the accuracy was {max(best):.1f} %, fell to 0 at step {fell} and did not recover",
        }
    return None


def _gave_up(run: Run) -> bool:
    """Whether the last start of the training ended because of a gradient that is not finite."""
    return "\nFloatingPointError" in starts(run.log)[-1]


def starts(log: Path) -> list[str]:
    """What precedes the first start of a training in its log, and what each start wrote, its command first.

    A start that was killed may have left a line without an end before the next command.
    """
    return log.read_text("utf-8", errors="replace").split("$ fairseq-train ")


def partial_result(run: Run) -> dict[str, Any] | None:
    """The result of an unfinished training from its log, at its last complete evaluation; None before that."""
    points = complete(run, curve(run))
    # The log has the numbers of the model without overrides, which are not those of the evaluation.
    kinds = () if run.model_overrides else ("", *run.types)
    places = [part(subset, kind) for subset in run.subsets for kind in kinds]
    return cut(points, places, run.checkpoint_metric, next(iter(run.subsets)), run.best) if points else None


def cut(
    points: Sequence[dict[str, float]], places: Iterable[str], metric: str, subset: str, best: bool
) -> dict[str, Any]:
    """The result of a training that was stopped at the last of some ``points`` of its curve.

    Args:
        places: the ``part``s whose numbers it has.
        metric, subset, best: as in ``quantities.chosen``.
    """
    point, places = chosen(points, metric, subset, best), list(places)
    found = {name: {p: point[q.key(p)] for p in places if q.key(p) in point} for name, q in QUANTITIES.items()}
    return {
        "steps": points[-1]["step"],
        "checkpoint_step": point["step"],
        **{name: values for name, values in found.items() if values},
        "generated": {},
        "curve": list(points),
    }


def minutes(run: Run) -> float:
    """Minutes that a training ran, by the times in its log: from the first to the last line of each start."""
    total = 0.0
    for start in starts(run.log):
        stamps = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ", start, re.MULTILINE)
        if stamps:
            first, last = (datetime.fromisoformat(stamps[place]) for place in (0, -1))
            total += (last - first).total_seconds() / 60
    return total


def position(run: Run) -> dict[str, Any]:
    """The last step of a training, that of its last evaluation, and this one's numbers of the quantity that is shown,
    by subset.
    """
    state: dict[str, Any] = {"step": 0, "evaluated": 0}
    shown = QUANTITIES[run.shown].logged
    for event in events(run.log):
        if event["kind"] == "train_inner":
            state["step"] = int(event["num_updates"])
        elif event["kind"] in run.subsets:
            if f"{event['kind']}_{shown}" in event:
                state[event["kind"]] = event[f"{event['kind']}_{shown}"]
            state["step"] = state["evaluated"] = int(event[f"{event['kind']}_num_updates"])
    return state


def measured(run: Run, log: Path) -> dict[str, dict[str, float]]:
    """quantity -> ``part`` -> value, from the output of ``fairseq-validate``."""
    found: dict[str, dict[str, float]] = {}
    for event in events(log):
        for name, place, value in _values(run, event):
            found.setdefault(name, {})[place] = value
    return found


def result(run: Run) -> dict[str, Any]:
    """The result of a run that is trained and evaluated."""
    every = curve(run)
    points = complete(run, every)
    if not points:
        raise ValueError(f"{run.log} has no evaluation")
    found = {
        "steps": points[-1]["step"],
        "checkpoint_step": chosen(points, run.checkpoint_metric, next(iter(run.subsets)), run.best)["step"],
        **measured(run, run.folder / "validate.log"),
        "generated": {decoding(*how): generated(run.decoded_log(*how)) for how in run.decodings},
        "curve": every,
    }
    if run.more_overrides:
        found["more"] = {more: measured(run, run.more_log(n)) for n, more in enumerate(run.more_overrides)}
    if run.analysed:
        found["analysed"] = {path: analysed(run.folder, path) for path in run.analysed}
    return found


def analysed(folder: Path, path: str) -> float | None:
    """The number at ``NAME/key/key`` in NAME.json of a run's folder; keys of lists are numbers. None without it."""
    name, *keys = path.split("/")
    found = json.loads((folder / f"{name}.json").read_text("utf-8"))
    try:
        for key in keys:
            found = found[int(key)] if isinstance(found, list) else found[key]
        return float(found)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def generated(path: Path) -> dict[str, float]:
    """BLEU and its length ratio of a ``fairseq-generate`` output; NaN where its last line lacks them."""
    last = path.read_text(errors="replace").rpartition("\nGenerate ")[2]
    patterns = {"bleu": r"BLEU[^=]*= ([0-9.]+)", "length_ratio": r"ratio = ([0-9.]+)"}
    found = {name: re.search(pattern, last) for name, pattern in patterns.items()}
    return {name: float(match[1]) if match else math.nan for name, match in found.items()}

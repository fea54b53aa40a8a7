"""Logs, runs, recipes and results that are written by hand, for the tests of experiments."""

from __future__ import annotations

import json
import shlex
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_sg import files
from fairseq_sg.experiments import records
from fairseq_sg.experiments.plan import Plan, make_plan
from fairseq_sg.experiments.recipe import read
from fairseq_sg.experiments.results import Results
from fairseq_sg.experiments.run import Run
from fairseq_sg.experiments.schema import Recipe

# Logs of fairseq-train.

STAMP = "2026-01-01 10:00:00 | INFO"


def inner(step: int, loss: str = "1.5") -> str:
    return f'{STAMP} | train_inner | {{"loss": "{loss}", "num_updates": "{step}"}}\n'


def of_subset(name: str, step: int, accuracy: float, loss: str = "0.5", stamp: str = STAMP) -> str:
    values = {"accuracy": accuracy, "nll_loss": loss, "num_updates": step}
    return f"{stamp} | {name} | {json.dumps({f'{name}_{key}': str(value) for key, value in values.items()})}\n"


def evaluated(step: int, valid: float, gen: float, loss: str = "0.5") -> str:
    return of_subset("valid", step, valid, loss) + of_subset("gen", step, gen, loss)


def course(*valid: float, gen: float = 0) -> str:
    """Evaluations at steps 1, 2, …"""
    return "".join(evaluated(step, accuracy, gen) for step, accuracy in enumerate(valid, 1))


# Runs.


def make_run(folder: Path, log: str = "", steps: int = 100, **more: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.log").write_text(log)
    arguments = ["--task", "sg_classification", "--cpu"]
    return Run("m", 1, folder, Path("data"), steps, arguments, {"valid": "IID", "gen": "OOD"}, **more)


def save(run: Run, **more: Any) -> None:
    """Writes the run's record."""
    run.folder.mkdir(parents=True, exist_ok=True)
    commands = [shlex.join(command) for command in run.commands()]
    starts = [{"step": 0, "commit": "abc", "machine": {"cpu": "x"}}]
    kept = {"settings": records.settings_of(run), "minutes": 1.0, "starts": starts}
    kept |= {"folder": str(run.folder), "commands": commands}
    files.write_json(run.folder / "run.json", kept | more)


def points(*course: Sequence[float]) -> list[dict[str, float]]:
    """A curve of (step, dev, valid, gen)."""
    return [{"step": step, "dev": dev, "valid": valid, "gen": gen} for step, dev, valid, gen in course]


def finish(run: Run, final: float, *course: Sequence[float]) -> None:
    """Writes a finished run with an accuracy on gen."""
    accuracy = {"dev": 0.0, "valid": 0.0, "gen": final}
    save(run, result={"steps": run.steps, "accuracy": accuracy, "loss": {}, "generated": {}, "curve": points(*course)})


def fail(run: Run) -> None:
    """Writes a run that diverged."""
    save(run, diverged={"step": 3, "why": "the loss is nan"})


# Recipes.

TINY = """\
title: A tiny table, 100 % & more
source: Nobody 1999, Table 0
data:
  tiny: {folder: tiny, prepare: ctl --order forward, subsets: [dev, valid, gen]}
steps: STEPS
validate_every: 20
batch_size_valid: 50
seeds: 2
unit: fraction
checkpoint: best
train: >-
  --task sg_classification --criterion classification --optimizer torch_adam --clip-norm 1 --batch-size 16
  --no-source-bos --arch sg_lstm_ctl --hidden-dim 32
columns:
  IID: {subset: valid, at: end}
  OOD: {subset: gen}
  OOD-20: {subset: gen, at: 20}
rows:
  good:
    label: An LSTM_1
    arguments: --lr 3e-3
    published:
      tiny: {IID: "1.00 ± 0.00", OOD: ".21 ± .01"}
  bad:
    arguments: --lr 1e38
    steps: 60
    published:
      tiny: {IID: Fail, OOD: Fail}
  shown:
    label: of another paper
    missing: it is not ours
    published:
      tiny: {OOD: ".5"}
chosen: [the learning rate of 100 %]
"""

#: ``TINY`` with further data, which have one subset; the row ``good`` is trained on both.
TWO = TINY.replace(
    "subsets: [dev, valid, gen]}\n",
    "subsets: [dev, valid, gen]}\n"
    "  other: {folder: other, prepare: ctl --order backward, subsets: [valid], arguments: --dropout 0.5}\n",
).replace("    steps: 60\n", "    steps: 60\n    data: [tiny]\n")


def write_recipe(folder: Path, text: str = TINY, steps: int = 40, name: str = "tiny") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("STEPS", str(steps)))
    return path


def tiny(folder: Path, text: str = TINY, steps: int = 40) -> Recipe:
    return read(write_recipe(folder, text, steps))


def planned(folder: Path, text: str = TINY, steps: int = 40, **more: Any) -> Plan:
    """A plan of the tiny recipe with its runs in FOLDER/out."""
    return make_plan(tiny(folder, text, steps), out=folder / "out", **more)


# Results.


def result(steps: int = 40, **accuracies: float) -> dict[str, Any]:
    """The result of a training, whose curve has its end alone."""
    accuracy = {"dev": 0.0, "valid": 0.0, "gen": 0.0} | accuracies
    return {"steps": steps, "accuracy": accuracy, "loss": {}, "generated": {}, "curve": [{"step": steps, **accuracy}]}


def record(row: str, seed: int, data: str = "tiny", commit: str = "abc", **more: Any) -> dict[str, Any]:
    """The record of a training; with a result (``valid=…, gen=…`` in percent), or with ``diverged`` and so on."""
    accuracies = {key: more.pop(key) for key in ("dev", "valid", "gen") if key in more}
    if accuracies:
        more["result"] = result(more.pop("steps", 40), **accuracies)
    if more:
        more |= {"minutes": 1.0, "starts": [{"step": 0, "commit": commit, "machine": {"cpu": "x"}}]}
    return {"row": row, "data": data, "seed": seed, **more}


def finished(recipe: Recipe) -> Results:
    """Two rows, two seeds: both of good are done; one of bad diverged, the other is not run."""
    curves = (
        points((20, 5, 90, 8), (40, 4, 100, 10)),
        points((20, 5, 90, 10), (40, 9, 99, 30)),
    )
    good = [record("good", seed, gen=gen) for seed, gen in ((1, 20.0), (2, 24.0))]
    for done, curve in zip(good, curves, strict=True):
        done["result"]["curve"] = curve
    bad = record("bad", 1, diverged={"step": 3, "why": "the loss is nan"})
    return Results(recipe, 1.0, [*good, bad, record("bad", 2)])


# Pictures.


def metadata(path: Path) -> dict[str, str]:
    """The texts that a PNG has beside its pixels."""
    content, found, place = path.read_bytes(), {}, 8
    while place < len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        if kind in (b"tEXt", b"iTXt"):
            key, _, value = content[place + 8 : place + 8 + length].partition(b"\0")
            found[key.decode()] = value.decode()
        place += length + 12
    return found

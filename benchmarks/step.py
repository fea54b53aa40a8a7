"""A training step of ``fairseq-train`` in seconds and tokens, beside a reference's own step in the same run.

    python -m benchmarks.step                            # relative universal SCAN step, random and bucketed batches
    python -m benchmarks.step --reference PATH           # the same sentences through the reference's own step too
    python -m benchmarks.step --model pcfg --rounds 1    # the step of PCFG
    python -m benchmarks.step --arguments="--encoder-attention linear --decoder-attention linear"

PATH holds a copy of robertcsordas/transformer_generalization; it runs in a separate process (``reference_step.py``). A
round takes every batch of every kind once, one step of each implementation after the other, so that other work of the
machine affects all alike. On a CPU, times are CPU seconds on one thread. Compare them as ratios. Where oneDNN computes
projections (``fairseq_sg/modules/cpu/linear.py``), a step with MKL stands beside it. A step whose loss does not fall is
an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics

from benchmarks import report
from fairseq_sg.experiments.run import values_of
from fairseq_sg.kernels.timing import synchronize
from fairseq_sg.modules.cpu import linear
from fairseq_sg.parsers import Command, positive
from fairseq_sg.trainer import SGTrainer

TITLES = {"scan": "SCAN", "pcfg": "PCFG"}
#: Model -> its data, its arguments, and the sizes of the reference's model.
MODELS: dict[str, dict[str, Any]] = {
    "scan": {
        "data": "scan --split length --cutoff 26",
        "arguments": "--arch sg_transformer_scan --depth shared "
        "--encoder-attention relative --decoder-attention relative "
        "--lr 1e-3 --clip-norm 5 --batch-size 256",
        "sizes": {"dim": 128, "ffn": 256, "heads": 8, "layers": 3, "lr": 1e-3, "clip": 5.0},
    },
    "pcfg": {
        "data": "pcfg --condition systematicity --generate 2000",
        "arguments": "--arch sg_transformer_pcfg --depth shared "
        "--encoder-attention relative --decoder-attention relative "
        "--lr 1e-4 --clip-norm 1 --batch-size 64",
        "sizes": {"dim": 512, "ffn": 2048, "heads": 8, "layers": 6, "lr": 1e-4, "clip": 1.0},
    },
}
COMMON = (
    "--user-dir {plugin} --task sg_translation --criterion cross_entropy_orthogonality --optimizer torch_adam "
    "--dropout 0.1 --seed 1 --no-save --disable-validation --num-workers 0 --log-format none"
)
#: Batches of similar lengths: sorted inside windows of this many batches.
WINDOW = 4
#: Number of sampled batches: complete windows, so that every length has its share.
WINDOWS = 2


@dataclass
class Measured:
    """One step: its seconds, and its loss in nats per token."""

    seconds: float
    loss: float


class OurStep:
    """The training step of ``fairseq-train``; without ``onednn``, all projections are torch's own."""

    def __init__(self, arguments: Sequence[str], data: Path, device: str, onednn: bool = True) -> None:
        self.onednn = onednn
        plugin = report.REPOSITORY / "fairseq_sg"
        common = shlex.split(COMMON.format(plugin=shlex.quote(str(plugin))))
        line = [str(data), *common, *arguments, *(["--cpu"] if device == "cpu" else [])]
        utils.import_user_module(argparse.Namespace(user_dir=str(plugin)))
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=line)
        cfg = convert_namespace_to_omegaconf(args)
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)
        self.device = device
        self.task = tasks.setup_task(cfg.task)
        model = self.task.build_model(cfg.model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainer = SGTrainer(cfg, self.task, model, self.task.build_criterion(cfg.criterion))
        # As in fairseq-train: the trainer, which owns the optimizer, makes the batches.
        self.iterator = self.trainer.get_train_iterator(epoch=1)
        self.trainer.begin_epoch(1)

    def batches(self, number: int) -> list[dict[str, Any]]:
        """The first batches of an epoch with the full number of sentences."""
        found = [batch for batch in self.iterator.next_epoch_itr(shuffle=False) if batch]
        full = max(batch["nsentences"] for batch in found)
        found = [batch for batch in found if batch["nsentences"] == full]
        return found[:number]

    def step(self, batch: dict[str, Any]) -> Measured:
        chosen = contextlib.nullcontext() if self.onednn else mock.patch.object(linear, "onednn_is_faster", bool)
        with chosen, metrics.aggregate() as logs:
            synchronize(self.device)
            wall, cpu = time.perf_counter(), time.process_time()
            self.trainer.train_step([batch])
            synchronize(self.device)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self.trainer.flush()  # on a GPU, logs are not read in the step
        return Measured(cpu if self.device == "cpu" else wall, logs.get_smoothed_values()["nll_loss"] * math.log(2))


class ReferenceStep:
    """The reference's training step in a separate process."""

    def __init__(self, path: Path, model: dict[str, Any], ours: OurStep, device: str) -> None:
        # Their vocabularies have no special symbols; the model adds them.
        self.special = ours.task.source_dictionary.nspecial
        source, target = (len(d) - self.special for d in (ours.task.source_dictionary, ours.task.target_dictionary))
        sizes = model["sizes"] | {"source_words": source, "target_words": target}
        command = [sys.executable, "-m", "benchmarks.reference_step"]
        command += [str(path.resolve()), device, json.dumps(sizes)]
        self.device = device
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, cwd=report.REPOSITORY, text=True, **pipes)
        self.parameters = self._answer()["parameters"]
        self.known: dict[int, int] = {}

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"the reference's process ended: {self.errors.read()[-2000:]}")
        return json.loads(line)

    def _words(self, tokens: torch.Tensor) -> list[list[int]]:
        return [[word - self.special for word in row if word >= self.special] for row in tokens.tolist()]

    def step(self, batch: dict[str, Any]) -> Measured:
        if id(batch) not in self.known:
            sentences = {
                "source": self._words(batch["net_input"]["src_tokens"]),
                "target": self._words(batch["target"]),
            }
            self.known[id(batch)] = self._ask(sentences)["batches"] - 1
        answer = self._ask({"step": self.known[id(batch)]})
        return Measured(answer["cpu" if self.device == "cpu" else "wall"], answer["loss"])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def prepared(model: str, folder: Path) -> Path:
    """The new ``folder`` with the data of a model."""
    command = [sys.executable, "-m", "data_prep", *shlex.split(MODELS[model]["data"]), "--out", str(folder)]
    subprocess.run(command, cwd=report.REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder


@dataclass
class Result:
    """One implementation on one kind of batches: seconds per step, the mean over the batches, in every round."""

    batches: str
    implementation: str
    seconds: list[float]
    losses: list[float]
    real: float
    padded: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def tokens(batches: Sequence[dict[str, Any]], pad: int) -> dict[str, float]:
    """Positions of an average batch, of source and target: those with a token, and all."""
    sides = [
        x for batch in batches for x in (batch["net_input"]["src_tokens"], batch["net_input"]["prev_output_tokens"])
    ]
    return {
        "real": sum(int(x.ne(pad).sum()) for x in sides) / len(batches),
        "padded": sum(x.numel() for x in sides) / len(batches),
    }


def measure(name: str, extra: Sequence[str], data: Path, reference: Path | None, rounds: int, number: int, device: str):
    """Results of every implementation on random and on bucketed batches, and the numbers of parameters."""
    model = MODELS[name]
    results, runs, parameters = [], [], {}
    for kind, window in (("random", 1), ("bucketed", None)):
        arguments = [*shlex.split(model["arguments"]), *extra]
        size = int(values_of("--batch-size", arguments)[-1])
        arguments += ["--length-window", str(size * WINDOW if window is None else window)]
        ours = OurStep(arguments, data, device)
        batches = ours.batches(number if window == 1 else WINDOW * WINDOWS)
        steps = {"ours": ours}
        if device == "cpu" and linear.onednn_is_faster():
            steps["ours, projections by MKL"] = OurStep(arguments, data, device, onednn=False)
        if reference is not None:
            steps["reference"] = ReferenceStep(reference, model, ours, device)
        size = tokens(batches, ours.task.source_dictionary.pad())
        for implementation, step in steps.items():
            parameters[implementation.partition(",")[0]] = step.parameters
            results.append(Result(kind, implementation, [], [], **size))
            runs.append((step, batches))
    # The first round is a warm-up: the first steps also allocate.
    for counts in [False] + [True] * rounds:
        seconds: list[list[float]] = [[] for _ in runs]
        for position in range(max(len(batches) for _, batches in runs)):
            for (step, batches), result, found in zip(runs, results, seconds):
                if position < len(batches):
                    measured = step.step(batches[position])
                    result.losses.append(measured.loss)
                    found.append(measured.seconds)
        if counts:
            for result, found in zip(results, seconds):
                result.seconds.append(statistics.mean(found))
    for step, _ in runs:
        if isinstance(step, ReferenceStep):
            step.close()
    for result in results:
        check(f"{result.implementation} on {result.batches} batches", result.losses)
    return results, parameters


def check(what: str, losses: Sequence[float]) -> None:
    """Raises SystemExit for a step whose loss does not fall; such a step is not timed."""
    third = max(1, len(losses) // 3)
    first, last = statistics.mean(losses[:third]), statistics.mean(losses[-third:])
    if not all(map(math.isfinite, losses)) or last >= first:
        raise SystemExit(f"{what} does not train: loss {first} -> {last}")


def rows(results: Sequence[Result]) -> list[list[Any]]:
    """A row of the table for each result; ratios are steps per second over the reference's."""
    base = {r.batches: r.median for r in results if r.implementation == "reference"}
    return [
        [
            f"{r.implementation}, {r.batches}",
            [r.median, min(r.seconds), max(r.seconds)],
            1 / r.median,
            round(r.real),
            round(r.padded),
            base[r.batches] / r.median if base else None,
            base["random"] / r.median if base else None,
            [r.losses[0], r.losses[-1]],
        ]
        for r in results
    ]


COLUMNS = [
    ("step", "{}"),
    ("seconds", "{:.3f} [{:.3f}, {:.3f}]"),
    ("steps/s", "{:.2f}"),
    ("tokens", "{:,}"),
    ("with padding", "{:,}"),
    ("× reference", "{:.2f}"),
    ("× reference, random", "{:.2f}"),
    ("loss", "{:.3f} → {:.3f}"),
]


def step_section(
    model: str,
    rounds: int,
    device: str,
    batches: int = 4,
    reference: Path | None = None,
    data: Path | None = None,
    arguments: str = "",
) -> report.Section:
    """The step of a model on random and bucketed batches.

    Args:
        model: of ``MODELS``.
        rounds: timed.
        device: ``cpu`` or ``cuda``.
        batches: random ones of a round.
        reference: a copy of the reference repository, to measure its step too.
        data: a prepared folder; None to prepare one.
        arguments: further ones of fairseq-train.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        data = data or prepared(model, Path(folder) / model)
        results, parameters = measure(model, shlex.split(arguments), data, reference, rounds, batches, device)
    chosen = " ".join(filter(None, (MODELS[model]["arguments"], arguments)))
    sizes = "; ".join(f"{name}: {number:,} parameters" for name, number in parameters.items())
    return report.Section(
        "step",
        f"{TITLES[model]} ({device}{f', {arguments}' if arguments else ''})",
        device,
        COLUMNS,
        report.rounded(rows(results)),
        about=f"`{chosen}`, {'CPU seconds on one thread' if device == 'cpu' else 'seconds'}; {sizes}.",
        note=f"{rounds} rounds",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="scan")
    parser.add_argument("--arguments", default="", help="further arguments of fairseq-train, as one string")
    parser.add_argument("--reference", type=Path, metavar="PATH", help="a copy of the reference repository")
    parser.add_argument("--data", type=Path, help="the data folder (default: generated)")
    parser.add_argument("--batches", type=positive, default=4, help="random batches per round (default 4)")
    report.add_options(parser, rounds=5)
    args = report.parse(parser, argv, "benchmarks.step")
    section = step_section(
        args.model, args.rounds, args.device, args.batches, args.reference, args.data, args.arguments
    )
    report.publish(section, args.command, args.out)


if __name__ == "__main__":
    main()

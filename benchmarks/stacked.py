"""Training steps of several models at once: their parameters are stacked, and one pass of ``vmap`` goes through all.

    python -m benchmarks.stacked                           # 15 SCAN models on a GPU, 4 on a CPU: steps per second
    python -m benchmarks.stacked --models 6 --arguments="--batch-size 64"

Stacked steps are no way to train so far: this measures what they would gain. A step has forward and backward pass,
clipping of each model's gradients, and the update. It has no data loading and no logs, which the trainings of
``benchmarks.together`` have. On a GPU, steps are recorded as CUDA graphs. A model whose loss does not fall is an error.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils._pytree import tree_map, tree_map_only

from benchmarks import step
from fairseq_sg.graphs import StepGraphs
from fairseq_sg.kernels.timing import synchronize
from fairseq_sg.parsers import Command, positive

#: Models at once.
USUAL = {"cpu": 4, "cuda": 15}
#: Lengths rounded up, so that shapes recur.
ARGUMENTS = "--required-seq-len-multiple 8"
#: Options of fairseq-train that change its step, and that a stacked step would ignore.
IGNORED = ("--autocast", "--compile", "--update-freq")
#: Batches that take turns, and how often before the timed steps: for each shape, one runs as it is, one is recorded.
BATCHES, BEFORE = 4, 2


class Loss(nn.Module):
    """The loss of a model as a module, whose parameters are those of the model."""

    def __init__(self, model: nn.Module, criterion: nn.Module):
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The sum over the batch, ()."""
        return self.criterion(self.model, batch)[0]


class StackedStep:
    """A step of K models, of the seeds 1 to K, on K batches of one shape.

    Args:
        arguments: of fairseq-train, with ``--optimizer torch_adam``.
        data: a prepared folder.
        models: K.
        device: ``cpu`` or ``cuda``.
        recorder: of graphs (``StepGraphs``).

    Attributes:
        parameters: name -> (K, …).
    """

    def __init__(self, arguments: Sequence[str], data: Path, models: int, device: str, recorder: Any = None):
        self.ours, self.device, self.models = step.OurStep(arguments, data, device), device, models
        trainer = self.ours.trainer
        several = []
        for seed in range(1, models + 1):
            utils.set_torch_seed(seed)
            several.append(self.ours.task.build_model(trainer.cfg.model).to(device).train())
        parameters, buffers = stack_module_state(several)
        self.parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self._buffers = {f"model.{name}": tensor for name, tensor in buffers.items()}
        self._loss = Loss(several[0], trainer.criterion)
        self._clip_norm = trainer.cfg.optimization.clip_norm
        options = dict(trainer.optimizer.optimizer_config, fused=True, capturable=device == "cuda")
        self._optimizer = torch.optim.AdamW(self.parameters.values(), **options)
        recorded = device == "cuda" or recorder is not None
        self._run = StepGraphs(self._step, most=sys.maxsize, recorder=recorder) if recorded else self._step

    def batches(self, number: int) -> list[dict[str, Any]]:
        """The first batches of an epoch, each stacked K times."""
        found = utils.move_to_cuda(self.ours.batches(number)) if self.device == "cuda" else self.ours.batches(number)
        return [tree_map_only(Tensor, lambda x: torch.stack([x] * self.models), batch) for batch in found]

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """A step; the losses before it in nats per token, (K,)."""
        return self._run([batch])

    @torch.no_grad()
    def _step(self, batches: list[dict[str, Any]]) -> Tensor:
        (batch,) = batches
        size = batch["ntokens"]  # of each model
        parameters = {f"model.{name}": p for name, p in self.parameters.items()}
        dims = tree_map(lambda part: 0 if isinstance(part, Tensor) and part.dim() else None, batch)
        of_each = vmap(grad_and_value(self._of_one), in_dims=(0, 0, dims), randomness="different")
        gradients, losses = of_each(parameters, self._buffers, batch)
        gradients = [g / size for g in gradients.values()]
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])  # (names, K)
        most = self._clip_norm or math.inf
        scale = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)  # (K,)
        for p, g in zip(self.parameters.values(), gradients, strict=True):
            p.grad = g * scale.view(-1, *[1] * (g.dim() - 1))
        self._optimizer.step()
        return losses / size

    def _of_one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        return functional_call(self._loss, (parameters, buffers), (batch,))


def rate(arguments: Sequence[str], data: Path, models: int, steps: int, device: str) -> float:
    """Steps per second of all models together, from the median step.

    Raises:
        SystemExit: a model did not learn.
    """
    stacked = StackedStep(arguments, data, models, device)
    batches = stacked.batches(BATCHES)
    losses = [stacked(batch) for _ in range(BEFORE) for batch in batches]
    seconds = []
    for number in range(steps):
        synchronize(device)
        start = time.perf_counter()
        losses.append(stacked(batches[number % len(batches)]).clone())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    first, last = losses[0].tolist(), losses[-1].tolist()
    if not all(after < before for before, after in zip(first, last, strict=True)):
        raise SystemExit(f"a model did not learn: nats per token {first}, after {len(losses)} steps {last}")
    return models / statistics.median(seconds)


def refuse_ignored(parser: Command, arguments: str) -> None:
    """Ends with an error for ``--arguments`` of which stacked steps would know nothing."""
    given = [word.partition("=")[0] for word in shlex.split(arguments)]
    for option in IGNORED:
        if option in given:
            parser.error(f"--arguments: stacked steps know nothing of {option}, so leave it out")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(prog="python -m benchmarks.stacked", description=__doc__)
    parser.add_argument("--models", type=positive, help="models at once (default: 15 on a GPU, 4 on a CPU)")
    parser.add_argument("--steps", type=positive, default=50, help="timed (default: %(default)s)")
    parser.add_argument("--arguments", default="", help="further arguments of fairseq-train, as one string")
    parser.add_argument("--data", type=Path, help="the data folder (default: generated)")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=found, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    refuse_ignored(parser, args.arguments)
    models = args.models or USUAL[args.device]
    arguments = shlex.split(f"{step.MODELS['scan']['arguments']} {ARGUMENTS} {args.arguments}")
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or step.prepared("scan", Path(folder) / "scan")
        print(f"{rate(arguments, data, models, args.steps, args.device):.2f} steps/s in total, {models} stacked models")


if __name__ == "__main__":
    main()

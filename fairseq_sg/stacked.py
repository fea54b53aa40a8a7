"""Steps of several trainings of one model at once: ``vmap`` over stacked parameters.

    θ (K, …), K batches (K, B, N)  →  losses (K,), gradients (K, …)

The operations of a small model leave most of a GPU idle. K models stacked have as many operations as one, each on K
times the numbers.

Each training is its own: task, batches, optimizer, schedule, logs and checkpoints. Only forward pass, backward pass and
clipping are done at once, and a model's parameters are a part of the stacked ones. Losses and gradients are those of
single trainings up to rounding. Dropout draws other masks, from the seed of the first training.

The trainings take turns (``together``). Each hands in its batches and waits; when all have, the first makes the step of
all. Batches get a common length where the task knows how. Models whose batches still differ in shape, as at the end of
an epoch, make steps of their own. With ``--step-graphs`` the steps of all are one graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fairseq_sg.errors import UsageError, in_one_line, out_of_memory
from fairseq_sg.graphs import StepGraphs, counted, described, replaced
from fairseq_sg.trainer import Batch, Row, SGTrainer

Batches = list[dict[str, Any]]


class Stack:
    """What trainings share that make their steps at once.

    Args:
        trainings: their number.
        recorder: of graphs (``StepGraphs``).
    """

    def __init__(self, trainings: int, recorder: Any = None):
        self._trainings, self._recorder = trainings, recorder
        self._order: list[SGTrainer] = []
        #: What was handed in for the next step.
        self._batches: dict[SGTrainer, Batches] = {}
        #: What a step has made: the numbers of each training, or why it failed.
        self._made: dict[SGTrainer, Row | str] = {}
        self._models: StackedModels | None = None

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Of all trainings: a step reads what each has put on the device."""
        return torch.cuda.Stream()

    def leave(self) -> None:
        """A training has ended; the others are stacked again."""
        self._trainings -= 1
        self._order, self._models = self._present, None

    def step(self, trainer: SGTrainer, batches: Batches) -> Row:
        """The numbers of a training's step, whose gradients are those of all ``batches``.

        Raises:
            UsageError: these models cannot be stacked, or there is no memory.
        """
        if trainer not in self._order:
            self._order.append(trainer)
        self._batches[trainer] = batches
        try:
            while trainer not in self._made:
                if len(self._batches) == self._trainings and trainer is self._present[0]:
                    self._step()
                else:
                    trainer.between_steps()
        finally:  # also where this training is stopped
            self._batches.pop(trainer, None)
            made = self._made.pop(trainer, None)
        if isinstance(made, str):
            raise UsageError(made)
        return made

    @property
    def _present(self) -> list[SGTrainer]:
        """The trainings that have handed in their batches, in their order."""
        return [trainer for trainer in self._order if trainer in self._batches]

    def _step(self) -> None:
        trainers = self._present
        try:
            if self._models is None:
                self._models = StackedModels(trainers, self._recorder)
            made = self._models.step([self._batches[trainer] for trainer in trainers])
        except UsageError as error:
            made = [str(error)] * len(trainers)
        except Exception as error:
            fix = "train fewer together" if out_of_memory(error) else "leave it out"
            made = [f"--stacked: these models have no step at once ({in_one_line(error)}): {fix}"] * len(trainers)
        self._made = dict(zip(trainers, made, strict=True))
        self._batches.clear()


class Loss(nn.Module):
    """A training's model and criterion as one module, whose output is the loss."""

    def __init__(self, trainer: SGTrainer):
        super().__init__()
        self.model, self.criterion = trainer.model, trainer.criterion
        self._trainer = trainer

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
        """The loss summed over a batch, (), its sample size, and its logs."""
        trainer, kept = self._trainer, _Kept()
        criterion = trainer.optimizer.autocasting(self.criterion)
        _, size, logs = trainer.task.train_step(batch, self.model, criterion, kept, trainer.get_num_updates())
        return kept.loss, size, logs


class _Kept:
    """In the place of an optimizer: keeps the loss whose gradient a task asks for."""

    def backward(self, loss: Tensor) -> None:
        self.loss = loss


class StackedModels:
    """The models of some trainings, whose parameters are parts of stacked ones from now on.

    Attributes:
        parameters: name -> (K, …), those that are trained.
        fixed: name -> (K, …), other parameters and buffers. Buffers that a checkpoint lacks are those of any model.
    """

    def __init__(self, trainers: Sequence[SGTrainer], recorder: Any = None):
        self._trainers = trainers
        modules = [Loss(trainer) for trainer in trainers]
        self._loss = modules[0]
        trained = {name for name, p in self._loss.named_parameters() if p.requires_grad}
        #: Of each model, by name.
        self._trained = [{n: p for n, p in module.named_parameters() if n in trained} for module in modules]
        self.parameters: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        every = [dict([*module.named_parameters(), *module.named_buffers()]) for module in modules]
        kept = self._loss.state_dict().keys()
        for name in filter(kept.__contains__, every[0]):
            parts = [of[name] for of in every]
            stacked = torch.stack([part.detach() for part in parts])
            for k, part in enumerate(parts):
                part.data = stacked[k]
            (self.parameters if name in trained else self.fixed)[name] = stacked
        self._clip_norm = trainers[0].cfg.optimization.clip_norm or math.inf
        most = trainers[0].most_graphs
        self._run = StepGraphs(self._step, most, recorder) if most else self._step

    def step(self, batches: Sequence[Batches]) -> list[Row]:
        """The update of each model by its batches; its numbers."""
        same: dict[tuple, list[int]] = defaultdict(list)  # shape -> models
        batches = [[counted(batch) for batch in own] for own in _of_one_length(self._trainers[0].task, batches)]
        tensors: list[list[Tensor]] = []
        for k, own in enumerate(batches):
            tensors.append([])
            same[described(own, tensors[k])].append(k)
        rows: dict[int, Row] = {}
        for models in same.values():
            stacked = map(torch.stack, zip(*(tensors[k] for k in models), strict=True))
            row = self._run([{"models": tuple(models)}, *replaced(batches[models[0]], stacked)])
            values = row.values.clone()  # graphs share their memory
            rows |= {k: row._replace(values=values[i]) for i, k in enumerate(models)}
        return [rows[k] for k in range(len(batches))]

    @torch.no_grad()
    def _step(self, batches: Batches) -> Row:
        """The update of some models, which the first entry names, by the stacked batches after it; their numbers."""
        models: Sequence[int] = batches[0]["models"]
        for module in self._loss.children():
            if not module.training:
                module.train()
        parameters, fixed = self._of(models, self.parameters), self._of(models, self.fixed)
        gradients: dict[str, Tensor] = {}
        logs, size = [], 0
        for batch in batches[1:]:
            of_batch, of_sample, log = self._gradients(parameters, fixed, batch)
            gradients |= {name: gradients[name] + g if name in gradients else g for name, g in of_batch.items()}
            logs.append(log)
            size += of_sample
        flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)  # (K, P)
        size = size.float() if torch.is_tensor(size) else float(size)
        scale = 1 / (size + (size == 0))  # without predictions, gradients are 0
        flat *= scale[:, None] if torch.is_tensor(scale) else scale
        norms = torch.linalg.vector_norm(flat, dim=1)  # (K,)
        flat *= (self._clip_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
        parts = flat.split([gradient[0].numel() for gradient in gradients.values()], 1)  # (K, …) each
        for i, k in enumerate(models):
            self._update(k, {name: part[i] for name, part in zip(gradients, parts, strict=True)}, norms[i])
        return Row.of(Batch(logs, size), norms)

    def _of(self, models: Sequence[int], stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of some models, in their order."""
        if len(models) == len(self._trainers):
            return stacked
        return {name: torch.stack([x[k] for k in models]) for name, x in stacked.items()}

    def _gradients(self, parameters: dict[str, Tensor], fixed: dict[str, Tensor], batch: dict[str, Any]):
        """Gradients of the summed losses by name, each (K, …), where a loss depends on the parameter; sample sizes and
        logs, numbers or (K,).
        """
        numbers: dict[str, Any] = {}

        def loss_of(parameters, fixed, tensors):
            own = replaced(batch, iter(tensors))
            loss, size, logs = functional_call(self._loss, parameters | fixed, (own,))
            made = {"": size, **logs}
            numbers.update((name, value) for name, value in made.items() if not torch.is_tensor(value))
            return loss, {name: value for name, value in made.items() if torch.is_tensor(value)}

        tensors: list[Tensor] = []
        described(batch, tensors)
        leaves = {name: x.detach().requires_grad_() for name, x in parameters.items()}
        with torch.enable_grad():
            losses, values = vmap(loss_of, randomness="different")(leaves, fixed, tensors)
            found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        made = numbers | values
        return gradients, made.pop(""), made

    def _update(self, k: int, gradients: dict[str, Tensor], norm: Tensor) -> None:
        """The update of a model by its gradients, flat, whose norm was () before they were clipped."""
        trainer, parameters = self._trainers[k], self._trained[k]
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.view_as(parameters[name])
        trainer.optimizer.skip_unless_finite(norm)
        trainer.task.optimizer_step(trainer.optimizer, model=trainer.model, update_num=trainer.get_num_updates())
        for p in parameters.values():
            p.grad = None  # of all models in one memory


def _of_one_length(task, batches: Sequence[Batches]) -> list[Batches]:
    """The batches of all models, of one length where their task knows how."""
    if len({len(own) for own in batches}) > 1:
        return list(batches)
    return [list(own) for own in zip(*(task.of_one_length(these) for these in zip(*batches, strict=True)), strict=True)]

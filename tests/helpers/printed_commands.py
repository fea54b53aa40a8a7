"""Runs the training commands that ``data_prep`` prints, for a few updates."""

from __future__ import annotations

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_sg.plugin  # noqa: F401


def train(arguments: list[str], lr: float = 1e-3) -> tuple[list[float], dict[str, int]]:
    """The losses of some steps on the same few examples, and the sizes of the validation subsets."""
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    torch.manual_seed(1)
    task = tasks.setup_task(config.task)
    model, criterion = task.build_model(config.model), task.build_criterion(config.criterion)
    subsets = ["train", *config.dataset.valid_subset.split(",")]
    for subset in subsets:
        task.load_dataset(subset)
    examples = task.dataset("train")
    batch = examples.collater([examples[index] for index in range(8)])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for update in range(4):
        loss, _, _ = task.train_step(batch, model, criterion, StepOptimizer(optimizer), update)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {subset: len(task.dataset(subset)) for subset in subsets}


class StepOptimizer:
    """The part of fairseq's optimizer that a task needs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

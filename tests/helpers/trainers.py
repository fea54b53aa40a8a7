"""Trainers of tiny models, made as ``fairseq-train`` makes them, and the batches of their updates."""

from __future__ import annotations

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

from helpers.commands import SIZES

TRANSLATION = [
    *("--task", "sg_translation", "--arch", "sg_transformer", *SIZES, "--dropout", "0.2", "--batch-size", "8"),
    *("--criterion", "cross_entropy_orthogonality", "--encoder-attention", "linear", "--orthogonality-weight", "1e-3"),
]


def build(kind: type[Trainer], folder, *arguments: str) -> Trainer:
    metrics.reset()
    command = [str(folder), *TRANSLATION, "--optimizer", "torch_adam", "--lr", "0.01", "--cpu", "--num-workers", "0"]
    parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, *arguments])
    config = convert_namespace_to_omegaconf(parsed)
    config.common.tpu = False  # fairseq's parser turns it on with --bf16; the command turns it off again
    torch.manual_seed(1)
    task = tasks.setup_task(config.task)
    built = kind(config, task, task.build_model(config.model), task.build_criterion(config.criterion))
    return built


def groups(trainer: Trainer) -> list[list]:
    """The batches of the updates of an epoch."""
    batches = list(trainer.get_train_iterator(epoch=1).next_epoch_itr(shuffle=False))
    trainer.begin_epoch(1)
    size = trainer.cfg.optimization.update_freq[0]
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def without_memory_for(built: Trainer, batch: dict, monkeypatch) -> None:
    """Makes the criterion fail on a batch as it does where memory is too small."""
    forward = built.criterion.forward

    def limited(model, sample, **options):
        if sample is batch:
            raise RuntimeError("CUDA out of memory")
        return forward(model, sample, **options)

    monkeypatch.setattr(built.criterion, "forward", limited)


def lasting(event: dict) -> dict:
    """An event of a log, or averages, without times."""
    return {name: value for name, value in event.items() if not name.endswith(("wps", "ups", "wall"))}

"""The step of a training: fairseq's, without what takes longer than the arithmetic of a small model.

The update is fairseq's, to the bit. What is left out:

- options are read once. OmegaConf resolves an option at every look, fairseq takes fifty a step, and each takes as long
  as a small operator;
- the seed of a step goes to the generators that are used. ``torch.manual_seed`` also visits devices that do not exist,
  with a stack trace for each;
- between two validations or checkpoints nothing is asked about them.

``fairseq-train`` uses it for the tasks of this plugin on one worker, in float32 or bfloat16. In every other case, and
after an error, fairseq's own step runs: it repeats this one, and knows what to save. A gradient that is not finite ends
the training as in fairseq, with the names of the parameters that have it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor

from fairseq_sg import checkpoints, compat


def install() -> None:
    """Makes ``fairseq-train`` and ``fairseq-hydra-train`` use this trainer."""
    from fairseq.distributed import utils

    compat.wrap(utils, "call_main", _call_main)


def _call_main(call, cfg, main, **kwargs):
    """fairseq's ``call_main``, through which its commands begin; ``main`` finds the trainer in its own module."""
    command = main.__globals__
    if "validate_and_save" in command:
        for name, wrapper in (("Trainer", make), ("validate_and_save", validate_and_save)):
            if getattr(command[name], "func", None) is not wrapper:
                command[name] = functools.partial(wrapper, command[name])
    return call(cfg, main, **kwargs)


def make(fairseqs: type[Trainer], cfg, task, *arguments) -> Trainer:
    """The trainer of a task."""
    return (SGTrainer if checkpoints.is_ours(type(task)) else fairseqs)(cfg, task, *arguments)


class Batch(NamedTuple):
    """What a backward pass has beside gradients.

    Attributes:
        logs: of each batch.
        size: the number of predictions (or sentences) that the loss is divided by.
    """

    logs: list[dict[str, Any]]
    size: float | Tensor


class SGTrainer(Trainer):
    """See the module's docstring."""

    def __init__(self, cfg, task, model, criterion, quantizer=None):
        super().__init__(cfg, task, model, criterion, quantizer)
        self._first_seed = cfg.common.seed
        self._clip_norm = cfg.optimization.clip_norm
        self._converts = cfg.common.fp16 or cfg.common.bf16
        self._intervals = [
            every
            for every in (cfg.checkpoint.save_interval_updates, cfg.dataset.validate_interval_updates)
            if every and every > 0
        ]
        self._most_updates = cfg.optimization.max_update or math.inf
        self._limited_time = cfg.optimization.stop_time_hours > 0
        #: Whether the step below is fairseq's. It is where one worker trains without a loss scale.
        self.ordinary = self.data_parallel_world_size == 1 and not any(
            (
                cfg.common.fp16, cfg.common.amp, self.tpu, self.is_fsdp, self.pipeline_model_parallel, quantizer,
                cfg.common.empty_cache_freq, cfg.ema.store_ema, cfg.optimization.use_bmuf,
                cfg.distributed_training.ddp_backend == "slowmo",
            )
        )  # fmt: skip

    def train_step(self, samples: Sequence[dict[str, Any]], raise_oom: bool = False) -> dict[str, Any] | None:
        """An update with the gradients of all ``samples``; its logs, or None where memory did not suffice.

        Raises:
            FloatingPointError: a gradient is not finite.
        """
        metrics.log_start_time("train_wall", priority=800, round=0)
        batch = self._backward(samples) if self.ordinary and all(samples) else None
        if batch is None:
            return super().train_step(samples, raise_oom)
        norm = self.clip_grad_norm(self._clip_norm)
        if not torch.isfinite(norm).all():
            self._give_up(samples)
        self.task.optimizer_step(self.optimizer, model=self.model, update_num=self.get_num_updates())
        self.set_num_updates(self.get_num_updates() + 1)
        if self.cuda_env is not None:
            used = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
            metrics.log_scalar("gb_free", self.cuda_env.total_memory_in_GB - used, priority=1500, round=1, weight=0)
        logged = self._reduce_and_log_stats(batch.logs, batch.size, norm)
        metrics.log_stop_time("train_wall")
        return logged

    def _backward(self, samples: Sequence[dict[str, Any]]) -> Batch | None:
        """Makes the gradients of the mean loss over ``samples``; None after an error."""
        try:
            self._set_seed()
            for module in (self.model, self.criterion):
                if not module.training:
                    module.train()
            self.zero_grad()
            logs, size = [], 0
            for sample in samples:
                sample, _ = self._prepare_sample(sample)
                _, of_sample, log = self.task.train_step(
                    sample=sample,
                    model=self.model,
                    criterion=self.criterion,
                    optimizer=self.optimizer,
                    update_num=self.get_num_updates(),
                    ignore_grad=False,
                )
                logs.append(log)
                size += of_sample
            size = size.float() if torch.is_tensor(size) else float(size)
            # Without predictions, gradients are 0. A tensor is not looked at: the host would wait for the device.
            self.optimizer.multiply_grads(1 / (size + (size == 0)))
            return Batch(logs, size)
        except Exception:  # fairseq's step meets it again
            return None

    def _give_up(self, samples: Sequence[dict[str, Any]]) -> NoReturn:
        """Saves ``crash.pt`` and names the parameters whose gradients are not finite."""
        self.consolidate_optimizer()
        crash = self.save_checkpoint(os.path.join(self.cfg.checkpoint.save_dir, "crash.pt"), {})
        # Once more: clipping has spread it to all gradients.
        self._backward(samples)
        of = [
            name
            for name, p in self.get_model().named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        some = f"{', '.join(of[:3])}{f' and {len(of) - 3} more' if len(of) > 3 else ''}"
        raise FloatingPointError(
            f"gradients are Nan/Inf at update {self.get_num_updates() + 1}, of {some or 'all parameters together'}. "
            f"The model before this update is in {crash}. A lower --lr or --clip-norm may help"
        )

    def _set_seed(self) -> None:
        seed = self._first_seed + self.get_num_updates()
        torch.default_generator.manual_seed(seed)
        if self.cuda:
            torch.cuda.manual_seed(seed)

    def _fp_convert_sample(self, sample):
        return super()._fp_convert_sample(sample) if self._converts else sample

    def due(self) -> bool:
        """Whether, within an epoch, a validation, a checkpoint or the end may follow the last update."""
        made = self.get_num_updates()
        return self._limited_time or made >= self._most_updates or any(made % every == 0 for every in self._intervals)


def validate_and_save(fairseqs: Callable, cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch: bool):
    """fairseq's function, which runs after every update."""
    if isinstance(trainer, SGTrainer) and not end_of_epoch and not trainer.due():
        return [None], False
    return fairseqs(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)

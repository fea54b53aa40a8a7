"""How a training begins from a checkpoint: checks before fairseq loads it, and early stopping that is continued.

This holds for the tasks of this plugin. Other tasks keep fairseq's behaviour, except that they do not resume a
checkpoint of ours.

- A checkpoint that is cut off, of another model, task, criterion, optimizer, scheduler or data is refused in one line.
- Changed options are named in a warning: weights that fit may still be of another mechanism. The new values hold, also
  those of the optimizer, whose state has the checkpoint's.
- ``--patience`` counts validations across interruptions (``extra_state["patience"]``). With another metric, or other
  data, its count and the best value start again.
- A training that has made all its updates, or has run out of patience, makes no further update. fairseq looks at both
  only after another update.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from fairseq_sg import checkpoints, compat, hydra_configuration, ranges
from fairseq_sg.checkpoints import LAST, values
from fairseq_sg.declared import dataclasses_of
from fairseq_sg.errors import UsageError

logger = logging.getLogger(__name__)


def install() -> None:
    """Puts ``begin`` around fairseq's ``load_checkpoint``."""
    from fairseq import checkpoint_utils

    compat.wrap(checkpoint_utils, "load_checkpoint", begin)


def begin(load: Callable, cfg, trainer, **kwargs) -> tuple[dict | None, Any]:
    """fairseq's ``load_checkpoint``, after which ``fairseq_cli.train`` begins its epochs.

    Returns:
        The checkpoint's ``extra_state`` (None without a checkpoint), and the iterator over epochs.

    Raises:
        UsageError: the checkpoint, or an option, is not fit for this training.
    """
    path, option = checkpoint_path(cfg, trainer.checkpoint_suffix)
    if not checkpoints.is_ours(type(trainer.task)):
        if name := checkpoints.trained_with_ours(path):
            _refuse_other(path, "task", name, trainer.cfg.task._name)
        return load(cfg, trainer, **kwargs)
    forget_earlier_jobs()
    trainer.task.check_training(trainer)
    check_options(cfg)
    check_path(path, option, cfg, trainer.checkpoint_suffix)
    there: Any = {}
    other_data = False
    if os.path.isfile(path):
        state = checkpoints.read(path)
        other_data = check(state, path, option == "--finetune-from-model", cfg, trainer)
        there = state.get("cfg") or {}
    with explained(path, trainer):
        extra_state, epochs = load(cfg, trainer, **kwargs)
    if trainer.get_num_updates() == 0:
        # A fine-tuning that begins has taken no time, and fairseq counts that of the checkpoint.
        trainer._previous_training_time = 0
    elif extra_state is not None:
        keep_optimizers_options(cfg, trainer)
        # Where fairseq restores the best value.
        if not cfg.reset_meters:
            go_on_choosing(extra_state, there, trainer.cfg, other_data)
    if reason := nothing_left(trainer):
        logger.info("nothing is left to train: %s", reason)
        return extra_state, AfterTheLast()
    check_batches(path, epochs, trainer.cfg.optimization)
    check_rate(trainer)
    return extra_state, epochs


@contextlib.contextmanager
def explained(path: str, trainer) -> Iterator[None]:
    """Makes one line of each error with which fairseq's ``load_checkpoint`` refuses a checkpoint, or its data.

    fairseq raises an error of its own for weights that do not fit, and an assertion for an optimizer's state. An epoch
    of larger batches may end before the batch that comes next.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error.__context__, UsageError):
            raise UsageError(f"{path}: {error.__context__}") from error
        if isinstance(error, AssertionError) and "--reset-optimizer" in str(error):
            raise UsageError(f"{path}: {error}") from error
        if isinstance(error, RuntimeError) and "--reset-dataloader" in str(error):
            raise UsageError(_beyond_the_last(path)) from error
        if "dataset is empty" in str(error):
            raise UsageError(
                "the training set has fewer samples than --required-batch-size-multiple "
                f"{trainer.cfg.dataset.required_batch_size_multiple}, so it makes no batch: give "
                "--required-batch-size-multiple 1"
            ) from error
        raise


def forget_earlier_jobs() -> None:
    """Clears what fairseq keeps of a training in its functions: a sweep of hydra's may run all jobs in one process."""
    from fairseq import checkpoint_utils
    from fairseq.logging import progress_bar

    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    vars(early_stopping()).clear()
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()


def keep_optimizers_options(cfg, trainer) -> None:
    """Gives the optimizer the options of this command again: with its state it got those of the checkpoint.

    ``--optimizer-overrides`` still hold, and the scheduler has the learning rate.
    """
    overrides = ranges.literal_dict(cfg.optimizer_overrides)
    with contextlib.suppress(NotImplementedError):  # fairseq's composite optimizer
        options = trainer.optimizer.optimizer_config
        names = options.keys() - {"lr"}
        if unknown := sorted(overrides.keys() - names):
            raise UsageError(f"--optimizer-overrides names {unknown[0]!r}: choose from {', '.join(sorted(names))}")
        for group in trainer.optimizer.param_groups:
            group.update({name: value for name, value in options.items() if name in names - overrides.keys()})
        trainer.lr_step_update()


def go_on_choosing(extra_state: dict[str, Any], there, here, other_data: bool) -> None:
    """Restores the count of ``--patience``. Where the best checkpoint is chosen by something else than before, neither
    the count nor the best value goes on.
    """
    from fairseq import checkpoint_utils

    before, now = measure(there) + " of other data" * other_data, measure(here)
    if not there or before == now:
        vars(early_stopping()).update(extra_state.get("patience", {}))
    elif vars(checkpoint_utils.save_checkpoint).pop("best", None) is not None:
        logger.warning(
            "the best checkpoint was that of %s, and is now that of %s: earlier values do not count", before, now
        )


def measure(cfg) -> str:
    """What the best checkpoint is chosen by: a metric of the first subset."""
    checkpoint, data = values(cfg.get("checkpoint")), values(cfg.get("dataset"))
    which = "the largest" if checkpoint.get("maximize_best_checkpoint_metric") else "the least"
    return f"{which} {checkpoint.get('best_checkpoint_metric')} on {str(data.get('valid_subset')).partition(',')[0]}"


class AfterTheLast:
    """An iterator over epochs whose next number is beyond every ``--max-epoch``, infinity (no limit) included."""

    next_epoch_idx = math.nan


def checkpoint_path(cfg, suffix: str) -> tuple[str, str]:
    """The file that fairseq's ``load_checkpoint`` loads if it is there, and the option that names it, if one does."""
    from fairseq.file_io import PathManager

    if cfg.restore_file != LAST:
        return cfg.restore_file.replace(".pt", suffix + ".pt"), "--restore-file"
    last = last_checkpoint(cfg, suffix)
    for option in ("--continue-once", "--finetune-from-model"):
        path = getattr(cfg, option[2:].replace("-", "_"), None)
        if path is not None and not PathManager.exists(last):
            return path, option
    return last, ""


def last_checkpoint(cfg, suffix: str) -> str:
    """The file that a training writes at every save, and resumes from."""
    return os.path.join(cfg.save_dir, LAST.replace(".pt", suffix + ".pt"))


# Checks.


def check_options(cfg) -> None:
    """Raises UsageError for options of checkpoints that contradict each other, or cannot be read."""
    if cfg.finetune_from_model is not None:
        others = [f"reset_{part}" for part in ("optimizer", "lr_scheduler", "meters", "dataloader")]
        given = [name for name in others if getattr(cfg, name)]
        given += ["restore_file"] if cfg.restore_file != LAST else []
        if given:
            raise UsageError(
                f"--finetune-from-model begins a new training, so {ranges.flag(given[0])} has no place beside it: "
                "leave one of them out"
            )
    if ranges.literal_dict(cfg.optimizer_overrides) is None:
        raise UsageError(
            f"--optimizer-overrides is {cfg.optimizer_overrides!r}: give a dict such as \"{{'weight_decay': 0.1}}\""
        )


def check_path(path: str, option: str, cfg, suffix: str) -> None:
    """Raises UsageError where ``option`` names no file; warns of a last checkpoint that the training will replace."""
    from fairseq.file_io import PathManager

    if option and not PathManager.isfile(path):
        raise UsageError(f"there is no checkpoint {path}: check {option}")
    last = last_checkpoint(cfg, suffix)
    elsewhere = os.path.realpath(os.path.dirname(path)) != os.path.realpath(cfg.save_dir)
    if option == "--restore-file" and elsewhere and os.path.isfile(last):
        logger.warning(
            "training begins from %s, and not from %s, which it will replace (--restore-file): choose another "
            "--save-dir to keep it",
            path,
            last,
        )


def check(state: dict[str, Any], path: str, begins: bool, cfg, trainer) -> bool:
    """Compares a checkpoint's options and data with the trainer's; returns whether the data are others.

    Args:
        begins: whether a fine-tuning begins from the checkpoint, and no training is resumed.

    Raises UsageError for another task, schedule or data; warns of other options that change a result.
    """
    there = state.get("cfg") or {}
    for group, allowed in (
        ("task", begins or cfg.reset_dataloader),
        ("lr_scheduler", begins or cfg.reset_lr_scheduler),
    ):
        trained, given = (values(options.get(group)).get("_name") for options in (there, trainer.cfg))
        if trained not in (None, given) and not allowed:
            _refuse_other(path, group, trained, given)
    if not begins and not cfg.reset_optimizer and state.get("last_optimizer_state") is None:
        raise UsageError(
            f"the checkpoint {path} has no state of the optimizer (--no-save-optimizer-state), so its training cannot "
            "be resumed: use --finetune-from-model with another --save-dir to begin a new training from its weights"
        )
    extra_state = state.get("extra_state") or {}
    new = begins or cfg.reset_optimizer
    if trainer.cfg.ema.store_ema and not new and "ema" not in extra_state:
        raise UsageError(f"--store-ema: the checkpoint {path} has no averaged weights: leave the option out")
    if not begins and not cfg.reset_dataloader and extra_state and "train_iterator" not in extra_state:  # crash.pt
        raise UsageError(
            f"{path} was saved where a training failed, and has no place in the data: resume from the last checkpoint, "
            "or begin a new training from these weights with --finetune-from-model and another --save-dir"
        )
    data = (state.get("task_state") or {}).get("trained_on")
    trainer.task.check_resumed(data, begins or cfg.reset_dataloader)
    if other := other_options(there, trainer.cfg, OF_WEIGHTS if new else COMPARED):
        if not new and hydra_configuration.in_sweep():
            raise UsageError(
                f"the checkpoint {path} was trained with other options: {', '.join(other)}. Each job of a sweep needs "
                "a checkpoint.save_dir of its own: put the swept options into it, such as runs/'${model.qk_norm}'"
            )
        does = "a new training begins" if new else "training resumes"
        logger.warning(
            "the checkpoint was trained with other options; %s with those of this command: %s", does, ", ".join(other)
        )
    return bool(trainer.task.other_data(data))


def check_batches(path: str, epochs, cfg) -> None:
    """Raises UsageError where an epoch has no update, or what is left of the one in which the checkpoint was saved.

    With --skip-remainder-batch, fairseq leaves out the last batch of an epoch, then its incomplete group.
    """
    if not cfg.skip_remainder_batch:
        return
    batches, size = len(epochs) - 1, cfg.update_freq[: epochs.next_epoch_idx][-1]
    if batches < max(cfg.update_freq):
        raise UsageError(
            f"--skip-remainder-batch leaves no update of an epoch of {len(epochs)} "
            f"batch{'es' if len(epochs) > 1 else ''}: leave it out, or make batches or --update-freq smaller"
        )
    if epochs.iterations_in_epoch + size > batches // size * size:
        raise UsageError(_beyond_the_last(path))


def _beyond_the_last(path: str) -> str:
    return (
        f"{path}: its training was stopped beyond the last batch of an epoch of this command: resume with its batch "
        "size, --update-freq and number of workers, or use --reset-dataloader to begin at the first epoch"
    )


def check_rate(trainer) -> None:
    """Raises UsageError where fairseq ends a training before its first epoch: a warm-up may begin at a rate of 0."""
    least, rate = trainer.cfg.optimization.stop_min_lr, trainer.get_lr()
    if trainer.get_num_updates() == 0 and rate <= least:
        raise UsageError(
            f"--stop-min-lr is {least}, and the learning rate begins at {rate}: nothing would be trained. Leave it "
            "out, or let the rate begin higher: cosine, inverse_sqrt and step have --warmup-init-lr"
        )


def _refuse_other(path: str, group: str, trained: str, given: str) -> None:
    option = ranges.flag(group)
    ways = {
        "task": "--finetune-from-model with another --save-dir to begin a new training from its weights",
        "lr_scheduler": "--reset-lr-scheduler to go on with this one at the same update",
    }
    raise UsageError(
        f"the checkpoint {path} was trained with {option} {trained}, and this is {option} {given}: give the "
        f"training's, train into another --save-dir, or use {ways[group]}"
    )


#: The options whose change is named: all of a group, or those listed.
COMPARED: dict[str, tuple[str, ...] | None] = {
    "model": None,
    "criterion": None,
    "task": None,
    "optimizer": None,
    "lr_scheduler": None,
    "common": ("seed", "fp16", "bf16", "amp"),
    "dataset": (
        *("batch_size", "max_tokens", "required_batch_size_multiple", "train_subset"),
        *("curriculum", "grouped_shuffling"),
    ),
    "optimization": ("lr", "update_freq", "clip_norm", "sentence_avg", "skip_remainder_batch"),
    "distributed_training": ("distributed_world_size",),
    "ema": None,
}
#: The groups that decide what the weights of a checkpoint mean; a new training has its own of all others.
OF_WEIGHTS = {group: COMPARED[group] for group in ("model", "task")}
#: Options of a task that say where and how it is evaluated, by how their names begin.
EVALUATION = ("data", "eval_", "source_lang", "target_lang")


def other_options(there, here, compared=COMPARED) -> list[str]:
    """The options that decide a training's result and differ between two configurations, in the groups ``compared``.

    An option that is younger than the checkpoint had its default there.
    """
    other = {}
    for group, names in compared.items():
        trained, given = values(there.get(group)), values(here.get(group))
        if names is None and trained:
            trained = defaults(group, given.get("_name")) | trained
        for name in trained if names is None else names:
            if group == "task" and name.startswith(EVALUATION):
                continue
            # A namespace, such as that of fairseq's sgd, holds all options of the command.
            if names is None and isinstance(there.get(group), argparse.Namespace) and name in _options_of_commands():
                continue
            option = group if name == "_name" else name
            if option != "lr_scheduler" and name.startswith("_"):
                continue
            if name in trained and name in given and given[name] != trained[name]:
                other[option] = f"{ranges.flag(option)} {trained[name]} (here {given[name]})"
    return list(other.values())


@functools.cache
def defaults(group: str, name: str | None) -> dict[str, Any]:
    """The options of what is chosen in a group, such as a model, with their defaults; not those of other options."""
    chosen = dataclasses_of(group).get(name)
    of_fields = {f.name: f.default for f in fields(chosen)} if chosen else {}
    return {n: d for n, d in of_fields.items() if isinstance(d, bool | int | float | str) and "${" not in str(d)}


@functools.cache
def _options_of_commands() -> frozenset[str]:
    """The options of fairseq's commands themselves, without those of a model, a task and so on."""
    from fairseq.dataclass.configs import FairseqConfig

    groups = [f.type for f in fields(FairseqConfig) if is_dataclass(f.type)]
    return frozenset(f.name for group in groups for f in fields(group) if not f.name.startswith("_"))


# Early stopping.


def early_stopping() -> Any:
    """fairseq's function ``should_stop_early`` of the running command.

    Its attributes are ``best``, the best value, and ``num_runs``, the number of validations since. An empty namespace
    where no training runs.
    """
    # Under ``python -m`` the command's module is ``__main__``.
    for module in map(sys.modules.get, ("__main__", "fairseq_cli.train")):
        if hasattr(module, "should_stop_early") and compat.is_command(vars(module)):
            return module.should_stop_early
    return argparse.Namespace()


def nothing_left(trainer) -> str:
    """Why a training is finished, or "" where it is not."""
    updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
    idle, patience = getattr(early_stopping(), "num_runs", 0), trainer.cfg.checkpoint.patience
    if 0 < most <= updates:
        return f"{updates} of {most} updates are made"
    hours, spent = trainer.cfg.optimization.stop_time_hours, trainer.cumulative_training_time() / 3600
    if updates > 0 and 0 < hours < spent:
        return f"it took {spent:.2f} hours, and --stop-time-hours is {hours:g}"
    if 0 < patience <= idle:
        return f"the last {idle} validations were no better, and --patience is {patience}"
    return ""

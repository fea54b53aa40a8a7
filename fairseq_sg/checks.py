"""Checks of a configuration of fairseq's commands, from the command line or from hydra, before data are loaded.

Options of ours declare their range (``ranges``); ``FAIRSEQ`` has those of fairseq's options with which it fails late or
trains something else.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import fields

from fairseq_sg import checkpoints, ranges
from fairseq_sg.declared import groups, is_our_task
from fairseq_sg.errors import UsageError


def _limits(names: str, **limits: float) -> dict[str, dict[str, float]]:
    return dict.fromkeys(names.split(), limits)


#: Ranges of fairseq's options by name; ``kind.name`` is the option of one kind of optimizer, scheduler and so on.
FAIRSEQ: dict[str, dict[str, float]] = {
    **_limits(
        "lr clip_norm weight_decay max_update max_epoch stop_time_hours warmup_updates seed num_workers", least=0
    ),
    **_limits("save_interval validate_interval", least=1),
    **_limits("save_interval_updates validate_interval_updates", least=0),
    **_limits("validate_after_updates max_valid_steps data_buffer_size curriculum max_len_a max_len_b", least=0),
    **_limits("batch_size batch_size_valid max_tokens max_tokens_valid tokens_per_sample update_freq", least=1),
    **_limits("max_source_positions max_target_positions required_batch_size_multiple log_interval", least=1),
    **_limits("required_seq_len_multiple distributed_world_size num_shards beam nbest", least=1),
    **_limits("min_len no_repeat_ngram_size prefix_size", least=0),
    **_limits("sampling_topp", most=1),
    **_limits("sampling_topk", least=-1),
    **_limits("inverse_sqrt.warmup_updates lr_deacy_period", least=1),
    **_limits("warmup_steps hold_steps decay_steps phase_ratio min_lr", least=0),
    **_limits("lr_decay", least=0, most=1),
    **_limits("triangular.lr_period_updates", least=2),
    **_limits("patience keep_last_epochs keep_interval_updates keep_best_checkpoints", least=-1),
    **_limits("lr_shrink total_num_update final_lr_scale temperature", above=0),
    **_limits("dropout attention_dropout activation_dropout label_smoothing ema_decay", least=0, most=1),
    **_limits("adam_betas", least=0, below=1),
}


def check(cfg, command: str) -> None:
    """Raises UsageError for a value outside its range, in the whole configuration of a ``command`` (``train``)."""
    import torch
    from fairseq.registry import REGISTRIES

    for group, (name, declared) in groups(cfg).items():
        own = {f.name: f.metadata for f in fields(declared)} if declared else {}
        for option, value in checkpoints.values(cfg[group]).items():
            limits = own.get(option, {})
            if not ranges.wording(limits):
                limits = FAIRSEQ.get(f"{name}.{option}", FAIRSEQ.get(option, {}))
            ranges.check_value(option, value, limits)
        cls = REGISTRIES[group]["registry"].get(name) if group in REGISTRIES else None
        if hasattr(cls, "check_options"):
            cls.check_options(cfg)
    if command == "train" and cfg.optimizer is None:
        raise UsageError("--optimizer is missing: give one, such as torch_adam")
    workers = cfg.distributed_training
    on_cpus = (cfg.common.cpu or not torch.cuda.is_available()) and not workers.distributed_no_spawn
    started = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if on_cpus and (workers.distributed_world_size > 1 or workers.distributed_init_method):
        if started != "1":
            raise UsageError(
                "torchrun does not give fairseq's processes the options that they need on CPUs: leave it and "
                f"--distributed-world-size out, and run `python -m fairseq_sg.experiments.workers {started} "
                "fairseq-train …`"
            )
        raise UsageError(
            "without a GPU, fairseq starts no processes: leave --distributed-world-size and --distributed-init-method "
            "out, or run `python -m fairseq_sg.experiments.workers N fairseq-train …`"
        )
    if command == "train" and workers.distributed_world_size == 1 and started != "1":
        raise UsageError(
            f"torchrun started {started} processes, and each would train a model of its own: give "
            f"--distributed-world-size {started}, or on CPUs leave torchrun out and run "
            "`python -m fairseq_sg.experiments.workers N fairseq-train …`"
        )
    if command in ("train", "validate") and cfg.dataset.batch_size is None and cfg.dataset.max_tokens is None:
        raise UsageError("a batch has no size: give --batch-size (sentences) or --max-tokens")
    if command == "train":
        _check_schedule(cfg)
        _check_what_ends_early(cfg)
        _check_validation(cfg)
        _check_without_effect(cfg)


def make_save_dir(cfg) -> None:
    """Makes the folder of a training's checkpoints. Raises UsageError where it cannot be made."""
    try:
        os.makedirs(cfg.checkpoint.save_dir, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--save-dir {cfg.checkpoint.save_dir} cannot be made: {error.strerror}") from error


#: fairseq's schedules of the learning rate that take one rate, and no list with one for each epoch.
ONE_RATE = ("cosine", "inverse_sqrt", "reduce_lr_on_plateau", "step", "tri_stage", "triangular")


def _check_schedule(cfg) -> None:
    """Raises UsageError for what fairseq's schedules of the learning rate assert."""
    schedule = cfg.lr_scheduler
    name = getattr(schedule, "_name", None)
    if len(cfg.optimization.lr) > 1 and name in ONE_RATE:
        raise UsageError(f"--lr-scheduler {name} has one rate, and --lr is {list(cfg.optimization.lr)}: give one")
    if name == "reduce_lr_on_plateau" and (cfg.dataset.validate_interval > 1 or cfg.dataset.disable_validation):
        raise UsageError(
            "--lr-scheduler reduce_lr_on_plateau looks only at validations at the end of an epoch: leave "
            "--validate-interval and --disable-validation out, or choose another schedule"
        )
    rate, updates = cfg.optimization.lr[0], cfg.optimization.max_update
    if name == "step" and schedule.min_lr >= rate:
        raise UsageError(f"--min-lr is {schedule.min_lr}, and --lr {rate} decays to it: choose less than --lr")
    if name == "triangular" and schedule.max_lr <= rate:
        raise UsageError(f"--max-lr is {schedule.max_lr}, and --lr {rate} rises to it: choose more than --lr")
    if name == "cosine" and schedule.lr_period_updates <= 0:
        _check_updates(name, updates)
        if schedule.warmup_updates >= updates:
            raise UsageError(
                f"--warmup-updates {schedule.warmup_updates} leaves no update of --max-update {updates} to the cosine: "
                "choose less"
            )
    if name == "tri_stage":
        _check_phases(schedule, updates)


def _check_updates(schedule: str, updates: float) -> None:
    if not updates:
        raise UsageError(f"--lr-scheduler {schedule} needs the number of updates: give --max-update")


def _check_phases(schedule, updates: float) -> None:
    """Raises UsageError for phases of tri_stage that fairseq cannot make of a training's number of updates."""
    ratio = list(schedule.phase_ratio or ())
    if not ratio:
        if not schedule.decay_steps:
            raise UsageError("--lr-scheduler tri_stage needs the lengths of its phases: give --decay-steps")
        return
    _check_updates("tri_stage", updates)
    for option in ("warmup_steps", "hold_steps", "decay_steps"):
        if schedule[option]:
            raise UsageError(
                f"--phase-ratio and {ranges.flag(option)} both give the lengths of the phases: leave one of them out"
            )
    if len(ratio) != 3:
        raise UsageError(f"--phase-ratio is {ratio}: give three numbers, those of the warm-up, the hold and the decay")
    if sum(ratio) != 1:
        raise UsageError(
            f"--phase-ratio is {ratio}, whose sum is {sum(ratio)} and not 1: change it, or give --warmup-steps, "
            "--hold-steps and --decay-steps"
        )
    if int(ratio[-1] * updates) < 1:
        raise UsageError(f"--phase-ratio is {ratio}, and leaves no update to the decay: choose a larger last number")


def _check_what_ends_early(cfg) -> None:
    """Raises UsageError for options with which fairseq ends without a training, or at its first validation."""
    import torch

    if cfg.common.log_file is not None:
        folder = os.path.dirname(cfg.common.log_file)
        if folder and not os.path.isdir(folder):
            raise UsageError(f"--log-file {cfg.common.log_file}: there is no folder {folder}: make it first")
    if cfg.checkpoint.write_checkpoints_asynchronously and importlib.util.find_spec("iopath") is None:
        raise UsageError(
            "--write-checkpoints-asynchronously needs iopath, and fairseq trains nothing without it: pip install "
            "iopath, or leave the option out"
        )
    if cfg.common.profile and not torch.cuda.is_available():
        raise UsageError("--profile measures a GPU, and there is none: leave it out")
    if cfg.dataset.combine_valid_subsets and cfg.dataset.valid_subset != "valid":
        raise UsageError(
            "--combine-valid-subsets makes one subset, valid, of valid, valid1 and so on, and --valid-subset is "
            f"{cfg.dataset.valid_subset}: leave one of the two out"
        )


def _check_validation(cfg) -> None:
    """Raises UsageError for a validation of a task of ours whose log lines are those of the training."""
    data = cfg.dataset
    ours = is_our_task(getattr(cfg.task, "_name", None))
    # fairseq logs a training as "train" and "train_inner", whatever its subset is called.
    alike = [name for name in data.valid_subset.split(",") if name in ("train", "train_inner", data.train_subset)]
    if ours and not data.disable_validation and alike:
        raise UsageError(
            f"--valid-subset has {alike[0]}, whose log lines would look like those of the training: leave it "
            f"out, and run fairseq-validate --valid-subset {alike[0]} on a checkpoint"
        )


def _check_without_effect(cfg) -> None:
    """Raises UsageError for options that a training ignores."""
    from fairseq.dataclass.configs import EMAConfig

    if cfg.dataset.disable_validation and cfg.checkpoint.patience > 0:
        raise UsageError("--patience counts validations, and --disable-validation leaves them out: give one of the two")
    if cfg.dataset.num_shards > 1 or cfg.dataset.shard_id > 0:
        raise UsageError("--num-shards and --shard-id split an evaluation, and a training ignores them: leave them out")
    given = [f.name for f in fields(EMAConfig) if cfg.ema[f.name] != f.default and f.name.startswith("ema_")]
    if given and not cfg.ema.store_ema:
        raise UsageError(f"{ranges.flag(given[0])} has no effect without --store-ema: add it, or leave the option out")

"""The only place that knows about versions of fairseq, torch and numpy.

``prepare()`` runs when the plugin is imported, before fairseq reads a checkpoint:

- it refuses fairseq releases that do not run on today's Python and torch, and says which one does;
- it lets ``torch.load(weights_only=True)``, torch's default, read what fairseq puts into its checkpoints. Only plain
  data classes are added to torch's list: no function of theirs runs code from the file;
- it silences the warnings that fairseq 0.12 causes in newer libraries and that say nothing about the user's run, lines
  of its log that say nothing either (``can_reuse_epoch_itr``, hydra's ``DEBUG``), and its report of "shared parameters"
  that are the absent biases of ``nn.Linear(bias=False)``;
- it mends ``--amp``, whose gradients fairseq divides by the loss scale twice, and ``--bf16``, which fairseq's commands
  take for the wish to train on a TPU;
- it has a task gather what its workers keep before a checkpoint is saved, where the task asks for it;
- it makes fairseq's commands end with the message alone where the user can mend the error (:class:`UsageError`), and
  with the name of the file where a checkpoint is not whole, was changed, holds more than data, or is of another model;
- it has a task give a model its inputs in the form that it was trained on, whatever the command says of them, and
  refuses ``--model-overrides`` of options that no model has;
- it has every file of a checkpoint appear whole or not at all, copies included, whatever ends the training meanwhile;
- it has a training that has made all its updates, or whose ``--patience`` is at its end, make no other update when it
  is started again, and one that is continued remember how long it has got no better.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import importlib.util
import logging
import os
import pickle
import re
import sys
import traceback
import typing
import warnings
import zipfile

from fairseq_sg.errors import UsageError

FAIRSEQ = "fairseq-fixed==0.12.3.1"


def fairseq_version() -> str | None:
    """The installed fairseq-fixed's version, or None where no fairseq is installed.

    Raises:
        ImportError: another distribution provides the module ``fairseq``.
    """
    if importlib.util.find_spec("fairseq") is None:
        return None
    try:
        return importlib.metadata.version("fairseq-fixed")
    except importlib.metadata.PackageNotFoundError:
        found = _version("fairseq")
    raise ImportError(
        f"the installed fairseq is {f'fairseq {found}' if found else 'of unknown origin'}; fairseq_sg runs on "
        f"{FAIRSEQ}, because upstream's 0.12.2 fails on Python 3.11 and newer and on torch 2.6 and newer. "
        "Mend: pip uninstall fairseq, then see scripts/setup.sh for how to install fairseq-fixed"
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def prepare() -> None:
    """Everything above; calling it again does no harm. Raises ImportError for an unusable fairseq."""
    from fairseq_sg import command_line

    installed = fairseq_version() is not None
    silence_warnings()
    silence_logs()
    allow_checkpoint_globals()
    report_usage_errors_plainly()
    if installed:
        name_broken_checkpoints()
        write_checkpoints_whole()
        continue_where_it_was()
        gather_before_saving()
        leave_out_absent_parameters()
        unscale_gradients_once()
        train_in_bfloat16_anywhere()
        command_line.install()


_NOISE = (
    (UserWarning, r".*hydra\.experimental.*no longer experimental"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"\s*'.*' is validated against ConfigStore schema with the same name"),
    (UserWarning, r"\s*In '.*': Usage of deprecated keyword in package header"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    (UserWarning, r".*'pin_memory' argument is set as true but no accelerator"),
    (UserWarning, r".*Support for mismatched key_padding_mask and attn_mask is deprecated"),
    (UserWarning, r"amp_C fused kernels unavailable"),
    (UserWarning, r".*lr_scheduler\.step\(\).*before.*optimizer\.step\(\)"),
    (FutureWarning, r".*torch\.cuda\.amp\.(autocast|GradScaler).*is deprecated"),
    (DeprecationWarning, r".*pkg_resources is deprecated"),
)


def silence_warnings() -> None:
    for category, message in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category)


#: logger -> how the messages begin that it is to leave out.
_NOISE_IN_LOGS = {
    "fairseq.tasks.fairseq_task": "can_reuse_epoch_itr = ",
    # Shown because some module of fairseq sets the level of all loggers to DEBUG.
    "hydra.core.utils": "Setting JobRuntime:",
}


def silence_logs() -> None:
    for name in _NOISE_IN_LOGS:
        # A logger takes the same filter once.
        logging.getLogger(name).addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE_IN_LOGS[record.name])


def allow_checkpoint_globals() -> None:
    """Adds to torch's safe globals the data classes found in fairseq's checkpoints.

    Namespaces of models configured by argparse, OmegaConf containers of rank 0's broadcast on a multi-process resume,
    numpy scalars and arrays of best metrics and of BLEU's counts.
    """
    import numpy as np
    import torch

    if not hasattr(torch.serialization, "add_safe_globals"):
        return  # before torch 2.4 there is no such list, and weights_only is not the default
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    allowed: list = [
        argparse.Namespace,
        collections.defaultdict,
        dict,
        int,
        list,
        typing.Any,
        np.dtype,
        np.ndarray,
        multiarray.scalar,
        multiarray._reconstruct,
    ]
    allowed += [dtype for name in dir(np.dtypes) if isinstance(dtype := getattr(np.dtypes, name), type)]
    if importlib.util.find_spec("omegaconf") is not None:
        from omegaconf import DictConfig, ListConfig
        from omegaconf.base import ContainerMetadata, Metadata
        from omegaconf.nodes import AnyNode

        allowed += [DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode]
    if fairseq_version() is not None:
        from fairseq.distributed.utils import _TensorPlaceholder

        allowed.append(_TensorPlaceholder)
    torch.serialization.add_safe_globals(allowed)


def _wrap(owner: typing.Any, name: str, wrapper: typing.Callable) -> None:
    """Replaces the function ``owner.name`` by ``wrapper``, which gets it as its first argument; twice is as once."""
    original = getattr(owner, name)
    if getattr(original, "func", None) is not wrapper:
        setattr(owner, name, functools.partial(wrapper, original))


def report_usage_errors_plainly() -> None:
    _wrap(sys, "excepthook", _report)


def _report(previous, kind, error, trace) -> None:
    """An error of the user's making that ends a command of fairseq is one line; every other keeps its traceback, and so
    do all with FAIRSEQ_SG_TRACEBACK=1."""
    in_command = any(frame.f_globals.get("__package__") == "fairseq_cli" for frame, _ in traceback.walk_tb(trace))
    if isinstance(error, UsageError) and in_command and os.environ.get("FAIRSEQ_SG_TRACEBACK", "0") in ("", "0"):
        print(f"error: {error}", file=sys.stderr)
    else:
        previous(kind, error, trace)


def name_broken_checkpoints() -> None:
    from fairseq import checkpoint_utils

    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint)
    _wrap(checkpoint_utils, "load_model_ensemble_and_task", _load_models)


#: The options in the checkpoints that were read since a command began to load something, None where there are none.
_READ: list = []
#: Called with each checkpoint's content once it is read, before anything is made of it.
_CHECKS: list[typing.Callable[[dict], None]] = []


def _load_checkpoint(load, path, *args, **kwargs):
    """fairseq's ``load_checkpoint_to_cpu``.

    Raises UsageError, which names the cause, for a file that is cut off, whose content was changed, that holds more
    than plain data (nothing of it is run), that is no checkpoint of fairseq, or whose classes are not registered.
    """
    another = "Restore a copy of it, or name another one with --path or --restore-file"
    try:
        # torch itself does not look at the checksums that it writes.
        if os.path.isfile(path) and zipfile.is_zipfile(path) and _damaged(path):
            raise UsageError(
                f"the checkpoint {path} was changed after it was written: its checksums are wrong. {another}"
            )
        state = load(path, *args, **kwargs)
        _READ.append(state.get("cfg"))
        for check in _CHECKS:
            check(state)
        return state
    except (FileNotFoundError, UsageError):
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if foreign or isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            what = f" ({foreign[1]})" if foreign else ""
            raise UsageError(
                f"the checkpoint {path} holds more than plain data{what}, which could run code. It was not read, and "
                f"nothing of it was run. {another}"
            ) from error
        if not zipfile.is_zipfile(path):
            raise UsageError(
                f"the checkpoint {path} is not a whole file of torch's ({cause}): it was cut off, or is something "
                f"else. "
                f"{another}"
            ) from error
        if not isinstance(error, (KeyError, TypeError)) and "PytorchStreamReader" not in str(error):
            raise
        if _is_of_fairseq(path):
            raise UsageError(
                f"the checkpoint {path} cannot be loaded ({cause}). If that is the name of a task, a model or a "
                f"criterion, "
                "give the --user-dir that registers it"
            ) from error
        raise UsageError(f"the file {path} is no checkpoint of fairseq's ({cause}). {another}") from error


def _is_of_fairseq(path: str) -> bool:
    """Whether a file that torch can read has the parts of fairseq's checkpoints."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return isinstance(state, dict) and "model" in state and bool({"args", "cfg"} & set(state))


def _damaged(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is not None
    except (zipfile.BadZipFile, EOFError):
        return True


def _load_models(load, filenames, *args, **kwargs):
    """fairseq's ``load_model_ensemble_and_task``, after which the task knows what inputs the models were trained on.

    Raises UsageError for a file that is not there, weights that do not fit their own options, ``--model-overrides`` of
    an option that no model has, and models that were trained on inputs of different forms.
    """
    _READ.clear()
    try:
        loaded = load(filenames, *args, **kwargs)
    except OSError as error:
        if not str(error).startswith("Model file not found"):
            raise
        raise UsageError(f"there is no checkpoint {str(error).partition(': ')[2]}: check --path") from None
    except RuntimeError as error:
        different = _differences(error)
        if different is None:
            raise
        raise UsageError(
            f"the weights in {' or '.join(filenames)} do not fit the model that its options and --model-overrides make"
            f": {different}. Check --model-overrides, or use the code (--user-dir) that it was trained with"
        ) from error
    given = dict(zip(("arg_overrides", "task"), args)) | kwargs
    configurations = [cfg for cfg in _READ if cfg is not None]
    if configurations:
        _check_overrides(given.get("arg_overrides"), given.get("task"), configurations)
        _keep_form_of_inputs(loaded[2], configurations)
    return loaded


def _check_overrides(overrides, task, configurations: list) -> None:
    """fairseq takes no notice of names that it does not find."""
    overrides = overrides or {}
    if "model_overrides" in overrides:  # by fairseq-validate, with all other options of the command
        overrides = ast.literal_eval(overrides["model_overrides"] or "{}")
    elif task is None:  # by no command that has the option
        return
    known = {name for cfg in configurations for name in (*cfg, *option_names(cfg))}
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise UsageError(f"--model-overrides names {unknown[0]!r}, which is not an option of the model that is loaded")


def option_names(cfg: typing.Any) -> set[str]:
    """The names of all options in a checkpoint's configuration."""
    names: set[str] = set()
    for group in cfg.values():
        if isinstance(group, argparse.Namespace):
            names |= set(vars(group))
        elif hasattr(group, "keys"):
            names |= set(group.keys())
    return names


def _keep_form_of_inputs(task, configurations: list) -> None:
    for name in getattr(task, "of_inputs", ()):
        values = {_values(cfg["task"]).get(name) for cfg in configurations if cfg.get("task") is not None} - {None}
        flag = "--" + name.replace("_", "-")
        if len(values) > 1:
            raise UsageError(f"some of these models were trained with {flag} and some without: evaluate them apart")
        for value in values - {getattr(task.cfg, name)}:
            setattr(task.cfg, name, value)
            with_it = "with" if value else "without"
            logging.getLogger(__name__).info("the model was trained %s %s, and so it is used here", with_it, flag)


def _differences(error: BaseException | None) -> str | None:
    """What torch's ``load_state_dict`` found different, which ``error`` was raised for; None if it was for another
    reason.
    """
    message = next((str(e) for e in _on_account_of(error) if "loading state_dict for" in str(e)), None)
    if message is None:
        return None
    different = []
    for key, text in (("Missing", "it lacks {}"), ("Unexpected", "it has {} besides")):
        listed = re.search(rf"{key} key\(s\) in state_dict: (.*)", message)
        if listed:
            different.append(text.format(_few(re.findall(r'"([^"]+)"', listed[1]))))
    shapes = re.findall(r"size mismatch for (\S+): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)", message)
    if shapes:
        different.append("other sizes of " + _few([f"{name} ({there}, here {here})" for name, there, here in shapes]))
    return "; ".join(different) or " ".join(message.split())


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def write_checkpoints_whole() -> None:
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    _wrap(checkpoint_utils, "torch_persistent_save", _save_file)
    _wrap(PathManager, "copy", _copy_file)


def _save_file(save, obj, filename, async_write=False):
    """fairseq's ``torch_persistent_save``, which after an error writes another two times into the same file, from where
    it is. ``--patience`` is kept in the file."""
    from fairseq.file_io import PathManager

    patience = vars(_should_stop_early())
    if patience and isinstance(obj, dict) and "extra_state" in obj:
        obj["extra_state"]["patience"] = dict(patience)
    if async_write or not PathManager.supports_rename(filename):
        return save(obj, filename, async_write=async_write)

    def write(temporary: str) -> None:
        import torch

        with open(temporary, "wb") as file:
            torch.save(obj, file)

    return _whole(filename, write)


def _copy_file(copy, src_path, dst_path, overwrite=False):
    """fairseq's ``PathManager.copy``, which makes checkpoint_last.pt; it writes over the one that is there."""
    from fairseq.file_io import PathManager

    if not overwrite or not PathManager.supports_rename(dst_path):
        return copy(src_path, dst_path, overwrite=overwrite)
    return _whole(dst_path, lambda temporary: copy(src_path, temporary, overwrite=True))


def _whole(path: str, write: typing.Callable[[str], typing.Any]) -> str:
    """``write`` makes the file at ``path``, which is there only when it is whole; until then, what was there before is.

    Raises UsageError where the disk is full.
    """
    temporary = f"{path}.tmp"
    try:
        write(temporary)
        os.replace(temporary, path)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        full = _disk_full(error)
        if full is None:
            raise
        raise UsageError(
            f"there is no room for the checkpoint {path} ({full.strerror}). Those written before are whole: make room, "
            "and the same command goes on from the last one"
        ) from error
    return path


def _disk_full(error: BaseException | None) -> OSError | None:
    """The error that says so, among those on whose account ``error`` was raised: torch raises one of its own."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return next((e for e in _on_account_of(error) if isinstance(e, OSError) and e.errno in full), None)


def _on_account_of(error: BaseException | None) -> typing.Iterator[BaseException]:
    """An error, and those on whose account it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def continue_where_it_was() -> None:
    from fairseq import checkpoint_utils

    _wrap(checkpoint_utils, "load_checkpoint", _load_last_checkpoint)


def _load_last_checkpoint(load, cfg, trainer, **kwargs):
    """fairseq's ``load_checkpoint``, after which ``fairseq_cli.train`` goes into its loop.

    Warns of other options of the model and the criterion: weights that fit may still be of another mechanism.

    Raises UsageError for a checkpoint of another model, or of a training with another criterion or optimizer, and for
    ``--fp16`` on a CPU, before fairseq builds an optimizer for it; for a ``--restore-file`` that is not there.
    """
    from fairseq.file_io import PathManager

    if trainer.cfg.common.fp16 and not trainer.cuda:
        raise UsageError(
            "fairseq trains with --fp16 on a GPU alone: leave it out, or choose --bf16, which is slow on a CPU"
        )
    if cfg.restore_file != "checkpoint_last.pt" and not cfg.checkpoint_suffix:
        if not PathManager.exists(cfg.restore_file):
            raise UsageError(f"there is no checkpoint {cfg.restore_file}: check --restore-file")
    if check_training := getattr(getattr(trainer, "task", None), "check_training", None):
        check_training(trainer)
    _READ.clear()
    _CHECKS.append(functools.partial(_check_resumed, cfg, trainer))
    try:
        extra_state, batches = load(cfg, trainer, **kwargs)
    except Exception as error:
        refusal = _refusal(error, cfg)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        _CHECKS.clear()
    there = _READ[-1] if _READ else None
    if there is not None and (other := _other_options(there, trainer.cfg)):
        logging.getLogger(__name__).warning(
            "the checkpoint was trained with other options; training resumes with those of this command: %s",
            ", ".join(other),
        )
    for module in _training_modules():
        _wrap(module, "train", _train_epoch)
    # Where fairseq itself restores the best value; a training that begins anew from a checkpoint has made no update.
    if extra_state is not None and trainer.get_num_updates() > 0 and not cfg.reset_meters:
        vars(_should_stop_early()).update(extra_state.get("patience", {}))
    return extra_state, batches


def _check_resumed(cfg, trainer, state: dict) -> None:
    """Raises UsageError for a checkpoint of another task, schedule or data than the trainer's."""
    from fairseq.file_io import PathManager

    # As in fairseq: with a last checkpoint there, a fine-tuning is itself resumed.
    last = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    begins = cfg.finetune_from_model is not None and not PathManager.exists(last)
    for group, allowed, way_out in (
        ("task", begins or cfg.reset_dataloader, "--finetune-from-model to begin a new training from its weights"),
        ("lr_scheduler", begins or cfg.reset_lr_scheduler, "--reset-lr-scheduler to begin the schedule again"),
    ):
        there, here = (_values(options.get(group)).get("_name") for options in (state.get("cfg") or {}, trainer.cfg))
        if there != here and not (there is None or allowed):
            option = "--" + group.replace("_", "-")
            raise UsageError(
                f"the checkpoint was trained with {option} {there}, and this is {option} {here}: give the one of "
                f"training, "
                f"choose another --save-dir, or say {way_out}"
            )
    if check := getattr(trainer.task, "check_resumed", None):
        check((state.get("task_state") or {}).get("trained_on"), begins or cfg.reset_dataloader)


#: The options whose change a resumed training warns of: all of a group, or those named.
_MATTERING: dict[str, tuple[str, ...] | None] = {
    "model": None,
    "criterion": None,
    "task": None,
    "optimizer": None,
    "lr_scheduler": None,
    "common": ("seed", "fp16", "bf16", "amp"),
    "dataset": ("batch_size", "max_tokens", "train_subset"),
    "optimization": ("lr", "update_freq", "clip_norm", "sentence_avg"),
}
#: Options of a task that say where and how it is evaluated, not what it is trained on.
_HARMLESS = ("data", "eval_", "source_lang", "target_lang")


def _other_options(there, here) -> list[str]:
    """The options that decide a training's result and differ between two configurations which both have them."""
    other = {}
    for group, names in _MATTERING.items():
        of_checkpoint, of_command = _values(there.get(group)), _values(here.get(group))
        for name in of_checkpoint if names is None else names:
            if group == "task" and name.startswith(_HARMLESS):
                continue
            # What fairseq has not made a dataclass of, such as its sgd, holds all options of the command.
            if names is None and isinstance(there.get(group), argparse.Namespace) and name in _of_commands():
                continue
            option = group if name == "_name" else name
            if option != "lr_scheduler" and name.startswith("_"):
                continue
            if name in of_checkpoint and name in of_command and of_command[name] != of_checkpoint[name]:
                other[option] = f"--{option.replace('_', '-')} {of_checkpoint[name]} (here {of_command[name]})"
    return list(other.values())


@functools.cache
def _of_commands() -> frozenset[str]:
    """The options that fairseq's commands have, whatever model, task and so on they are given."""
    from fairseq.dataclass.configs import FairseqConfig

    groups = [f.type for f in dataclasses.fields(FairseqConfig) if dataclasses.is_dataclass(f.type)]
    return frozenset(f.name for group in groups for f in dataclasses.fields(group) if not f.name.startswith("_"))


def _values(options) -> dict[str, typing.Any]:
    from omegaconf import OmegaConf

    if OmegaConf.is_config(options):
        # Unlike `dict`, this takes options without a value, which some of fairseq's own models have.
        return OmegaConf.to_container(options, resolve=True)
    return vars(options) if isinstance(options, argparse.Namespace) else dict(options or {})


def _refusal(error: Exception, cfg) -> UsageError | None:
    """What to say of a checkpoint that a training cannot go on from; None for an error of another kind."""
    of_model = re.match(r"Cannot load model parameters from checkpoint (.*); please ensure", str(error))
    different = _differences(error)
    if of_model and different:
        return UsageError(
            f"the checkpoint {of_model[1]} is of another model: {different}. Give the options that it was trained "
            "with, or choose another --save-dir, --restore-file or --finetune-from-model"
        )
    of_optimizer = re.match(r"(Criterion|Optimizer) does not match; .*\. (\S+) vs (\S+)$", str(error))
    if of_optimizer:
        what, there, here = of_optimizer.groups()
        last = cfg.restore_file == "checkpoint_last.pt"
        path = os.path.join(cfg.save_dir, cfg.restore_file) if last else cfg.restore_file
        return UsageError(
            f"the checkpoint {path} is of a training with another {what.lower()}: {there}, here {here}. Give the one "
            "that it was trained with, or choose another --save-dir; --reset-optimizer takes the weights alone from it"
        )
    return None


def _training_modules() -> list:
    """``fairseq_cli.train`` where it is in use; under ``python -m`` it is ``__main__``."""
    modules = map(sys.modules.get, ("__main__", "fairseq_cli.train"))
    return [
        module
        for module in modules
        if getattr(module, "__package__", None) == "fairseq_cli" and hasattr(module, "validate_and_save")
    ]


def _should_stop_early():
    """fairseq's function of that name, whose attributes are the best value and ``num_runs``, how many validations ago
    that was; nothing where no training is in progress."""
    functions = [module.should_stop_early for module in _training_modules()]
    return functions[0] if functions else argparse.Namespace()


def _train_epoch(train, cfg, trainer, *args, **kwargs):
    """``fairseq_cli.train``'s ``train``, which looks at the number of updates and at ``--patience`` only after having
    made another update, and saves what it gives."""
    updates, most = trainer.get_num_updates(), cfg.optimization.max_update
    idle, patience = getattr(_should_stop_early(), "num_runs", 0), cfg.checkpoint.patience
    if 0 < most <= updates:
        reason = f"{updates} of {most} updates are made"
    elif 0 < patience <= idle:
        reason = f"the last {idle} validations were no better, and --patience is {patience}"
    else:
        return train(cfg, trainer, *args, **kwargs)
    logging.getLogger(__name__).info("nothing is left to train: %s", reason)
    return [None], True


def gather_before_saving() -> None:
    from fairseq import checkpoint_utils

    _wrap(checkpoint_utils, "save_checkpoint", _save_checkpoint)


def _save_checkpoint(save, cfg, trainer, *args, **kwargs):
    """fairseq's ``save_checkpoint``, which every worker calls; but only the first one's task is asked for its state."""
    gather = getattr(trainer.task, "gather_state", None)
    if gather is not None and not cfg.no_save:
        gather()
    return save(cfg, trainer, *args, **kwargs)


def leave_out_absent_parameters() -> None:
    from fairseq import trainer

    _wrap(trainer, "_catalog_shared_params", _shared_parameters)


def _shared_parameters(catalog, module, memo=None, prefix=""):
    """fairseq's ``_catalog_shared_params`` without the group of parameters that are None (None when it recurses)."""
    from fairseq.trainer import _get_module_by_path

    groups = catalog(module, memo, prefix)
    return groups and [paths for paths in groups if _get_module_by_path(module, paths[0]) is not None]


def unscale_gradients_once() -> None:
    from fairseq.optim.amp_optimizer import AMPOptimizer

    AMPOptimizer.step = _amp_step


def _amp_step(self, closure=None, scale=1.0, groups=None) -> None:
    """fairseq's ``AMPOptimizer.step``, with the optimizer that ``clip_grad_norm`` has unscaled handed to the scaler.

    fairseq hands it the wrapper around it, which the scaler does not know, and whose gradients it therefore unscales
    once more.
    """
    self.scaler.step(self.optimizer)
    self.scaler.update()


def train_in_bfloat16_anywhere() -> None:
    from fairseq.distributed import utils

    _wrap(utils, "call_main", _call_main)


def _call_main(call, cfg, main, **kwargs):
    """fairseq's ``call_main``, through which its commands begin. Their parser turns ``--tpu`` on with ``--bf16``."""
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
    return call(cfg, main, **kwargs)

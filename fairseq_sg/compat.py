"""Repairs of fairseq 0.12, and differences between versions of fairseq, torch and numpy.

``repair()`` runs once, when the plugin is loaded (``plugin``), before fairseq reads a checkpoint:

- it refuses fairseq releases that do not run on today's Python and torch, and names the one that does;
- ``torch.load(weights_only=True)``, torch's default, reads fairseq's checkpoints. Plain data classes are added to
  torch's list of safe globals; none of their functions runs code from the file;
- warnings and log lines that fairseq causes in newer libraries, and that say nothing about the run, are silenced;
- ``--amp`` divides gradients by the loss scale once, and its checkpoints have the scale; fairseq divides twice, and
  keeps only the scale of ``--fp16``;
- ``--bf16`` does not ask for a TPU;
- fairseq's search for a NaN does not end in an error of its own;
- a task may gather the state of all workers before a checkpoint is saved (``gather_state``);
- checkpoints and their copies are written atomically (temporary file, then rename);
- ``--model-overrides`` may name an option that is younger than the checkpoint;
- ``--no-repeat-ngram-size`` bans repeated n-grams; fairseq's code in Python bans none;
- an indexed dataset that could not be opened is forgotten in silence;
- a command that ends with a :class:`UsageError` prints its message alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Mapping

from fairseq_sg.errors import UsageError
from fairseq_sg.files import replacing

FAIRSEQ = "fairseq-fixed==0.12.3.1"


def fairseq_version() -> str | None:
    """The installed fairseq-fixed's version, or None where no fairseq is installed.

    Raises:
        ImportError: another distribution provides the module ``fairseq``.
    """
    if importlib.util.find_spec("fairseq") is None:
        return None
    version = version_of("fairseq-fixed")
    if version is not None:
        return version
    found = version_of("fairseq")
    raise ImportError(
        f"the installed fairseq is {f'fairseq {found}' if found else 'of unknown origin'}; fairseq_sg runs on "
        f"{FAIRSEQ}, because upstream's 0.12.2 fails on Python 3.11 and newer and on torch 2.6 and newer. "
        "Fix: pip uninstall fairseq; then `fairseq-sg doctor` says how to install fairseq-fixed"
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def repair() -> None:
    """Everything above; a second call in a row changes nothing.

    Raises:
        ImportError: fairseq is missing or unusable.
    """
    if fairseq_version() is None:
        raise ImportError(
            f"fairseq is not installed; fairseq_sg's plugin needs {FAIRSEQ}. `fairseq-sg doctor` says how to install it"
        )
    silence_warnings()
    silence_logs()
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils
    from fairseq.file_io import PathManager
    from fairseq.nan_detector import NanDetector
    from fairseq.ngram_repeat_block import NGramRepeatBlock
    from fairseq.optim.amp_optimizer import AMPOptimizer

    allow_checkpoint_globals()
    leave_files_to_python()
    AMPOptimizer.step = _amp_step
    AMPOptimizer.state_dict = _amp_state
    AMPOptimizer.load_state_dict = _load_amp_state
    NanDetector.add_hooks = _add_forward_hook
    NGramRepeatBlock._no_repeat_ngram = _ban_ngrams
    wrap(checkpoint_utils, "save_checkpoint", _save_checkpoint)
    wrap(checkpoint_utils, "torch_persistent_save", _save_file)
    wrap(checkpoint_utils, "overwrite_args_by_name", _override)
    wrap(PathManager, "copy", _copy_file)
    wrap(utils, "call_main", _call_main)
    wrap(sys, "excepthook", _report)


def wrap(owner: typing.Any, name: str, wrapper: typing.Callable) -> None:
    """Replaces the function ``owner.name`` by ``wrapper``, which gets it as its first argument.

    A second call in a row changes nothing; one after another wrapper puts ``wrapper`` around that.
    """
    original = getattr(owner, name)
    if getattr(original, "func", None) is not wrapper:
        setattr(owner, name, functools.partial(wrapper, original))


# Warnings and log lines.

_NOISE = (
    (UserWarning, r".*hydra\.experimental.*no longer experimental"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"\s*'.*' is validated against ConfigStore schema with the same name"),
    (UserWarning, r"\s*In '.*': Usage of deprecated keyword in package header"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    (UserWarning, r".*'pin_memory' argument is set as true but no accelerator"),
    (UserWarning, r".*Support for mismatched key_padding_mask and attn_mask is deprecated"),
    (UserWarning, r"amp_C fused kernels unavailable"),
    (FutureWarning, r".*torch\.cuda\.amp\.(autocast|GradScaler).*is deprecated"),
    (DeprecationWarning, r".*pkg_resources is deprecated"),
)
#: logger -> the beginning of the messages that it leaves out.
_NOISE_IN_LOGS = {
    "fairseq.tasks.fairseq_task": re.compile("can_reuse_epoch_itr = "),
    "fairseq.checkpoint_utils": re.compile("State of .* is ready to be persisted"),
    # The absent biases of nn.Linear(bias=False) are all the same None, which fairseq takes for a shared parameter.
    "fairseq.trainer": re.compile(r"detected shared parameter: \S+bias <- \S+bias$"),
    # Shown because a module of fairseq sets the level of all loggers to DEBUG.
    "hydra.core.utils": re.compile("Setting JobRuntime:"),
}


def silence_warnings() -> None:
    for category, message in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category)


@contextlib.contextmanager
def unchanged_logging() -> typing.Iterator[None]:
    """Keeps the root logger as it is while fairseq is imported.

    Modules of fairseq set its level to DEBUG and add a handler: a notebook would show all that matplotlib logs.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def silence_logs() -> None:
    for name in _NOISE_IN_LOGS:
        # A logger takes the same filter once.
        logging.getLogger(name).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not _NOISE_IN_LOGS[record.name].match(record.getMessage())


# Checkpoints.


def allow_checkpoint_globals() -> None:
    """Adds the data classes in fairseq's checkpoints to torch's safe globals.

    They are: namespaces of models configured by argparse, OmegaConf containers of rank 0's broadcast on a resume with
    several processes, and numpy scalars and arrays of best metrics and of BLEU's counts.
    """
    import numpy as np
    import torch
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata
    from omegaconf.nodes import AnyNode

    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    python = [argparse.Namespace, collections.defaultdict, dict, int, list, typing.Any]
    dtypes = [dtype for name in dir(np.dtypes) if isinstance(dtype := getattr(np.dtypes, name), type)]
    numpy = [np.dtype, np.ndarray, multiarray.scalar, multiarray._reconstruct, *dtypes]
    omegaconf = [DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode]
    torch.serialization.add_safe_globals([*python, *numpy, *omegaconf, _TensorPlaceholder])


def _save_checkpoint(save, cfg, trainer, *args, **kwargs):
    """fairseq's ``save_checkpoint``. Every worker calls it, but fairseq asks the first worker's task alone."""
    gather = getattr(trainer.task, "gather_state", None)
    if gather is not None and not cfg.no_save:
        gather()
    return save(cfg, trainer, *args, **kwargs)


def _save_file(save, obj, filename, async_write=False):
    """fairseq's ``torch_persistent_save``. After an error, fairseq's writes twice more into the same open file."""
    from fairseq.file_io import PathManager

    if async_write or not PathManager.supports_rename(filename):
        return save(obj, filename, async_write=async_write)

    def write(temporary: str) -> None:
        import torch

        with open(temporary, "wb") as file:
            torch.save(obj, file)

    return _write_atomically(filename, write)


def _copy_file(copy, src_path, dst_path, overwrite=False):
    """fairseq's ``PathManager.copy``, which makes ``checkpoint_last.pt``. fairseq's overwrites the file in place."""
    from fairseq.file_io import PathManager

    if not overwrite or not PathManager.supports_rename(dst_path):
        return copy(src_path, dst_path, overwrite=overwrite)
    return _write_atomically(dst_path, lambda temporary: copy(src_path, temporary, overwrite=True))


def _write_atomically(path: str, write: typing.Callable[[str], typing.Any]) -> str:
    """``files.replacing`` for what ``write`` makes. Raises UsageError where the disk is full."""
    try:
        with replacing(path) as temporary:
            write(str(temporary))
    except Exception as error:
        full = _disk_full(error)
        if full is None:
            raise
        raise UsageError(
            f"there is no room for the checkpoint {path} ({full.strerror}). Earlier checkpoints are complete: make "
            "room, and the same command resumes from the last one"
        ) from error
    return path


def _disk_full(error: BaseException | None) -> OSError | None:
    """The error of a full disk in the chain of causes of ``error``: torch raises an error of its own for it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        error = error.__cause__ or error.__context__
    return None


def _override(overwrite, cfg, overrides) -> None:
    """fairseq's ``overwrite_args_by_name``, which changes the options in a checkpoint and ignores all others. A task or
    model may have got an option since.
    """
    from omegaconf import DictConfig, open_dict

    from fairseq_sg.declared import kinds_in

    for group in ("task", "model"):
        chosen = cfg.get(group)
        if isinstance(chosen, DictConfig):
            with open_dict(chosen):
                chosen.update({k: overrides[k] for k in kinds_in(group, chosen) if k in overrides and k not in chosen})
    overwrite(cfg, overrides)


# Training.


def _amp_step(self, closure=None, scale=1.0, groups=None) -> None:
    """fairseq's ``AMPOptimizer.step``, which hands the scaler the optimizer that ``clip_grad_norm`` has unscaled.

    fairseq hands it the wrapper around the optimizer. The scaler does not know the wrapper and unscales again.
    """
    self.scaler.step(self.optimizer)
    self.scaler.update()


def _amp_state(self) -> dict[str, typing.Any]:
    """The optimizer's state, and the loss scale. torch's optimizers ignore the scale: fairseq alone loads it, too."""
    return {**self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}


def _load_amp_state(self, state, optimizer_overrides=None) -> None:
    from fairseq.optim import FairseqOptimizer

    FairseqOptimizer.load_state_dict(self, state, optimizer_overrides)
    if scale := state.get("scaler"):  # older checkpoints and fairseq's have none
        self.scaler.load_state_dict(scale)


def _add_forward_hook(self, module) -> None:
    """fairseq's ``NanDetector.add_hooks`` without hooks on the backward pass: torch has none for a dict of lists, which
    encoders return. The detector also logs all gradients that are not finite.
    """
    self.fhooks.append(module.register_forward_hook(self.fhook_fn))


def _call_main(call, cfg, main, **kwargs):
    """fairseq's ``call_main``, through which its commands begin. Their parser turns ``--tpu`` on with ``--bf16``.

    Several groups of options have a copy of it; by that of ``distributed_training`` workers add up their gradients.
    With a list in ``--update-freq``, the optimizer of ``--bf16`` asks for a window of the loss scale, and has no scale.
    """
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        for group in cfg.values():
            if getattr(group, "tpu", False):
                group.tpu = False
    if cfg.common.bf16 and cfg.common.fp16_scale_window is None and len(cfg.optimization.update_freq) > 1:
        cfg.common.fp16_scale_window = 1
    return call(cfg, main, **kwargs)


# Data.


def leave_files_to_python() -> None:
    """Removes the ``__del__`` of indexed datasets, which reports files that were never opened; Python closes others."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    for kind in (MMapIndexedDataset, MMapIndexedDataset.Index):
        if "__del__" in vars(kind):
            del kind.__del__


# Generation.


def _ban_ngrams(self, tokens, lprobs, bsz, beam_size, step):
    """fairseq's ``NGramRepeatBlock._no_repeat_ngram``. Rows of ``tokens`` are padded to the longest output, and
    fairseq's compares their ends, which are padding, with the n-grams before.
    """
    before = self.no_repeat_ngram_size - 1
    for row, words in enumerate(tokens[:, 1 : step + 1].tolist()):  # without the end symbol at the beginning
        last = words[len(words) - before :]
        banned = [words[i + before] for i in range(len(words) - before) if words[i : i + before] == last]
        rest = lprobs[row].clone()
        rest[banned] = float("-inf")
        if not rest.isneginf().all():  # a prompt or --prefix-size leaves one word, which may be banned
            lprobs[row] = rest
    return lprobs


# Commands and their errors.


def is_command(names: Mapping[str, typing.Any]) -> bool:
    """Whether the names of a module are those of one of fairseq's commands, also of one that runs by its path."""
    folder = os.path.dirname(names.get("__file__") or "")
    return "fairseq_cli" in (names.get("__package__"), os.path.basename(folder))


def _report(previous, kind, error, trace) -> None:
    """``sys.excepthook``: a UsageError that ends a command of fairseq is one line.

    Other errors keep their traceback, as do all errors with FAIRSEQ_SG_TRACEBACK=1.
    """
    in_command = any(is_command(frame.f_globals) for frame, _ in traceback.walk_tb(trace))
    if isinstance(error, UsageError) and in_command and os.environ.get("FAIRSEQ_SG_TRACEBACK", "0") in ("", "0"):
        print(f"error: {error}", file=sys.stderr)
    else:
        previous(kind, error, trace)

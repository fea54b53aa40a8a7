"""The content of a checkpoint, read before fairseq loads it, so that an error names the file and the cause."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_sg.errors import UsageError, in_one_line

#: What fairseq calls the last checkpoint of a training, and the default of ``--restore-file``.
LAST = "checkpoint_last.pt"


def read(path: str) -> dict[str, Any]:
    """The content of a checkpoint of fairseq; its tensors stay on the disk until they are used.

    torch reads plain data alone (``weights_only=True``): no code of the file is run.

    Raises:
        UsageError: the file is cut off, was changed, has more than plain data, or is no checkpoint of fairseq. The
            message has the type and the text of the cause.
    """
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            with zipfile.ZipFile(path) as entries:
                # torch writes checksums, and does not compare them.
                if entries.testzip() is not None:
                    raise zipfile.BadZipFile("its checksums are wrong")
        state = torch.load(path, map_location="cpu", mmap=archive, weights_only=True)
        if not isinstance(state, dict) or "model" not in state or not {"args", "cfg"} & set(state):
            raise TypeError(f"{type(state).__name__} without the keys 'model' and 'cfg'")
        return state
    except Exception as error:
        fix = "Restore a copy of it, or name"
        if newest := _newest_beside(path):
            fix = f"Copy {newest} over it, the newest one there that can be read, or name"
        if isinstance(error, zipfile.BadZipFile):
            reason = "was changed after it was written"
        elif isinstance(error, pickle.UnpicklingError) and archive:
            classes = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            reason = f"has more than plain data ({classes}), which could run code. No code of it was run"
            fix = "Name"
        elif isinstance(error, TypeError):
            reason = "is no checkpoint of fairseq"
        elif isinstance(error, PermissionError):
            reason, fix = "cannot be read", "Change its permissions, or name"
        else:
            reason = "cannot be read: it was cut off, or is no checkpoint"
        raise UsageError(f"the checkpoint {path} {reason} ({in_one_line(error)}). {fix} another checkpoint") from error


def _newest_beside(path: str) -> str | None:
    """The readable ``checkpoint_EPOCH_STEPS.pt`` of the most steps in the folder of a `LAST`."""
    folder, name = os.path.split(path)
    if name != LAST:
        return None
    names = (re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", other) for other in os.listdir(folder or "."))
    for found in sorted(filter(None, names), key=lambda found: int(found[1]), reverse=True):
        with contextlib.suppress(UsageError):
            read(os.path.join(folder, found[0]))
            return os.path.join(folder, found[0])
    return None


def task_name(state: dict[str, Any]) -> str | None:
    """The name of the task in a checkpoint's configuration, if it has one."""
    return values((state.get("cfg") or {}).get("task")).get("_name")


def is_ours(task: type | None) -> bool:
    """Whether a class of tasks is one of this plugin's, or derives from one."""
    from fairseq_sg.tasks.mixin import SGTask

    return task is not None and issubclass(task, SGTask)


def trained_with_ours(path: str) -> str | None:
    """The name of the task that a checkpoint was trained with, where it is one of this plugin's; else None."""
    from fairseq.tasks import TASK_REGISTRY

    try:
        name = task_name(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception:  # whoever loads the checkpoint reports the error
        return None
    return name if is_ours(TASK_REGISTRY.get(name)) else None


def not_registered(checkpoint: str, option: str, name: str) -> str:
    """The error of a checkpoint whose ``--task`` or ``--arch`` is not registered."""
    return (
        f"the checkpoint {checkpoint} was trained with --{option} {name}, which is not registered: give the --user-dir "
        "that registers it"
    )


def values(options: Any) -> dict[str, Any]:
    """One group of options in a configuration, such as ``model``, as a dict."""
    if OmegaConf.is_config(options):
        # Unlike `dict`, this takes options without a value, which some models of fairseq have.
        return OmegaConf.to_container(options, resolve=True)
    if isinstance(options, argparse.Namespace):
        return vars(options)
    return options if isinstance(options, dict) else {}


def option_names(cfg: Any) -> set[str]:
    """The names of all options in a checkpoint's configuration."""
    return {name for group in cfg.values() for name in (group if hasattr(group, "keys") else values(group))}


def load_weights(load: Callable, weights: dict[str, Tensor], *args, **kwargs):
    """A model's ``load_state_dict``. Raises UsageError, after torch's error, for weights of another model."""
    try:
        return load(weights, *args, **kwargs)
    except RuntimeError as error:
        here = load.__self__.state_dict()
        shapes = {
            name: (list(weights[name].shape), list(value.shape))
            for name, value in here.items()
            if isinstance(value, Tensor) and name in weights and weights[name].shape != value.shape
        }
        different = {
            "it lacks {}": [name for name in here if name not in weights],
            "it also has {}": [name for name in weights if name not in here],
            "other sizes of {}": [f"{name} ({there}, here {own})" for name, (there, own) in shapes.items()],
        }
        found = "; ".join(text.format(first(names)) for text, names in different.items() if names)
        if not found:
            raise
        raise UsageError(
            f"the checkpoint belongs to another model: {found}. Check the options of the model (--model-overrides in "
            "an evaluation), or name another checkpoint"
        ) from error


def first(names: list[str]) -> str:
    """Up to three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""The only place that knows about versions of fairseq, torch and numpy.

``prepare()`` runs when the plugin is imported, before fairseq reads a checkpoint:

- it refuses fairseq releases that do not run on today's Python and torch, and says which one does;
- it lets ``torch.load(weights_only=True)``, torch's default, read what fairseq puts into its checkpoints. Only plain data
  classes are added to torch's list: no function of theirs runs code from the file;
- it silences the warnings that fairseq 0.12 causes in newer libraries and that say nothing about the user's run.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import typing
import warnings

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
        f"the installed fairseq is {f'fairseq {found}' if found else 'of unknown origin'}; fairseq_sg runs on {FAIRSEQ}, because "
        "upstream's 0.12.2 fails on Python 3.11 and newer and on torch 2.6 and newer. Mend: pip uninstall fairseq, then see "
        "scripts/setup.sh for how to install fairseq-fixed"
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def prepare() -> None:
    """Everything above; calling it again does no harm. Raises ImportError for an unusable fairseq."""
    fairseq_version()
    silence_warnings()
    allow_checkpoint_globals()


_NOISE = (
    (UserWarning, r".*hydra\.experimental.*no longer experimental"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r".*is validated against ConfigStore schema with the same name"),
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


def allow_checkpoint_globals() -> None:
    """Adds to torch's safe globals the data classes found in fairseq's checkpoints.

    Namespaces of models configured by argparse, OmegaConf containers of rank 0's broadcast on a multi-process resume, numpy
    scalars and arrays of best metrics and of BLEU's counts.
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

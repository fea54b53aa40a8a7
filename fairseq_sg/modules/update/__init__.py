"""Updates: how a layer makes its new state. One file each, chosen by ``--encoder-update`` and ``--decoder-update``."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.feedforward import build_feedforward
from fairseq_sg.modules.norm import norm_of
from fairseq_sg.modules.update.base import UPDATE_REGISTRY, Residual, Update, register_update
from fairseq_sg.modules.update.copy_gate import CopyGateUpdate
from fairseq_sg.modules.update.feedforward_only import FeedForwardOnlyUpdate
from fairseq_sg.modules.update.residual import ResidualUpdate


def build_update(name: str, config: Any, ffn: str, side: str) -> Update:
    """The update ``name`` of a layer of the ``encoder`` or ``decoder`` (``side``), from a model's configuration.

    Args:
        name: a name in ``UPDATE_REGISTRY``.
        config: has the sizes of the side, ``dropout``, ``pre_norm``, ``norm``, and the options of the update and of
            ``ffn``.
        ffn: name of its feedforward layer.

    Raises UsageError for an unknown name, or a wrong option.
    """
    dim, layer = getattr(config, f"{side}_embed_dim"), build_feedforward(ffn, config, side)
    shell = {"dropout": config.dropout, "pre_norm": config.pre_norm, "norm": norm_of(config)}
    return UPDATE_REGISTRY.build(name, config, dim, layer, **shell)

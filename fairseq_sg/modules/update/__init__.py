"""Updates: how a layer makes its new state. One file each, chosen by ``--encoder-update`` and ``--decoder-update``."""

from __future__ import annotations

from typing import Any

from fairseq_sg.modules.update.base import UPDATE_REGISTRY, Residual, Update, register_update
from fairseq_sg.modules.update.copy_gate import CopyGateUpdate
from fairseq_sg.modules.update.residual import ResidualUpdate


def build_update(name: str, config: Any, ffn: str, side: str) -> Update:
    """The update ``name`` of a layer of the ``encoder`` or ``decoder``, with the feedforward layer ``ffn``.

    Raises ValueError for an unknown name, or a wrong option.
    """
    return UPDATE_REGISTRY.find(name)(config, ffn, side)


__all__ = [
    "UPDATE_REGISTRY",
    "CopyGateUpdate",
    "Residual",
    "ResidualUpdate",
    "Update",
    "build_update",
    "register_update",
]

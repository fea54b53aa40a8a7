"""Depth: how layers are stacked. One file each, chosen by ``--depth``; see ``base`` for what a stack is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fairseq_sg.modules.depth.base import (
    DEPTH_REGISTRY,
    IncrementalState,
    RepeatedLayers,
    Stack,
    StackOutput,
    register_depth,
)
from fairseq_sg.modules.depth.looped import LoopedLayers
from fairseq_sg.modules.depth.separate import SeparateLayers
from fairseq_sg.modules.depth.shared import SharedLayer
from fairseq_sg.modules.depth.shared_act import SharedACT


def build_stack(config: Any, side: str, build_layer: Callable[[int], nn.Module]) -> Stack:
    """The stack ``config.depth`` of the ``encoder`` or the ``decoder`` (``side``), from a model's configuration.

    ``build_layer`` makes the layer of a step. Raises UsageError for an unknown name, or a wrong option.
    """
    steps, dim = getattr(config, f"{side}_layers"), getattr(config, f"{side}_embed_dim")
    return DEPTH_REGISTRY.build(config.depth, config, build_layer, steps, dim)


__all__ = [
    "DEPTH_REGISTRY",
    "IncrementalState",
    "LoopedLayers",
    "RepeatedLayers",
    "SeparateLayers",
    "SharedACT",
    "SharedLayer",
    "Stack",
    "StackOutput",
    "build_stack",
    "register_depth",
]

"""Depth: how layers are stacked. One file each, chosen by ``--depth``; see ``base`` for what a stack is."""

from __future__ import annotations

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

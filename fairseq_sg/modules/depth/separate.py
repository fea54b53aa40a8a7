"""Separate layers: each step has its own."""

from __future__ import annotations

from torch import nn

from fairseq_sg.modules.depth.base import Stack, register_depth


@register_depth("separate")
class SeparateLayers(Stack):
    """A layer of its own for every step."""

    paper = "Vaswani et al. 2017"

    def __init__(self, build_layer, steps, dim):
        super().__init__(build_layer, steps, dim)
        self.layers = nn.ModuleList(build_layer(step) for step in range(steps))

    def layer_for_step(self, step):
        return self.layers[step]

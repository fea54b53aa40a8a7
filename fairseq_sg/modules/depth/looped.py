"""Looped layers: all are applied several times, with the stack's input added before each loop (Yang et al. 2024).

    o ← 0;   b times:   o ← o + x⁰,   o ← layer_L(… layer_1(o))          b is ``--loops``

The paper calls the addition input injection. Without it (``--loop-injection none``) the first loop starts from x⁰, and
each later one from the state before. Parameters and their names are those of ``--depth separate``. A checkpoint does
not know b, so more loops can be taken at test time (``--model-overrides "{'loops': 20}"``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fairseq_sg import ranges
from fairseq_sg.modules.depth.base import RepeatedLayers, register_depth


@dataclass
class LoopedOptions:
    loops: int = field(
        default=1,
        metadata={
            "help": "how often --depth looped applies all layers, one after another; may be changed at test time",
            "least": 1,
        },
    )
    loop_injection: str = field(
        default="add",
        metadata={
            "help": "what each loop starts from: the state and the stack's input ('add'), or the state ('none')",
            "choices": ("add", "none"),
        },
    )


@register_depth("looped")
class LoopedLayers(RepeatedLayers):
    """L layers, b times. A step is one application of a layer: there are L·b.

    Args:
        steps: L, the number of layers.
        loops: b.
        loop_injection: ``add`` or ``none``.

    Raises:
        UsageError: b below 1, or another injection.
    """

    paper = "Yang et al. 2024"
    options = LoopedOptions

    def __init__(self, build_layer, steps, dim, *, loops: int = 1, loop_injection: str = "add"):
        super().__init__(build_layer, steps, dim)
        ranges.check(LoopedOptions, {"loops": loops, "loop_injection": loop_injection})
        self.layers = nn.ModuleList(build_layer(step) for step in range(steps))
        self.injects = loop_injection == "add"
        self.steps = loops * steps
        self.repeats_layers = loops > 1

    def layer_for_step(self, step):
        return self.layers[step % len(self.layers)]

    def loop_of_step(self, step):
        return step // len(self.layers)

    def input_of_step(self, step, x, given):
        # The first loop starts from 0 + x⁰.
        begins = step > 0 and step % len(self.layers) == 0
        return x + given if begins and self.injects else x

    def ends_loop(self, step):
        return (step + 1) % len(self.layers) == 0

"""A shared layer: Universal Transformer without halting, positions before the first step only (Csordás 2023, 4.1.2).

The stack holds one layer. Its checkpoint does not know the number of steps, so more can be taken at test time
(``--model-overrides "{'encoder_layers': 24}"``).
"""

from __future__ import annotations

from fairseq_sg.modules.depth.base import RepeatedLayers, register_depth


@register_depth("shared")
class SharedLayer(RepeatedLayers):
    """One layer for all steps; every step is a loop."""

    paper = "Dehghani et al. 2019, without halting; Csordás 2023, 4.1.2"
    shares_layers = True

    def __init__(self, build_layer, steps, dim):
        super().__init__(build_layer, steps, dim)
        self.layer = build_layer(0)

    def layer_for_step(self, step):
        return self.layer

    def loop_of_step(self, step):
        return step

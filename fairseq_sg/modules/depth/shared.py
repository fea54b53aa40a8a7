"""A shared layer: Universal Transformer without halting, positions before the first step only (Csordás 2023, 4.2.2).

The stack holds one layer. Its checkpoint does not know the number of steps, so more can be taken at test time
(``--model-overrides "{'encoder_layers': 24}"``).
"""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.depth.base import IncrementalState, Stack, register_depth


@register_depth("shared")
class SharedLayer(Stack):
    """One layer for all steps. Its attentions keep a decoding state per step, in a dict per step."""

    paper = "Dehghani et al. 2019, without halting; Csordás 2023, 4.2.2"
    shares_layers = True

    def __init__(self, build_layer, steps, dim):
        super().__init__(build_layer, steps, dim)
        self.layer = build_layer(0)

    def layer_for_step(self, step):
        return self.layer

    def state_for_step(self, step, state):
        return None if state is None else state.setdefault(self._key(step), {})

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorders the states of every step; fairseq itself reaches only those at the top of the dict."""
        for step in range(self.steps):
            state = incremental_state.get(self._key(step))
            if not state:
                continue
            for module in self.layer.modules():
                if hasattr(module, "reorder_incremental_state"):
                    module.reorder_incremental_state(state, new_order)

    @staticmethod
    def _key(step: int) -> str:
        return f"shared_layer.step{step}"

"""How layers make depth: ``--depth separate`` (each its own) or ``shared`` (one layer, applied again and again).

A stack is called with the hidden state and whatever its layers take; it threads the state through the steps, gives each step its
own decoding state, and collects what the layers return. A shared stack holds one layer: its checkpoint does not know the number
of steps, so more can be taken at test time (``--model-overrides "{'encoder_layers': 24}"``). Universal Transformer without
halting, as in Csordás 2023, section 4.2.2: one encoder and one decoder layer, positions before the first step only.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.losses import AuxLosses, collect
from fairseq_sg.registry import Registry

DEPTH_REGISTRY = Registry("depth", "--depth")
register_depth = DEPTH_REGISTRY.register

IncrementalState = Dict[str, Dict[str, Any]]


class StackOutput(NamedTuple):
    """What a stack returns: last hidden state (N, B, C), hidden states after each step, last attention weights, losses."""

    x: Tensor
    hidden_states: List[Tensor]
    weights: Optional[Tensor]
    losses: AuxLosses


class Stack(nn.Module):
    """Base class: a subclass says which layer works at each step and where that step keeps its decoding state.

    ``shares_layers`` says whether one layer works at every step.

    Args:
        build_layer: makes the layer of a step (numbered from 0), which takes ``(x, incremental_state=…, need_weights=…, **kwargs)`` and returns
            ``(x, attention weights or None, dict from name to scalar loss)``.
        steps: how many layers are applied.
    """

    shares_layers = False

    def __init__(self, build_layer: Callable[[int], nn.Module], steps: int):
        super().__init__()
        if steps < 1:
            raise UsageError(f"a stack needs at least one layer, not {steps} (--encoder-layers, --decoder-layers)")
        self.steps = steps

    def at(
        self, step: int, incremental_state: Optional[IncrementalState]
    ) -> Tuple[nn.Module, Optional[IncrementalState]]:
        """The layer of a step and the incremental state to hand it."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, *, incremental_state=None, need_weights: bool = False, keep_hidden: bool = False, **kwargs
    ) -> StackOutput:
        """x (N, B, C); further arguments go to every layer."""
        hidden_states, losses, weights = [], {}, None
        for step in range(self.steps):
            layer, state = self.at(step, incremental_state)
            last = step == self.steps - 1
            x, weights, emitted = layer(x, incremental_state=state, need_weights=need_weights and last, **kwargs)
            collect(losses, emitted)
            if keep_hidden:
                hidden_states.append(x)
        return StackOutput(x, hidden_states, weights, losses)


@register_depth("separate")
class SeparateLayers(Stack):
    """A layer of its own for every step."""

    def __init__(self, build_layer, steps):
        super().__init__(build_layer, steps)
        self.layers = nn.ModuleList(build_layer(step) for step in range(steps))

    def at(self, step, incremental_state):
        return self.layers[step], incremental_state


@register_depth("shared")
class SharedLayer(Stack):
    """One layer for all steps. Its attentions keep a decoding state per step, in a dict per step."""

    shares_layers = True

    def __init__(self, build_layer, steps):
        super().__init__(build_layer, steps)
        self.layer = build_layer(0)

    def at(self, step, incremental_state):
        if incremental_state is None:
            return self.layer, None
        return self.layer, incremental_state.setdefault(self._key(step), {})

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Hands each step's states to the modules that own them; fairseq itself reaches only those of the whole dict."""
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


def build_stack(name: str, build_layer: Callable[[int], nn.Module], steps: int) -> Stack:
    """The stack ``name``; raises ValueError for an unknown name."""
    return DEPTH_REGISTRY.find(name)(build_layer, steps)

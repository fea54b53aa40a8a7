"""What all stacks share.

A stack is called with the hidden state and whatever its layers take; it threads the state through the steps, gives each
step its own decoding state, and collects what the layers return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.losses import AuxLosses, collect
from fairseq_sg.registry import Mechanism, Registry

DEPTH_REGISTRY = Registry("depth", "--depth")
register_depth = DEPTH_REGISTRY.register

IncrementalState = dict[str, dict[str, Any]]


class StackOutput(NamedTuple):
    """Output (N, B, C), hidden states after each step, attention weights that the output was made with, losses."""

    x: Tensor
    hidden_states: list[Tensor]
    weights: Tensor | None
    losses: AuxLosses


class Stack(Mechanism, nn.Module):
    """Base class: a subclass says which layer works at each step and where that step keeps its decoding state.

    Args:
        build_layer: makes the layer of a step (numbered from 0), which takes ``(x, incremental_state=…, need_weights=…,
            **kwargs)`` and returns ``(x, attention weights or None, dict from name to scalar loss)``.
        steps: how many layers are applied.
        dim: C, the width of the hidden state.
    """

    #: Whether one layer works at every step.
    shares_layers: ClassVar[bool] = False

    def __init__(self, build_layer: Callable[[int], nn.Module], steps: int, dim: int):
        super().__init__()
        if steps < 1:
            raise UsageError(f"a stack needs at least one layer, not {steps} (--encoder-layers, --decoder-layers)")
        self.steps = steps

    def at(self, step: int, incremental_state: IncrementalState | None) -> tuple[nn.Module, IncrementalState | None]:
        """The layer of a step and the incremental state to hand it."""
        raise NotImplementedError

    @staticmethod
    def of_step(memory: Sequence[Tensor] | None, step: int) -> dict[str, Tensor]:
        """The argument ``memory`` of a step's layer, where there is one."""
        return {} if memory is None else {"memory": memory[step]}

    def forward(
        self,
        x: Tensor,
        *,
        incremental_state=None,
        need_weights: bool = False,
        keep_hidden: bool = False,
        memory: Sequence[Tensor] | None = None,
        **kwargs,
    ) -> StackOutput:
        """x (N, B, C); ``memory`` has an entry for each step's layer, further arguments go to every layer."""
        hidden_states, losses, weights = [], {}, None
        for step in range(self.steps):
            layer, state = self.at(step, incremental_state)
            last = step == self.steps - 1
            x, weights, emitted = layer(
                x, incremental_state=state, need_weights=need_weights and last, **self.of_step(memory, step), **kwargs
            )
            collect(losses, emitted)
            if keep_hidden:
                hidden_states.append(x)
        return StackOutput(x, hidden_states, weights, losses)

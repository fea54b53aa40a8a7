"""The base class of stacks of layers.

A stack passes the hidden state through its steps, gives each step its decoding state and its memory, and collects
Values and losses of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.context import Context, Values
from fairseq_sg.modules.losses import AuxLosses, collect
from fairseq_sg.registry import Mechanism, Registry

DEPTH_REGISTRY = Registry("depth", "--depth")
register_depth = DEPTH_REGISTRY.register

IncrementalState = dict[str, dict[str, Any]]


class StackOutput(NamedTuple):
    """Output of a stack.

    Attributes:
        x: (N, B, C), or packed as the input.
        hidden_states: the states after each step, if they are kept.
        weights: (B, N, M), the attention weights that the output was made with, or None.
        values: by role, the Values of each step's attention, if the context asks for them.
        losses: by name, what each step's layer returned.
    """

    x: Tensor
    hidden_states: list[Tensor]
    weights: Tensor | None
    values: dict[str, list[Values]]
    losses: AuxLosses


class Stack(Mechanism, nn.Module):
    """Base class: a subclass says which layer works at each step and where that step keeps its decoding state.

    Args:
        build_layer: makes the layer of a step (numbered from 0), which takes ``(x, context)`` and returns a
            ``LayerOutput``.
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

    def layer_for_step(self, step: int) -> nn.Module:
        """The layer that works at a step."""
        raise NotImplementedError

    def state_for_step(self, step: int, state: IncrementalState | None) -> IncrementalState | None:
        """The decoding states of a step's layer, within those of the stack."""
        return state

    def forward(
        self,
        x: Tensor,
        context: Context = Context(),
        *,
        memory: Sequence[Tensor] | None = None,
        keep_hidden: bool = False,
    ) -> StackOutput:
        """x (N, B, C), or packed; ``memory`` has an entry for each step."""
        hidden_states, values, losses, weights = [], {}, {}, None
        for step in range(self.steps):
            x, weights, step_values, step_losses = self.layer_for_step(step)(
                x,
                context.for_step(
                    state=self.state_for_step(step, context.state),
                    memory=None if memory is None else memory[step],
                    return_weights=step == self.steps - 1,
                ),
            )
            collect(values, step_values)
            collect(losses, step_losses)
            if keep_hidden:
                hidden_states.append(x)
        return StackOutput(x, hidden_states, weights, values, losses)

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
        inputs: what each step's layer was given, if hidden states are kept.
        hidden_states: the states after each step, if they are kept.
        loop_states: (N, B, C) or packed, the states after each loop over the layers (``looped``); of other stacks the
            output alone.
        weights: (B, N, M), the attention weights that the output was made with, or None.
        values: by role, the Values of each step's attention, if the context asks for them.
        losses: by name, what each step's layer returned.
    """

    x: Tensor
    inputs: list[Tensor]
    hidden_states: list[Tensor]
    loop_states: list[Tensor]
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
    #: Whether a layer works at several steps, so that it may project its source once for all of them.
    repeats_layers: bool = False

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

    def input_of_step(self, step: int, x: Tensor, given: Tensor) -> Tensor:
        """The input of a step's layer, from the state x after the step before and the stack's own input ``given``."""
        return x

    def ends_loop(self, step: int) -> bool:
        """Whether the state after a step is one of ``loop_states``."""
        return step == self.steps - 1

    def layer_and_context(
        self,
        step: int,
        context: Context,
        memory: Sequence[Tensor] | None,
        projected: dict[nn.Module, dict[str, Tensor]],
        return_weights: bool = True,
    ) -> tuple[nn.Module, Context]:
        """The layer of a step and its context. ``projected`` has what each layer projected of the source so far."""
        layer = self.layer_for_step(step)
        # In evaluation every application projects, so that hooks on the projections fire for each.
        once = self.repeats_layers and self.training and context.state is None
        return layer, context.for_step(
            state=self.state_for_step(step, context.state),
            memory=None if memory is None else memory[step],
            return_weights=return_weights,
            projected=projected.setdefault(layer, {}) if once else None,
        )

    def forward(
        self,
        x: Tensor,
        context: Context = Context(),
        *,
        memory: Sequence[Tensor] | None = None,
        keep_hidden: bool = False,
    ) -> StackOutput:
        """x (N, B, C), or packed; ``memory`` has an entry for each step."""
        given, inputs, hidden_states, loop_states = x, [], [], []
        values, losses, weights, projected = {}, {}, None, {}
        for step in range(self.steps):
            x = self.input_of_step(step, x, given)
            if keep_hidden:
                inputs.append(x)
            layer, seen = self.layer_and_context(step, context, memory, projected, step == self.steps - 1)
            x, weights, step_values, step_losses = layer(x, seen)
            collect(values, step_values)
            collect(losses, step_losses)
            if keep_hidden:
                hidden_states.append(x)
            if self.ends_loop(step):
                loop_states.append(x)
        return StackOutput(x, inputs, hidden_states, loop_states, weights, values, losses)


class RepeatedLayers(Stack):
    """A stack that goes through its layers several times. Each loop has decoding states of its own, in a dict."""

    repeats_layers = True

    def loop_of_step(self, step: int) -> int:
        """The loop, numbered from 0, that a step belongs to."""
        raise NotImplementedError

    def state_for_step(self, step, state):
        return None if state is None else state.setdefault(self._key(self.loop_of_step(step)), {})

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorders the states of every loop; fairseq itself reaches only those at the top of the dict."""
        for loop in range(self.loop_of_step(self.steps - 1) + 1):
            state = incremental_state.get(self._key(loop))
            if not state:
                continue
            for module in self.modules():
                if module is not self and hasattr(module, "reorder_incremental_state"):
                    module.reorder_incremental_state(state, new_order)

    @staticmethod
    def _key(loop: int) -> str:
        return f"loop{loop}"

"""The differentiable neural computer, DNC (Graves et al. 2016), and its improvements MDS (Csordás & Schmidhuber 2019;
Csordás 2023, chapter 2 and A.1).

A step of a memory M of N cells of W numbers, with R read heads:

    h = controller(x, r_{t−1}),   ξ = W_ξ h                                  `controller`, `interface`
    ψ = Π_i (1 − f_i w^{r,i}_{t−1}),   u = (u + w^w_{t−1} − u ∘ w^w_{t−1}) ∘ ψ
    w^w = g^w [g^a a(u) + (1 − g^a) C(M_{t−1}, k^w, β^w, m^w)]
    M = M_{t−1} ∘ ψ 1ᵀ ∘ (E − w^w eᵀ) + w^w vᵀ                               ψ with de-allocation (D) alone
    L, p: links of the cells in the order of their writes
    f_i = S(L w^{r,i}_{t−1}, s^f_i),   b_i = S(Lᵀ w^{r,i}_{t−1}, s^b_i)      S with sharpness (S) alone
    w^{r,i} = π_1 b_i + π_2 C(M, k^{r,i}, β^{r,i}, m^{r,i}) + π_3 f_i        m with masks (M) alone
    r_i = Mᵀ w^{r,i},   y = W_y h + b_y + W_r [r_1; …; r_R] + b_r

Two points of the order matter. The write look-up sees the memory before de-allocation, so it still finds a cell that is
freed in this step. Links do not feel de-allocation.

The switches are independent. Masks let a look-up ignore the part of a cell that it asks for. De-allocation scales a
freed cell by ψ: what is read from it is smaller at once, whereas the cosine, which is free of scale, finds it as before
until ψ |k| |M_i| is near ε. Sharpness keeps links usable although every write that is not one-hot blurs them.

N is no parameter size: ``cells`` of a trained module may be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_sg.modules import compilation
from fairseq_sg.modules.memory.controller import Controller, ControllerState
from fairseq_sg.modules.memory.interface import Interface, InterfaceProjection
from fairseq_sg.ops import memory as ops
from fairseq_sg.ops.precision import accurate, autocast_disabled


class State(NamedTuple):
    """What a DNC carries from step to step; all but the controller's part is float32 (float64)."""

    controller: ControllerState
    memory: Tensor  # M (B, N, W)
    usage: Tensor  # u (B, N)
    precedence: Tensor  # p (B, N)
    links: Tensor  # L (B, N, N)
    write_weights: Tensor  # w^w (B, N)
    read_weights: Tensor  # w^r (B, R, N)
    reads: Tensor  # r (B, R, W)


class Record(NamedTuple):
    """What happened in every step, for pictures; T steps after the batch."""

    write_weights: Tensor  # (B, T, N)
    read_weights: Tensor  # (B, T, R, N)
    usage: Tensor  # (B, T, N)
    forward: Tensor  # f (B, T, R, N)
    backward: Tensor  # b (B, T, R, N)
    modes: Tensor  # (B, T, R, 3): backward, content, forward
    free: Tensor  # (B, T, R)
    allocation_gate: Tensor  # (B, T, 1)
    write_gate: Tensor  # (B, T, 1)
    write_mask: Tensor | None  # (B, T, 1, W)
    read_masks: Tensor | None  # (B, T, R, W)


class Constants(NamedTuple):
    """What all steps of a sequence share."""

    weight: Tensor  # W_ξ (|ξ|, S)
    bias: Tensor  # b_ξ
    functions: ops.Functions


class DNC(nn.Module):
    """See the module's docstring.

    Args:
        controller: the controller, made for R W numbers that are read.
        outputs: Y, numbers of y.
        cells: N. width: W. heads: R.
        masks, deallocate, sharpen: M, D and S.
        detach_usage: no gradient through w^w_{t−1} into the usage, as in the released code.
        interface: further arguments of `InterfaceProjection`.
    """

    def __init__(
        self,
        controller: Controller,
        outputs: int,
        *,
        cells: int,
        width: int,
        heads: int,
        masks: bool = True,
        deallocate: bool = True,
        sharpen: bool = True,
        detach_usage: bool = True,
        **interface: Any,
    ):
        super().__init__()
        self.cells, self.width, self.heads = cells, width, heads
        self.deallocate, self.detach_usage = deallocate, detach_usage
        self.controller = controller
        self.compile_mode = compilation.NONE
        self._compiled_step: Callable | None = None
        self.interface = InterfaceProjection(
            controller.outputs, width=width, heads=heads, masks=masks, sharpness=sharpen, **interface
        )
        self.output = nn.Linear(controller.outputs, outputs)
        self.output_of_reads = nn.Linear(heads * width, outputs)
        for layer in (self.output, self.output_of_reads):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def initial(self, x: Tensor) -> State:
        """The state before the first step, zeros: no cell is used. x (B, T, I) has the batch, device and dtype."""
        b, n, w, r = x.size(0), self.cells, self.width, self.heads
        x = accurate(x)
        return State(
            controller=self.controller.initial(x),
            memory=x.new_zeros(b, n, w),
            usage=x.new_zeros(b, n),
            precedence=x.new_zeros(b, n),
            links=x.new_zeros(b, n, n),
            write_weights=x.new_zeros(b, n),
            read_weights=x.new_zeros(b, r, n),
            reads=x.new_zeros(b, r, w),
        )

    def forward(
        self, x: Tensor, state: State | None = None, record: bool = False
    ) -> tuple[Tensor, State, Record | None]:
        """x (B, T, I) -> y (B, T, Y), the state after the last step and, if asked for, what happened in every step.

        A padded sequence is to be padded on the right: padding then changes no output before it.

        Args:
            state: that after the steps before; None at the start.
        """
        state = self.initial(x) if state is None else state
        step = self._step()
        constants = Constants(*self.interface.stacked(), ops.functions(x))
        columns = self.controller.project(x).unbind(1)
        hidden, reads, records = [], [], []
        # In half precision a state would lose the small links and usages of old writes.
        with autocast_disabled(x.device):
            for projected in columns:
                h, state, happened = step(self, projected, state, constants)
                hidden.append(h)
                reads.append(state.reads.flatten(1))
                if record:
                    records.append(_record(*happened, state))
        y = self.output(_stack(hidden, self.output)) + self.output_of_reads(_stack(reads, self.output))
        return y, state, _join(records) if record else None

    def _step(self) -> Callable:
        """``step``, in training compiled if it is to be."""
        if self.compile_mode == compilation.NONE or not (self.training and torch.is_grad_enabled()):
            return DNC.step
        if self._compiled_step is None:
            self._compiled_step = compilation.compiled(DNC.step, self.compile_mode)
        return self._compiled_step

    def __getstate__(self) -> dict[str, Any]:
        """Compiled code is neither copied nor stored."""
        return {**super().__getstate__(), "_compiled_step": None}

    def step(
        self, projected: Tensor, state: State, constants: Constants
    ) -> tuple[Tensor, State, tuple[Interface, Tensor, Tensor]]:
        """One step, outside of autocast.

        Args:
            projected: a column of the controller's ``project``, (B, …).

        Returns:
            h (B, S), the next state, and the interface with f and b, both (B, R, N).
        """
        h, controller = self.controller(projected, state.reads.flatten(1), state.controller)
        xi, run = self.interface(h, constants.weight, constants.bias), constants.functions
        # Write.
        psi = run.retention(state.read_weights, xi.free)
        written = state.write_weights.detach() if self.detach_usage else state.write_weights
        usage = run.usage(state.usage, written, psi)
        content = run.content_weights(state.memory, xi.write_key, xi.write_strength, xi.write_mask).squeeze(1)
        write_weights = xi.write_gate * torch.lerp(content, run.allocation(usage), xi.allocation_gate)
        kept = psi if self.deallocate else None
        memory = run.write(state.memory, write_weights, xi.erase, xi.write_vector, kept)
        links, precedence = run.links(state.links, state.precedence, write_weights)
        # Read.
        forward, backward = run.follow(links, state.read_weights, xi.forward_sharpness, xi.backward_sharpness)
        content = run.content_weights(memory, xi.read_keys, xi.read_strengths, xi.read_masks)
        back, look_up, ahead = xi.modes.split(1, 2)  # each (B, R, 1)
        read_weights = torch.addcmul(torch.addcmul(back * backward, look_up, content), ahead, forward)
        reads = run.read(memory, read_weights)
        state = State(controller, memory, usage, precedence, links, write_weights, read_weights, reads)
        return h, state, (xi, forward, backward)


def _stack(columns: list[Tensor], layer: nn.Linear) -> Tensor:
    """Columns (B, C) of all steps as (B, T, C), in the dtype of the layer's weights."""
    return torch.stack(columns, 1).to(layer.weight.dtype)


def _record(xi: Interface, forward: Tensor, backward: Tensor, state: State) -> dict[str, Tensor | None]:
    """One step of a `Record`."""
    found = {"forward": forward, "backward": backward}
    found |= {name: getattr(state, name) for name in ("write_weights", "read_weights", "usage")}
    return {name: found[name] if name in found else getattr(xi, name) for name in Record._fields}


def _join(records: list[dict[str, Tensor | None]]) -> Record:
    return Record(
        **{
            name: None if records[0][name] is None else torch.stack([one[name] for one in records], 1)
            for name in Record._fields
        }
    )

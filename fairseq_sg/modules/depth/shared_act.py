"""A shared layer with adaptive computation time (ACT): every column chooses the steps that its output is made of.

Graves 2016 for the columns of a transformer (Csordás 2023, appendix D.1); h^(t) is a column after step t:

    p̂^(t) = σ(W_H h^(t−1) + b_H)                                                               (D.1)
    T      = min{T_max, min{t' : Σ_{t≤t'} p̂^(t) > 1 − ε}}          a column halts at step T     (D.2)
    p^(t)  = p̂^(t) for t < T,  R for t = T,  0 after it                                        (D.3)
    R      = 1 − Σ_{t<T} p̂^(t)                                     the remainder                (D.4)
    o      = Σ_t p^(t) h^(t)                                        ``--act-variant graves``     (D.5)

``dehghani`` (Dehghani et al. 2019, listings 1 and 2) differs twice: o ← (1 − p^(t)) o + p^(t) h^(t) takes the place of
D.5, and a column that T_max stops has no remainder, so that its weights sum to less than 1.

Only the readout halts: a column's state goes on as long as any column runs, and the others can attend to it. Columns of
padding are halted from the start; their output is 0.

The ponder loss, the mean of R over the columns, is returned as ``ponder``. Its weight is 0.03, the reference's, unless
``--aux-loss-weights`` has another.

Above is what the released code does. In the text, p̂^(t) is read from h^(t) (``--act-halting-state output``), and Σ p̂
has only to reach 1 − ε. The released code's mean of R counts padding (``--act-ponder-padding include``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.depth.base import StackOutput, register_depth
from fairseq_sg.modules.depth.shared import SharedLayer
from fairseq_sg.modules.losses import collect
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled
from fairseq_sg.ops.transforms import transformed


@dataclass
class SharedACTOptions:
    """Options of halting."""

    act_variant: str = field(
        default="graves",
        metadata={
            "help": "halting: 'graves' (weights of the steps sum to 1), or 'dehghani' (Universal Transformer)",
            "choices": ("graves", "dehghani"),
        },
    )
    act_threshold: float = field(
        default=0.99,
        metadata={"help": "sum of halting probabilities beyond which a column halts (1 − ε)", "above": 0, "most": 1},
    )
    act_halting_state: str = field(
        default="input",
        metadata={
            "help": "state that a step's halting probability is read from: the 'input' or 'output' of the step",
            "choices": ("input", "output"),
        },
    )
    act_ponder_padding: str = field(
        default="exclude",
        metadata={
            "help": "columns of padding in the mean of the ponder loss",
            "choices": ("exclude", "include"),
        },
    )


class Halting:
    """Which columns of one pass still run, and the weight with which a step enters their output.

    Args:
        running: (N, B) bool, False at padding.
        threshold: 1 − ε.
        dtype: of the sums.
    """

    def __init__(self, running: Tensor, threshold: float, dtype: torch.dtype):
        self.running = running
        self.threshold = threshold
        #: Σ p̂ (N, B), of use while a column runs.
        self.total = torch.zeros(running.shape, dtype=dtype, device=running.device)
        #: R (N, B), 0 where a column has not halted yet.
        self.remainder = self.total

    def weigh(self, p: Tensor, force: bool) -> Tensor:
        """p̂^(t) (N, B) -> p^(t) (N, B); with ``force``, all columns halt now."""
        go_on = self.running & (self.total + p <= self.threshold) & (not force)
        rest = torch.where(self.running, 1 - self.total, 0)
        self.remainder = torch.where(self.running & ~go_on, rest, self.remainder)
        weight = torch.where(go_on, p, rest)
        self.total = self.total + p
        self.running = go_on
        return weight


@register_depth("shared_act")
class SharedACT(SharedLayer):
    """See the module's docstring. ``steps`` is T_max.

    Raises:
        UsageError: for a wrong option.
    """

    paper = "Graves 2016; Dehghani et al. 2019; Csordás 2023, App. D.1"
    options = SharedACTOptions
    #: The weight of all published models with halting (Csordás 2023, appendix D.1: α = 0.03).
    emitted_losses = {"ponder": 0.03}

    def __init__(
        self,
        build_layer,
        steps,
        dim,
        *,
        act_variant: str = "graves",
        act_threshold: float = 0.99,
        act_halting_state: str = "input",
        act_ponder_padding: str = "exclude",
    ):
        super().__init__(build_layer, steps, dim)
        given = {"act_variant": act_variant, "act_threshold": act_threshold}
        given |= {"act_halting_state": act_halting_state, "act_ponder_padding": act_ponder_padding}
        ranges.check(SharedACTOptions, given)
        self.variant = act_variant
        self.threshold = act_threshold
        self.halting_state = act_halting_state
        self.ponder_padding = act_ponder_padding
        self.halting_unit = nn.Linear(dim, 1)

    def forward(self, x, context=Context(), *, memory=None, keep_hidden=False):
        """The same; attention weights are summed over the steps as the states are; ``hidden_states`` are the h^(t)."""
        padding = context.hidden_padding  # (N, B)
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if padding is None else ~padding
        halting = Halting(real, self.threshold, accumulation_dtype(x))
        inputs, hidden_states, values, losses, projected, output, weights = [], [], {}, {}, {}, 0.0, None
        for step in range(self.steps):
            before = x
            layer, seen = self.layer_and_context(step, context, memory, projected)
            x, attended, step_values, step_losses = layer(x, seen)
            p = self.halting_probability(before if self.halting_state == "input" else x)  # (N, B)
            weight = halting.weigh(p, force=self.variant == "graves" and step == self.steps - 1)
            output = self._add(output, weight.unsqueeze(-1), x)
            if attended is not None:
                weights = self._add(0.0 if weights is None else weights, weight.t().unsqueeze(-1), attended)
            collect(values, step_values)
            collect(losses, step_losses)
            if keep_hidden:
                inputs.append(before)
                hidden_states.append(x)
            # Later steps change nothing that is returned. In decoding, later positions attend to their states.
            returned = context.state is not None or keep_hidden or values or losses
            if not returned and not transformed() and not halting.running.any():
                break
        positions = real.numel() if context.padding_mask is None else context.padding_mask.numel()
        collect(losses, {"ponder": self._ponder(halting.remainder, real, positions)})
        weights = None if weights is None else weights.to(attended.dtype)
        output = output.to(x.dtype)
        return StackOutput(output, inputs, hidden_states, [output], weights, values, losses)

    def halting_probability(self, h: Tensor) -> Tensor:
        """h (N, B, C) -> p̂ (N, B), float32 or float64 also under autocast: its sum is compared with 1 − ε."""
        dtype = accumulation_dtype(h)
        with autocast_disabled(h.device):
            unit = self.halting_unit
            return F.linear(h.to(dtype), unit.weight.to(dtype), unit.bias.to(dtype)).squeeze(-1).sigmoid()

    def _add(self, so_far, weight: Tensor, value: Tensor) -> Tensor:
        """The output, or its attention weights, with those of one more step."""
        if self.variant == "dehghani":
            so_far = (1 - weight) * so_far
        return so_far + weight * value

    def _ponder(self, remainder: Tensor, real: Tensor, positions: int) -> Tensor:
        """The mean of R over the real columns, or over all ``positions`` of the batch."""
        total = remainder.sum()
        return total / real.sum().clamp(min=1) if self.ponder_padding == "exclude" else total / max(positions, 1)

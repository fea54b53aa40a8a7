"""The LSTM controller of Graves et al. 2016 and Csordás & Schmidhuber 2019.

    (i, f, o, g)^l = W^l [x_t; r_{t−1}; h_t^{l−1}; h_{t−1}^l] + b^l          without h^{l−1} in the first layer
    c_t^l = σ(f) ∘ c_{t−1}^l + σ(i) ∘ tanh(g),   h_t^l = σ(o) ∘ tanh(c_t^l)

h_t is that of all layers, and every layer sees x_t and r_{t−1}. The starts are those of the released code: W is uniform
in ±√(6 / (inputs + S)), where inputs counts all of a layer's. The rows of g are 5/3 as large. Biases are 0, those of f
1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_sg.modules.memory.controller import Controller, ControllerState, register_controller

CELL_GAIN = 5 / 3  # of tanh


@register_controller("lstm")
class LSTMController(Controller):
    """See the module's docstring. The rows of a layer's weights are i, f, o, g, each S."""

    paper = "Graves et al. 2016"

    def __init__(self, inputs: int, reads: int, dim: int, layers: int):
        super().__init__(inputs, reads, dim, layers)
        self.outputs = layers * dim
        # Of x_t for all layers, and of everything else for each.
        self.inputs = nn.Linear(inputs, layers * 4 * dim)
        seen = [reads + dim * (1 if layer == 0 else 2) for layer in range(layers)]
        self.recurrent = nn.ModuleList(nn.Linear(width, 4 * dim, bias=False) for width in seen)
        nn.init.zeros_(self.inputs.bias)
        with torch.no_grad():
            parts = zip(self.inputs.weight.chunk(layers), self.inputs.bias.chunk(layers), self.recurrent, strict=True)
            for of_x, bias, rest in parts:
                bound = math.sqrt(6 / (inputs + rest.in_features + dim))
                for weight in (of_x, rest.weight):
                    nn.init.uniform_(weight, -bound, bound)
                    weight[3 * dim :] *= CELL_GAIN
                bias[dim : 2 * dim] = 1.0

    def initial(self, x: Tensor) -> ControllerState:
        """h and c of all layers, each (B, layers · S), zeros."""
        return (x.new_zeros(x.size(0), self.outputs),) * 2

    def project(self, x: Tensor) -> Tensor:
        return self.inputs(x)

    def forward(self, projected: Tensor, reads: Tensor, state: ControllerState) -> tuple[Tensor, ControllerState]:
        hidden, cells, below = [], [], []
        dim = self.dim
        layers = zip(
            projected.chunk(self.layers, 1), state[0].chunk(self.layers, 1), state[1].chunk(self.layers, 1),
            self.recurrent, strict=True,
        )  # fmt: skip
        for of_x, h, c, recurrent in layers:
            gates = of_x + recurrent(torch.cat([reads, *below, h], 1).to(recurrent.weight.dtype))  # (B, 4 S)
            gates, g = gates.split([3 * dim, dim], 1)
            i, f, o = gates.sigmoid().chunk(3, 1)
            c = torch.addcmul(i * g.tanh(), f, c)
            h = o * c.tanh()
            hidden.append(h)
            cells.append(c)
            below = [h]
        h = hidden[0] if self.layers == 1 else torch.cat(hidden, 1)
        return h, (h, cells[0] if self.layers == 1 else torch.cat(cells, 1))

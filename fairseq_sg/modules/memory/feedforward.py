"""The feedforward controller (Csordás 2023, A.1: "an LSTM or feedforward network" of one or several layers).

    h_t^l = ReLU(W^l [x_t; r_{t−1}; h_t^{l−1}] + b^l)                        without h^{l−1} in the first layer

h_t is that of all layers. It has no state: the memory alone carries something from step to step. The thesis gives no
nonlinearity; this one is ours. Weights start Glorot uniform, biases at 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_sg.modules.memory.controller import Controller, ControllerState, register_controller


@register_controller("feedforward")
class FeedForwardController(Controller):
    """See the module's docstring."""

    paper = "Csordás 2023, A.1"

    def __init__(self, inputs: int, reads: int, dim: int, layers: int):
        super().__init__(inputs, reads, dim, layers)
        self.outputs = layers * dim
        self.inputs = nn.Linear(inputs, layers * dim)
        seen = [reads + dim * (layer > 0) for layer in range(layers)]
        self.above = nn.ModuleList(nn.Linear(width, dim, bias=False) for width in seen)
        nn.init.zeros_(self.inputs.bias)
        for of_x, rest in zip(self.inputs.weight.chunk(layers), self.above, strict=True):
            bound = math.sqrt(6 / (inputs + rest.in_features + dim))
            for weight in (of_x, rest.weight):
                nn.init.uniform_(weight, -bound, bound)

    def initial(self, x: Tensor) -> ControllerState:
        return ()

    def project(self, x: Tensor) -> Tensor:
        return self.inputs(x)

    def forward(self, projected: Tensor, reads: Tensor, state: ControllerState) -> tuple[Tensor, ControllerState]:
        hidden: list[Tensor] = []
        for of_x, layer in zip(projected.chunk(self.layers, 1), self.above, strict=True):
            seen = torch.cat([reads, *hidden[-1:]], 1)
            hidden.append(torch.relu(of_x + layer(seen.to(layer.weight.dtype))))
        return torch.cat(hidden, 1), ()

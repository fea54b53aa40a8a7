"""Absolute sinusoidal positions (Vaswani et al. 2017, section 3.5), added to the embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.modules.position.base import PRECISE, EmbeddedPosition, register_position, sinusoid, unbounded_sinusoid
from fairseq_sg.ops.transforms import transformed


@register_position("sinusoidal")
class SinusoidalPosition(EmbeddedPosition):
    """Nothing learned, no longest length."""

    paper = "Vaswani et al. 2017, 3.5"

    def __init__(self, dim: int):
        super().__init__(dim)
        self.register_buffer("table", sinusoid(torch.arange(128), dim), persistent=False)
        #: Shorter tables: recorded CUDA graphs go on reading them.
        self._earlier: list[Tensor] = []

    def forward(self, positions: Tensor, length: int) -> Tensor:
        if length > PRECISE:  # positions in a stream are unbounded, the table is not
            return unbounded_sinusoid(positions, self.dim).type_as(self.table)
        table = self.table
        if length > table.size(0):
            places = torch.arange(min(2 * length, PRECISE), device=table.device)
            table = sinusoid(places, self.dim).type_as(table)
            if not transformed():  # torch.func puts the shorter one back
                self._earlier.append(self.table)
                self.table = table
        return table[positions]

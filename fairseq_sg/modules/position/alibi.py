"""Attention with linear biases, ALiBi (Press et al. 2022, section 3): logits fall with distance.

    q_i k_jᵀ/√d − m_h |i − j|,    m_h = 2^{−8h/H} for the heads h = 1 … H

In a decoder only j ≤ i is seen, and this is the paper's −m_h (i − j). The paper has no encoder. Here the bias of an
encoder is symmetric, blind to direction; variants with other slopes to the right, or one direction a head, exist. The
bias is not divided by √d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.modules.position.base import AttentionPosition, register_position
from fairseq_sg.ops.precision import accurate


@register_position("alibi")
class AlibiPosition(AttentionPosition):
    """Nothing learned, no longest length."""

    paper = "Press et al. 2022"

    def __init__(self, dim: int, num_heads: int, *, causal: bool):
        super().__init__(dim, num_heads, causal=causal)
        self.register_buffer("slopes", torch.tensor(slopes(num_heads)), persistent=False)

    def bias(self, queries: int, keys: int, offset: int) -> Tensor:
        device = self.slopes.device
        i = torch.arange(offset, offset + queries, device=device)[:, None]
        j = torch.arange(keys, device=device)
        return -accurate(self.slopes)[:, None, None] * (i - j).abs()


def slopes(num_heads: int) -> list[float]:
    """m_1 … m_H. For H no power of two the paper's code takes those of the power P below, then every second of 2P."""
    power = 2 ** (num_heads.bit_length() - 1)
    below = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-8.0 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return below + between[: num_heads - power]

"""Rotary positions, RoPE (Su et al. 2021, section 3.2): queries and keys are rotated by their position.

    R_m x:  (x_{2i}, x_{2i+1}) ↦ (x_{2i} cos mθ_i − x_{2i+1} sin mθ_i,  x_{2i} sin mθ_i + x_{2i+1} cos mθ_i)
    θ_i = 10000^{−2i/d}

(eq. 15 and 34, i from 0). As (R_m q)ᵀ(R_n k) = qᵀ R_{n−m} k, the logits know positions by their distance alone.
Neighbouring features are a pair, as in the paper; some released models pair feature i with feature i + d/2, a
permutation of learned weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.position.base import AttentionPosition, angles, register_position
from fairseq_sg.ops.precision import accumulation_dtype


@register_position("rotary")
class RotaryPosition(AttentionPosition):
    """Nothing learned, no longest length.

    Raises:
        UsageError: an odd number of features, which leaves one without a pair.
    """

    paper = "Su et al. 2021, eq. 15, 19, 34"

    def __init__(self, dim: int, num_heads: int, *, causal: bool):
        super().__init__(dim, num_heads, causal=causal)
        if dim % 2:
            raise UsageError(
                f"--position rotary rotates pairs of features, and a head's queries have {dim}: choose another width "
                "or number of heads (--encoder-attention-heads, --decoder-attention-heads, in a language model "
                "--decoder-head-dim), or for linear attention --feature-map or --feature-dim"
            )

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        positions = torch.arange(offset, offset + x.size(-2), device=x.device)
        # Half precision cannot tell angles beyond a few turns apart; only the result is rounded to it.
        phases = angles(positions, self.dim, accumulation_dtype(x))
        cos, sin = phases.cos(), phases.sin()
        if torch.compiler.is_compiling():  # it makes no code for complex numbers
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)
        # (x_{2i} + j x_{2i+1}) e^{j mθ_i}: one product takes a seventh of the time on a CPU.
        # A copy, as complex numbers need even strides.
        aligned = x.to(phases.dtype, copy=True, memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(aligned.unflatten(-1, (-1, 2)))  # (…, N, d/2)
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).type_as(x)

"""Token embeddings with their scaling scheme, and absolute positions (Csordás 2023, section 4.2.3 and appendix C.4).

    H_i = a · E[w_i] + b · P_i,   then dropout

    --embedding-scaling   E starts as                        a      b
    token_up (TEU)        Glorot uniform over (rows, d)      √d     1
    none (NoS)            N(0, 1)                            1      1
    position_down (PED)   Kaiming normal, σ = √(2/d)         1      1/√d

The thesis writes σ = 1/√d for PED. The default here is its code's σ = √(2/d), which the published numbers come from.
Where the attention brings its own positions, the reference adds none, starts E Glorot uniform, and has neither scale
nor dropout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.position import EmbeddedPosition, real_positions

#: scheme -> (initialization, a, b), as functions of the width d
SCALINGS = {
    "token_up": ("glorot", lambda d: math.sqrt(d), lambda d: 1.0),
    "none": ("normal", lambda d: 1.0, lambda d: 1.0),
    "position_down": ("kaiming", lambda d: 1.0, lambda d: 1.0 / math.sqrt(d)),
}
CHOICES = ("auto", *SCALINGS)
_INITS = {
    "glorot": nn.init.xavier_uniform_,
    "normal": nn.init.normal_,
    "kaiming": nn.init.kaiming_normal_,
}


class TokenEmbedding(nn.Module):
    """a · E[w] + b · P, then dropout.

    Args:
        num_embeddings: rows of E.
        dim: d, the model's width.
        padding_idx: the row of padding, zero.
        scaling: ``token_up``, ``none`` or ``position_down``; ``auto`` is ``position_down``, or, where no positions are
            added, the reference's choice for relative models (Glorot uniform, a = 1).
        positions: P.
        dropout: dropout on the sum.
        tokens: E, where it is no table of learned rows.
    """

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        padding_idx: int,
        *,
        scaling: str,
        positions: EmbeddedPosition,
        dropout: float,
        tokens: nn.Module | None = None,
    ):
        super().__init__()
        init, token_scale, position_scale = _scaling(scaling, positions.gives != "nothing")
        self.dim = dim
        self.padding_idx = padding_idx
        self.token_scale = token_scale(dim)
        self.position_scale = position_scale(dim)
        self.tokens = nn.Embedding(num_embeddings, dim, padding_idx=padding_idx) if tokens is None else tokens
        if tokens is None:
            _INITS[init](self.tokens.weight)
            with torch.no_grad():
                self.tokens.weight[padding_idx] = 0.0
        self.positions = positions
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, last: bool = False, first: int = 0) -> Tensor:
        """tokens (B, N) -> (B, N, d); with ``last``, (B, 1, d) for the last token, at its position in the prefix.

        ``first`` is the position of the first real token.
        """
        length = first + tokens.size(1)
        positions = first + real_positions(tokens.eq(self.padding_idx))
        if last:
            tokens, positions = tokens[:, -1:], positions[:, -1:]
        x = self.tokens(tokens)
        if self.token_scale != 1.0:
            x = x * self.token_scale
        p = self.positions(positions, length)
        if p is not None:
            x = x + (p * self.position_scale).type_as(x)
        return self.dropout(x)


class VectorEmbedding(nn.Module):
    """W z + b + P, then dropout, for sequences of vectors. W and b start as PyTorch's.

    Args:
        inputs: n, the width of a vector.
        dim: d, the model's width.
        positions: P.
        dropout: dropout on the sum.
    """

    def __init__(self, inputs: int, dim: int, *, positions: EmbeddedPosition, dropout: float):
        super().__init__()
        self.projection = nn.Linear(inputs, dim)
        self.positions = positions
        self.dropout = Dropout(dropout)

    def forward(self, z: Tensor) -> Tensor:
        """z (B, N, n), without padding -> (B, N, d)."""
        x = self.projection(z).type_as(self.projection.weight)  # the stream of states stays float32 under autocast
        numbers = torch.arange(z.size(1), device=z.device).expand(z.shape[:2])
        p = self.positions(numbers, z.size(1))
        return self.dropout(x if p is None else x + p.type_as(x))


def _scaling(scaling: str, has_positions: bool):
    ranges.check_value("embedding_scaling", scaling, {"choices": CHOICES})
    if scaling == "auto":
        if not has_positions:
            return "glorot", lambda d: 1.0, lambda d: 1.0
        scaling = "position_down"
    return SCALINGS[scaling]

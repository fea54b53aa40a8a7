"""The keys that a query sees: counts, and similarities without the others.

Causal queries are the last N of the M keys: query n stands at position ``offset`` + n among the keys, and sees the keys
up to its own position; with a window W, the last W of them. `ops.torch_attention.hidden_keys` is the mask of the
others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_sg.ops.precision import accurate, autocast_disabled


def count_visible(
    queries: int,
    keys: int,
    key_padding_mask: Tensor | None,
    causal: bool,
    offset: int,
    device: torch.device,
    window: int = 0,
) -> Tensor:
    """The number of keys that each query sees, int64, broadcastable to (B, 1, N, 1).

    It is 1 for a query that sees none: sums over keys are 0 there, and quotients and logarithms stay finite.
    """
    if key_padding_mask is None:
        if not causal:
            return torch.full((1, 1, 1, 1), keys, device=device)
        seen = torch.arange(offset + 1, offset + queries + 1, device=device)
        return (seen.clamp(max=window) if window else seen)[None, None, :, None]
    real = (~key_padding_mask).long()  # (B, M)
    if causal:
        before = F.pad(real.cumsum(1), (1, 0))  # real keys before each position, (B, M + 1)
        last = torch.arange(offset + 1, offset + queries + 1, device=device)
        seen = before[:, last] - (before[:, (last - window).clamp(min=0)] if window else 0)
    else:
        seen = real.sum(1, keepdim=True)
    return seen.clamp(min=1)[:, None, :, None]


def products(q: Tensor, k: Tensor) -> Tensor:
    """q_n·k_i, (B, H, N, M) in float32 or float64, also under autocast."""
    with autocast_disabled(q.device):
        return accurate(q) @ accurate(k).transpose(-1, -2)


def zero_hidden(similarity: Tensor, key_padding_mask: Tensor | None, causal: bool) -> Tensor:
    """similarity (B, H, N, M), with 0 where a query does not see a key."""
    if causal:
        similarity = similarity.tril(similarity.size(-1) - similarity.size(-2))
    if key_padding_mask is None:
        return similarity
    return similarity.masked_fill(key_padding_mask[:, None, None, :], 0.0)

"""The keys that a query sees: counts, and similarities without the others.

Causal queries are the last N of the M keys: query n stands at position ``offset`` + n among the keys, and sees the keys
up to its own position. With a window W, a query sees the keys less than W away. `ops.torch_attention.hidden_keys` is
the mask of the others.
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
    if not causal and not window:
        if key_padding_mask is None:
            return torch.full((1, 1, 1, 1), keys, device=device)
        return (~key_padding_mask).sum(1).clamp(min=1)[:, None, None, None]
    # A query sees the keys from first to end − 1.
    end = torch.arange(offset + 1, offset + queries + 1, device=device)
    first = (end - window).clamp(min=0) if window else torch.zeros_like(end)
    if not causal:
        end = (end + window - 1).clamp(max=keys)
    if key_padding_mask is None:
        return (end - first)[None, None, :, None]
    before = F.pad((~key_padding_mask).long().cumsum(1), (1, 0))  # real keys before each position, (B, M + 1)
    return (before[:, end] - before[:, first]).clamp(min=1)[:, None, :, None]


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

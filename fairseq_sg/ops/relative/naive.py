"""Relative logits by looking up, for every pair of query and key, the positional key of their distance."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_logits_naive(q: Tensor, p: Tensor) -> Tensor:
    """See `fairseq_sg.ops.relative_logits`; memory is O(H N M D)."""
    queries = q.shape[2]
    keys = p.shape[1] - queries + 1
    n = torch.arange(queries, device=q.device)[:, None]
    m = torch.arange(keys, device=q.device)[None, :]
    positional_keys = p[:, m - n + queries - 1]  # (H, N, M, D)
    return torch.einsum("bhnd,hnmd->bhnm", q, positional_keys)

"""Weights of geometric attention as their equations stand, with the set S_ij of every pair written out."""

from __future__ import annotations

import torch
from torch import Tensor


def geometric_attention_naive(logits: Tensor, offset: int) -> Tensor:
    """See `fairseq_sg.ops.geometric_attention`; logits are −∞ where P = 0. Time and memory are O(B H N M²)."""
    keys = logits.shape[3]
    p, q = logits.sigmoid(), (-logits).sigmoid()  # P and 1 − P, both to full precision
    j = torch.arange(keys, device=logits.device)[:, None]
    k = torch.arange(keys, device=logits.device)[None, :]
    rows = []
    for n in range(logits.shape[2]):
        i = offset + n
        closer = torch.where(j > i, (i - k).abs() < (i - j).abs(), (i - k).abs() <= (i - j).abs())
        closer &= (k != i) & (k != j)  # row j: S_ij
        rows.append(p[:, :, n] * torch.where(closer, q[:, :, n, None, :], 1.0).prod(dim=-1))
    return torch.stack(rows, dim=2)

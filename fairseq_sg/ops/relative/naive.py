"""Relative logits, and attention with them: the positional key of every pair of query and key is looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.torch_attention import hidden_keys, visible_softmax


def relative_logits_naive(q: Tensor, p: Tensor) -> Tensor:
    """See `fairseq_sg.ops.relative_logits`; memory is O(H N M D)."""
    queries = q.shape[2]
    keys = p.shape[1] - queries + 1
    n = torch.arange(queries, device=q.device)[:, None]
    m = torch.arange(keys, device=q.device)[None, :]
    positional_keys = p[:, m - n + queries - 1]  # (H, N, M, D)
    return torch.einsum("bhnd,hnmd->bhnm", q, positional_keys)


def relative_attention_naive(
    q_content: Tensor,
    q_position: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See `fairseq_sg.ops.relative_attention`; memory is O(H N M D + B H N M)."""
    logits = (q_content @ k.transpose(-1, -2) + relative_logits_naive(q_position, p)) * scale
    queries, keys = logits.shape[2:]
    hidden = hidden_keys(queries, keys, key_padding_mask, causal, keys - queries, logits.device)
    return torch.dropout(visible_softmax(logits, hidden), dropout_p, train=True) @ v

"""Relative logits by the shift trick of Transformer-XL (Dai et al., 2019, appendix B), as a view without a copy.

Every query is multiplied with the positional keys of all L = N + M − 1 distances. Row n of this product holds L
entries, of which its M logits start at column N − 1 − n. For N = M = 3, each entry written as its distance j − i:

    product                     logits
    n=0   -2  -1 [ 0   1   2]         0   1   2
    n=1   -2 [-1   0   1]  2         -1   0   1
    n=2  [-2  -1   0]  1   2         -2  -1   0

In row-major order the logit (n, m) lies at n L + m + N − 1 − n = n (L − 1) + m + (N − 1): the logits are the product
read with row stride L − 1 from element N − 1 on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fairseq_sg.ops.torch_attention import hidden_keys, masked_attention

#: On a GPU, the parts of the sum that is the gradient of fewer than so many numbers.
PARTS, FEW = 32, 2**18


def relative_logits_shift(q: Tensor, p: Tensor) -> Tensor:
    """See `fairseq_sg.ops.relative_logits`; memory is O(B H N L)."""
    batch, heads, queries, _ = q.shape
    distances = p.shape[1]
    shape = (batch, heads, queries, distances - queries + 1)
    strides = (queries * distances, batch * queries * distances, distances - 1, 1)
    return distance_product(q, p).as_strided(shape, strides, max(queries - 1, 0))


def distance_product(q: Tensor, p: Tensor, parts: int | None = None) -> Tensor:
    """Every query times every distance's positional key: (B, H, N, L), rows dense, heads first in memory.

    The gradient of p is a sum over B N queries. On a GPU a small one is made in ``parts``, which divide B: a head's few
    numbers, each a long sum, would keep one processor busy.
    """
    (batch, heads, queries, dim), distances = q.shape, p.shape[1]
    if parts is None:
        wanted = p.requires_grad and torch.is_grad_enabled()
        parts = PARTS if wanted and q.is_cuda and p.numel() < FEW and batch % PARTS == 0 else 1
    # Heads first: one product a head over the whole batch, so that p need not be repeated for every sequence.
    rows = q.transpose(0, 1).reshape(heads * parts, batch // parts * queries, dim)  # (H P, B N / P, D)
    keys = p.transpose(1, 2)  # (H, D, L)
    if parts > 1:
        keys = keys.unsqueeze(1).expand(-1, parts, -1, -1).flatten(0, 1)  # (H P, D, L)
    return torch.bmm(rows, keys).view(heads, batch, queries, distances).transpose(0, 1)


def relative_attention_shift(
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
    """See `fairseq_sg.ops.relative_attention`: the relative logits are a bias of torch's attention."""
    bias = relative_logits_shift(q_position * scale, p)  # (B, H, N, M)
    queries, keys = bias.shape[2:]
    hidden = hidden_keys(queries, keys, key_padding_mask, causal, keys - queries, bias.device)
    if hidden is not None:
        bias = bias.masked_fill(hidden, -math.inf)
    return masked_attention(q_content, k, v, bias, scale=scale, dropout_p=dropout_p)

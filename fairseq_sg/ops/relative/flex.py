"""Relative attention by `torch.nn.attention.flex_attention`, which computes the logits of a tile where it needs them.

Its score modification adds to the scaled content logit (n, m) the entry m − n + N − 1 of row n of the product of
queries and distances (``shift.py``), so there is no copy of the relative logits in the order of the keys. A block mask
tells which tiles no query sees. On a GPU it is compiled: at the first call, and again for other shapes, until it takes
any length. Elsewhere it forms all logits, and is no faster than the other implementations.

The gradient of the product is added up atomically on a GPU, so a run need not repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fairseq_sg.ops.relative.shift import distance_product


def relative_attention_flex(
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
    """See `fairseq_sg.ops.relative_attention`; memory is O(B H N L) on a GPU. Raises ValueError for dropout."""
    if dropout_p:
        raise ValueError("relative_attention has no dropout in 'flex': choose another implementation")
    product = distance_product(q_position * scale, p)  # (B, H, N, L)
    (batch, _, queries, _), keys = product.shape, k.shape[2]
    attention, make_mask = _functions(q_content.is_cuda)

    def add_relative_logit(logit: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return logit + product[b, h, n, m - n + queries - 1]

    def sees(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        visible = m <= n + keys - queries if causal else m >= 0
        return visible if key_padding_mask is None else visible & ~key_padding_mask[b, m]

    block_mask = None
    if causal or key_padding_mask is not None:
        of_batch = None if key_padding_mask is None else batch
        block_mask = make_mask(sees, of_batch, None, queries, keys, device=product.device)
    return attention(q_content, k, v, score_mod=add_relative_logit, block_mask=block_mask, scale=scale)


@cache
def _functions(compiled: bool) -> tuple[Callable, Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functions = flex_attention, create_block_mask
    return tuple(torch.compile(function) for function in functions) if compiled else functions

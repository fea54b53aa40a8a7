"""torch's softmax attention, with the kernels that suit a GPU.

- A mask or a bias never goes to cuDNN, torch's choice on Hopper in half precision from 2.11 on. It takes a bias of
  another dtype for its own, and has gradients that are NaN at some lengths (pytorch/pytorch #191612, #196678).
- Few queries and keys leave the tiles of a fused kernel, 64 × 64 in float32, almost empty. In parts (logits, softmax,
  product) the whole training step of SCAN is 1.26 times as fast (docs/speed.md).

Transforms of ``torch.func`` take it in parts on every device: fused kernels have no rules for all of them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fairseq_sg.ops.precision import as_autocast, autocast_disabled
from fairseq_sg.ops.transforms import transformed

WITHOUT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
IN_PARTS = [SDPBackend.MATH]
#: Most queries and keys of attention in parts. Measured with 27 and 11.
FEW = 32


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, (B, H, N, E); of a boolean mask, True is what is seen.

    With ``is_causal`` and no mask, query n sees the keys up to n.
    """
    allowed = kernels(q, k, mask is not None)
    autocast = nullcontext()
    if transformed():
        # Autocast would cast the parts one by one, some of them only in the derivative.
        q, k, v = as_autocast(q, k, v)
        if mask is not None and mask.is_floating_point():
            (mask,) = as_autocast(mask)
        autocast = autocast_disabled(q.device)
    with autocast, sdpa_kernel(allowed) if allowed else nullcontext():
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )


def hidden_keys(
    queries: int,
    keys: int,
    key_padding_mask: Tensor | None,
    causal: bool,
    offset: int,
    device: torch.device,
    window: int = 0,
) -> Tensor | None:
    """The keys that each query must not see: bool, broadcastable to (B, 1, N, M), or None where all are seen.

    Query n stands at position ``offset`` + n among the keys. If causal, it sees the keys up to there. With a window W,
    it sees those less than W away.
    """
    hidden = None if key_padding_mask is None else key_padding_mask[:, None, None, :]  # (B, 1, 1, M)
    if causal and offset + 1 < keys:
        future = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(offset + 1)  # (N, M)
        hidden = future if hidden is None else hidden | future
    if 0 < window < keys:
        pairs = torch.ones(queries, keys, dtype=torch.bool, device=device)
        far = pairs.tril(offset - window)  # (N, M)
        if not causal:
            far |= pairs.triu(offset + window)
        hidden = far if hidden is None else hidden | far
    return hidden


def visible_softmax(logits: Tensor, hidden: Tensor | None) -> Tensor:
    """The weights of the keys that are not hidden; zeros rather than 0/0 for a query that sees none."""
    if hidden is None:
        return logits.softmax(-1)
    return logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)


def kernels(q: Tensor, k: Tensor, masked: bool) -> list[SDPBackend]:
    """The kernels that torch may choose; empty for all."""
    if transformed():
        return IN_PARTS
    if not q.is_cuda:
        return []
    if q.dtype == torch.float32 and max(q.size(-2), k.size(-2)) <= FEW:
        return IN_PARTS
    return WITHOUT_CUDNN if masked else []

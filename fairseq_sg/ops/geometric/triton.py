"""Geometric attention in Triton: a row in the order in which its query visits the keys, as one running product.

With the keys of a row numbered by the visit, A_t = P_t S_t, S_t = Π_{s<t} (1 − P_s) and

    ∂/∂ℓ_t = G_t A_t − P_t Σ_{s≥t} G_s A_s,

as in ``scan.py``: nothing is subtracted and nothing divided. The key of a visit is computed
where it is loaded, so there are no tables of order and rank, and padding, the diagonal and what lies ahead are never
read. Logits are all that is kept for the backward pass, which computes the weights again; besides logits, weights and
their gradients nothing of size N×M is made. Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.geometric import MOST_KEYS
from fairseq_sg.ops.triton_support import launch, mask_bytes, power_of_two


def geometric_attention_triton(logits: Tensor, key_padding_mask: Tensor | None, causal: bool, offset: int) -> Tensor:
    """See `fairseq_sg.ops.geometric_attention` for at most `MOST_KEYS` keys."""
    return _GeometricAttention.apply(logits, key_padding_mask, causal, offset)


class _GeometricAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, key_padding_mask: Tensor | None, causal: bool, offset: int) -> Tensor:
        mask = mask_bytes(key_padding_mask)
        weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _launch(_weights_kernel, logits, mask, (weights,), causal, offset)
        ctx.save_for_backward(logits, mask)
        ctx.causal, ctx.offset = causal, offset
        return weights

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("geometric_attention")
        logits, mask = ctx.saved_tensors
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _launch(_grad_kernel, logits, mask, (grad_logits, grad, *grad.stride()), ctx.causal, ctx.offset)
        return grad_logits, None, None, None


def _launch(kernel, logits: Tensor, mask: Tensor | None, others: tuple, causal: bool, offset: int) -> None:
    batch, heads, queries, keys = logits.shape
    rows, visits = batch * heads * queries, power_of_two(keys, 16, MOST_KEYS)
    block = max(1024 // visits, 1)
    launch(
        kernel,
        (triton.cdiv(rows, block),),
        logits,
        mask,
        *others,
        *logits.stride(),
        heads,
        rows,
        queries,
        keys,
        offset,
        CAUSAL=causal,
        ROWS=block,
        VISITS=visits,
        num_warps=4 if visits <= 2048 else 8 if visits <= 4096 else 16,
    )


@triton.jit
def _visited(visit, i, keys):
    """The key of a visit from i: i itself, i + 1, i − 1, i + 2, …; once a side is used up, the other's follow."""
    last = keys - 1
    shorter = tl.minimum(i, last - i)
    distance = (visit + 1) // 2
    of_both = tl.where(visit % 2 == 1, i + distance, i - distance)
    of_one = tl.where(last - i > i, i + (visit - shorter), i - (visit - shorter))
    return tl.where(visit <= 2 * shorter, of_both, of_one)


@triton.jit
def _load(logits, mask, batch, visit, i, present, keys, by_key, CAUSAL: tl.constexpr):
    """Logits in the order of the visits, −∞ where P = 0, and the keys."""
    key = _visited(visit, i, keys)
    seen = present & (visit >= 0) & (visit < keys)
    seen = seen & (key < i) if CAUSAL else seen & (key != i)
    if mask is not None:
        seen = seen & (tl.load(mask + batch * keys + key, mask=seen, other=1) == 0)
    logit = tl.load(logits + key.to(tl.int64) * by_key, mask=seen, other=float("-inf")).to(tl.float32)
    return logit, key


@triton.jit
def _sigmoid(x):
    """To full precision also far from 0, and in a long product: the plain quotient is rounded less well."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _weights(logits, mask, batch, visit, i, present, keys, by_key, CAUSAL: tl.constexpr):
    """P, A and the keys in the order of the visits."""
    logit, key = _load(logits, mask, batch, visit, i, present, keys, by_key, CAUSAL)
    # Logits of the visit before, so that the running product is without the key itself.
    before, _ = _load(logits, mask, batch, visit - 1, i, present, keys, by_key, CAUSAL)
    p = _sigmoid(logit)
    return p, p * tl.cumprod(_sigmoid(-before), axis=1), key


@triton.jit(do_not_specialize=["rows", "queries", "keys", "offset"])
def _weights_kernel(
    logits,
    mask,
    weights,
    by_batch,
    by_head,
    by_query,
    by_key,
    heads,
    rows,
    queries,
    keys,
    offset,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    VISITS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair, query = row // queries, row % queries
    batch = pair // heads
    logits += batch * by_batch + (pair % heads) * by_head + query * by_query
    visit = tl.arange(0, VISITS)[None, :]
    present = row < rows
    i = (query + offset).to(tl.int32)
    _, a, key = _weights(logits, mask, batch, visit, i, present, keys, by_key, CAUSAL)
    tl.store(weights + row * keys + key, a, mask=present & (visit < keys))


@triton.jit(do_not_specialize=["rows", "queries", "keys", "offset"])
def _grad_kernel(
    logits,
    mask,
    grad_logits,
    grad,
    grad_by_batch,
    grad_by_head,
    grad_by_query,
    grad_by_key,
    by_batch,
    by_head,
    by_query,
    by_key,
    heads,
    rows,
    queries,
    keys,
    offset,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    VISITS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair, query = row // queries, row % queries
    batch = pair // heads
    logits += batch * by_batch + (pair % heads) * by_head + query * by_query
    grad += batch * grad_by_batch + (pair % heads) * grad_by_head + query * grad_by_query
    visit = tl.arange(0, VISITS)[None, :]
    present = row < rows
    i = (query + offset).to(tl.int32)
    p, a, key = _weights(logits, mask, batch, visit, i, present, keys, by_key, CAUSAL)
    inside = present & (visit < keys)
    g = tl.load(grad + key.to(tl.int64) * grad_by_key, mask=inside, other=0.0).to(tl.float32)
    product = g * a
    result = product - p * tl.cumsum(product, axis=1, reverse=True)
    tl.store(grad_logits + row * keys + key, result, mask=inside)

"""Geometric attention by one running product a row, with its gradient in closed form.

The order in which query i visits the keys is a permutation, so with the row in this order, t counting the visits,

    A_t = P_t S_t,   S_t = Π_{s<t} (1 − P_s),

and the products of a row are one cumulative product. Published code takes sums of logarithms instead and gets each
window as the difference of two sums; here nothing is subtracted: 1 − P is σ(−logit), which has full precision however
close to 1 P is, and S_t is too small to be represented only where A_t is.

With d(1 − P_s)/dℓ_s = −P_s (1 − P_s) the gradient needs no division by a 1 − P that may be 0: for a loss with
derivatives G with respect to A,

    ∂/∂ℓ_t = G_t A_t − P_t Σ_{s≥t} G_s A_s,

a sum over the row taken from the farthest key inwards. Besides the weights only P is kept for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def geometric_attention_scan(logits: Tensor, offset: int) -> Tensor:
    """See `fairseq_sg.ops.geometric_attention`; logits are −∞ where P = 0. Time and memory are O(B H N M)."""
    return _GeometricAttention.apply(logits, offset)


class _GeometricAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, offset: int) -> Tensor:
        order, rank = nearest_first(*logits.shape[2:], offset, logits.device)
        survived = _take((-logits).sigmoid(), order).cumprod(dim=-1)
        p = logits.sigmoid()
        # The key of rank t is reached past the ranks below t; rank 0 is the query itself, where P = 0.
        weights = p * _take(survived, (rank - 1).clamp_min(0))
        ctx.save_for_backward(p, weights)
        ctx.offset = offset
        return weights

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        # With torch's `once_differentiable` a second derivative would be 0 without a word where grad is a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "geometric_attention has no second derivative (create_graph=True); implementation='naive' has one"
            )
        p, weights = ctx.saved_tensors
        order, rank = nearest_first(*p.shape[2:], ctx.offset, p.device)
        product = grad * weights
        beyond = _take(product, order.flip(-1)).cumsum(dim=-1)
        return torch.addcmul(product, p, _take(beyond, p.shape[3] - 1 - rank), value=-1.0), None


def nearest_first(queries: int, keys: int, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The order in which query n, at position offset + n, visits the keys, and its inverse; both (N, M), int64.

    order[n, t] is the key of rank t and rank[n, m] the rank of key m: 0 is the query itself, then one to the right, one
    to the left, and so on. Once a side is used up, the other's keys follow one another. Five queries and keys have

        rank   0 1 2 3 4      order  0 1 2 3 4
               2 0 1 3 4             1 2 0 3 4
               4 2 0 1 3             2 3 1 4 0
               4 3 2 0 1             3 4 2 1 0
               4 3 2 1 0             4 3 2 1 0
    """
    i = torch.arange(offset, offset + queries, device=device)[:, None]
    j = torch.arange(keys, device=device)
    distance = (j - i).abs()
    # As many keys on its own side are as near, and of the other side those that are nearer (or as near, on the right).
    of_right = distance + torch.minimum(distance - 1, i)
    of_left = distance + torch.minimum(distance, keys - 1 - i)
    rank = torch.where(j > i, of_right, of_left).masked_fill(j == i, 0)
    order = torch.empty_like(rank).scatter_(1, rank, j.expand_as(rank))
    return order, rank


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[b, h, n, index[n, t]], (B, H, N, M)."""
    # As columns of a matrix with a row for each map this takes half the time of `gather` on a CPU.
    start_of_row = torch.arange(index.shape[0], device=index.device)[:, None] * index.shape[1]
    return x.reshape(-1, index.numel()).index_select(1, (start_of_row + index).flatten()).view(x.shape)

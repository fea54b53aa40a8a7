"""Geometric attention by one running product a row, with its gradient in closed form.

The order in which query i visits the keys is a permutation, so with the row in this order, t counting the visits,

    A_t = P_t S_t,   S_t = Π_{s<t} (1 − P_s),

and the products of a row are one cumulative product. Published code takes sums of logarithms instead and gets each
window as the difference of two sums; here nothing is subtracted: 1 − P is σ(−logit), which has full precision however
close to 1 P is, and S_t is too small to be represented only where A_t is.

With d(1 − P_s)/dℓ_s = −P_s (1 − P_s) the gradient needs no division by a 1 − P that may be 0: for a loss with
derivatives G with respect to A,

    ∂/∂ℓ_t = G_t A_t − P_t Σ_{s≥t} G_s A_s,

a sum over the row taken from the farthest key inwards. Besides the weights only P is kept for it, and the order of one
map. Where P = 0 because a key is hidden, both terms are 0: the backward pass needs no mask.

On a CPU the maps are taken a few at a time, so that intermediate results stay in the cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative

# Numbers of a block of maps. On one CPU thread, 40,000 to 200,000 took equally long, and 640,000 a quarter longer.
BLOCK = 1 << 17


def geometric_attention_scan(logits: Tensor, hidden: Tensor | None, offset: int) -> Tensor:
    """See `fairseq_sg.ops.geometric_attention`. Time and memory are O(B H N M).

    hidden: bool, broadcastable to the logits, True where P = 0 beside the diagonal; None for nowhere.
    """
    return _GeometricAttention.apply(logits, hidden, offset)


class _GeometricAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, hidden: Tensor | None, offset: int) -> Tensor:
        order, rank = nearest_first(*logits.shape[2:], offset, logits.device)
        # The key of rank t is reached past the ranks below t; rank 0 is the query itself, where P = 0.
        in_order, at_rank, before = _columns(order), _columns(rank), _columns((rank - 1).clamp_min(0))
        # As columns of a matrix with a row for each map, gathering takes half the time of `gather` on a CPU.
        visible = logits.clone(memory_format=torch.contiguous_format)
        if hidden is not None:
            visible.masked_fill_(hidden, -math.inf)
        visible.diagonal(offset, -2, -1).fill_(-math.inf)
        weights = visible.view(-1, in_order.numel())  # logits, until they are used up
        p = torch.empty_like(weights)
        for block, p_block in zip(_blocks(weights), _blocks(p), strict=True):
            torch.sigmoid(block, out=p_block)
            survived = block.neg_().sigmoid_().index_select(1, in_order)
            survived.view(-1, logits.shape[3]).cumprod_(dim=-1)
            torch.index_select(survived, 1, before, out=block).mul_(p_block)
        ctx.save_for_backward(p, weights, in_order, at_rank)
        ctx.shape = logits.shape
        return weights.view(logits.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("geometric_attention")
        p, weights, in_order, at_rank = ctx.saved_tensors
        # From the last number of the map to the first, so within each row from the farthest key to the query.
        inwards, beyond = in_order.flip(0), in_order.numel() - 1 - at_rank
        product = torch.empty_like(weights)
        blocks = (_blocks(x) for x in (grad.reshape(weights.shape), weights, p, product))
        for grad_block, weights_block, p_block, out in zip(*blocks, strict=True):
            torch.mul(grad_block, weights_block, out=out)
            sums = out.index_select(1, inwards)
            sums.view(-1, ctx.shape[3]).cumsum_(dim=-1)
            out.addcmul_(p_block, sums.index_select(1, beyond), value=-1.0)
        return product.view(ctx.shape), None, None


def _columns(index: Tensor) -> Tensor:
    """Where index[n, t], of keys, stands in a map that is one row: (N M,), int32, as some is kept for the gradient."""
    start_of_row = torch.arange(0, index.numel(), index.shape[1], device=index.device)[:, None]
    return (start_of_row + index).flatten().int()


def _blocks(maps: Tensor) -> tuple[Tensor, ...]:
    """Parts of (B H, N M) of about `BLOCK` numbers, on a GPU all at once."""
    if maps.device.type != "cpu" or maps.numel() <= BLOCK:
        return (maps,)
    return maps.split(max(1, BLOCK // maps.shape[1]))


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
    right = j > i
    distance = (j - i).abs()
    # As many keys on its own side are as near, and of the other side those that are nearer (or as near, on the right).
    rank = distance + torch.minimum(distance - right.long(), torch.where(right, i, keys - 1 - i))
    order = torch.empty_like(rank).scatter_(1, rank, j.expand_as(rank))
    return order, rank

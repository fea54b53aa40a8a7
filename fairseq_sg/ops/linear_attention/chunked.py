"""Causal linear attention in plain torch, O(N) in time and memory.

The sequence is cut into chunks. Within a chunk the masked scores A_ni = q_n·k_i are formed, as in softmax attention;
everything before the chunk enters through its state S = Σ k_i v_iᵀ. The normalizer z = Σ k_i needs no separate sums: v
has one more column of ones, whose state is z. For a chunk with queries Q, keys K and such values V,

    Y = A V + Q S,   A = tril(Q Kᵀ),

whose last column is the denominator: out = Y_{1…E} / (Y_{E+1} + eps). The gradient is as short, and A and S are kept
for it. With ∂out from outside, ∂Y has the columns ∂out / (Y_{E+1} + eps) and, last, −Σ_e of these times out; then

    ∂A = tril(∂Y Vᵀ),   ∂Q = ∂A K + ∂Y Sᵀ,   ∂K = ∂Aᵀ Q + V ∂Sᵀ,   ∂V = Aᵀ ∂Y + K ∂S,

where S sums Kᵀ V over the chunks before, and ∂S sums Qᵀ ∂Y over those after this one.

Scores cost N² (F + E) multiplications in one chunk, and N (C (F + E) + 2 F E) in chunks of length C. On one CPU thread,
forward and backward, the two break even a little above the length where these counts do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.linear_attention.full import State, join, linear_attention_full, split, step
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype
from fairseq_sg.ops.transforms import plain, transformed

# Up to this length causal attention takes one chunk even where several would save multiplications: products of very
# small matrices cost more than their multiplications, and one chunk needs half as many.
SHORT = 48

# Up to this number of chunks, prefix sums are one matrix product, which is the faster way; its cost is quadratic.
FEW_CHUNKS = 64


def linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    state: State | None,
    return_state: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, State | None]:
    """See `fairseq_sg.ops.linear_attention`; without `causal` there are no chunks, but two products of matrices."""
    out_dtype = v.dtype
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    q, k, v = to_accumulation_dtype(q, k, v)
    if state is not None:
        state = (state[0].to(v.dtype), state[1].to(v.dtype))

    if state is not None and q.shape[2] == k.shape[2] == 1:
        out, new_state = step(q, k, v, state, normalize, eps)
    elif causal and q.shape[2] > 0:
        out, new_state = _through_chunks(q, k, v, state, return_state, normalize, eps)
    else:
        out, new_state = linear_attention_full(q, k, v, state, return_state, normalize, eps)
    return out.to(out_dtype), new_state if return_state else None


def chunk_count(length: int, features: int, width: int) -> int:
    """The number of chunks for a sequence, F features and values of dimension E.

    Per position the scores cost C (F + E) multiplications and the states 2 F E. The N / C states take the memory. Of
    C = 16, 24, 32, 48 and 64, on one CPU thread, forward and backward, 16 was the fastest at F = 8 and, up to a length
    of 256, at F = 16; above, 32 was faster by little. At F = 32 it was 32. At F = 64, 32 and 64 were equal, and 64
    holds half the states.
    """
    chunk = 16 if features <= 16 else 32 if features <= 32 else 64
    through_scores = length * (features + width)
    through_chunks = chunk * (features + width) + 2 * features * width
    return 1 if length <= SHORT or through_scores <= through_chunks else -(-length // chunk)


def _through_chunks(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, return_state: bool, normalize: bool, eps: float
) -> tuple[Tensor, State | None]:
    batch, heads, length, width = v.shape
    count = chunk_count(length, q.shape[3], width)
    q, k, v = _cut(q, count), _cut(k, count), _cut(v, count)  # (B H T, C, ·)
    state = None if state is None else join(state).flatten(0, 1)  # (B H, F, E + 1)
    if plain():
        # torch differentiates it, and knows no products into a part of a buffer there.
        *_, out, _, after = _attend(q, k, v, state, count, return_state, normalize, eps)
    else:
        out, after = _CausalAttention.apply(q, k, v, state, count, return_state, normalize, eps)
    out = out.view(batch, heads, count * out.shape[1], width)  # (B, H, T C, E)
    if after is not None:
        after = split(after.view(batch, heads, *after.shape[1:]))  # (B, H, F, E), (B, H, F)
    return out if out.shape[2] == length else out[:, :, :length], after


def _cut(x: Tensor, count: int) -> Tensor:
    """(B, H, N, D) -> (B H T, C, D); chunks of equal length leave fewer than T positions to fill up with zeros."""
    chunk = -(-x.shape[2] // count)
    tail = count * chunk - x.shape[2]
    return (F.pad(x, (0, 0, 0, tail)) if tail else x).reshape(-1, chunk, x.shape[3])


class _Chunks(NamedTuple):
    """The output, and the tensors that the gradient is made of.

    v: (G, C, E + 1), the values with their column of ones. scores: A (G, C, C). before: S (G, F, E + 1) before each
    chunk; None for zero. out: (G, C, E). inverse: 1 / (Y_{E+1} + eps), (G, C, 1); None without denominators. after:
    S (B H, F, E + 1) after the last chunk; None where it is not asked for.
    """

    v: Tensor
    scores: Tensor
    before: Tensor | None
    out: Tensor
    inverse: Tensor | None
    after: Tensor | None


class _CausalAttention(torch.autograd.Function):
    """T chunks q, k (G, C, F) and v (G, C, E), G = B H T, state (B H, F, E + 1) or None -> out and state after them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, *options
    ) -> tuple[Tensor, Tensor | None]:
        chunks = _attend(q, k, v, state, *options)
        ctx.save_for_backward(q, k, v, state, *chunks[:-1])
        ctx.set_materialize_grads(False)
        ctx.options = options
        return chunks.out, chunks.after

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_attention")
        q, k, v, state, *kept = ctx.saved_tensors
        with autocast_disabled(q.device):
            gradients = _gradients(q, k, _Chunks(*kept, None), ctx.options[0], state is not None, *grads)
        return *gradients, None, None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, count: int, return_state: bool, normalize: bool, eps: float
) -> _Chunks:
    """The forward pass; autograd can go through it, too."""
    v = torch.cat((v, v.new_ones(*v.shape[:2], 1)), dim=-1)  # (G, C, E + 1)
    before, after = _states(k, v, count, state, return_state)
    # vmap has no rules for the second ones.
    tril, baddbmm = (Tensor.tril, Tensor.baddbmm) if transformed() else (Tensor.tril_, Tensor.baddbmm_)
    scores = tril(torch.bmm(q, k.transpose(1, 2)))  # (G, C, C)
    out = torch.bmm(scores, v)  # (G, C, E + 1)
    if before is not None:
        out = baddbmm(out, q, before)
    out, denominator = out.split((out.shape[-1] - 1, 1), dim=-1)  # (G, C, E), (G, C, 1)
    inverse = (denominator + eps).reciprocal() if normalize else None
    out = out * inverse if normalize else out.contiguous()
    return _Chunks(v, scores, before, out, inverse, after)


def _gradients(
    q: Tensor,
    k: Tensor,
    chunks: _Chunks,
    count: int,
    with_state: bool,
    grad_out: Tensor | None,
    grad_after: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """∂q, ∂k, ∂v and, with `with_state`, the derivative with respect to the state before the first chunk."""
    v, scores, before, out, inverse, _ = chunks
    width = out.shape[-1]
    if grad_out is None:
        grad = torch.zeros_like(v)  # ∂Y
    elif inverse is None:
        grad = F.pad(grad_out, (0, 1))
    else:
        grad = torch.empty_like(v)
        torch.mul(grad_out, inverse, out=grad[..., :width])
        # A product of matrices: `vecdot` writes the products of all elements before it sums them.
        along = (grad_out[..., None, :] @ out[..., None])[..., 0]  # (G, C, 1)
        torch.mul(along, -inverse, out=grad[..., width:])

    grad_scores = torch.bmm(grad, v.transpose(1, 2)).tril_()  # (G, C, C)
    grad_q = torch.bmm(grad_scores, k)  # (G, C, F)
    grad_k = torch.bmm(grad_scores.transpose(1, 2), q)  # (G, C, F)
    grad_v = torch.bmm(scores.transpose(1, 2), grad[..., :width])  # (G, C, E)
    if before is not None:
        grad_q.baddbmm_(grad, before.transpose(1, 2))
    beyond, grad_state = _states(q, grad, count, grad_after, with_state, reverse=True)
    if beyond is not None:
        grad_k.baddbmm_(v, beyond.transpose(1, 2))
        grad_v.baddbmm_(k, beyond[..., :width])
    return grad_q, grad_k, grad_v, grad_state


def _states(
    k: Tensor, v: Tensor, count: int, state: Tensor | None, return_last: bool, reverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The state before each chunk, (G, F, E + 1), None for zero; and, if asked for, the state after the last one.

    k is (G, C, F), v (G, C, E + 1), state (B H, F, E + 1). With `reverse` the sums run from the last chunk to the
    first.
    """
    if count == 1 and not return_last:
        return state, None
    own = torch.bmm(k.transpose(1, 2), v)  # (G, F, E + 1)
    if count == 1:
        return state, own if state is None else own + state
    shape = own.shape
    own = own.view(-1, count, shape[1] * shape[2])  # (B H, T, F (E + 1))
    before = _exclusive_sums(own, reverse)
    if state is not None:
        before = before + state.reshape(-1, 1, shape[1] * shape[2])
    last = 0 if reverse else -1
    return before.view(shape), (before[:, last] + own[:, last]).view(-1, *shape[1:]) if return_last else None


def _exclusive_sums(x: Tensor, reverse: bool) -> Tensor:
    """Σ_{s<t} x[:, s] for every t, or Σ_{s>t}; x is (groups, T, size)."""
    count = x.shape[1]
    if count <= FEW_CHUNKS:
        ones = x.new_ones(count, count)
        return (ones.triu(1) if reverse else ones.tril(-1)) @ x
    if reverse:
        return F.pad(x[:, 1:].flip(1).cumsum(dim=1).flip(1), (0, 0, 0, 1))
    return F.pad(x[:, :-1].cumsum(dim=1), (0, 0, 1, 0))

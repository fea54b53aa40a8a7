"""Linear attention in plain torch, O(N) in time and memory.

The causal form cuts the sequence into chunks. Within a chunk the masked scores A_ni = q_n·k_i are formed, as in softmax
attention; everything before the chunk enters through its state S = Σ k_i v_iᵀ. The normaliser z = Σ k_i needs no sums
of its own: it is the state of one more value that is 1 everywhere, so v carries a column of ones through both. For a
chunk with queries Q, keys K and such values V,

    Y = A V + Q S,   A = tril(Q Kᵀ),

whose last column is the denominator: out = Y_{1…E} / (Y_{E+1} + eps). The gradient is as short, and A and S are kept
for it. With ∂out from outside, ∂Y has the columns ∂out / (Y_{E+1} + eps) and, last, −Σ_e of these times out; then

    ∂A = tril(∂Y Vᵀ),   ∂Q = ∂A K + ∂Y Sᵀ,   ∂K = ∂Aᵀ Q + V ∂Sᵀ,   ∂V = Aᵀ ∂Y + K ∂S,

where S sums Kᵀ V over the chunks before, and ∂S sums Qᵀ ∂Y over those after this one.

Pairs or states? A sequence of N queries and M keys costs N M (F + E) multiplications through the scores and
(N + M) F E through the state; causally it is N² (F + E) against N (C (F + E) + 2 F E) with chunks of length C. Measured
on one CPU thread, forward and backward, the two ways break even a little above the length where these counts do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.features import Features
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype

State = tuple[Tensor, Tensor]

# Up to this length causal attention takes one chunk even where several would save multiplications: products of very
# small matrices cost more than their multiplications, and one chunk needs half as many.
SHORT = 48

# Up to this number of chunks one matrix product is the faster way to their prefix sums; its cost is quadratic in it.
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
    features: Features,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> tuple[Tensor, State | None]:
    """See `fairseq_sg.ops.linear_attention`; the state is None where it was not asked for."""
    out_dtype = v.dtype
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], features.origin)
    q, k, v = to_accumulation_dtype(q, k, v)
    q, k = features(q, q_weight), features(k, k_weight)
    if state is not None:
        state = (state[0].to(v.dtype), state[1].to(v.dtype))

    if state is not None and q.shape[2] == k.shape[2] == 1:
        out, new_state = _step(q, k, v, state, normalize, eps)
    elif causal:
        out, new_state = _through_chunks(q, k, v, state, return_state, normalize, eps)
    elif state is None and not return_state and _scores_are_cheaper(q, k, v):
        out, new_state = _through_scores(q, k, v, normalize, eps), None
    else:
        out, new_state = _through_state(q, k, v, state, normalize, eps)
    return out.to(out_dtype), new_state if return_state else None


def fold(k: Tensor, v: Tensor) -> State:
    """S = Σ_i k_i v_iᵀ and z = Σ_i k_i of k (B, H, M, F) and v (B, H, M, E)."""
    return k.transpose(-1, -2) @ v, k.sum(dim=2)


def read(q: Tensor, state: State, normalize: bool, eps: float) -> Tensor:
    """q S / (q·z + eps), or q S: (B, H, N, E)."""
    s, z = state
    out = q @ s
    return out / (q @ z[..., None] + eps) if normalize else out


def chunk_count(length: int, features: int, width: int) -> int:
    """How many chunks a sequence is cut into, for F features and values of dimension E.

    Per position the scores cost C (F + E) multiplications and the states 2 F E; their number N / C is what memory
    goes into. Of 16, 24, 32, 48 and 64, on one CPU thread, forward and backward, 16 was the fastest at F = 8; at F = 16
    so it was up to a length of 256, and 32 above, by little; at F = 32 it was 32, and at F = 64 that in a tie with 64,
    which holds half the states.
    """
    chunk = 16 if features <= 16 else 32 if features <= 32 else 64
    through_scores = length * (features + width)
    through_chunks = chunk * (features + width) + 2 * features * width
    return 1 if length <= SHORT or through_scores <= through_chunks else -(-length // chunk)


def _scores_are_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    queries, keys, features, width = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
    return queries * keys * (features + width) <= (queries + keys) * features * width


def _through_scores(q: Tensor, k: Tensor, v: Tensor, normalize: bool, eps: float) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    out = scores @ v
    return _divide(out, scores.sum(dim=-1, keepdim=True), eps) if normalize else out


def _step(q: Tensor, k: Tensor, v: Tensor, state: State, normalize: bool, eps: float) -> tuple[Tensor, State]:
    """One position after `state`: one step of incremental decoding."""
    state = (torch.addcmul(state[0], k.transpose(-1, -2), v), state[1] + k[:, :, 0])
    return read(q, state, normalize, eps), state


def _through_state(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, normalize: bool, eps: float
) -> tuple[Tensor, State]:
    joined = k.transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0)
    if state is not None:
        joined = joined + _join(state)
    return _normalized(q @ joined, normalize, eps), _part(joined)


def _through_chunks(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, return_state: bool, normalize: bool, eps: float
) -> tuple[Tensor, State | None]:
    batch, heads, length, width = v.shape
    count = chunk_count(length, q.shape[3], width)
    # Positions that fill up the last chunk see keys, so that nothing is divided by 0 there even without eps.
    q, k, v = _cut(q, count, fill=1.0), _cut(k, count), _cut(v, count)
    state = None if state is None else _join(state).flatten(0, 1)
    if torch.compiler.is_compiling():
        # The compiler differentiates by itself, and knows no products into a part of a buffer.
        *_, out, _, after = _attend(q, k, v, state, count, return_state, normalize, eps)
    else:
        out, after = _CausalAttention.apply(q, k, v, state, count, return_state, normalize, eps)
    out = out.view(batch, heads, count * out.shape[1], width)
    if after is not None:
        after = _part(after.view(batch, heads, *after.shape[1:]))
    return out if out.shape[2] == length else out[:, :, :length], after


def _cut(x: Tensor, count: int, fill: float = 0.0) -> Tensor:
    """(B, H, N, D) -> (B H T, C, D); chunks of equal length leave fewer than T positions to fill up."""
    chunk = -(-x.shape[2] // count)
    tail = count * chunk - x.shape[2]
    return (F.pad(x, (0, 0, 0, tail), value=fill) if tail else x).reshape(-1, chunk, x.shape[3])


class _Chunks(NamedTuple):
    """The causal form, and what its gradient is made of.

    v: (G, C, E + 1), the values with their column of ones. scores: A (G, C, C). before: S (G, F, E + 1), what lies
    before each chunk; None for nothing. out: (G, C, E). inverse: 1 / (Y_{E+1} + eps), (G, C, 1); None without
    denominators. after: S (B H, F, E + 1) after the last chunk; None where it was not asked for.
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
        q, k, v, state, *kept = ctx.saved_tensors
        with autocast_disabled(q.device):
            if torch.is_grad_enabled():
                gradients = _gradients_with_graph((q, k, v, state), ctx.options, grads)
            else:
                gradients = _gradients(q, k, _Chunks(*kept, None), ctx.options[0], state is not None, *grads)
        return *gradients, None, None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, count: int, return_state: bool, normalize: bool, eps: float
) -> _Chunks:
    """The forward pass; autograd can go through it, too."""
    v = torch.cat((v, v.new_ones(*v.shape[:2], 1)), dim=-1)
    before, after = _states(k, v, count, state, return_state)
    scores = torch.bmm(q, k.transpose(1, 2)).tril_()
    out = torch.bmm(scores, v)
    if before is not None:
        out = out.baddbmm_(q, before)
    out, denominator = out.split((out.shape[-1] - 1, 1), dim=-1)
    inverse = (denominator + eps).reciprocal() if normalize else None
    out = out * inverse if normalize else out.contiguous()
    return _Chunks(v, scores, before, out, inverse, after)


def _gradients(
    q: Tensor,
    k: Tensor,
    chunks: _Chunks,
    count: int,
    of_state: bool,
    grad_out: Tensor | None,
    grad_after: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """∂q, ∂k, ∂v and, with `of_state`, the derivative with respect to the state before the first chunk."""
    v, scores, before, out, inverse, _ = chunks
    width = out.shape[-1]
    if grad_out is None:
        grad = torch.zeros_like(v)  # ∂Y
    elif inverse is None:
        grad = F.pad(grad_out, (0, 1))
    else:
        grad = torch.empty_like(v)
        torch.mul(grad_out, inverse, out=grad[..., :width])
        # As a product of matrices: `vecdot` writes the products of all elements before it sums them.
        along = (grad_out[..., None, :] @ out[..., None])[..., 0]
        torch.mul(along, -inverse, out=grad[..., width:])

    grad_scores = torch.bmm(grad, v.transpose(1, 2)).tril_()
    grad_q = torch.bmm(grad_scores, k)
    grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
    grad_v = torch.bmm(scores.transpose(1, 2), grad[..., :width])
    if before is not None:
        grad_q.baddbmm_(grad, before.transpose(1, 2))
    beyond, grad_state = _states(q, grad, count, grad_after, of_state, reverse=True)
    if beyond is not None:
        grad_k.baddbmm_(v, beyond.transpose(1, 2))
        grad_v.baddbmm_(k, beyond[..., :width])
    return grad_q, grad_k, grad_v, grad_state


def _gradients_with_graph(
    inputs: tuple[Tensor | None, ...], options: tuple, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The same by autograd, for derivatives of them (create_graph=True)."""
    # Views, so that what is differentiated ends at these inputs.
    views = [None if x is None else x.view_as(x) for x in inputs]
    chunks = _attend(*views, *options)
    outputs = [(x, grad) for x, grad in zip((chunks.out, chunks.after), grads, strict=True) if grad is not None]
    wanted = [x for x in views if x is not None and x.requires_grad]
    of, grads = zip(*outputs, strict=True)
    found = iter(torch.autograd.grad(of, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in views)


def _states(
    k: Tensor, v: Tensor, count: int, state: Tensor | None, whole: bool, reverse: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """What lies before each chunk, (G, F, E + 1), None for nothing; and, if asked for, with the last one folded in.

    k is (G, C, F), v (G, C, E + 1), state (B H, F, E + 1). In `reverse`, "before" is after, and the last is the first.
    """
    if count == 1 and not whole:
        return state, None
    own = torch.bmm(k.transpose(1, 2), v)
    if count == 1:
        return state, own if state is None else own + state
    shape = own.shape
    own = own.view(-1, count, shape[1] * shape[2])
    before = _exclusive_sums(own, reverse)
    if state is not None:
        before = before + state.reshape(-1, 1, shape[1] * shape[2])
    last = 0 if reverse else -1
    return before.view(shape), (before[:, last] + own[:, last]).view(-1, *shape[1:]) if whole else None


def _exclusive_sums(x: Tensor, reverse: bool) -> Tensor:
    """Σ_{s<t} x[:, s] for every t, or Σ_{s>t}; x is (groups, T, size)."""
    count = x.shape[1]
    if count <= FEW_CHUNKS:
        ones = x.new_ones(count, count)
        return (ones.triu_(1) if reverse else ones.tril_(-1)) @ x
    if reverse:
        return F.pad(x[:, 1:].flip(1).cumsum(dim=1).flip(1), (0, 0, 0, 1))
    return F.pad(x[:, :-1].cumsum(dim=1), (0, 0, 1, 0))


def _join(state: State) -> Tensor:
    """The state of v with its column of ones, (B, H, F, E + 1)."""
    return torch.cat((state[0], state[1][..., None]), dim=-1)


def _part(joined: Tensor) -> State:
    return joined[..., :-1], joined[..., -1]


def _normalized(out: Tensor, normalize: bool, eps: float) -> Tensor:
    numerator, denominator = out.split((out.shape[-1] - 1, 1), dim=-1)
    return _divide(numerator, denominator, eps) if normalize else numerator


def _divide(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    # The gradient of a product passes over the large tensor twice, that of a quotient five times.
    return numerator * (denominator + eps).reciprocal()

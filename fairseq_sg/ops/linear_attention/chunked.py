"""Linear attention in plain torch, O(N) in time and memory.

The causal form cuts the sequence into chunks. Within a chunk the masked scores q_n·k_i are formed, as in softmax
attention; everything before the chunk enters through its state S = Σ k_i v_iᵀ. The normaliser z = Σ k_i needs no sums
of its own: it is the state of one more value that is 1 everywhere, so v carries a column of ones through both.

Pairs or states? A sequence of N queries and M keys costs N M (F + E) multiplications through the scores and
(N + M) F E through the state; causally it is N² (F + E) against N (C (F + E) + 2 F E) with chunks of length C. Measured
on one CPU thread, forward and backward, the two ways break even a little above the length where these counts do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_sg.ops.precision import to_accumulation_dtype

State = tuple[Tensor, Tensor]

# Up to this length causal attention takes one masked score matrix even where chunks would save multiplications: it
# needs half as many kernels, and launching those is what takes time on a GPU. On a CPU F = 8 loses by it above 50.
SHORT = 64

# Up to this number of chunks one matrix product is the faster way to their prefix sums; its cost is quadratic in it.
FEW_CHUNKS = 32


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
    """See `fairseq_sg.ops.linear_attention`; the state is None where it was not asked for."""
    out_dtype = v.dtype
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    q, k, v = to_accumulation_dtype(q, k, v)
    if state is not None:
        state = (state[0].to(v.dtype), state[1].to(v.dtype))

    if state is None and not return_state and _scores_are_cheaper(q, k, v, causal):
        out, new_state = _through_scores(q, k, v, causal, normalize, eps), None
    elif state is not None and q.shape[2] == k.shape[2] == 1:
        out, new_state = _step(q, k, v, state, normalize, eps)
    elif causal:
        out, new_state = _through_chunks(q, k, v, state, return_state, normalize, eps)
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


def chunk_length(features: int) -> int:
    """Length of a chunk for F features.

    Per position the scores cost C (F + E) multiplications and the states 2 F E; their number N / C is what memory
    goes into. 32 was the fastest of 32, 64 and 128 at F = 16, and 64 (at times in a tie with 32, which holds twice the
    states) at F = 64, 128 and 272.
    """
    return 32 if features <= 32 else 64


def _scores_are_cheaper(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    queries, keys, features, width = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
    through_scores = queries * keys * (features + width)
    if not causal:
        return through_scores <= (queries + keys) * features * width
    through_chunks = queries * (chunk_length(features) * (features + width) + 2 * features * width)
    return queries <= SHORT or through_scores <= through_chunks


def _through_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, normalize: bool, eps: float) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    if causal:
        scores = scores.tril_()
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
    batch, heads, length, features = q.shape
    width = v.shape[-1]
    count = -(-length // chunk_length(features))
    # Chunks of equal length leave fewer than `count` positions to pad.
    chunk = -(-length // count)
    tail = count * chunk - length
    if tail:
        q, k = F.pad(q, (0, 0, 0, tail)), F.pad(k, (0, 0, 0, tail))
    v = F.pad(v, (0, 1, 0, tail), value=1.0)
    q, k, v = (x.reshape(batch * heads * count, chunk, -1) for x in (q, k, v))

    before, after = _chunk_states(k, v, count, None if state is None else _join(state), return_state)
    scores = torch.bmm(q, k.transpose(1, 2)).tril_()
    out = torch.bmm(scores, v) if before is None else torch.baddbmm(torch.bmm(q, before), scores, v)
    out = _normalized(out, normalize, eps).reshape(batch, heads, count * chunk, width)
    if after is not None:
        after = _part(after.view(batch, heads, features, width + 1))
    return out[:, :, :length] if tail else out, after


def _chunk_states(
    k: Tensor, v: Tensor, count: int, state: Tensor | None, return_state: bool
) -> tuple[Tensor | None, Tensor | None]:
    """What lies before each chunk, (B H T, F, E + 1), None for nothing; and after the last, None if not asked for.

    k is (B H T, C, F), v (B H T, C, E + 1) with its column of ones, state (B, H, F, E + 1).
    """
    if count == 1 and not return_state:
        return None if state is None else state.flatten(0, 1), None
    own = torch.bmm(k.transpose(1, 2), v)
    shape = own.shape
    own = own.view(-1, count, shape[1] * shape[2])
    first = None if state is None else state.reshape(-1, 1, shape[1] * shape[2])
    if count == 1:
        return (None, own) if first is None else (first.view(shape), own + first)
    before = _exclusive_prefix_sums(own)
    if first is not None:
        before = before + first
    return before.view(shape), before[:, -1] + own[:, -1] if return_state else None


def _exclusive_prefix_sums(x: Tensor) -> Tensor:
    """Σ_{s<t} x[:, s] for every t; x is (groups, T, size)."""
    count = x.shape[1]
    if count <= FEW_CHUNKS:
        return x.new_ones(count, count).tril_(-1) @ x
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

"""Linear attention without a causal mask in plain torch: two products of matrices. Tensors are in one wide dtype.

    S = Σ_i k_i v_iᵀ,   z = Σ_i k_i,   out_n = q_n S / (q_n·z + eps)

Scores or state? N queries and M keys cost N M (F + E) multiplications through the scores q_n·k_i and (N + M) F E
through the state. The cheaper way is taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, Tensor]


def fold(k: Tensor, v: Tensor) -> State:
    """S = Σ_i k_i v_iᵀ and z = Σ_i k_i of k (B, H, M, F) and v (B, H, M, E)."""
    return k.transpose(-1, -2) @ v, k.sum(dim=2)  # (B, H, F, E), (B, H, F)


def read(q: Tensor, state: State, normalize: bool, eps: float) -> Tensor:
    """q S / (q·z + eps), or q S, of q (B, H, N, F): (B, H, N, E)."""
    s, z = state
    out = q @ s  # (B, H, N, E)
    return out / (q @ z[..., None] + eps) if normalize else out


def step(q: Tensor, k: Tensor, v: Tensor, state: State, normalize: bool, eps: float) -> tuple[Tensor, State]:
    """One position after `state`, N = M = 1: a step of incremental decoding."""
    state = (torch.addcmul(state[0], k.transpose(-1, -2), v), state[1] + k[:, :, 0])  # (B, H, F, E), (B, H, F)
    return read(q, state, normalize, eps), state


def linear_attention_full(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, return_state: bool, normalize: bool, eps: float
) -> tuple[Tensor, State | None]:
    """All queries see all keys; the state is None where it is not asked for and not needed."""
    if state is None and not return_state and _scores_are_cheaper(q, k, v):
        return _through_scores(q, k, v, normalize, eps), None
    # The denominator is the sum of one more value that is 1 everywhere.
    joined = k.transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0)  # (B, H, F, E + 1)
    if state is not None:
        joined = joined + join(state)
    out = q @ joined  # (B, H, N, E + 1)
    numerator, denominator = out.split((out.shape[-1] - 1, 1), dim=-1)
    return _divide(numerator, denominator, eps) if normalize else numerator, split(joined)


def join(state: State) -> Tensor:
    """S and z side by side, (B, H, F, E + 1): the state of v with a column of ones."""
    return torch.cat((state[0], state[1][..., None]), dim=-1)


def split(joined: Tensor) -> State:
    """S (B, H, F, E) and z (B, H, F) of `join`."""
    return joined[..., :-1], joined[..., -1]


def _scores_are_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    queries, keys, features, width = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
    return queries * keys * (features + width) <= (queries + keys) * features * width


def _through_scores(q: Tensor, k: Tensor, v: Tensor, normalize: bool, eps: float) -> Tensor:
    scores = q @ k.transpose(-1, -2)  # (B, H, N, M)
    out = scores @ v  # (B, H, N, E)
    return _divide(out, scores.sum(dim=-1, keepdim=True), eps) if normalize else out


def _divide(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    # The gradient of a product passes over the large tensor twice, that of a quotient five times.
    return numerator * (denominator + eps).reciprocal()

"""Linear attention on features (Katharopoulos et al., 2020, "Transformers are RNNs"); `naive` has the equation."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.checks import check_floating, check_padding_mask, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.linear_attention.chunked import linear_attention_chunked
from fairseq_sg.ops.linear_attention.full import State, fold, read
from fairseq_sg.ops.linear_attention.naive import linear_attention_naive
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype
from fairseq_sg.ops.triton_support import require_triton, why_not_triton

# The least ε: the reciprocal of a smaller number overflows in float32.
SMALLEST_EPS = torch.finfo(torch.float32).tiny
TOO_SMALL = f"eps must be positive, at least {SMALLEST_EPS:.3g}, not {{}}: a row without keys is 0 / eps"


def _triton(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options) -> tuple[Tensor, State | None]:
    require_triton("linear_attention", why_not_triton(q, k, v))
    if not causal or q.shape[2] < 2:
        # Products of matrices, which torch has.
        return linear_attention_chunked(q, k, v, causal=causal, **options)
    from fairseq_sg.ops.linear_attention.triton import linear_attention_triton

    return linear_attention_triton(q, k, v, **options)


declare(
    "linear_attention",
    {"naive": linear_attention_naive, "chunked": linear_attention_chunked, "triton": _triton},
    default="chunked",
    others={"cuda": ("triton",)},
    transformed="chunked",
    sizes=("heads", "length", "width"),  # of the causal form: B·H, N, and the larger of F and E
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    normalize: bool = True,
    eps: float = 1e-6,
    implementation: str = AUTO,
) -> Tensor | tuple[Tensor, State]:
    """out_n = q_n Σ_i k_i v_iᵀ / (q_n · Σ_i k_i + eps), i over all keys or, if causal, over i ≤ n.

    q and k are the features φ(Q) and φ(K), after a normalization if there is one. The operator applies no scale.

    This is equation 5 of Katharopoulos et al. (2020), and equation 12 if causal, with eps added to the denominator, as
    in their released code. Time and memory are linear in the length.

    All sums are taken in float32 (float64 if an input is float64), also under ``torch.autocast``. Padding removes a
    key from numerator and denominator alike; a query that sees no key at all gives exactly 0. Features are expected to
    be non-negative: with both signs the denominator may vanish, and eps is no guard against that. A backward pass of
    the causal form with ``create_graph=True`` is refused with `RuntimeError` by all but the naive implementation.

    Args:
        q: (B, H, N, F), any floating dtype.
        k: (B, H, M, F).
        v: (B, H, M, E).
        causal: whether query n, which stands at position M − N + n, sees the keys 0 … M − N + n only (and all of
            `state`).
        key_padding_mask: (B, M), bool, True at padding. There k may hold anything, NaN included, and v any finite
            number.
        state: (S (B, H, F, E), z (B, H, F)): keys and values that come before these, folded to S = Σ k_i v_iᵀ and
            z = Σ k_i, as an earlier call or `linear_attention_state` returned them. Every query sees them. They are
            converted to the dtype in which the sums are taken.
        return_state: whether to return the state too: `state` with all of k and v folded in.
        normalize: False leaves out the denominator.
        eps: added to the denominator, above 0.
        implementation: ``"auto"``, ``"naive"``, ``"chunked"`` or ``"triton"``. ``"triton"`` has kernels for the causal
            form alone. Without `causal` it is two products of matrices, as in ``"chunked"``.

    Returns:
        out (B, H, N, E) in the dtype of v; with `return_state` the pair (out, (S, z)), S and z in float32 (float64).
        One step of incremental decoding is a causal call with N = M = 1 that receives and returns the state.

    Raises:
        TypeError: a tensor is not floating, or the mask not bool.
        ValueError: shapes do not fit, eps is not positive, there is no such implementation, or Triton was asked for and
            cannot run here.
    """
    _check(q, k, v, causal)
    check_padding_mask("key_padding_mask", key_padding_mask, k.shape[0], k.shape[2])
    if state is not None:
        _check_state(state, (*k.shape[:2], k.shape[3], v.shape[3]))
    if normalize and not eps >= SMALLEST_EPS:
        raise ValueError(TOO_SMALL.format(eps))
    before = k.shape[2] - q.shape[2]
    if causal and before:
        # The keys before the first query enter through their state.
        earlier, key_padding_mask = _cut(key_padding_mask, before)
        s, z = linear_attention_state(k[:, :, :before], v[:, :, :before], key_padding_mask=earlier)
        state = (s, z) if state is None else (state[0] + s, state[1] + z)
        k, v = k[:, :, before:], v[:, :, before:]  # (B, H, N, F), (B, H, N, E)
    sizes = (q.shape[0] * q.shape[1], q.shape[2], max(q.shape[3], v.shape[3])) if causal else ()
    # Features of float32 and values of bfloat16 are multiplied in float32.
    widest = q if q.element_size() > v.element_size() else v
    function = choose("linear_attention", implementation, widest, sizes, lambda: why_not_triton(q, k, v))
    with autocast_disabled(q.device):
        out, new_state = function(
            q,
            k,
            v,
            causal=causal,
            key_padding_mask=key_padding_mask,
            state=state,
            return_state=return_state,
            normalize=normalize,
            eps=eps,
        )
    return (out, new_state) if return_state else out


def linear_attention_state(k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None) -> State:
    """Folds keys and values into a state: S = Σ_i k_i v_iᵀ, z = Σ_i k_i.

    Cross-attention folds the encoder's output once and then calls `linear_attention_read` at every step, whose cost
    does not depend on the length of the source.

    Args:
        k: (B, H, M, F), features.
        v: (B, H, M, E).
        key_padding_mask: (B, M), bool, True at padding, as for `linear_attention`.

    Returns:
        (S (B, H, F, E), z (B, H, F)), in float32 (float64 if an input is float64), also under ``torch.autocast``.

    Raises:
        TypeError: a tensor is not floating, or the mask not bool.
        ValueError: shapes do not fit.
    """
    _check(k, k, v, causal=False)
    check_padding_mask("key_padding_mask", key_padding_mask, k.shape[0], k.shape[2])
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    with autocast_disabled(k.device):
        return fold(*to_accumulation_dtype(k, v))


def linear_attention_read(q: Tensor, state: State, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Attention of queries to a folded state alone: out_n = q_n S / (q_n · z + eps).

    Equal to the non-causal `linear_attention` on the keys and values that were folded.

    Args:
        q: (B, H, N, F), features.
        state: (S (B, H, F, E), z (B, H, F)) of `linear_attention_state` or `linear_attention`.
        normalize: False leaves out the denominator.
        eps: added to the denominator, above 0.

    Returns:
        (B, H, N, E) in the dtype of q.

    Raises:
        TypeError: a tensor is not floating.
        ValueError: shapes do not fit, or eps is not positive.
    """
    check_floating(q=q)
    _check_state(state, (*q.shape[:2], q.shape[-1], state[0].shape[-1]))
    if normalize and not eps >= SMALLEST_EPS:
        raise ValueError(TOO_SMALL.format(eps))
    with autocast_disabled(q.device):
        query, s, z = to_accumulation_dtype(q, *state)
        return read(query, (s, z), normalize, eps).to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    check_floating(q=q, k=k, v=v)
    shapes = describe(q=q, k=k, v=v)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"linear_attention takes q (B, H, N, F), k (B, H, M, F), v (B, H, M, E), not {shapes}")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(f"q, k and v must agree in batch and heads: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same number of features: {shapes}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same length: {shapes}")
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(f"causal queries are the last of the keys, so there are no more of them: {shapes}")


def _cut(mask: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None]:
    """The first ``length`` columns of a mask (B, M), and the others."""
    return (None, None) if mask is None else (mask[:, :length], mask[:, length:])


def _check_state(state: State, shape: tuple[int, ...]) -> None:
    s, z = state
    check_floating(S=s, z=z)
    if s.shape != shape or z.shape != shape[:3]:
        raise ValueError(f"the state must be S {shape}, z {shape[:3]}, not {describe(S=s, z=z)}")

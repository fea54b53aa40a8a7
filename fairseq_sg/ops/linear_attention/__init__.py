"""Linear attention (Katharopoulos et al., 2020, "Transformers are RNNs"), on features or on what they are made of."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.ops.checks import check_floating, check_padding_mask, describe
from fairseq_sg.ops.dispatch import AUTO, declare, requested, resolve
from fairseq_sg.ops.features import Features
from fairseq_sg.ops.linear_attention.chunked import fold, linear_attention_chunked, read
from fairseq_sg.ops.linear_attention.naive import linear_attention_naive
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype
from fairseq_sg.ops.triton_support import prefers_triton, require_triton, why_not_triton

State = tuple[Tensor, Tensor]


def _triton(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, State | None]:
    require_triton("linear_attention", why_not_triton(q, k, v, *_given(options["q_weight"], options["k_weight"])))
    from fairseq_sg.ops.linear_attention.triton import linear_attention_triton

    return linear_attention_triton(q, k, v, **options)


IMPLEMENTATIONS = {"naive": linear_attention_naive, "chunked": linear_attention_chunked, "triton": _triton}
declare("linear_attention", IMPLEMENTATIONS)


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
    feature_map: str | None = None,
    qk_norm: str | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    implementation: str = AUTO,
) -> Tensor | tuple[Tensor, State]:
    """out_n = q_n Σ_i k_i v_iᵀ / (q_n · Σ_i k_i + eps), i over all keys or, if causal, over i ≤ n.

    q and k are φ(Q) and φ(K): the feature map (and a normalization after it) has been applied, and no further scale
    is. With `feature_map` or `qk_norm` they come without: Norm(φ(q)) and Norm(φ(k)) stand for them in the equation
    (`fairseq_sg.ops.features`; Park & Kim, 2024, section 4.1), in float32, or float64.

    This is equation 5 of Katharopoulos et al. (2020), and equation 12 if causal, with eps added to the denominator, as
    in their released code. Time and memory are linear in the length.

    All sums are taken in float32 (float64 if an input is float64), also under ``torch.autocast``. Padding removes a
    key from numerator and denominator alike; a query that sees no key at all gives exactly 0. Features are expected to
    be non-negative: with both signs the denominator may vanish, and eps is no guard against that.

    Args:
        q: (B, H, N, F), any floating dtype.
        k: (B, H, M, F); N must equal M if `causal`.
        v: (B, H, M, E).
        causal: whether position n sees the keys 0 … n only (and all of `state`).
        key_padding_mask: (B, M), bool, True at padding. k and v may hold any finite number there.
        state: (S (B, H, F, E), z (B, H, F)): keys and values that come before these, folded to S = Σ k_i v_iᵀ and
            z = Σ k_i, as an earlier call or `linear_attention_state` returned them. Every query sees them. They are
            converted to the dtype in which the sums are taken.
        return_state: whether to return the state too, with everything folded in: `state` and all of k, v.
        normalize: False leaves out the denominator.
        eps: added to the denominator.
        feature_map: φ by name, ``"elu"`` (elu + 1), ``"relu"`` or ``"squared"``; None where q and k are mapped.
        qk_norm: the normalization after φ by name, ``"l1"``, ``"l2"`` or ``"rms"``; None for none.
        q_weight: (F,), the γ of ``"rms"`` for queries; None for 1.
        k_weight: (F,), that for keys.
        norm_eps: ε of the normalization, positive.
        implementation: ``"auto"``, ``"naive"``, ``"chunked"`` or ``"triton"``.

    Returns:
        out (B, H, N, E) in the dtype of v; with `return_state` the pair (out, (S, z)), S and z in float32 (float64).
        One step of incremental decoding is a causal call with N = M = 1 that receives and returns the state.

    Raises:
        TypeError: a tensor is not floating, or the mask not bool.
        ValueError: shapes do not fit, there is no such implementation, map or normalization, a weight is given without
            ``"rms"``, or Triton was asked for and cannot run here.
    """
    _check(q, k, v, causal)
    features = Features(feature_map, qk_norm, norm_eps)
    features.check(q.shape[3], q_weight=q_weight, k_weight=k_weight)
    check_padding_mask("key_padding_mask", key_padding_mask, k.shape[0], k.shape[2])
    if state is not None:
        _check_state(state, (*k.shape[:2], k.shape[3], v.shape[3]))
    preferred = prefers_triton(why_not_triton, q, k, v, *_given(q_weight, k_weight))
    automatic = "triton" if preferred else "chunked"
    function = resolve("linear_attention", implementation, IMPLEMENTATIONS, automatic)
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
            features=features,
            q_weight=q_weight,
            k_weight=k_weight,
        )
    return (out, new_state) if return_state else out


def linear_attention_state(
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    feature_map: str | None = None,
    qk_norm: str | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> State:
    """Folds keys and values into a state: S = Σ_i k_i v_iᵀ, z = Σ_i k_i.

    Cross-attention folds the encoder's output once and then calls `linear_attention_read` at every step, which costs
    the same however long the source is.

    Args:
        k: (B, H, M, F), feature-mapped, unless that is left to the operator.
        v: (B, H, M, E).
        key_padding_mask: (B, M), bool, True at padding.
        feature_map, qk_norm, k_weight, norm_eps: as for `linear_attention`.

    Returns:
        (S (B, H, F, E), z (B, H, F)), in float32 (float64 if an input is float64), also under ``torch.autocast``.

    Raises:
        TypeError: a tensor is not floating, or the mask not bool.
        ValueError: shapes do not fit, or a map or normalization is unknown.
    """
    _check(k, k, v, causal=False)
    features = Features(feature_map, qk_norm, norm_eps)
    features.check(k.shape[3], k_weight=k_weight)
    check_padding_mask("key_padding_mask", key_padding_mask, k.shape[0], k.shape[2])
    if _takes_triton("linear_attention_state", k, v, *_given(k_weight)):
        from fairseq_sg.ops.linear_attention.triton import fold_triton

        return fold_triton(k, v, key_padding_mask, features, k_weight)
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], features.origin)
    with autocast_disabled(k.device):
        k, v = to_accumulation_dtype(k, v)
        return fold(features(k, k_weight), v)


def linear_attention_read(
    q: Tensor,
    state: State,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    feature_map: str | None = None,
    qk_norm: str | None = None,
    q_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Attention of queries to a folded state alone: out_n = q_n S / (q_n · z + eps).

    Equal to the non-causal `linear_attention` on the keys and values that were folded.

    Args:
        q: (B, H, N, F), feature-mapped, unless that is left to the operator.
        state: (S (B, H, F, E), z (B, H, F)) of `linear_attention_state` or `linear_attention`.
        normalize: False leaves out the denominator.
        eps: added to the denominator.
        feature_map, qk_norm, q_weight, norm_eps: as for `linear_attention`.

    Returns:
        (B, H, N, E) in the dtype of q.

    Raises:
        TypeError: a tensor is not floating.
        ValueError: shapes do not fit, or a map or normalization is unknown.
    """
    check_floating(q=q)
    _check_state(state, (*q.shape[:2], q.shape[-1], state[0].shape[-1]))
    features = Features(feature_map, qk_norm, norm_eps)
    features.check(q.shape[3], q_weight=q_weight)
    if _takes_triton("linear_attention_read", q, *state, *_given(q_weight)):
        from fairseq_sg.ops.linear_attention.triton import read_triton

        return read_triton(q, state, normalize, eps, features, q_weight)
    with autocast_disabled(q.device):
        query, s, z = to_accumulation_dtype(q, *state)
        return read(features(query, q_weight), (s, z), normalize, eps).to(q.dtype)


def _given(*weights: Tensor | None) -> list[Tensor]:
    return [weight for weight in weights if weight is not None]


def _takes_triton(operator: str, *tensors: Tensor) -> bool:
    """Whether the folded forms run in Triton; all other implementations share one way in torch."""
    name, _ = requested("linear_attention")
    if name == "triton":
        require_triton(operator, why_not_triton(*tensors))
    return name == "triton" or (name == AUTO and prefers_triton(why_not_triton, *tensors))


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
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal linear attention needs as many queries as keys: {shapes}")


def _check_state(state: State, shape: tuple[int, ...]) -> None:
    s, z = state
    check_floating(S=s, z=z)
    if s.shape != shape or z.shape != shape[:3]:
        raise ValueError(f"the state must be S {shape}, z {shape[:3]}, not {describe(S=s, z=z)}")

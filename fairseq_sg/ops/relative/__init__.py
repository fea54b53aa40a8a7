"""Positional logits of Transformer-XL attention (Dai et al., 2019), and attention with them."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.ops.checks import check_floating, check_padding_mask, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.precision import as_autocast, autocast_disabled
from fairseq_sg.ops.relative.naive import relative_attention_naive, relative_logits_naive
from fairseq_sg.ops.relative.shift import relative_attention_shift, relative_logits_shift
from fairseq_sg.ops.triton_support import require_triton, why_not_triton

# The widest queries, keys and values for Triton: a program holds whole rows of them.
WIDEST = 256
# Sequences of a batch for each dimension of a head. From here on, on a CPU, looking up the positional keys of all pairs
# (H N M D numbers) costs less than products with all distances, twice as many as keys (B H N L numbers).
MANY_SEQUENCES = 4


def _sizes(q: Tensor) -> tuple[int, ...]:
    """What the choice depends on, for queries (B, H, N, D)."""
    batch, heads, queries, dim = q.shape
    # A single query has as many distances as keys, so nothing is gained by a look-up.
    return batch // dim if queries > 1 and dim else 0, batch * heads, queries, dim


def _why_not_triton(*tensors: Tensor) -> str | None:
    q_content, _, _, v, _ = tensors
    if max(q_content.shape[3], v.shape[3]) > WIDEST:
        return f"keys have {q_content.shape[3]} dimensions and values {v.shape[3]}, and {WIDEST} is the most"
    return why_not_triton(*tensors)


def _triton(*arguments) -> Tensor:
    require_triton("relative_attention", _why_not_triton(*arguments[:5]))
    from fairseq_sg.ops.relative.triton import relative_attention_triton

    return relative_attention_triton(*arguments)


_CHOICE = {
    "default": "shift",
    "sizes": ("sequences_per_width", "heads", "length", "width"),  # B/D, B·H, N and D
    "rules": {"cpu": ("sequences_per_width", MANY_SEQUENCES, "naive")},
    # In half precision the gradient of the looked-up keys would be added up in half precision.
    "full_precision": ("naive",),
    "transformed": "shift",
}
declare(
    "relative_logits",
    {"naive": relative_logits_naive, "shift": relative_logits_shift},
    others={"cpu": ("naive",)},
    **_CHOICE,
)
declare(
    "relative_attention",
    {"naive": relative_attention_naive, "shift": relative_attention_shift, "triton": _triton},
    others={"cpu": ("naive",), "cuda": ("triton",)},
    **_CHOICE,
)


def relative_logits(q: Tensor, p: Tensor, *, implementation: str = AUTO) -> Tensor:
    """out[b, h, n, m] = q[b, h, n] · p[h, m − n + N − 1]: terms (b) and (d) of Transformer-XL attention in one.

    In the notation of Dai et al. (2019, section 3.3), q_n is W_q x_i + v, the query with the head's positional bias
    (and whatever scale the attention has), and p_r is W_{k,R} R_r, the projected encoding of a distance. The distance
    is signed, key minus query, so that the two directions of a bidirectional encoder differ.

    p lists the distances that occur, in ascending order. Let query n stand at absolute position offset + n and key m
    at m; then p[h, r] belongs to the distance r − (offset + N − 1), from −(offset + N − 1), the last query to the first
    key, to M − 1 − offset, the first query to the last key. Self-attention has offset 0; a step of incremental decoding
    has N = 1 and offset M − 1. The offset chooses p and does nothing else, so it is no argument here.

    Args:
        q: (B, H, N, D), any floating dtype.
        p: (H, L, D) with L = N + M − 1, which is where the number of keys M is taken from.
        implementation: ``"auto"``, ``"naive"`` or ``"shift"``.

    Returns:
        (B, H, N, M), in the dtype that a product of q and p has (so autocast applies as it does to the content logits
        these are added to). It may be a strided view: do not write into it.

    Raises:
        TypeError: q or p is not floating.
        ValueError: shapes do not fit, or there is no such implementation.
    """
    check_floating(q=q, p=p)
    shapes = describe(q=q, p=p)
    if q.dim() != 4 or p.dim() != 3:
        raise ValueError(f"relative_logits takes q (B, H, N, D) and p (H, L, D), not {shapes}")
    if q.shape[1] != p.shape[0] or q.shape[3] != p.shape[2]:
        raise ValueError(f"q and p must agree in heads and head dimension: {shapes}")
    if p.shape[1] < q.shape[2]:
        raise ValueError(f"p needs a row for each of the N + M - 1 distances, at least N = {q.shape[2]}: {shapes}")
    return choose("relative_logits", implementation, q, _sizes(q))(q, p)


def relative_attention(
    q_content: Tensor,
    q_position: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    implementation: str = AUTO,
) -> Tensor:
    """out = softmax(scale · (q_content kᵀ + R)) v, R = `relative_logits` (q_position, p).

    Attention of Transformer-XL (Dai et al., 2019, section 3.3): with u and v its biases of content and position,
    q_content is W_q x + u and q_position is W_q x + v, and the terms (a) + (c) and (b) + (d) are q_content kᵀ and R.

    A query that sees no key gets zeros and gives no gradient. ``"naive"`` and ``"shift"`` are plain torch,
    ``"triton"`` is a kernel, which keeps no N×M weights. All but ``"naive"`` keep the product of queries and distances,
    O(B H N L). On a GPU, gradients of ``"shift"`` need not repeat bit for bit with more than 64 keys, unless
    `torch.use_deterministic_algorithms` is on. A second derivative is that of ``"naive"``, or a `RuntimeError`: of
    ``"triton"``, and of torch's fused attentions on a GPU. Under ``torch.autocast``, inputs are cast as for
    `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q_content: (B, H, N, D), any floating dtype, the same for all five.
        q_position: (B, H, N, D′).
        k: (B, H, M, D). At padding, k and v have to be finite, save for ``"triton"``, which does not read them.
        v: (B, H, M, E).
        p: (H, L, D′) with L = N + M − 1, in ascending order of the distances: see `relative_logits`.
        causal: whether query n, which stands at position M − N + n, sees the keys 0 … M − N + n only. p has all L rows
            nevertheless.
        key_padding_mask: (B, M), bool, True at padding.
        scale: of both logits; 1/√D where not given.
        dropout_p: probability with which a weight is dropped after the softmax. Implementations draw other masks, all
            from torch's generator of the device.
        implementation: ``"auto"``, ``"naive"``, ``"shift"`` or ``"triton"``.

    Returns:
        (B, H, N, E), in the dtype of v.

    Raises:
        TypeError: dtypes differ or are not floating, or the mask is not bool.
        ValueError: shapes do not fit, causal queries are more than the keys, a probability is none, there is no such
            implementation, or one was asked for that cannot do this here.
    """
    tensors = q_content, q_position, k, v, p
    named = dict(q_content=q_content, q_position=q_position, k=k, v=v, p=p)
    check_floating(**named)
    shapes = describe(**named)
    if [x.dim() for x in tensors] != [4, 4, 4, 4, 3]:
        raise ValueError(
            "relative_attention takes q_content (B, H, N, D), q_position (B, H, N, D'), k (B, H, M, D), v (B, H, M, E) "
            f"and p (H, N + M - 1, D'), not {shapes}"
        )
    (batch, heads, queries, dim), keys = q_content.shape, k.shape[2]
    if (
        q_position.shape[:3] != (batch, heads, queries)
        or k.shape != (batch, heads, keys, dim)
        or v.shape[:3] != (batch, heads, keys)
        or p.shape != (heads, queries + keys - 1, q_position.shape[3])
    ):
        raise ValueError(
            f"queries, keys, values and p must agree in batch, heads, lengths and widths, and p have a row for each of "
            f"the N + M - 1 distances: {shapes}"
        )
    if causal and queries > keys:
        raise ValueError(f"causal queries are the last of the keys, so there are no more of them: {shapes}")
    check_padding_mask("key_padding_mask", key_padding_mask, batch, keys)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is a probability, from 0 to 1, not {dropout_p}")
    tensors = as_autocast(*tensors)
    if len({x.dtype for x in tensors}) > 1:
        raise TypeError(
            f"relative_attention takes tensors of one dtype, not {', '.join(str(x.dtype) for x in tensors)}"
        )
    sizes = _sizes(tensors[1])
    function = choose("relative_attention", implementation, tensors[3], sizes, lambda: _why_not_triton(*tensors))
    scale = dim**-0.5 if scale is None else scale
    with autocast_disabled(v.device):
        return function(*tensors, causal, key_padding_mask, scale, dropout_p)

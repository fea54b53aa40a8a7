"""Positional logits of Transformer-XL attention (Dai et al., 2019)."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.ops.checks import check_floating, describe
from fairseq_sg.ops.dispatch import AUTO, resolve
from fairseq_sg.ops.relative.chunked import relative_logits_chunked
from fairseq_sg.ops.relative.naive import relative_logits_naive

IMPLEMENTATIONS = {"naive": relative_logits_naive, "chunked": relative_logits_chunked}


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
        implementation: ``"auto"``, ``"naive"`` or ``"chunked"``.

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
    return resolve("relative_logits", implementation, IMPLEMENTATIONS, automatic="chunked")(q, p)

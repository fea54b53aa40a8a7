"""Linear attention as its equations stand: every outer product k_i v_iᵀ is formed and summed.

Memory is O(M F E), so this is for checking, not for training.
"""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.ops.precision import to_accumulation_dtype


def linear_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    return_state: bool,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """See `fairseq_sg.ops.linear_attention`; the state is returned whether it is asked for or not."""
    out_dtype = v.dtype
    q, k, v = to_accumulation_dtype(q, k, v)
    if key_padding_mask is not None:
        k = k.masked_fill(key_padding_mask[:, None, :, None], 0.0)

    outer_products = k[..., :, None] * v[..., None, :]  # (B, H, M, F, E)
    s, z = outer_products.sum(dim=2), k.sum(dim=2)  # S (B, H, F, E), z (B, H, F)
    if state is not None:
        s, z = s + state[0].to(s.dtype), z + state[1].to(z.dtype)
    after = s, z

    if causal:
        s, z = outer_products.cumsum(dim=2), k.cumsum(dim=2)  # S_n (B, H, N, F, E), z_n (B, H, N, F)
        if state is not None:
            s, z = s + state[0].to(s.dtype)[:, :, None], z + state[1].to(z.dtype)[:, :, None]
    else:
        s, z = s[:, :, None], z[:, :, None]  # the same for every n: (B, H, 1, F, E), (B, H, 1, F)

    out = (q[..., None, :] @ s)[..., 0, :]  # q_nᵀ S_n, (B, H, N, E)
    if normalize:
        out = out / ((q * z).sum(dim=-1, keepdim=True) + eps)
    return out.to(out_dtype), after

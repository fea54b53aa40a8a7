"""Relative attention of Transformer-XL (Dai et al. 2019), as the thesis uses it (Csordás 2023, section 3; appendix C.3).

    A_ij = 1/√d_head · [ (q_i + u)ᵀ k_j  +  (q_i + v)ᵀ W_P p_{j−i} ]       per head; weights = softmax over j

p is a sinusoid over the signed distance j − i, as wide as the model; W_P projects it to the heads; u and v are learned, one
vector a head, zero at the start. In the encoder both signs occur (the symmetric form), in the decoder only j ≤ i. The thesis
writes p_{i−j}, its code uses j − i: for this attention the two are the same up to the signs of learned weights. Cross-attention
has no positions in the references, so this kind does not serve there.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention.base import SoftmaxAttentionBase
from fairseq_sg.modules.attention.registry import register_attention
from fairseq_sg.modules.position import angles, sinusoid
from fairseq_sg.ops import relative_logits
from fairseq_sg.ops.precision import accumulation_dtype


@register_attention("relative")
class RelativeAttention(SoftmaxAttentionBase):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. Positions come from here, none from the embeddings.

    The reference never resets these projections, so they keep PyTorch's default initialization (``--attention-init``).
    """

    roles = frozenset({"encoder", "decoder"})
    brings_position = True
    takes = frozenset({"indices"})
    reference_init = "torch"

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.pos_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        if self._init == "glorot":
            nn.init.xavier_uniform_(self.pos_proj.weight)

    def logits_of(self, q: Tensor, keys: int, offset: int, key_padding_mask=None, positions: Optional[Tensor] = None):
        # (q + v) · scale in one pass.
        scaled = torch.add(self.position_bias * self.scale, q, alpha=self.scale)
        if positions is not None:
            return q + self.content_bias, self._between(scaled, positions[offset:], positions)
        distances = torch.arange(-(offset + q.size(2) - 1), keys - offset, device=q.device)
        projected = self.pos_proj(sinusoid(distances, self.embed_dim).to(self.pos_proj.weight.dtype))
        p = projected.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # (H, N + M − 1, D)
        return q + self.content_bias, relative_logits(scaled, p.type_as(q))

    def _between(self, q: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        """q_iᵀ W_P p_{b_j − a_i} for queries at the positions a (N,) and keys at b (M,): (B, H, N, M).

        With r_i = W_Pᵀ q_i, the sum over the frequencies ω of r_sin sin(ω(b − a)) + r_cos cos(ω(b − a)) is, by the addition
        theorems, the product of r_i rotated by ω a_i with the sinusoid of b_j: no N×M×d tensor, whatever the positions.
        """
        r = q @ self.pos_proj.weight.unflatten(0, (self.num_heads, -1)).type_as(q)  # (B, H, N, d)
        if r.size(-1) % 2:
            r = nn.functional.pad(r, (0, 1))
        # Only sines and cosines are rounded to half precision: it cannot tell large angles apart.
        dtype = accumulation_dtype(q)
        at_queries, at_keys = (angles(p, self.embed_dim, dtype) for p in (of_queries, of_keys))
        (sin, cos), (key_sin, key_cos) = ((a.sin().type_as(q), a.cos().type_as(q)) for a in (at_queries, at_keys))
        r_sin, r_cos = r[..., 0::2], r[..., 1::2]
        over_sin, over_cos = r_sin * cos + r_cos * sin, r_cos * cos - r_sin * sin
        return over_sin @ key_sin.T + over_cos @ key_cos.T

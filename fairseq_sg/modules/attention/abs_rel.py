"""Relative attention that may choose absolute positions (Csordás 2023, appendix D.2; Csordás et al. 2022).

    r_i  = σ(W_ar h_i + b_ar)                                                                    per head       (D.6)
    A_ij = 1/√d_head · [ (q_i + u)ᵀ k_j  +  r_i (q_i + v)ᵀ W_P p_{j−i}  +  (1 − r_i) (q_i + v)ᵀ W_P p_j ]       (D.7)

and weights = softmax over j. h_i is the input of the layer; u, v, W_P and the sinusoids p are those of ``relative``.
Positions j count from 0 at the sentence's first real token, whichever side the padding is on; with a memory of earlier
segments, from the start of the stream.

The thesis writes one gate for all heads, p_{i−j} and no scale; its code has a gate a head, p_{j−i} and a scale. The
sign matters here, because p_j and p_{j−i} share W_P.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention.base import register_attention
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.attention.relative import RelativeAttention
from fairseq_sg.modules.position import PRECISE, real_positions, sinusoid, unbounded_sinusoid


@register_attention("abs_rel")
class AbsRelAttention(RelativeAttention):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. Roles encoder and decoder.

    The reference scales by a learned scalar (``--attention-scale learned``). Its projections start Glorot uniform,
    those of keys and values as one matrix; the output projection and the gate have PyTorch's default.
    """

    paper = "Csordás 2023, App. D.2; Csordás et al. 2022"
    takes = frozenset()
    sees_input = True
    counts_padding = True
    reference_init = "fused"

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.gate = nn.Linear(embed_dim, num_heads)

    def terms(self, q, k, context, *, x):
        """The absolute term is a product of queries and keys: it stands beside the content's, in further dimensions."""
        content, position, k = super().terms(q, k, context)
        r = self._relative_share(x).type_as(q)  # (B, H, N, 1)
        p = self._absolute(k, context)  # (B or 1, H, M, D)
        content = torch.cat([content, (1 - r) * position], dim=-1)  # (B, H, N, 2D)
        return content, r * position, torch.cat([k, p.expand_as(k)], dim=-1)

    def _relative_share(self, x: Tensor) -> Tensor:
        """r, (B, H, N, 1)."""
        return self.gate(x).sigmoid().permute(1, 2, 0).unsqueeze(-1)

    def _absolute(self, k: Tensor, context: Context) -> Tensor:
        """W_P p_j, (B or 1, H, M, D), of keys at ``context.first``, ``context.first`` + 1, …."""
        first, keys = context.first, k.size(2)
        if context.key_padding_mask is None:
            positions = torch.arange(first, first + keys, device=k.device).unsqueeze(0)  # (1, M)
        else:
            positions = first + real_positions(context.key_padding_mask)  # (B, M)
        p = (unbounded_sinusoid if first + keys > PRECISE else sinusoid)(positions, self.embed_dim)
        projected = self.pos_proj(p.to(self.pos_proj.weight.dtype))
        return self.key_dropout(projected).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).type_as(k)

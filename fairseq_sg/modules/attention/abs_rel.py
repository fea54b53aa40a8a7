"""Relative attention that may choose absolute positions (Csordás 2023, appendix D.2; Csordás et al. 2022).

    r_i  = σ(W_ar h_i + b_ar)                                                                    per head       (D.6)
    A_ij = 1/√d_head · [ (q_i + u)ᵀ k_j  +  r_i (q_i + v)ᵀ W_P p_{j−i}  +  (1 − r_i) (q_i + v)ᵀ W_P p_j ]       (D.7)

and weights = softmax over j. h_i is the input of the layer; u, v, W_P and the sinusoids p are those of ``relative``.
Positions j count from 0 at the sentence's first real token, whichever side the padding is on; with a memory of earlier
segments, from the start of the stream.

The thesis writes one gate for all heads and p_{i−j}; its code has a gate a head and p_{j−i}. The sign matters here,
because p_j and p_{j−i} share W_P.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention.registry import register_attention
from fairseq_sg.modules.attention.relative import RelativeAttention
from fairseq_sg.modules.position import PRECISE, real_positions, sinusoid


@register_attention("abs_rel")
class AbsRelAttention(RelativeAttention):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. Roles encoder and decoder.

    The reference scales by a learned scalar (``--attention-scale learned``). Its projections start Glorot uniform,
    those of keys and values as one matrix; the output projection and the gate have PyTorch's default.
    """

    takes = frozenset()
    sees_input = True
    counts_positions = True
    reference_init = "fused"

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.gate = nn.Linear(embed_dim, num_heads)

    def logits_of(
        self, q: Tensor, keys: int, offset: int, key_padding_mask: Tensor | None = None, *, x: Tensor, first: int = 0
    ):
        queries, relative = super().logits_of(q, keys, offset)
        p = self._absolute(q, keys, key_padding_mask, first)
        absolute = ((q + self.position_bias) * self.scale) @ p.transpose(-1, -2)
        r = self._relative_share(x)
        return queries, r * relative + (1 - r) * absolute

    def _operands(
        self, q: Tensor, k: Tensor, offset: int, key_padding_mask: Tensor | None = None, *, x: Tensor, first: int = 0
    ):
        """The absolute term is a product of queries and keys: it stands beside the content's, in further dimensions."""
        p = self._absolute(q, k.size(2), key_padding_mask, first)
        r, of_position = self._relative_share(x).type_as(q), q + self.position_bias
        of_content = torch.cat([q + self.content_bias, (1 - r) * of_position], dim=-1)
        return of_content, r * of_position, torch.cat([k, p.expand_as(k)], dim=-1)

    def _relative_share(self, x: Tensor) -> Tensor:
        """r, (B, H, N, 1)."""
        return self.gate(x).sigmoid().permute(1, 2, 0).unsqueeze(-1)

    def _absolute(self, q: Tensor, keys: int, key_padding_mask: Tensor | None, first: int) -> Tensor:
        """W_P p_j, (B or 1, H, M, D), for keys at ``first``, ``first`` + 1, …."""
        if key_padding_mask is None:
            positions = torch.arange(first, first + keys, device=q.device).unsqueeze(0)
        else:
            positions = first + real_positions(key_padding_mask)
        dtype = torch.float64 if first + keys > PRECISE else torch.float32
        projected = self.pos_proj(sinusoid(positions, self.embed_dim, dtype).to(self.pos_proj.weight.dtype))
        return self.key_dropout(projected).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).type_as(q)

"""Relative attention of Transformer-XL (Dai et al. 2019), as the thesis uses it (Csordás 2023, section 3; appendix C.3).

    A_ij = 1/√d_head · [ (q_i + u)ᵀ k_j  +  (q_i + v)ᵀ W_P p_{j−i} ]       per head; weights = softmax over j

p is a sinusoid over the signed distance j − i, as wide as the model; W_P projects it to the heads; u and v are learned, one
vector a head, zero at the start. In the encoder both signs occur (the symmetric form), in the decoder only j ≤ i. The thesis
writes p_{i−j}, its code uses j − i: for this attention the two are the same up to the signs of learned weights. Cross-attention
has no positions in the references, so this kind does not serve there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention.base import SoftmaxAttentionBase
from fairseq_sg.modules.attention.registry import register_attention
from fairseq_sg.modules.embedding import sinusoid
from fairseq_sg.ops import relative_logits


@register_attention("relative")
class RelativeAttention(SoftmaxAttentionBase):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. Positions come from here, none from the embeddings.

    The reference never resets these projections, so they keep PyTorch's default initialization (``--attention-init``).
    """

    roles = frozenset({"encoder", "decoder"})
    brings_position = True
    reference_init = "torch"

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.pos_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        if self._init == "glorot":
            nn.init.xavier_uniform_(self.pos_proj.weight)

    def logits_of(self, q: Tensor, keys: int, offset: int):
        distances = torch.arange(-(offset + q.size(2) - 1), keys - offset, device=q.device)
        positions = self.pos_proj(sinusoid(distances, self.embed_dim).to(self.pos_proj.weight.dtype))
        p = positions.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # (H, N + M − 1, D)
        bias = relative_logits((q + self.position_bias) * self.scale, p.type_as(q))
        return q + self.content_bias, bias

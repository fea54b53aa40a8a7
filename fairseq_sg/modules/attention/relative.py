"""Relative attention of Transformer-XL (Dai et al. 2019), as the thesis uses it (Csordás 2023, section 4.2.1;
appendix C.3).

    A_ij = 1/√d_head · [ (q_i + u)ᵀ k_j  +  (q_i + v)ᵀ W_P p_{j−i} ]       per head; weights = softmax over j

p is a sinusoid over the signed distance j − i, as wide as the model; W_P projects it to the heads; u and v are learned,
one vector a head, zero at the start. In the encoder both signs occur (the symmetric form), in the decoder only j ≤ i.
The thesis writes p_{i−j} and 1/√d_model, its code uses j − i and 1/√d_head. For this attention, the two orders of i and
j are the same up to the signs of learned weights. Cross-attention has no positions in the references, so this kind does
not serve there.

The operator ``relative_attention`` has all of it, in several implementations, except returned weights, a window, and
distances that are not 1 apart. There the operator ``relative_logits`` makes a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.base import register_attention
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.attention.softmax import SoftmaxAttentionBase, SoftmaxOptions
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.cpu.linear import Linear
from fairseq_sg.modules.position import angles, gives_indices, sinusoid
from fairseq_sg.ops import relative_attention, relative_logits
from fairseq_sg.ops.dispatch import requested
from fairseq_sg.ops.operators import TRITON
from fairseq_sg.ops.precision import accumulation_dtype


@dataclass
class RelativeOptions(SoftmaxOptions):
    relative_key_dropout: float = field(
        default=0.0,
        metadata={
            "help": "dropout on relative attention's projected keys and distances, where the released code of the "
            "Neural Data Router's baselines has it instead of on the weights (with --attention-dropout 0)",
            "least": 0,
            "most": 1,
        },
    )


@register_attention("relative")
class RelativeAttention(SoftmaxAttentionBase):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. Positions come from here, none from the
    embeddings.

    The reference for SCAN to Mathematics never resets these projections, so they keep PyTorch's default initialization.
    That for CTL, arithmetic, ListOps and CTL++ does (``--attention-init fused``), and scales by a learned scalar
    (``--attention-scale learned``).

    Args (besides those of ``SoftmaxAttentionBase``):
        relative_key_dropout: dropout on k_j and on W_P p_r, in training.
    """

    paper = "Dai et al. 2019; Csordás 2023, App. C.3"
    roles = frozenset({"encoder", "decoder"})
    brings_position = True
    takes = frozenset({"indices"})
    options = RelativeOptions
    reference_init = "torch"

    def __init__(self, embed_dim: int, num_heads: int, *, relative_key_dropout: float = 0.0, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.key_dropout = Dropout(relative_key_dropout)
        self.pos_proj = Linear(embed_dim, num_heads * self.head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        if self._init in ("glorot", "fused"):
            nn.init.xavier_uniform_(self.pos_proj.weight)

    @classmethod
    def keyword_arguments(cls, config: Any) -> dict[str, Any]:
        if config.relative_key_dropout and gives_indices(config):
            raise UsageError(
                f"--relative-key-dropout is on projected distances, and with --position {config.position} none are "
                "projected: choose --attention-dropout, or another --position"
            )
        return super().keyword_arguments(config)

    def terms(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the content, queries of the position, and keys: q_i + u, q_i + v, k_j."""
        return q + self.content_bias, q + self.position_bias, self.key_dropout(k)

    def logits_of(self, q, k, offset, context, **x):
        keys = k.size(2)
        content, position, k = self.terms(q, k, context, **x)
        if context.positions is not None:
            of_queries = context.positions[offset : offset + q.size(2)]
            return content, k, self._between(position * self.scale, of_queries, context.positions)
        # Scale the distance keys, the smaller tensor.
        return content, k, relative_logits(position, self._distances(q, keys, offset) * self.scale)

    def _distances(self, q: Tensor, keys: int, offset: int) -> Tensor:
        """W_P p_r of all distances r, from the last query to the first key, to the first query to the last key.

        (H, N + M − 1, D).
        """
        distances = torch.arange(-(offset + q.size(2) - 1), keys - offset, device=q.device)  # (N + M − 1,)
        projected = self.pos_proj(sinusoid(distances, self.embed_dim).to(self.pos_proj.weight.dtype))  # (…, H·D)
        return self.key_dropout(projected).unflatten(-1, (self.num_heads, -1)).transpose(0, 1).type_as(q)

    def outputs_of(self, q, k, v, offset, context, **x):
        if not self._operator_serves(q, context):
            return super().outputs_of(q, k, v, offset, context, **x)
        keys, padding = k.size(2), context.key_padding_mask
        content, position, k = self.terms(q, k, context, **x)
        s = self._factor(q, keys, padding, offset)  # (B, H, N, 1) or broadcastable
        if s is not None:
            content, position = content * s, position * s
        # A single query is the last of the keys that it sees.
        causal = self.causal and q.size(2) > 1
        p = self._distances(q, keys, offset)  # (H, N + M − 1, D)
        dropout_p = self.attention_dropout if self.drops else 0.0
        options = {"causal": causal, "key_padding_mask": padding, "scale": self.scale, "dropout_p": dropout_p}
        return relative_attention(content, position, k, v, p, **options), None

    def _operator_serves(self, q: Tensor, context: Context) -> bool:
        """Whether ``relative_attention`` computes the same, and is wanted.

        On a CPU, logits and a softmax take less time in training, unless the operator's implementation is named. With
        dropout they run there for every name but ``triton``.
        """
        if context.return_weights or self.window > 0 or context.positions is not None:
            return False
        if q.device.type != "cpu":
            return True
        named = requested("relative_attention")
        return named == TRITON if self.drops and self.attention_dropout > 0 else named is not None

    def _between(self, q: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        """q_iᵀ W_P p_{b_j − a_i} for queries at positions a (N,) and keys at b (M,): (B, H, N, M).

        With r_i = W_Pᵀ q_i, the sum over the frequencies ω of r_sin sin(ω(b − a)) + r_cos cos(ω(b − a)) is, by the
        addition theorems, the product of r_i rotated by ω a_i with the sinusoid of b_j. No N×M×d tensor is needed.
        """
        r = q @ self.pos_proj.weight.unflatten(0, (self.num_heads, -1)).type_as(q)  # (B, H, N, d)
        if r.size(-1) % 2:
            r = nn.functional.pad(r, (0, 1))  # (B, H, N, d + 1)
        # Only sines and cosines are rounded to half precision: it cannot tell large angles apart.
        dtype = accumulation_dtype(q)
        at_queries, at_keys = (angles(p, self.embed_dim, dtype) for p in (of_queries, of_keys))  # (N, d/2), (M, d/2)
        (sin, cos), (key_sin, key_cos) = ((a.sin().type_as(q), a.cos().type_as(q)) for a in (at_queries, at_keys))
        r_sin, r_cos = r[..., 0::2], r[..., 1::2]  # (B, H, N, d/2)
        over_sin, over_cos = r_sin * cos + r_cos * sin, r_cos * cos - r_sin * sin
        return over_sin @ key_sin.T + over_cos @ key_cos.T  # (B, H, N, M)

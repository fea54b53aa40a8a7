"""Linear attention with normalized Queries and Keys (Katharopoulos et al. 2020; Park & Kim 2024).

    Q̂ = Norm(φ(Q)),  K̂ = Norm(φ(K)),   O_n = Q̂_n Σ_i K̂_iᵀ V_i / (Q̂_n · Σ_i K̂_i + ε)

over all i in the encoder and in cross-attention, over i ≤ n in the decoder. No 1/√d scale: the maps that need one have their own.
There are no attention probabilities and so no dropout on them (``--attention-output-dropout`` drops features of the output).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_sg.modules.attention.base import Attention, AttentionOptions
from fairseq_sg.modules.attention.registry import register_attention
from fairseq_sg.modules.feature_maps import build_feature_map
from fairseq_sg.modules.normalization import build_qk_norm
from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state


@dataclass
class LinearOptions(AttentionOptions):
    feature_map: str = field(default="elu", metadata={"help": "feature map φ of linear attention: elu (elu + 1)"})
    qk_norm: str = field(
        default="none",
        metadata={"help": "normalization of φ(Q) and φ(K) in linear attention: none, l1, l2, rms (Park & Kim 2024)"},
    )
    linear_attention_eps: float = field(default=1e-6, metadata={"help": "ε added to linear attention's denominator"})


@register_attention("linear")
class LinearAttention(Attention):
    """Time O(N·F·E), decoding with a constant state per head: S (F, E) and z (F), both float32.

    Args (besides those of :class:`Attention`):
        feature_map: name in ``FEATURE_MAP_REGISTRY``.
        qk_norm: name in ``QK_NORM_REGISTRY``; Queries and Keys have a module each, shared by the heads.
        linear_attention_eps: ε of the denominator.
    """

    options = LinearOptions

    def __init__(self, embed_dim, num_heads, *, feature_map="elu", qk_norm="none", linear_attention_eps=1e-6, **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        self.feature_map = build_feature_map(feature_map, self.head_dim)
        self.q_norm = build_qk_norm(qk_norm, self.feature_map.features)
        self.k_norm = build_qk_norm(qk_norm, self.feature_map.features)
        self.eps = linear_attention_eps

    def _queries(self, q: Tensor) -> Tensor:
        return self.q_norm(self.feature_map.queries(q))

    def _keys(self, k: Tensor) -> Tensor:
        return self.k_norm(self.feature_map.keys(k))

    def attend(self, q, k, v, key_padding_mask, attn_mask, need_weights):
        self._check_mask(attn_mask)
        q, k = self._queries(q), self._keys(k)
        out = linear_attention(q, k, v, causal=self.causal, key_padding_mask=key_padding_mask, eps=self.eps)
        return out, self._implied_weights(q, k, key_padding_mask) if need_weights else None

    def _implied_weights(self, q: Tensor, k: Tensor, key_padding_mask) -> Tensor:
        """The matrix A with O = A V: A_ni = Q̂_n·K̂_i / (Q̂_n · Σ_i K̂_i + ε), (B, H, N, M)."""
        similarity = q @ k.transpose(-1, -2)
        if self.causal:
            similarity = similarity.tril()
        if key_padding_mask is not None:
            similarity = similarity.masked_fill(key_padding_mask[:, None, None, :], 0.0)
        return similarity / (similarity.sum(-1, keepdim=True) + self.eps)

    def extend(self, q, k, v, key_padding_mask, state):
        before = None if state is None else (state["S"], state["z"])
        out, (S, z) = linear_attention(
            self._queries(q), self._keys(k), v,
            causal=True, key_padding_mask=key_padding_mask, state=before, return_state=True, eps=self.eps,
        )  # fmt: skip
        return out, {"S": S, "z": z}

    def fold(self, k, v, key_padding_mask):
        S, z = linear_attention_state(self._keys(k), v, key_padding_mask=key_padding_mask)
        return {"S": S, "z": z}

    def read(self, q, state):
        return linear_attention_read(self._queries(q), (state["S"], state["z"]), eps=self.eps)

    def _check_mask(self, attn_mask) -> None:
        """fairseq's own decoder layers hand every self-attention the causal mask; any other one cannot be honoured."""
        if attn_mask is None:
            return
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask < 0
        if not self.causal or not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            raise ValueError(
                "linear attention has no attn_mask: it is causal in the decoder role and sees all keys in the others; "
                "pass attn_mask=None, and key_padding_mask for padding"
            )

"""Softmax attention (Vaswani et al. 2017, eq. 1): softmax(Q Kᵀ / √d_head) V, with positions from the embeddings.

Without biases in the projections and with scale 1/√d_head, as the reference implementations of the thesis have it; its
appendix C.3 writes 1/√d_model (``--attention-scale model_dim``).
"""

from fairseq_sg.modules.attention.base import SoftmaxAttentionBase
from fairseq_sg.modules.attention.registry import register_attention


@register_attention("softmax")
class SoftmaxAttention(SoftmaxAttentionBase):
    """Time O(N·M·d), memory O(N·M) at worst; decoding keeps all keys and values."""

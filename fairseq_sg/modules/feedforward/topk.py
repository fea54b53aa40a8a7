"""The dense layer with the top-K activation (Csordás 2023, section 7.2.1): W₂ · topK(Dropout(ReLU(W₁ x + b₁))) + b₂.

All but the K largest hidden units of a token are set to 0 (7.6, 7.7). Units equal to the K-th are kept too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward.base import register_feedforward
from fairseq_sg.modules.feedforward.dense import DenseFeedForward, DenseOptions


@dataclass
class TopKOptions(DenseOptions):
    topk_k: int = field(
        default=128, metadata={"help": "hidden units of a token that the topk feedforward layer keeps", "least": 1}
    )


@register_feedforward("topk")
class TopKFeedForward(DenseFeedForward):
    """The dense layer with K of its hidden units kept.

    Args:
        topk_k: K. A number that is not from 1 to ffn_dim is a UsageError. The others are those of `DenseFeedForward`.
    """

    paper = "Csordás 2023, 7.2.1"
    options = TopKOptions

    def __init__(self, dim: int, ffn_dim: int, *, topk_k: int = 128, **kwargs):
        super().__init__(dim, ffn_dim, **kwargs)
        if not 1 <= topk_k <= ffn_dim:
            raise UsageError(f"--topk-k is {topk_k} of {ffn_dim} hidden units: choose a number from 1 to {ffn_dim}")
        self.k = topk_k

    def hidden(self, x):
        u = super().hidden(x)
        smallest = u.detach().topk(self.k).values[..., -1:]
        return u.masked_fill(u < smallest, 0.0)

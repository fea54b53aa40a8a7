"""Compositional attention (Mittal et al. 2022): searches choose positions, retrievals choose Values.

S searches (the heads) and R retrievals, at each position i:

    P_s     = softmax(Q_s K_sᵀ / √d_head)                        the searches' weights, as in softmax attention
    O_{s,r} = P_s V_r,   V_r = W_r H                             R Value projections of width d_head, for all searches
    w_{s,r} = softmax over r of  q̄_s · k̄_{s,r} / √d_qk           q̄ = W̄_q h_i + b,  k̄_{s,r} = W̄_k O_{s,r}
    out_s   = Σ_r w_{s,r} O_{s,r}

and an output projection of all out_s side by side. h_i is the input of the layer (the decoder's, in cross-attention).

``--retrieval-score concat`` is the released code's other score, a linear layer on [q̄_s, O_{s,r}]. Its term for
q̄_s is the same for all r, so the softmax drops it, and w_{s,r} = softmax over r of a·O_{s,r} remains. For the same
reason k̄ has no bias here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.base import register_attention
from fairseq_sg.modules.attention.softmax import SoftmaxAttentionBase, SoftmaxOptions


@dataclass
class CompositionalOptions(SoftmaxOptions):
    retrievals: int = field(
        default=2,
        metadata={
            "help": "R, the number of retrievals of compositional attention; its searches are the heads",
            "least": 1,
        },
    )
    retrieval_dim: int | None = field(
        default=None,
        metadata={
            "help": "d_qk, the width of the queries and keys that choose among the retrievals; for --retrieval-score "
            "dot (default: 32)",
            "least": 1,
        },
    )
    retrieval_score: str = field(
        default="dot",
        metadata={
            "help": "how retrievals are chosen: by a 'dot' product with a query, or 'concat', the released code's "
            "other score, which depends only on what was retrieved",
            "choices": ("dot", "concat"),
        },
    )


@register_attention("compositional")
class CompositionalAttention(SoftmaxAttentionBase):
    """Time O(N·M·(d + R·d)), memory O(N·M) at worst; decoding keeps all keys and values.

    ``--attention-init`` is of the projections that softmax attention has; those of the retrieval keep PyTorch's
    default, as in the released code. The weights it returns are the searches' P_s, and attention dropout is on them.
    A loss on the Values sees those of all retrievals, (B, R, M, E).

    Args (besides those of :class:`SoftmaxAttentionBase`):
        retrievals: R.
        retrieval_dim: d_qk; 32 unless given, and only with ``dot``.
        retrieval_score: ``dot`` or ``concat``.

    Raises:
        UsageError: for a wrong option.
    """

    paper = "Mittal et al. 2022"
    options = CompositionalOptions
    sees_input = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        retrievals: int = 2,
        retrieval_dim: int | None = None,
        retrieval_score: str = "dot",
        **kwargs,
    ):
        given = {"retrievals": retrievals, "retrieval_dim": retrieval_dim, "retrieval_score": retrieval_score}
        ranges.check(CompositionalOptions, given)
        if retrieval_dim is not None and retrieval_score != "dot":
            raise UsageError(f"--retrieval-dim {retrieval_dim} has no effect without --retrieval-score dot")
        if retrievals == 1 and (retrieval_dim is not None or retrieval_score != "dot"):
            raise UsageError("--retrieval-dim and --retrieval-score have no effect with --retrievals 1: leave them out")
        width = 32 if retrieval_dim is None else retrieval_dim
        super().__init__(embed_dim, num_heads, value_heads=retrievals, **kwargs)
        if retrieval_score == "dot":
            self.retrieval_q = nn.Linear(embed_dim, num_heads * width)
            self.retrieval_k = nn.Linear(self.head_dim, width, bias=False)
        else:
            self.retrieval_q = None
            self.retrieval_k = nn.Linear(self.head_dim, 1, bias=False)
            # The start of the released layer, whose input is q̄_s and O_{s,r} side by side.
            bound = (self.head_dim + width) ** -0.5
            nn.init.uniform_(self.retrieval_k.weight, -bound, bound)

    def outputs_of(self, q, k, v, offset, context, *, x):
        side_by_side = v.transpose(1, 2).flatten(2)  # (B, M, R·E)
        v = side_by_side.unsqueeze(1).expand(-1, self.num_heads, -1, -1)  # (B, S, M, R·E)
        found, weights = super().outputs_of(q, k, v, offset, context)  # (B, S, N, R·E)
        return self._retrieve(found.unflatten(-1, (self.value_heads, -1)), x), weights

    def _retrieve(self, found: Tensor, x: Tensor) -> Tensor:
        """Σ_r w_{s,r} O_{s,r} of O (B, S, N, R, E): (B, S, N, E)."""
        scores = self.retrieval_k(found)  # k̄ (B, S, N, R, d_qk), or the scores themselves
        if self.retrieval_q is not None:
            query = self._split_heads(self.retrieval_q(x), self.num_heads).unsqueeze(-1) / math.sqrt(scores.size(-1))
            scores = scores @ query
        return (scores.softmax(-2) * found).sum(-2)

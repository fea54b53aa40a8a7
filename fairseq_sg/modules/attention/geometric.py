"""Geometric attention of the Neural Data Router (Csordás et al. 2022; Csordás 2023, section 5.1.2).

    P_ij = σ( α (W_q h_i + b)ᵀ W_k h_j + β D_ij + γ )                                      (eq. 5.10)
    A_ij = P_ij Π_{k closer to i than j} (1 − P_ik),   A_ii = 0                            (eq. 5.7, 5.8)
    D_ij = forward channel of Linear(h_i) if j > i, backward channel if j < i (eq. 5.9)

The order around i is i + 1, i − 1, i + 2, i − 2, …: the closest match gets the weight, on either side and at any
distance. Keys behind a certain match get none. There is no softmax, and a row may sum to less than 1, or to nearly 0
where nothing matches. α, β and γ are learned scalars of the layer, shared by its heads; they start at 1/√d_head, 1 and
0. b is a bias for each head, zero at the start.

The paper has encoders only. In the decoder the candidates are j < i, in the order i − 1, i − 2, …. A position does not
attend to itself there either. Position 0 therefore sees no key, and its output is 0 (or the bias of the output
projection): only the residual connection carries it on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.base import register_attention
from fairseq_sg.modules.attention.window import WindowedAttention, WindowOptions
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.cpu.linear import Linear
from fairseq_sg.ops import geometric_attention
from fairseq_sg.ops.precision import accumulation_dtype
from fairseq_sg.ops.torch_attention import hidden_keys


@dataclass
class GeometricOptions(WindowOptions):
    geometric_key_dropout: float = field(
        default=0.0,
        metadata={
            "help": "dropout on geometric attention's projected keys, as the released code has it (0.1 in the Neural "
            "Data Router); there is none on its weights",
            "least": 0,
            "most": 1,
        },
    )
    geometric_normalize: bool = field(
        default=False,
        metadata={
            "help": "divide the rows of geometric attention's weights by their sums (released code: off in the Neural "
            "Data Router, on in its baselines without copy gate)"
        },
    )
    no_directional_encoding: bool = field(
        default=False,
        metadata={"help": "geometric attention without directional encoding (the D of the paper's eq. 5.10)"},
    )


@register_attention("geometric")
class GeometricAttention(WindowedAttention):
    """Time O(N·M·d), memory O(N·M); decoding keeps all keys and values. No positions are added to the embeddings.

    With ``attention_bias`` the query projection's bias is b, and the keys, values and output have biases too.

    ``--attention-init`` is of the four projections; the directional encoding keeps PyTorch's default, as in the
    released code.

    Args (besides those of :class:`WindowedAttention`):
        geometric_key_dropout: dropout on the projected keys, in training.
        geometric_normalize: whether the rows of A are divided by their sums (at least 1e-12); rows of nothing stay 0.
        no_directional_encoding: leaves out β D_ij.

    Raises:
        UsageError: for a window of 1, and for a wrong option.
    """

    paper = "Csordás et al. 2022; Csordás 2023, 5.1.2"
    roles = frozenset({"encoder", "decoder"})
    brings_position = True
    sees_input = True
    options = GeometricOptions
    reference_init = "fans_of_a_head"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_bias: bool = False,
        geometric_key_dropout: float = 0.0,
        geometric_normalize: bool = False,
        no_directional_encoding: bool = False,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, attention_bias=attention_bias, **kwargs)
        if self.window == 1:
            option = "--attention-window" if self.causal else "--encoder-attention-window"
            raise UsageError(
                f"{option} 1 leaves geometric attention nothing to see, as no position attends to itself: choose 2 or "
                "more"
            )
        if self.window == 2 and self.causal and geometric_normalize:
            raise UsageError(
                "--attention-window 2 leaves geometric attention one position, whose weight is 1 with "
                "--geometric-normalize: choose 3 or more, or leave --geometric-normalize out"
            )
        self.normalize = geometric_normalize
        self.key_dropout = Dropout(geometric_key_dropout)
        self.query_bias = None if attention_bias else nn.Parameter(torch.zeros(num_heads, 1, self.head_dim))
        self.alpha = nn.Parameter(torch.full((1,), self.head_dim**-0.5))
        self.gamma = nn.Parameter(torch.zeros(1))
        self.directional = None
        if not no_directional_encoding:
            self.beta = nn.Parameter(torch.ones(1))
            # Channels of a head: backward and, where there is anything ahead, forward.
            self.directional = Linear(embed_dim, num_heads * (1 if self.causal else 2))

    def reset_parameters(self) -> None:
        """As in ``Attention``; ``fans_of_a_head``: Glorot uniform with the fans of one head, U(±√(6/(d + d_head)))."""
        super().reset_parameters()
        if self._init == "fans_of_a_head":
            bound = math.sqrt(6 / (self.embed_dim + self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
                nn.init.uniform_(projection.weight, -bound, bound)

    def outputs_of(self, q, k, v, offset, context, *, x):
        weights = self._weights(q, k, context.key_padding_mask, offset, x).type_as(v)
        return weights @ v, weights if context.return_weights else None

    def _weights(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, offset: int, x: Tensor) -> Tensor:
        """A (B, H, N, M), in float32 or better."""
        logits = self._logits(q, k, offset, x)
        if self.window:
            far = hidden_keys(q.size(2), k.size(2), None, False, offset, q.device, self.window)
            logits = logits if far is None else logits.masked_fill(far, -math.inf)  # P = 0
        weights = geometric_attention(logits, key_padding_mask=key_padding_mask, causal=self.causal, offset=offset)
        return nn.functional.normalize(weights, p=1.0, dim=-1, eps=1e-12) if self.normalize else weights

    def _logits(self, q: Tensor, k: Tensor, offset: int, x: Tensor) -> Tensor:
        """α (q_i + b)ᵀ k_j + β D_ij + γ, (B, H, N, M), in float32 or better."""
        accurate = accumulation_dtype(q)
        if self.query_bias is not None:
            q = q + self.query_bias
        content = ((q * self.alpha.type_as(q)) @ self.key_dropout(k).transpose(-1, -2)).to(accurate)  # (B, H, N, M)
        if self.directional is None:
            return content + self.gamma
        direction = self._split_heads(self.directional(x), self.num_heads).to(accurate)  # (B, H, N, 1 or 2)
        shift = self.beta * direction + self.gamma
        if self.causal:
            return content + shift
        backward, forward = shift.split(1, dim=-1)  # (B, H, N, 1)
        ahead = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(offset + 1)
        return content + torch.where(ahead, forward, backward)

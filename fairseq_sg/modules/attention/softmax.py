"""Softmax attention (Vaswani et al. 2017, eq. 1): softmax(Q Kᵀ / √d_head) V, with positions from the embeddings.

Without biases in the projections and with scale 1/√d_head, as the reference implementations of the thesis have it; its
appendix C.3 writes 1/√d_model (``--attention-scale model_dim``). ``SoftmaxAttentionBase`` is the family of kinds that
turn logits into weights with a softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.attention.base import ROLES, register_attention
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.attention.masks import count_visible
from fairseq_sg.modules.attention.window import WindowedAttention, WindowOptions, positions_before
from fairseq_sg.modules.cpu.dropout import Drops, dropout
from fairseq_sg.modules.cpu.softmax import closed_form_is_faster, closed_form_softmax
from fairseq_sg.modules.position import MakePosition, rotate_both
from fairseq_sg.ops.precision import accumulation_dtype
from fairseq_sg.ops.torch_attention import hidden_keys, masked_attention, visible_softmax


@dataclass
class SoftmaxOptions(WindowOptions):
    """Options of the attentions that turn logits into weights with a softmax."""

    attention_dropout: float | None = field(
        default=None,
        metadata={"help": "dropout on softmax attention's weights (default: --dropout)", "least": 0, "most": 1},
    )
    attention_scale: str = field(
        default="head_dim",
        metadata={
            "help": "softmax logits are divided by the root of 'head_dim' (as released code does) or 'model_dim' "
            "(thesis, C.3), or multiplied by a 'learned' scalar, 1/√head_dim at first (as the Neural Data Router's "
            "code does)",
            "choices": ("head_dim", "model_dim", "learned"),
        },
    )
    logit_scale: str = field(
        default="sqrt_dim",
        metadata={
            "help": "'sqrt_dim': nothing but --attention-scale; 'log_length': softmax logits are also multiplied by "
            "the natural logarithm of the number of visible keys (Chiang & Cholak 2022)",
            "choices": ("sqrt_dim", "log_length"),
        },
    )


class SoftmaxAttentionBase(Drops, WindowedAttention):
    """The family of softmax kinds: weights from logits, dropout on them, a cache of keys and values.

        A = softmax( s · (QKᵀ/√d + bias) + position bias ),   s = 1, or ln(number of visible keys) with ``log_length``

    where a learned scalar may stand in the place of 1/√d. A kind changes queries and keys, or adds a bias to the
    logits, by overriding ``logits_of``. A position may give a rotation of queries and keys, or a bias.

    Args (besides those of :class:`WindowedAttention`):
        attention_dropout: dropout on the weights after the softmax, in training; None for none.
        attention_scale: ``head_dim`` or ``model_dim``: logits are multiplied by 1/√ of it; or ``learned``: by a scalar,
            one for the module, that starts at 1/√head_dim.
        logit_scale: ``sqrt_dim`` or ``log_length`` (Chiang & Cholak 2022, section 5.3).
        position: makes a module with ``rotate`` or ``bias``, for a width and a number of heads (``modules.position``).
    """

    roles = frozenset(ROLES)
    options = SoftmaxOptions
    takes = frozenset({"rotation", "bias"})

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_dropout: float | None = None,
        attention_scale: str = "head_dim",
        logit_scale: str = "sqrt_dim",
        position: MakePosition | None = None,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        given = {
            "attention_dropout": attention_dropout,
            "attention_scale": attention_scale,
            "logit_scale": logit_scale,
        }
        ranges.check(SoftmaxOptions, given)
        self.scale = (self.embed_dim if attention_scale == "model_dim" else self.query_width) ** -0.5
        self.learned_scale = nn.Parameter(torch.full((1,), self.scale)) if attention_scale == "learned" else None
        self.log_length = logit_scale == "log_length"
        self.attention_dropout = attention_dropout or 0.0
        self.position = None if position is None else position(self.qk_head_dim, num_heads)

    def logits_of(
        self, q: Tensor, k: Tensor, offset: int, context: Context, **x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys whose product are the logits, and a bias (…, N, M) on the scaled logits, or None.

        ``offset`` is the position of the first query among the keys.
        """
        return q, k, None

    def attend(self, q, k, v, context, **x):
        q, k = rotate_both(self.position, q, k, self.offset(q, k), 0)
        return super().attend(*self.joined(context, q, k, v), context, **x)

    def extend(self, q, k, v, state, context, **x):
        first = sum(positions_before(state))
        return super().extend(*rotate_both(self.position, q, k, first, first), v, state, context, **x)

    def outputs_of(self, q, k, v, offset, context, **x):
        """softmax(s · (q kᵀ · scale + bias) + position bias) v, (B, H, N, E), and the weights if they are wanted."""
        queries, keys, padding = q.size(2), k.size(2), context.key_padding_mask
        q, k, bias = self.logits_of(q, k, offset, context, **x)
        s = self._factor(q, keys, padding, offset)
        if s is not None:
            q, bias = q * s, None if bias is None else bias * s
        if self.position is not None and self.position.gives == "bias":
            # With a batch dimension: fused kernels take masks of two or four dimensions alone.
            position_bias = self.position.bias(queries, keys, offset).unsqueeze(0).type_as(q)  # (1, H, N, M)
            bias = position_bias if bias is None else bias + position_bias
        p = self.attention_dropout if self.drops else 0.0
        if not context.return_weights:
            out = softmax_of_logits(
                q, k, v, bias, padding, self.causal, offset, window=self.window, dropout_p=p, scale=self.scale
            )
            return out, None
        hidden = hidden_keys(queries, keys, padding, self.causal, offset, q.device, self.window)
        weights = self._weights(q, k, bias, hidden)  # (B, H, N, M)
        return dropout(weights, p, self.drops) @ v, weights

    def _factor(self, q: Tensor, keys: int, key_padding_mask: Tensor | None, offset: int) -> Tensor | None:
        """The factor s of the logits beside ``scale``, broadcastable to (B, H, N, 1), or None for 1."""
        dtype = accumulation_dtype(q)
        factors = []
        if self.log_length:
            seen = count_visible(q.size(2), keys, key_padding_mask, self.causal, offset, q.device, self.window)
            factors.append(seen.to(dtype).log())  # (B or 1, 1, N or 1, 1)
        if self.learned_scale is not None:
            factors.append(self.learned_scale.to(dtype) / self.scale)
        return math.prod(factors).type_as(q) if factors else None

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
        logits = (q @ k.transpose(-1, -2)) * self.scale  # (B, H, N, M)
        if bias is not None:
            logits = logits + bias
        return visible_softmax(logits, hidden)


def softmax_of_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    offset: int,
    *,
    window: int = 0,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v, (B, H, N, E), by torch's ``scaled_dot_product_attention``.

    Args:
        q, k, v: (B, H, N, D), (B, H, M, D), (B, H, M, E).
        bias: broadcastable to (B, H, N, M), or None.
        key_padding_mask: (B, M) bool, or None.
        causal, offset, window: see ``modules.attention.masks``.

    Returns:
        (B, H, N, E). The output of a query that sees no key is 0, and gives no gradient.
    """
    closed_form = closed_form_is_faster(q, k, v, bias, dropout_p)
    if causal and bias is None and key_padding_mask is None and offset == 0 and not (window or closed_form):
        # The bare triangle: torch knows it without a tensor.
        return masked_attention(q, k, v, None, dropout_p=dropout_p, is_causal=True, scale=scale)
    hidden = hidden_keys(q.size(2), k.size(2), key_padding_mask, causal, offset, q.device, window)
    if closed_form:
        return closed_form_softmax(q, k, v, bias, hidden, dropout_p, scale)
    if bias is not None:
        mask = bias if hidden is None else bias.masked_fill(hidden, -math.inf)
    else:
        mask = None if hidden is None else ~hidden
    return masked_attention(q, k, v, mask, dropout_p=dropout_p, scale=scale)


@register_attention("softmax")
class SoftmaxAttention(SoftmaxAttentionBase):
    """Time O(N·M·d), memory O(N·M) at worst; decoding keeps all keys and values."""

    paper = "Vaswani et al. 2017"
    joins_coordinates = True

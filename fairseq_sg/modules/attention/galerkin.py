"""Galerkin and Fourier attention (Cao 2021, "Choose a Transformer: Fourier or Galerkin"): means over keys, no softmax.

    galerkin:   O = Q (LN(K)ᵀ LN(V)) / n                          eq. G of the author's post on the paper
    fourier:    O = (LN(Q) LN(K)ᵀ) V / n · 1/√d_head

LN is a layer norm over a head's features with a gain and a bias for each head; n is the number of keys that are seen,
and padding has LN(K) = 0. Both are linear attention without a denominator, and the order of the products is free:
neither forms an N×M matrix, although the released code of Fourier attention does.

On a grid, the coordinates of its points can be columns of every head, joined to q, k and v after the norms, as in the
released code. Then d_head is the widened width, and an output projection follows. ``--galerkin-average sum`` leaves out
the division by n, and a number takes its place: controls, which grow with the number of points.

The paper has neither padding nor a causal form. In the decoder role this code sums over the prefix alone and divides
by the number of keys in it. Rotary positions are ours too: they rotate Q and K after their norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.base import ROLES, Attention, AttentionOptions, register_attention
from fairseq_sg.modules.attention.masks import count_visible, products, zero_hidden
from fairseq_sg.modules.position import MakePosition, rotate_both
from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state
from fairseq_sg.ops.precision import accurate, to_accumulation_dtype


@dataclass
class GalerkinOptions(AttentionOptions):
    galerkin_norm_eps: float = field(
        default=1e-5, metadata={"help": "ε of the layer norms inside Galerkin and Fourier attention", "above": 0}
    )
    galerkin_average: str = field(
        default="mean",
        metadata={
            "help": "what Galerkin and Fourier attention take over the keys: the 'mean', as published; as controls the "
            "'sum', or a number that divides it"
        },
    )


@dataclass
class FourierOptions(GalerkinOptions):
    fourier_scale: str = field(
        default="head_dim",
        metadata={
            "help": "Fourier attention is divided by the number of keys and by the root of 'head_dim' (as the released "
            "code does), or by the number of keys alone: 'none' (as the paper writes)",
            "choices": ("head_dim", "none"),
        },
    )


class HeadNorm(nn.Module):
    """Layer norm over the features of each head, (B, H, N, D) -> the same, with a gain and a bias (H, 1, D)."""

    mask_as = "norm"

    def __init__(self, heads: int, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, 1, dim))
        self.bias = nn.Parameter(torch.zeros(heads, 1, dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight + self.bias


@register_attention("galerkin")
class GalerkinAttention(Attention):
    """Time O(N·D·E), decoding with a constant state: S = Σ_i k_iᵀ v_i (D, E) per head, float32, and the number of keys.

    The weights it returns are A with O = A LN(V): A_ni = Q_n · LN(K)_i / n.

    Args (besides those of :class:`Attention`):
        galerkin_norm_eps: ε of the layer norms.
        galerkin_average: ``mean``, ``sum``, or the number in text that the sum is divided by.
        position: makes a module with ``rotate``, for a width and a number of heads (``modules.position``).

    Raises:
        UsageError: for another ``galerkin_average``, or heads of one number.
    """

    paper = "Cao 2021"
    roles = frozenset(ROLES)
    options = GalerkinOptions
    takes = frozenset({"rotation"})
    remembers = True
    joins_coordinates = True
    reference_init = "small_identity"
    #: Which of q, k, v go through a layer norm.
    normed: tuple[str, ...] = ("k", "v")
    scale = 1.0

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        galerkin_norm_eps: float = 1e-5,
        galerkin_average: str = "mean",
        columns: int = 0,
        position: MakePosition | None = None,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, output_projection=columns > 0, columns=columns, **kwargs)
        #: What sums are divided by on every grid; None for the number of keys.
        self.divisor = None if galerkin_average == "mean" else _divisor(galerkin_average)
        ranges.check(GalerkinOptions, {"galerkin_norm_eps": galerkin_norm_eps})
        if self.head_dim < 2:
            raise UsageError(
                f"{self.registered_name} attention normalizes each head, and of one number nothing is left: choose "
                "fewer heads (--encoder-attention-heads, --decoder-attention-heads), or another kind"
            )
        self.q_norm, self.k_norm, self.v_norm = (
            HeadNorm(num_heads, self.head_dim, galerkin_norm_eps) if name in self.normed else nn.Identity()
            for name in ("q", "k", "v")
        )
        self.position = None if position is None else position(self.head_dim, num_heads)

    def reset_parameters(self) -> None:
        """As in ``Attention``; ``small_identity``: 1/100 of Glorot uniform plus 1/100 of the identity for q, k, v."""
        super().reset_parameters()
        if self._init == "small_identity":
            for projection in (self.q_proj, self.k_proj, self.v_proj):
                nn.init.xavier_uniform_(projection.weight, gain=1e-2)
                with torch.no_grad():
                    projection.weight.diagonal().add_(1e-2)

    def attend(self, q, k, v, context):
        padding, offset, dtype = context.key_padding_mask, self.offset(q, k), v.dtype
        n = self.divisor
        if n is None:
            n = count_visible(q.size(2), k.size(2), padding, self.causal, offset, q.device)  # (B or 1, 1, N or 1, 1)
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        # In float32: sums over many keys exceed float16.
        q, k, v = to_accumulation_dtype(q, k, v)
        q, k = rotate_both(self.position, q, k, offset, 0)
        q, k, v = self.joined(context, q, k, v)
        total = linear_attention(q, k, v, causal=self.causal, key_padding_mask=padding, normalize=False)
        out = (total * self.scale / n).to(dtype)  # (B, H, N, E)
        return out, self._weights(q, k, n, padding) if context.return_weights else None

    def _weights(self, q: Tensor, k: Tensor, n: Tensor | float, key_padding_mask: Tensor | None) -> Tensor:
        return zero_hidden(products(q, k), key_padding_mask, self.causal) * self.scale / n

    def extend(self, q, k, v, state, context):
        dtype, padding = v.dtype, context.key_padding_mask
        before, seen, length = None, 0, 0
        if state is not None:
            before, seen, length = (state["S"], state["z"]), state["seen"], state["length"]
        seen = seen + _real(k, padding).cumsum(1)  # (B, N)
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q, k = rotate_both(self.position, q, k, length, length)
        total, (S, z) = linear_attention(
            q, k, accurate(v), causal=True, key_padding_mask=padding, state=before, return_state=True, normalize=False
        )
        n = seen.clamp(min=1)[:, None, :, None] if self.divisor is None else self.divisor
        out = (total * self.scale / n).to(dtype)
        # A copy: a view would keep the counts of the whole prefix.
        return out, {"S": S, "z": z, "seen": seen[:, -1:].clone(), "length": length + k.size(2)}

    def fold(self, k, v, key_padding_mask):
        S, z = linear_attention_state(self.k_norm(k), self.v_norm(v), key_padding_mask=key_padding_mask)
        n = self.divisor
        if n is None:
            n = count_visible(1, k.size(2), key_padding_mask, False, 0, k.device)  # (B or 1, 1, 1, 1)
        return {"S": S * self.scale / n, "z": z}

    def read(self, q, state):
        return linear_attention_read(self.q_norm(q), (state["S"], state["z"]), normalize=False).type_as(q)


@register_attention("fourier")
class FourierAttention(GalerkinAttention):
    """Time and state as of :class:`GalerkinAttention`; its weights are A_ni = LN(Q)_n · LN(K)_i / (n √d_head), O = A V.

    Args (besides those of :class:`GalerkinAttention`):
        fourier_scale: ``head_dim`` or ``none``.

    Raises:
        UsageError: for another ``fourier_scale``.
    """

    options = FourierOptions
    normed = ("q", "k")

    def __init__(self, embed_dim: int, num_heads: int, *, fourier_scale: str = "head_dim", **kwargs):
        super().__init__(embed_dim, num_heads, **kwargs)
        ranges.check(FourierOptions, {"fourier_scale": fourier_scale})
        self.scale = self.query_width**-0.5 if fourier_scale == "head_dim" else 1.0


def _divisor(text: str) -> float:
    """1 for ``sum``, or the number in the text."""
    try:
        number = 1.0 if text == "sum" else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise UsageError(f"--galerkin-average is {text!r}: choose from mean, sum, or a number above 0")
    return number


def _real(k: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """(B, M) int64: 1 at keys, 0 at padding."""
    if key_padding_mask is None:
        return torch.ones(k.size(0), k.size(2), dtype=torch.long, device=k.device)
    return (~key_padding_mask).long()

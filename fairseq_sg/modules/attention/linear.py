"""Linear attention with normalized Queries and Keys (Katharopoulos et al. 2020; Park & Kim 2024).

    Q̂ = Norm(φ(Q)),  K̂ = Norm(φ(K)),   O_n = Q̂_n Σ_i K̂_iᵀ V_i / (Q̂_n · Σ_i K̂_i + ε)

over all i in the encoder and in cross-attention, over i ≤ n in the decoder. ``ops/linear_attention/naive.py`` is the
quotient, in the order in which it is written here. No 1/√d scale: the maps that need one have their own. There are no
attention probabilities, and so there is no dropout on them.

``--linear-attention-denominator none`` leaves out the denominator, and ε with it (von Oswald et al. 2023):

    O_n = Q̂_n Σ_i K̂_iᵀ V_i
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.base import ROLES, Attention, AttentionOptions, register_attention
from fairseq_sg.modules.attention.context import State
from fairseq_sg.modules.attention.masks import products, zero_hidden
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY, build_feature_map
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY, NoNormalization, build_qk_norm
from fairseq_sg.modules.position import MakePosition, real_positions, rotate_both
from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state
from fairseq_sg.ops.linear_attention import SMALLEST_EPS
from fairseq_sg.ops.precision import accurate

logger = logging.getLogger(__name__)


@dataclass
class LinearOptions(AttentionOptions):
    feature_map: str = field(
        default="elu",
        metadata={"help": "feature map φ of linear attention; docs/attention.md has the list (elu: elu + 1)"},
    )
    feature_dim: str = field(
        default="head",
        metadata={
            "help": "width of a head's Queries and Keys before φ: 'head' (that of its Values), 'sqrt' (the root of it, "
            "rounded down, so that a quadratic φ has about as many features as a head), or a number"
        },
    )
    qk_norm: str = field(
        default="none",
        metadata={"help": "normalization of φ(Q) and φ(K) in linear attention: none, l1, l2, rms (Park & Kim 2024)"},
    )
    linear_attention_eps: float = field(
        default=1e-6, metadata={"help": "ε added to linear attention's denominator", "above": 0}
    )
    linear_attention_denominator: str = field(
        default="sum",
        metadata={
            "help": "denominator of linear attention: 'sum', of the similarities of a Query and the Keys that it sees, "
            "or 'none'",
            "choices": ("sum", "none"),
        },
    )


@register_attention("linear")
class LinearAttention(Attention):
    """Time O(N·F·E), decoding with a constant state per head: S (F, E) and z (F), both float32.

    A rotation by positions is applied to Q̂ and K̂ in the numerator alone, so that the denominator keeps its sign (Su
    et al. 2021, eq. 19): O_n = R_n Q̂_n Σ_i (R_i K̂_i)ᵀ V_i / (Q̂_n · Σ_i K̂_i + ε). Where a map's similarities are 0
    for all Keys, ε alone is left below a numerator that is not 0. Without a denominator, z is kept and not read.

    Args (besides those of :class:`Attention`):
        feature_map: name in ``FEATURE_MAP_REGISTRY``. feature_map_options: its keyword arguments.
        feature_dim: ``head``, ``sqrt`` or a number, see :class:`LinearOptions`.
        qk_norm: name in ``QK_NORM_REGISTRY``; Queries and Keys have a module each, shared by the heads.
        qk_norm_options: its keyword arguments.
        linear_attention_eps: ε of the denominator.
        linear_attention_denominator: ``sum`` or ``none``.
        position: makes a module with ``rotate``, for a width and a number of heads (``modules.position``).

    Raises:
        UsageError: a wrong option; without a denominator, an ε, or a map whose Queries need one.
    """

    paper = "Katharopoulos et al. 2020; Park & Kim 2024"
    roles = frozenset(ROLES)
    options = LinearOptions
    takes = frozenset({"rotation"})
    remembers = True
    joins_coordinates = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str = "elu",
        feature_map_options: dict[str, Any] | None = None,
        feature_dim: str = "head",
        qk_norm: str = "none",
        qk_norm_options: dict[str, Any] | None = None,
        linear_attention_eps: float = 1e-6,
        linear_attention_denominator: str = "sum",
        position: MakePosition | None = None,
        head_dim: int | None = None,
        **kwargs,
    ):
        width = _width(feature_dim, embed_dim // max(num_heads, 1) if head_dim is None else head_dim)
        super().__init__(embed_dim, num_heads, head_dim=head_dim, qk_head_dim=width, **kwargs)
        _advise(feature_map, feature_dim, width)
        self.feature_map = build_feature_map(feature_map, self.query_width, **(feature_map_options or {}))
        features = self.feature_map.features
        self.q_norm = build_qk_norm(qk_norm, features, **(qk_norm_options or {}))
        self.k_norm = build_qk_norm(qk_norm, features, **(qk_norm_options or {}))
        self.eps = linear_attention_eps
        given = {"linear_attention_eps": self.eps, "linear_attention_denominator": linear_attention_denominator}
        ranges.check(LinearOptions, given)
        if self.eps < SMALLEST_EPS:
            raise UsageError(f"--linear-attention-eps is {self.eps}: choose {SMALLEST_EPS:.3g} or more")
        self.divides = linear_attention_denominator == "sum"
        if not self.divides:
            self._check_without_denominator()
        self.position = None if position is None else position(features, num_heads)
        if self.position is not None and self.divides and self.feature_map.may_vanish:
            _warn_of_large_outputs(feature_map)

    def _check_without_denominator(self) -> None:
        if self.eps != LinearOptions.linear_attention_eps:
            raise UsageError(
                f"--linear-attention-eps {self.eps} has no effect with --linear-attention-denominator none: leave one "
                "of them out"
            )
        if self.feature_map.scales_queries and isinstance(self.q_norm, NoNormalization):
            raise UsageError(
                f"--feature-map {self.feature_map.registered_name} divides a Query's features by their largest, and "
                "--linear-attention-denominator none has nothing that cancels it: choose a --qk-norm, another map, or "
                "the denominator sum"
            )

    @classmethod
    def keyword_arguments(cls, config: Any) -> dict[str, Any]:
        return super().keyword_arguments(config) | {
            "feature_map_options": FEATURE_MAP_REGISTRY.find(config.feature_map).keyword_arguments(config),
            "qk_norm_options": QK_NORM_REGISTRY.find(config.qk_norm).keyword_arguments(config),
        }

    @classmethod
    def option_classes(cls, config: Any) -> set[type]:
        return {cls, FEATURE_MAP_REGISTRY.find(config.feature_map), QK_NORM_REGISTRY.find(config.qk_norm)}

    def attend(self, q, k, v, context):
        self.feature_map.begin()
        padding = context.key_padding_mask
        key_positions = self._positions(k, padding)
        if self.role == "cross":
            query_positions = self._positions(q, None)
        else:
            query_positions = None if key_positions is None else key_positions[..., k.size(2) - q.size(2) :]
        q, k, v = self.joined(context, q, k, v)
        q, k = self._queries(q, query_positions), self._keys(k, key_positions)  # Q̂ (B, H, N, F), K̂ (B, H, M, F)
        out = self._weighted_sum(q, k, v, padding)  # (B, H, N, E)
        return out, self._weights(q, k, padding).type_as(v) if context.return_weights else None

    def _queries(self, q: Tensor, positions: Tensor | None) -> Tensor:
        """Q̂ = Norm(φ(Q)), (B, H, N, F)."""
        return self.q_norm(self.feature_map.queries(q, positions))

    def _keys(self, k: Tensor, positions: Tensor | None) -> Tensor:
        """K̂ = Norm(φ(K)), (B, H, M, F)."""
        plain = isinstance(self.k_norm, NoNormalization)
        features = self.feature_map.keys if plain else self.feature_map.keys_to_normalize
        return self.k_norm(features(k, positions))

    def _weighted_sum(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """O_n = Q̂_n Σ_i K̂_iᵀ V_i / (Q̂_n · Σ_i K̂_i + ε), (B, H, N, E); a rotation is in the numerator alone."""
        visible = dict(causal=self.causal, key_padding_mask=key_padding_mask)
        if self.position is None:
            return linear_attention(q, k, v, normalize=self.divides, eps=self.eps, **visible)
        rotated = rotate_both(self.position, q, k, self.offset(q, k), 0)
        numerator = linear_attention(*rotated, accurate(v), normalize=False, **visible)
        if not self.divides:
            return numerator.type_as(v)
        denominator = linear_attention(q, k, _ones(k), normalize=False, **visible)  # (B, H, N, 1)
        return (numerator / (denominator + self.eps)).type_as(v)

    def _weights(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """The matrix A with O = A V: A_ni = Q̂_n·K̂_i / (Q̂_n · Σ_i K̂_i + ε), (B, H, N, M)."""
        similarity = zero_hidden(products(q, k), key_padding_mask, self.causal)
        denominator = similarity.sum(-1, keepdim=True) + self.eps if self.divides else 1.0
        if self.position is not None:
            rotated = rotate_both(self.position, q, k, self.offset(q, k), 0)
            similarity = zero_hidden(products(*rotated), key_padding_mask, self.causal)
        return similarity / denominator

    def _positions(self, x: Tensor, padding_mask: Tensor | None, before: int = 0, real: Any = None) -> Tensor | None:
        """Positions of x (B, H, N, D), broadcastable to (B, H, N), for the maps that need them.

        ``before`` positions precede x; ``real`` (B, 1, 1) of them, or all, are not padding.
        """
        if not self.feature_map.needs_positions:
            return None
        positions = before if real is None else real
        if padding_mask is None:
            positions = positions + torch.arange(x.size(2), device=x.device)
        else:
            positions = positions + real_positions(padding_mask)[:, None, :]  # (B, 1, N)
        self.feature_map.check_positions(positions, below=before + x.size(2))
        return positions

    def extend(self, q, k, v, state, context):
        key_padding_mask = context.key_padding_mask
        # How many positions came before, and how many real tokens: of each sentence (B, 1, 1) if there is padding.
        length, real = (0, 0) if state is None else (state["length"], state["real"])
        positions = self._positions(k, key_padding_mask, length, real)
        q, k = self._queries(q, positions), self._keys(k, positions)
        out, S, z = self._step(q, k, v, key_padding_mask, state, length)
        if positions is not None:
            real = real + (k.size(2) if key_padding_mask is None else (~key_padding_mask).sum(1)[:, None, None])
        return out, {"S": S, "z": z, "length": length + k.size(2), "real": real}

    def _step(self, q, k, v, key_padding_mask, state: State | None, length: int):
        """Outputs (B, H, N, E), S (B, H, F, E) and z (B, H, F); with a rotation, S has rotated keys, z plain ones."""
        visible = dict(causal=True, key_padding_mask=key_padding_mask, return_state=True)
        before = None if state is None else (state["S"], state["z"])
        if self.position is None:
            out, (S, z) = linear_attention(q, k, v, state=before, normalize=self.divides, eps=self.eps, **visible)
            return out, S, z
        rotated = rotate_both(self.position, q, k, length, length)
        numerator, (S, z) = linear_attention(*rotated, accurate(v), state=before, normalize=False, **visible)
        if not self.divides:
            return numerator.type_as(v), S, z
        if before is not None:
            before = before[1].unsqueeze(-1), before[1]  # (B, H, F, 1), (B, H, F)
        denominator, (_, z) = linear_attention(q, k, _ones(k), state=before, normalize=False, **visible)
        return (numerator / (denominator + self.eps)).type_as(v), S, z

    def fold(self, k, v, key_padding_mask):
        k = self._keys(k, self._positions(k, key_padding_mask))  # (B, H, M, F)
        S, z = linear_attention_state(k, v, key_padding_mask=key_padding_mask)
        return {"S": S, "z": z, "read": 0}

    def read(self, q, state):
        start = state["read"]
        state["read"] = start + q.size(2)
        features = self._queries(q, self._positions(q, None, start))  # (B, H, N, F)
        sums = state["S"], state["z"]
        return linear_attention_read(features, sums, normalize=self.divides, eps=self.eps).type_as(q)


def _ones(k: Tensor) -> Tensor:
    """Values whose sums over the keys are the denominator."""
    return accurate(k[..., :1]).new_ones(*k.shape[:-1], 1)


@functools.cache
def _advise(feature_map: str, feature_dim: str, width: int) -> None:
    """Warns, once, of a width that docs/attention.md advises against."""
    kind = FEATURE_MAP_REGISTRY.find(feature_map)
    if feature_dim == "sqrt" and not kind.quadratic:
        logger.warning(
            "--feature-dim sqrt leaves --feature-map %s %d features of a Query, and saves nothing: leave it out. It is "
            "for maps that square the width: %s",
            feature_map,
            width,
            ", ".join(sorted(name for name, cls in FEATURE_MAP_REGISTRY.items() if cls.quadratic)),
        )
    elif width < kind.least_width:
        logger.warning(
            "--feature-dim %s is a width of %d, and --feature-map %s should have %d or more: give --feature-dim %d",
            feature_dim,
            width,
            feature_map,
            kind.least_width,
            kind.least_width,
        )


@functools.cache
def _warn_of_large_outputs(feature_map: str) -> None:
    """Warns, once, of a rotated numerator over a denominator of ε."""
    logger.warning(
        "--position rotary rotates the numerator alone, and with --feature-map %s the denominator of a Query may be "
        "--linear-attention-eps alone: outputs may be very large. Choose --linear-attention-denominator none, or a map "
        "whose similarities do not vanish, such as elu",
        feature_map,
    )


def _width(feature_dim: str, head_dim: int) -> int:
    if feature_dim == "head":
        return head_dim
    if feature_dim == "sqrt":
        return math.isqrt(head_dim)
    if not str(feature_dim).isdecimal() or int(feature_dim) < 1:
        raise UsageError(f"--feature-dim is {feature_dim!r}: choose from head, sqrt, or a positive number")
    return int(feature_dim)

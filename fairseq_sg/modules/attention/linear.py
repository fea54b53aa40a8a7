"""Linear attention with normalized Queries and Keys (Katharopoulos et al. 2020; Park & Kim 2024).

    Q̂ = Norm(φ(Q)),  K̂ = Norm(φ(K)),   O_n = Q̂_n Σ_i K̂_iᵀ V_i / (Q̂_n · Σ_i K̂_i + ε)

over all i in the encoder and in cross-attention, over i ≤ n in the decoder. No 1/√d scale: the maps that need one have
their own. There are no attention probabilities, and so there is no dropout on them.
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
from fairseq_sg.modules.attention.base import Attention, AttentionOptions, State
from fairseq_sg.modules.attention.registry import register_attention
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY, build_feature_map
from fairseq_sg.modules.feature_maps.base import accurate
from fairseq_sg.modules.normalization import QK_NORM_REGISTRY, NoNormalization, build_qk_norm
from fairseq_sg.modules.position import MakePosition, real_positions
from fairseq_sg.ops import linear_attention, linear_attention_read, linear_attention_state
from fairseq_sg.ops.precision import autocast_disabled

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
        default=1e-6, metadata={"help": "ε added to linear attention's denominator", "least": 0}
    )


@register_attention("linear")
class LinearAttention(Attention):
    """Time O(N·F·E), decoding with a constant state per head: S (F, E) and z (F), both float32.

    Of positions it takes a rotation, applied to Q̂ and K̂ in the numerator alone, so that the denominator stays
    positive (Su et al. 2021, eq. 19): O_n = R_n Q̂_n Σ_i (R_i K̂_i)ᵀ V_i / (Q̂_n · Σ_i K̂_i + ε).

    Args (besides those of :class:`Attention`):
        feature_map: name in ``FEATURE_MAP_REGISTRY``. feature_map_options: its keyword arguments.
        feature_dim: ``head``, ``sqrt`` or a number, see :class:`LinearOptions`.
        qk_norm: name in ``QK_NORM_REGISTRY``; Queries and Keys have a module each, shared by the heads.
        qk_norm_options: its keyword arguments.
        linear_attention_eps: ε of the denominator.
        position: makes a module with ``rotate``, for a width and a number of heads (``modules.position``).
    """

    options = LinearOptions
    takes = frozenset({"rotation"})
    remembers = True

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
        position: MakePosition | None = None,
        head_dim: int | None = None,
        **kwargs,
    ):
        width = _width(feature_dim, embed_dim // max(num_heads, 1) if head_dim is None else head_dim)
        super().__init__(embed_dim, num_heads, head_dim=head_dim, qk_head_dim=width, **kwargs)
        _advise(feature_map, feature_dim, width)
        self.feature_map = build_feature_map(feature_map, self.qk_head_dim, **(feature_map_options or {}))
        features = self.feature_map.features
        self.q_norm = build_qk_norm(qk_norm, features, **(qk_norm_options or {}))
        self.k_norm = build_qk_norm(qk_norm, features, **(qk_norm_options or {}))
        self.eps = linear_attention_eps
        ranges.check(LinearOptions, {"linear_attention_eps": linear_attention_eps})
        self.position = None if position is None else position(features, num_heads)

    @classmethod
    def keyword_arguments(cls, config: Any) -> dict[str, Any]:
        return super().keyword_arguments(config) | {
            "feature_map_options": FEATURE_MAP_REGISTRY.find(config.feature_map).keyword_arguments(config),
            "qk_norm_options": QK_NORM_REGISTRY.find(config.qk_norm).keyword_arguments(config),
        }

    @classmethod
    def option_classes(cls, config: Any) -> set[type]:
        return {cls, FEATURE_MAP_REGISTRY.find(config.feature_map), QK_NORM_REGISTRY.find(config.qk_norm)}

    def _queries(self, q: Tensor, positions: Tensor | None) -> Tensor:
        return self.q_norm(self.feature_map.queries(q, positions))

    def _keys(self, k: Tensor, positions: Tensor | None) -> Tensor:
        plain = isinstance(self.k_norm, NoNormalization)
        features = self.feature_map.keys if plain else self.feature_map.keys_to_normalize
        return self.k_norm(features(k, positions))

    def _positions(self, x: Tensor, padding_mask: Tensor | None, before: int = 0, real: Any = None) -> Tensor | None:
        """Positions of x (B, H, N, D) for maps that need them.

        There were ``before`` positions, of which ``real`` (B, 1, 1), or all, were not padding.
        """
        if not self.feature_map.needs_positions:
            return None
        positions = before if real is None else real
        if padding_mask is None:
            positions = positions + torch.arange(x.size(2), device=x.device)
        else:
            positions = positions + real_positions(padding_mask)[:, None, :]
        self.feature_map.check_positions(positions, below=before + x.size(2))
        return positions

    def _left_to_operator(self) -> dict[str, Any]:
        """What the operator is told, to map and normalize Queries and Keys as it reads them."""
        weights = {
            f"{side}_weight": getattr(norm, "weight", None) for side, norm in (("q", self.q_norm), ("k", self.k_norm))
        }
        return {
            "feature_map": self.feature_map.in_operator,
            "qk_norm": self.q_norm.in_operator or None,
            "norm_eps": self.q_norm.eps,
            **weights,
        }

    def attend(self, q, k, v, key_padding_mask, attn_mask, need_weights):
        self._check_mask(attn_mask)
        # Outside training the analysis looks at Q̂ and K̂ where the modules make them.
        can_leave = None not in (self.feature_map.in_operator, getattr(self.q_norm, "in_operator", None))
        if self.training and not need_weights and self.position is None and can_leave:
            visible = dict(causal=self.causal, key_padding_mask=key_padding_mask)
            left = self._left_to_operator()
            return attend_after(self._remembered(q, k), q, k, v, eps=self.eps, features=left, **visible), None
        self.feature_map.begin()
        at_keys = self._positions(k, key_padding_mask)
        if self.role == "cross":
            at_queries = self._positions(q, None)
        else:
            at_queries = None if at_keys is None else at_keys[..., self._remembered(q, k) :]
        q, k = self._queries(q, at_queries), self._keys(k, at_keys)
        out = self._linear(q, k, v, key_padding_mask)
        return out, self._implied_weights(q, k, key_padding_mask).type_as(v) if need_weights else None

    def _linear(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        memory, visible = self._remembered(q, k), dict(causal=self.causal, key_padding_mask=key_padding_mask)
        if self.position is None:
            return attend_after(memory, q, k, v, eps=self.eps, **visible)
        rotated = self.position.rotate(q, memory), self.position.rotate(k, 0)
        numerator = attend_after(memory, *rotated, accurate(v), normalize=False, **visible)
        denominator = attend_after(memory, q, k, _ones(k), normalize=False, **visible)
        return (numerator / (denominator + self.eps)).type_as(v)

    def _implied_weights(self, q: Tensor, k: Tensor, key_padding_mask) -> Tensor:
        """The matrix A with O = A V: A_ni = Q̂_n·K̂_i / (Q̂_n · Σ_i K̂_i + ε), (B, H, N, M)."""
        similarity = self._visible_only(_dot(q, k), key_padding_mask)
        denominator = similarity.sum(-1, keepdim=True) + self.eps
        if self.position is not None:
            rotated = self.position.rotate(q, self._remembered(q, k)), self.position.rotate(k, 0)
            similarity = self._visible_only(_dot(*rotated), key_padding_mask)
        return similarity / denominator

    def extend(self, q, k, v, key_padding_mask, state):
        # How many positions, and how many real tokens of each sentence, (B, 1, 1), there were.
        length, real = (0, 0) if state is None else (state["length"], state["real"])
        positions = self._positions(k, key_padding_mask, length, real)
        q, k = self._queries(q, positions), self._keys(k, positions)
        out, S, z = self._step(q, k, v, key_padding_mask, state, length)
        if positions is not None:
            padding = (
                torch.zeros_like(k[:, 0, :, 0], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
            )
            real = real + (~padding).sum(1)[:, None, None]
        return out, {"S": S, "z": z, "length": length + k.size(2), "real": real}

    def _step(self, q, k, v, key_padding_mask, state: State | None, length: int):
        """Outputs, S and z. With a rotation, S is of the rotated and z of the plain keys."""
        visible = dict(causal=True, key_padding_mask=key_padding_mask, return_state=True)
        before = None if state is None else (state["S"], state["z"])
        if self.position is None:
            out, (S, z) = linear_attention(q, k, v, state=before, eps=self.eps, **visible)
            return out, S, z
        rotated = self.position.rotate(q, length), self.position.rotate(k, length)
        numerator, (S, _) = linear_attention(*rotated, accurate(v), state=before, normalize=False, **visible)
        if before is not None:
            before = before[1].unsqueeze(-1), before[1]
        denominator, (_, z) = linear_attention(q, k, _ones(k), state=before, normalize=False, **visible)
        return (numerator / (denominator + self.eps)).type_as(v), S, z

    def fold(self, k, v, key_padding_mask):
        S, z = linear_attention_state(
            self._keys(k, self._positions(k, key_padding_mask)), v, key_padding_mask=key_padding_mask
        )
        return {"S": S, "z": z, "read": 0}

    def read(self, q, state):
        start = state["read"]
        state["read"] = start + q.size(2)
        features = self._queries(q, self._positions(q, None, start))
        return linear_attention_read(features, (state["S"], state["z"]), eps=self.eps).type_as(q)


def attend_after(
    memory: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None,
    features: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """``linear_attention`` whose first ``memory`` keys come before all queries: they are folded to a state, of time
    O(M·F·E). ``features`` is what the operator is to make of q and k, None where they are features.
    """
    features = features or {}
    options |= features
    if not memory:
        return linear_attention(q, k, v, key_padding_mask=key_padding_mask, **options)
    before, rest = None, None
    if key_padding_mask is not None:
        before, rest = key_padding_mask[:, :memory], key_padding_mask[:, memory:]
    of_keys = {name: value for name, value in features.items() if name != "q_weight"}
    state = linear_attention_state(k[:, :, :memory], v[:, :, :memory], key_padding_mask=before, **of_keys)
    return linear_attention(q, k[:, :, memory:], v[:, :, memory:], key_padding_mask=rest, state=state, **options)


def _dot(q: Tensor, k: Tensor) -> Tensor:
    """q_n·k_i, (B, H, N, M) in float32 or float64, also under autocast."""
    with autocast_disabled(q.device):
        return accurate(q) @ accurate(k).transpose(-1, -2)


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
            "--feature-dim %s is a width of %d, and --feature-map %s wants %d or more: give --feature-dim %d",
            feature_dim,
            width,
            feature_map,
            kind.least_width,
            kind.least_width,
        )


def _width(feature_dim: str, head_dim: int) -> int:
    if feature_dim == "head":
        return head_dim
    if feature_dim == "sqrt":
        return math.isqrt(head_dim)
    if not str(feature_dim).isdecimal() or int(feature_dim) < 1:
        raise UsageError(f"--feature-dim is {feature_dim!r}: choose from head, sqrt, or a positive number")
    return int(feature_dim)

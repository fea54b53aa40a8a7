"""What all attentions share: projections to heads, the interface of fairseq's MultiheadAttention, decoding states.

A kind of attention subclasses :class:`Attention` and writes

- ``attend``: outputs for all queries at once, from q, k, v per head;
- ``extend``: a decoding step of self-attention, from the new q, k, v and the state of the prefix;
- ``fold`` and ``read``: cross-attention in decoding, the source folded once and read at each step;

and nothing else. A kind that needs more than q, k, v says so: ``sees_input`` hands ``attend``, ``extend`` and
``read`` the layer's input as ``x`` (N, B, C), and a kind that takes ``indices`` gets ``positions`` where positions
are not 0, 1, 2, … A causal kind that ``remembers`` attends to a memory of positions before the queries: in its
``attend`` the N queries are the last of M ≥ N keys, and one that ``counts_positions`` gets the position ``first`` of
the first key. Shapes inside: q ``(B, H, N, D)``, k ``(B, H, M, D)``, v ``(B, H, M, E)``; masks are bool, True at
padding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.unfused import is_faster, softmax_attention
from fairseq_sg.modules.dropout import Drops, dropout
from fairseq_sg.modules.losses import ValueLoss
from fairseq_sg.modules.packing import Packing
from fairseq_sg.modules.position import MakePosition
from fairseq_sg.ops.precision import accumulation_dtype
from fairseq_sg.registry import Mechanism

ROLES = ("encoder", "decoder", "cross")
INITS = ("reference", "glorot", "fused", "torch")
State = dict[str, Any]
#: Keys and values per head, and losses on the values with what they gave.
Projected = tuple[Tensor, Tensor, list[tuple[Any, Tensor]]]


@dataclass
class AttentionOptions:
    """Options that every attention has; a kind adds its own in a dataclass of its own (see ``Attention.options``)."""

    attention_init: str = field(
        default="reference",
        metadata={
            "help": "initialization of the attention's projections: 'reference' (as the papers' released code: "
            "Glorot uniform, but PyTorch's default for relative attention; docs/attention.md has the others), "
            "'glorot', "
            "'fused' (Glorot uniform with keys and values as one matrix, the output projection PyTorch's default) or "
            "'torch'"
        },
    )
    attention_bias: bool = field(
        default=False,
        metadata={"help": "biases in the query, key, value and output projections (the references have none)"},
    )


class Attention(Mechanism, nn.Module):
    """Base class of multi-head attentions; a drop-in for ``fairseq.modules.MultiheadAttention``.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: H; must divide ``embed_dim``, unless ``head_dim`` is given.
        role: ``encoder`` (self-attention over the whole sequence), ``decoder`` (causal self-attention) or ``cross``.
        kv_dim: width of keys and values; ``embed_dim`` unless cross-attention reads an encoder of another width.
        head_dim: E, the width of a head's values; C / H unless given.
        qk_head_dim: D, the width of a head's queries and keys; that of its values unless given.
        value_heads: how many heads of width E the Values have; H unless given.
        output_projection: whether the heads' outputs go through a last projection.
        attention_init, attention_bias: see :class:`AttentionOptions`.

    Raises:
        UsageError: for a role the kind cannot serve, heads that do not divide the width, or a wrong option.
    """

    #: The roles the kind can serve.
    roles: ClassVar[frozenset[str]] = frozenset(ROLES)
    #: Whether the kind knows positions by itself, so that none are added to the embeddings.
    brings_position: ClassVar[bool] = False
    #: What it is defined for of what a ``--position`` may give: ``rotation``, ``bias``, ``indices``
    #: (``modules.position.base``).
    takes: ClassVar[frozenset[str]] = frozenset()
    #: Whether ``attend``, ``extend`` and ``read`` need the layer's input beside the projections.
    sees_input: ClassVar[bool] = False
    #: Whether the causal ``attend`` may have more keys than queries: a memory, before the positions of the queries.
    remembers: ClassVar[bool] = False
    #: Whether the outputs depend on where in the stream the keys are, and not on distances alone.
    counts_positions: ClassVar[bool] = False
    options: ClassVar[type] = AttentionOptions
    #: What ``--attention-init reference`` stands for: another choice, or a name that its ``reset_parameters`` knows.
    reference_init: ClassVar[str] = "glorot"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        role: str,
        kv_dim: int | None = None,
        head_dim: int | None = None,
        qk_head_dim: int | None = None,
        value_heads: int | None = None,
        output_projection: bool = True,
        attention_init: str = "reference",
        attention_bias: bool = False,
    ):
        super().__init__()
        if role not in self.roles:
            allowed = ", ".join(r for r in ROLES if r in self.roles)
            raise UsageError(
                f"{self.registered_name} attention cannot serve as {role!r} attention: its roles are {allowed}; "
                f"choose another --{role}-attention"
            )
        if num_heads < 1 or head_dim is None and embed_dim % num_heads:
            side = "encoder" if role == "encoder" else "decoder"
            raise UsageError(
                f"the width {embed_dim} is not divisible by the number of attention heads {num_heads}: "
                f"choose another --{side}-attention-heads or --{side}-embed-dim"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if not output_projection and num_heads * self.head_dim != embed_dim:
            raise UsageError(
                f"{self.registered_name} attention has no output projection, and its {num_heads} heads of "
                f"--decoder-head-dim {head_dim} do not add up to the width {embed_dim}: leave the option out"
            )
        self.role = role
        self.causal = role == "decoder"
        self.qk_head_dim = self.head_dim if qk_head_dim is None else qk_head_dim
        kv_dim = embed_dim if kv_dim is None else kv_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * self.qk_head_dim, bias=attention_bias)
        self.k_proj = nn.Linear(kv_dim, num_heads * self.qk_head_dim, bias=attention_bias)
        self.value_heads = num_heads if value_heads is None else value_heads
        self.v_proj = nn.Linear(kv_dim, self.value_heads * self.head_dim, bias=attention_bias)
        self.out_proj = nn.Identity()
        if output_projection:
            self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=attention_bias)
        if attention_init not in INITS:
            raise UsageError(f"--attention-init is {attention_init!r}: choose from {', '.join(INITS)}")
        self._init = self.reference_init if attention_init == "reference" else attention_init
        self.reset_parameters()

    @property
    def _state_key(self) -> str:
        # By the module itself: a number that it keeps would be that of its copies too.
        return f"attention_state.{id(self)}"

    def reset_parameters(self) -> None:
        """Glorot uniform, U(±√(6/(fan_in + fan_out))), or PyTorch's U(±1/√fan_in); zero biases.

        ``fused`` is the start of the released code of Csordás et al. 2022 and Csordás 2023, chapters 5 and 6: Glorot
        uniform for q, and for k and v with the fans of both together, as one matrix; PyTorch's for the output.
        """
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(projection, nn.Identity):
                continue
            if self._init == "glorot":
                nn.init.xavier_uniform_(projection.weight)
            else:
                projection.reset_parameters()
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self._init == "fused":
            nn.init.xavier_uniform_(self.q_proj.weight)
            k, v = self.k_proj.weight, self.v_proj.weight
            bound = math.sqrt(6 / (k.size(1) + k.size(0) + v.size(0)))
            nn.init.uniform_(k, -bound, bound)
            nn.init.uniform_(v, -bound, bound)

    # The mechanism, written by each kind.

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, H, N, E) and, where asked for, the attention matrix (B, H, N, M) they are the product of.

        Causal queries are as many as the keys or, of a kind that ``remembers``, the last N of them.
        """
        raise NotImplementedError

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Outputs of new positions that see the prefix in ``state`` and themselves, and the state with them in it."""
        raise NotImplementedError

    def fold(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        """The source in the form that ``read`` needs."""
        return {"k": k, "v": v, "key_padding_mask": key_padding_mask}

    def read(self, q: Tensor, state: State, **extra) -> Tensor:
        """Outputs (B, H, N, E) of queries over a folded source."""
        return self.attend(q, state["k"], state["v"], state["key_padding_mask"], None, need_weights=False, **extra)[0]

    # The interface of fairseq's MultiheadAttention.

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, State] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        value_loss: ValueLoss | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        first: int = 0,
        packing: Packing | None = None,
        key_packing: Packing | None = None,
        projected: dict[Attention, Projected] | None = None,
    ):
        """Attention of ``query`` over ``key`` and ``value``.

        Args:
            query: (N, B, C). key, value: (M, B, C_kv); both default to ``query``. They are the same tensor, as in
                fairseq's layers.
            key_padding_mask: (B, M) bool, True at padding. In decoding, of the new positions only.
            incremental_state: where the decoding state is kept; its presence means that ``query`` holds only new
                positions.
            need_weights: whether to return the attention weights, averaged over the heads, (B, N, M); in decoding they
                are None.
            static_kv: accepted for compatibility; cross-attention always folds its source once.
            attn_mask: (N, M), bool (True is hidden) or float (added to the logits). A causal attention needs none.
            before_softmax: not supported (ValueError).
            need_head_weights: return the weights per head, (H, B, N, M).
            value_loss: a loss on the projected Values; its value is returned as a third element. Not in decoding
                (ValueError).
            positions: int64, the positions of the keys where they are not 0, 1, 2, … (in decoding, of the prefix with
                the new ones at its end); only for kinds that take ``indices`` (ValueError).
            memory: (M, B, C), the layer's input at the M positions before ``query``: keys and values are of them too.
                For causal kinds that ``remember``, without ``key_padding_mask``, ``attn_mask``, ``positions`` and
                decoding (ValueError).
            first: the position of the first key (of ``memory``, or without one of ``query``) in its stream.
            packing: where the positions of ``query`` are, if it is packed, (R, 1, C); the output then is too.
            key_packing: the same of ``key`` and ``value``. Neither with memory or decoding.
            projected: by attention, the keys and values per head that it has made of the same ``key`` and ``value`` in
                this pass, and the losses on them; it reads its own, or writes them. So a shared layer projects the
                source once for all steps.

        Returns:
            output (N, B, C) and weights or None; with ``value_loss``, also its scalar.
        """
        if before_softmax:
            raise ValueError(f"{self.registered_name} attention: before_softmax is not supported")
        if value_loss is not None and incremental_state is not None:
            raise ValueError(
                f"{self.registered_name} attention: a loss on the Values is for training, not for decoding step by step"
            )
        if positions is not None and "indices" not in self.takes:
            raise ValueError(f"{self.registered_name} attention takes no position numbers")
        extra: dict[str, Any] = {"x": _unpacked(query, packing)} if self.sees_input else {}
        if positions is not None:
            extra["positions"] = positions
        if self.counts_positions and first:
            extra["first"] = first
        if memory is not None:
            self._check_memory(key_padding_mask, attn_mask, positions, incremental_state)
            key = value = torch.cat([memory.type_as(query), query])
        key = query if key is None else key
        value = key if value is None else value
        q = self._heads(_unpacked(self.q_proj(query), packing))
        if incremental_state is not None and self.role == "cross":
            state = incremental_state.get(self._state_key)
            if state is None:
                k, v = self._heads(self.k_proj(key)), self._heads(self.v_proj(value), self.value_heads)
                state = self.fold(k, v, key_padding_mask)
                incremental_state[self._state_key] = state
            return self._join(self.read(q, state, **extra)), None
        known = None if projected is None else projected.get(self)
        if known is not None:
            k, v, losses = known
        else:
            k = self._heads(_unpacked(self.k_proj(key), key_packing))
            v = self._heads(_unpacked(self.v_proj(value), key_packing), self.value_heads)
            losses: list[tuple[Any, Tensor]] = []
            if projected is not None:
                projected[self] = k, v, losses
        if incremental_state is not None and self.role == "decoder":
            out, state = self.extend(q, k, v, key_padding_mask, incremental_state.get(self._state_key), **extra)
            incremental_state[self._state_key] = state
            return self._join(out), None
        need_weights = need_weights or need_head_weights
        out, weights = self.attend(q, k, v, key_padding_mask, attn_mask, need_weights, **extra)
        if weights is not None:
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        if value_loss is None:
            return self._join(out, packing), weights
        loss = next((value for of, value in losses if of is value_loss), None)
        if loss is None:
            new = v if memory is None else v[:, :, memory.size(0) :]
            loss = value_loss(new, key_padding_mask)
            losses.append((value_loss, loss))
        return self._join(out, packing), weights, loss

    def reorder_incremental_state(self, incremental_state: dict[str, State], new_order: Tensor) -> None:
        """Selects and orders the sentences of the decoding state; every tensor in it is batch first."""
        state = incremental_state.get(self._state_key)
        if state is not None:
            incremental_state[self._state_key] = {
                name: x.index_select(0, new_order) if isinstance(x, Tensor) else x for name, x in state.items()
            }

    def _heads(self, x: Tensor, heads: int | None = None) -> Tensor:
        """(N, B, H·D) -> (B, H, N, D), a view; H is ``num_heads`` unless given."""
        return x.unflatten(-1, (self.num_heads if heads is None else heads, -1)).permute(1, 2, 0, 3)

    def _join(self, out: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, H, N, E) -> (N, B, C), or packed, through the output projection."""
        joined = out.permute(2, 0, 1, 3).flatten(2)
        if packing is not None:
            joined = packing.pack(joined)
        return self.out_proj(joined)

    def _check_memory(self, *absent: Any) -> None:
        if not self.causal or not self.remembers:
            raise UsageError(
                f"{self.registered_name} attention as {self.role} has no memory of earlier segments: leave "
                "--memory-length out, or choose another --decoder-attention"
            )
        if any(x is not None for x in absent):
            raise ValueError(
                "attention to a memory has no key_padding_mask, attn_mask, positions or incremental_state: only its "
                "rows' ends may be padded"
            )

    def _remembered(self, q: Tensor, k: Tensor) -> int:
        """How many keys come before the first query of ``attend``."""
        return k.size(2) - q.size(2) if self.causal else 0

    def _check_mask(self, attn_mask: Tensor | None) -> None:
        """For kinds without attn_mask: fairseq's decoder layers hand them the causal one; no other will do."""
        if attn_mask is None:
            return
        hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask < 0
        if not self.causal or not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
            raise ValueError(
                f"{self.registered_name} attention has no attn_mask: it is causal in the decoder role and sees all "
                "keys in the others; pass attn_mask=None, and key_padding_mask for padding"
            )

    def _visible_keys(self, queries: int, keys: int, key_padding_mask: Tensor | None, offset: int = 0) -> Tensor:
        """The number of keys each query sees, int64, broadcastable to (B, H, N, 1).

        It is 1 for a query that sees none: there, sums over keys are 0 anyway, and quotients and logarithms stay
            finite.
        """
        device = self.q_proj.weight.device
        if key_padding_mask is None:
            if not self.causal:
                return torch.full((1, 1, 1, 1), keys, device=device)
            return torch.arange(offset + 1, offset + queries + 1, device=device)[None, None, :, None]
        real = (~key_padding_mask).long()
        seen = real.cumsum(1)[:, offset : offset + queries] if self.causal else real.sum(1, keepdim=True)
        return seen.clamp(min=1)[:, None, :, None]

    def _visible_only(self, similarity: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """similarity (B, H, N, M), with 0 where a query does not see a key; causal queries are the last of the keys."""
        if self.causal:
            similarity = similarity.tril(similarity.size(-1) - similarity.size(-2))
        if key_padding_mask is None:
            return similarity
        return similarity.masked_fill(key_padding_mask[:, None, None, :], 0.0)

    def extra_repr(self) -> str:
        return f"role={self.role}, heads={self.num_heads}, head_dim={self.head_dim}"


def _unpacked(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.unpack(x)


@dataclass
class SoftmaxOptions(AttentionOptions):
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
            "code does)"
        },
    )
    logit_scale: str = field(
        default="sqrt_dim",
        metadata={
            "help": "'sqrt_dim': nothing but --attention-scale; 'log_length': softmax logits are also multiplied by "
            "the natural "
            "logarithm of the number of visible keys (Chiang & Cholak 2022)"
        },
    )


class SoftmaxAttentionBase(Drops, Attention):
    """What the softmax kinds share: weights from logits q·k·scale + bias, dropout on them, a cache of keys and values.

        A = softmax( s · (QKᵀ/√d + bias) + position bias ),   s = 1, or ln(number of visible keys) with ``log_length``

    where a learned scalar may stand in the place of 1/√d. A kind changes the queries or adds a bias to the logits by
    overriding ``logits_of``. Of positions it takes a rotation of queries and keys, and a bias.

    Args (besides those of :class:`Attention`):
        attention_dropout: dropout on the weights after the softmax, in training. attention_scale: ``head_dim`` or
        ``model_dim``: logits are multiplied by 1/√ of it; or ``learned``: by a scalar, one
            for the module, that starts at 1/√head_dim.
        logit_scale: ``sqrt_dim`` or ``log_length`` (Chiang & Cholak 2022, section 5.3).
        position: makes a module with ``rotate`` or ``bias``, for a width and a number of heads (``modules.position``).
    """

    options = SoftmaxOptions
    takes = frozenset({"rotation", "bias"})
    remembers = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_dropout: float | None = 0.0,
        attention_scale: str = "head_dim",
        logit_scale: str = "sqrt_dim",
        position: MakePosition | None = None,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        widths = {"head_dim": self.qk_head_dim, "model_dim": self.embed_dim, "learned": self.qk_head_dim}
        for option, value, choices in (
            ("--attention-scale", attention_scale, tuple(widths)),
            ("--logit-scale", logit_scale, ("sqrt_dim", "log_length")),
        ):
            if value not in choices:
                raise UsageError(f"{option} is {value!r}: choose from {', '.join(choices)}")
        self.scale = widths[attention_scale] ** -0.5
        self.learned_scale = nn.Parameter(torch.full((1,), self.scale)) if attention_scale == "learned" else None
        self.log_length = logit_scale == "log_length"
        self.attention_dropout = attention_dropout or 0.0
        ranges.check(SoftmaxOptions, {"attention_dropout": attention_dropout})
        self.position = None if position is None else position(self.qk_head_dim, num_heads)

    def logits_of(
        self, q: Tensor, keys: int, offset: int, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The queries to multiply with the keys, and the bias (…, N, M) to add to the scaled logits, or None.

        ``offset`` is the position of the first query, counted from the first of the ``keys`` keys. Kinds that see the
        input or take indices get ``x`` and ``positions`` as further arguments.
        """
        return q, None

    def attend(self, q, k, v, key_padding_mask, attn_mask, need_weights, **extra):
        offset = self._remembered(q, k)
        q, k = self._rotated(q, k, offset, 0)
        return self._attend(q, k, v, key_padding_mask, attn_mask, need_weights, offset, **extra)

    def _rotated(self, q: Tensor, k: Tensor, of_queries: int, of_keys: int) -> tuple[Tensor, Tensor]:
        if self.position is None or self.position.gives != "rotation":
            return q, k
        return self.position.rotate(q, of_queries), self.position.rotate(k, of_keys)

    def _attend(self, q, k, v, key_padding_mask, attn_mask, need_weights, offset: int, **extra):
        queries, keys = q.size(2), k.size(2)
        q, bias = self.logits_of(q, keys, offset, key_padding_mask=key_padding_mask, **extra)
        factor = self._factor(q, keys, key_padding_mask, offset)
        if factor is not None:
            q, bias = q * factor, None if bias is None else bias * factor
        if self.position is not None and self.position.gives == "bias":
            # With a batch dimension: fused kernels take masks of two or four dimensions alone.
            added = self.position.bias(queries, keys, offset).unsqueeze(0).type_as(q)
            bias = added if bias is None else bias + added
        dropout_p = self.attention_dropout if self.drops else 0.0
        unfused = not need_weights and is_faster(q, k, v, bias, dropout_p)
        plain = bias is None and key_padding_mask is None and attn_mask is None and offset == 0
        if self.causal and plain and not need_weights and not unfused:
            # The bare triangle: the operator knows it without a tensor.
            out = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, scale=self.scale)
            return out, None
        hidden = self._hidden(queries, keys, key_padding_mask, attn_mask, offset)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            bias = attn_mask if bias is None else bias + attn_mask
        if need_weights:
            weights = self._weights(q, k, bias, hidden)
            return dropout(weights, dropout_p, self.drops) @ v, weights
        if unfused:
            return softmax_attention(q, k, v, bias, hidden, dropout_p, self.scale), None
        if bias is not None:
            mask = bias if hidden is None else bias.masked_fill(hidden, -math.inf)
        else:
            mask = None if hidden is None else ~hidden
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=self.scale), None

    def _factor(self, q: Tensor, keys: int, key_padding_mask: Tensor | None, offset: int) -> Tensor | None:
        """What the logits are multiplied with beside ``scale``, broadcastable to (B, H, N, 1), or None for 1."""
        dtype = accumulation_dtype(q)
        factors = []
        if self.log_length:
            factors.append(self._visible_keys(q.size(2), keys, key_padding_mask, offset).to(dtype).log())
        if self.learned_scale is not None:
            factors.append(self.learned_scale.to(dtype) / self.scale)
        return math.prod(factors).type_as(q) if factors else None

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
        logits = (q @ k.transpose(-1, -2)) * self.scale
        if bias is not None:
            logits = logits + bias
        if hidden is None:
            return logits.softmax(-1)
        # A query that sees no key has no weights: zeros, rather than the 0/0 of a softmax over nothing.
        return logits.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)

    def _hidden(self, queries: int, keys: int, key_padding_mask, attn_mask, offset: int) -> Tensor | None:
        """Which keys each query must not see: bool, broadcastable to (B, H, N, M), or None where all are seen."""
        parts = []
        if key_padding_mask is not None:
            parts.append(key_padding_mask[:, None, None, :])
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            parts.append(attn_mask)
        if self.causal and queries > 1:
            device = self.q_proj.weight.device
            # Query n sits at position offset + n; what lies after it is hidden.
            parts.append(torch.ones(queries, keys, dtype=torch.bool, device=device).triu(offset + 1))
        return functools.reduce(torch.logical_or, parts) if parts else None

    def extend(self, q, k, v, key_padding_mask, state, **extra):
        start = 0 if state is None else state["length"]
        q, k = self._rotated(q, k, start, start)
        cache = append_to_cache(state, k, v, key_padding_mask)
        length = cache["length"]
        k, v = cache["k"][:, :, :length], cache["v"][:, :, :length]
        out, _ = self._attend(q, k, v, cache["key_padding_mask"], None, False, start, **extra)
        return out, cache


def append_to_cache(state: State | None, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
    """The cache with new keys and values. Its buffers double when full: appending costs O(1) a step, not O(length)."""
    start = 0 if state is None else state["length"]
    length = start + k.size(2)
    cache = {"length": length, "key_padding_mask": _append_mask(state, key_padding_mask, start, k)}
    for name, new in (("k", k), ("v", v)):
        buffer = None if state is None else state[name]
        if buffer is None or buffer.size(2) < length:
            grown = new.new_empty(*new.shape[:2], max(16, 2 * length), new.size(3))
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            buffer = grown
        buffer[:, :, start:length] = new
        cache[name] = buffer
    return cache


def _append_mask(state: State | None, new: Tensor | None, start: int, k: Tensor) -> Tensor | None:
    old = None if state is None else state["key_padding_mask"]
    if old is None and new is None:
        return None
    batch, added = k.size(0), k.size(2)
    old = torch.zeros(batch, start, dtype=torch.bool, device=k.device) if old is None else old
    new = torch.zeros(batch, added, dtype=torch.bool, device=k.device) if new is None else new
    return torch.cat([old, new], dim=1)

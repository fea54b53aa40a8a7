"""The base class of attentions: project to heads, attend, join the heads; and decoding states.

A kind of attention subclasses :class:`Attention` and writes

- ``attend``: outputs for all queries at once, from q, k, v per head;

and, where its decoding state is smaller than all keys and values,

- ``extend``: a decoding step of self-attention, from the new q, k, v and the state of the prefix;
- ``fold`` and ``read``: cross-attention in decoding; the source is folded once and read at each step.

Shapes inside, batch first: q ``(B, H, N, D)``, k ``(B, H, M, D)``, v ``(B, H, M, E)``. Masks are bool, True at padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.cache import append_to_cache, cached
from fairseq_sg.modules.attention.context import AttentionOutput, Context, State, Values
from fairseq_sg.modules.cpu.linear import Linear
from fairseq_sg.modules.cpu.packing import Packing, packed, unpacked
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype
from fairseq_sg.registry import Mechanism, Registry

ROLES = ("encoder", "decoder", "cross")
ATTENTION_REGISTRY = Registry("attention", "--encoder-attention, --decoder-attention, --cross-attention")
register_attention = ATTENTION_REGISTRY.register


@dataclass
class AttentionOptions:
    """Options of every attention; a kind derives a dataclass with more from it (see ``Attention.options``)."""

    attention_init: str = field(
        default="reference",
        metadata={
            "help": "initialization of the attention's projections: 'reference' (as the papers' released code: "
            "Glorot uniform, but PyTorch's default for relative attention; docs/attention.md has the others), "
            "'glorot', 'fused' (Glorot uniform with keys and values as one matrix, the output projection PyTorch's "
            "default), 'joint' (the same with queries, keys and values as one matrix), 'torch' (PyTorch's default, and "
            "biases of 0, as everywhere else) or 'torch_biases' (PyTorch's biases too)",
            "choices": ("reference", "glorot", "fused", "joint", "torch", "torch_biases"),
        },
    )
    attention_bias: bool = field(
        default=False,
        metadata={"help": "biases in the query, key, value and output projections (most released code has none)"},
    )


class Attention(Mechanism, nn.Module):
    """Base class of multi-head attentions.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: H; must divide ``embed_dim``, unless ``head_dim`` is given.
        role: ``encoder`` (self-attention over the whole sequence), ``decoder`` (causal self-attention) or ``cross``.
        kv_dim: width of keys and values; ``embed_dim`` unless cross-attention reads an encoder of another width.
        head_dim: E, the width of a head's values; C / H unless given.
        qk_head_dim: D, the width of a head's queries and keys; that of its values unless given.
        value_heads: how many heads of width E the Values have; H unless given.
        output_projection: whether the heads' outputs go through a last projection.
        columns: p, the number of ``context.coordinates`` that are joined to every head's q, k and v; only for kinds
            that ``join_coordinates``, in the role ``encoder``.
        attention_init, attention_bias: see :class:`AttentionOptions`.

    Raises:
        UsageError: for a role the kind cannot serve, heads that do not divide the width, or a wrong option.
    """

    #: The roles the kind can serve. A decoder's is causal: a kind that is says so.
    roles: ClassVar[frozenset[str]] = frozenset({"encoder", "cross"})
    #: Whether the kind has positions of its own, so that none are added to the embeddings.
    brings_position: ClassVar[bool] = False
    #: The results of a ``--position`` that the kind is defined for: ``rotation``, ``bias``, ``indices``
    #: (``modules.position.base``).
    takes: ClassVar[frozenset[str]] = frozenset()
    #: Whether ``attend``, ``extend`` and ``read`` get the layer's input (N, B, C) as ``x``.
    sees_input: ClassVar[bool] = False
    #: Whether the causal ``attend`` may have more keys than queries: a memory, before the positions of the queries.
    remembers: ClassVar[bool] = False
    #: Whether ``attend`` joins the coordinates of points to q, k and v (``joined``), and returns E + p columns a head.
    joins_coordinates: ClassVar[bool] = False
    options: ClassVar[type] = AttentionOptions
    #: The meaning of ``--attention-init reference``: another choice, or a name that ``reset_parameters`` knows.
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
        columns: int = 0,
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
                f"{self.registered_name} attention has no output projection, and its {num_heads} heads of width "
                f"{head_dim} do not add up to the model's width {embed_dim}: choose --decoder-head-dim and "
                "--decoder-attention-heads that do"
            )
        if columns and not self.joins_coordinates:
            kinds = sorted(name for name, cls in ATTENTION_REGISTRY.items() if cls.joins_coordinates)
            raise UsageError(
                f"--coordinates heads is not defined for {self.registered_name} attention: choose --coordinates input, "
                f"or one of {', '.join(kinds)}"
            )
        self.columns = columns
        self.role = role
        self.causal = role == "decoder"
        self.qk_head_dim = self.head_dim if qk_head_dim is None else qk_head_dim
        kv_dim = embed_dim if kv_dim is None else kv_dim
        self.q_proj = Linear(embed_dim, num_heads * self.qk_head_dim, bias=attention_bias)
        self.k_proj = Linear(kv_dim, num_heads * self.qk_head_dim, bias=attention_bias)
        self.value_heads = num_heads if value_heads is None else value_heads
        self.v_proj = Linear(kv_dim, self.value_heads * self.head_dim, bias=attention_bias)
        self.out_proj = nn.Identity()
        if output_projection:
            self.out_proj = Linear(num_heads * (self.head_dim + columns), embed_dim, bias=attention_bias)
        ranges.check(AttentionOptions, {"attention_init": attention_init})
        if attention_init == "torch_biases" and not attention_bias:
            raise UsageError("--attention-init torch_biases needs --attention-bias: add it, or choose torch")
        self._init = self.reference_init if attention_init == "reference" else attention_init
        self.reset_parameters()

    @property
    def query_width(self) -> int:
        """The width of a head's queries and keys, coordinates included."""
        return self.qk_head_dim + self.columns

    @property
    def _state_key(self) -> str:
        # By identity: a number in the module would be shared by its copies.
        return f"attention_state.{id(self)}"

    def reset_parameters(self) -> None:
        """Glorot uniform, U(±√(6/(fan_in + fan_out))), or PyTorch's U(±1/√fan_in); biases are 0, or with
        ``torch_biases`` PyTorch's.

        ``fused`` is the start of the released code of Csordás et al. 2022 and Csordás 2023, chapters 5 and 6: Glorot
        uniform for q, and for k and v with the fans of both together, as one matrix; PyTorch's for the output.
        ``joint`` is that of ``torch.nn.MultiheadAttention``: q, k and v as one matrix.
        """
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(projection, nn.Identity):
                continue
            if self._init == "glorot":
                nn.init.xavier_uniform_(projection.weight)
            else:
                projection.reset_parameters()
            if projection.bias is not None and self._init != "torch_biases":
                nn.init.zeros_(projection.bias)
        q, k, v = (projection.weight for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self._init == "fused":
            nn.init.xavier_uniform_(q)
        together = {"fused": (k, v), "joint": (q, k, v)}.get(self._init, ())
        for weight in together:
            bound = math.sqrt(6 / (weight.size(1) + sum(part.size(0) for part in together)))
            nn.init.uniform_(weight, -bound, bound)

    # The mechanism; each kind writes it.

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, H, N, E) and, with ``context.return_weights``, the matrix (B, H, N, M) they are the product of.

        Causal queries are the last N of the M keys. There are more keys in decoding, and after a memory
        (``remembers``).
        """
        raise NotImplementedError

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, context: Context, **x: Tensor
    ) -> tuple[Tensor, State]:
        """Outputs of new positions, which see the prefix in ``state`` and themselves, and the state after them.

        Unless a kind has a smaller state, all keys and values are kept, and the new queries are the last of them.
        """
        cache = append_to_cache(state, k, v, context.key_padding_mask)
        k, v, key_padding_mask = cached(cache)  # (B, H, M, D), (B, H, M, E), (B, M)
        return self.attend(q, k, v, replace(context, key_padding_mask=key_padding_mask), **x)[0], cache

    def fold(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
        """The source in the form that ``read`` needs."""
        return {"k": k, "v": v, "key_padding_mask": key_padding_mask}

    def read(self, q: Tensor, state: State, **x: Tensor) -> Tensor:
        """Outputs (B, H, N, E) of queries over a folded source."""
        return self.attend(q, state["k"], state["v"], Context(key_padding_mask=state["key_padding_mask"]), **x)[0]

    # The path from hidden states to hidden states; all kinds share it.

    def forward(self, query: Tensor, source: Tensor | None = None, context: Context = Context()) -> AttentionOutput:
        """Attention of ``query`` over ``source``.

        Args:
            query: (N, B, C), or packed.
            source: (M, B, C_kv), or packed; ``query`` unless given.
            context: see :class:`Context`. With ``context.state``, the decoding state is updated in place.

        Raises:
            ValueError: the context has something that the kind is not defined for.
        """
        self._check(context)
        if context.memory is not None:
            source = torch.cat([context.memory.type_as(query), query])  # (M' + N, B, C)
        source = query if source is None else source
        seen = {"x": unpacked(query, context.packing)} if self.sees_input else {}
        q = self._split_heads(self.q_proj(query), self.num_heads, context.packing)  # (B, H, N, D)
        if context.state is not None and self.role != "encoder":
            out = self._decode(q, source, context, seen)  # (B, H, N, E)
            return AttentionOutput(self._join_heads(out, context.packing), None, None)
        k, v = self._keys_and_values(source, context)  # (B, H, M, D), (B, H, M, E)
        if self.columns:
            out, weights = self._attend_to_points(q, k, v, context, seen)  # (B, H, N, E + p)
        else:
            out, weights = self.attend(q, k, v, context, **seen)  # (B, H, N, E)
        values = None
        if context.return_values:
            new = v if context.memory is None else v[:, :, context.memory.size(0) :]
            values = Values(new, context.padding_mask)
        return AttentionOutput(self._join_heads(out, context.packing), weights, values)

    def _attend_to_points(self, q: Tensor, k: Tensor, v: Tensor, context: Context, seen: dict[str, Tensor]):
        """``attend`` in float32 or better: half precision has too few numbers for coordinates."""
        with autocast_disabled(q.device):
            out, weights = self.attend(*to_accumulation_dtype(q, k, v), context, **seen)
        return out.type_as(v), weights

    def joined(self, context: Context, *heads: Tensor) -> tuple[Tensor, ...]:
        """q, k and v (B, H, N, D), with the coordinates of the points if there are any: (B, H, N, D + p)."""
        if not self.columns:
            return heads
        return tuple(torch.cat([x, context.coordinates.to(x).expand(*x.shape[:2], -1, -1)], dim=-1) for x in heads)

    def _decode(self, q: Tensor, source: Tensor, context: Context, seen: dict[str, Tensor]) -> Tensor:
        """Outputs (B, H, N, E) of the new positions; updates the attention's own state."""
        state = context.state.get(self._state_key)
        if self.role == "decoder":
            out, state = self.extend(q, *self._keys_and_values(source, context), state, context, **seen)
        else:
            if state is None:
                state = self.fold(*self._keys_and_values(source, context), context.key_padding_mask)
            out = self.read(q, state, **seen)
        context.state[self._state_key] = state
        return out

    def reorder_incremental_state(self, incremental_state: dict[str, State], new_order: Tensor) -> None:
        """Selects and orders the sentences of the decoding state; fairseq calls it in beam search."""
        state = incremental_state.get(self._state_key)
        if state is not None:
            incremental_state[self._state_key] = {name: _selected(x, new_order) for name, x in state.items()}

    def _keys_and_values(self, source: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """k (B, H, M, D) and v (B, H, M, E) of the source, projected once for all steps of a repeated layer."""
        if context.projected:
            return context.projected["k"], context.projected["v"]
        k = self._split_heads(self.k_proj(source), self.num_heads, context.key_packing)
        v = self._split_heads(self.v_proj(source), self.value_heads, context.key_packing)
        if context.projected is not None:
            context.projected.update(k=k, v=v)
        return k, v

    def _split_heads(self, x: Tensor, heads: int, packing: Packing | None = None) -> Tensor:
        """(N, B, H·D), or packed -> (B, H, N, D), a view."""
        return unpacked(x, packing).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    def _join_heads(self, out: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, H, N, E) -> (N, B, C), or packed, through the output projection."""
        joined = out.permute(2, 0, 1, 3).flatten(2)  # (N, B, H·E)
        return self.out_proj(packed(joined, packing))

    def _check(self, context: Context) -> None:
        if context.positions is not None and "indices" not in self.takes:
            raise ValueError(f"{self.registered_name} attention takes no position numbers")
        if context.return_values and context.state is not None:
            raise ValueError(
                f"{self.registered_name} attention: a loss on the Values is for training, not for decoding step by step"
            )
        if context.memory is None:
            return
        if not self.causal or not self.remembers:
            raise UsageError(
                f"{self.registered_name} attention as {self.role} has no memory of earlier segments: leave "
                "--memory-length out, or choose another --decoder-attention"
            )
        if any(x is not None for x in (context.key_padding_mask, context.positions, context.state)):
            raise ValueError(
                "attention to a memory has no key_padding_mask, positions or decoding state: only its rows' ends may "
                "be padded"
            )

    def offset(self, q: Tensor, k: Tensor) -> int:
        """Position of the first query among the keys in ``attend``."""
        return k.size(2) - q.size(2) if self.causal else 0

    def extra_repr(self) -> str:
        return f"role={self.role}, heads={self.num_heads}, head_dim={self.head_dim}"


def _selected(x: Any, order: Tensor) -> Any:
    """The sentences ``order`` of what a decoding state has under a name; numbers are those of all sentences."""
    if isinstance(x, (tuple, list, dict)):
        raise TypeError("the decoding state of an attention holds tensors, batch first, and numbers: name each tensor")
    return x.index_select(0, order) if isinstance(x, Tensor) else x

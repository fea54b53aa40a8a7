"""What the tests of attentions share: cases, and an equation taken one query at a time.

``attention_kinds`` has a file for each kind, with its ``CASES``, and either ``row``, the weights of one query from the
equation, or ``reference``, everything from the equation. All tests in ``test_attention.py`` then hold the kind.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Attention
from fairseq_sg.modules.attention.base import ROLES
from fairseq_sg.modules.position import POSITION_REGISTRY
from helpers import attention_kinds

WIDTH, HEADS, SOURCE_WIDTH = 24, 3, 20
#: The options of a window, by role.
WINDOWS = {"decoder": {"attention_window": 3}, "encoder": {"encoder_attention_window": 3}}


@dataclass(frozen=True)
class Case:
    """An attention in a role, with its options, and perhaps a position inside it (``rotation`` or ``bias``)."""

    name: str
    role: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    position: str | None = None
    position_options: dict[str, Any] = field(default_factory=dict, hash=False)
    #: How far outputs may be from the equation's in float64; sinusoids, for one, are float32.
    tolerance: float = 1e-9

    def __str__(self) -> str:
        chosen = [*self.options.items(), ("", self.position), *self.position_options.items()]
        shown = [key if value is True else str(value) for key, value in chosen if value is not None]
        return "-".join([self.name, self.role, *shown])

    @property
    def window(self) -> int:
        """W, or 0."""
        return self.options.get("attention_window", 0) or self.options.get("encoder_attention_window", 0)

    def build(self, dtype=torch.float64, **more) -> Attention:
        torch.manual_seed(1)
        options = {**self.options, **more}
        if self.position is not None:
            position = POSITION_REGISTRY.find(self.position)
            options["position"] = partial(position, causal=self.role == "decoder", **self.position_options)
        kv_dim = SOURCE_WIDTH if self.role == "cross" else None
        module = ATTENTION_REGISTRY.find(self.name)(WIDTH, HEADS, role=self.role, kv_dim=kv_dim, **options).eval()
        # Biases start at 0 and gains at 1, which would hide mistakes.
        parameters = list(module.named_parameters())
        for name, parameter in parameters:
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        for name, parameter in parameters:
            if parameter.dim() == 1 and not name.endswith("bias"):  # of one sign: of both, denominators vanish
                parameter.data += 0.5 * torch.rand_like(parameter)
        return module.to(dtype)

    def inputs(self, batch=3, queries=7, keys=None, dtype=torch.float64) -> tuple[Tensor, Tensor]:
        """Queries (N, B, C) and keys (M, B, C'); the same tensor in self-attention."""
        torch.manual_seed(2)
        keys = (5 if keys is None else keys) if self.role == "cross" else queries
        query = torch.randn(queries, batch, WIDTH, dtype=dtype)
        return query, torch.randn(keys, batch, SOURCE_WIDTH, dtype=dtype) if self.role == "cross" else query


class Row(NamedTuple):
    """One query of one head in one sentence, and what it sees."""

    module: Attention
    q: Tensor  # (N, D), of this head
    k: Tensor  # (M, D)
    n: int
    seen: list[int]
    head: int
    x: Tensor  # (N, C), the input of the layer
    padding: Tensor | None  # (M,), True at padding


def visible(n: int, keys: int, causal: bool, padding: Tensor | None, window: int = 0) -> list[int]:
    """The keys that query n sees: with a window, those less than ``window`` away."""
    before = range(n + 1 if causal else keys)
    near = [m for m in before if not window or abs(n - m) < window]
    return [m for m in near if not (padding is not None and padding[m])]


def by_rows(row: Callable[[Row], Tensor], module: Attention, query: Tensor, key: Tensor, padding=None):
    """Output (N, B, C) and weights (B, H, N, M) of ``row``, looped over sentences, heads and queries.

    ``row`` returns one weight for each key that is seen.
    """
    q, k, v = module.q_proj(query), module.k_proj(key), module.v_proj(key)
    (N, B, _), M = q.shape, k.size(0)
    weights, out = q.new_zeros(B, HEADS, N, M), q.new_zeros(N, B, WIDTH)
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    for b in range(B):
        mask = None if padding is None else padding[b]
        for h in range(HEADS):
            for n in range(N):
                seen = visible(n, M, module.role == "decoder", mask, getattr(module, "window", 0))
                if not seen:
                    continue
                weights[b, h, n, seen] = row(Row(module, q[:, b, h], k[:, b, h], n, seen, h, query[:, b], mask))
                out[n, b, h * WIDTH // HEADS : (h + 1) * WIDTH // HEADS] = weights[b, h, n, seen] @ v[seen, b, h]
    return module.out_proj(out), weights


KINDS = {
    name: importlib.import_module(f"{attention_kinds.__name__}.{name}")
    for _, name, _ in pkgutil.iter_modules(attention_kinds.__path__)
}
CASES: list[Case] = [case for kind in KINDS.values() for case in kind.CASES]


def reference(module: Attention, query: Tensor, key: Tensor, padding=None):
    """Output (N, B, C) and weights (B, H, N, M) from the kind's equation."""
    kind = KINDS[module.registered_name]
    if hasattr(kind, "reference"):
        return kind.reference(module, query, key, padding)
    return by_rows(kind.row, module, query, key, padding)


def padding_of(keys: int, side: str) -> Tensor:
    """(3, keys), some of it padding on one side."""
    mask = torch.zeros(3, keys, dtype=torch.bool)
    if side == "right":
        mask[0, keys - 2 :] = True
        mask[1, keys - 1 :] = True
    else:
        mask[0, :2] = True
        mask[2, :1] = True
    return mask


__all__ = ["CASES", "HEADS", "KINDS", "ROLES", "WIDTH", "Case", "Row", "by_rows", "padding_of", "reference", "visible"]

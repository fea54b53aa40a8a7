"""Galerkin attention (Cao 2021), O = Q (LN(K)ᵀ LN(V)) / n, as a sum over the keys that a query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.attention_cases import HEADS, ROLES, WIDTH, Case, visible

CASES = [
    *(Case("galerkin", role) for role in ROLES),
    *(Case("galerkin", role, {"attention_bias": True}) for role in ROLES),
    Case("galerkin", "encoder", {"attention_init": "glorot", "galerkin_norm_eps": 0.5}),
    *(Case("galerkin", role, {"galerkin_average": "sum"}) for role in ROLES),
    Case("galerkin", "decoder", {"galerkin_average": "2.5"}),
    *(Case("galerkin", role, position="rotary") for role in ("encoder", "decoder")),
]


def norm(x: Tensor, module, head: int) -> Tensor:
    """The layer norm of one head of one vector; as it is where the module has none."""
    if isinstance(module, torch.nn.Identity):
        return x
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + module.eps).sqrt() * module.weight[head, 0] + module.bias[head, 0]


def rotated(x: Tensor, position: int) -> Tensor:
    """Su et al. 2021, eq. 15: pairs of neighbouring features turn by position · 10000^(−2i/d)."""
    out = torch.empty_like(x)
    for i in range(0, len(x), 2):
        angle = torch.tensor(position * 10000 ** (-i / len(x)), dtype=x.dtype)
        out[i] = x[i] * angle.cos() - x[i + 1] * angle.sin()
        out[i + 1] = x[i] * angle.sin() + x[i + 1] * angle.cos()
    return out


def reference(module, query, key, padding=None):
    (N, B, _), M = query.shape, key.size(0)
    q, k, v = (
        project(x).unflatten(-1, (HEADS, -1))
        for project, x in ((module.q_proj, query), (module.k_proj, key), (module.v_proj, key))
    )
    weights, out = query.new_zeros(B, HEADS, N, M), query.new_zeros(N, B, HEADS, WIDTH // HEADS)
    for b in range(B):
        mask = None if padding is None else padding[b]
        for h in range(HEADS):
            for n in range(N):
                seen = visible(n, M, module.role == "decoder", mask)
                for m in seen:
                    a, c = norm(q[n, b, h], module.q_norm, h), norm(k[m, b, h], module.k_norm, h)
                    if module.position is not None:
                        a, c = rotated(a, n), rotated(c, m)
                    similarity = a @ c
                    weights[b, h, n, m] = (
                        similarity * module.scale / (len(seen) if module.divisor is None else module.divisor)
                    )
                    out[n, b, h] += weights[b, h, n, m] * norm(v[m, b, h], module.v_norm, h)
    return module.out_proj(out.flatten(2)), weights

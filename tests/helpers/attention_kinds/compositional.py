"""Compositional attention (Mittal et al. 2022), one search, one retrieval and one query at a time."""

from __future__ import annotations

import math

import torch

from helpers.attention_cases import HEADS, ROLES, WIDTH, WINDOWS, Case, visible

CASES = [
    *(Case("compositional", role, {"retrievals": r}) for role in ROLES for r in (1, 2, 4)),
    *(Case("compositional", role, {"retrieval_score": "concat", "attention_bias": True}) for role in ROLES),
    *(Case("compositional", role, {"retrieval_dim": 5, "logit_scale": "log_length"}) for role in ROLES),
    *(Case("compositional", role, window) for role, window in WINDOWS.items()),
]


def reference(module, query, key, padding=None):
    (N, B, _), M = query.shape, key.size(0)
    R, E = module.value_heads, WIDTH // HEADS
    q, k = (project(x).unflatten(-1, (HEADS, -1)) for project, x in ((module.q_proj, query), (module.k_proj, key)))
    v = module.v_proj(key).unflatten(-1, (R, E))
    choice = None if module.retrieval_q is None else module.retrieval_q(query).unflatten(-1, (HEADS, -1))
    weights, out = query.new_zeros(B, HEADS, N, M), query.new_zeros(N, B, HEADS, E)
    for b in range(B):
        mask = None if padding is None else padding[b]
        for s in range(HEADS):
            for n in range(N):
                seen = visible(n, M, module.role == "decoder", mask, module.window)
                if not seen:
                    continue
                logits = torch.stack([q[n, b, s] @ k[m, b, s] for m in seen]) * module.scale
                logits = logits * (math.log(len(seen)) if module.log_length else 1.0)
                weights[b, s, n, seen] = logits.softmax(0)
                found = [sum(weights[b, s, n, m] * v[m, b, r] for m in seen) for r in range(R)]
                scores = [score(module, None if choice is None else choice[n, b, s], one) for one in found]
                total = sum(x.exp() for x in scores)
                out[n, b, s] = sum(x.exp() / total * one for x, one in zip(scores, found, strict=True))
    return module.out_proj(out.flatten(2)), weights


def score(module, query, found):
    """q̄·k̄/√d_qk, or the released code's linear layer apart from what is the same for all retrievals."""
    if query is None:
        return module.retrieval_k.weight[0] @ found
    return query @ (module.retrieval_k.weight @ found) / math.sqrt(len(query))

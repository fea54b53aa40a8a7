"""Softmax attention (Vaswani et al. 2017, eq. 1), with scales and positions."""

from __future__ import annotations

import math

import torch

from helpers.attention_cases import ROLES, WINDOWS, Case, Row

#: The positions inside attention, with options that let all of them show in a few tokens.
POSITIONS = {"rotary": {}, "alibi": {}, "t5": {"t5_buckets": 8, "t5_max_distance": 6}}
SLOPES = (1 / 16, 1 / 256, 1 / 4)  # of the three heads: the two of two heads, then the first of four

CASES = [
    *(Case("softmax", role, {"attention_bias": bias}) for role in ROLES for bias in (False, True)),
    Case("softmax", "encoder", {"attention_scale": "model_dim"}),
    *(Case("softmax", role, {"logit_scale": "log_length"}) for role in ROLES),
    *(
        Case("softmax", role, scale, position=name, position_options=options)
        for name, options in POSITIONS.items()
        for role in ("encoder", "decoder")
        for scale in ({}, {"logit_scale": "log_length"})
    ),
    *(
        Case("softmax", role, window | scale)
        for role, window in WINDOWS.items()
        for scale in ({}, {"logit_scale": "log_length"})
    ),
    *(
        Case("softmax", role, window, position=name, position_options=options)
        for role, window in WINDOWS.items()
        for name, options in POSITIONS.items()
    ),
]


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """One vector x (D,), its neighbouring features rotated (Su et al. 2021, eq. 34)."""
    out = torch.empty_like(x)
    for i in range(len(x) // 2):
        angle = position * 10000 ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def bucket(distance: int, count: int, longest: int, causal: bool) -> int:
    """T5's bucket of a distance, key minus query."""
    if not causal:
        return count // 2 * (distance > 0) + bucket(-abs(distance), count // 2, longest, True)
    n, exact = -distance, count // 2
    if n < exact:
        return n
    rate = math.log(n / exact) / math.log(longest / exact)
    return min(exact + int(rate * (count - exact)), count - 1)


def is_rotary(module) -> bool:
    return module.position is not None and module.position.registered_name == "rotary"


def position_bias(row: Row, m: int) -> torch.Tensor:
    """What a position adds to the logit of a key."""
    position = row.module.position
    if position is not None and position.registered_name == "alibi":
        return row.q.new_tensor(-SLOPES[row.head] * abs(row.n - m))
    if position is not None and position.registered_name == "t5":
        return position.table[bucket(m - row.n, 8, 6, row.module.causal), row.head]
    return row.q.new_zeros(())


def factor(row: Row) -> float:
    """The factor of the logits that --logit-scale gives: ln of the number of keys that are seen."""
    return math.log(len(row.seen)) if row.module.log_length else 1.0


def row(row: Row) -> torch.Tensor:
    at = rotated if is_rotary(row.module) else lambda x, position: x
    logits = torch.stack([at(row.q[row.n], row.n) @ at(row.k[m], m) for m in row.seen]) * row.module.scale
    return (factor(row) * logits + torch.stack([position_bias(row, m) for m in row.seen])).softmax(0)

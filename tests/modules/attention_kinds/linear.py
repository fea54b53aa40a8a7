"""Linear attention with normalized Queries and Keys (Katharopoulos et al. 2020; Park & Kim 2024), key by key.

``FEATURES`` has the formula of every feature map for one vector.
"""

from __future__ import annotations

from typing import Callable, Dict

import torch
from attention_cases import ROLES, Case, Row
from torch import Tensor

NORMS = ("none", "l1", "l2", "rms")
CASES = [Case("linear", role, {"feature_map": "elu", "qk_norm": norm}) for role in ROLES for norm in NORMS]

#: map -> φ(x) of one vector x (D,) at a position (counted over real tokens), for a Query or a Key ("q", "k").
FEATURES: Dict[str, Callable[[object, Tensor, int, str], Tensor]] = {
    "elu": lambda phi, x, position, side: torch.where(x > 0, x + 1, x.exp()),
}


def normalized(norm, x: Tensor) -> Tensor:
    name = norm.registered_name
    if name == "l1":
        return x / (x.abs().sum() + 1e-6)
    if name == "l2":
        return x / (x.square().sum().sqrt() + 1e-6)
    if name == "rms":
        return x / (x.square().mean().sqrt() + 1e-6) * norm.weight
    return x


def row(row: Row) -> Tensor:
    module, phi = row.module, FEATURES[row.module.feature_map.registered_name]

    def at(m: int) -> int:
        """The position of a key: how many real ones are before it."""
        return m if row.padding is None else int((~row.padding[:m]).sum())

    position = row.n if module.role == "cross" else at(row.n)
    query = normalized(module.q_norm, phi(module.feature_map, row.q[row.n], position, "q"))
    keys = [normalized(module.k_norm, phi(module.feature_map, row.k[m], at(m), "k")) for m in row.seen]
    similarity = torch.stack([query @ key for key in keys])
    return similarity / (similarity.sum() + 1e-6)

"""Linear attention with normalized Queries and Keys (Katharopoulos et al. 2020; Park & Kim 2024), key by key.

``FEATURES`` has the formula of every feature map for one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from helpers.attention_cases import ROLES, Case, Row
from helpers.attention_kinds.softmax import rotated

NORMS = ("none", "l1", "l2", "rms")
HORIZON = 128  # above every length in the tests of attentions

#: map -> the options it needs, for its cases.
OPTIONS: dict[str, dict] = {
    "relu": {},
    "squared": {},
    "exp": {},
    "cosformer": {"cosformer_horizon": HORIZON},
    "performer": {"performer_features": 20},
    "taylor": {},
    "rebased": {},
    "hedgehog": {},
    "t2r": {"t2r_features": 11},
    "dpfp": {"dpfp_nu": 3},
    "mlp": {},
    "identity": {},
}


#: Their denominators may be near 0, where rounding decides.
SIGNED = ("mlp", "identity")
#: O_n = Q̂_n Σ_i K̂_iᵀ V_i
UNDIVIDED = {"linear_attention_denominator": "none"}
#: Large enough to show; the default is 1e-6.
EPS = {"linear_attention_eps": 0.5}


def mapped(name: str, role: str, qk_norm: str = "none", feature_dim: str = "head", **options) -> Case:
    chosen = {"feature_map": name, "feature_map_options": OPTIONS[name] | options, "qk_norm": qk_norm}
    return Case("linear", role, chosen if feature_dim == "head" else chosen | {"feature_dim": feature_dim})


CASES = [
    *(Case("linear", role, {"feature_map": "elu", "qk_norm": norm}) for role in ROLES for norm in NORMS),
    *(mapped(name, role) for name in OPTIONS if name not in SIGNED for role in ROLES),
    *(Case("linear", role, {"feature_map": name, **UNDIVIDED}) for name in SIGNED for role in ROLES),
    *(mapped(name, "decoder", norm) for name in ("cosformer", "performer", "taylor") for norm in ("l1", "rms")),
    *(mapped(name, "cross", "l2") for name in ("cosformer", "rebased", "dpfp")),
    mapped("hedgehog", "encoder", "rms"),
    mapped("rebased", "decoder", "l1"),
    mapped("taylor", "encoder", feature_dim="sqrt"),
    mapped("rebased", "decoder", feature_dim="3"),
    *(Case("linear", role, {"feature_map": "elu", "qk_norm": "l2", **UNDIVIDED}) for role in ROLES),
    Case("linear", "decoder", {"feature_map": "exp", "qk_norm": "l1", **UNDIVIDED}),
    mapped("rebased", "cross", rebased_start="uniform"),
    *(mapped("squared", role, squared_kernel="affine") for role in ROLES),
    *(Case("linear", role, {"feature_map": "elu", **EPS}) for role in ROLES),
    *(
        Case("linear", role, options, position="rotary")
        for role in ("encoder", "decoder")
        for options in ({}, {"qk_norm": "l2"}, EPS, {"qk_norm": "l2", **UNDIVIDED})
    ),
]


def flat(terms) -> Tensor:
    return torch.stack(list(terms))


def linear(layer, x: Tensor) -> list[Tensor]:
    return [weights @ x + bias for weights, bias in zip(layer.weight, layer.bias, strict=True)]


def elu(phi, x, position, side) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def relu(phi, x, position, side) -> Tensor:
    return torch.where(x > 0, x, 0.0)


def standardized(x) -> list[Tensor]:
    mean = sum(x) / len(x)
    deviation = (sum((e - mean) ** 2 for e in x) / (len(x) - 1)) ** 0.5
    return [(e - mean) / (deviation + 1e-6) for e in x]


def squared(phi, x, position, side) -> Tensor:
    kernel = phi.query_kernel if side == "q" else phi.key_kernel
    if hasattr(kernel, "weight"):
        x = [g * e + b for g, e, b in zip(kernel.weight, standardized(x), kernel.bias, strict=True)]
    return flat(e * e for e in x)


def mlp(phi, x, position, side) -> Tensor:
    first, _, second = phi.query_map if side == "q" else phi.key_map
    hidden = [max(e, 0 * e) for e in linear(first, flat(standardized(x)))]
    return flat(linear(second, flat(hidden)))


def exp(phi, x, position, side) -> Tensor:
    return flat(math.e**e for e in x) / (math.e ** max(x) if side == "q" else 1.0)


def cosformer(phi, x, position, side) -> Tensor:
    angle = math.pi * position / (2 * HORIZON)
    return flat([max(e, 0 * e) * wave for wave in (math.sin(angle), math.cos(angle)) for e in x])


def performer(phi, x, position, side) -> Tensor:
    x = x / len(x) ** 0.25
    half = sum(e * e for e in x) / 2
    exponents = [sign * (omega @ x) - half for sign in (1, -1) for omega in phi.projection.T]
    largest = max(exponents) if side == "q" else 0.0
    return flat((e - largest).exp() for e in exponents) / len(exponents) ** 0.5


def squares(phi, x) -> list[Tensor]:
    d = range(len(x))
    return [x[i] * x[j] * (1.0 if i == j else 2**0.5) for i in d for j in d if i <= j]


def taylor(phi, x, position, side) -> Tensor:
    d = len(x)
    return flat([x[0] ** 0, *(e / d**0.25 for e in x), *(e / (2 * d) ** 0.5 for e in squares(phi, x))])


def rebased(phi, x, position, side) -> Tensor:
    norm = phi.query_norm if side == "q" else phi.key_norm
    mean = sum(x) / len(x)
    deviation = (sum((e - mean) ** 2 for e in x) / len(x) + 1e-5) ** 0.5
    y = flat(g * (e - mean) / deviation + b for g, e, b in zip(norm.weight, x, norm.bias, strict=True))
    return flat(squares(phi, y)) / len(x) ** 0.5


def hedgehog(phi, x, position, side) -> Tensor:
    y = linear(phi.query_map if side == "q" else phi.key_map, x)
    powers = flat((2 * sign * e).exp() for sign in (1, -1) for e in y)
    return powers / sum(powers)


def t2r(phi, x, position, side) -> Tensor:
    return relu(phi, flat(linear(phi.query_map if side == "q" else phi.key_map, x)), position, side)


def dpfp(phi, x, position, side) -> Tensor:
    r = [max(sign * e, 0 * e) for sign in (1, -1) for e in x]
    return flat(r[i] * r[i - shift] for shift in range(1, phi.nu + 1) for i in range(len(r)))


#: map -> φ(x) of one vector x (D,) at a position (counted over real tokens), for a Query or a Key ("q", "k").
FEATURES: dict[str, Callable[[object, Tensor, int, str], Tensor]] = {
    "elu": elu,
    "identity": lambda phi, x, position, side: x,
    "relu": relu,
    "squared": squared,
    "exp": exp,
    "cosformer": cosformer,
    "performer": performer,
    "taylor": taylor,
    "rebased": rebased,
    "hedgehog": hedgehog,
    "t2r": t2r,
    "dpfp": dpfp,
    "mlp": mlp,
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
        """The position of a key: how many real ones are before it. Padding has that of the last real one."""
        return m if row.padding is None else max(int((~row.padding[: m + 1]).sum()) - 1, 0)

    position = row.n if module.role == "cross" else at(row.n)
    query = normalized(module.q_norm, phi(module.feature_map, row.q[row.n], position, "q"))
    # Normalized exponentials are of Keys as of Queries: their largest cancels in the norm, but for its ε.
    as_queries = phi in (exp, performer) and module.k_norm.registered_name != "none"
    side = "q" if as_queries else "k"
    keys = [normalized(module.k_norm, phi(module.feature_map, row.k[m], at(m), side)) for m in row.seen]
    similarity = torch.stack([query @ key for key in keys])
    denominator = similarity.sum() + module.eps if module.divides else 1.0
    if module.position is not None:  # a rotation is in the numerator alone (Su et al. 2021, eq. 19)
        query = rotated(query, row.n)
        similarity = torch.stack([query @ rotated(key, m) for key, m in zip(keys, row.seen, strict=True)])
    return similarity / denominator

"""Linear attention: inputs, states, and the operator as a function of named tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops import linear_attention, linear_attention_state


def make(batch, heads, queries, keys, features, width, device, dtype=torch.float64) -> dict[str, Tensor]:
    """q and k as positive feature maps give them, v of both signs."""
    q = torch.rand(batch, heads, queries, features, dtype=torch.float64) + 0.05
    k = torch.rand(batch, heads, keys, features, dtype=torch.float64) + 0.05
    v = torch.randn(batch, heads, keys, width, dtype=torch.float64)
    return {"q": q.to(device, dtype), "k": k.to(device, dtype), "v": v.to(device, dtype)}


def make_state(batch, heads, features, width, device) -> dict[str, Tensor]:
    s, z = linear_attention_state(*list(make(batch, heads, 1, 3, features, width, device).values())[1:])
    return {"S": s, "z": z}


def run(implementation: str, **options):
    """linear_attention as a function of named tensors to named tensors; S and z, if given, are the incoming state."""

    def function(q, k, v, S=None, z=None):  # noqa: N803
        state = None if S is None else (S, z)
        out = linear_attention(q, k, v, state=state, implementation=implementation, **options)
        if not options.get("return_state"):
            return {"out": out}
        return {"out": out[0], "final S": out[1][0], "final z": out[1][1]}

    return function

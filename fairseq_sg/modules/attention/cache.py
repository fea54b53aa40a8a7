"""The decoding state of attentions that keep all keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.modules.attention.context import State


def append_to_cache(state: State | None, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> State:
    """The cache with new keys (B, H, N, D), values (B, H, N, E) and their padding (B, N), at every step or never.

    Buffers double when they are full, so that appending costs O(1) a step.
    """
    start = 0 if state is None else state["length"]
    length = start + k.size(2)
    mask = key_padding_mask
    if state is not None and mask is not None:
        mask = torch.cat([state["key_padding_mask"], mask], dim=1)  # (B, M)
    cache = {"length": length, "key_padding_mask": mask, "dropped": 0 if state is None else state["dropped"]}
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


def cached(cache: State) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys (B, H, M, D), values (B, H, M, E) and padding mask (B, M) of all positions so far."""
    length = cache["length"]
    return cache["k"][:, :, :length], cache["v"][:, :, :length], cache["key_padding_mask"]


def keep_last(cache: State, window: int) -> State:
    """A cache from which keys before the last ``window`` are dropped where they are as many; ``dropped`` counts them.

    Dropping many at once costs O(1) a step. A cache with padding is left as it is.
    """
    extra = cache["length"] - window
    if cache["key_padding_mask"] is not None or extra < max(window, 16):
        return cache
    kept = {name: cache[name][:, :, extra : cache["length"]].clone() for name in ("k", "v")}
    return {**cache, **kept, "length": window, "dropped": cache["dropped"] + extra}

"""The interface of a controller and a memory: a vector ξ_t, and what its numbers mean (Csordás 2023, A.1).

    ξ_t = W_ξ h_t + b_ξ                           clamped, as in the released code

| numbers | what | nonlinearity |
|---|---|---|
| W, R W, W | write key, read keys, write vector | none |
| W, R, 1, 1 | erase vector, free gates, allocation gate, write gate | σ |
| W, R W | masks of the write and of the read look-ups, with masks alone | σ(m̂) (1 − δ) + δ |
| 1, R | strengths β of the write and of the read look-ups | oneplus |
| R, R | sharpness of forward and of backward links, with sharpness alone | oneplus |
| 3 R | read modes: backward, content, forward | softmax |

With both parts these are 2 W R + 4 W + 7 R + 3 numbers. oneplus(x) = 1 + log(1 + eˣ) is in (1, ∞), although the text
has [0, ∞): sharpness never flattens a distribution.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.ops.precision import accurate


class Interface(NamedTuple):
    """What a controller says in one step. Masks and sharpness are None in variants without them."""

    write_key: Tensor  # (B, 1, W)
    read_keys: Tensor  # (B, R, W)
    write_vector: Tensor  # (B, W)
    erase: Tensor  # (B, W)
    free: Tensor  # (B, R)
    allocation_gate: Tensor  # (B, 1)
    write_gate: Tensor  # (B, 1)
    write_mask: Tensor | None  # (B, 1, W)
    read_masks: Tensor | None  # (B, R, W)
    write_strength: Tensor  # (B, 1)
    read_strengths: Tensor  # (B, R)
    forward_sharpness: Tensor | None  # (B, R)
    backward_sharpness: Tensor | None  # (B, R)
    modes: Tensor  # (B, R, 3)


class InterfaceProjection(nn.Module):
    """W_ξ and b_ξ, and the split of ξ.

    The weights are in up to three parts, ``plain``, ``masks`` and ``sharpness``: variants share names, so the weights
    of a plain DNC are a part of those of the others. They start Glorot uniform, as one matrix would; biases start at 0,
    those of masks at ``mask_bias``.

    Args:
        dim: numbers of h_t.
        width: W. heads: R.
        masks, sharpness: whether ξ has these parts.
        mask_floor: δ. mask_bias: the start of the biases of masks.
        clamp: the largest magnitude of a number of ξ; 0 for no limit.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int,
        heads: int,
        masks: bool,
        sharpness: bool,
        mask_floor: float = 0.0,
        mask_bias: float = 1.0,
        clamp: float = 20.0,
    ):
        super().__init__()
        self.width, self.heads, self.mask_floor, self.clamp = width, heads, mask_floor, clamp
        # Numbers of ξ by nonlinearity.
        self.raw, self.gates = (2 + heads) * width, width + heads + 2
        plain = self.raw + self.gates + 1 + heads + 3 * heads
        self.plain = nn.Linear(dim, plain)
        self.masks = nn.Linear(dim, (1 + heads) * width) if masks else None
        self.sharpness = nn.Linear(dim, 2 * heads) if sharpness else None
        parts = [part for part in (self.plain, self.masks, self.sharpness) if part is not None]
        self.sizes_of_masks = [] if self.masks is None else [width, heads * width]
        self.sizes_of_sharpness = [] if self.sharpness is None else [heads, heads]
        self.sizes = [
            self.raw, self.gates + sum(self.sizes_of_masks), 1 + heads + sum(self.sizes_of_sharpness), 3 * heads
        ]  # fmt: skip
        self.size = sum(part.out_features for part in parts)
        bound = math.sqrt(6 / (dim + self.size))
        for part in parts:
            nn.init.uniform_(part.weight, -bound, bound)
            nn.init.zeros_(part.bias)
        if self.masks is not None:
            nn.init.constant_(self.masks.bias, mask_bias)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """W_ξ (|ξ|, S) and b_ξ, their rows in the order of the table. Once a sequence: a step then has one product."""

        def stack(plain: Tensor, masks: Tensor | None, sharpness: Tensor | None) -> Tensor:
            raw, gates, strengths, modes = plain.split([self.raw, self.gates, 1 + self.heads, 3 * self.heads])
            rows = (raw, gates, masks, strengths, sharpness, modes)
            return torch.cat([row for row in rows if row is not None])

        parts = (self.plain, self.masks, self.sharpness)
        return (
            stack(*(None if part is None else part.weight for part in parts)),
            stack(*(None if part is None else part.bias for part in parts)),
        )

    def forward(self, h: Tensor, weight: Tensor, bias: Tensor) -> Interface:
        """h (B, S), and the results of ``stacked`` -> the interface, in float32 (float64)."""
        xi = accurate(F.linear(h.to(weight.dtype), weight, bias))
        if self.clamp:
            xi = xi.clamp(-self.clamp, self.clamp)
        w, r = self.width, self.heads
        # Split once by nonlinearity and once more: each slice by itself would be copied in the derivative.
        raw, gates, oneplus, modes = xi.split(self.sizes, 1)
        write_key, read_keys, write_vector = raw.split([w, r * w, w], 1)
        erase, free, allocation_gate, write_gate, *m = gates.sigmoid().split([w, r, 1, 1, *self.sizes_of_masks], 1)
        write_strength, read_strengths, *s = (F.softplus(oneplus) + 1).split([1, r, *self.sizes_of_sharpness], 1)
        m = [self.mask_floor + (1 - self.mask_floor) * one for one in m] if self.mask_floor else m
        write_mask, read_masks = (one.unflatten(1, (-1, w)) for one in m) if m else (None, None)
        forward_sharpness, backward_sharpness = s or (None, None)
        return Interface(
            write_key=write_key[:, None],
            read_keys=read_keys.unflatten(1, (r, w)),
            write_vector=write_vector,
            erase=erase,
            free=free,
            allocation_gate=allocation_gate,
            write_gate=write_gate,
            write_mask=write_mask,
            read_masks=read_masks,
            write_strength=write_strength,
            read_strengths=read_strengths,
            forward_sharpness=forward_sharpness,
            backward_sharpness=backward_sharpness,
            modes=torch.softmax(modes.unflatten(1, (r, 3)), 2),
        )

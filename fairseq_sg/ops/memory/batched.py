"""The operators on a memory for whole batches, as few operations as they come to: one step of a DNC calls all of them.

- The masked cosine needs no (B, K, N, W): (k ∘ m)·(M_i ∘ m) = M_i · (k ∘ m²), and |M_i ∘ m|² = (M_i²) · m².
- The product of the usages before a cell is exp of a sum: the derivative of `cumprod` takes three times as many
  operations. No usage is 0 here (ε).
- S(d, s) is softmax(s log(d + ε)), exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_sg.ops.memory.naive import EPS

# Under the root of a norm: √x has an infinite derivative at 0, where a cell is that was never written.
TINY = 1e-36


def content_weights(memory: Tensor, keys: Tensor, strengths: Tensor, masks: Tensor | None = None) -> Tensor:
    if masks is None:
        dots = keys @ memory.transpose(1, 2)  # (B, K, N)
        squares = memory.square().sum(2)[:, None]  # (B, 1, N)
        of_key = keys.square().sum(2, keepdim=True)  # (B, K, 1)
    else:
        masked = keys * masks
        dots = (masked * masks) @ memory.transpose(1, 2)
        squares = masks.square() @ memory.square().transpose(1, 2)  # (B, K, N)
        of_key = masked.square().sum(2, keepdim=True)
    norms = (of_key + TINY).sqrt() * (squares + TINY).sqrt()
    return torch.softmax(dots * strengths[:, :, None] / (norms + EPS), 2)


def retention(read_weights: Tensor, free: Tensor) -> Tensor:
    kept = 1 - read_weights * free[:, :, None]  # (B, R, N)
    # `prod` would look for zeros, and wait for them on a GPU, in its derivative.
    result = kept[:, 0]
    for i in range(1, kept.size(1)):
        result = result * kept[:, i]
    return result


def usage(usage: Tensor, write_weights: Tensor, retention: Tensor) -> Tensor:
    return torch.addcmul(usage + write_weights, usage, write_weights, value=-1) * retention


def allocation(usage: Tensor) -> Tensor:
    u, order = torch.sort(usage * (1 - EPS) + EPS, dim=1, stable=True)
    logs = u.log()
    # Σ_{i<j} without what j adds: with it and minus it, the derivative would be a difference of numbers up to 1/ε.
    before = F.pad(logs[:, :-1].cumsum(1), (1, 0)).exp()  # Π_{i<j} u[φ_i]
    return torch.zeros_like(u).scatter(1, order, (1 - u) * before)


def write(
    memory: Tensor, write_weights: Tensor, erase: Tensor, vector: Tensor, retention: Tensor | None = None
) -> Tensor:
    w = write_weights[:, :, None]
    kept = memory if retention is None else memory * retention[:, :, None]
    return torch.addcmul(kept + w * vector[:, None], kept, w * erase[:, None], value=-1)


def links(links: Tensor, precedence: Tensor, write_weights: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = write_weights[:, :, None], write_weights[:, None]
    kept = (1 - rows) - columns  # (B, N, N)
    off_diagonal = 1 - torch.eye(links.size(1), dtype=links.dtype, device=links.device)
    after = torch.addcmul(rows * precedence[:, None], kept, links) * off_diagonal
    return after, torch.addcmul(write_weights, 1 - write_weights.sum(1, keepdim=True), precedence)


def follow(
    links: Tensor,
    read_weights: Tensor,
    forward_sharpness: Tensor | None = None,
    backward_sharpness: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ahead, behind = read_weights @ links.transpose(1, 2), read_weights @ links  # (B, R, N)
    if forward_sharpness is None or backward_sharpness is None:
        return ahead, behind
    powers = torch.cat([forward_sharpness, backward_sharpness], 1)[:, :, None]  # (B, 2 R, 1)
    both = torch.softmax(powers * torch.log(torch.cat([ahead, behind], 1) + EPS), 2)
    ahead, behind = both.chunk(2, 1)
    return ahead, behind


def read(memory: Tensor, read_weights: Tensor) -> Tensor:
    return read_weights @ memory

"""The operators on a memory as their equations stand: loops over sentences, heads and cells.

Arguments and results are those of `fairseq_sg.ops.memory`, in any floating dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: ε of the cosine similarity, of usages before they are sorted, and of sharpened links; that of the released code.
EPS = 1e-6


def content_weights(memory: Tensor, keys: Tensor, strengths: Tensor, masks: Tensor | None = None) -> Tensor:
    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return a @ b / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b) + EPS)

    def look_up(b: int, k: int) -> Tensor:
        m = torch.ones_like(keys[b, k]) if masks is None else masks[b, k]
        scores = [strengths[b, k] * similarity(keys[b, k] * m, cell * m) for cell in memory[b]]
        return torch.softmax(torch.stack(scores), 0)

    return _nested(look_up, keys.shape[:2])


def retention(read_weights: Tensor, free: Tensor) -> Tensor:
    def of_cell(b: int, n: int) -> Tensor:
        kept = torch.ones_like(free[b, 0])
        for i in range(free.size(1)):
            kept = kept * (1 - free[b, i] * read_weights[b, i, n])
        return kept

    return _nested(of_cell, (read_weights.size(0), read_weights.size(2)))


def usage(usage: Tensor, write_weights: Tensor, retention: Tensor) -> Tensor:
    def of_cell(b: int, n: int) -> Tensor:
        u, w = usage[b, n], write_weights[b, n]
        return (u + w - u * w) * retention[b, n]

    return _nested(of_cell, usage.shape)


def allocation(usage: Tensor) -> Tensor:
    rows = []
    for row in usage:
        u = row * (1 - EPS) + EPS
        product, found = torch.ones_like(u[0]), {}
        for cell in sorted(range(len(u)), key=lambda i: (u[i].item(), i)):
            found[cell] = (1 - u[cell]) * product
            product = product * u[cell]
        rows.append(torch.stack([found[cell] for cell in range(len(u))]))
    return torch.stack(rows)


def write(
    memory: Tensor, write_weights: Tensor, erase: Tensor, vector: Tensor, retention: Tensor | None = None
) -> Tensor:
    def of_cell(b: int, n: int) -> Tensor:
        w = write_weights[b, n]
        kept = memory[b, n] if retention is None else memory[b, n] * retention[b, n]
        return kept * (1 - w * erase[b]) + w * vector[b]

    return _nested(of_cell, memory.shape[:2])


def links(links: Tensor, precedence: Tensor, write_weights: Tensor) -> tuple[Tensor, Tensor]:
    def of_pair(b: int, i: int, j: int) -> Tensor:
        w = write_weights[b]
        if i == j:
            return torch.zeros_like(w[i])
        return (1 - w[i] - w[j]) * links[b, i, j] + w[i] * precedence[b, j]

    after = [(1 - w.sum()) * p + w for w, p in zip(write_weights, precedence, strict=True)]
    return _nested(of_pair, links.shape), torch.stack(after)


def follow(
    links: Tensor,
    read_weights: Tensor,
    forward_sharpness: Tensor | None = None,
    backward_sharpness: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    def sharpened(d: Tensor, s: Tensor) -> Tensor:
        powers = ((d + EPS) / (d + EPS).max().detach()) ** s
        return powers / powers.sum()

    def ahead(b: int, i: int) -> Tensor:
        f = torch.stack([row @ read_weights[b, i] for row in links[b]])
        return f if forward_sharpness is None else sharpened(f, forward_sharpness[b, i])

    def behind(b: int, i: int) -> Tensor:
        f = torch.stack([column @ read_weights[b, i] for column in links[b].T])
        return f if backward_sharpness is None else sharpened(f, backward_sharpness[b, i])

    shape = read_weights.shape[:2]
    return _nested(ahead, shape), _nested(behind, shape)


def read(memory: Tensor, read_weights: Tensor) -> Tensor:
    def of_head(b: int, i: int) -> Tensor:
        weighted = [w * cell for w, cell in zip(read_weights[b, i], memory[b], strict=True)]
        return torch.stack(weighted).sum(0)

    return _nested(of_head, read_weights.shape[:2])


def _nested(function, shape) -> Tensor:
    """function(i, j, …) for all indices of a shape, stacked in it."""
    if len(shape) == 1:
        return torch.stack([function(i) for i in range(shape[0])])
    return torch.stack([_nested(lambda *rest, i=i: function(i, *rest), shape[1:]) for i in range(shape[0])])

"""Conditional products: inputs and selections."""

from __future__ import annotations

import torch


def make_selection(kind: str, rows: int, matrices: int, device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    selection = torch.randint(0, matrices, (rows,), generator=generator)
    if kind in ("one", "last"):
        selection.fill_(0 if kind == "one" else matrices - 1)
    if kind == "missing":
        selection[torch.rand(rows, generator=generator) < 0.4] = -1
    if kind == "nothing":
        selection.fill_(-1)
    return selection.to(device)


def make(shape, device, dtype=torch.float64):
    rows, count, into, out = shape
    return {
        "x": torch.randn(rows, into, dtype=torch.float64).to(device, dtype),
        "matrices": torch.randn(count, into, out, dtype=torch.float64).to(device, dtype),
    }

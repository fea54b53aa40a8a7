"""What checkpoints hold, compared bit for bit, and one that does harm."""

from __future__ import annotations

from pathlib import Path

import torch


def tensors(state, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors in nested dicts and lists, by their place."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}/{key}").items()}


def assert_same_state(checkpoint: Path, other: Path) -> None:
    """Same weights, optimizer state and number of updates, bit for bit."""
    one, two = (torch.load(path, weights_only=True) for path in (checkpoint, other))
    for part in ("model", "last_optimizer_state"):
        left, right = tensors(one[part]), tensors(two[part])
        assert left and left.keys() == right.keys()
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert not different, f"{part} differs in {different}"
    assert one["optimizer_history"][-1]["num_updates"] == two["optimizer_history"][-1]["num_updates"]


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)

"""The memory of a language model for each group of streams, kept by the task from one segment to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.decoder import Memory


class SegmentMemories:
    """The memories of groups of streams (``streams``), by the number of the group.

    Each group has two: the memory before the last segment, and the memory after it. fairseq computes a batch again
    after a failed step (``--amp``, or out of memory), and the second attempt must start from the same memory.
    """

    def __init__(self):
        self._by_group: dict[int, tuple[Memory | None, Memory | None]] = {}

    def before(self, group: int, start: int, rows: int) -> Memory | None:
        """The memory for the segment that begins at ``start``; None at the start of the streams.

        Raises:
            UsageError: there is none, or it is of another number of ``rows``.
        """
        if start == 0:
            return None
        for memory in self._by_group.get(group, ()):
            if memory is not None and memory["position"] == start and memory["hidden"][0].size(1) == rows:
                return memory
        raise UsageError(
            f"there is no memory for position {start} of the streams: resume with the --memory-length, --batch-size, "
            "--update-freq, --tokens-per-sample and number of workers that the checkpoint was made with, or begin "
            "at the first epoch with --reset-dataloader"
        )

    def after(self, group: int, used: Memory | None, left: Memory | None) -> None:
        """Keeps the memory before a segment and the memory after it, None after the last segment."""
        self._by_group[group] = used, left

    def forget(self) -> None:
        """Drops all memories: the next streams begin."""
        self._by_group.clear()

    def state(self) -> dict[int, Memory]:
        """The memories that the next segments need, on the CPU; plain data."""
        left = {group: memory for group, (_, memory) in self._by_group.items() if memory is not None}
        # Contiguous: fairseq sends the numbers of a checkpoint to other workers without their strides.
        return {
            group: {
                "hidden": [h.cpu().clone(memory_format=torch.contiguous_format) for h in memory["hidden"]],
                "position": memory["position"],
            }
            for group, memory in left.items()
        }

    def load(self, state: dict[int, Memory]) -> None:
        self._by_group = {group: (None, memory) for group, memory in state.items()}


class Remembering:
    """A model on one group's segment: it adds the memory to a batch's inputs, and keeps the memory that is returned.

    The criterion takes it for the model. The memory is no attribute of the model: copies of the model, and wrappers for
    several workers, do not have it.
    """

    def __init__(self, model: nn.Module, memories: SegmentMemories, segment: dict[str, Any], length: int):
        self._model, self._memories, self._segment, self._length = model, memories, segment, length
        self.remembering = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, src_tokens: Tensor, **inputs: Any) -> Any:
        group, start = self._segment["group"], self._segment["start"]
        used = on_device(self._memories.before(group, start, src_tokens.size(0)), src_tokens.device)
        logits, extra = self._model(src_tokens=src_tokens, memory=used, memory_length=self._length, **inputs)
        left = extra.pop("memory")
        self._memories.after(group, used, None if self._segment["last"] else left)
        return logits, extra


def on_device(memory: Memory | None, device: torch.device) -> Memory | None:
    """A memory on a device; that of a checkpoint is on the CPU."""
    return None if memory is None else {**memory, "hidden": [h.to(device) for h in memory["hidden"]]}

"""CUDA graphs of whole training steps: forward and backward pass, clipping and update, launched at once.

A step of a small model is a thousand operations, and Python takes longer to launch one than a GPU to run it. A graph
launches all of them in one call. It is recorded for a shape of batch and has its inputs at fixed places, so a step
copies its batch there and replays the graph of its shape.

What is no tensor is part of a graph: a number in a batch makes another graph, except ``ntokens``, which becomes a
tensor. What a step does on the host alone is done when it is recorded, and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_sg.errors import UsageError, first_line, out_of_memory


class CudaGraphs:
    """Records functions. Its graphs take turns, and none needs what another has left, so they share their memory."""

    def __init__(self):
        self._pool: Any = None
        self._stream: Any = None

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Runs a function once; returns its replay, and what it returned, which every replay fills again."""
        if self._pool is None:
            self._pool, current = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
            # Products keep the workspace of the stream that they are recorded on. On torch's own stream for recordings,
            # trainings that run beside each other would write into one workspace. The default stream records nothing.
            self._stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
        graph = torch.cuda.CUDAGraph()
        # Threads that pin batches go on allocating: only this one is watched.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            made = function()
        # A recording runs nothing.
        graph.replay()
        return graph.replay, made


class Recorded(NamedTuple):
    """The replay of a graph, the tensors that it reads, and what it returned."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    made: Any


class StepGraphs:
    """A step that is recorded for each shape of its batches, and replayed.

    The first step of a shape runs as it is, which also lets libraries allocate what they need; the second is recorded.

    Args:
        step: gets batches, runs without waiting for the device, and returns tensors.
        most: the number of graphs; other shapes run as they are.
        recorder: makes graphs.
    """

    def __init__(self, step: Callable[[list], Any], most: int, recorder: Any = None):
        self.step, self.most, self.recorder = step, most, recorder or CudaGraphs()
        self._seen: set[tuple] = set()
        self._recorded: dict[tuple, Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def __call__(self, batches: Sequence[dict[str, Any]]) -> Any:
        """The result of the step; the next step of the same shape overwrites it.

        Raises:
            UsageError: the step does what a graph cannot record.
        """
        batches = [counted(batch) for batch in batches]
        tensors: list[Tensor] = []
        shape = described(batches, tensors)
        if shape in self._recorded:
            replay, inputs, made = self._recorded[shape]
            for there, tensor in zip(inputs, tensors, strict=True):
                there.copy_(tensor, non_blocking=True)
            replay()
            return made
        if shape not in self._seen or len(self._recorded) >= self.most:
            made = self.step(batches)
            self._seen.add(shape)  # not after an error
            return made
        inputs = [tensor.clone() for tensor in tensors]
        fixed = replaced(batches, iter(inputs))
        try:
            replay, made = self.recorder.record(lambda: self.step(fixed))
        except Exception as error:
            # Where a step cannot be recorded, CUDA cannot end the recording either.
            first = error.__context__ if error.__context__ and "CUDA error" in str(error) else error
            why = first_line(first)
            if out_of_memory(first):
                fix = f"there is no memory for graph {len(self) + 1} ({why}): use --step-graphs {len(self)}"
            else:
                fix = f"a step of this model cannot be recorded ({why}): leave --step-graphs out"
            raise UsageError(f"--step-graphs: {fix}") from error
        self._recorded[shape] = Recorded(replay, inputs, made)
        return made


def counted(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose number of tokens is a tensor, as it differs between batches of one shape."""
    if not isinstance(batch.get("ntokens"), int):
        return batch
    device = next((part.device for part in batch.values() if isinstance(part, Tensor)), None)
    return batch | {"ntokens": torch.full((), batch["ntokens"], device=device)}


def described(value: Any, tensors: list[Tensor]) -> tuple:
    """The shape of nested batches, which can be compared; adds their tensors to ``tensors``, in order."""
    if isinstance(value, dict):
        return tuple((name, described(part, tensors)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(described(part, tensors) for part in value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", tuple(value.shape), value.dtype
    return type(value).__name__, value


def replaced(value: Any, tensors: Any) -> Any:
    """Nested batches with the next of ``tensors`` in the place of each tensor."""
    if isinstance(value, dict):
        return {name: replaced(part, tensors) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(part, tensors) for part in value]
    return next(tensors) if isinstance(value, Tensor) else value

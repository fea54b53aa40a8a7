"""A stand-in for a CUDA graph, on any device: it records each operator with its tensors, and replays them in place.

As in a CUDA graph, numbers of Python are those of the recording, and what the host does is done once. An operator that
asks for a tensor's value is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators whose outputs share the memory of their inputs although their schemas do not say so.
VIEWS = {torch.ops.aten._reshape_alias.default, torch.ops.aten._unsafe_view.default}
WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class SoftwareGraphs:
    """In the place of ``fairseq_sg.graphs.CudaGraphs``."""

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        calls: list[tuple[Callable, tuple, dict, Any]] = []
        with _Recording(calls):
            made = function()
        return functools.partial(_replay, calls), made


def _replay(calls: list[tuple[Callable, tuple, dict, Any]]) -> None:
    with torch.no_grad():
        for operator, arguments, options, recorded in calls:
            made = operator(*arguments, **options)
            if _makes_new(operator):
                for place, value in zip(tree_leaves(recorded), tree_leaves(made), strict=True):
                    if isinstance(place, torch.Tensor):
                        place.copy_(value)


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in WAITING:
            raise RuntimeError(f"the host waits for {operator}")
        made = operator(*args, **(kwargs or {}))
        # What is handed on may change its shape later.
        kept = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(made)]
        self.calls.append((operator, args, kwargs or {}, kept))
        return made


def _makes_new(operator) -> bool:
    return operator not in VIEWS and not any(value.alias_info for value in operator._schema.returns)

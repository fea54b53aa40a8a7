"""Layers compiled by ``torch.compile`` (``--compile``), for models that are bound by launching.

A layer of a small model is about a hundred operations, of which each takes a GPU less time than Python takes to launch
it. Compiled, it is a few fused kernels; with CUDA graphs (``reduce-overhead``, ``max-autotune``) the host launches all
of them at once.

Compiled is the pass of a layer in training, and its derivative, for any batch size and length: sizes are symbols, so a
new length is no new compilation. A layer runs uncompiled

- in evaluation and decoding, where every step has another state, and the analysis looks on;
- where one of its modules has a forward hook, which compiled code would pass by;
- within ``torch.compile`` of somebody else's, who decides about all of it.

What cannot be compiled within a layer, such as a derivative that works in buffers, splits its code in two. Neither
names of parameters nor the contents of a checkpoint change, and a copy of a layer is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.losses import Statistic
from fairseq_sg.ops.dispatch import requested
from fairseq_sg.ops.triton_support import why_not_here

NONE = "none"
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
MODES = (NONE, "default", *CUDA_GRAPHS)
#: Functions with one answer for a whole program, which the compiler must not trace.
CONSTANT = (requested, why_not_here)
#: Who compiles: torch's inductor. Tests have cheaper ones here.
BACKEND: str | Callable = "inductor"


def check_mode(mode: str) -> None:
    """Raises UsageError for a mode that does not exist."""
    if mode not in MODES:
        raise UsageError(f"--compile is {mode!r}: choose from {', '.join(MODES)}")


class Compilable(nn.Module):
    """A layer that may be compiled; it is called with a hidden state and a `Context`."""

    #: None: not compiled.
    _compilation: Compilation | None = None

    def __call__(self, x: Tensor, context: Context = Context()):
        if self._compilation is None or not self._compilation.serves(self, context):
            return super().__call__(x, context)
        return self._compilation.run(self, x, context)


def compile_in_training(modules: nn.Module, mode: str) -> None:
    """From now on, everything in ``modules`` that is `Compilable` runs compiled, each by itself; not so with ``none``.

    Raises:
        UsageError: a mode that does not exist; at the first step of training, ``reduce-overhead`` without a GPU.
    """
    check_mode(mode)
    for module in modules.modules():
        if isinstance(module, Compilable):
            module._compilation = None if mode == NONE else Compilation(mode)


class Compilation:
    """The compiled pass of a module.

    Args:
        mode: of ``torch.compile``.
    """

    def __init__(self, mode: str):
        self.mode = mode
        self._function: Callable | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Compiled code is neither copied nor stored."""
        return {"mode": self.mode, "_function": None}

    def serves(self, module: nn.Module, context: Context) -> bool:
        """Whether a call runs compiled."""
        if not module.training or context.state is not None or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():
            return False
        return not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())

    def run(self, module: nn.Module, x: Tensor, context: Context):
        """The output of the module's compiled ``forward``.

        Raises:
            UsageError: CUDA graphs on a CPU.
        """
        if self.mode == "reduce-overhead" and x.device.type != "cuda":
            raise UsageError(
                f"--compile {self.mode} is for CUDA graphs, and this trains on {x.device.type}: choose --compile "
                "default or none"
            )
        if self._function is None:
            for function in CONSTANT:
                torch.compiler.assume_constant_result(function)
            mode = {"mode": self.mode} if BACKEND == "inductor" else {}
            self._function = torch.compile(type(module).forward, backend=BACKEND, dynamic=True, **mode)
        # Embeddings have another layout than layers' outputs, and would need code of their own.
        out = self._function(module, x.contiguous(), context)
        if self.mode in CUDA_GRAPHS and x.device.type == "cuda":
            # The next step overwrites a graph's results, some of which live longer (a memory of segments, Values).
            out = tree_map(_clone, out)
        return out


def _clone(leaf: Any) -> Any:
    if isinstance(leaf, Statistic):
        return Statistic(leaf.value.clone())
    return leaf.clone() if isinstance(leaf, Tensor) else leaf

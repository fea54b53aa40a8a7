"""Layers compiled by ``torch.compile`` (``--compile``), for models that are limited by kernel launches.

A layer of a small model is about a hundred operations, and Python takes longer to launch one than a GPU to run it.
Compiled, the layer is a few fused kernels. With CUDA graphs (``reduce-overhead``, ``max-autotune``) the host launches
all of them at once.

Forward and backward pass of a layer are compiled in training. Sizes are symbols: a new batch size or length needs no
new compilation, except where code asks for a size. Linear attention asks for short sentences. On a GPU, softmax
attention in float32 asks for up to 32 positions, and relative attention for multiples of 32 sequences
(``ops.relative.shift``).

A layer runs uncompiled

- in evaluation and decoding, where every step has another state;
- where one of its modules has a forward hook, which compiled code would skip;
- within ``torch.compile`` of a caller, which then decides.

An operation that cannot be compiled, such as a derivative that works in buffers, splits the code of its layer in two.
Names of parameters and contents of checkpoints stay the same. A copy of a layer is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.attention.context import Context
from fairseq_sg.modules.losses import Statistic
from fairseq_sg.ops.dispatch import requested
from fairseq_sg.ops.transforms import plain
from fairseq_sg.ops.triton_support import why_not_here

NONE = "none"
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
MODES = (NONE, "default", *CUDA_GRAPHS)
#: Functions with one answer for a whole program, which the compiler must not trace.
CONSTANT = (requested, why_not_here)
#: The compiler's backend; tests put a cheaper one here.
BACKEND: str | Callable = "inductor"


class Compilable(nn.Module):
    """A layer that may be compiled; it is called with a hidden state and a `Context`."""

    #: None: not compiled.
    _compilation: Compilation | None = None

    def __call__(self, x: Tensor, context: Context = Context()):
        if self._compilation is None or not self._compilation.serves(self, context):
            return super().__call__(x, context)
        return self._compilation.run(self, x, context)


def compile_in_training(modules: nn.Module, mode: str) -> None:
    """Makes every `Compilable` in ``modules`` run compiled, each by itself; with ``none``, uncompiled.

    Raises:
        UsageError: a mode that does not exist; at the first step of training, ``reduce-overhead`` without a GPU.
    """
    ranges.check_value("compile", mode, {"choices": MODES})
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
        if plain():
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
            self._function = compiled(type(module).forward, self.mode)
        # Embeddings and layers' outputs have different strides, and would be compiled apart.
        out = self._function(module, x.contiguous(), context)
        if self.mode in CUDA_GRAPHS and x.device.type == "cuda":
            # The next step overwrites a graph's results, some of which live longer (a memory of segments, Values).
            out = tree_map(_clone, out)
        return out


def compiled(function: Callable, mode: str) -> Callable:
    """A function compiled in a mode of ``torch.compile``, for inputs of any size."""
    # All models and precisions of a process share the code of a layer; beyond the limit they would run uncompiled.
    config = torch._dynamo.config
    config.cache_size_limit = max(64, config.cache_size_limit)
    for constant in CONSTANT:
        torch.compiler.assume_constant_result(constant)
    of_inductor = {"mode": mode} if BACKEND == "inductor" else {}
    return torch.compile(function, backend=BACKEND, dynamic=True, **of_inductor)


def _clone(leaf: Any) -> Any:
    if isinstance(leaf, Statistic):
        return Statistic(leaf.value.clone())
    return leaf.clone() if isinstance(leaf, Tensor) else leaf

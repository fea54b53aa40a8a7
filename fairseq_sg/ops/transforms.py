"""Whether code runs within a transform of ``torch.func``, such as ``grad``, ``vmap`` or ``jvp``.

Transforms go through torch's own operations. They cannot go through an operator whose derivative is written out, nor
into memory that the operator has taken itself. So the equations run there instead.
"""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._are_functorch_transforms_active()


def plain() -> bool:
    """Whether only torch's own operations may run: within a transform, and in code that `torch.compile` compiles."""
    return torch.compiler.is_compiling() or transformed()

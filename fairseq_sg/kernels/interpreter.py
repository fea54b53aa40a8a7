"""Triton's interpreter, which runs kernels on a CPU (``TRITON_INTERPRET=1``), with what tensor cores compute.

Up to Triton 3.6 it does not run loops over a length with numpy 2.4 or newer, multiplies bfloat16 as integers, and takes
every product in float32, whatever precision the kernel asks for. Importing this module changes that for the process.
"""

from __future__ import annotations

import numpy as np
import triton.language
import triton.runtime.interpreter as interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_for_new_numpy(tensor, *scope) -> None:
    """The interpreter turns arrays of one element into numbers, as for ``range(n)``, which numpy 2.4 refuses."""
    patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


product = interpreter.InterpreterBuilder.create_dot


def create_dot(self, a, b, c, input_precision, most_imprecise):
    """The product of the bits that tensor cores take."""
    asked = str(input_precision).lower()
    # It is asked for float32 alone: others are multiplied as they are.
    if "ieee" in asked or a.dtype.scalar != triton.language.float32:
        a, b = (in_float32(x) for x in (a, b))
        return product(self, a, b, c, input_precision, most_imprecise)
    assert "tf32" in asked, asked
    (a_high, a_low), (b_high, b_low) = (split(x.data) for x in (a, b))
    total = a_high @ b_high
    if "x3" in asked:
        total += a_low @ b_high + a_high @ b_low
    return interpreter.TensorHandle(total + c.data, c.dtype.scalar)


def in_float32(x):
    """Exactly; the interpreter keeps bfloat16 as integers, and would multiply those."""
    if x.dtype.scalar != triton.language.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x in TF32, and the rest in TF32; both are cut off, 13 of 23 bits."""
    high = tf32(x)
    return high, tf32(x - high)


def tf32(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


interpreter._patch_lang_tensor = patch_tensor_for_new_numpy
interpreter.InterpreterBuilder.create_dot = create_dot

"""Projections on CPUs where torch's matrix products leave speed unused.

    y = x Wᵀ + b

torch multiplies float32 matrices by MKL, which does not use AVX-512 on CPUs of AMD. oneDNN, which torch has too, does,
in 0.5 to 0.9 of the time. Results differ by rounding. Everything else is ``torch.nn.functional.linear``: other CPUs and
devices, other dtypes, autocast, small products, compiled code, and transforms of ``torch.func``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.transforms import plain

#: Rows of x from which oneDNN is used: it takes some 20 µs to begin.
ROWS = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, K), weight (N, K), bias (N) -> (…, N); ``torch.nn.functional.linear``."""
    if not _is_onednns(x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)  # (M, K)
    more = round_number(len(rows)) - len(rows)
    if not more:
        return _Product.apply(rows, weight, bias).unflatten(0, x.shape[:-1])
    return _Product.apply(F.pad(rows, (0, 0, 0, more)), weight, bias)[:-more].unflatten(0, x.shape[:-1])


def round_number(rows: int) -> int:
    """The next number with at most four binary digits before zeros.

    oneDNN compiles a product for each number of rows, and keeps a thousand of them. Packed batches all differ.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _is_onednns(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        not plain()
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.shape[:-1].numel() >= ROWS
        and all(tensor is None or tensor.dtype == torch.float32 for tensor in (x, weight, bias))
        and not torch.is_autocast_enabled("cpu")
        and onednn_is_faster()
    )


@functools.cache
def onednn_is_faster(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether torch has MKL and oneDNN, and the CPU is AMD's with AVX-512."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and Path(cpuinfo).is_file()
        and "AuthenticAMD" in Path(cpuinfo).read_text(errors="replace")
    )


class _Product(torch.autograd.Function):
    """x (M, K), w (N, K), b (N) or None -> x wᵀ + b. Both derivatives are such products, ∂x = ∂y w and ∂w = ∂yᵀ x."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        x, w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad
        grad = grad.contiguous()  # that of a sum is one number, seen from everywhere
        return (
            _Product.apply(grad, w.t(), None) if of_x else None,
            _Product.apply(grad.t(), x.t(), None) if of_w else None,
            grad.sum(0) if of_b else None,
        )


class Linear(nn.Linear):
    """``linear`` as a module; a drop-in for ``torch.nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

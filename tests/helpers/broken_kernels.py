"""Kernels that are wrong in one way each, as tasks of processes (``fairseq_sg.kernels.verify.verdict_of``)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fairseq_sg.kernels import verify
from fairseq_sg.ops.operators import OPERATORS
from fairseq_sg.ops.orthogonality.naive import orthogonality_loss_naive as loss_of

OPERATOR = "orthogonality_loss"


def right(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    loss = loss_of(values, padding_mask, eps)
    return torch.empty_like(loss).copy_(loss)


def slightly_off(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    return 1.001 * loss_of(values, padding_mask, eps)


def wrong_gradient(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    loss = loss_of(values, padding_mask, eps)
    return loss.detach() + 0.99 * (loss - loss.detach())


def off_without_gradients(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    return right(values, padding_mask, eps) * (1.0 if torch.is_grad_enabled() else 1.001)


def nan(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    return loss_of(values, padding_mask, eps) * torch.empty(())  # never written


def another_shape(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    return loss_of(values, padding_mask, eps).unsqueeze(0)


def writes_behind(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    out = right(values, padding_mask, eps)
    with torch.no_grad():
        out.detach().as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(7.0)
    return out


def writes_before(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    out = right(values, padding_mask, eps)
    with torch.no_grad():
        out.detach().as_strided((1,), (1,), out.storage_offset() - 3).fill_(7.0)
    return out


def writes_into_its_inputs(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    loss = loss_of(values.clone(), padding_mask, eps)
    with torch.no_grad():
        values.detach().mul_(1 + 1e-6 * (values.dtype == torch.float32))
    return loss


def not_the_same_again(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    return loss_of(values, padding_mask, eps) * (1 + 1e-6 * float(torch.rand(())))


def raises(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    raise RuntimeError("an illegal memory access\nand more")


def crashes(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    if values.shape[2] > 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return loss_of(values, padding_mask, eps)


def exits(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """As if all were well."""
    if values.shape[2] > 1:
        os._exit(0)
    return loss_of(values, padding_mask, eps)


def hangs(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    if values.shape[2] > 1:
        time.sleep(1000)
    return loss_of(values, padding_mask, eps)


def check(kernel: Callable[..., Tensor], operator: str, implementation: str, *more) -> Iterator[verify.Result]:
    """`verify.check` with this kernel as the implementation."""
    OPERATORS[operator].implementations[implementation] = kernel
    return verify.check(operator, implementation, *more)

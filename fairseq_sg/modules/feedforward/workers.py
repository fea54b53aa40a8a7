"""Sums over the workers of data-parallel training, for losses on a whole batch.

A loss L(Σ_w s_w) on sums s_w over the tokens of each worker w is the same number on all of them. The criteria give
worker w the loss n_w · (… + L), and fairseq's trainer divides the summed gradients by Σ_w n_w, n_w being the sample
size. The backward pass of `sum_over_workers` adds up what reaches it on all workers, Σ_w n_w L′, so that each worker's
own tokens pass on (Σ_w n_w) L′ ∂s_w, and the division leaves Σ_w L′ ∂s_w = ∂L: what one worker with all tokens would
have, however unequal the n_w are. No factor is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

_left_out = False


@contextlib.contextmanager
def no_contribution(left_out: bool) -> Iterator[None]:
    """For fairseq's dummy batches at the end of an epoch: within it, this worker takes part in ``sum_over_workers`` and
    its backward pass, and contributes zeros to both."""
    global _left_out
    before, _left_out = _left_out, left_out
    try:
        yield
    finally:
        _left_out = before


def sum_over_workers(x: Tensor) -> Tensor:
    """The sum of x over all processes of ``torch.distributed``'s default group, the same on each; x itself if alone.

    All workers must call it, and take its backward pass, as often and in the same order.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _SumOverWorkers.apply(x)
    return x


class _SumOverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.left_out = _left_out
        total = torch.zeros_like(x) if ctx.left_out else x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        total = torch.zeros_like(grad) if ctx.left_out else grad.clone()
        dist.all_reduce(total)
        return torch.zeros_like(grad) if ctx.left_out else total

"""Binary masks on weights, sampled with a straight-through gradient (Csordás et al. 2021, section 2).

"Are Neural Nets Modular? Inspecting Functional Modularity Through Differentiable Weight Masks", and chapter 3 of
Csordás' thesis (2023). Every weight w has a logit l. One sample of its mask is

    s = σ((l − log(log U₁ / log U₂)) / τ)      U₁, U₂ uniform on (0, 1)
    b = [1(s > ½) − s]_stop + s,   w' = w · b

The noise −log(log U₁ / log U₂) is a standard logistic variable. One uniform variable gives the same distribution,
log U − log(1 − U), with half of the random numbers. P(b = 1) = σ(l) for every temperature τ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import check_floating, describe, refuse_second_derivative
from fairseq_sg.ops.transforms import transformed

#: The distance of U from 0 and from 1: a unit in the last place of float32 below 1.
MARGIN = 2.0**-24


def logistic_noise(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """log U − log(1 − U) with U uniform on [2⁻²⁴, 1 − 2⁻²⁴]: finite, and between −16.7 and 16.7.

    Args:
        shape: of the result.
        generator: of the random numbers, on ``device``; by default torch's own.
        dtype: float32 or float64.

    Raises:
        TypeError: another dtype. Half precision has too few numbers near 1.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logistic_noise is float32 or float64, not {dtype}")
    uniform = torch.rand(tuple(shape), generator=generator, dtype=dtype, device=device)
    return uniform.logit_(eps=MARGIN)


def masked_weight(weight: Tensor, logits: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
    """w · b for one sample of the mask; the gradient of l is g · w · s(1 − s) / τ, with g that of the result.

    ``weight`` is frozen: it has no gradient. The forward pass is exact, ``w`` or 0. (The equation's sum of 1 − s and s
    rounds.) Without noise, b = 1(l > 0) is the final mask.

    Args:
        weight, logits, noise: any shape, the same; floating.
        temperature: τ.

    Raises:
        TypeError: a tensor is not floating.
        ValueError: shapes differ, or τ is not above 0.
        RuntimeError: from a backward pass with ``create_graph=True``.
    """
    check_floating(weight=weight, logits=logits, noise=noise)
    if not weight.shape == logits.shape == noise.shape:
        shapes = describe(weight=weight, logits=logits, noise=noise)
        raise ValueError(f"masked_weight takes tensors of one shape, not {shapes}")
    if not temperature > 0:
        raise ValueError(f"the temperature is {temperature}: it must be above 0")
    if not transformed():
        return _MaskedWeight.apply(weight.detach(), logits, noise, temperature)
    weight, shifted = weight.detach(), logits + noise
    soft = (shifted / temperature).sigmoid()
    return weight.masked_fill(shifted <= 0, 0.0) + (weight * (soft - soft.detach())).to(weight.dtype)


class _MaskedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
        shifted = logits + noise
        ctx.temperature = temperature
        ctx.save_for_backward(weight, shifted.div(temperature).sigmoid_())
        # σ(x) > ½ where x > 0; σ rounds to ½ for small x.
        return weight.masked_fill(shifted <= 0, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, None, None]:
        refuse_second_derivative("masked_weight", naive_has_one=False)
        weight, soft = ctx.saved_tensors
        slope = soft.addcmul(soft, soft, value=-1.0)  # s(1 − s)
        return None, slope.mul_(weight).mul_(grad).div_(ctx.temperature), None, None

"""Products of low frequencies: the linear map of a Fourier neural operator (Li et al. 2021, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.checks import check_floating, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled
from fairseq_sg.ops.spectral.fft import multiply_fft
from fairseq_sg.ops.spectral.naive import multiply_naive

declare("spectral_multiply", {"naive": multiply_naive, "fft": multiply_fft}, default="fft", transformed="fft")


def spectral_multiply(x: Tensor, weight: Tensor, *, implementation: str = AUTO) -> Tensor:
    """F⁻¹(R · F x): each of the lowest frequencies of x is multiplied by a matrix, and the others are dropped.

        ŷ_ok = Σ_i x̂_ik R_iok   for k < K,   0 for other k

    Both transforms are orthonormal, so that the map of functions does not depend on the number of points. K counts the
    mean, k = 0. In two dimensions the frequencies are 0 … K − 1 along columns, 0 … K − 1 and −K … −1 along rows, each
    half with matrices of its own.

    It is computed in float32 (float64 for float64 inputs), also under ``torch.autocast``: in half precision, transforms
    want powers of two.

    Args:
        x: (B, I, n), or (B, I, n, m), any floating dtype.
        weight: R as real and imaginary parts, (I, O, K, 2), or (2, I, O, K, K, 2).
        implementation: ``"auto"``, ``"naive"`` or ``"fft"``, which ``"auto"`` takes.

    Returns:
        (B, O, n), or (B, O, n, m), in the dtype of x.

    Raises:
        TypeError: an argument is not floating.
        ValueError: shapes do not fit, the grid has fewer frequencies than K, or there is no such implementation.
    """
    check_floating(x=x, weight=weight)
    dims = x.dim() - 2
    shape, inputs = tuple(weight.shape), x.shape[1:2]
    needed = {1: (*inputs, *shape[1:3], 2), 2: (2, *inputs, *shape[2:4], *shape[3:4], 2)}
    if shape != needed.get(dims):
        raise ValueError(
            "spectral_multiply takes x (B, I, n) and weight (I, O, K, 2), or x (B, I, n, m) and weight "
            f"(2, I, O, K, K, 2), not {describe(x=x, weight=weight)}"
        )
    modes = weight.size(-2)
    if modes > most_modes(tuple(x.shape[2:])):
        raise ValueError(
            f"a grid of {' × '.join(map(str, x.shape[2:]))} points has {most_modes(tuple(x.shape[2:]))} frequencies, "
            f"and the weight {modes}"
        )
    function = choose("spectral_multiply", implementation, x)
    dtype = accumulation_dtype(x)
    with autocast_disabled(x.device):
        # A view as complex numbers would want an even storage offset, which a part of a larger tensor may not have.
        matrices = torch.complex(*weight.to(dtype).unbind(-1))
        return function(x.to(dtype), matrices).type_as(x)


def most_modes(points: tuple[int, ...]) -> int:
    """The largest K of a grid: n/2 + 1 in one dimension; in two, rows have K positive and K negative frequencies."""
    last = points[-1] // 2 + 1
    return last if len(points) == 1 else min(last, points[0] // 2)

"""The product of low frequencies as explicit sums over points and frequencies (Li et al. 2021, section 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def multiply_naive(x: Tensor, weight: Tensor) -> Tensor:
    """See `fairseq_sg.ops.spectral_multiply`; the weight is complex, (I, O, K) or (2, I, O, K, K)."""
    return _one_dimension(x, weight) if x.dim() == 3 else _two_dimensions(x, weight)


def wave(points: int, k: Tensor, dtype: torch.dtype) -> Tensor:
    """e^{−2πi jk/n} / √n, (n, K)."""
    # Modulo n in whole numbers: a large angle in float32 would lose digits.
    angle = -2 * math.pi / points * (torch.outer(torch.arange(points, device=k.device), k) % points).to(dtype)
    return torch.polar(torch.full_like(angle, points**-0.5), angle)


def real_part(spectrum: Tensor, points: int, dtype: torch.dtype) -> Tensor:
    """The real function of the frequencies 0 … K − 1 in the last dimension, (…, K) -> (…, n).

    Every frequency stands for its negative too, but for 0 and, of an even grid, n/2.
    """
    modes = spectrum.size(-1)
    k = torch.arange(modes, device=spectrum.device)
    weight = torch.where((k == 0) | (2 * k == points), 1.0, 2.0).to(dtype)
    return ((spectrum * weight) @ wave(points, k, dtype).conj().T).real


def _one_dimension(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, I, n), weight (I, O, K) complex -> (B, O, n)."""
    points, k = x.size(-1), torch.arange(weight.size(-1), device=x.device)
    spectrum = x.to(weight.dtype) @ wave(points, k, x.dtype)  # (B, I, K)
    return real_part(torch.einsum("bik,iok->bok", spectrum, weight), points, x.dtype)


def _two_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, I, n, m), weight (2, I, O, K, K) complex -> (B, O, n, m)."""
    (n, m), modes = x.shape[-2:], weight.size(-1)
    columns = wave(m, torch.arange(modes, device=x.device), x.dtype)  # (m, K)
    y = 0.0
    for block, first in zip(weight, (0, -modes), strict=True):
        rows = wave(n, first + torch.arange(modes, device=x.device), x.dtype)  # (n, K)
        spectrum = torch.einsum("bijl,jp,lq->bipq", x.to(weight.dtype), rows, columns)
        product = torch.einsum("bipq,iopq->bopq", spectrum, block)
        y = y + real_part(torch.einsum("bopq,jp->bojq", product, rows.conj()), m, x.dtype)
    return y

"""The product of low frequencies by fast Fourier transforms.

A real function of n points has no imaginary part at frequency 0 nor, of an even grid, at n/2. The product may have one.
On a CPU, an inverse transform to real numbers leaves it out. cuFFT promises that for no input and, in two dimensions,
wants the symmetry of the first column too. So imaginary parts are set to 0 here, and in two dimensions the inverse is
complex along the rows and real along the columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_fft(x: Tensor, weight: Tensor) -> Tensor:
    """See `fairseq_sg.ops.spectral_multiply`; the weight is complex, (I, O, K) or (2, I, O, K, K)."""
    if len(x) == 0:  # which transforms refuse
        return x.sum() + x.new_zeros(0, weight.size(1 - x.dim()), *x.shape[2:])
    return _one_dimension(x, weight) if x.dim() == 3 else _two_dimensions(x, weight)


def _one_dimension(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, I, n), weight (I, O, K) complex -> (B, O, n)."""
    points, modes = x.size(-1), weight.size(-1)
    spectrum = torch.fft.rfft(x, norm="ortho")[..., :modes]  # (B, I, K)
    # One product of matrices a frequency.
    product = (spectrum.permute(2, 0, 1) @ weight.permute(2, 0, 1)).permute(1, 2, 0)  # (B, O, K)
    return _real(product, points)


def _two_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, I, n, m), weight (2, I, O, K, K) complex -> (B, O, n, m)."""
    (n, m), modes = x.shape[-2:], weight.size(-1)
    spectrum = torch.fft.rfft2(x, norm="ortho")[..., :modes]  # (B, I, n, K)
    low, high = spectrum[..., :modes, :], spectrum[..., -modes:, :]  # (B, I, K, K)
    blocks = torch.stack([low, high]).permute(0, 3, 4, 1, 2) @ weight.permute(0, 3, 4, 1, 2)  # (2, K, K, B, O)
    low, high = blocks.permute(0, 3, 4, 1, 2)  # (B, O, K, K)
    between = low.new_zeros(*low.shape[:2], n - 2 * modes, modes)
    product = torch.cat([low, between, high], dim=-2)  # (B, O, n, K)
    return _real(torch.fft.ifft(product, dim=-2, norm="ortho"), m)


def _real(spectrum: Tensor, points: int) -> Tensor:
    """The real function of the frequencies 0 … K − 1 in the last dimension, (…, K) complex -> (…, n)."""
    k = torch.arange(spectrum.size(-1), device=spectrum.device)
    own = (k == 0) | (2 * k == points)  # their own negatives
    symmetric = torch.complex(spectrum.real, spectrum.imag.masked_fill(own, 0))
    return torch.fft.irfft(symmetric, points, norm="ortho")  # frequencies that are not given are 0

"""The layer of a Fourier neural operator (Li et al. 2021, eq. 2 and 5): SiLU(F⁻¹(R · F x) + W x + b).

Li et al. have ReLU; SiLU, and the start of R, are those of Cao 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.ops import spectral_multiply
from fairseq_sg.ops.spectral import most_modes


class SpectralLayer(nn.Module):
    """(B, I, n) -> (B, O, n), or (B, I, n, m) -> (B, O, n, m), for any number of points.

    R is stored as real and imaginary parts: optimizers, half precision and weights-only checkpoints know no complex
    numbers. It starts Glorot normal, over the tensor (I, O, modes, 2), with the gain 1/(I·O), in two dimensions
    √(I + O)/(I·O).

    Args:
        inputs: I. outputs: O.
        modes: K, the frequencies that are kept, with the mean.
        dims: 1 or 2.
    """

    def __init__(self, inputs: int, outputs: int, modes: int, dims: int):
        super().__init__()
        block = inputs, outputs, *[modes] * dims, 2
        self.modes = modes
        self.weight = nn.Parameter(torch.empty(block if dims == 1 else (2, *block)))
        self.local = (nn.Conv1d if dims == 1 else nn.Conv2d)(inputs, outputs, 1)
        gain = (1.0 if dims == 1 else (inputs + outputs) ** 0.5) / (inputs * outputs)
        for part in [self.weight] if dims == 1 else self.weight:
            nn.init.xavier_normal_(part, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        """Raises UsageError for a grid with fewer frequencies than K."""
        most = most_modes(tuple(x.shape[2:]))
        if self.modes > most:
            raise UsageError(
                f"--modes {self.modes} is more than a grid of {' × '.join(map(str, x.shape[2:]))} points has: choose "
                f"{most} or fewer, or a finer grid"
            )
        return F.silu(spectral_multiply(x, self.weight) + self.local(x))

    def extra_repr(self) -> str:
        return f"modes={self.modes}"

"""Patch embedding of an image and a question (Mittal et al. 2022, Sort-of-CLEVR, in the form of the released code).

    patches       the image without overlaps in 15 × 15 pixels, columns first: patch x · 5 + y of 25
    e_p           W_1 patch_p + b_1 + P_p,   d/2 features, the first convolution of stride 15
    e_CLS         learned, starts N(0, 1), without position
    q             W_2 question + b_2,   d/2 features
    h⁰_n          W_3 [e_n; q] + b_3,   d features, for CLS and every patch

Position p of 25 has, at feature i, which is even, and at the next one,

    P_p,i = ν sin(p / 10000^(2i/(d/2))),   P_p,i+1 = ν cos(p / 10000^(2(i+1)/(d/2))),   ν = 1/(1 + e⁻¹)

The exponents grow to 2, where those of Vaswani et al. 2017 grow to 1. Weights and biases start as PyTorch's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.modules.cpu.dropout import Dropout

PATCH = 15
#: ν.
POSITION_SCALE = 1 / (1 + math.exp(-1))
BACKGROUNDS = ("white", "black")


def patch_positions(patches: int, dim: int) -> Tensor:
    """P, float32 (patches, dim) for an even ``dim``; computed in float64."""
    numbers = torch.arange(patches, dtype=torch.float64)[:, None]
    i = torch.arange(0, dim, 2, dtype=torch.float64)
    p = torch.stack([(numbers / 10000 ** (2 * i / dim)).sin(), (numbers / 10000 ** (2 * (i + 1) / dim)).cos()], dim=-1)
    return (POSITION_SCALE * p.flatten(1)).float()


class PatchEmbedding(nn.Module):
    """See the module's docstring.

    Args:
        dim: d, the model's width.
        image_shape: height, width and channels of an image.
        question_bits: width of a question.
        pixels: ``white``, the image as it is, from 0 to 1; ``black``, 1 − image, whose background is 0.
        dropout: dropout on h⁰; the released code has none.

    Raises:
        UsageError: a width that is no multiple of 4, unknown ``pixels``, or an image that patches do not cover.
    """

    def __init__(
        self,
        dim: int,
        *,
        image_shape: tuple[int, int, int],
        question_bits: int,
        pixels: str = "white",
        dropout: float = 0.0,
    ):
        super().__init__()
        height, width, channels = image_shape
        if dim % 4:
            raise UsageError(f"--encoder-embed-dim is {dim}: patches and questions need a multiple of 4")
        ranges.check_value("pixels", pixels, {"choices": BACKGROUNDS})
        if height % PATCH or width % PATCH:
            raise UsageError(f"images of {height} × {width} pixels cannot be cut into patches of {PATCH} × {PATCH}")
        self.pixels = pixels
        #: Patches in a column and in a row of the image.
        self.grid = height // PATCH, width // PATCH
        half, patches = dim // 2, self.grid[0] * self.grid[1]
        self.patches = nn.Linear(channels * PATCH * PATCH, half)
        self.cls = nn.Parameter(torch.randn(half))
        self.question = nn.Linear(question_bits, half)
        self.joint = nn.Linear(dim, dim)
        self.register_buffer("positions", patch_positions(patches, half), persistent=False)
        self.dropout = Dropout(dropout)

    @property
    def names(self) -> list[str]:
        """Of the positions of h⁰: CLS, then row and column of each patch, from 1 on."""
        rows, columns = self.grid
        return ["CLS", *(f"{row},{column}" for column in range(1, columns + 1) for row in range(1, rows + 1))]

    def forward(self, images: Tensor, questions: Tensor) -> Tensor:
        """images uint8 (B, H, W, C), questions (B, Q) -> h⁰ (B, 1 + patches, d), CLS first."""
        x = self.patches(self.cut(images)) + self.positions.type_as(self.cls)  # (B, P, d/2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x.type_as(self.cls)], dim=1)  # (B, 1 + P, d/2)
        q = self.question(questions.type_as(self.cls)).type_as(self.cls)  # (B, d/2)
        return self.dropout(self.joint(torch.cat([x, q[:, None].expand_as(x)], dim=-1)).type_as(self.cls))

    def cut(self, images: Tensor) -> Tensor:
        """images uint8 (B, H, W, C) -> the patches (B, P, C · 15 · 15), from 0 to 1.

        A patch has its channels first, then its columns, as the weights of a convolution over (C, columns, rows).
        """
        rows, columns = self.grid
        x = images.view(-1, rows, PATCH, columns, PATCH, images.size(-1))
        x = x.permute(0, 3, 1, 5, 4, 2).flatten(3).flatten(1, 2)  # (B, columns · rows, C · 15 · 15)
        x = x.type_as(self.cls) / 255
        return 1 - x if self.pixels == "black" else x

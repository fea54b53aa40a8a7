"""The patch embedding against a convolution and the position formula; wrong sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.patches import PatchEmbedding, patch_positions
from helpers.scenes import random_batch

SIZES = {"image_shape": (75, 75, 3), "question_bits": 18}


def reference_positions(patches: int, dim: int) -> torch.Tensor:
    found = torch.zeros(patches, dim)
    scale = 1 / (1 + math.exp(-1))
    for p in range(patches):
        for i in range(0, dim, 2):
            found[p, i] = scale * math.sin(p / 10000 ** (2 * i / dim))
            found[p, i + 1] = scale * math.cos(p / 10000 ** (2 * (i + 1) / dim))
    return found


@pytest.mark.parametrize("dim", [2, 8, 128])
def test_positions(dim):
    torch.testing.assert_close(patch_positions(25, dim), reference_positions(25, dim), rtol=0, atol=1e-7)


@pytest.mark.parametrize("pixels", ["white", "black"])
@pytest.mark.parametrize("shape", [(75, 75, 3), (30, 45, 1)])
def test_patches_are_a_convolution(pixels, shape):
    """Of the image with its columns first, as the released code has it; values and gradients."""
    torch.manual_seed(2)
    embedding = PatchEmbedding(8, image_shape=shape, question_bits=18, pixels=pixels).double()
    images = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    questions = random_batch()[1]

    def reference() -> torch.Tensor:
        x = images.double() / 255
        x = (x if pixels == "white" else 1 - x).permute(0, 3, 2, 1)  # (B, C, columns, rows)
        kernel = embedding.patches.weight.view(4, shape[2], 15, 15)
        x = F.conv2d(x, kernel, embedding.patches.bias, stride=15).flatten(2).transpose(1, 2)  # (B, P, 4)
        x = x + reference_positions(x.size(1), 4)
        x = torch.cat([embedding.cls.expand(3, 1, 4), x], 1)
        q = embedding.question(questions.double())[:, None].expand_as(x)
        return embedding.joint(torch.cat([x, q], -1))

    expected, found = reference(), embedding(images, questions)
    assert found.shape == (3, 1 + shape[0] * shape[1] // 225, 8)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * weights).sum(), list(embedding.parameters())) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert embedding.float()(images, questions).dtype == torch.float32


def test_starts():
    """Those of a convolution and of PyTorch's linear layers; CLS is N(0, 1)."""
    torch.manual_seed(1)
    embedding = PatchEmbedding(2_000, **SIZES)
    for name, fan_in in (("patches", 675), ("question", 18), ("joint", 2_000)):
        layer = getattr(embedding, name)
        for parameter in (layer.weight, layer.bias):
            assert parameter.abs().max().item() == pytest.approx(fan_in**-0.5, rel=0.02)
    assert embedding.cls.std().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"dim": 10}, "--encoder-embed-dim is 10: patches and questions need a multiple of 4"),
        ({"pixels": "grey"}, "--pixels is 'grey': choose from white, black"),
        ({"image_shape": (75, 70, 3)}, "images of 75 × 70 pixels cannot be cut into patches of 15 × 15"),
    ],
)
def test_wrong_sizes(arguments, message):
    with pytest.raises(UsageError, match=message):
        PatchEmbedding(**{"dim": 8} | SIZES | arguments)

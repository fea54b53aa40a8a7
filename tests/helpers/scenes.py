"""Small folders of Sort-of-CLEVR, and classifiers for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main
from data_prep.sort_of_clevr.questions import ANSWERS, BITS
from data_prep.sort_of_clevr.scenes import PIXELS
from fairseq_sg.models.sg_encoder import SGEncoder

ARCH = "sg_encoder_sort_of_clevr"
SIZES = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": 2, "encoder_layers": 3}
TASK = SimpleNamespace(
    inputs="image_question", image_shape=(PIXELS, PIXELS, 3), question_bits=BITS, num_classes=len(ANSWERS)
)


def write_scenes(folder: Path, *options: object, scenes: int = 6, test_scenes: int = 4) -> Path:
    sizes = ["--scenes", scenes, "--test-scenes", test_scenes]
    assert main(["sort_of_clevr", *map(str, [*sizes, *options, "--out", folder])]) == 0
    return folder


def build(seed: int = 1, **options) -> SGEncoder:
    """The architecture in small unless ``options`` say otherwise, in evaluation mode."""
    torch.manual_seed(seed)
    cfg = SimpleNamespace(**options)
    ARCH_CONFIG_REGISTRY[ARCH](cfg)
    return SGEncoder.build_model(cfg, TASK).eval()


def small(**options) -> SGEncoder:
    return build(**SIZES | options)


def random_batch(size: int = 3, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """images uint8 (B, 75, 75, 3), questions uint8 (B, 18)."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, PIXELS, PIXELS, 3), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 2, (size, BITS), generator=generator, dtype=torch.uint8)

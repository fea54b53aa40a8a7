"""Small folders of functions on grids, and operator models for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main
from fairseq_sg.models.sg_operator import SGOperator

SIZES = {"encoder_embed_dim": 12, "encoder_layers": 2, "readout_dim": 5}
#: Sizes of layers, which a model without layers does not take.
LAYERS = {"encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2, "norm": "none"}
SPECTRAL_LAYERS = {"spectral_dim": 6, "modes": 4}
STATISTICS = {"input": {"mean": 1.0, "std": 2.0}, "target": {"mean": -1.0, "std": 0.5}}


def write_waves(folder: Path, *options: object) -> Path:
    """Burgers' waves on 32 points, and tests on 64 and 128."""
    sizes = "--points 128 --grid 32 --test-grids 64,128 --train 40 --valid 11 --test 9".split()
    assert main(["burgers", *sizes, *map(str, options), "--out", str(folder)]) == 0
    return folder


def task_of(dims: int = 1, gradient: bool = True) -> SimpleNamespace:
    """A task of waves, or in two dimensions of fields with an edge."""
    fields = SimpleNamespace(dims=dims, periodic=dims == 1, statistics=STATISTICS, gradient=gradient)
    return SimpleNamespace(fields=fields)


def build(dims: int = 1, **options) -> SGOperator:
    """A small model in float64. Its spectral weights are as large as others, not as small as at the start."""
    torch.manual_seed(1)
    sizes = SIZES | ({} if options.get("encoder_layers") == 0 else LAYERS)
    sizes |= {} if options.get("spectral_layers") == 0 else SPECTRAL_LAYERS
    model = SGOperator.build_model(SimpleNamespace(**(sizes | options)), task_of(dims)).double()
    for layer in model.decoder.layers:
        torch.nn.init.normal_(layer.weight, std=0.3)
    return model


def periodic_axis(points: int) -> Tensor:
    return torch.arange(points, dtype=torch.float64) / points


def node_axis(points: int) -> Tensor:
    return torch.linspace(0, 1, points, dtype=torch.float64)

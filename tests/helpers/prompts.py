"""Small folders of prompts, and regressors for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main
from data_prep.in_context.functions import Linear
from data_prep.in_context.prompts import Prompts
from fairseq_sg.models.sg_regressor import SGRegressor

SIZES = {
    "decoder_embed_dim": 12, "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2, "decoder_layers": 2,
}  # fmt: skip


def write_prompts(folder: Path, *options: object) -> Path:
    """Prompts of 5 examples in 3 dimensions."""
    sizes = ["--dims", 3, "--examples", 5, "--x-std", 2, "--size", 21, "--shifts", "x_double,query_orthogonal"]
    assert main(["in_context", *map(str, [*sizes, *options, "--out", folder])]) == 0
    return folder


def task_of(dims: int, examples: int = 5) -> SimpleNamespace:
    return SimpleNamespace(prompts=Prompts(Linear(dims), examples, 1.0), unit=float(dims))


def build(dims: int = 3, **options) -> SGRegressor:
    """A small model in float64, without dropout."""
    torch.manual_seed(1)
    values = SIZES | {"dropout": 0.0} | options
    return SGRegressor.build_model(SimpleNamespace(**values), task_of(dims)).double()

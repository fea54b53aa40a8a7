"""``--amp``: gradients are divided by the loss scale once (fairseq 0.12 by itself does it twice)."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.amp_optimizer import AMPOptimizer
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401

CONFIGS = {
    "adam": {
        "fp16_adam_stats": False,
        "adam_betas": "(0.9, 0.999)",
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "lr": [0.1],
    },
    "torch_adam": {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "lr": [0.1]},
}


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gradient", [0.25, float("inf")], ids=["finite", "overflow"])
def test_gradients_are_unscaled_once_and_overflow_skips(name, gradient):
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = OPTIMIZER_REGISTRY[name](OmegaConf.create(CONFIGS[name]), [parameter])
    config = OmegaConf.create({"optimizer": CONFIGS[name], "common": {"fp16_init_scale": 128, "min_loss_scale": 1e-4}})
    optimizer = AMPOptimizer(config, [parameter], inner)
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)  # the one of the class needs a GPU
    optimizer.backward((parameter * gradient).sum())
    norm = optimizer.clip_grad_norm(0.0)
    optimizer.step()
    if gradient == 0.25:
        torch.testing.assert_close(parameter.grad, torch.full((3,), 0.25))
        torch.testing.assert_close(norm, torch.tensor(0.25 * 3**0.5))
        torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))
        assert optimizer.scaler.get_scale() == 128.0
    else:
        assert torch.equal(parameter.detach(), torch.ones(3)) and optimizer.scaler.get_scale() == 64.0

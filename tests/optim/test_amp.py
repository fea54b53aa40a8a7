"""``--amp``: gradients are divided by the loss scale once (fairseq 0.12 does it twice), and checkpoints have the scale
(fairseq's do not).
"""

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


def made(name: str, parameter: torch.nn.Parameter) -> AMPOptimizer:
    inner = OPTIMIZER_REGISTRY[name](OmegaConf.create(CONFIGS[name]), [parameter])
    config = OmegaConf.create({"optimizer": CONFIGS[name], "common": {"fp16_init_scale": 128, "min_loss_scale": 1e-4}})
    optimizer = AMPOptimizer(config, [parameter], inner)
    # The one of the class needs a GPU.
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    return optimizer


def step(optimizer: AMPOptimizer, gradient: float) -> torch.Tensor:
    """An update with a gradient of each number; the norm of all."""
    optimizer.zero_grad()
    (parameter,) = optimizer.params
    optimizer.backward((parameter * gradient).sum())
    norm = optimizer.clip_grad_norm(0.0)
    optimizer.step()
    return norm


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gradient", [0.25, float("inf")], ids=["finite", "overflow"])
def test_gradients_are_unscaled_once_and_overflow_skips(name, gradient):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = made(name, parameter)
    norm = step(optimizer, gradient)
    if gradient == 0.25:
        torch.testing.assert_close(parameter.grad, torch.full((3,), 0.25))
        torch.testing.assert_close(norm, torch.tensor(0.25 * 3**0.5))
        torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))
        assert optimizer.scaler.get_scale() == 128.0
    else:
        assert torch.equal(parameter.detach(), torch.ones(3)) and optimizer.scaler.get_scale() == 64.0


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_has_the_loss_scale(name, tmp_path):
    """Otherwise a resumed training begins at --fp16-init-scale again, and skips or rounds other updates."""
    straight, resumed = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = made(name, straight)
    for gradient in (0.25, float("inf"), 0.5):
        step(optimizer, gradient)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    with torch.no_grad():
        resumed.copy_(straight)
    after = made(name, resumed)
    after.load_state_dict(state, {"weight_decay": 0.1})
    assert after.scaler.get_scale() == 64.0 and after.param_groups[0]["weight_decay"] == 0.1
    optimizer.param_groups[0]["weight_decay"] = 0.1
    for gradient in (0.125, 0.25):
        step(optimizer, gradient), step(after, gradient)
        assert torch.equal(straight, resumed) and after.scaler.state_dict() == optimizer.scaler.state_dict()
    assert after.scaler.get_scale() == 128.0  # its count of finite updates went on
    # fairseq without this plugin hands the state to torch's optimizer.
    made(name, resumed).optimizer.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("scaler", [None, {}], ids=["of fairseq alone", "of a scaler that is off"])
def test_a_checkpoint_without_a_loss_scale_is_loaded(scaler):
    optimizer = made("adam", torch.nn.Parameter(torch.ones(3)))
    step(optimizer, 0.25)
    state = optimizer.state_dict()
    if scaler is None:
        del state["scaler"]
    else:
        state["scaler"] = scaler
    after = made("adam", torch.nn.Parameter(torch.ones(3)))
    after.load_state_dict(state)
    assert after.scaler.get_scale() == 128.0 and after.state_dict()["state"][0]["step"] == 1

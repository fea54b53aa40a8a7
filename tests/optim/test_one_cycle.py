"""``--lr-scheduler one_cycle`` against torch's own schedule, update by update; β₁; refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.optim.one_cycle import OneCycle, OneCycleConfig
from fairseq_sg.optim.torch_adam import TorchAdam, TorchAdamConfig


def optimizer(params=None) -> TorchAdam:
    params = params or [torch.nn.Parameter(torch.zeros(3))]
    return TorchAdam(OmegaConf.structured(TorchAdamConfig(lr=[1e-3])), params)


def schedule(updates: int, of=None, **options) -> OneCycle:
    config = OneCycleConfig(lr=[1e-3], max_update=updates, **options)
    return OneCycle(OmegaConf.structured(config), of or optimizer())


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("updates", [1, 2, 3, 4, 11, 100, 257])
@pytest.mark.parametrize("rise", [0.3, 0.49, 0.77])
@pytest.mark.parametrize("divisors", [(1e4, 1e4), (25.0, 3.0)])
def test_equals_torchs_schedule(updates, rise, divisors):
    ours = schedule(updates, one_cycle_rise=rise, one_cycle_start=divisors[0], one_cycle_end=divisors[1])
    reference = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        reference, 1e-3, total_steps=updates, pct_start=rise, div_factor=divisors[0], final_div_factor=divisors[1]
    )
    for update in range(updates):
        (group,) = reference.param_groups
        assert ours.step_update(update) == pytest.approx(group["lr"], rel=1e-12)
        assert ours.optimizer.get_lr() == pytest.approx(group["lr"], rel=1e-12)
        assert ours.optimizer.param_groups[0]["betas"] == pytest.approx(group["betas"], rel=1e-12)
        if update < updates - 1:
            torchs.step()


def test_the_first_update_has_the_first_rate():
    assert schedule(10).optimizer.get_lr() == pytest.approx(1e-7)


def test_a_rise_of_one_update_begins_at_the_peak():
    assert schedule(2, one_cycle_rise=0.5).optimizer.get_lr() == 1e-3


def test_after_the_last_update_nothing_changes():
    ours = schedule(10)
    assert ours.step_update(10) == ours.step_update(9) == pytest.approx(1e-11)


def test_beta1_can_stay():
    ours = schedule(10, one_cycle_constant_beta1=True)
    ours.step_update(3)
    assert ours.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def cfg(updates: int = 10, **options) -> SimpleNamespace:
    """The whole configuration of a training."""
    return SimpleNamespace(
        optimizer=SimpleNamespace(_name="adam", step_graphs=4),
        optimization=SimpleNamespace(max_update=updates, lr=[1e-3]),
        lr_scheduler=SimpleNamespace(**options),
    )


def test_a_missing_optimizer_is_not_its_error():
    """The command line names it."""
    OneCycle.check_options(SimpleNamespace(**vars(cfg(one_cycle_constant_beta1=False)) | {"optimizer": None}))


def test_the_number_of_updates_is_needed():
    with pytest.raises(UsageError, match="give --max-update"):
        OneCycle.check_options(cfg(0, one_cycle_constant_beta1=True))


def test_recorded_steps_have_one_beta1():
    with pytest.raises(UsageError, match="give --one-cycle-constant-beta1, or leave --step-graphs out"):
        OneCycle.check_options(cfg(one_cycle_constant_beta1=False))
    OneCycle.check_options(cfg(one_cycle_constant_beta1=True))


@pytest.mark.parametrize(
    "given", [dict(adam_beta1=0.5, adam_betas=None), dict(adam_beta1=0.9, adam_betas="(0.8, 0.98)")]
)
def test_a_beta1_of_the_user_has_no_effect_on_the_cycle(given):
    chosen = cfg(one_cycle_constant_beta1=False)
    chosen.optimizer = SimpleNamespace(_name="torch_adam", adam_beta2=0.999, **given)
    with pytest.raises(
        UsageError, match="so 0.[58] has no effect: give --one-cycle-constant-beta1, or leave out --adam"
    ):
        OneCycle.check_options(chosen)
    chosen.lr_scheduler.one_cycle_constant_beta1 = True
    OneCycle.check_options(chosen)
    chosen = cfg(one_cycle_constant_beta1=False)
    chosen.optimizer = SimpleNamespace(_name="torch_adam", adam_beta1=0.9, adam_beta2=0.98, adam_betas=None)
    OneCycle.check_options(chosen)


def test_an_optimizer_without_beta1():
    of = optimizer()
    of._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1e-3)
    with pytest.raises(UsageError, match="choose torch_adam, or give --one-cycle-constant-beta1"):
        schedule(10, of)
    schedule(10, of, one_cycle_constant_beta1=True)

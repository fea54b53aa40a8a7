"""``--optimizer torch_adam``: its update, clipping, checkpoints; fairseq's schedulers and ``--fp16`` with it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import optim, utils
from fairseq.optim.adam import FairseqAdam
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRSchedule, FixedLRScheduleConfig
from fairseq.optim.lr_scheduler.inverse_square_root_schedule import (
    InverseSquareRootLRScheduleConfig,
    InverseSquareRootSchedule,
)
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.errors import UsageError
from fairseq_sg.optim.torch_adam import TorchAdam, TorchAdamConfig

SHAPES = [(3, 4), (5,), (2, 3, 2), (1,)]
decays = pytest.mark.parametrize("weight_decay", [0.0, 0.1])


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def torch_adam(params, lr=0.01, **options) -> TorchAdam:
    return TorchAdam(OmegaConf.structured(TorchAdamConfig(lr=[lr], **options)), params)


def fairseq_adam(params, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0) -> FairseqAdam:
    config = dict(
        adam_betas=f"({beta1}, {beta2})", adam_eps=eps, weight_decay=weight_decay, lr=[lr], use_old_adam=True, tpu=False
    )
    return FairseqAdam(OmegaConf.create(config | {"fp16_adam_stats": False}), params)


def run(optimizer, params, steps, scale=1.0) -> None:
    for step in steps:
        for p, g in zip(params, gradients(step, scale)):
            p.grad = g.clone()
        optimizer.step()


@decays
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_equals_fairseq_s_adam(weight_decay, betas):
    beta1, beta2 = betas
    ours, theirs = parameters(), parameters()
    run(torch_adam(ours, adam_beta1=beta1, adam_beta2=beta2, weight_decay=weight_decay), ours, range(20))
    run(fairseq_adam(theirs, beta1=beta1, beta2=beta2, weight_decay=weight_decay), theirs, range(20))
    for a, b, start in zip(ours, theirs, parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert not torch.equal(a, start)
    assert (ours[0] - parameters()[0]).abs().max() > 0.02


@decays
def test_equals_algorithm_1_of_kingma_and_ba_also_where_gradients_are_as_small_as_epsilon(weight_decay):
    beta1, beta2, eps, lr = 0.9, 0.999, 1e-3, 0.01
    ours, theirs = parameters(), parameters()
    run(torch_adam(ours, lr, adam_eps=eps, weight_decay=weight_decay), ours, range(10), scale=1e-3)
    for i, start in enumerate(parameters()):
        x, m, v = start.detach().double(), 0.0, 0.0
        for t in range(1, 11):
            g = gradients(t - 1, 1e-3)[i].double()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            x = x - lr * weight_decay * x
            x = x - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        torch.testing.assert_close(ours[i].detach().double(), x, rtol=1e-5, atol=1e-6)
    run(fairseq_adam(theirs, lr, eps=eps, weight_decay=weight_decay), theirs, range(10), scale=1e-3)
    assert (theirs[0] - ours[0]).abs().max() > 1e-3  # the difference that the module's docstring tells of


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 5.0, 1e4])
def test_clip_grad_norm_equals_fairseq_s(max_norm):
    ours, theirs = parameters(), parameters()
    for p, q, g in zip(ours, theirs, gradients(0, 3.0)):
        p.grad, q.grad = g.clone(), g.clone()
    ours[1].grad = theirs[1].grad = None  # a parameter without a gradient
    norm = torch_adam(ours).clip_grad_norm(max_norm)
    expected = utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    whole = math.sqrt(sum(g.square().sum().item() for i, g in enumerate(gradients(0, 3.0)) if i != 1))
    assert norm.item() == pytest.approx(whole, rel=1e-6)
    for p, q in zip(ours, theirs):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    clipped = math.sqrt(sum(p.grad.square().sum().item() for p in ours if p.grad is not None))
    assert clipped == pytest.approx(min(max_norm, whole) if max_norm else whole, rel=1e-5)


def test_clip_grad_norm_without_gradients_and_with_an_infinite_one():
    params = parameters()
    optimizer = torch_adam(params)
    assert optimizer.clip_grad_norm(1.0).item() == 0.0
    params[0].grad = torch.full(SHAPES[0], math.inf)
    assert optimizer.clip_grad_norm(1.0).isinf()  # so that fairseq's trainer sees it


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_whose_norm_is_not_finite_is_left_out(norm):
    params = parameters()
    optimizer = torch_adam(params)
    optimizer.skip_unless_finite(torch.tensor(norm))
    run(optimizer, params, [0])
    torch.testing.assert_close(params, parameters(), rtol=0, atol=0)
    optimizer.skip_unless_finite(torch.tensor(3.0))
    run(optimizer, params, [1])
    assert all(not torch.equal(p, start) for p, start in zip(params, parameters()))


def test_clip_grad_norm_of_shards_is_left_to_fairseq():
    params = parameters()
    for p, g in zip(params, gradients(0)):
        p.grad = g
    whole = torch_adam(params).clip_grad_norm(0.0).item()
    norm = torch_adam(params).clip_grad_norm(whole, aggregate_norm_fn=lambda norm: 2 * norm)  # as much again elsewhere
    assert norm.item() == pytest.approx(2 * whole)
    torch.testing.assert_close(params[0].grad, gradients(0)[0] / 2)


@decays
def test_checkpoint_continues_identically(weight_decay, tmp_path):
    straight, first = parameters(), parameters()
    run(torch_adam(straight, weight_decay=weight_decay), straight, range(8))
    optimizer = torch_adam(first, weight_decay=weight_decay)
    run(optimizer, first, range(4))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    resumed = torch_adam(second, lr=7.0, weight_decay=weight_decay)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.get_lr() == 0.01
    run(resumed, second, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(straight, second))


def test_checkpoint_gives_way_to_new_options_as_fairseq_resumes():
    params = parameters()
    optimizer = torch_adam(params, lr=0.01)
    run(optimizer, params, range(2))
    resumed = torch_adam(params, lr=0.5, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-4, weight_decay=0.2)
    resumed.load_state_dict(optimizer.state_dict(), resumed.optimizer_config)
    (group,) = resumed.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-4, 0.2)
    assert resumed.optimizer.state[params[0]]["step"].item() == 2
    run(resumed, params, range(1))


@pytest.mark.parametrize("lr", [[0.25], [0.25, 0.5], 0.25], ids=str)
def test_learning_rate_from_the_configuration(lr):
    optimizer = TorchAdam(SimpleNamespace(**(vars(TorchAdamConfig()) | {"lr": lr})), parameters())
    assert optimizer.get_lr() == 0.25 and type(optimizer.get_lr()) is float


@pytest.mark.parametrize("given", ["(0.9, 0.98)", "[0.9, 0.98]", "0.9,0.98", (0.9, 0.98), [0.9, 0.98]], ids=str)
def test_adam_betas_as_fairseq_s_adam_takes_them(given):
    optimizer = torch_adam(parameters(), adam_betas=given)
    assert optimizer.optimizer_config["betas"] == optimizer.param_groups[0]["betas"] == (0.9, 0.98)
    assert torch_adam(parameters(), adam_betas=given, adam_beta2=0.98).param_groups[0]["betas"] == (0.9, 0.98)


def test_adam_betas_that_contradict_or_are_no_pair():
    with pytest.raises(
        UsageError, match=r"--adam-beta2 is 0.99, and --adam-betas is \(0.9,0.98\): leave one of the two out"
    ):
        torch_adam(parameters(), adam_betas="(0.9,0.98)", adam_beta2=0.99)
    for wrong in ("0.9", "(0.9, 0.98, 1)", "__import__('os').getcwd()", "((", (0.9,)):
        with pytest.raises(UsageError, match="--adam-betas is .*: choose two numbers, such as '\\(0.9, 0.98\\)'"):
            torch_adam(parameters(), adam_betas=wrong)


def test_betas_of_older_commands_and_checkpoints():
    assert torch_adam(parameters()).param_groups[0]["betas"] == (0.9, 0.999)
    assert torch_adam(parameters(), adam_beta2=0.98).param_groups[0]["betas"] == (0.9, 0.98)
    older = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "lr": [0.1]}
    assert TorchAdam(OmegaConf.create(older), parameters()).param_groups[0]["betas"] == (0.9, 0.999)


def test_set_lr_scales_the_next_step():
    small, large = parameters(), parameters()
    for params, lr in ((small, 0.001), (large, 0.003)):
        optimizer = torch_adam(params, lr=1.0)
        optimizer.set_lr(lr)
        assert optimizer.get_lr() == lr
        run(optimizer, params, range(1))
    for a, b, start in zip(small, large, parameters()):
        torch.testing.assert_close(b - start, 3 * (a - start), rtol=1e-3, atol=1e-6)


def test_fairseq_s_schedulers_change_the_lr():
    optimizer = torch_adam(parameters(), lr=0.1)
    warmup = InverseSquareRootSchedule(
        InverseSquareRootLRScheduleConfig(warmup_updates=100, warmup_init_lr=0.0, lr=[0.1]), optimizer
    )
    rates = []
    for update in (0, 50, 100, 400):
        warmup.step_update(update)
        rates.append(optimizer.get_lr())
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.05])
    fixed = FixedLRSchedule(FixedLRScheduleConfig(lr=[0.3]), optimizer)
    fixed.step_begin_epoch(1)
    assert optimizer.get_lr() == pytest.approx(0.3)


def test_zero_grad_clears_and_backward_fills():
    params = parameters()
    optimizer = torch_adam(params)
    optimizer.backward(sum(p.square().sum() for p in params))
    assert all(torch.equal(p.grad, 2 * p) for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_built_by_fairseq_from_its_command_line_names():
    config = OmegaConf.structured(TorchAdamConfig(adam_eps=1e-6, lr=[0.02]))
    config._name = "torch_adam"
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = optim.build_optimizer(config, [*parameters(), frozen])
    assert isinstance(optimizer, TorchAdam) and optimizer.get_lr() == 0.02
    assert len(list(optimizer.params)) == len(SHAPES)
    assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "not-flat"])
def test_fp16_training_equals_fairseq_s_adam(flat, monkeypatch):
    """``--fp16`` hands over all parameters as one, in float32."""
    # fairseq keeps the flat parameters by device index, which is None on a CPU; half-precision numbers work there, too.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

    def trained(optimizer_config):
        params = parameters(dtype=torch.float16)
        config = OmegaConf.create(
            {
                "optimizer": optimizer_config | {"adam_eps": 1e-8, "weight_decay": 0.0, "lr": [0.01]},
                "common": dict(
                    fp16_no_flatten_grads=not flat,
                    bf16=False,
                    fp16_init_scale=4,
                    fp16_scale_window=64,
                    fp16_scale_tolerance=0.0,
                    min_loss_scale=1e-4,
                    threshold_loss_scale=None,
                ),
                "optimization": {"update_freq": [1]},
                "distributed_training": {"distributed_world_size": 1},
            }
        )
        optimizer = FP16Optimizer.build_optimizer(config, params)
        for step in range(5):
            optimizer.zero_grad()
            loss = sum((p * g.half()).sum() for p, g in zip(params, gradients(step)))
            optimizer.backward(loss.float())
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
        return params, norm.item()

    ours, norm = trained({"_name": "torch_adam", "adam_beta1": 0.9, "adam_beta2": 0.999})
    adam = {"_name": "adam", "adam_betas": "(0.9, 0.999)", "use_old_adam": True, "tpu": False, "fp16_adam_stats": False}
    theirs, expected_norm = trained(adam)
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    for a, b, start in zip(ours, theirs, parameters(dtype=torch.float16)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)
        assert not torch.equal(a, start)


def test_memory_efficient_half_precision_is_refused_when_it_is_chosen_and_not_when_it_is_asked_for():
    config = OmegaConf.create({"optimizer": {"_name": "torch_adam", "adam_beta1": 0.9, "adam_beta2": 0.999}})
    optimizer = TorchAdam(TorchAdamConfig(lr=[0.01]), parameters())
    assert optimizer.supports_memory_efficient_fp16 is False
    for option in ("memory_efficient_fp16", "memory_efficient_bf16"):
        config.common = {"memory_efficient_fp16": False, "memory_efficient_bf16": False}
        TorchAdam.check_options(config)
        config.common[option] = True
        with pytest.raises(UsageError, match="--memory-efficient-bf16 choose --optimizer adam"):
            TorchAdam.check_options(config)


def test_autocast_is_refused_beside_another_precision():
    config = OmegaConf.create({"optimizer": {"_name": "torch_adam", "adam_beta1": 0.9, "adam_beta2": 0.999}})
    config.common = dict.fromkeys(("fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16"), False)
    for option in ("fp16", "bf16", "amp"):
        config.common[option], config.optimizer.autocast = True, "none"
        TorchAdam.check_options(config)
        config.optimizer.autocast = "bfloat16"
        with pytest.raises(UsageError, match=f"--autocast and --{option} are two precisions: leave one of them out"):
            TorchAdam.check_options(config)
        config.common[option] = False
        TorchAdam.check_options(config)


def test_a_schedule_that_writes_into_torchs_optimizer_is_refused_with_graphs():
    off = dict.fromkeys(("memory_efficient_fp16", "memory_efficient_bf16"), False)
    config = OmegaConf.create({"optimizer": {"adam_beta1": 0.9, "adam_beta2": 0.999}, "common": off})
    for graphs, scheduler in ((0, "reduce_lr_on_plateau"), (4, "fixed")):
        config.optimizer.step_graphs, config.lr_scheduler = graphs, {"_name": scheduler}
        TorchAdam.check_options(config)
    config.lr_scheduler._name = "reduce_lr_on_plateau"
    with pytest.raises(UsageError, match="--lr-scheduler reduce_lr_on_plateau does not find it: leave one of them out"):
        TorchAdam.check_options(config)


def test_with_autocast_gradients_of_all_uses_of_a_weight_are_added_up_in_float32():
    model = torch.nn.Linear(1, 1, bias=False)
    criterion = torch_adam(list(model.parameters()), autocast="bfloat16").autocasting(
        lambda model, x: sum(model(x).float() for _ in range(400))
    )
    criterion(model, torch.ones(1, 1)).backward()
    assert model.weight.grad.item() == 400.0  # a running sum in bfloat16 stops at 256

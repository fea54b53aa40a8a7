"""Masks on weights: the distribution of the noise, exact samples, and the straight-through gradient."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_sg.ops import logistic_noise, masked_weight

DRAWS = 10**6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("quantile", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_quantiles_of_one_uniform_and_of_two_are_the_logistic_ones(quantile):
    one = logistic_noise([DRAWS], generator=generator(), dtype=torch.float64)
    first, second = torch.rand(2, DRAWS, generator=generator(1), dtype=torch.float64)
    two = -torch.log(first.log() / second.log())
    below = math.log(quantile / (1 - quantile))
    sigma = math.sqrt(quantile * (1 - quantile) / DRAWS)
    for noise in (one, two):
        assert abs((noise < below).double().mean() - quantile) < 5 * sigma


@pytest.mark.parametrize("logit", [-2.0, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_probability_of_keeping_is_the_sigmoid_of_the_logit(logit, temperature):
    noise = logistic_noise([DRAWS], generator=generator())
    kept = masked_weight(torch.ones(DRAWS), torch.full((DRAWS,), logit), noise, temperature=temperature)
    p = sigmoid(logit)
    assert abs(kept.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / DRAWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_at_both_ends(monkeypatch, dtype):
    ends = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24], dtype=dtype)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: ends.clone())
    noise = logistic_noise([3], dtype=dtype)
    # log(2²⁴ − 1)
    torch.testing.assert_close(noise, torch.tensor([-16.635532, -16.635532, 16.635532], dtype=dtype))


def written_out(weight, logits, noise, temperature):
    """The equation as it stands."""
    soft = torch.sigmoid((logits + noise) / temperature)
    return weight * (((soft > 0.5).to(soft) - soft).detach() + soft)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)])
def test_values_and_gradients_are_those_of_the_equation(shape, temperature):
    weight, logits, outer = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    weight.requires_grad_()
    noise = logistic_noise(shape, dtype=torch.float64)
    results = []
    for function in (lambda *a: masked_weight(*a[:3], temperature=a[3]), written_out):
        own = logits.clone().requires_grad_()
        value = function(weight, own, noise, temperature)
        results.append((value, *torch.autograd.grad((outer * value).sum(), [own])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    value = masked_weight(weight, logits.clone().requires_grad_(), noise)
    assert torch.autograd.grad(value.sum(), [weight], allow_unused=True) == (None,)


def test_samples_are_the_weight_or_zero_to_the_bit():
    weight, logits = torch.randn(1000), 3 * torch.randn(1000)
    noise = logistic_noise([1000], generator=generator())
    expected = torch.where(logits + noise > 0, weight, torch.zeros(()))
    assert torch.equal(masked_weight(weight, logits, noise), expected)


def test_gradient_is_that_of_the_soft_mask():
    """gradcheck compares with finite differences, which see no jump: w · s instead of w · b."""

    class Soft(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, logits, noise):
            ctx.save_for_backward(weight, logits, noise)
            return weight * torch.sigmoid(logits + noise)

        @staticmethod
        def backward(ctx, grad):
            weight, logits, noise = ctx.saved_tensors
            own = logits.detach().requires_grad_()
            with torch.enable_grad():
                value = masked_weight(weight, own, noise)
            return None, *torch.autograd.grad(value, [own], grad), None

    weight, logits = torch.randn(2, 9, dtype=torch.float64)
    noise = logistic_noise([9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda own: Soft.apply(weight, own, noise), [logits.requires_grad_()])


@pytest.mark.parametrize("logit", [-2.0, 0.0, 2.0])
def test_mean_gradient_is_the_closed_form(logit):
    """E[s(1 − s)] = eˡ ((l − 2) eˡ + l + 2) / (eˡ − 1)³, and 1/6 at 0: biased against σ'(0) = 1/4."""
    e = math.exp(logit)
    expected = 1 / 6 if logit == 0 else e * ((logit - 2) * e + logit + 2) / (e - 1) ** 3
    logits = torch.full((DRAWS,), logit, dtype=torch.float64, requires_grad=True)
    noise = logistic_noise([DRAWS], generator=generator(2), dtype=torch.float64)
    masked_weight(torch.ones(DRAWS, dtype=torch.float64), logits, noise).sum().backward()
    assert abs(logits.grad.mean() - expected) < 5 * logits.grad.std() / math.sqrt(DRAWS)


def test_masks_in_transforms_of_torch_func():
    """Several samples at once: their values and gradients are those of each."""
    torch.manual_seed(3)
    weight, logits = torch.randn(2, 7, dtype=torch.float64)
    noise = logistic_noise([4, 7], generator=generator(4), dtype=torch.float64)
    factor = torch.randn(7, dtype=torch.float64)

    def loss(logits, noise):
        return (masked_weight(weight, logits, noise, temperature=0.7) * factor).sum()

    found = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0))(logits, noise)
    for gradient, value, own in zip(*found, noise, strict=True):
        leaf = logits.clone().requires_grad_()
        expected = loss(leaf, own)
        expected.backward()
        assert value == expected
        torch.testing.assert_close(gradient, leaf.grad)
    half = torch.func.vmap(lambda n: masked_weight(weight.half(), logits.float(), n.float()))(noise)
    assert half.dtype == torch.float16


def test_wrong_arguments():
    one = torch.ones(3)
    with pytest.raises(ValueError, match=r"one shape, not weight \(3,\), logits \(3,\), noise \(1,\)"):
        masked_weight(one, one, torch.ones(1))
    with pytest.raises(ValueError, match="temperature is 0"):
        masked_weight(one, one, one, temperature=0)
    with pytest.raises(TypeError, match="logits must be a floating-point tensor"):
        masked_weight(one, one.int(), one)
    with pytest.raises(TypeError, match="float32 or float64, not torch.float16"):
        logistic_noise([3], dtype=torch.float16)
    logits = one.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"masked_weight has no second derivative \(create_graph=True\)$"):
        torch.autograd.grad(masked_weight(one, logits, one).sum(), [logits], create_graph=True)

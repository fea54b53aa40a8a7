"""Dropout with masks of 16 bits: what is drawn, and what the derivative is."""

from __future__ import annotations

import pytest
import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.cpu.dropout import _BLOCK, Dropout, dropout, dropout_mask
from helpers.attention_cases import Case

SIZES = [(1,), (3,), (4,), (7, 5), (2, 3, 4, 5), (0, 3)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_mask_has_zeros_and_one_other_number(shape, dtype):
    mask = dropout_mask(torch.ones(shape, dtype=dtype), 0.25)
    assert mask.shape == shape and mask.dtype == dtype and mask.is_contiguous() and not mask.requires_grad
    assert set(mask.flatten().tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_share_and_mean(p):
    """The number of zeros of n is binomial: within five standard deviations; and the mean of m is 1."""
    n = 1_000_003
    mask = dropout_mask(torch.ones(n, dtype=torch.float64), p)
    spread = (p * (1 - p) / n) ** 0.5
    assert abs((mask == 0).double().mean().item() - p) < 5 * spread
    assert abs(mask.mean().item() - 1) < 5 * spread / (1 - p)


@pytest.mark.parametrize("place", range(4))
def test_each_quarter_of_an_integer_is_fair(place):
    """The sign bit of the integers too: without it the last of four would never be dropped at p = 0.4."""
    mask = dropout_mask(torch.ones(400_000), 0.4)[place::4]
    assert abs((mask == 0).float().mean().item() - 0.4) < 0.01


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 8, _BLOCK])
def test_neighbours_are_independent(distance):
    dropped = (dropout_mask(torch.ones(400_000), 0.5) == 0).float() - 0.5
    correlation = 4 * (dropped[:-distance] * dropped[distance:]).mean().item()
    assert abs(correlation) < 5 / 400_000**0.5


def test_the_scale_is_that_of_the_probability_drawn_from():
    """p̂ is the multiple of 2⁻¹⁶ next to p."""
    mask = dropout_mask(torch.ones(1000, dtype=torch.float64), 0.1)
    assert mask.max().item() == 65536 / (65536 - 6554)


def test_the_seed_decides_and_the_state_goes_on():
    x = torch.randn(5, 9)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x, 0.5, True), first) and torch.equal(dropout(x, 0.5, True), second)


@pytest.mark.parametrize("p,training", [(0.0, True), (0.5, False)])
def test_nothing_to_do_is_nothing_done(p, training):
    module, x, y = Dropout(p).train(training), torch.randn(3), torch.randn(3)
    state = torch.get_rng_state()
    assert module(x) is x
    assert torch.equal(module.add_to(x, y), x + y)
    assert torch.equal(module.of_relu(x), x.relu())
    assert torch.equal(torch.get_rng_state(), state)


def test_everything_is_dropped_at_one():
    x = torch.randn(7, requires_grad=True)
    y = dropout(x, 1.0, True)
    y.sum().backward()
    assert y.eq(0).all() and x.grad.eq(0).all()


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_no_such_probability(p):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_value_and_derivative_are_the_mask(dtype):
    x = torch.randn(6, 5, dtype=dtype).t().requires_grad_()
    state = torch.get_rng_state()
    mask = dropout_mask(x, 0.3)
    torch.set_rng_state(state)
    y = dropout(x, 0.3, True)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(y, x * mask) and torch.equal(x.grad, grad * mask)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)], ids=str)
def test_residual_connection(dtypes):
    x, update = (torch.randn(6, 5, dtype=dtype, requires_grad=True) for dtype in dtypes)
    state = torch.get_rng_state()
    mask = dropout_mask(update, 0.3)
    torch.set_rng_state(state)
    y = Dropout(0.3).add_to(x, update)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(y, x + update * mask)
    torch.testing.assert_close(x.grad, grad)
    torch.testing.assert_close(update.grad, grad.to(update.dtype) * mask)
    assert mask.eq(0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_of_relu(dtype, p):
    x = torch.tensor([[-1.0, 0.0, -0.0, 2.0, torch.inf, -torch.inf]] * 50 + [[1e-6, 3.0, -2.0, 5.0, 1e4, -1e-6]] * 50)
    x = x.to(dtype).t().requires_grad_()
    state = torch.get_rng_state()
    mask = dropout_mask(x, p)
    torch.set_rng_state(state)
    y = Dropout(p).of_relu(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    finite = x.isfinite()
    torch.testing.assert_close(y[finite], (x.relu() * mask)[finite])
    torch.testing.assert_close(x.grad[finite], torch.where(x > 0, grad * mask, 0.0)[finite])


def test_second_derivatives():
    """Of sums of squares: those of what is linear by itself are 0 anyway."""
    x, update = (torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def from_one_state(function):
        def run(*inputs):
            torch.manual_seed(1)
            return function(*inputs).square()

        return run

    for function, inputs in ((Dropout(0.3).of_relu, (x,)), (Dropout(0.3).add_to, (x, update))):
        assert torch.autograd.gradcheck(from_one_state(function), inputs)
        assert torch.autograd.gradgradcheck(from_one_state(function), inputs)


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Dropout(0.5)(torch.nn.functional.linear(torch.ones(4, 8), torch.ones(8, 8)))
    assert y.dtype == torch.bfloat16 and set(y.flatten().tolist()) == {0.0, 16.0}


def test_it_is_retained_in_generation_where_that_is_asked_for():
    x, layer = torch.ones(100), Dropout(0.5).eval()
    assert torch.equal(layer(x), x)
    layer.make_generation_fast_(name="encoder.dropout", need_attn=False, retain_dropout=True)
    assert set(layer(x).tolist()) == {0.0, 2.0} and set(layer.add_to(x, x).tolist()) == {1.0, 3.0}
    layer.make_generation_fast_(name="encoder.dropout", need_attn=False)
    assert torch.equal(layer.of_relu(x), x)
    with pytest.raises(UsageError, match="--retain-dropout-modules names modules of fairseq's own models"):
        layer.make_generation_fast_(retain_dropout=True, retain_dropout_modules=["TransformerModel"])


def test_so_is_that_of_attention_weights():
    case = Case("softmax", "decoder", {"attention_dropout": 0.5})
    module, (x, _) = case.build().eval(), case.inputs()
    assert torch.equal(module(x)[0], module(x)[0])
    module.make_generation_fast_(retain_dropout=True)
    assert not torch.equal(module(x)[0], module(x)[0])

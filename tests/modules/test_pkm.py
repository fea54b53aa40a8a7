"""Product-key memories against their formula as loops over all values; the pruning is exact."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward import ProductKeyMemory, build_feedforward
from helpers.configs import config_of

DIM, SUB_KEYS = 6, 4


def memory(**options) -> ProductKeyMemory:
    torch.manual_seed(0)
    return ProductKeyMemory(DIM, SUB_KEYS**2, **options).double()


def tokens(n=9):
    torch.manual_seed(1)
    return torch.randn(n, DIM, dtype=torch.float64)


def scores(module, x, head):
    """u[i√n + j] of one token and head, number by number (7.8)."""
    a, b = (module.keys[half, head].tolist() for half in (0, 1))
    xa, xb = x[: DIM // 2].tolist(), x[DIM // 2 :].tolist()
    ua, ub = ([sum(w * v for w, v in zip(key, part)) for key in keys] for keys, part in ((a, xa), (b, xb)))
    return [ua[i] + ub[j] for i in range(SUB_KEYS) for j in range(SUB_KEYS)]


def activate(activation, u):
    if activation == "relu":
        return [max(v, 0.0) for v in u]
    total = sum(math.exp(v) for v in u)
    return [math.exp(v) / total for v in u]


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 11, 16])
def test_pruned_equation(activation, heads, k):
    """The K largest of all n sums, K below, at and beyond the number of sub-keys; one softmax over those of all
    heads.
    """
    module = memory(pkm_k=k, pkm_heads=heads, pkm_activation=activation)
    x = tokens()
    for token, y in zip(x, module(x)):
        kept = []
        for head in range(heads):
            u = scores(module, token, head)
            kept += [(i, u[i]) for i in sorted(range(len(u)), key=lambda i: u[i], reverse=True)[:k]]
        weights = activate(activation, [score for _, score in kept])
        expected = sum(weight * module.values[i] for (i, _), weight in zip(kept, weights, strict=True))
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("heads", [1, 3])
def test_equation_of_the_released_code(activation, heads):
    module = memory(pkm_heads=heads, pkm_activation=activation)
    x = tokens()
    for token, y in zip(x, module(x)):
        added = [sum(column) for column in zip(*(scores(module, token, head) for head in range(heads)))]
        expected = sum(weight * value for weight, value in zip(activate(activation, added), module.values))
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_all_values_of_one_head_are_the_same_either_way(activation):
    pruned, dense = (memory(pkm_k=k, pkm_heads=1, pkm_activation=activation) for k in (SUB_KEYS**2, None))
    torch.testing.assert_close(pruned(tokens()), dense(tokens()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_gradients(k, activation):
    module = memory(pkm_k=k, pkm_heads=2, pkm_activation=activation)

    def function(x, keys, values):
        return torch.func.functional_call(module, {"keys": keys, "values": values}, (x,))

    inputs = [t.detach().requires_grad_() for t in (tokens(3), module.keys, module.values)]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_any_leading_shape(k, dtype):
    module = memory(pkm_k=k).to(dtype)
    x = tokens(24).to(dtype).view(2, 3, 4, DIM)
    out, losses = module(x, padding_mask=torch.zeros(2, 3, 4, dtype=torch.bool), return_losses=True)
    assert out.dtype == dtype and out.shape == x.shape and losses == {}
    assert (out.double() - module.double()(x.double())).abs().mean() < 0.02


@pytest.mark.parametrize("k", [None, 3])
def test_autocast(k):
    module = memory(pkm_k=k).float()
    x = tokens().float()
    exact = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    out.float().sum().backward()
    assert (out.float() - exact).abs().mean() < 0.05 and module.values.grad.isfinite().all()


@pytest.mark.parametrize("init,fan_in", [("reference", 100), ("dense_equivalent", 900)])
def test_initialization(init, fan_in):
    sizes = dict(encoder_ffn_embed_dim=900, encoder_layers=3)
    module = build_feedforward("pkm", config_of(100, 2, pre_norm=True, pkm_init=init, **sizes), "encoder")
    assert module.keys.shape == (2, 4, 30, 50) and module.values.shape == (900, 100)
    assert module.keys.std().item() == pytest.approx(math.sqrt(2 / (100 * 3)), rel=0.02)
    assert module.values.std().item() == pytest.approx(math.sqrt(2 / (fan_in * 3)), rel=0.02)
    before = module.values.clone()
    module.rescale_output(2.0)
    assert torch.equal(module.values, 2 * before)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"encoder_ffn_embed_dim": 15}, r"square .* width is 15: set --encoder-ffn-embed-dim .* 9 or 16"),
        ({"encoder_embed_dim": 7}, "halves its input, whose width is 7: choose an even --encoder-embed-dim"),
        ({"pkm_k": 0}, "--pkm-k is 0 of 16 values: choose a number from 1 to 16"),
        ({"pkm_k": 17}, "--pkm-k is 17 of 16 values"),
        ({"pkm_heads": 0}, "--pkm-heads is 0: choose 1 or more"),
        ({"pkm_activation": "gelu"}, "--pkm-activation is 'gelu': choose from relu, softmax"),
        ({"pkm_init": "none"}, "--pkm-init is 'none': choose from reference, dense_equivalent"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build_feedforward("pkm", config_of(8, 2, **({"encoder_ffn_embed_dim": 16} | options)), "encoder")

"""The top-K activation against its formula, ties, dropout and options."""

from __future__ import annotations

import pytest
import torch

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward import DenseFeedForward, TopKFeedForward, build_feedforward
from helpers.configs import config_of


def same_weights(k: int, dim=5, ffn_dim=12, **options):
    torch.manual_seed(0)
    topk = TopKFeedForward(dim, ffn_dim, topk_k=k, **options).double()
    dense = DenseFeedForward(dim, ffn_dim, **options).double()
    dense.load_state_dict(topk.state_dict())
    return topk, dense


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equation(activation):
    """(7.6) and (7.7), one token at a time."""
    topk, dense = same_weights(3, ffn_activation=activation)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    got = topk(x)
    for token, y in zip(x.flatten(0, 1), got.flatten(0, 1)):
        u = dense.hidden(token).tolist()
        largest = sorted(range(len(u)), key=lambda i: u[i], reverse=True)[:3]
        expected = dense.fc2.bias + sum(u[i] * dense.fc2.weight[:, i] for i in largest)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


def test_all_units_are_the_dense_layer_and_one_is_the_largest():
    topk, dense = same_weights(12)
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(topk(x), dense(x), rtol=0, atol=0)
    one, dense = same_weights(1)
    u = dense.hidden(x)
    assert torch.equal(one.hidden(x) != 0, (u == u.amax(1, keepdim=True)) & (u != 0))


def test_ties_stay():
    topk, _ = same_weights(2, ffn_dim=4)
    with torch.no_grad():
        topk.fc1.weight.zero_()
        topk.fc1.bias.copy_(torch.tensor([1.0, 3.0, 1.0, 0.5]))
    assert topk.hidden(torch.randn(1, 5, dtype=torch.float64)).tolist() == [[1.0, 3.0, 1.0, 0.0]]


def test_units_are_chosen_after_dropout():
    topk, _ = same_weights(6, ffn_dim=600, activation_dropout=0.5)
    with torch.no_grad():
        topk.fc1.weight.zero_()
        topk.fc1.bias.copy_(torch.arange(1.0, 601.0))
    kept = [row.nonzero().squeeze(1) for row in topk.train().hidden(torch.randn(50, 5, dtype=torch.float64))]
    assert all(len(row) == 6 for row in kept)  # of the largest 6 alone, dropout would leave 3
    assert min(int(row.min()) for row in kept) < 594


def test_gradient():
    topk, _ = same_weights(3)
    assert torch.autograd.gradcheck(topk, torch.randn(3, 5, dtype=torch.float64, requires_grad=True))
    u = topk.hidden(x := torch.randn(1, 5, dtype=torch.float64))
    topk(x).sum().backward()
    assert torch.equal((topk.fc1.weight.grad != 0).any(1), u[0] != 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    topk, _ = same_weights(4)
    x = torch.randn(20, 5).to(dtype)
    low = topk.to(dtype)(x)
    exact = topk.double()(x.double())
    assert low.dtype == dtype and (low.double() - exact).abs().mean() < 0.02


def test_option():
    assert build_feedforward("topk", config_of(8, 2, topk_k=5, encoder_ffn_embed_dim=32), "encoder").k == 5
    for k in (0, 33):
        with pytest.raises(UsageError, match=f"--topk-k is {k} of 32 hidden units: choose a number from 1 to 32"):
            build_feedforward("topk", config_of(8, 2, topk_k=k, encoder_ffn_embed_dim=32), "encoder")

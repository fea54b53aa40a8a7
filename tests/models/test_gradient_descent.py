"""Linear attention without a denominator as one step of gradient descent (von Oswald et al. 2023), by hand-set weights.

From w = 0, a step of size η on L(w) = 1/(2N) Σ_i (w·x_i − y_i)² gives w = (η/N) Σ_i y_i x_i, and

    ŷ = (η/N) Σ_i y_i x_i·x_q

The map φ(x) = x makes a layer of linear attention this sum, where one token has both x_i (the Key) and y_i (the Value).
``sg_regressor`` has them in two tokens, so a layer before it copies x_i to the token of y_i.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch
from torch import Tensor

from fairseq_sg.models.sg_regressor import SGRegressor
from helpers.prompts import build

#: η
RATE = 0.3


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(3)


def descent(dims: int, examples: int) -> SGRegressor:
    """The model of the step. Its states are [z (n) | copy of x_i (n) | ŷ (1) | code of Keys (P) | code of Queries (P)].

    The token of x_i has the one-hot code i of Keys, that of y_i the one-hot code i of Queries, as learned positions.
    """
    points = examples + 1
    width = 2 * dims + 1 + 2 * points
    model = build(
        dims,
        decoder_embed_dim=width,
        decoder_attention_heads=1,
        decoder_attention="linear",
        feature_map="identity",
        linear_attention_denominator="none",
        norm="none",
        position="learned",
        learned_positions=2 * points - 1,
    )
    z, copied, answer = slice(0, dims), slice(dims, 2 * dims), 2 * dims
    keys, queries = slice(answer + 1, answer + 1 + points), slice(answer + 1 + points, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.projection.weight[z] = torch.eye(dims).double()
        codes = model.embedding.positions.weight  # (2P − 1, C)
        codes[0::2, keys] = torch.eye(points).double()
        codes[1::2, queries] = torch.eye(points)[:examples].double()
        copy, step = (layer.self_attn for layer in model.stack.layers)
        # The token of y_i finds that of x_i; the token of x_i finds none.
        _place(copy.q_proj, queries, slice(0, points), 1.0)
        _place(copy.k_proj, keys, slice(0, points), 1.0)
        _place(copy.v_proj, z, slice(0, dims), 1.0)
        _place(copy.out_proj, slice(0, dims), copied, 1.0)
        # Tokens of x have no copy, so their Keys are 0. The first number of the token of y_i is y_i.
        _place(step.q_proj, z, slice(0, dims), 1.0)
        _place(step.k_proj, copied, slice(0, dims), 1.0)
        _place(step.v_proj, slice(0, 1), slice(0, 1), 1.0)
        _place(step.out_proj, slice(0, 1), slice(answer, answer + 1), RATE / examples)
        model.readout.weight[0, answer] = 1.0
    return model.eval()


def _place(projection: torch.nn.Linear, source: slice, target: slice, factor: float) -> None:
    projection.weight[target, source] = factor * torch.eye(source.stop - source.start).double()


def stepped(x: Tensor, y: Tensor, query: Tensor, examples: int) -> Tensor:
    """The prediction for a query after a step from w = 0 on x (k, n) and y (k,), by autograd; L is divided by N."""
    w = torch.zeros(x.size(1), dtype=torch.float64, requires_grad=True)
    loss = (x @ w - y).square().sum() / (2 * examples)
    (gradient,) = torch.autograd.grad(loss, w)
    return -RATE * gradient @ query


@pytest.mark.parametrize(("dims", "examples"), [(1, 1), (3, 6), (5, 40)])
def test_a_prediction_is_a_step_of_gradient_descent(dims, examples):
    """At the query, and at every point before it from the examples that it sees."""
    model = descent(dims, examples)
    x, y = torch.randn(4, examples + 1, dims).double(), torch.randn(4, examples).double()
    with torch.no_grad():
        predictions = model(x, y)[0][-1]  # (B, P)
    query = RATE / examples * torch.einsum("bi,bin,bn->b", y, x[:, :-1], x[:, -1])
    torch.testing.assert_close(predictions[:, -1], query, rtol=1e-12, atol=1e-12)
    for b in range(4):
        for i in range(examples + 1):
            expected = stepped(x[b, :i], y[b, :i], x[b, i], examples)
            torch.testing.assert_close(predictions[b, i], expected, rtol=1e-12, atol=1e-12)


def test_the_step_learns_a_linear_function():
    """With η = 1 and examples x ~ N(0, I) the mean of y x is close to w: the error is (n + 1)/N of that of 0."""
    dims, examples = 2, 60
    x, w = torch.randn(400, examples + 1, dims).double(), torch.randn(400, dims).double()
    y = torch.einsum("bin,bn->bi", x, w)
    with torch.no_grad():
        predictions = descent(dims, examples)(x, y[:, :-1])[0][-1] / RATE
    error = (predictions[:, -1] - y[:, -1]).square().mean() / y[:, -1].square().mean()
    assert error.item() == pytest.approx((dims + 1) / examples, rel=0.5)


def test_a_denominator_makes_it_no_step():
    """The same weights with the denominator: the sum of similarities has either sign, and divides."""
    model = descent(3, 6)
    x, y = torch.randn(4, 7, 3).double(), torch.randn(4, 6).double()
    with torch.no_grad():
        before = model(x, y)[0]
        for layer in model.stack.layers:
            layer.self_attn.divides = True
        assert not torch.allclose(model(x, y)[0], before)

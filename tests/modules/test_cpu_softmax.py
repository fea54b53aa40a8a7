"""Softmax attention in separate steps, against torch's operator in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_sg.modules.cpu.dropout import dropout_mask
from fairseq_sg.modules.cpu.softmax import SHORTEST, closed_form_is_faster, closed_form_softmax

BATCH, HEADS, DIM = 2, 3, 4
#: Queries, keys: shorter than a register, as long, longer.
LENGTHS = [(1, 1), (5, 3), (3, SHORTEST - 1), (4, SHORTEST), (SHORTEST + 2, SHORTEST + 2)]


def heads(length: int, dtype=torch.float64) -> torch.Tensor:
    """As projections of a time-first tensor have them, which is not contiguous."""
    return torch.randn(length, BATCH, HEADS * DIM, dtype=dtype).unflatten(-1, (HEADS, DIM)).permute(1, 2, 0, 3)


def biases(queries: int, keys: int):
    return (None, (BATCH, HEADS, queries, keys), (1, HEADS, queries, keys), (queries, keys))


def equation(q, k, v, bias, hidden, scale, mask=None):
    logits = scale * q @ k.transpose(-1, -2)
    logits = logits if bias is None else logits + bias
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    weights = logits.softmax(-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0)
    return (weights if mask is None else weights * mask[..., : k.size(2)]) @ v


def hidden_of(kind: str, queries: int, keys: int):
    if kind == "none":
        return None
    if kind == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).triu(1)
    hidden = torch.rand(BATCH, 1, 1, keys) < 0.5
    hidden[0, ..., 0] = False
    hidden[1] = True  # a sentence of padding alone
    return hidden


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize("queries,keys", LENGTHS, ids=str)
def test_values_and_derivatives_are_the_equation_s(queries, keys, kind):
    hidden = hidden_of(kind, queries, keys)
    for shape in biases(queries, keys):
        inputs = [heads(queries), heads(keys), heads(keys)]
        if shape is not None:
            inputs.append(torch.randn(shape, dtype=torch.float64))
        inputs = [x.requires_grad_() for x in inputs]

        def run(q, k, v, bias=None):
            return closed_form_softmax(q, k, v, bias, hidden, 0.0, 0.3)

        def expected(q, k, v, bias=None):
            rows = equation(q, k, v, bias, hidden if hidden is None else hidden & ~hidden.all(-1, keepdim=True), 0.3)
            return rows if hidden is None else rows.masked_fill(hidden.all(-1, keepdim=True), 0)

        out, wanted = run(*inputs), expected(*inputs)
        torch.testing.assert_close(out, wanted)
        grad = torch.randn_like(out)
        for found, reference in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad)):
            assert found.shape == reference.shape
            torch.testing.assert_close(found, reference)


@pytest.mark.parametrize("keys", [3, SHORTEST + 1])
def test_dropout_is_on_the_weights_in_both_directions(keys):
    q, k, v = (heads(n).requires_grad_() for n in (4, keys, keys))
    state = torch.get_rng_state()
    mask = dropout_mask(torch.empty(BATCH, HEADS, 4, max(keys, SHORTEST), dtype=torch.float64), 0.4)
    torch.set_rng_state(state)
    out, wanted = closed_form_softmax(q, k, v, None, None, 0.4, 0.5), equation(q, k, v, None, None, 0.5, mask)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    for found, reference in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad)
    ):
        torch.testing.assert_close(found, reference)
    assert mask.eq(0).any()


def test_garbage_under_padding_has_no_influence():
    q, k, v = (heads(5, torch.float32) for _ in range(3))
    hidden = torch.zeros(BATCH, 1, 1, 5, dtype=torch.bool)
    hidden[..., 3:] = True
    clean = closed_form_softmax(q, k, v, None, hidden, 0.0, 0.5)
    k, v = k.clone(), v.clone()
    k[:, :, 3:] = v[:, :, 3:] = 1e9
    torch.testing.assert_close(closed_form_softmax(q, k, v, None, hidden, 0.0, 0.5), clean)


def test_no_second_derivative():
    q, k, v = (heads(2).requires_grad_() for _ in range(3))
    out = closed_form_softmax(q, k, v, None, None, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_where_torch_has_a_kernel_it_runs():
    q, bias = torch.randn(1, 1, 2, 4), torch.zeros(2, 2)
    assert not closed_form_is_faster(q, q, q, None, 0.0) and not closed_form_is_faster(q, q, q, bias, 0.0)
    assert closed_form_is_faster(q, q, q, None, 0.1) and closed_form_is_faster(
        q, q, q, bias.clone().requires_grad_(), 0.0
    )
    half, meta = q.bfloat16(), torch.empty(1, 1, 2, 4, device="meta")
    assert not closed_form_is_faster(half, half, half, None, 0.1) and not closed_form_is_faster(
        meta, meta, meta, None, 0.1
    )
    assert not closed_form_is_faster(q, half, half, None, 0.1)  # as under autocast

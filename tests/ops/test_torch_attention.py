"""Attention with a mask or a bias never runs in cuDNN, and that of few queries and keys in parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from fairseq_sg.ops import torch_attention


@pytest.mark.parametrize("masked", [False, True])
def test_values_are_those_of_torch(masked, device):
    q, k, v = (torch.randn(2, 3, 5, 4, device=device) for _ in range(3))
    mask = torch.randn(2, 3, 5, 5, device=device) if masked else None
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(torch_attention.masked_attention(q, k, v, mask, scale=0.3), expected)


def tensor(is_cuda=True, dtype=torch.bfloat16, number=64):
    """What the choice asks of a tensor."""
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, size=lambda dim: {-2: number}[dim])


@pytest.mark.parametrize(
    ("is_cuda", "masked", "cudnn"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_cudnn_has_no_mask(is_cuda, masked, cudnn, monkeypatch):
    enabled = []

    def attention(*tensors, **options):
        enabled.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))

    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", attention)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    q = tensor(is_cuda)
    torch_attention.masked_attention(q, q, q, torch.ones(1) if masked else None, scale=1.0)
    assert enabled == [(cudnn, True)] and torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("is_cuda", "dtype", "queries", "keys", "parts"),
    [
        (True, torch.float32, 32, 32, True),
        (True, torch.float32, 1, 11, True),
        (True, torch.float32, 33, 11, False),
        (True, torch.float32, 11, 33, False),
        (True, torch.bfloat16, 11, 11, False),
        (False, torch.float32, 11, 11, False),
    ],
)
def test_few_queries_and_keys_in_parts(is_cuda, dtype, queries, keys, parts, masked):
    found = torch_attention.kernels(tensor(is_cuda, dtype, queries), tensor(is_cuda, dtype, keys), masked)
    assert (found == [SDPBackend.MATH]) is parts


@pytest.mark.parametrize("kind", ["causal", "mask", "bias"])
def test_in_parts_as_without(kind, device, monkeypatch):
    """Values and gradients; of a query that sees no key, zeros."""
    q, k, v = (torch.randn(2, 3, 5, 4, device=device, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5, device=device) < 0.5
    mask[0, :, 2] = False
    if kind == "bias":
        mask = torch.randn(2, 3, 5, 5, device=device, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    given = None if kind == "causal" else mask
    seen = torch.ones(5, 5, dtype=torch.bool, device=device).tril() if kind == "causal" else mask

    def results():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"scale": 0.3, "is_causal": kind == "causal"}
        out = torch_attention.masked_attention(*leaves, given, **options)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    logits = 0.3 * q @ k.transpose(-1, -2)
    logits = logits + seen if kind == "bias" else logits.masked_fill(~seen, -torch.inf)
    expected = logits.softmax(-1).nan_to_num(0.0) @ v
    monkeypatch.setattr(torch_attention, "kernels", lambda *_: [SDPBackend.MATH])
    out, *gradients = results()
    torch.testing.assert_close(out, expected)
    assert all(g.isfinite().all() for g in gradients)
    if given is not None:
        assert (out[0, :, 2] == 0).all() and (gradients[0][0, :, 2] == 0).all()
    monkeypatch.setattr(torch_attention, "kernels", lambda *_: [])
    torch.testing.assert_close([out, *gradients], results())

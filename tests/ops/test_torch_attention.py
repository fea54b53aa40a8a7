"""Attention with a mask or a bias never runs in cuDNN."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fairseq_sg.ops import torch_attention


@pytest.mark.parametrize("masked", [False, True])
def test_values_are_those_of_torch(masked, device):
    q, k, v = (torch.randn(2, 3, 5, 4, device=device) for _ in range(3))
    mask = torch.randn(2, 3, 5, 5, device=device) if masked else None
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(torch_attention.masked_attention(q, k, v, mask, scale=0.3), expected)


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
    q = SimpleNamespace(is_cuda=is_cuda)
    torch_attention.masked_attention(q, q, q, torch.ones(1) if masked else None, scale=1.0)
    assert enabled == [(cudnn, True)] and torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)

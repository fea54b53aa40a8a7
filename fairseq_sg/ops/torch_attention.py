"""torch's softmax attention with a mask or a bias, on a GPU without cuDNN.

From torch 2.11 on it is cuDNN's on Hopper in half precision. There it takes a bias of another dtype for its own, and
has gradients that are NaN at some lengths (pytorch/pytorch #191612, #196678).
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WITHOUT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, (B, H, N, E); of a boolean mask, True is what is seen."""
    with sdpa_kernel(WITHOUT_CUDNN) if q.is_cuda and mask is not None else nullcontext():
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)

"""Softmax attention of a training step on a CPU.

    P = softmax(s QKᵀ + bias),   O = (m ⊙ P) V          m the mask of dropout

torch's operator has no fused kernel there for dropout or for a bias that is trained. It makes a dozen passes over the
(B, H, N, M) logits, and as many in the derivative. The closed form makes as few passes as separate kernels need. With
D = m ⊙ P and G = ∂O the derivative is

    ∂V = Dᵀ G,   ∂L = D ⊙ GVᵀ − P Σ_row(D ⊙ GVᵀ),   ∂Q = s ∂L K,   ∂K = s ∂Lᵀ Q,   ∂bias = ∂L.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.modules.cpu.dropout import dropout_mask
from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.transforms import plain

#: float32 numbers in a vector register (AVX-512): torch's softmax of shorter rows takes eight times as long.
SHORTEST = 16


def closed_form_is_faster(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float) -> bool:
    """Whether torch has no fused kernel: on a CPU, in float32 or float64, with dropout or a bias that is trained.

    Half precision and autocast stay with torch's operator, which computes in float32 there. Compiled code does too:
    the closed form would split it in two. So do transforms of ``torch.func``.
    """
    if plain():
        return False
    trained = dropout_p > 0 or bias is not None and bias.requires_grad
    precise = q.dtype in (torch.float32, torch.float64) and q.dtype == k.dtype == v.dtype
    return trained and precise and q.device.type == "cpu"


def closed_form_softmax(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor | None, dropout_p: float, scale: float
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v of q (B, H, N, D), k (B, H, M, D), v (B, H, M, E), float32 or float64.

    ``bias`` and ``hidden`` (bool, True at keys that a query must not see) broadcast to (B, H, N, M). The output of a
    query that sees no key is 0, and gives no gradient.

    Second derivatives are refused (RuntimeError).
    """
    lowest = None
    if hidden is not None:
        # Not −∞: the softmax over hidden keys alone would be NaN.
        lowest = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, torch.finfo(q.dtype).min / 2)
    out = _SoftmaxAttention.apply(q, k, v, bias, lowest, dropout_p, scale)
    if hidden is not None:
        blind = hidden.all(-1, keepdim=True)
        if blind.any():
            out = out.masked_fill(blind, 0.0)
    return out


class _SoftmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        lowest: Tensor | None,
        dropout_p: float,
        scale: float,
    ) -> Tensor:
        keys = k.size(2)
        logits = _product(q, _lengthened(k), scale)
        inside = logits[..., :keys]
        for added in (bias, lowest):
            if added is not None:
                inside += added
        logits[..., keys:] = -torch.inf
        weights = logits.softmax(-1)
        dropped = dropout_mask(weights, dropout_p).mul_(weights) if dropout_p > 0 else weights
        ctx.save_for_backward(q, k, v, weights, dropped)
        ctx.scale, ctx.bias_shape = scale, None if bias is None else bias.shape
        return dropped[..., :keys] @ v

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor):
        refuse_second_derivative("softmax attention in training on a CPU", naive_has_one=False)
        q, k, v, weights, dropped = ctx.saved_tensors
        keys = k.size(2)
        grad_v = dropped[..., :keys].transpose(-1, -2) @ grad
        # In place: a map of many heads and positions is too large for the cache.
        grad_logits = _product(grad, _lengthened(v), 1.0).mul_(dropped)
        grad_logits.addcmul_(weights, grad_logits.sum(-1, keepdim=True), value=-1.0)
        grad_logits = grad_logits[..., :keys]
        grad_q = _product(grad_logits, k.transpose(-1, -2), ctx.scale)
        grad_k = _product(grad_logits.transpose(-1, -2), q.transpose(-1, -2), ctx.scale)
        grad_bias = None
        if ctx.bias_shape is not None and ctx.needs_input_grad[3]:
            grad_bias = grad_logits.sum_to_size(ctx.bias_shape)
        return grad_q, grad_k, grad_v, grad_bias, None, None, None


def _lengthened(x: Tensor) -> Tensor:
    """x (B, H, M, D) with zeros after it up to the shortest fast length."""
    missing = SHORTEST - x.size(2)
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a bᵀ of a (B, H, N, D) and b (B, H, M, D): (B, H, N, M)."""
    shape = (*a.shape[:3], b.size(2))
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    return torch.baddbmm(a.new_empty(1), a, b.transpose(1, 2), beta=0, alpha=scale).view(shape)

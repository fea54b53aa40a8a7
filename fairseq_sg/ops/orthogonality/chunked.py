"""The orthogonality loss through the smaller of its two Gram matrices, with its gradient in closed form.

V̄V̄ᵀ (N×N) and V̄ᵀV̄ (E×E) have the same non-zero eigenvalues λ, and the loss is Σ (λ − 1)² over N of them, so

    ‖V̄V̄ᵀ − I_N‖²_F = ‖V̄ᵀV̄ − I_E‖²_F + N − E,

which is ‖V̄ᵀV̄‖²_F − 2 Σ_n ‖v̄_n‖² + N with the traces written out. The derivative is 4 (V̄V̄ᵀ − I_N) V̄, which equals
4 V̄ (V̄ᵀV̄ − I_E). Both need O(min(N, E) N E) time, and besides the values only the small matrix and the norms are kept
for the backward pass. Padded rows are zero and N counts the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled


def orthogonality_loss_chunked(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F of every sequence and head, (B, H); see `fairseq_sg.ops.orthogonality_loss`."""
    return _OrthogonalityLoss.apply(values, padding_mask, eps)


class _OrthogonalityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
        real = _without_padding(values, padding_mask)
        norm = torch.linalg.vector_norm(real, dim=-1, keepdim=True)
        scale = norm + eps
        unit = real / scale
        loss, deviation = _rows_loss(unit, padding_mask) if _is_wide(values) else _columns_loss(unit, padding_mask)
        ctx.save_for_backward(values, padding_mask, norm, scale, deviation)
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        # With torch's `once_differentiable` a second derivative would be 0 without a word where grad is a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "orthogonality_loss has no second derivative (create_graph=True); implementation='naive' has one"
            )
        values, padding_mask, norm, scale, deviation = ctx.saved_tensors
        with autocast_disabled(values.device):
            real = _without_padding(values, padding_mask)
            unit = real / scale
            deviation = deviation * (4.0 * grad)[..., None, None]
            grad_unit = deviation @ unit if _is_wide(values) else unit @ deviation
            # v̄ = v / (‖v‖ + eps), so dv = dv̄ / (‖v‖ + eps) − v̄ (v̄·dv̄) / ‖v‖; the second term is 0 where v is.
            along = (unit * grad_unit).sum(dim=-1, keepdim=True) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
            grad_values = torch.addcmul(grad_unit / scale, unit, along, value=-1.0)
        return grad_values.to(values.dtype), None, None


def _is_wide(values: Tensor) -> bool:
    """Whether N ≤ E, so that the N×N matrix is the smaller."""
    return values.shape[2] <= values.shape[3]


def _without_padding(values: Tensor, padding_mask: Tensor | None) -> Tensor:
    # One copy here if values is a transposed view; the Gram product would otherwise make two.
    values = values.to(accumulation_dtype(values)).contiguous()
    return values if padding_mask is None else values.masked_fill(padding_mask[:, None, :, None], 0.0)


def _rows_loss(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖V̄V̄ᵀ − I_N‖²_F and the matrix in it."""
    deviation = unit @ unit.transpose(-1, -2)
    ones = 1.0 if padding_mask is None else (~padding_mask)[:, None].to(unit.dtype)
    deviation.diagonal(dim1=-2, dim2=-1).sub_(ones)
    return deviation.square().sum(dim=(-2, -1)), deviation


def _columns_loss(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖V̄ᵀV̄ − I_E‖²_F + N − E and the matrix in it."""
    length, width = unit.shape[2:]
    deviation = unit.transpose(-1, -2) @ unit
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    surplus = length - width  # N − E
    if padding_mask is not None:
        surplus = surplus - padding_mask.sum(dim=1)[:, None]
    # Where no more than E rows are real the loss can be 0, and rounding may leave this just below.
    return (deviation.square().sum(dim=(-2, -1)) + surplus).clamp_min_(0.0), deviation

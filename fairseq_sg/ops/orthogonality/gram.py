"""The orthogonality loss through the smaller of its two Gram matrices, with its gradient in closed form.

V̄V̄ᵀ (N×N) and V̄ᵀV̄ (E×E) have the same non-zero eigenvalues λ, and the loss is Σ (λ − 1)² over N of them, so

    ‖V̄V̄ᵀ − I_N‖²_F = ‖V̄ᵀV̄ − I_E‖²_F + N − E.

With D the smaller of V̄V̄ᵀ − I_N and V̄ᵀV̄ − I_E, the derivative is ∂V̄ = 4 D V̄ or 4 V̄ D. As v̄ = v / s with
s = ‖v‖ + eps, it is ∂v = ∂v̄ / s − v̄ (v̄·∂v̄) / ‖v‖. Both take O(min(N, E) N E) time.

V̄, D and the norms are kept for the backward pass: autograd through the same equations takes twice the time on a CPU.
Padded rows are zero and N counts the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled


def orthogonality_loss_gram(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F of every sequence and head, (B, H); see `fairseq_sg.ops.orthogonality_loss`."""
    return _OrthogonalityLoss.apply(values, padding_mask, eps)


class _OrthogonalityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
        v = values.to(accumulation_dtype(values))  # (B, H, N, E)
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)  # (B, H, N, 1)
        inverse = (norm + eps).reciprocal_()  # (B, H, N, 1)
        # In this layout, whatever that of the values is: a product of matrices would copy them.
        unit = torch.mul(v, inverse, out=torch.empty_like(v, memory_format=torch.contiguous_format))  # V̄ (B, H, N, E)
        if padding_mask is not None:
            for x in (unit, norm, inverse):
                x.masked_fill_(padding_mask[:, None, :, None], 0.0)
        loss, deviation = (_from_rows if _has_few_rows(unit) else _from_columns)(unit, padding_mask)
        ctx.save_for_backward(unit, norm, inverse, deviation)
        ctx.dtype = values.dtype
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("orthogonality_loss")
        unit, norm, inverse, deviation = ctx.saved_tensors
        with autocast_disabled(unit.device):
            deviation = deviation * (4.0 * grad[..., None, None])
            grad_unit = deviation @ unit if _has_few_rows(unit) else unit @ deviation  # ∂V̄ (B, H, N, E)
            # A product of matrices: `vecdot` writes the products of all elements before it sums them.
            along = (unit[..., None, :] @ grad_unit[..., None])[..., 0]  # v̄·∂v̄ (B, H, N, 1)
            # Where the norm is 0, so is v̄·∂v̄.
            along.div_(norm.clamp_min(torch.finfo(norm.dtype).tiny))
            return grad_unit.mul_(inverse).addcmul_(unit, along, value=-1.0).to(ctx.dtype), None, None


def _has_few_rows(unit: Tensor) -> bool:
    """Whether N ≤ E, so that the N×N matrix is the smaller."""
    return unit.shape[2] <= unit.shape[3]


def _from_rows(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖V̄V̄ᵀ − I_N‖²_F (B, H) and D = V̄V̄ᵀ − I_N (B, H, N, N)."""
    deviation = unit @ unit.transpose(-1, -2)
    real = 1.0 if padding_mask is None else (~padding_mask)[:, None].to(unit.dtype)
    deviation.diagonal(dim1=-2, dim2=-1).sub_(real)
    return deviation.square().sum(dim=(-2, -1)), deviation


def _from_columns(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖V̄ᵀV̄ − I_E‖²_F + N − E (B, H) and D = V̄ᵀV̄ − I_E (B, H, E, E)."""
    length, width = unit.shape[2:]
    deviation = unit.transpose(-1, -2) @ unit
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    surplus = length - width  # N − E
    if padding_mask is not None:
        surplus = surplus - padding_mask.sum(dim=1)[:, None]
    # Where no more than E rows are real the loss can be 0, and rounding may leave this just below.
    return (deviation.square().sum(dim=(-2, -1)) + surplus).clamp_min_(0.0), deviation

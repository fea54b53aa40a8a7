"""The orthogonality loss through the smaller of its two Gram matrices, with its gradient in closed form.

V̄V̄ᵀ (N×N) and V̄ᵀV̄ (E×E) have the same non-zero eigenvalues λ, and the loss is Σ (λ − 1)² over N of them, so

    ‖V̄V̄ᵀ − I_N‖²_F = ‖V̄ᵀV̄ − I_E‖²_F + N − E,

which is ‖V̄ᵀV̄‖²_F − 2 Σ_n ‖v̄_n‖² + N with the traces written out. The derivative ∂V̄ is 4 D V̄ with D = V̄V̄ᵀ − I_N, which
equals 4 V̄ D with D = V̄ᵀV̄ − I_E. As v̄ = v / s with s = ‖v‖ + eps, it is ∂v = ∂v̄ / s − v̄ (v̄·∂v̄) / ‖v‖.

Both need O(min(N, E) N E) time. What takes it on a CPU is passes over tensors as large as the values; where N ≤ E, two
of the backward pass are spared, as the N×N matrix knows v̄_n·∂v̄_n = 4 (Σ_m D_nm² + D_nn) =: 4 a_n:

    ∂v_n = 4 / s_n Σ_m (D_nm − δ_nm a_n s_n / ‖v_n‖) v̄_m.

V̄, the small matrix and the norms are kept for the backward pass. Padded rows are zero and N counts the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fairseq_sg.ops.checks import refuse_second_derivative
from fairseq_sg.ops.precision import accumulation_dtype, autocast_disabled


def orthogonality_loss_chunked(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F of every sequence and head, (B, H); see `fairseq_sg.ops.orthogonality_loss`."""
    return _OrthogonalityLoss.apply(values, padding_mask, eps)


class _OrthogonalityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
        real = values.to(accumulation_dtype(values))
        norm = torch.linalg.vector_norm(real, dim=-1, keepdim=True)
        inverse = (norm + eps).reciprocal_()
        # In this order, whatever that of the values is: a matrix product would copy them.
        unit = torch.mul(real, inverse, out=torch.empty_like(real, memory_format=torch.contiguous_format))
        if padding_mask is not None:
            for x in (unit, norm, inverse):
                x.masked_fill_(padding_mask[:, None, :, None], 0.0)
        loss, *kept = (_of_rows if _is_wide(values) else _of_columns)(unit, padding_mask)
        ctx.save_for_backward(unit, norm, inverse, *kept)
        ctx.dtype = values.dtype
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("orthogonality_loss")
        unit, norm, inverse, *kept = ctx.saved_tensors
        # To divide by: where the norm is 0, so is what is divided.
        norm = norm.clamp_min(torch.finfo(norm.dtype).tiny)
        of_loss = _grad_of_rows if _is_wide(unit) else _grad_of_columns
        with autocast_disabled(unit.device):
            return of_loss(4.0 * grad[..., None, None], unit, norm, inverse, *kept).to(ctx.dtype), None, None


def _is_wide(values: Tensor) -> bool:
    """Whether N ≤ E, so that the N×N matrix is the smaller."""
    return values.shape[2] <= values.shape[3]


def _of_rows(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """‖V̄V̄ᵀ − I_N‖²_F, the matrix D in it, and a (B, H, N)."""
    deviation = unit @ unit.transpose(-1, -2)
    diagonal = deviation.diagonal(dim1=-2, dim2=-1)
    diagonal.sub_(1.0 if padding_mask is None else (~padding_mask)[:, None].to(unit.dtype))
    squares = deviation.square().sum(dim=-1)
    return squares.sum(dim=-1), deviation, squares + diagonal


def _grad_of_rows(
    factor: Tensor, unit: Tensor, norm: Tensor, inverse: Tensor, deviation: Tensor, along: Tensor
) -> Tensor:
    weights = deviation * (inverse * factor)
    weights.diagonal(dim1=-2, dim2=-1).sub_((along / norm[..., 0]).mul_(factor[..., 0]))
    return weights @ unit


def _of_columns(unit: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖V̄ᵀV̄ − I_E‖²_F + N − E and the matrix D in it."""
    length, width = unit.shape[2:]
    deviation = unit.transpose(-1, -2) @ unit
    deviation.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    surplus = length - width  # N − E
    if padding_mask is not None:
        surplus = surplus - padding_mask.sum(dim=1)[:, None]
    # Where no more than E rows are real the loss can be 0, and rounding may leave this just below.
    return (deviation.square().sum(dim=(-2, -1)) + surplus).clamp_min_(0.0), deviation


def _grad_of_columns(factor: Tensor, unit: Tensor, norm: Tensor, inverse: Tensor, deviation: Tensor) -> Tensor:
    grad_unit = unit @ (deviation * factor)
    # As a product of matrices: `vecdot` writes the products of all elements before it sums them.
    along = (unit[..., None, :] @ grad_unit[..., None])[..., 0].div_(norm)
    return grad_unit.mul_(inverse).addcmul_(unit, along, value=-1.0)

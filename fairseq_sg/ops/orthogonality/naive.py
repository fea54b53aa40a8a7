"""The orthogonality loss as its equation stands, with the N×N matrix V̄V̄ᵀ − I."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_sg.ops.precision import accumulation_dtype


def orthogonality_loss_naive(values: Tensor, padding_mask: Tensor | None, eps: float) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F of every sequence and head, (B, H); see `fairseq_sg.ops.orthogonality_loss`."""
    values = values.to(accumulation_dtype(values))
    if padding_mask is not None:
        values = values.masked_fill(padding_mask[:, None, :, None], 0.0)
    unit = values / (torch.linalg.vector_norm(values, dim=-1, keepdim=True) + eps)  # V̄
    identity = torch.eye(values.shape[2], dtype=values.dtype, device=values.device)
    if padding_mask is not None:
        identity = identity * ~padding_mask[:, None, None, :]
    return (unit @ unit.transpose(-1, -2) - identity).square().sum(dim=(-2, -1))

"""Orthogonality loss on attention values (Park & Kim, 2024, section 4.2)."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.ops.checks import check_floating, check_padding_mask, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.orthogonality.gram import orthogonality_loss_gram
from fairseq_sg.ops.orthogonality.naive import orthogonality_loss_naive
from fairseq_sg.ops.precision import autocast_disabled

declare("orthogonality_loss", {"naive": orthogonality_loss_naive, "gram": orthogonality_loss_gram}, default="gram")
REDUCTIONS = ("mean", "sum", "none")


def orthogonality_loss(
    values: Tensor,
    *,
    padding_mask: Tensor | None = None,
    eps: float = 1e-6,
    reduction: str = "mean",
    implementation: str = AUTO,
) -> Tensor:
    """‖V̄V̄ᵀ − I‖²_F over the real positions of every sequence and head, with V̄_n = V_n / (‖V_n‖₂ + eps).

    The loss of Park & Kim (2024, section 4.2), "Improving Systematic Generalization of Linear Transformer Using
    Normalization Layers and Orthogonality Loss Function": 0 when the values of a sequence are orthogonal. It is the
    plain square of the Frobenius norm, not divided by the length: n values of dimension E < n cannot all be orthogonal,
    and the least it can be is n²/E − n.

    It is computed in float32 (float64 for float64 values), also under ``torch.autocast``. Values at padding may be
    anything. They change neither the loss nor the gradient, which is 0 there. A backward pass with
    ``create_graph=True`` is refused with `RuntimeError` by all but the naive implementation.

    Args:
        values: (B, H, N, E), any floating dtype.
        padding_mask: (B, N), bool, True at padding. A sequence of padding alone has loss 0.
        eps: added to the norm of every value; a zero vector stays zero and has gradient 0.
        reduction: over the B × H sequences and heads: ``"mean"`` (sequences of padding alone count), ``"sum"`` or
            ``"none"``.
        implementation: ``"auto"``, ``"naive"`` or ``"gram"``, the smaller Gram matrix, which ``"auto"`` takes.

    Returns:
        A scalar, or (B, H) without reduction, in float32 (float64).

    Raises:
        TypeError: the values are not floating, or the mask not bool.
        ValueError: shapes do not fit, or there is no such reduction or implementation.
    """
    check_floating(values=values)
    if values.dim() != 4:
        raise ValueError(f"orthogonality_loss takes values (B, H, N, E), not {describe(values=values)}")
    check_padding_mask("padding_mask", padding_mask, values.shape[0], values.shape[2])
    if reduction not in REDUCTIONS:
        raise ValueError(f"orthogonality_loss has no reduction {reduction!r}; choose one of: {', '.join(REDUCTIONS)}")
    function = choose("orthogonality_loss", implementation, values)
    with autocast_disabled(values.device):
        loss = function(values, padding_mask, eps)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()

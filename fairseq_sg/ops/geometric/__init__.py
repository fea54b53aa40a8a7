"""Weights of geometric attention: the closest match takes most (Csordás et al., 2022, "The Neural Data Router")."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_sg.ops.checks import check_floating, check_padding_mask, describe
from fairseq_sg.ops.dispatch import AUTO, choose, declare
from fairseq_sg.ops.geometric.naive import geometric_attention_naive
from fairseq_sg.ops.geometric.scan import geometric_attention_scan
from fairseq_sg.ops.precision import autocast_disabled, to_accumulation_dtype
from fairseq_sg.ops.torch_attention import hidden_keys
from fairseq_sg.ops.triton_support import require_triton, why_not_triton

# The longest row for Triton: a program holds a whole row.
MOST_KEYS = 8192


def _in_torch(function: Callable[[Tensor, Tensor | None, int], Tensor]) -> Callable[..., Tensor]:
    """An implementation that takes one mask of the keys hidden besides the diagonal, and no half precision."""

    def run(logits: Tensor, key_padding_mask: Tensor | None, causal: bool, offset: int) -> Tensor:
        if logits.numel() == 0:
            return logits.clone()
        hidden = hidden_keys(*logits.shape[2:], key_padding_mask, causal, offset, logits.device)
        (full,) = to_accumulation_dtype(logits)
        return function(full, hidden, offset).to(logits.dtype)

    return run


def _naive(logits: Tensor, hidden: Tensor | None, offset: int) -> Tensor:
    diagonal = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device).tril_(offset).triu_(offset)
    hidden = diagonal if hidden is None else diagonal | hidden
    return geometric_attention_naive(logits.masked_fill(hidden, -math.inf), offset)


def _why_not_triton(logits: Tensor) -> str | None:
    if logits.shape[3] > MOST_KEYS:
        return f"rows have {logits.shape[3]} keys, and {MOST_KEYS} is the most"
    return why_not_triton(logits)


def _triton(logits: Tensor, key_padding_mask: Tensor | None, causal: bool, offset: int) -> Tensor:
    require_triton("geometric_attention", _why_not_triton(logits))
    from fairseq_sg.ops.geometric.triton import geometric_attention_triton

    return geometric_attention_triton(logits, key_padding_mask, causal, offset)


declare(
    "geometric_attention",
    {"naive": _in_torch(_naive), "scan": _in_torch(geometric_attention_scan), "triton": _triton},
    default="scan",
    others={"cuda": ("triton",)},
    sizes=("rows", "keys"),  # B·H·N and M
)


def geometric_attention(
    logits: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    offset: int = 0,
    implementation: str = AUTO,
) -> Tensor:
    """A_ij = P_ij Π_{k ∈ S_ij} (1 − P_ik), P = σ(logits): each query looks for its closest match.

    S_ij are the keys closer to i than j is. They are visited in the order i + 1, i − 1, i + 2, i − 2, …: of two at the
    same distance the one to the right is closer (Csordás, 2023, eq. 5.6 to 5.8). No query attends to itself: A_ii = 0,
    and P_ii stands in no product. Padding is never a match: A_ij = 0 and 1 − P_ij = 1 there.

    A_ij is the probability that j is the first match, so rows sum to at most 1, and to 0 where no key is visible.
    The causal form is this project's, for decoders: only j < i are candidates, in the order i − 1, i − 2, …; the row of
    position 0 is empty.

    Computed in float32 (float64 for float64 logits), also under ``torch.autocast``. Logits may be infinite; outputs and
    gradients stay finite. A backward pass with ``create_graph=True`` is refused with `RuntimeError` by all but the
    naive implementation.

    Args:
        logits: (B, H, N, M), any floating dtype. Logits on the diagonal, at padding and, if causal, at j > i, may be
            anything; they change nothing and have gradient 0.
        key_padding_mask: (B, M), bool, True at padding.
        causal: whether position i sees the keys 0 … i − 1 only.
        offset: the position of query 0 among the keys. Self-attention has N = M and offset 0; a step of incremental
            decoding has N = 1 and offset M − 1.
        implementation: ``"auto"``, ``"naive"``, ``"scan"`` or ``"triton"``.

    Returns:
        A (B, H, N, M), in the dtype of the logits.

    Raises:
        TypeError: the logits are not floating, or the mask not bool.
        ValueError: shapes do not fit, a query is not among the keys, there is no such implementation, or Triton was
            asked for and cannot run here.
    """
    check_floating(logits=logits)
    if logits.dim() != 4:
        raise ValueError(f"geometric_attention takes logits (B, H, N, M), not {describe(logits=logits)}")
    batch, _, queries, keys = logits.shape
    check_padding_mask("key_padding_mask", key_padding_mask, batch, keys)
    if not 0 <= offset <= keys - queries:
        raise ValueError(
            f"queries stand at the positions offset … offset + N - 1 of the keys 0 … M - 1: "
            f"offset {offset} does not fit {describe(logits=logits)}"
        )
    sizes = logits.shape[0] * logits.shape[1] * queries, keys
    function = choose("geometric_attention", implementation, logits, sizes, lambda: _why_not_triton(logits))
    with autocast_disabled(logits.device):
        return function(logits, key_padding_mask, causal, offset)

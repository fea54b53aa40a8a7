"""Operators: pure functions on tensors, batch first and heads second, without fairseq, modules or options.

An operator with several implementations has a folder. ``naive.py`` is the published equation, in any floating dtype
and without regard for cost, and the reference of all tests. Other files are faster ways to the same numbers in plain
torch, named after what they do: chunks, a shift, a scan, the smaller Gram matrix, blocks of rows. ``triton.py``, where
there is one, is for GPUs. The argument ``implementation`` of the operator chooses; see `fairseq_sg.ops.dispatch`.

``memory`` has the operators of a memory of cells, which have short names of their own: ``memory.write``.

Letters in shapes: B batch, H heads, N queries, M keys, D head dimension, F features of φ (`linear_attention`),
E dimension of one head's values, L relative distances. Masks are bool, (B, M), True at padding, as in fairseq.
"""

from fairseq_sg.ops import memory
from fairseq_sg.ops.cvmm import cvmm, cvmm_sorted, sort_selection
from fairseq_sg.ops.geometric import geometric_attention
from fairseq_sg.ops.linear_attention import linear_attention, linear_attention_read, linear_attention_state
from fairseq_sg.ops.masking import logistic_noise, masked_weight
from fairseq_sg.ops.orthogonality import orthogonality_loss
from fairseq_sg.ops.relative import relative_attention, relative_logits
from fairseq_sg.ops.spectral import spectral_multiply

__all__ = [
    "cvmm",
    "cvmm_sorted",
    "geometric_attention",
    "linear_attention",
    "linear_attention_read",
    "linear_attention_state",
    "logistic_noise",
    "masked_weight",
    "memory",
    "orthogonality_loss",
    "relative_attention",
    "relative_logits",
    "sort_selection",
    "spectral_multiply",
]

"""Operators: pure functions on tensors, batch first and heads second, without fairseq, modules or options.

Every operator has a folder of its own: ``naive.py`` is the published equation written down, in any floating dtype and
without regard for cost, and is what everything else is tested against; ``chunked.py``, ``scan.py`` or ``grouped.py`` is
the fast path in plain torch; ``triton.py``, where there is one, is for GPUs. Which one runs is the argument
``implementation`` of the operator; see `fairseq_sg.ops.dispatch`.

Letters in shapes: B batch, H heads, N queries, M keys, D head dimension, F features of φ (`linear_attention`),
E dimension of one head's values, L relative distances. Masks are bool, (B, M), True at padding, as in fairseq.
"""

from fairseq_sg.ops.cvmm import cvmm, cvmm_sorted, sort_selection
from fairseq_sg.ops.dispatch import force_implementation
from fairseq_sg.ops.geometric import geometric_attention
from fairseq_sg.ops.linear_attention import linear_attention, linear_attention_read, linear_attention_state
from fairseq_sg.ops.orthogonality import orthogonality_loss
from fairseq_sg.ops.relative import relative_attention, relative_logits

__all__ = [
    "cvmm",
    "cvmm_sorted",
    "force_implementation",
    "geometric_attention",
    "linear_attention",
    "linear_attention_read",
    "linear_attention_state",
    "orthogonality_loss",
    "relative_attention",
    "relative_logits",
    "sort_selection",
]

"""Bucketed relative bias of T5 (Raffel et al. 2020, section 2.1): a learned scalar a head and range of distances.

    q_i k_jᵀ/√d + b_{h, bucket(j − i)}

There are B buckets, and D is the maximum distance. Distances n below B/2 have a bucket each. Longer ones share the
others in logarithmic steps, B/2 + ⌊(B/2) ln(2n/B) / ln(2D/B)⌋; all from D on share the last. This is the decoder's
table, for n = i − j. The encoder gives half the buckets to keys at or before the query and half to those after it, each
half with this rule.

T5 learns one table in its first layer and uses it in all. Here every attention has a table, unless ``--depth shared``
makes the layers one. T5 does not scale its logits; here ``--attention-scale`` applies to the content term alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.position.base import AttentionPosition, register_position
from fairseq_sg.ops.precision import accurate


@dataclass
class T5Options:
    t5_buckets: int = field(
        default=32,
        metadata={
            "help": "number of buckets of distances, with --position t5; even, in an encoder a multiple of 4",
            "least": 1,
        },
    )
    t5_max_distance: int = field(
        default=128, metadata={"help": "distance from which on all share a bucket, with --position t5", "least": 1}
    )


@register_position("t5")
class T5Position(AttentionPosition):
    """Biases start as in T5's ports to PyTorch, N(0, 1/d_model).

    Args (besides those of :class:`AttentionPosition`):
        t5_buckets: B. t5_max_distance: D.

    Raises:
        UsageError: buckets that cannot be halved as above, or D within the buckets of single distances.
    """

    paper = "Raffel et al. 2020, 2.1"
    options = T5Options

    def __init__(self, dim: int, num_heads: int, *, causal: bool, t5_buckets: int = 32, t5_max_distance: int = 128):
        super().__init__(dim, num_heads, causal=causal)
        per_side = t5_buckets if causal else t5_buckets // 2
        if t5_buckets < 1 or t5_buckets % (2 if causal else 4):
            raise UsageError(
                f"--t5-buckets is {t5_buckets}: choose a positive multiple of 2 in the decoder, of 4 in the encoder"
            )
        if t5_max_distance <= per_side // 2:
            raise UsageError(
                f"--t5-max-distance is {t5_max_distance}, and with --t5-buckets {t5_buckets} distances up to "
                f"{per_side // 2 - 1} have a bucket each: choose more than {per_side // 2}"
            )
        self.table = nn.Parameter(torch.empty(t5_buckets, num_heads).normal_(0.0, (dim * num_heads) ** -0.5))
        self.register_buffer("buckets", torch.tensor(buckets(per_side, t5_max_distance)), persistent=False)

    def bias(self, queries: int, keys: int, offset: int) -> Tensor:
        device = self.table.device
        distance = torch.arange(keys, device=device) - torch.arange(offset, offset + queries, device=device)[:, None]
        behind = -distance if self.causal else distance.abs()
        bucket = self.buckets[behind.clamp(min=0, max=len(self.buckets) - 1)]
        if not self.causal:
            bucket = bucket + (distance > 0) * (len(self.table) // 2)
        # Thousands of pairs share a bucket: their gradients are summed in no less than single precision.
        return nn.functional.embedding(bucket, accurate(self.table)).permute(2, 0, 1)


def buckets(count: int, max_distance: int) -> list[int]:
    """The buckets, of ``count``, of the distances 0 … ``max_distance`` to one side."""
    exact = count // 2
    steps = count - exact
    found = list(range(exact))
    k = 0
    for n in range(exact, max_distance + 1):
        # k = ⌊steps · ln(n/exact) / ln(max_distance/exact)⌋, at most steps − 1. In integers: with logarithms, rounding
        # would decide at the bounds.
        while k < steps - 1 and n**steps * exact ** (k + 1) >= max_distance ** (k + 1) * exact**steps:
            k += 1
        found.append(exact + k)
    return found

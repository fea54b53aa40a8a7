"""Self-attention of which each position sees those near it: ``--attention-window``, ``--encoder-attention-window``.

With a window W, a decoder's position i sees the positions i − W + 1 to i, an encoder's those less than W away on both
sides. Many queries are computed in blocks, in time and memory O(N·W), and a decoding state keeps O(W) keys and Values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_sg import ranges
from fairseq_sg.modules.attention.base import Attention, AttentionOptions
from fairseq_sg.modules.attention.cache import append_to_cache, cached, keep_last
from fairseq_sg.modules.attention.context import Context, State


@dataclass
class WindowOptions(AttentionOptions):
    attention_window: int = field(
        default=0,
        metadata={
            "help": "W: self-attention of a decoder sees only the last W positions, its own included, so that the "
            "decoding state has a constant size (0: all)",
            "least": 0,
        },
    )
    encoder_attention_window: int = field(
        default=0,
        metadata={
            "help": "W: self-attention of an encoder sees the positions less than W away, on both sides (0: all)",
            "least": 0,
        },
    )


class WindowedAttention(Attention):
    """The base of kinds with a window; a kind writes ``outputs_of`` in place of ``attend`` and ``extend``.

    Args (besides those of :class:`Attention`):
        attention_window: W of a decoder: key j is seen from positions i with j ≤ i < j + W; 0 for all i ≥ j. More than
            max(W, 64) queries are computed in blocks, in time and memory O(N·W).
        encoder_attention_window: W of an encoder: key j is seen from positions i with |i − j| < W; 0 for all.
    """

    options = WindowOptions
    remembers = True
    #: The least number of queries that are computed at once under a window.
    least_block: ClassVar[int] = 64
    #: Whether outputs need a sentence's padding before the keys that a block of queries sees.
    counts_padding: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_window: int = 0,
        encoder_attention_window: int = 0,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        given = {"attention_window": attention_window, "encoder_attention_window": encoder_attention_window}
        ranges.check(WindowOptions, given)
        self.window = {"decoder": attention_window, "encoder": encoder_attention_window}.get(self.role, 0)

    def outputs_of(
        self, q: Tensor, k: Tensor, v: Tensor, offset: int, context: Context, **x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, H, N, E) of queries from the keys in their window, and the weights (B, H, N, M) if asked for.

        Args:
            offset: the position of the first query among the keys.
            context: its padding and positions are those of the keys; ``first`` is the position of the first key.
        """
        raise NotImplementedError

    def attend(self, q, k, v, context, **x):
        offset = self.offset(q, k)
        block = max(self.window, self.least_block)
        whole = context.return_weights or self.counts_padding and context.key_padding_mask is not None
        if whole or not self.window or q.size(2) <= block:
            return self.outputs_of(q, k, v, offset, context, **x)
        outputs = [
            self._block(q, k, v, offset, context, start, start + block, **x) for start in range(0, q.size(2), block)
        ]
        return torch.cat(outputs, dim=2), None

    def _block(self, q, k, v, offset: int, context: Context, start: int, end: int, **x: Tensor) -> Tensor:
        """The outputs of the queries ``start`` to ``end``, from the keys that they may see.

        These are W − 1 before the first query, the queries' own and, in an encoder, W − 1 after the last. All blocks
        take time and memory O(N·W).
        """
        q = q[:, :, start:end]
        first, last = max(offset + start - self.window + 1, 0), offset + start + q.size(2)
        last += 0 if self.causal else self.window - 1
        k, v = k[:, :, first:last], v[:, :, first:last]
        positions = None if context.positions is None else context.positions[first:last]
        padding = None if context.key_padding_mask is None else context.key_padding_mask[:, first:last]
        seen = replace(context, key_padding_mask=padding, positions=positions, first=context.first + first)
        x = {name: of_queries[start:end] for name, of_queries in x.items()}
        return self.outputs_of(q, k, v, offset + start - first, seen, **x)[0]

    def extend(self, q, k, v, state, context, **x):
        dropped, kept = positions_before(state)
        cache = append_to_cache(state, k, v, context.key_padding_mask)
        k, v, key_padding_mask = cached(cache)
        positions = None if context.positions is None else context.positions[dropped:]
        seen = replace(context, key_padding_mask=key_padding_mask, positions=positions, first=context.first + dropped)
        out, _ = self.outputs_of(q, k, v, kept, seen, **x)
        return out, keep_last(cache, self.window) if self.window else cache


def positions_before(state: State | None) -> tuple[int, int]:
    """The positions that a decoding state has dropped, and those that it keeps."""
    return (0, 0) if state is None else (state["dropped"], state["length"])

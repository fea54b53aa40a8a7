"""The data that one pass hands to its attentions, beside hidden states, and the data that they return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fairseq_sg.modules.cpu.packing import Packing

#: The decoding state of one attention: tensors, batch first, and numbers that hold for all sentences.
State = dict[str, Any]


class Values(NamedTuple):
    """The projected Values of one application of an attention.

    Attributes:
        values: (B, H, M, E). Where padding was left out of the computation, its Values are 0.
        padding_mask: (B, M) bool, True at padding; None without padding.
    """

    values: Tensor
    padding_mask: Tensor | None


class AttentionOutput(NamedTuple):
    """Result of ``Attention.forward``.

    Attributes:
        output: (N, B, C).
        weights: (B, H, N, M), the matrix of which the heads' outputs are products; None unless ``return_weights``.
        values: the Values; None unless ``return_values``.
    """

    output: Tensor
    weights: Tensor | None
    values: Values | None


@dataclass(frozen=True)
class Context:
    """Everything that an attention needs beside its input. The encoder or decoder makes it once a pass.

    Layers hand it on unopened; a stack puts in the state and the memory of each step (``for_step``).

    Attributes:
        padding_mask: (B, M) bool, True where a key is padding. In decoding, of the new positions only.
        key_padding_mask: (B, M) bool, True at keys that queries must not see. None where causality hides all padding.
        positions: (M,) int64, positions of the keys where they are not 0, 1, 2, …; only for kinds that take
            ``indices``. In decoding, of the whole prefix.
        coordinates: (M, p), of the points of a grid; only for kinds that were built with as many ``columns``.
        memory: (M', B, C), the layer's input at the positions before the queries; keys and values come from both.
            Only for causal kinds that ``remember``, without ``key_padding_mask``, ``positions`` and ``state``.
        first: position of the first key (of ``memory``, if there is one) in its stream.
        state: decoding states by attention. With it, the queries are the new positions only.
        return_weights, return_values: whether the output has weights and Values; neither in decoding.
        packing, key_packing: the packing of the hidden states of queries and keys (``modules.cpu.packing``), if any.
        projected: "k" and "v" per head, (B, H, M, D) and (B, H, M, E), of an attention that is applied several times to
            one source; the first application puts them in.
        source, cross: in a decoder, the encoder's output (M, B, C) and the context of cross-attention to it.
    """

    padding_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    positions: Tensor | None = None
    coordinates: Tensor | None = None
    memory: Tensor | None = None
    first: int = 0
    state: dict[str, State] | None = None
    return_weights: bool = False
    return_values: bool = False
    packing: Packing | None = None
    key_packing: Packing | None = None
    projected: dict[str, Tensor] | None = None
    source: Tensor | None = None
    cross: Context | None = None

    @property
    def hidden_padding(self) -> Tensor | None:
        """(N, B) bool, the padding in the hidden state of self-attention's layer; None where it holds none."""
        if self.padding_mask is None or self.packing is not None:
            return None
        return self.padding_mask.transpose(0, 1)

    def for_step(
        self,
        *,
        state: dict[str, State] | None,
        memory: Tensor | None = None,
        return_weights: bool = True,
        projected: dict[str, Tensor] | None = None,
    ) -> Context:
        """The context of one step of a stack; without weights unless they are wanted in the pass and in this step.

        ``projected`` is that of cross-attention.
        """
        cross = self.cross
        if cross is not None:
            cross = replace(cross.for_step(state=state, return_weights=return_weights), projected=projected)
        return replace(
            self, state=state, memory=memory, return_weights=self.return_weights and return_weights, cross=cross
        )

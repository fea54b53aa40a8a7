"""The base of all updates: how a layer makes its new hidden state after its attention sublayers.

h  the state at the layer's input,  a  the state after the attention sublayers,  h' = update(a, h)
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.feedforward import FeedForward
from fairseq_sg.modules.norm import LayerNorm, MakeNorm
from fairseq_sg.registry import Mechanism, Registry

UPDATE_REGISTRY = Registry("update", "--encoder-update, --decoder-update")
register_update = UPDATE_REGISTRY.register


class Residual(nn.Module):
    """The residual connection, dropout and norm around one sublayer; LN is the model's ``--norm``.

    post-norm (default, as the references):  x ← LN(x + Drop(Sublayer(x)))
    pre-norm (--pre-norm):                   x ← x + Drop(Sublayer(LN(x)))
    """

    def __init__(self, dim: int, dropout: float, pre_norm: bool, norm: MakeNorm = LayerNorm):
        super().__init__()
        self.norm = norm(dim)
        self.dropout = Dropout(dropout)
        self.pre_norm = pre_norm

    def before(self, x: Tensor) -> Tensor:
        """The sublayer's input."""
        return self.norm(x) if self.pre_norm else x

    def after(self, x: Tensor, update: Tensor) -> Tensor:
        """The new state from the old one and the sublayer's output."""
        x = self.dropout.add_to(x, update)
        return x if self.pre_norm else self.norm(x)


class Update(Mechanism, nn.Module):
    """Base class; a subclass adds its own options as further keyword arguments.

    Args:
        dim: C, the width of the hidden state.
        ffn: the feedforward layer of the update.
        dropout: dropout of a residual connection.
        pre_norm: the norm is before the sublayer instead of after it.
        norm: makes the norm of states of a width.
    """

    def __init__(
        self,
        dim: int,
        ffn: FeedForward,
        *,
        dropout: float = 0.0,
        pre_norm: bool = False,
        norm: MakeNorm = LayerNorm,
    ):
        super().__init__()
        self.ffn = ffn

    def forward(self, a: Tensor, h: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """a, h (N, B, C), padding_mask (N, B) or None -> h' (N, B, C), losses by name."""
        raise NotImplementedError

"""What all updates share: how a layer makes its new hidden state, once its attentions have worked.

h  the state at the layer's input,  a  the state after the attention sublayers,  h' = update(a, h)
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fairseq_sg.modules.dropout import Dropout
from fairseq_sg.registry import Registry

UPDATE_REGISTRY = Registry("update", "--encoder-update, --decoder-update")
register_update = UPDATE_REGISTRY.register


class Residual(nn.Module):
    """The residual connection, dropout and layer norm around one sublayer (LN's ε 1e-5).

    post-norm (default, as the references):  x ← LN(x + Drop(Sublayer(x)))
    pre-norm (--pre-norm):                   x ← x + Drop(Sublayer(LN(x)))
    """

    def __init__(self, dim: int, dropout: float, pre_norm: bool):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)
        self.pre_norm = pre_norm

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre_norm else x

    def after(self, x: Tensor, update: Tensor) -> Tensor:
        x = self.dropout.add_to(x, update)
        return x if self.pre_norm else self.norm(x)


class Update(nn.Module):
    """Base class.

    Args:
        config: the model's configuration, with an attribute for each option of the update.
        ffn: name of the feedforward layer that it is built with.
        side: ``encoder`` or ``decoder``.
    """

    registered_name: ClassVar[str]
    #: Dataclass of the update's own options.
    options: ClassVar[type | None] = None

    def __init__(self, config: Any, ffn: str, side: str):
        super().__init__()

    def forward(self, a: Tensor, h: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """a, h (N, B, C), padding_mask (N, B) or None -> h' (N, B, C), losses by name."""
        raise NotImplementedError

"""What all feedforward layers share: (…, d_model) -> (…, d_model), and losses as return values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fairseq_sg.modules.losses import Statistic


@dataclass
class FeedForwardOptions:
    """Options that every feedforward layer has; a kind adds its own in a dataclass of its own."""

    activation_dropout: float | None = field(
        default=None,
        metadata={
            "help": "dropout after the feedforward layer's activation (default: --dropout)",
            "least": 0,
            "most": 1,
        },
    )


class FeedForward(nn.Module):
    """Base class; ``dim`` is d_model, ``ffn_dim`` the hidden width."""

    registered_name: ClassVar[str]
    #: Dataclass of the kind's own options: its fields are command-line options and keyword arguments of the class.
    options: ClassVar[type | None] = None
    #: Whether the start depends on the number of layers: then the class takes ``layers``, how many layers' outputs add
    #: up in the residual stream. That is the number of layers (of steps, where one layer is shared) in a pre-norm
    #: model; in a post-norm one each output is normalized, and it is 1.
    needs_layers: ClassVar[bool] = False

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.dim = dim
        self.ffn_dim = ffn_dim

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, return_losses: bool = False
    ) -> Tensor | tuple[Tensor, dict[str, Tensor | Statistic]]:
        """x (…, d_model), padding_mask (…) bool -> y like x.

        With ``return_losses``, y and a dict from name to loss (a scalar) or statistic.
        """
        raise NotImplementedError

    def activity(self, x: Tensor) -> dict[str, Tensor]:
        """What the layer does with x (…, d_model), for the analysis; nothing unless a kind says more.

        ``active``: how many hidden units of a token are not 0, (…,) int64. ``experts``, ``weights``: the experts that a
        token selects and the weights of their outputs, (…, K) int64 and floating.
        """
        return {}

    def rescale_output(self, gain: float) -> None:
        """Multiplies the start of the last weight matrix, where a kind's initialization is of the kind that has a
        gain.
        """

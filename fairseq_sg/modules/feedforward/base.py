"""What all feedforward layers share: (…, d_model) -> (…, d_model), and losses as return values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from torch import Tensor, nn


@dataclass
class FeedForwardOptions:
    """Options that every feedforward layer has; a kind adds its own in a dataclass of its own."""

    activation_dropout: Optional[float] = field(
        default=None, metadata={"help": "dropout after the feedforward layer's activation (default: --dropout)"}
    )


class FeedForward(nn.Module):
    """Base class; ``dim`` is d_model, ``ffn_dim`` the hidden width."""

    registered_name: ClassVar[str]
    #: Dataclass of the kind's own options: its fields are command-line options and keyword arguments of the class.
    options: ClassVar[Optional[type]] = None

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.dim = dim
        self.ffn_dim = ffn_dim

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None, return_losses: bool = False):
        """x (…, d_model), padding_mask (…) bool -> y like x; with ``return_losses``, (y, dict from name to scalar)."""
        raise NotImplementedError

    def rescale_output(self, gain: float) -> None:
        """Multiplies the start of the last weight matrix, where a kind's initialization is of the kind that has a gain."""

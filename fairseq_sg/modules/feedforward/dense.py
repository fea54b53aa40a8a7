"""The feedforward layer of the transformer (Vaswani et al. 2017, eq. 2): W₂ · Dropout(ReLU(W₁ x + b₁)) + b₂."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.feedforward.base import FeedForward, FeedForwardOptions
from fairseq_sg.modules.feedforward.registry import register_feedforward

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


@dataclass
class DenseOptions(FeedForwardOptions):
    ffn_init: str = field(
        default="reference",
        metadata={
            "help": "initialization of the dense feedforward layer: 'reference' (Glorot uniform, W1 with gain √2, biases PyTorch's, "
            "as the thesis's released code) or 'torch' (PyTorch's default throughout)"
        },
    )
    ffn_activation: str = field(
        default="relu", metadata={"help": "activation of the dense feedforward layer: relu, or gelu (as in CTL++)"}
    )


@register_feedforward("dense")
class DenseFeedForward(FeedForward):
    """Two matrices with an activation between.

    Args:
        dim, ffn_dim: d_model and the hidden width.
        activation_dropout: dropout after the activation.
        ffn_init: ``reference`` or ``torch``. ffn_activation: ``relu`` or ``gelu``. Another value is a ValueError.
    """

    options = DenseOptions

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        activation_dropout: Optional[float] = 0.0,
        ffn_init: str = "reference",
        ffn_activation: str = "relu",
    ):
        super().__init__(dim, ffn_dim)
        if ffn_activation not in ACTIVATIONS:
            raise UsageError(f"--ffn-activation is {ffn_activation!r}: choose from {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[ffn_activation]
        self.init = ffn_init
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.dropout = nn.Dropout(activation_dropout or 0.0)
        if ffn_init == "reference":
            nn.init.xavier_uniform_(self.fc1.weight, gain=math.sqrt(2.0))
            nn.init.xavier_uniform_(self.fc2.weight)
        elif ffn_init != "torch":
            raise UsageError(f"--ffn-init is {ffn_init!r}: choose from reference, torch")

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None, return_losses: bool = False):
        y = self.fc2(self.dropout(self.activation(self.fc1(x))))
        return (y, {}) if return_losses else y

    def rescale_output(self, gain: float) -> None:
        if self.init == "reference":
            with torch.no_grad():
                self.fc2.weight.mul_(gain)

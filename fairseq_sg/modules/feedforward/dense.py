"""The feedforward layer of the transformer (Vaswani et al. 2017, eq. 2): W₂ · Dropout(ReLU(W₁ x + b₁)) + b₂."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.cpu.linear import Linear
from fairseq_sg.modules.feedforward.base import FeedForward, register_feedforward

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}
#: Standard deviation of a standard normal variable that is cut off at ±2.
CUT_OFF_STD = 0.8796256610342398


@dataclass
class DenseOptions:
    activation_dropout: float | None = field(
        default=None,
        metadata={
            "help": "dropout after the feedforward layer's activation (default: --dropout)",
            "least": 0,
            "most": 1,
        },
    )
    ffn_init: str = field(
        default="reference",
        metadata={
            "help": "initialization of dense and topk feedforward layers: 'reference' (Glorot uniform, W1 with gain "
            "√2, biases PyTorch's, as the thesis's released code), 'scaled' (normal, cut off at two standard "
            "deviations, √(2/(fan-in · layers)), biases 0, as its language models) or 'torch' (PyTorch's default "
            "throughout)",
            "choices": ("reference", "scaled", "torch"),
        },
    )
    ffn_activation: str = field(
        default="relu",
        metadata={
            "help": "activation of dense and topk feedforward layers (CTL++ has gelu)",
            "choices": tuple(ACTIVATIONS),
        },
    )


def scaled_(linear: nn.Linear, layers: int) -> None:
    """Starts a linear map normal, cut off at two standard deviations of √(2/(fan-in · layers)), with biases 0."""
    std = math.sqrt(2 / (linear.in_features * layers)) / CUT_OFF_STD
    nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


@register_feedforward("dense")
class DenseFeedForward(FeedForward):
    """Two matrices with an activation between.

    Args:
        dim, ffn_dim: d_model and the hidden width.
        layers: for ``ffn_init`` ``scaled``; see `FeedForward.needs_layers`.
        activation_dropout: dropout after the activation; None for none.
        ffn_init: ``reference``, ``scaled`` or ``torch``. ffn_activation: ``relu`` or ``gelu``. Another value is a
            UsageError.
    """

    paper = "Vaswani et al. 2017, eq. 2"
    options = DenseOptions
    needs_layers = True

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        layers: int = 1,
        activation_dropout: float | None = None,
        ffn_init: str = "reference",
        ffn_activation: str = "relu",
    ):
        super().__init__(dim, ffn_dim)
        ranges.check(DenseOptions, {"ffn_init": ffn_init, "ffn_activation": ffn_activation})
        self.activation = ACTIVATIONS[ffn_activation]
        self.init = ffn_init
        self.fc1 = Linear(dim, ffn_dim)
        self.fc2 = Linear(ffn_dim, dim)
        self.dropout = Dropout(activation_dropout or 0.0)
        if ffn_init == "reference":
            nn.init.xavier_uniform_(self.fc1.weight, gain=math.sqrt(2.0))
            nn.init.xavier_uniform_(self.fc2.weight)
        elif ffn_init == "scaled":
            for linear in (self.fc1, self.fc2):
                scaled_(linear, layers)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, return_losses: bool = False):
        y = self.fc2(self.hidden(x))
        return (y, {}) if return_losses else y

    def hidden(self, x: Tensor) -> Tensor:
        """x (…, d_model) -> u (…, ffn_dim), after dropout."""
        x = self.fc1(x)
        return self.dropout.of_relu(x) if self.activation is F.relu else self.dropout(self.activation(x))

    def activity(self, x: Tensor) -> dict[str, Tensor]:
        return {"active": self.hidden(x).count_nonzero(-1)}

    def rescale_output(self, gain: float) -> None:
        if self.init == "reference":
            with torch.no_grad():
                self.fc2.weight.mul_(gain)

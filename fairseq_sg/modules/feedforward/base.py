"""The base of all feedforward layers: (…, d_model) -> (…, d_model), and losses as return values."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fairseq_sg.modules.losses import Statistic
from fairseq_sg.registry import Mechanism, Registry

FEEDFORWARD_REGISTRY = Registry("feedforward layer", "--encoder-ffn, --decoder-ffn")
register_feedforward = FEEDFORWARD_REGISTRY.register


class FeedForward(Mechanism, nn.Module):
    """Base class; ``dim`` is d_model, ``ffn_dim`` the hidden width."""

    #: Whether the initialization depends on the number of layers: then the class takes ``layers``, the number of
    #: outputs that add up in the residual stream. In a pre-norm model that is the number of layers (or of steps of a
    #: shared layer), those of every loop counted. In a post-norm model each output is normalized, and it is 1.
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
        """What the layer computes for x (…, d_model), for the analysis; {} unless a kind overrides it.

        ``active``: how many hidden units of a token are not 0, (…,) int64. ``experts``, ``weights``: the experts that a
        token selects and the weights of their outputs, (…, K) int64 and floating.
        """
        return {}

    def rescale_output(self, gain: float) -> None:
        """Multiplies the initial values of the last weight matrix by ``gain``; nothing where a kind's start has no
        gain.
        """

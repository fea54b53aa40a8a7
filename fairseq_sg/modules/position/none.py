"""No positions: the attention brings its own, or a causal mask is all there is ("NoPE", Kazemnejad et al. 2023)."""

from __future__ import annotations

from torch import Tensor

from fairseq_sg.modules.position.base import EmbeddedPosition, register_position


@register_position("none")
class NoPosition(EmbeddedPosition):
    """Adds nothing."""

    paper = "Kazemnejad et al. 2023"
    gives = "nothing"

    def forward(self, positions: Tensor, length: int) -> None:
        return None

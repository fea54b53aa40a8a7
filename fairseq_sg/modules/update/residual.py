"""The transformer's update (Vaswani et al. 2017): a feedforward sublayer in a residual connection.

h' = LN(a + FFN(a))
"""

from __future__ import annotations

from fairseq_sg.modules.norm import LayerNorm
from fairseq_sg.modules.update.base import Residual, Update, register_update


@register_update("residual")
class ResidualUpdate(Update):
    """Post-norm, or pre-norm: h' = a + FFN(LN(a))."""

    paper = "Vaswani et al. 2017"

    def __init__(self, dim, ffn, *, dropout=0.0, pre_norm=False, norm=LayerNorm):
        super().__init__(dim, ffn)
        self.residual = Residual(dim, dropout, pre_norm, norm)

    def forward(self, a, h, padding_mask):
        update, losses = self.ffn(self.residual.before(a), padding_mask=padding_mask, return_losses=True)
        return self.residual.after(a, update), losses

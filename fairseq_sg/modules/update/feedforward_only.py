"""An update that keeps the attention's output out of the residual stream (code of Laptev 2024).

    a  = h + Drop(Attention(LN(h)))                          the attention sublayers, pre-norm
    h' = h + Drop(FFN(LN(a)))

The usual pre-norm layer has h' = a + Drop(FFN(LN(a))). Here only the feedforward layer reads what attention found.
"""

from __future__ import annotations

from fairseq_sg.errors import UsageError
from fairseq_sg.modules.norm import LayerNorm, NoNorm
from fairseq_sg.modules.update.base import Residual, Update, register_update


@register_update("feedforward_only")
class FeedForwardOnlyUpdate(Update):
    """See the module's docstring.

    Raises:
        UsageError: norms that come after the sublayers.
    """

    paper = "Laptev 2024, code"

    def __init__(self, dim, ffn, *, dropout=0.0, pre_norm=False, norm=LayerNorm):
        super().__init__(dim, ffn)
        self.residual = Residual(dim, dropout, pre_norm, norm)
        if not pre_norm and not isinstance(self.residual.norm, NoNorm):
            raise UsageError("feedforward_only (--encoder-update, --decoder-update) is pre-norm: add --pre-norm")

    def forward(self, a, h, padding_mask):
        update, losses = self.ffn(self.residual.before(a), padding_mask=padding_mask, return_losses=True)
        return self.residual.after(h, update), losses

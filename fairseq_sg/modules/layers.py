"""Encoder and decoder layers: attention sublayers in residual connections, then an update built with a feedforward
layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fairseq_sg.modules.attention import Attention, build_attention
from fairseq_sg.modules.attention.base import Projected
from fairseq_sg.modules.compilation import Compilable
from fairseq_sg.modules.losses import OverRealPositions, ValueLoss
from fairseq_sg.modules.packing import Packing
from fairseq_sg.modules.update import Residual, build_update

LayerOutput = tuple[Tensor, Tensor | None, dict[str, Tensor]]


class TransformerLayer(Compilable):
    """What encoder and decoder layers share: attention in residuals, an update, losses on Values and from the
    update.
    """

    def _attend(self, attention, x, source, value_loss: ValueLoss | None, losses: dict[str, Tensor], **kwargs):
        out = attention(x, source, source, value_loss=value_loss, **kwargs)
        if value_loss is not None:
            out, weights, losses[value_loss.name] = out
            return out, weights
        return out

    def _update(
        self,
        a: Tensor,
        h: Tensor,
        padding_mask: Tensor | None,
        packing: Packing | None,
        losses: dict[str, Tensor],
    ) -> Tensor:
        mask = None if padding_mask is None or packing is not None else padding_mask.transpose(0, 1)
        x, emitted = self.update(a, h, mask)
        losses.update(emitted)
        return x


class EncoderLayer(TransformerLayer):
    """Self-attention, then the update.

    Args:
        config: the model's configuration (see ``build_attention``, ``build_update``).
        attention, ffn, update: names of the mechanisms.
    """

    def __init__(self, config: Any, attention: str, ffn: str, update: str = "residual"):
        super().__init__()
        dim, dropout, pre_norm = config.encoder_embed_dim, config.dropout, config.pre_norm
        self.self_attn = build_attention(attention, config, "encoder")
        self.self_attn_residual = Residual(dim, dropout, pre_norm)
        self.update = build_update(update, config, ffn, "encoder")

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        incremental_state: None = None,
        need_weights: bool = False,
        value_loss: ValueLoss | None = None,
        positions: Tensor | None = None,
        packing: Packing | None = None,
    ) -> LayerOutput:
        """x (N, B, C), padding_mask (B, N) -> x, self-attention weights (B, N, N) or None, losses by name.

        ``positions`` (N,) int64 are the positions of x for attentions that take indices. With a ``packing``, x is
        packed before and after, (R, 1, C).
        """
        losses: dict[str, Tensor] = {}
        update, weights = self._attend(
            self.self_attn,
            self.self_attn_residual.before(x),
            None,
            value_loss,
            losses,
            key_padding_mask=padding_mask,
            need_weights=need_weights,
            positions=positions,
            packing=packing,
            key_packing=packing,
        )
        a = self.self_attn_residual.after(x, update)
        return self._update(a, x, padding_mask, packing, losses), weights, losses


class DecoderLayer(TransformerLayer):
    """Causal self-attention, cross-attention to the encoder's output, the update.

    Args:
        config: the model's configuration (see ``build_attention``, ``build_update``).
        attention, cross_attention, ffn, update: names of the mechanisms; ``cross_attention`` None leaves it out (a
            language model).
    """

    def __init__(self, config: Any, attention: str, cross_attention: str | None, ffn: str, update: str = "residual"):
        super().__init__()
        dim, dropout, pre_norm = config.decoder_embed_dim, config.dropout, config.pre_norm
        self.self_attn = build_attention(attention, config, "decoder")
        self.self_attn_residual = Residual(dim, dropout, pre_norm)
        self.cross_attn = None
        if cross_attention is not None:
            self.cross_attn = build_attention(cross_attention, config, "cross")
            self.cross_attn_residual = Residual(dim, dropout, pre_norm)
        self.update = build_update(update, config, ffn, "decoder")

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        self_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict] | None = None,
        need_weights: bool = False,
        value_loss: ValueLoss | None = None,
        cross_value_loss: ValueLoss | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        first: int = 0,
        packing: Packing | None = None,
        encoder_packing: Packing | None = None,
        encoder_projected: dict[Attention, Projected] | None = None,
    ) -> LayerOutput:
        """One layer of the decoder.

        Args:
            x: (N, B, C). encoder_out: (M, B, C). encoder_padding_mask: (B, M).
            padding_mask: (B, N), where x is padding, for the losses and the feedforward layer.
            self_padding_mask: (B, N), what self-attention must not see, None where causality hides all padding already.
            incremental_state: the decoding states of this step of the stack.
            positions: int64, the positions of the whole prefix, for attentions that take indices.
            memory: (M, B, C), the layer's input at the M positions before x, which self-attention sees too.
            first: the position of the first of memory, or without it of x, in its stream.
            packing: of x, if it is packed, (R, 1, C): then it is so in the output too. Not with memory or decoding.
            encoder_packing: of encoder_out, if that is packed.
            encoder_projected: the keys and values that cross-attentions have made of encoder_out in this pass (see
                ``Attention.forward``).

        Returns:
            x, cross-attention weights (B, N, M) or None, losses by name.
        """
        losses: dict[str, Tensor] = {}
        update, _ = self._attend(
            self.self_attn,
            self.self_attn_residual.before(x),
            None,
            None if value_loss is None else OverRealPositions(value_loss, padding_mask),
            losses,
            key_padding_mask=self_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            positions=positions,
            memory=None if memory is None else self.self_attn_residual.before(memory),
            first=first,
            packing=packing,
            key_packing=packing,
        )
        a = self.self_attn_residual.after(x, update)
        weights = None
        if self.cross_attn is not None:
            update, weights = self._attend(
                self.cross_attn,
                self.cross_attn_residual.before(a),
                encoder_out,
                cross_value_loss,
                losses,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                need_weights=need_weights,
                packing=packing,
                key_packing=encoder_packing,
                projected=encoder_projected,
            )
            a = self.cross_attn_residual.after(a, update)
        return self._update(a, x, padding_mask, packing, losses), weights, losses

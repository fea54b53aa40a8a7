"""Encoder and decoder layers: attention sublayers in residual connections, then an update with a feedforward layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fairseq_sg.modules.attention import Context, Values, build_attention
from fairseq_sg.modules.compilation import Compilable
from fairseq_sg.modules.norm import norm_of
from fairseq_sg.modules.update import Residual, build_update


class LayerOutput(NamedTuple):
    """Output of one layer.

    Attributes:
        x: (N, B, C), or packed as the input.
        weights: (B, N, M), mean over the heads, of the encoder's self-attention or the decoder's cross-attention.
        values: the Values by role, if the context asks for them.
        losses: scalar losses, and statistics, by name.
    """

    x: Tensor
    weights: Tensor | None
    values: dict[str, Values]
    losses: dict[str, Tensor]


class EncoderLayer(Compilable):
    """Self-attention, then the update.

    Args:
        config: the model's configuration (see ``build_attention``, ``build_update``).
        attention, ffn, update: names of the mechanisms.
    """

    def __init__(self, config: Any, attention: str, ffn: str, update: str = "residual"):
        super().__init__()
        shell = config.encoder_embed_dim, config.attention_residual_dropout, config.pre_norm, norm_of(config)
        self.self_attn = build_attention(attention, config, "encoder")
        self.self_attn_residual = Residual(*shell)
        self.update = build_update(update, config, ffn, "encoder")

    def forward(self, x: Tensor, context: Context = Context()) -> LayerOutput:
        """x (N, B, C), or packed."""
        attended = self.self_attn(self.self_attn_residual.before(x), None, context)
        a = self.self_attn_residual.after(x, attended.output)
        y, losses = self.update(a, x, context.hidden_padding)
        values = {} if attended.values is None else {"encoder": attended.values}
        return LayerOutput(y, mean_of_heads(attended.weights), values, losses)


class DecoderLayer(Compilable):
    """Causal self-attention, cross-attention to the encoder's output, the update.

    Args:
        config: the model's configuration (see ``build_attention``, ``build_update``).
        attention, cross_attention, ffn, update: names of the mechanisms; ``cross_attention`` None leaves it out (a
            language model).
    """

    def __init__(self, config: Any, attention: str, cross_attention: str | None, ffn: str, update: str = "residual"):
        super().__init__()
        shell = config.decoder_embed_dim, config.attention_residual_dropout, config.pre_norm, norm_of(config)
        self.self_attn = build_attention(attention, config, "decoder")
        self.self_attn_residual = Residual(*shell)
        self.cross_attn = None
        if cross_attention is not None:
            self.cross_attn = build_attention(cross_attention, config, "cross")
            self.cross_attn_residual = Residual(*shell)
        self.update = build_update(update, config, ffn, "decoder")

    def forward(self, x: Tensor, context: Context = Context()) -> LayerOutput:
        """x (N, B, C), or packed; the source is in the context."""
        if context.memory is not None:
            context = replace(context, memory=self.self_attn_residual.before(context.memory))
        attended = self.self_attn(self.self_attn_residual.before(x), None, context)
        a = self.self_attn_residual.after(x, attended.output)
        values, weights = {"decoder": attended.values}, None
        if self.cross_attn is not None:
            attended = self.cross_attn(self.cross_attn_residual.before(a), context.source, context.cross)
            a = self.cross_attn_residual.after(a, attended.output)
            values["cross"], weights = attended.values, mean_of_heads(attended.weights)
        y, losses = self.update(a, x, context.hidden_padding)
        return LayerOutput(y, weights, {role: v for role, v in values.items() if v is not None}, losses)


def mean_of_heads(weights: Tensor | None) -> Tensor | None:
    """weights (B, H, N, M) -> (B, N, M)."""
    return None if weights is None else weights.mean(1)

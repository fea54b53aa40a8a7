"""The layers of one side of a model, as its options name them."""

from collections.abc import Sequence
from typing import Any

from fairseq_sg.models.checks import layer_names
from fairseq_sg.modules import compilation
from fairseq_sg.modules.depth import DEPTH_REGISTRY, Stack
from fairseq_sg.modules.layers import DecoderLayer, EncoderLayer

#: Side -> its layer, and the options that name the mechanisms of one.
SIDES = {
    "encoder": (EncoderLayer, ("encoder_attention", "encoder_ffn", "encoder_update")),
    "decoder": (DecoderLayer, ("decoder_attention", "cross_attention", "decoder_ffn", "decoder_update")),
}


def build_layers(config: Any, side: str) -> Stack:
    """The stack of the ``encoder`` or ``decoder``, compiled in training where ``config.compile`` says so.

    A decoder without an encoder has no option ``cross_attention``, and no cross-attention.

    Raises UsageError for a wrong option.
    """
    layer, options = SIDES[side]
    steps, dim = getattr(config, f"{side}_layers"), getattr(config, f"{side}_embed_dim")
    nothing: Sequence[None] = [None] * steps
    named = [layer_names(config, option) if hasattr(config, option) else nothing for option in options]
    names = list(zip(*named, strict=True))
    stack = DEPTH_REGISTRY.build(config.depth, config, lambda step: layer(config, *names[step]), steps, dim)
    compilation.compile_in_training(stack, config.compile)
    return stack

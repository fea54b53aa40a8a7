"""Options that models share: sizes and mechanisms of encoder and decoder.

The options of the mechanisms themselves are declared beside each mechanism.
"""

from dataclasses import dataclass, field

from fairseq_sg.modules import compilation, embedding


@dataclass
class EncoderConfig:
    """Sizes and mechanisms of an encoder."""

    encoder_embed_dim: int = field(default=512, metadata={"help": "width of the encoder", "least": 1})
    encoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "hidden width of the encoder's feedforward layers", "least": 1}
    )
    encoder_attention_heads: int = field(default=8, metadata={"help": "attention heads of the encoder", "least": 1})
    encoder_layers: int = field(
        default=6,
        metadata={
            "help": "layers of the encoder; with a shared layer, how often it is applied (shared_act: at most)",
            "least": 1,
        },
    )
    encoder_attention: str = field(
        default="softmax",
        metadata={
            "help": "self-attention of the encoder, by name (docs/attention.md has the list); with --depth separate "
            "or looped also one name a layer, comma separated"
        },
    )
    encoder_ffn: str = field(
        default="dense",
        metadata={
            "help": "feedforward layer of the encoder, by name (docs/feedforward.md has the list); one name, or one a "
            "layer"
        },
    )
    encoder_update: str = field(
        default="residual",
        metadata={
            "help": "update of the encoder's layers: 'residual', 'copy_gate' (Neural Data Router), or "
            "'feedforward_only', without the attention's output; one name, or one a layer"
        },
    )


@dataclass
class CausalConfig:
    """Sizes and mechanisms of a decoder."""

    decoder_embed_dim: int = field(default=512, metadata={"help": "width of the decoder", "least": 1})
    decoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "hidden width of the decoder's feedforward layers", "least": 1}
    )
    decoder_attention_heads: int = field(default=8, metadata={"help": "attention heads of the decoder", "least": 1})
    decoder_layers: int = field(
        default=6,
        metadata={
            "help": "layers of the decoder; with a shared layer, how often it is applied (shared_act: at most)",
            "least": 1,
        },
    )
    decoder_attention: str = field(
        default="softmax", metadata={"help": "self-attention of the decoder, by name or names like the encoder's"}
    )
    decoder_ffn: str = field(
        default="dense", metadata={"help": "feedforward layer of the decoder, by name or names like the encoder's"}
    )
    decoder_update: str = field(
        default="residual", metadata={"help": "update of the decoder's layers, like the encoder's"}
    )


@dataclass
class DecoderConfig(CausalConfig):
    """Mechanisms of a decoder that reads an encoder."""

    cross_attention: str = field(
        default="softmax", metadata={"help": "attention of the decoder to the encoder, by name or names"}
    )
    untied_output: bool = field(
        default=False, metadata={"help": "a separate output matrix instead of the decoder's embedding table"}
    )


@dataclass
class StackConfig:
    """Options of every stack of layers."""

    depth: str = field(
        default="separate",
        metadata={
            "help": "'separate' layers, one 'shared' layer (universal transformer), 'shared_act', with halting, or "
            "'looped' layers, all of them applied several times"
        },
    )
    position: str | None = field(
        default=None,
        metadata={
            "help": "positions, by name (docs/attention.md has the list), on each side where not every self-attention "
            "brings its own (default: sinusoidal)"
        },
    )
    dropout: float = field(
        default=0.1,
        metadata={
            "help": "dropout after each sublayer, and the default of the other dropouts",
            "least": 0,
            "most": 1,
        },
    )
    attention_residual_dropout: float | None = field(
        default=None,
        metadata={
            "help": "dropout after each self- and cross-attention, before its residual connection (default: --dropout)",
            "least": 0,
            "most": 1,
        },
    )
    embedding_dropout: float | None = field(
        default=None,
        metadata={
            "help": "dropout on the embeddings (default: --dropout; in sg_transformer and sg_encoder 0 for images, and "
            "for words without absolute positions)",
            "least": 0,
            "most": 1,
        },
    )
    norm: str = field(
        default="layer",
        metadata={"help": "norm in residual connections, in copy gates, and after the last layer: 'layer', or 'none'"},
    )
    pre_norm: bool = field(default=False, metadata={"help": "norm before each sublayer instead of after it"})
    no_final_norm: bool = field(default=False, metadata={"help": "with --pre-norm: no norm after the last layer"})
    compile: str = field(
        default="none",
        metadata={
            "help": "torch.compile of the layers in training, for models so small that a GPU waits for Python; "
            "reduce-overhead and max-autotune have CUDA graphs (docs/speed.md)",
            "choices": compilation.MODES,
        },
    )


@dataclass
class ShellConfig(StackConfig):
    """Options that both sides share."""

    embedding_scaling: str = field(
        default="auto",
        metadata={
            "help": "scaling of token and position embeddings: token_up (TEU), none (NoS), position_down (PED); "
            "'auto' is position_down, and the reference's unscaled Glorot start on a side without absolute positions",
            "choices": embedding.CHOICES,
        },
    )

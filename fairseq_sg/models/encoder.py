"""Encoders: an embedding, of tokens or of an image and a question, and a stack of layers."""

from typing import Any

from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from fairseq_sg.models.checks import layer_names
from fairseq_sg.models.layers import build_layers
from fairseq_sg.modules import compilation
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Context
from fairseq_sg.modules.bits import BitEmbedding
from fairseq_sg.modules.cpu.packing import packed, packing_for_training, unpacked
from fairseq_sg.modules.embedding import TokenEmbedding
from fairseq_sg.modules.feature_maps import FeatureMap
from fairseq_sg.modules.norm import final_norm_of
from fairseq_sg.modules.patches import PatchEmbedding
from fairseq_sg.modules.position import EmbeddedPosition, Position, build_embedded_position, build_indices


def side_positions(config, side: str) -> EmbeddedPosition:
    """The positions to add to embeddings of the ``encoder`` or ``decoder``; none where all its attentions bring their
    own.
    """
    kinds = [ATTENTION_REGISTRY.find(name) for name in layer_names(config, f"{side}_attention")]
    name = "none" if all(kind.brings_position for kind in kinds) else (config.position or "sinusoidal")
    return build_embedded_position(name, getattr(config, f"{side}_embed_dim"), config)


def side_embedding(config, side: str, dictionary, bits: Tensor | None) -> TokenEmbedding:
    """The embedding of the ``encoder`` or ``decoder``; with ``bits`` (V, bits) of the words, a linear map of them."""
    positions = side_positions(config, side)
    dropout = config.embedding_dropout
    if dropout is None:
        dropout = 0.0 if positions.gives == "nothing" else config.dropout
    return TokenEmbedding(
        len(dictionary),
        getattr(config, f"{side}_embed_dim"),
        dictionary.pad(),
        scaling=config.embedding_scaling,
        positions=positions,
        dropout=dropout,
        tokens=None if bits is None else BitEmbedding(bits, getattr(config, f"{side}_embed_dim")),
    )


def needs_sequences(stack: nn.Module) -> bool:
    """Whether a layer needs to know which tokens belong to one sentence; packing loses that."""
    return any(getattr(module, "by_sequence", False) for module in stack.modules())


def max_length(*modules: nn.Module | None) -> int:
    """Length of the longest sequence for which all positions and feature maps in some modules are defined, or 10⁹."""
    parts = (part for module in modules if module is not None for part in module.modules())
    limits = (part.longest for part in parts if isinstance(part, (Position, FeatureMap)))
    return min((limit for limit in limits if limit is not None), default=int(1e9))


class StackedEncoder(FairseqEncoder):
    """An embedding and a stack of encoder layers; with ``--pre-norm``, a last norm. A subclass has ``forward``.

    Args:
        config: a resolved configuration.
        embedding: whatever makes (B, N, C) of the encoder's inputs.
        dictionary: of tokens; None without tokens.
    """

    #: The column that a classifier reads unless ``--readout`` says.
    readout = "last"

    def __init__(self, config, embedding: nn.Module, dictionary=None):
        super().__init__(dictionary)
        self.embedding = embedding
        self.indices = build_indices(config)
        self.stack = build_layers(config, "encoder")
        self.packs = config.compile == compilation.NONE and not needs_sequences(self.stack)
        self.final_norm = final_norm_of(config, config.encoder_embed_dim)

    def encode(
        self, embedded: Tensor, padding_mask: Tensor | None, *, return_all_hiddens: bool, return_values: bool
    ) -> dict[str, Any]:
        """embedded (B, N, C), padding_mask (B, N) or None without padding -> fairseq's dict of the encoder's output.

        The dict also has ``aux_losses`` and, with ``return_values``, the Values of every application of
        self-attention under ``values``. In training, the output at padding may be zeros.
        """
        packs = padding_mask is not None and self.packs and self.training and not return_all_hiddens
        packing = packing_for_training(padding_mask) if packs else None
        context = Context(
            padding_mask=padding_mask,
            key_padding_mask=padding_mask,
            positions=None if self.indices is None else self.indices(embedded.size(1), embedded.device),
            return_values=return_values,
            packing=packing,
            key_packing=packing,
        )
        x = embedded.transpose(0, 1)  # (N, B, C)
        out = self.stack(packed(x, packing), context, keep_hidden=return_all_hiddens)
        return {
            "encoder_out": [unpacked(self.final_norm(out.x), packing)],  # (N, B, C)
            "encoder_padding_mask": [] if padding_mask is None else [padding_mask],
            "encoder_states": out.hidden_states,
            "aux_losses": out.losses,
            "values": out.values,
        }

    #: The batch dimension of the tensors under a key, where it is not the first.
    _batch_dim = {"encoder_out": 1, "encoder_states": 1}

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """Selects and orders the sentences; auxiliary losses and Values, which decoding does not use, stay."""
        return {
            key: value
            if key in ("aux_losses", "values")
            else [x.index_select(self._batch_dim.get(key, 0), new_order) for x in value]
            for key, value in encoder_out.items()
        }

    def max_positions(self) -> int:
        """The longest sequence that has positions; most kinds of them have no end, only ``--max-source-positions``."""
        return max_length(self.embedding, self.indices, self.stack)


class SGTransformerEncoder(StackedEncoder):
    """The encoder of ``sg_transformer``, for sequences of tokens."""

    def __init__(self, config, dictionary, bits: Tensor | None = None):
        super().__init__(config, side_embedding(config, "encoder", dictionary, bits), dictionary)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        return_values: bool = False,
    ) -> dict[str, Any]:
        """src_tokens (B, M), padded on either side -> see ``encode``."""
        padding_mask = src_tokens.eq(self.dictionary.pad())  # (B, M)
        embedded = self.embedding(src_tokens)  # (B, M, C)
        return self.encode(embedded, padding_mask, return_all_hiddens=return_all_hiddens, return_values=return_values)


class ImageQuestionEncoder(StackedEncoder):
    """The same layers over the patches of an image, each with the question, and a first column CLS."""

    readout = "first"

    def __init__(self, config, image_shape: tuple[int, int, int], question_bits: int):
        embedding = PatchEmbedding(
            config.encoder_embed_dim,
            image_shape=image_shape,
            question_bits=question_bits,
            pixels=config.pixels or "white",
            dropout=config.embedding_dropout or 0.0,
        )
        super().__init__(config, embedding)

    def forward(
        self, images: Tensor, questions: Tensor, return_all_hiddens: bool = False, return_values: bool = False
    ) -> dict[str, Any]:
        """images uint8 (B, H, W, C), questions (B, Q) -> see ``encode``; N = 1 + patches, without padding."""
        embedded = self.embedding(images, questions)
        return self.encode(embedded, None, return_all_hiddens=return_all_hiddens, return_values=return_values)
